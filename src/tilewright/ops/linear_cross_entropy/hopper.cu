// The matmul of `linear_cross_entropy` that adds itself to a sum of 16 bits: total^T += left^T right.
#include "gemm.cuh"

// Between two parts of a sum `total` holds float16, three bits finer than bfloat16, times a power of two for every row
// (a column of `total`) and 192 columns, which lies in `scales` as a bfloat16. The last part leaves bfloat16. An infinite
// number stays infinite, and leaves nothing of the other 191: who finds it in a gradient has no use for them.
__device__ __forceinline__ void load_total(const Place& at, const Map* total, int chunk) {
  const u32 buffer = chunk % BUFFERS, loaded = at.loaded + 8 * buffer;
  expect(loaded, BUFFER);
  for (int half = 0; half < 2; half++)
    load(at.buffers + buffer * BUFFER + half * (BUFFER / 2), total, loaded, at.row + half * 64, at.column + chunk * CHUNK);
}

__device__ __forceinline__ u32 pack_half(float low, float high) {
  u32 both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
__device__ __forceinline__ float2 unpack_half(u32 both) {
  float2 x;
  asm("{\n.reg .f16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}"
      : "=f"(x.x), "=f"(x.y) : "r"(both));
  return x;
}

__device__ __forceinline__ void finish_sum(float (&sum)[2][96], const Place& at, const Map* total, unsigned short* scales,
                                           int rows, bool first, bool last, u32& parity) {
  const int warp = at.thread / 32, lane = at.thread % 32, row = at.row + warp * 16 + lane / 4;
  // In a buffer lie 64 columns, each of 128 bytes: 64 rows of the tile, and behind all those the other 64.
  const u32 line = at.buffers + (lane / 16 * 8 + lane % 8) * 128 + ((2 * warp + lane / 8 % 2) ^ lane % 8) * 16;
  unsigned short* mine = scales + (size_t)(at.column / COLUMNS) * rows + row;
  if (!first) {
    float scale[4];
#pragma unroll
    for (int k = 0; k < 4; k++) {  // rows 8 further down where k is odd, 64 from 2 on
      const int below = k / 2 * 64 + k % 2 * 8;
      scale[k] = row + below < rows ? __uint_as_float((u32)mine[below] << 16) : 0.0f;
    }
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
      const int buffer = chunk % BUFFERS;
      wait(at.loaded + 8 * buffer, parity >> buffer & 1);
      parity ^= 1 << buffer;
#pragma unroll
      for (int part = 0; part < 8; part++) {
        const int half = part / 4, pair = part % 4;
        float* x = &sum[half][(chunk * 8 + pair * 2) * 4];
        u32 old[4];
        get_transposed(line + buffer * BUFFER + half * (BUFFER / 2) + pair * 2048, old);
#pragma unroll
        for (int k = 0; k < 4; k++) {
          const float2 both = unpack_half(old[k]);
          x[2 * k] = fmaf(both.x, scale[half * 2 + k % 2], x[2 * k]);
          x[2 * k + 1] = fmaf(both.y, scale[half * 2 + k % 2], x[2 * k + 1]);
        }
      }
      if (chunk + BUFFERS < CHUNKS) {
        synchronise(3 + at.group, 128);  // all have seen this chunk
        if (at.thread == 0) load_total(at, total, chunk + BUFFERS);
      }
    }
  }
  float inverse[4];
#pragma unroll
  for (int k = 0; k < 4 && !last; k++) {
    const float* x = &sum[k / 2][k % 2 * 2];
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < 96; i += 4) largest = fmaxf(largest, fmaxf(fabsf(x[i]), fabsf(x[i + 1])));
    largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, 2));
    // The largest comes to lie between 2^14 and 2^15, of what lies above 2^-112.
    const u32 exponent = max(__float_as_uint(largest) >> 23, 15u) - 14u;
    inverse[k] = __uint_as_float((254u - exponent) << 23);
    const int below = k / 2 * 64 + k % 2 * 8;
    if (lane % 4 == 0 && row + below < rows) mine[below] = (unsigned short)(exponent << 7);
  }
#pragma unroll
  for (int chunk = 0; chunk < CHUNKS; chunk++) {
    const int buffer = chunk % BUFFERS;
    if (at.thread == 0) {  // what was stored from this buffer before has been read
      if (chunk == 0)
        wait_stores_read();
      else
        asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
    }
    synchronise(3 + at.group, 128);
#pragma unroll
    for (int part = 0; part < 8; part++) {
      const int half = part / 4, pair = part % 4;
      const float* x = &sum[half][(chunk * 8 + pair * 2) * 4];
      u32 packed[4];
#pragma unroll
      for (int k = 0; k < 4; k++) {
        const float by = inverse[half * 2 + k % 2];
        packed[k] = last ? pack(x[2 * k], x[2 * k + 1]) : pack_half(x[2 * k] * by, x[2 * k + 1] * by);
      }
      put_transposed(line + buffer * BUFFER + half * (BUFFER / 2) + pair * 2048, packed);
    }
    fence_async();
    synchronise(3 + at.group, 128);
    if (at.thread == 0) {
      for (int half = 0; half < 2; half++)
        store(total, at.buffers + buffer * BUFFER + half * (BUFFER / 2), at.row + half * 64, at.column + chunk * CHUNK);
      commit_stores();
    }
  }
}

struct Sum : Epilogue {
  static constexpr bool LEFT_ACROSS = true, RIGHT_ACROSS = true, DOWN_FIRST = true;
  const Map* total;
  unsigned short* scales;
  int rows;
  int first, last;
  __device__ __forceinline__ Sum(const Map* total, unsigned short* scales, int rows, int first, int last)
      : total(total), scales(scales), rows(rows), first(first), last(last) {}
  __device__ __forceinline__ void load_left(const Map* left, u32 to, u32 full, int row, int at_inner) const {
    for (int i = 0; i < ROWS / 64; i++) ::load(to + i * ACROSS, left, full, row + 64 * i, at_inner);
  }
  __device__ __forceinline__ void load(const Place& at) const {
    if (first || at.thread != 0) return;
    wait_stores_read();
    for (int chunk = 0; chunk < BUFFERS; chunk++) load_total(at, total, chunk);
  }
  __device__ __forceinline__ void finish(float (&sum)[2][96], const Place& at, u32& parity) const {
    finish_sum(sum, at, total, scales, rows, first, last, parity);
  }
};

#if !defined(ONLY) || defined(ONLY_TILEWRIGHT_LINEAR_CROSS_ENTROPY_MATMUL_ADD)
KERNEL tilewright_linear_cross_entropy_matmul_add(MAP(left), MAP(right), MAP(total), unsigned short* scales, int rows,
                                                  int columns, int inner, int first, int last) {
  run(Sum(&total, scales, rows, first, last), &left, &right, rows, columns, inner);
}
#endif
