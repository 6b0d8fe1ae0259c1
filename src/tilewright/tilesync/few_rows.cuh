// A tile of a matmul with few rows: groups of 16 rows of the weight, all rows of x.
//
// The warps divide the inner dimension, in turns of 32: a lane reads 16 bytes of two rows of the weight and multiplies them
// as they are, as in `ops/quantized_linear/few_rows.cu`. DEPTH of these reads are on their way, the first ones of the next
// group or tile among them: they do not depend on any other tile, and begin before this group's last sums and the next
// tile's waits. Between groups the warps meet once, for their sums: those of the next group are beside them.
#pragma once
#include "prologue.cuh"

#if FEW_TILES
constexpr int DEPTH = 8, SPAN = 32 * WARPS, GROUP = SPAN * DEPTH;  // of inputs: those of a step of all warps, and of DEPTH
constexpr int FEW_ROWS = 8 * FEW_TILES;
constexpr int SUMS_BYTES = WARPS * FEW_ROWS * 16 * 4;

struct Steps {
  u32 words[2][4];
};

struct FewRows {
  Steps on_the_way[DEPTH];
  int held_stage = -1, held_row = -1;  // whose x is in shared memory

  struct Weight {
    const char* rows[2];
    int begin, ends[2];  // of the inner dimension, from this lane's first input on
    __device__ __forceinline__ void read(Steps& to, int step) const {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        if (begin + step * SPAN < ends[i]) {
          read_once(rows[i] + (long long)step * SPAN * 2, to.words[i]);
        } else {
#pragma unroll
          for (int word = 0; word < 4; word++) to.words[i][word] = 0;
        }
      }
    }
  };

  // Columns, or pairs of them: of a group, and of a tile.
  __device__ __forceinline__ static int group_columns(const Stage& stage) { return stage.gated ? 8 : 16; }
  __device__ __forceinline__ static int columns_of(const Stage& stage, const Task& task) {
    return min(stage.tile_columns, sum_columns(stage) - task.column * stage.tile_columns);
  }
  __device__ __forceinline__ Weight weight_of(const Stage& stage, const Task& task, const Tensors& tensors, int group) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, columns = columns_of(stage, task);
    Weight weight;
    weight.begin = split_begin(stage, task.split) + warp * 32 + lane % 4 * 8;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int column = group * group_columns(stage) + lane / 4 + (stage.gated ? 0 : 8 * i);
      const int row = task.column * stage.tile_columns + min(column, columns - 1);
      weight.rows[i] = (const char*)(weight_row(stage, tensors, row, stage.gated ? i : 0) + weight.begin);
      weight.ends[i] = column < columns ? split_begin(stage, task.split + 1) : 0;
    }
    return weight;
  }

  __device__ __forceinline__ void begin(const Stage& stage, const Task& task, const Tensors& tensors) {
    const Weight weight = weight_of(stage, task, tensors, 0);
#pragma unroll
    for (int i = 0; i < DEPTH; i++) weight.read(on_the_way[i], i);
  }

  __device__ __forceinline__ void read_x(const Stage& stage, const Task& task, const Tensors& tensors, char* x, int from,
                                         int inputs, int x_bytes, const float* squares) const {
    const int first = task.row * stage.tile_rows, rows = min(stage.tile_rows, stage.rows - first);
    const int end = split_begin(stage, task.split + 1), eights = inputs / 8;
    for (int i = threadIdx.x; i < rows * eights; i += THREADS) {
      const int row = i / eights, at = i % eights * 8;
      uint4 eight = make_uint4(0, 0, 0, 0);
      if (from + at < end) eight = make_eight(stage, tensors, first + row, from + at, squares + row);
      *(uint4*)(x + row * x_bytes + at * 2) = eight;
    }
  }

  // `next` is a task of this kind, or null.
  __device__ __forceinline__ void run(const Stage& stage, const Task& task, const Stage* next_stage, const Task* next,
                                      const Tensors& tensors, char* memory) {
    const int columns = columns_of(stage, task), each = group_columns(stage);
    for (int group = 0; group * each < columns; group++) {
      if ((group + 1) * each < columns)
        run_group(stage, task, group, &stage, &task, group + 1, tensors, memory);
      else
        run_group(stage, task, group, next_stage, next, 0, tensors, memory);
      held_stage = task.stage, held_row = task.row;
    }
  }
  __device__ __forceinline__ void run_group(const Stage& stage, const Task& task, int group, const Stage* next_stage,
                                            const Task* next, int next_group, const Tensors& tensors, char* memory) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int first = task.row * stage.tile_rows, rows = min(stage.tile_rows, stage.rows - first);
    const int begin = split_begin(stage, task.split), inner = split_begin(stage, task.split + 1) - begin;
    float* squares = (float*)(memory + 2 * SUMS_BYTES);
    char* x = memory + 2 * SUMS_BYTES + SQUARES_BYTES;
    const int groups = max(1, (X_BYTES / rows / 2 - 32) / GROUP);  // that fit in shared memory
    const int panel = min(groups, (inner + GROUP - 1) / GROUP) * GROUP, x_bytes = panel * 2 + 64;
    const Weight weight = weight_of(stage, task, tensors, group);
    Weight following = weight;
    if (next) following = weight_of(*next_stage, *next, tensors, next_group);
    float sums[FEW_TILES][4] = {};
    const bool held = panel >= inner && held_stage == task.stage && held_row == task.row && (stage.splits == 1 || group > 0);
    if (stage.prologue == NORMED && group == 0 && !held) sum_squares(stage, tensors, first, rows, squares);
    for (int at = 0; at < inner; at += panel) {
      if (!held) {
        __syncthreads();  // the panel before was read
        read_x(stage, task, tensors, x, begin + at, panel, x_bytes, squares);
        __syncthreads();
      }
      for (int step = at / SPAN; step * SPAN < min(at + panel, inner); step += DEPTH) {
        const bool is_last = (step + DEPTH) * SPAN >= inner;
#pragma unroll
        for (int i = 0; i < DEPTH; i++) {
          if ((step + i) * SPAN < inner) {
#pragma unroll
            for (int tile = 0; tile < FEW_TILES; tile++) {
              uint4 b = make_uint4(0, 0, 0, 0);
              if (tile * 8 + lane / 4 < rows)
                b = *(const uint4*)(x + (tile * 8 + lane / 4) * x_bytes + ((step + i) * SPAN - at + warp * 32 + lane % 4 * 8) * 2);
              const Steps& a = on_the_way[i];
              const u32 low[4] = {a.words[0][0], a.words[1][0], a.words[0][1], a.words[1][1]};
              const u32 high[4] = {a.words[0][2], a.words[1][2], a.words[0][3], a.words[1][3]};
              multiply(sums[tile], low, b.x, b.y);
              multiply(sums[tile], high, b.z, b.w);
            }
          }
          if (!is_last)
            weight.read(on_the_way[i], step + i + DEPTH);
          else if (next)
            following.read(on_the_way[i], i);
        }
      }
    }
    if (inner == 0 && next_group == 0 && next) this->begin(*next_stage, *next, tensors);

    float* totals = (float*)(memory + group % 2 * SUMS_BYTES);
#pragma unroll
    for (int tile = 0; tile < FEW_TILES; tile++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        totals[(warp * FEW_ROWS + tile * 8 + lane % 4 * 2 + i % 2) * 16 + lane / 4 + i / 2 * 8] = sums[tile][i];
    __syncthreads();
    const Epilogue epilogue{stage, tensors, task.split};
    const int done = group * group_columns(stage), columns = min(group_columns(stage), columns_of(stage, task) - done);
    for (int i = threadIdx.x; i < rows * columns; i += THREADS) {
      const int row = i / columns, column = i % columns;
      float sum = 0, up = 0;
#pragma unroll
      for (int other = 0; other < WARPS; other++) {
        const float* of_warp = totals + (other * FEW_ROWS + row) * 16;
        sum += of_warp[column];
        if (stage.gated) up += of_warp[column + 8];
      }
      epilogue.write(first + row, task.column * stage.tile_columns + done + column, sum, up);
    }
  }
};
#endif
