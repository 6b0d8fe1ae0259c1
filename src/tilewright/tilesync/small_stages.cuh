// Tiles of stages that no matmul dominates: sums of splits and functions of numbers, norms of rows.
#pragma once
#include "program.cuh"

#if COMBINES
// y = activation(sum of the splits + bias) * up + residual. What is summed is float32, or, of one split, 16 bits.
__device__ __forceinline__ void combine(const Stage& stage, const Task& task, const Tensors& tensors) {
  const int wide = stage.more[0], halves = stage.gated && stage.weight < 0 ? 2 : 1;  // gate and up beside each other
  const long long width = (long long)stage.columns * halves, plane = stage.rows * width;
  Stage plain = stage;
  plain.splits = 1;
  const Epilogue epilogue{plain, tensors, 0};
  for (int i = threadIdx.x; i < stage.tile_rows * stage.tile_columns; i += THREADS) {
    const int row = task.row * stage.tile_rows + i / stage.tile_columns;
    const int column = task.column * stage.tile_columns + i % stage.tile_columns;
    if (row >= stage.rows || column >= stage.columns) continue;
    const long long at = row * width + column;
    float sum = 0, up = 1;
    if (wide) {
      const float* sums = (const float*)tensors.at[stage.x];
      for (int split = 0; split < stage.splits; split++) sum += read_number(sums + split * plane + at);
      if (halves == 2) {
        up = 0;
        for (int split = 0; split < stage.splits; split++) up += read_number(sums + split * plane + at + stage.columns);
      }
    } else {
      sum = widen(read_number((const u16*)tensors.at[stage.x] + at));
      if (stage.weight >= 0) up = widen(read_number((const u16*)tensors.at[stage.weight] + at));
    }
    epilogue.write(row, column, sum, up);
  }
}
#endif

#if NORMS
// RMSNorm, or LayerNorm where there is a bias: a warp a row.
__device__ __forceinline__ void norm(const Stage& stage, const Task& task, const Tensors& tensors) {
  const int lane = threadIdx.x % 32, columns = stage.columns;
  const u16* weight = (const u16*)tensors.at[stage.weight];
  for (int row = task.row * stage.tile_rows + threadIdx.x / 32; row < min((task.row + 1) * stage.tile_rows, stage.rows);
       row += WARPS) {
    const u16* x = (const u16*)tensors.at[stage.x] + (long long)row * columns;
    float mean = 0, squares = 0;
    if (stage.bias >= 0) {
      for (int i = lane; i < columns; i += 32) mean += widen(read_number(x + i));
      mean = sum_of_warp(mean) / columns;
    }
    for (int i = lane; i < columns; i += 32) {
      const float from_mean = widen(read_number(x + i)) - mean;
      squares += from_mean * from_mean;
    }
    const float scale = rsqrtf(sum_of_warp(squares) / columns + stage.eps);
    for (int i = lane; i < columns; i += 32) {
      float y = (widen(read_number(x + i)) - mean) * scale * widen(weight[i]);
      if (stage.bias >= 0) y += widen(((const u16*)tensors.at[stage.bias])[i]);
      write_number((u16*)tensors.at[stage.y] + (long long)row * columns + i, narrow(y));
    }
  }
}
#endif
