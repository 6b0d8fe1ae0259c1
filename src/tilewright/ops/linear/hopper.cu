// The matmuls of `linear`.
//
//   biased            y = left right^T + bias
//   parts_gradient    x = left right           left is three matrices side by side, in backward of `linear_parts`
//
// While the latter multiplies, two warps that have nothing else to do sum `left` over its rows.
#include "gemm.cuh"

constexpr int AT_COLUMN_SUMS = AT_BUFFERS + 2 * BUFFER;  // the warpgroups of parts_gradient need half of their buffers

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

struct Biased : Epilogue {
  const Map* out;
  const float* bias;
  int columns;
  __device__ __forceinline__ Biased(const Map* out, const float* bias, int columns)
      : out(out), bias(bias), columns(columns) {}
  __device__ __forceinline__ void load(const Place& at) const { load_bias(at, bias, columns); }
  __device__ __forceinline__ void finish(float (&sum)[2][96], const Place& at, u32& parity) const {
    finish_plain<true>(sum, at, out);
  }
};

struct PartsGradient : Epilogue {
  static constexpr bool RIGHT_ACROSS = true;
  static constexpr int LOADER_REGISTERS = 56, GROUP_REGISTERS = 224, GROUP_BUFFERS = 1;
  const Map *second, *third, *out;
  float* sums;  // one for a block and a column of `left`, or null
  int second_at, third_at;  // columns where the matrices begin
  __device__ __forceinline__ PartsGradient(const Map* second, const Map* third, const Map* out, float* sums,
                                           int second_at, int third_at)
      : second(second), third(third), out(out), sums(sums), second_at(second_at), third_at(third_at) {}
  __device__ __forceinline__ int readers() const { return sums != nullptr ? 4 : 2; }  // with the two warps
  __device__ __forceinline__ void begin(u32 base, int inner) const {
    for (int column = threadIdx.x; column < inner; column += blockDim.x)
      asm volatile("st.shared.f32 [%0], %1;" ::"r"(base + AT_COLUMN_SUMS + column * 4), "f"(0.0f) : "memory");
  }
  __device__ __forceinline__ void read_stages(const Schedule& schedule, int thread, int inner) const {
    if (sums == nullptr || thread < 64) return;
    const int warp = thread / 32 - 2, lane = thread % 32;
    const u32 at_sums = schedule.base + AT_COLUMN_SUMS;
    int stage = 0;
    u32 parity = 0;
    for (int tile = blockIdx.x / 2; tile < schedule.tiles; tile += schedule.clusters)
      for (int step = 0; step < schedule.steps; step++) {
        wait(schedule.barriers + 8 * (FULL + stage), parity);
        // Blocks with the same rows and other columns see the same: each takes its turn.
        if (step % schedule.across == tile % schedule.across) add_columns(schedule.base + stage * STAGE, at_sums + step * INNER * 4, warp, lane);
        __syncwarp();
        if (lane == 0) arrive(schedule.barriers + 8 * (EMPTY + stage), schedule.rank);
        if (++stage == STAGES) stage = 0, parity ^= 1;
      }
    for (int step = 0; step < schedule.steps; step++) {
      const int column = step * INNER + warp * 32 + lane;
      float one;
      asm volatile("ld.shared.f32 %0, [%1];" : "=f"(one) : "r"(at_sums + column * 4) : "memory");
      sums[(size_t)blockIdx.x * inner + column] = one;
    }
  }
  __device__ __forceinline__ void load_left(const Map* left, u32 to, u32 full, int row, int at_inner) const {
    const bool in_first = at_inner < second_at, in_second = at_inner < third_at;
    ::load(to, in_first ? left : in_second ? second : third, full,
           at_inner - (in_first ? 0 : in_second ? second_at : third_at), row);
  }
  __device__ __forceinline__ void load(const Place& at) const {}
  __device__ __forceinline__ void finish(float (&sum)[2][96], const Place& at, u32& parity) const {
    finish_plain<false>(sum, at, out);
  }
};

#if !defined(ONLY) || defined(ONLY_TILEWRIGHT_LINEAR_MATMUL_BIASED)
KERNEL tilewright_linear_matmul_biased(MAP(left), MAP(right), MAP(out), float* bias, int rows, int columns, int inner) {
  run(Biased(&out, bias, columns), &left, &right, rows, columns, inner);
}
#endif
#if !defined(ONLY) || defined(ONLY_TILEWRIGHT_LINEAR_MATMUL_PARTS_GRADIENT)
KERNEL tilewright_linear_matmul_parts_gradient(MAP(first), MAP(second), MAP(third), MAP(right), MAP(out), float* sums,
                                               int rows, int columns, int inner, int second_at, int third_at) {
  run(PartsGradient(&second, &third, &out, sums, second_at, third_at), &first, &right, rows, columns, inner);
}
#endif
