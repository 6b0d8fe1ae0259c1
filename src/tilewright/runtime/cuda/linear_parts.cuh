// The matmuls of `linear_parts` on their way to memory, and in backward the sums of what it reads.
#pragma once
#include "tiles.cuh"

// What the matmul is, with the bias or without, some columns at a time.
template <bool BIAS>
__device__ __forceinline__ void finish_plain(float (&sum)[2][96], const Place& at, const Map* out_map) {
  const u32 line = narrow_line(at.thread);
#pragma unroll
  for (int chunk = 0; chunk < COLUMNS / NARROW; chunk++) {
    const int buffer = chunk % 2;
    if (at.thread == 0) asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
    synchronise(3 + at.group, 128);
#pragma unroll
    for (int pair = 0; pair < 2; pair++) {
      float2 bias[2] = {make_float2(0.0f, 0.0f), make_float2(0.0f, 0.0f)};
      if (BIAS)
#pragma unroll
        for (int k = 0; k < 2; k++)
          bias[k] = read_shared(at.sums + (chunk * NARROW + (2 * pair + k) * 8 + at.thread % 4 * 2) * 4);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const float* x = &sum[half][(chunk * 4 + pair * 2) * 4];
        u32 packed[4];
#pragma unroll
        for (int k = 0; k < 4; k++)  // column block k / 2, rows 8 further down where k is odd
          packed[k] = BIAS ? pack(x[2 * k] + bias[k / 2].x, x[2 * k + 1] + bias[k / 2].y) : pack(x[2 * k], x[2 * k + 1]);
        put(narrow_where(at, line, buffer, half, pair), packed);
      }
    }
    fence_async();
    synchronise(3 + at.group, 128);
    if (at.thread == 0) {
      store(out_map, at.buffers + buffer * (BUFFER / 2), at.column + chunk * NARROW, at.row);
      commit_stores();
    }
  }
}

// One warp adds the sums of 32 of a stage's columns over its rows to `sums`. A lane reads eight columns of every eighth row,
// where they are always in the same place. Then eight lanes have the same columns, and each the sum of one at last.
__device__ __forceinline__ void add_columns(u32 stage, u32 sums, int warp, int lane) {
  const int below = lane / 4, unit = warp * 4 + lane % 4;  // of 16 bytes
  const u32 from = stage + below * 128 + (unit ^ below) * 16;
  float total[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
  for (int first = 0; first < ROWS; first += 64) {
    u32 x[8][4];  // all on their way before the first is looked at: the tensor cores leave the memory little time
#pragma unroll
    for (int i = 0; i < 8; i++)
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(x[i][0]), "=r"(x[i][1]), "=r"(x[i][2]), "=r"(x[i][3]) : "r"(from + (first + i * 8) * 128));
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
      for (int k = 0; k < 4; k++) total[2 * k] += low(x[i][k]), total[2 * k + 1] += high(x[i][k]);
  }
  int column = unit * 8;
#pragma unroll
  for (int half = 4; half > 0; half /= 2) {
    const bool upper = lane & 4 * half;
#pragma unroll
    for (int i = 0; i < half; i++) {
      const float mine = upper ? total[half + i] : total[i], other = upper ? total[i] : total[half + i];
      total[i] = mine + __shfl_xor_sync(0xFFFFFFFFu, other, 4 * half);
    }
    if (upper) column += half;
  }
  const u32 at = sums + column * 4;
  float before;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(before) : "r"(at) : "memory");
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(before + total[0]) : "memory");
}
