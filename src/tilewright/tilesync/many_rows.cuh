// A tile of a matmul or convolution with many rows: ROWS x COLUMNS (of the weight), by 64 of the inner dimension.
//
// Both operands come through a ring of STAGES in shared memory. The weight's part of a stage is on its way before the tile
// waits for what x depends on, and that of the next tile before this one is finished. Gated, groups of 8 columns of the
// gate and of the other half take turns, so that a thread has both of a number.
#pragma once
#include "program.cuh"

#if MANY_ROWS
constexpr int ROWS = MANY_ROWS, COLUMNS = MANY_COLUMNS, INNER = 64, STAGES = 4;
constexpr int LINE = INNER * 2 + 16;  // bytes: rows begin in other banks
constexpr int LEFT_BYTES = ROWS * LINE, STAGE_BYTES = LEFT_BYTES + COLUMNS * LINE;
constexpr int WARP_ROWS = ROWS / 2, WARP_COLUMNS = COLUMNS / 4;
constexpr int TOTALS_LINE = COLUMNS + 8;  // numbers
static_assert(WARP_ROWS % 16 == 0 && WARP_COLUMNS % 16 == 0 && WARPS == 8, "warps are 2 x 4");

// x of a tile, or, of a convolution, the pixels beside its own: each thread copies the same 16 bytes of every step's lines.
// Steps follow each other, so the tap of the kernel and the channel that they are at go on without a division.
struct Left {
  static constexpr int COPIES = ROWS * 8 / THREADS, APART_ROWS = THREADS / 8;
  const Stage& stage;
  const u16* x;
  int first, at, end, channel, down, right;  // of a tap: lines and columns from the middle
  int line[COPIES], column[COPIES];          // of a pixel in its image

  __device__ __forceinline__ Left(const Stage& stage, const Task& task, const Tensors& tensors)
      : stage(stage), x((const u16*)tensors.at[stage.x]) {
    first = task.row * stage.tile_rows + threadIdx.x / 8;
    at = split_begin(stage, task.split) + threadIdx.x % 8 * 8, end = split_begin(stage, task.split + 1);
    channel = down = right = 0;
    if (!stage.kernel) return;
    const int tap = at / stage.channels;
    channel = at % stage.channels, down = tap / stage.kernel - stage.kernel / 2, right = tap % stage.kernel - stage.kernel / 2;
#pragma unroll
    for (int i = 0; i < COPIES; i++) {
      const int row = first + i * APART_ROWS;
      line[i] = row / stage.width % stage.height, column[i] = row % stage.width;
    }
  }
  __device__ __forceinline__ void load(char* to) {
#pragma unroll
    for (int i = 0; i < COPIES; i++) {
      const int row = first + i * APART_ROWS;
      bool there = row < stage.rows && at < end;
      long long from = (long long)row * stage.inner + at;
      if (stage.kernel) {
        there = there && (u32)(line[i] + down) < (u32)stage.height && (u32)(column[i] + right) < (u32)stage.width;
        from = (long long)(row + down * stage.width + right) * stage.channels + channel;
      }
      copy_sixteen(to + (threadIdx.x / 8 + i * APART_ROWS) * LINE + threadIdx.x % 8 * 16, x + (there ? from : 0), there);
    }
    at += INNER;
    if (!stage.kernel) return;
    for (channel += INNER; channel >= stage.channels; channel -= stage.channels)
      if (++right > stage.kernel / 2) right = -(stage.kernel / 2), down++;
  }
};

struct ManyRows {
  int slot = 0;           // of the ring, where the tile's first step is
  bool begun = false;     // whether its first weights are on their way

  __device__ __forceinline__ static void load_weight(const Stage& stage, const Task& task, const Tensors& tensors, char* to,
                                                     int step) {
    const int inner = split_begin(stage, task.split) + step * INNER, end = split_begin(stage, task.split + 1);
    for (int i = threadIdx.x; i < COLUMNS * 8; i += THREADS) {
      const int line = i / 8, at = inner + i % 8 * 8;
      const int row = task.column * stage.tile_columns + (stage.gated ? line / 16 * 8 + line % 8 : line);
      const bool there = row < sum_columns(stage) && at < end;
      copy_sixteen(to + LEFT_BYTES + line * LINE + i % 8 * 16,
                   weight_row(stage, tensors, there ? row : 0, stage.gated ? line / 8 % 2 : 0, stage.inner * 2LL) +
                       (there ? at * 2 : 0), there);
    }
  }
  __device__ __forceinline__ static int steps_of(const Stage& stage, const Task& task) {
    return (split_begin(stage, task.split + 1) - split_begin(stage, task.split) + INNER - 1) / INNER;
  }

  // The weights of the first steps.
  __device__ __forceinline__ void begin(const Stage& stage, const Task& task, const Tensors& tensors, char* memory) {
    if (begun) return;
    const int steps = steps_of(stage, task);
    for (int i = 0; i < min(STAGES - 1, steps); i++)
      load_weight(stage, task, tensors, memory + (slot + i) % STAGES * STAGE_BYTES, i);
    begun = true;
  }

  __device__ __forceinline__ void run(const Stage& stage, const Task& task, const Stage* next_stage, const Task* next,
                                      const Tensors& tensors, char* memory) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, steps = steps_of(stage, task);
    const int warp_row = warp / 4 * WARP_ROWS, warp_column = warp % 4 * WARP_COLUMNS;
    float sums[WARP_ROWS / 16][WARP_COLUMNS / 8][4] = {};
    Left left(stage, task, tensors);
    const int next_steps = next ? steps_of(*next_stage, *next) : 0;
    for (int i = 0; i < STAGES - 1; i++) {
      if (i < steps) left.load(memory + (slot + i) % STAGES * STAGE_BYTES);
      commit_copies();
    }
    for (int step = 0; step < steps; step++) {
      wait_copies<STAGES - 2>();
      __syncthreads();  // all have copied this step, and read the one whose place is filled now
      const int later = step + STAGES - 1;
      char* free = memory + (slot + later) % STAGES * STAGE_BYTES;
      if (later < steps) {
        load_weight(stage, task, tensors, free, later);
        left.load(free);
      } else if (later - steps < next_steps) {
        load_weight(*next_stage, *next, tensors, free, later - steps);
      }
      commit_copies();
      const char* lines = memory + (slot + step) % STAGES * STAGE_BYTES;
      const char* columns = lines + LEFT_BYTES;
#pragma unroll
      for (int k = 0; k < INNER / 16; k++) {
        u32 a[WARP_ROWS / 16][4];
#pragma unroll
        for (int i = 0; i < WARP_ROWS / 16; i++)
          read_matrices(lines + (warp_row + i * 16 + lane % 16) * LINE + k * 32 + lane / 16 * 16, a[i]);
#pragma unroll
        for (int j = 0; j < WARP_COLUMNS / 16; j++) {
          u32 b[4];
          read_matrices(columns + (warp_column + j * 16 + lane / 16 * 8 + lane % 8) * LINE + k * 32 + lane / 8 % 2 * 16, b);
#pragma unroll
          for (int i = 0; i < WARP_ROWS / 16; i++) {
            multiply(sums[i][2 * j], a[i], b[0], b[1]);
            multiply(sums[i][2 * j + 1], a[i], b[2], b[3]);
          }
        }
      }
    }
    // Of the next tile as many steps are on their way as this one had room for.
    slot = (slot + steps) % STAGES;
    begun = false;
    if (next) {
      for (int i = 0; i < min(STAGES - 1 - steps, next_steps); i++)  // to places that this tile left empty
        load_weight(*next_stage, *next, tensors, memory + (slot + i) % STAGES * STAGE_BYTES, i);
      begun = true;
    }
    // Through shared memory, so that what lies side by side is written by threads side by side.
    float* totals = (float*)(memory + STAGES * STAGE_BYTES);
#pragma unroll
    for (int i = 0; i < WARP_ROWS / 16; i++)
#pragma unroll
      for (int j = 0; j < WARP_COLUMNS / 8; j++)
#pragma unroll
        for (int part = 0; part < 4; part++)
          totals[(warp_row + i * 16 + lane / 4 + part / 2 * 8) * TOTALS_LINE + warp_column + j * 8 + lane % 4 * 2 + part % 2] =
              sums[i][j][part];
    __syncthreads();
    const Epilogue epilogue{stage, tensors, task.split};
    for (int i = threadIdx.x; i < stage.tile_rows * stage.tile_columns; i += THREADS) {
      const int row = i / stage.tile_columns, column = i % stage.tile_columns;
      const float* at = totals + row * TOTALS_LINE + (stage.gated ? column / 8 * 16 + column % 8 : column);
      epilogue.write(task.row * stage.tile_rows + row, task.column * stage.tile_columns + column, at[0], at[8]);
    }
  }
};
#endif
