// A matmul that something happens to on its way to memory: the GEMM of every op's `hopper.cu`; for Hopper (sm_90a).
//
// What happens is as many instructions, or as much memory, as an SM manages in half the time of the matmul itself, so it
// has to run beside it. Two warpgroups therefore take turns (ping-pong): while one multiplies a tile of 128 x 192, the
// other finishes its own. A third warpgroup is one thread that loads. What it loads goes through one ring of stages, in
// the order of the tiles, and a warpgroup begins its matmul when the other has seen the last of its own stages.
//
// Two neighbouring SMs (a cluster) take tiles that lie one below the other, and each loads half of what both need of
// `right`, for both: without that the L2 cannot feed them.
//
// What happens to a tile is an epilogue: a struct that inherits `Epilogue` and replaces what is different of it. A kernel
// makes one of its arguments and calls `run`. The compiler makes of it what it would of the same lines in `run` itself.
//
// With the macros ONLY and ONLY_<NAME> the kernel of that name is compiled, without ONLY all of a source: a kernel takes the
// compiler seconds, and several are compiled side by side. `runtime/hopper.py` reads the names from these macros.
#pragma once
#include "tiles.cuh"

// How a block goes through its tiles, for who reads stages beside the warpgroups.
struct Schedule {
  u32 base, barriers, rank;
  int tiles, clusters, steps, across;
};

struct Epilogue {
  // Whether rows of `left`, or columns of `right`, lie next to each other in memory, and not along the inner dimension.
  static constexpr bool LEFT_ACROSS = false, RIGHT_ACROSS = false;
  static constexpr bool DOWN_FIRST = false;  // tiles below each other run at the same time, and not those beside
  static constexpr int LOADER_REGISTERS = 24, GROUP_REGISTERS = 240;  // of a thread
  static constexpr int GROUP_BUFFERS = BUFFERS;

  // Who says that a stage was read: one warpgroup of each SM of the cluster.
  __device__ __forceinline__ int readers() const { return 2; }
  // Before all tiles, by every thread of the block.
  __device__ __forceinline__ void begin(u32 base, int inner) const {}
  // By the warpgroup that loads; its first thread goes on to load.
  __device__ __forceinline__ void read_stages(const Schedule& schedule, int thread, int inner) const {}
  // A stage's part of the left operand.
  __device__ __forceinline__ void load_left(const Map* left, u32 to, u32 full, int row, int at_inner) const {
    ::load(to, left, full, at_inner, row);
  }
  // Of the right operand's columns what this SM loads for both, where rows follow the inner dimension.
  __device__ __forceinline__ void load_right(const Map* right, u32 to, u32 full, int at_inner, int column,
                                             u32 rank) const {
    load_for_both(to, right, full, at_inner, column + rank * (COLUMNS / 2));
  }
  // Of a tile: before its matmul, what the epilogue needs; after it, the epilogue. `parity` has a bit for each buffer.
  //   void load(const Place& at) const
  //   void finish(float (&sum)[2][96], const Place& at, u32& parity) const
};

constexpr int ACROSS = 64 * INNER * 2;  // bytes from 64 rows of an operand to the next 64, where they lie across

template <class Kind>
__device__ __forceinline__ void run(const Kind& epilogue, const Map* left, const Map* right, int rows, int columns,
                                    int inner) {
  constexpr bool LEFT_ACROSS = Kind::LEFT_ACROSS, RIGHT_ACROSS = Kind::RIGHT_ACROSS;
  extern __shared__ __align__(1024) char memory[];
  const u32 base = shared(memory), barriers = base + AT_BARRIERS;
  const int group = threadIdx.x / 128, thread = threadIdx.x % 128;
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      initialise(barriers + 8 * (FULL + i), 1);
      initialise(barriers + 8 * (EMPTY + i), epilogue.readers());
    }
    for (int i = 0; i < 2 * BUFFERS; i++) initialise(barriers + 8 * (LOADED + i), 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  epilogue.begin(base, inner);
  synchronise_cluster();

  const int across = (columns + COLUMNS - 1) / COLUMNS, down = (rows + 2 * ROWS - 1) / (2 * ROWS);
  const int tiles = down * across, clusters = gridDim.x / 2, steps = (inner + INNER - 1) / INNER;
  // Tiles at the same time share what is small, and take what is large from memory once.
  auto row_of = [&](int tile) { return ((Kind::DOWN_FIRST ? tile % down : tile / across) * 2 + (int)rank) * ROWS; };
  auto column_of = [&](int tile) { return (Kind::DOWN_FIRST ? tile / down : tile % across) * COLUMNS; };
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Kind::LOADER_REGISTERS));
    epilogue.read_stages(Schedule{base, barriers, rank, tiles, clusters, steps, across}, thread, inner);
    if (thread == 0) {
      int stage = 0;
      u32 parity = 1;  // of a ring that nobody has used
      for (int tile = blockIdx.x / 2; tile < tiles; tile += clusters) {
        const int row = row_of(tile), column = column_of(tile);
        for (int step = 0; step < steps; step++) {
          const u32 at = base + stage * STAGE, full = barriers + 8 * (FULL + stage);
          wait(barriers + 8 * (EMPTY + stage), parity);
          expect(full, STAGE);
          epilogue.load_left(left, at, full, row, step * INNER);
          if (RIGHT_ACROSS) {
            for (int i = 0; i < COLUMNS / 64; i++)
              load_for_both(at + LEFT + i * ACROSS + rank * (ACROSS / 2), right, full, column + 64 * i,
                            step * INNER + rank * (INNER / 2));
          } else {
            epilogue.load_right(right, at + LEFT + rank * (RIGHT / 2), full, step * INNER, column, rank);
          }
          if (++stage == STAGES) stage = 0, parity ^= 1;
        }
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Kind::GROUP_REGISTERS));
    const int mine = group - 1;
    Place at;
    at.thread = thread, at.group = mine;
    at.buffers = base + AT_BUFFERS + mine * Kind::GROUP_BUFFERS * BUFFER;
    at.sums = base + AT_SUMS + mine * 4 * CHUNK * 4;
    at.loaded = barriers + 8 * (LOADED + mine * BUFFERS);
    at.line = line(thread);
    u32 parity = 0;  // of the buffers, a bit each
    float sum[2][96];
    if (mine == 1) announce(1, 256);  // the first warpgroup may begin
    int turn = mine;
    for (int tile = blockIdx.x / 2 + mine * clusters; tile < tiles; tile += 2 * clusters, turn += 2) {
      at.row = row_of(tile), at.column = column_of(tile);
      epilogue.load(at);
      synchronise(1 + mine, 256);
      int used = turn * steps, stage = used % STAGES, previous = 0;
      u32 full_parity = used / STAGES & 1;
      for (int step = 0; step < steps; step++) {
        wait(barriers + 8 * (FULL + stage), full_parity);
        fence_wgmma();
        const u32 a = base + stage * STAGE;
        u64 left_at = describe(a, LEFT_ACROSS ? ACROSS : 16), right_at = describe(a + LEFT, RIGHT_ACROSS ? ACROSS : 16);
#pragma unroll
        for (int k = 0; k < INNER / 16; k++) {
          const int keep = step + k > 0;
          const u64 left_k = left_at + (LEFT_ACROSS ? 128 : 2) * k, right_k = right_at + (RIGHT_ACROSS ? 128 : 2) * k;
          multiply<LEFT_ACROSS, RIGHT_ACROSS>(sum[0], left_k, right_k, keep);
          multiply<LEFT_ACROSS, RIGHT_ACROSS>(sum[1], left_k + 512, right_k, keep);
        }
        commit_wgmma();
        wait_wgmma<1>();
        if (step > 0 && thread < 2) arrive(barriers + 8 * (EMPTY + previous), thread);
        previous = stage;
        if (++stage == STAGES) stage = 0, full_parity ^= 1;
      }
      if (tile + clusters < tiles) announce(1 + (mine ^ 1), 256);
      wait_wgmma<0>();
      if (thread < 2) arrive(barriers + 8 * (EMPTY + previous), thread);
      epilogue.finish(sum, at, parity);
    }
    if (thread == 0) wait_stores();
  }
  synchronise_cluster();  // the other SM may still write here
}

#define KERNEL extern "C" __global__ void __launch_bounds__(384, 1) __cluster_dims__(2, 1, 1)
#define MAP(name) const __grid_constant__ Map name
