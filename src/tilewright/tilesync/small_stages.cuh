// Tiles of stages that no matmul dominates: sums of splits and functions of numbers, norms of rows, attention of few rows.
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

#if ATTENTION
// Attention of a tile's rows of one head, a row at a time: the warps divide the context, each keeps its largest score, its
// sum and its part of the output, and in the end all are added up. A head has up to 256 numbers, 8 of each lane.
__device__ __forceinline__ void attend(const Stage& stage, const Task& task, const Tensors& tensors, char* memory) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, size = stage.channels, head = task.column;
  const int context = stage.inner, shared_head = head / stage.kernel, causal = stage.more[0];
  const int strides[3] = {stage.height, stage.width, stage.gated};  // of rows of q, k and v
  const u16* q = (const u16*)tensors.at[stage.x] + stage.more[1] + head * size;
  const u16* k = (const u16*)tensors.at[stage.weight] + stage.more[2] + (long long)shared_head * stage.more[4];
  const u16* v = (const u16*)tensors.at[stage.bias] + stage.more[3] + (long long)shared_head * stage.more[4];
  // While decoding: keys and values of the rows themselves, behind those of the cache that are there.
  const bool grows = stage.extra[0] >= 0;
  const int filled = grows ? min(context, *(const int*)tensors.at[stage.extra[0]]) : 0;
  const u16* fresh = (const u16*)tensors.at[stage.x] + shared_head * size;
  float* parts = (float*)memory;  // of each warp: largest, sum, output
  for (int row = task.row * stage.tile_rows; row < min((task.row + 1) * stage.tile_rows, stage.rows); row++) {
    const int seen = grows ? filled + row + 1 : causal ? min(context, row + 1 + context - stage.rows) : context;
    float query[8], output[8] = {}, largest = LOWEST, total = 0;
#pragma unroll
    for (int i = 0; i < 8; i++)
      query[i] = i * 32 + lane < size ? widen(read_number(q + (long long)row * strides[0] + i * 32 + lane)) * stage.eps : 0;
    for (int at = warp; at < seen; at += WARPS) {
      const bool is_fresh = grows && at >= filled;
      const u16* beside = fresh + (long long)(at - filled) * strides[0];
      const u16* key = is_fresh ? beside + stage.extra[1] : k + (long long)at * strides[1];
      const u16* value = is_fresh ? beside + stage.extra[2] : v + (long long)at * strides[2];
      float score = 0;
#pragma unroll
      for (int i = 0; i < 8; i++)
        if (i * 32 + lane < size) score += query[i] * widen(read_number(key + i * 32 + lane));
      score = sum_of_warp(score);
      const float most = fmaxf(largest, score), keep = __expf(largest - most), weight = __expf(score - most);
      largest = most, total = total * keep + weight;
#pragma unroll
      for (int i = 0; i < 8; i++)
        if (i * 32 + lane < size)
          output[i] = output[i] * keep + weight * widen(read_number(value + i * 32 + lane));
    }
    float* mine = parts + warp * 258;
#pragma unroll
    for (int i = 0; i < 8; i++) mine[2 + i * 32 + lane] = output[i];
    if (lane == 0) mine[0] = largest, mine[1] = total;
    __syncthreads();
    float most = LOWEST, sum = 0;
    for (int other = 0; other < WARPS; other++) most = fmaxf(most, parts[other * 258]);
    for (int other = 0; other < WARPS; other++) sum += parts[other * 258 + 1] * __expf(parts[other * 258] - most);
    for (int i = threadIdx.x; i < size; i += THREADS) {
      float y = 0;
      for (int other = 0; other < WARPS; other++) y += parts[other * 258 + 2 + i] * __expf(parts[other * 258] - most);
      write_number((u16*)tensors.at[stage.y] + (long long)row * stage.columns + head * size + i, narrow(y / sum));
    }
    __syncthreads();
  }
}
#endif
