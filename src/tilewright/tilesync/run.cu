// Runs the tiles of a program: all stages in one launch, which wait for each other by semaphores, or a part in each.
// Launches of one stage each wait for each other, too, where each has a stream of its own: see `tilewright_tilesync_begin`.
//
// Blocks take tiles by a ticket, in the program's order, one ahead of what they compute. A tile waits only for tiles of
// earlier tickets, and a block computes its own in their order. So the first tile that is not finished belongs to a block
// that computes it, and waits for nothing: there is no deadlock, however few blocks are resident.
//
// Nothing is cleared between launches. Semaphores only grow, by the same amount in each launch, and the epoch counts
// launches; the last block to leave begins the next. A wait that takes longer than `patience` says so in `failure`; then
// all blocks take what tickets are left, compute nothing, and the last one sets everything to 0 and tells the host in
// `report`: the next launch is sound.
#include "attention.cuh"
#include "few_rows.cuh"
#include "many_rows.cuh"
#include "small_stages.cuh"
#if HAS_USER_STAGES
#include "user_stages.cuh"
#endif

enum Kind { FEW, MANY, COMBINE, NORM, ATTEND, USER };

struct Head {  // in shared memory
  u32 epoch, ticket, waited, left;
};

struct Blocks {
  const Program& program;
  Head* head;
  char* memory;
  u32 epoch = 0;
  int turn = 0;
  bool stopped = false;

  // The next task of this block; `count` or more where there is none. By one thread.
  __device__ __forceinline__ u32 next_task() {
    if (program.flags & STREAMS) return take(&cell(program.cell).ticket) - epoch * (u32)(program.count + gridDim.x);
    if (program.flags & WAITS) return take(&program.control->ticket) - epoch * (u32)(program.count + gridDim.x);
    return blockIdx.x + gridDim.x * turn++;
  }
  __device__ __forceinline__ u32* semaphores() const { return (u32*)(program.control + 1); }
  __device__ __forceinline__ Cell& cell(int stage) const {
    return *(Cell*)(semaphores() + (long long)(program.semaphores + stage) * APART);
  }

  // By one thread: false if it takes too long, here or elsewhere.
  __device__ __forceinline__ bool wait_at(const u32* at, const Wait& it, u32 number) const {
    const u32 wanted = epoch * it.total + it.value;
    u64 begin = 0;
    for (u32 polls = 0; (int)(acquire(at) - wanted) < 0; polls++) {
      if (polls % 64 != 63) continue;
      pause();
      if (acquire(&program.control->failed)) return false;
      const u64 now = nanoseconds();
      if (begin == 0) begin = now;
      if (now - begin < program.patience) continue;
      if (claim(&program.failure->is_there)) {
        Failure& failure = *program.failure;
        failure.task = number, failure.semaphore = it.semaphore, failure.wanted = it.value;
        failure.found = acquire(at) - epoch * it.total;
      }
      release_set(&program.control->failed, 1);
      return false;
    }
    return true;
  }
  // By the first warp, whose lanes each look at other semaphores.
  __device__ __forceinline__ bool wait(u32 number, const Task& task) const {
    bool over = true;
    for (int i = threadIdx.x; over && i < task.waits; i += 32) {
      const Wait& it = program.waits[task.first_wait + i];
      over = wait_at(semaphores() + (long long)it.semaphore * APART, it, number);
    }
    return all_of_warp(over);
  }
  __device__ __forceinline__ void post(const Task& task) const {
    for (int i = 0; i < task.posts; i++) {
      const Post& it = program.posts[task.first_post + i];
      release_add(semaphores() + (long long)it.semaphore * APART, it.amount);
    }
  }
  // The last block begins the next epoch, or, after a failure, the first.
  __device__ __forceinline__ void leave() {
    Control& control = *program.control;
    __syncthreads();
    if (threadIdx.x == 0) {
      const u32 blocks = program.flags & STREAMS ? program.blocks : gridDim.x;
      const bool is_last = take_last(&control.finished) + 1 == (epoch + 1) * blocks;
      head->left = is_last ? (acquire(&control.failed) ? 2 : 1) : 0;
    }
    __syncthreads();
    if (head->left == 2)
      for (int i = threadIdx.x; i < program.semaphores + program.cells; i += THREADS) {
        u32* at = semaphores() + (long long)i * APART;
        at[0] = at[1] = 0;  // of a cell, both
      }
    __syncthreads();
    if (threadIdx.x == 0 && head->left == 2) {
      control.ticket = control.finished = control.failed = 0, control.epoch = 0;
      Failure failure = *program.failure;
      failure.is_there = 0, *program.failure = failure;
      *program.report = failure;
      tell_host(&program.report->is_there);
    }
    if (threadIdx.x == 0 && head->left == 1) control.epoch = epoch + 1;
  }
};

// In front of the launch of a stage on a stream of its own: ends when all blocks of the stage before have begun. `cell` and
// `blocks` are that stage's, `first` is the first task of the stage that follows. So no block is there before all of the
// stages that it waits for are: a block that waits, waits for blocks that run, and none of these lacks its place. The launch
// is behind that stage's start, as the driver tells it, which may be before its last block.
extern "C" __global__ void __launch_bounds__(32) tilewright_tilesync_begin(const __grid_constant__ Program program) {
  if (threadIdx.x != 0) return;
  const Blocks blocks{program, nullptr, nullptr, acquire(&program.control->epoch)};
  const u32 all = program.blocks;
  blocks.wait_at(&blocks.cell(program.cell).begun, Wait{(u32)(program.semaphores + program.cell), all, all, 0}, program.first);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
tilewright_tilesync_run(const __grid_constant__ Program program, const __grid_constant__ Tensors tensors) {
  char* whole = block_memory();
  Blocks blocks{program, (Head*)whole, whole + HEAD_BYTES};
#if FEW_TILES
  FewRows few;
  bool few_begun = false;
#endif
#if MANY_ROWS
  ManyRows many;
#endif
  if (program.flags & DEPENDENT) let_next_kernel_begin();
  if (threadIdx.x == 0) {
    if (program.flags & WAITS) blocks.epoch = acquire(&program.control->epoch);
    if (program.flags & STREAMS) release_add(&blocks.cell(program.cell).begun, 1);
    blocks.head->epoch = blocks.epoch;
    blocks.head->ticket = blocks.next_task();
  }
  __syncthreads();
  blocks.epoch = blocks.head->epoch;
  u32 ticket = blocks.head->ticket;
  __syncthreads();  // all have read it
  bool is_first = true;
  while (ticket < (u32)program.count) {
    const u32 number = program.first + ticket;
    const Task task = program.tasks[number];
    const Stage& stage = program.stages[task.stage];
    const int kind = stage.kind;
    u64 start = 0;
    if (program.flags & TIMES) start = nanoseconds();
    if (!blocks.stopped) {
#if FEW_TILES
      if (kind == FEW && !few_begun) few.begin(stage, task, tensors);
#endif
#if MANY_ROWS
      if (kind == MANY) many.begin(stage, task, tensors, blocks.memory);
#endif
#if ATTENTION
      if (kind == ATTEND) Attend(stage, task, tensors, blocks.memory).begin();
#endif
    }
    if (threadIdx.x < 32) {
      const bool over = !blocks.stopped && (!(program.flags & WAITS) || blocks.wait(number, task));
      if (threadIdx.x == 0) blocks.head->waited = over, blocks.head->ticket = blocks.next_task();
    }
    if (is_first && program.flags & DEPENDENT) wait_for_previous_kernel();
    is_first = false;
    __syncthreads();
    ticket = blocks.head->ticket;
    blocks.stopped = !blocks.head->waited;
    u64 ready = 0;
    if (program.flags & TIMES) ready = nanoseconds();
    if (!blocks.stopped) {
      const Task* next = ticket < (u32)program.count ? program.tasks + program.first + ticket : nullptr;
      const Stage* next_stage = next ? program.stages + next->stage : nullptr;
      if (next && next_stage->kind != kind) next = nullptr;
#if FEW_TILES
      if (kind == FEW) few.run(stage, task, next_stage, next, tensors, blocks.memory);
      few_begun = kind == FEW && next;
      if (kind != FEW)
#endif
      {
#if MANY_ROWS
        if (kind == MANY) many.run(stage, task, next_stage, next, tensors, blocks.memory);
#endif
#if COMBINES
        if (kind == COMBINE) combine(stage, task, tensors);
#endif
#if NORMS
        if (kind == NORM) norm(stage, task, tensors);
#endif
#if ATTENTION
        if (kind == ATTEND) Attend(stage, task, tensors, blocks.memory).run();
#endif
#if HAS_USER_STAGES
        if (kind >= USER) {
          UserTile tile{task.row * stage.tile_rows, task.column * stage.tile_columns};
          tile.rows = min(stage.tile_rows, stage.rows - tile.row), tile.columns = min(stage.tile_columns, stage.columns - tile.column);
          tile.width = stage.columns, tile.output = tensors.at[stage.y], tile.memory = blocks.memory;
          for (int i = 0; i < 5; i++) tile.inputs[i] = stage.more[i] >= 0 ? tensors.at[stage.more[i]] : nullptr;
          compute_user_tile(kind - USER, tile);
        }
#endif
#if FEW_TILES
        few = FewRows();  // whose registers are free for the other kinds
#endif
      }
    }
    __syncthreads();  // all have written what the tile computes, and read what is shared
    if (threadIdx.x == 0) {
      if (!blocks.stopped && program.flags & WAITS) blocks.post(task);
      if (program.flags & TIMES) program.times[number] = Time{processor(), 0, start, ready, nanoseconds()};
    }
  }
  if (program.flags & WAITS) blocks.leave();
}
