// What a matmul of few rows makes its x of, on the way to shared memory: RMSNorm of rows, or the sum of an attention's splits.
#pragma once
#include "program.cuh"

#if FEW_TILES
constexpr int SQUARES_BYTES = WARPS * 8 * FEW_TILES * 4;  // of shared memory: each warp's sum of squares of each row

__device__ __forceinline__ float low(u32 pair) { return widen((u16)pair); }
__device__ __forceinline__ float high(u32 pair) { return widen((u16)(pair >> 16)); }
__device__ __forceinline__ u32 pair_of(float first, float second) { return narrow(first) | (u32)narrow(second) << 16; }

// Squares of rows, of all of the inner dimension, whichever part of it a tile has. The block meets behind it.
__device__ __forceinline__ void sum_squares(const Stage& stage, const Tensors& tensors, int first, int rows, float* squares) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int row = 0; row < rows; row++) {
    const u16* x = (const u16*)tensors.at[stage.x] + (long long)(first + row) * stage.inner;
    float sum = 0;
    for (int i = threadIdx.x * 8; i < stage.inner; i += THREADS * 8) {
      const uint4 eight = read_four(x + i);
      const u32 pairs[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
      for (int j = 0; j < 4; j++) sum += low(pairs[j]) * low(pairs[j]) + high(pairs[j]) * high(pairs[j]);
    }
    sum = sum_of_warp(sum);
    if (lane == 0) squares[warp * 8 * FEW_TILES + row] = sum;
  }
}

// Eight numbers of x from a column on; squares: the first warp's of this row.
__device__ __forceinline__ uint4 normed_eight(const Stage& stage, const Tensors& tensors, int row, int column, const float* squares) {
  float sum = 0;
#pragma unroll
  for (int warp = 0; warp < WARPS; warp++) sum += squares[warp * 8 * FEW_TILES];
  const float scale = rsqrtf(sum / stage.inner + stage.eps);
  uint4 x = read_four((const u16*)tensors.at[stage.x] + (long long)row * stage.inner + column);
  const uint4 weight = read_four((const u16*)tensors.at[stage.norm] + column);
  x.x = pair_of(low(x.x) * scale * low(weight.x), high(x.x) * scale * high(weight.x));
  x.y = pair_of(low(x.y) * scale * low(weight.y), high(x.y) * scale * high(weight.y));
  x.z = pair_of(low(x.z) * scale * low(weight.z), high(x.z) * scale * high(weight.z));
  x.w = pair_of(low(x.w) * scale * low(weight.w), high(x.w) * scale * high(weight.w));
  return x;
}

// Of an attention's splits: each part weighs as much as its softmax has divided by. Eight columns are of one head.
__device__ __forceinline__ uint4 combined_eight(const Stage& stage, const Tensors& tensors, int row, int column) {
  const int head = column / (stage.inner / stage.heads), width = stage.inner + stage.heads;
  const float* line = (const float*)tensors.at[stage.x] + (long long)row * width;
  const long long plane = (long long)stage.rows * width;
  float most = LOWEST, total = 0, y[8] = {};
#pragma unroll 4
  for (int split = 0; split < stage.parts; split++, line += plane) {
    const float sum = read_number(line + stage.inner + head), larger = fmaxf(most, sum);
    const float keep = __expf(most - larger), weight = __expf(sum - larger);
    most = larger, total = total * keep + weight;
    if (width % 4 == 0) {
      const uint4 four[2] = {read_four(line + column), read_four(line + column + 4)};
#pragma unroll
      for (int i = 0; i < 2; i++) {
        y[4 * i] = y[4 * i] * keep + weight * __uint_as_float(four[i].x);
        y[4 * i + 1] = y[4 * i + 1] * keep + weight * __uint_as_float(four[i].y);
        y[4 * i + 2] = y[4 * i + 2] * keep + weight * __uint_as_float(four[i].z);
        y[4 * i + 3] = y[4 * i + 3] * keep + weight * __uint_as_float(four[i].w);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 8; i++) y[i] = y[i] * keep + weight * read_number(line + column + i);
    }
  }
#pragma unroll
  for (int i = 0; i < 8; i++) y[i] /= total;
  return make_uint4(pair_of(y[0], y[1]), pair_of(y[2], y[3]), pair_of(y[4], y[5]), pair_of(y[6], y[7]));
}

__device__ __forceinline__ uint4 make_eight(const Stage& stage, const Tensors& tensors, int row, int column, const float* squares) {
  if (stage.prologue == NORMED) return normed_eight(stage, tensors, row, column, squares);
  if (stage.prologue == COMBINED) return combined_eight(stage, tensors, row, column);
  return read_four((const u16*)tensors.at[stage.x] + (long long)row * stage.inner + column);
}
#endif
