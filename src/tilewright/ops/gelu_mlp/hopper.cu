// The matmuls of `gelu_mlp`.
//
//   value       z = left right^T + bias     stores gelu(z) and its slope; lean, z and not the slope
//   gradient    g = (left right) slope      stores g, and its sum over 128 rows; lean, it takes z, has the slope of it,
//                                           and stores gelu(z) once more
#include "activations.cuh"
#include "gemm.cuh"

// Slopes are stored times 7/8. Many lie between 1 and 1.13, where bfloat16 is at its coarsest; below 1 it is twice as fine.
constexpr float SCALE = 0.875f, UNSCALE = 1.0f / SCALE;

// Values in one buffer and slopes, or sums, in the next, and while copies read those two, more go to two others.
template <bool LEAN, int KIND>
__device__ __forceinline__ void finish_value(float (&sum)[2][96], const Place& at, const Map* kept_map,
                                             const Map* value_map) {
  const int lane = at.thread % 32;
  const u32 line = narrow_line(at.thread);
#pragma unroll
  for (int chunk = 0; chunk < COLUMNS / NARROW; chunk++) {
    const int values_in = chunk % 2 * 2, kept_in = values_in + 1;
    if (at.thread == 0) asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
    synchronise(3 + at.group, 128);
#pragma unroll
    for (int pair = 0; pair < 2; pair++) {
      float2 bias[2];
#pragma unroll
      for (int k = 0; k < 2; k++)
        bias[k] = read_shared(at.sums + (chunk * NARROW + (2 * pair + k) * 8 + lane % 4 * 2) * 4);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const float* x = &sum[half][(chunk * 4 + pair * 2) * 4];
        u32 values[4], kept[4];
        float y[8], slope[8];
#pragma unroll
        for (int k = 0; k < 4; k++) {  // column block k / 2, rows 8 further down where k is odd
          float first = x[2 * k] + bias[k / 2].x, second = x[2 * k + 1] + bias[k / 2].y;
          if (LEAN) {  // the value is that of what is kept, to the bit
            kept[k] = pack(first, second);
            first = low(kept[k]), second = high(kept[k]);
          }
          activate<KIND>(first, SCALE, y[2 * k], slope[2 * k]);
          activate<KIND>(second, SCALE, y[2 * k + 1], slope[2 * k + 1]);
        }
#pragma unroll
        for (int k = 0; k < 4; k++) {
          values[k] = pack(y[2 * k], y[2 * k + 1]);
          if (!LEAN) kept[k] = pack(slope[2 * k], slope[2 * k + 1]);
        }
        put(narrow_where(at, line, values_in, half, pair), values);
        put(narrow_where(at, line, kept_in, half, pair), kept);
      }
    }
    fence_async();
    synchronise(3 + at.group, 128);
    if (at.thread == 0) {
      store(value_map, at.buffers + values_in * (BUFFER / 2), at.column + chunk * NARROW, at.row);
      store(kept_map, at.buffers + kept_in * (BUFFER / 2), at.column + chunk * NARROW, at.row);
      commit_stores();
    }
  }
}

// Slopes or sums, some columns of them.
template <int WIDE>
__device__ __forceinline__ void load_kept(const Place& at, const Map* kept_map, int chunk) {
  constexpr u32 BYTES = ROWS * WIDE * 2;
  const u32 buffer = chunk % BUFFERS, loaded = at.loaded + 8 * buffer;
  expect(loaded, BYTES);
  load(at.buffers + buffer * BYTES, kept_map, loaded, at.column + chunk * WIDE, at.row);
}

// Over the rows of a warp: lanes four apart have the same four columns, of which each then has the sum of one.
__device__ __forceinline__ float reduce(const float (&total)[4], int lane) {
  float two[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    float mine = lane & 16 ? total[2 + i] : total[i], other = lane & 16 ? total[i] : total[2 + i];
    two[i] = mine + __shfl_xor_sync(0xFFFFFFFFu, other, 16);
  }
  float one = (lane & 8 ? two[1] : two[0]) + __shfl_xor_sync(0xFFFFFFFFu, lane & 8 ? two[0] : two[1], 8);
  return one + __shfl_xor_sync(0xFFFFFFFFu, one, 4);
}

// Gradients take the place of what was kept. LEAN: values go to the buffers behind, two of half the size. What comes next
// is loaded in the middle of a chunk, when the copy of the one before has long been read.
template <bool LEAN, int KIND>
__device__ __forceinline__ void finish_gradient(float (&sum)[2][96], const Place& at, const Map* kept_map,
                                                const Map* value_map, const Map* out_map, float* sums, int columns,
                                                u32& parity) {
  constexpr int WIDE = LEAN ? NARROW : CHUNK, BYTES = ROWS * WIDE * 2;
  const int lane = at.thread % 32;
  const u32 line = narrow_line(at.thread);
#pragma unroll
  for (int chunk = 0; chunk < COLUMNS / WIDE; chunk++) {
    const int buffer = chunk % BUFFERS;
    const u32 parts = at.sums + (LEAN ? buffer * NARROW * 4 : 0);  // of the sums, one of each warp
    wait(at.loaded + 8 * buffer, parity >> buffer & 1);
    parity ^= 1 << buffer;
#pragma unroll
    for (int pair = 0; pair < WIDE / 16; pair++) {
      if (pair == WIDE / 32 && at.thread == 0 && chunk > 0 && chunk + 1 < COLUMNS / WIDE) {
        wait_stores_read();
        load_kept<WIDE>(at, kept_map, chunk + 1);
      }
      float total[4];
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const float* x = &sum[half][(chunk * (WIDE / 8) + pair * 2) * 4];
        const u32 place = LEAN ? narrow_where(at, line, buffer, half, pair) : where(at, buffer, half, pair);
        u32 kept[4], g[4], values[4];
        get(place, kept);
#pragma unroll
        for (int k = 0; k < 4; k++) {
          float first, second;
          if (LEAN) {
            float y[2];
            activate<KIND>(low(kept[k]), 1.0f, y[0], first);
            activate<KIND>(high(kept[k]), 1.0f, y[1], second);
            values[k] = pack(y[0], y[1]);
            first *= x[2 * k], second *= x[2 * k + 1];
          } else {
            first = x[2 * k] * (low(kept[k]) * UNSCALE), second = x[2 * k + 1] * (high(kept[k]) * UNSCALE);
          }
          float* column = &total[k / 2 * 2];
          g[k] = pack(first, second);
          column[0] = half + k % 2 ? column[0] + first : first;
          column[1] = half + k % 2 ? column[1] + second : second;
        }
        put(place, g);
        if (LEAN) put(place + BUFFER, values);
      }
      float one = reduce(total, lane);
      int column = pair * 16 + (lane >> 4) * 8 + lane % 4 * 2 + (lane >> 3 & 1);
      if (!(lane & 4))
        asm volatile("st.shared.f32 [%0], %1;" ::"r"(parts + (at.thread / 32 * CHUNK + column) * 4), "f"(one) : "memory");
    }
    fence_async();
    synchronise(3 + at.group, 128);
    if (at.thread == 0) {
      store(out_map, at.buffers + buffer * BYTES, at.column + chunk * WIDE, at.row);
      if (LEAN) store(value_map, at.buffers + BUFFER + buffer * BYTES, at.column + chunk * WIDE, at.row);
      commit_stores();
    }
    int column = at.column + chunk * WIDE + at.thread;
    if (at.thread < WIDE) {
      float part[4];
#pragma unroll
      for (int warp = 0; warp < 4; warp++)
        asm volatile("ld.shared.f32 %0, [%1];" : "=f"(part[warp]) : "r"(parts + (warp * CHUNK + at.thread) * 4) : "memory");
      if (column < columns) sums[(size_t)(at.row / ROWS) * columns + column] = (part[0] + part[1]) + (part[2] + part[3]);
    }
    if (!LEAN) synchronise(3 + at.group, 128);  // the next sums go to the same place
  }
}

template <bool LEAN, int KIND>
struct Value : Epilogue {
  const Map *kept, *value;
  const float* bias;  // or null
  int columns;
  __device__ __forceinline__ Value(const Map* kept, const Map* value, const float* bias, int columns)
      : kept(kept), value(value), bias(bias), columns(columns) {}
  __device__ __forceinline__ void load(const Place& at) const { load_bias(at, bias, columns); }
  __device__ __forceinline__ void finish(float (&sum)[2][96], const Place& at, u32& parity) const {
    finish_value<LEAN, KIND>(sum, at, kept, value);
  }
};

template <bool LEAN, int KIND>
struct Gradient : Epilogue {
  static constexpr bool RIGHT_ACROSS = true;
  const Map *kept, *value, *out;
  float* sums;  // one for 128 rows and a column
  int columns;
  __device__ __forceinline__ Gradient(const Map* kept, const Map* value, const Map* out, float* sums, int columns)
      : kept(kept), value(value), out(out), sums(sums), columns(columns) {}
  __device__ __forceinline__ void load(const Place& at) const {
    if (at.thread != 0) return;
    wait_stores_read();
    for (int chunk = 0; chunk < BUFFERS; chunk++) load_kept<LEAN ? NARROW : CHUNK>(at, kept, chunk);
  }
  __device__ __forceinline__ void finish(float (&sum)[2][96], const Place& at, u32& parity) const {
    finish_gradient<LEAN, KIND>(sum, at, kept, value, out, sums, columns, parity);
  }
};

#define GELU_MLP_VALUE(name, LEAN, KIND)                                                                             \
  KERNEL name(MAP(left), MAP(right), MAP(kept), MAP(value), float* bias, int rows, int columns, int inner) {         \
    run(Value<LEAN, KIND>(&kept, &value, bias, columns), &left, &right, rows, columns, inner);                       \
  }
#define GELU_MLP_LEAN_GRADIENT(name, KIND)                                                                           \
  KERNEL name(MAP(left), MAP(right), MAP(sum), MAP(value), MAP(out), float* sums, int rows, int columns, int inner) { \
    run(Gradient<true, KIND>(&sum, &value, &out, sums, columns), &left, &right, rows, columns, inner);               \
  }
#if !defined(ONLY) || defined(ONLY_TILEWRIGHT_GELU_MLP_MATMUL_VALUE)
GELU_MLP_VALUE(tilewright_gelu_mlp_matmul_value, false, BY_TANH)
#endif
#if !defined(ONLY) || defined(ONLY_TILEWRIGHT_GELU_MLP_MATMUL_LEAN_VALUE)
GELU_MLP_VALUE(tilewright_gelu_mlp_matmul_lean_value, true, BY_TANH)
#endif
#if !defined(ONLY) || defined(ONLY_TILEWRIGHT_GELU_MLP_MATMUL_ERF_VALUE)
GELU_MLP_VALUE(tilewright_gelu_mlp_matmul_erf_value, false, BY_ERF)
#endif
#if !defined(ONLY) || defined(ONLY_TILEWRIGHT_GELU_MLP_MATMUL_LEAN_ERF_VALUE)
GELU_MLP_VALUE(tilewright_gelu_mlp_matmul_lean_erf_value, true, BY_ERF)
#endif
#if !defined(ONLY) || defined(ONLY_TILEWRIGHT_GELU_MLP_MATMUL_GRADIENT)
KERNEL tilewright_gelu_mlp_matmul_gradient(MAP(left), MAP(right), MAP(slope), MAP(out), float* sums, int rows,
                                           int columns, int inner) {
  run(Gradient<false, BY_TANH>(&slope, nullptr, &out, sums, columns), &left, &right, rows, columns, inner);
}
#endif
#if !defined(ONLY) || defined(ONLY_TILEWRIGHT_GELU_MLP_MATMUL_LEAN_GRADIENT)
GELU_MLP_LEAN_GRADIENT(tilewright_gelu_mlp_matmul_lean_gradient, BY_TANH)
#endif
#if !defined(ONLY) || defined(ONLY_TILEWRIGHT_GELU_MLP_MATMUL_LEAN_ERF_GRADIENT)
GELU_MLP_LEAN_GRADIENT(tilewright_gelu_mlp_matmul_lean_erf_gradient, BY_ERF)
#endif
