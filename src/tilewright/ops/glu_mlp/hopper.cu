// The matmuls of `glu_mlp`.
//
//   value       g = left gate^T, u = left up^T     stores g, u and activation(g) u
//   gradient    d = left right                     takes g and u, stores d u activation'(g) and d activation(g)
//
// Of two neighbouring SMs one loads the gate's rows for both, the other those of up. So the first half of a tile's
// columns is the gate's, the second up's, and a thread has both of a place.
#include "activations.cuh"
#include "gemm.cuh"

constexpr int HALF_COLUMNS = COLUMNS / 2, HALF_SUMS = 48;  // of a tile and of a thread's sums, the gate's
constexpr u32 NARROW_BUFFER = BUFFER / 2;                  // bytes; a warpgroup has four

template <int KIND>
struct Value : Epilogue {
  const Map *up, *gate_out, *up_out, *out;
  __device__ __forceinline__ Value(const Map* up, const Map* gate_out, const Map* up_out, const Map* out)
      : up(up), gate_out(gate_out), up_out(up_out), out(out) {}
  __device__ __forceinline__ void load_right(const Map* gate, u32 to, u32 full, int at_inner, int column,
                                             u32 rank) const {
    load_for_both(to, rank == 0 ? gate : up, full, at_inner, column / 2);
  }
  __device__ __forceinline__ void load(const Place& at) const {}
  // Gate, up and their result in a buffer each, 32 columns at a time.
  __device__ __forceinline__ void finish(float (&sum)[2][96], const Place& at, u32& parity) const {
    const u32 line = narrow_line(at.thread);
#pragma unroll
    for (int chunk = 0; chunk < HALF_COLUMNS / NARROW; chunk++) {
      if (at.thread == 0) wait_stores_read();
      synchronise(3 + at.group, 128);
#pragma unroll
      for (int pair = 0; pair < 2; pair++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const float *g = &sum[half][(chunk * 4 + pair * 2) * 4], *u = g + HALF_SUMS;
          u32 gates[4], ups[4], values[4];
#pragma unroll
          for (int k = 0; k < 4; k++) {  // column block k / 2, rows 8 further down where k is odd
            gates[k] = pack(g[2 * k], g[2 * k + 1]), ups[k] = pack(u[2 * k], u[2 * k + 1]);
            float first, second, slope;  // of what is kept, so that backward has the same to the bit
            activate<KIND>(low(gates[k]), 1.0f, first, slope);
            activate<KIND>(high(gates[k]), 1.0f, second, slope);
            values[k] = pack(first * low(ups[k]), second * high(ups[k]));
          }
          put(narrow_where(at, line, 0, half, pair), gates);
          put(narrow_where(at, line, 1, half, pair), ups);
          put(narrow_where(at, line, 2, half, pair), values);
        }
      fence_async();
      synchronise(3 + at.group, 128);
      if (at.thread == 0) {
        const int column = at.column / 2 + chunk * NARROW;
        store(gate_out, at.buffers, column, at.row);
        store(up_out, at.buffers + NARROW_BUFFER, column, at.row);
        store(out, at.buffers + 2 * NARROW_BUFFER, column, at.row);
        commit_stores();
      }
    }
  }
};

template <int KIND>
struct Gradient : Epilogue {
  static constexpr bool RIGHT_ACROSS = true;
  const Map *gate, *up, *gate_out, *up_out;
  __device__ __forceinline__ Gradient(const Map* gate, const Map* up, const Map* gate_out, const Map* up_out)
      : gate(gate), up(up), gate_out(gate_out), up_out(up_out) {}
  // Gate and up, 32 columns of them, to two of the four buffers.
  __device__ __forceinline__ void load_kept(const Place& at, int chunk) const {
    const u32 two = chunk % 2, loaded = at.loaded + 8 * two, to = at.buffers + two * 2 * NARROW_BUFFER;
    expect(loaded, 2 * NARROW_BUFFER);
    ::load(to, gate, loaded, at.column + chunk * NARROW, at.row);
    ::load(to + NARROW_BUFFER, up, loaded, at.column + chunk * NARROW, at.row);
  }
  __device__ __forceinline__ void load(const Place& at) const {
    if (at.thread != 0) return;
    wait_stores_read();
    for (int chunk = 0; chunk < 2; chunk++) load_kept(at, chunk);
  }
  // Gradients take the place of what was kept. What comes next is loaded in the middle of a chunk, when the copy of the
  // one before has long been read.
  __device__ __forceinline__ void finish(float (&sum)[2][96], const Place& at, u32& parity) const {
    const u32 line = narrow_line(at.thread);
#pragma unroll
    for (int chunk = 0; chunk < COLUMNS / NARROW; chunk++) {
      const int two = chunk % 2;
      wait(at.loaded + 8 * two, parity >> two & 1);
      parity ^= 1 << two;
#pragma unroll
      for (int pair = 0; pair < 2; pair++) {
        if (pair == 1 && at.thread == 0 && chunk > 0 && chunk + 1 < COLUMNS / NARROW) {
          wait_stores_read();
          load_kept(at, chunk + 1);
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const float* d = &sum[half][(chunk * 4 + pair * 2) * 4];
          const u32 gates_at = narrow_where(at, line, 2 * two, half, pair), ups_at = gates_at + NARROW_BUFFER;
          u32 gates[4], ups[4];
          get(gates_at, gates);
          get(ups_at, ups);
#pragma unroll
          for (int k = 0; k < 4; k++) {
            float value[2], slope[2];
            activate<KIND>(low(gates[k]), 1.0f, value[0], slope[0]);
            activate<KIND>(high(gates[k]), 1.0f, value[1], slope[1]);
            const float first = d[2 * k], second = d[2 * k + 1];
            gates[k] = pack(first * low(ups[k]) * slope[0], second * high(ups[k]) * slope[1]);
            ups[k] = pack(first * value[0], second * value[1]);
          }
          put(gates_at, gates);
          put(ups_at, ups);
        }
      }
      fence_async();
      synchronise(3 + at.group, 128);
      if (at.thread == 0) {
        const u32 from = at.buffers + two * 2 * NARROW_BUFFER;
        store(gate_out, from, at.column + chunk * NARROW, at.row);
        store(up_out, from + NARROW_BUFFER, at.column + chunk * NARROW, at.row);
        commit_stores();
      }
    }
  }
};

// `columns` of value are the gate's and up's together.
#define GLU_MLP_VALUE(name, KIND)                                                                                     \
  KERNEL name(MAP(left), MAP(gate), MAP(up), MAP(gate_out), MAP(up_out), MAP(out), float* nothing, int rows,          \
              int columns, int inner) {                                                                               \
    run(Value<KIND>(&up, &gate_out, &up_out, &out), &left, &gate, rows, columns, inner);                              \
  }
#define GLU_MLP_GRADIENT(name, KIND)                                                                                  \
  KERNEL name(MAP(left), MAP(right), MAP(gate), MAP(up), MAP(gate_out), MAP(up_out), float* nothing, int rows,        \
              int columns, int inner) {                                                                               \
    run(Gradient<KIND>(&gate, &up, &gate_out, &up_out), &left, &right, rows, columns, inner);                         \
  }
#if !defined(ONLY) || defined(ONLY_TILEWRIGHT_GLU_MLP_MATMUL_SILU_VALUE)
GLU_MLP_VALUE(tilewright_glu_mlp_matmul_silu_value, BY_SIGMOID)
#endif
#if !defined(ONLY) || defined(ONLY_TILEWRIGHT_GLU_MLP_MATMUL_SILU_GRADIENT)
GLU_MLP_GRADIENT(tilewright_glu_mlp_matmul_silu_gradient, BY_SIGMOID)
#endif
#if !defined(ONLY) || defined(ONLY_TILEWRIGHT_GLU_MLP_MATMUL_GELU_TANH_VALUE)
GLU_MLP_VALUE(tilewright_glu_mlp_matmul_gelu_tanh_value, BY_TANH)
#endif
#if !defined(ONLY) || defined(ONLY_TILEWRIGHT_GLU_MLP_MATMUL_GELU_TANH_GRADIENT)
GLU_MLP_GRADIENT(tilewright_glu_mlp_matmul_gelu_tanh_gradient, BY_TANH)
#endif
#if !defined(ONLY) || defined(ONLY_TILEWRIGHT_GLU_MLP_MATMUL_GELU_VALUE)
GLU_MLP_VALUE(tilewright_glu_mlp_matmul_gelu_value, BY_ERF)
#endif
#if !defined(ONLY) || defined(ONLY_TILEWRIGHT_GLU_MLP_MATMUL_GELU_GRADIENT)
GLU_MLP_GRADIENT(tilewright_glu_mlp_matmul_gelu_gradient, BY_ERF)
#endif
