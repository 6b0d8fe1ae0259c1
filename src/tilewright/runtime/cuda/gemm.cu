// Matmuls that something happens to on their way to memory; for Hopper (sm_90a).
//
//   VALUE       z = left right^T + bias     stores gelu(z) and its slope         (the first matmul of an MLP)
//   GRADIENT    g = (left right) slope      stores g, and its sum over 128 rows  (in backward of the second one)
//   SUM         total^T += left^T right     where total has 16 bits              (a classifier's weight, by chunks)
//   PARTS       x = left right              left is three matrices side by side  (in backward of queries, keys, values)
//   BIASED      y = left right^T + bias     stores y                             (queries, keys and values)
//
// A LEAN_VALUE stores z in place of the slope. Then nobody has to keep gelu(z): LEAN_GRADIENT takes z, has the slope of
// it, and stores gelu(z) once more. While PARTS multiplies, two warps that have nothing else to do sum `left` over its
// rows.
//
// What happens is as many instructions, or as much memory, as an SM manages in half the time of the matmul itself, so it
// has to run beside it. Two groups of 128 threads therefore take turns (ping-pong): while one multiplies a tile of
// 128 x 192, the other finishes its own. A third group is one thread that loads. What it loads goes through one ring of
// stages, in the order of the tiles, and a group begins its matmul when the other has seen the last of its own stages.
//
// Two neighbouring SMs (a cluster) take tiles that lie one below the other, and each loads half of what both need of
// `right`, for both: without that the L2 cannot feed them.
//
// What happens to a tile of a kind is in a file of its own; here is what all of them do.
//
// With the macros ONLY and ONLY_<NAME> the kernel of that name is compiled, without ONLY all of them: a kernel takes the
// compiler seconds, and several are compiled side by side.

#include "gelu_mlp.cuh"
#include "linear_cross_entropy.cuh"
#include "linear_parts.cuh"

enum Kind { VALUE, LEAN_VALUE, GRADIENT, LEAN_GRADIENT, SUM, PARTS, BIASED };

// `vector`: the bias, which may be null; of a GRADIENT the sums, one for 128 rows and a column; of a SUM the scales;
// of PARTS sums, one for a block and a column of `left`, or null. Those have their second and third matrix in `kept` and
// `value`, which begin at the columns `second` and `third`.
template <Kind KIND>
__device__ __forceinline__ void run(const Map* left, const Map* right, const Map* kept, const Map* value, const Map* out,
                                    void* vector, int rows, int columns, int inner, bool first = true, bool last = true,
                                    int second = 0, int third = 0) {
  constexpr bool LEAN = KIND == LEAN_VALUE || KIND == LEAN_GRADIENT;
  constexpr bool IS_VALUE = KIND == VALUE || KIND == LEAN_VALUE, IS_GRADIENT = KIND == GRADIENT || KIND == LEAN_GRADIENT;
  constexpr bool LEFT_ACROSS = KIND == SUM, RIGHT_ACROSS = !IS_VALUE && KIND != BIASED;
  constexpr int ACROSS = 64 * INNER * 2;  // bytes from 64 rows of an operand to the next 64, where they lie across
  extern __shared__ __align__(1024) char memory[];
  const u32 base = shared(memory), barriers = base + AT_BARRIERS;
  const int group = threadIdx.x / 128, thread = threadIdx.x % 128;
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      initialise(barriers + 8 * (FULL + i), 1);
      // One group of each SM of the cluster, and whoever sums.
      initialise(barriers + 8 * (EMPTY + i), KIND == PARTS && vector != nullptr ? 4 : 2);
    }
    for (int i = 0; i < 2 * BUFFERS; i++) initialise(barriers + 8 * (LOADED + i), 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  if (KIND == PARTS)
    for (int column = threadIdx.x; column < inner; column += blockDim.x)
      asm volatile("st.shared.f32 [%0], %1;" ::"r"(base + AT_COLUMN_SUMS + column * 4), "f"(0.0f) : "memory");
  synchronise_cluster();

  const int across = (columns + COLUMNS - 1) / COLUMNS, down = (rows + 2 * ROWS - 1) / (2 * ROWS);
  const int tiles = down * across, clusters = gridDim.x / 2, steps = (inner + INNER - 1) / INNER;
  // Tiles at the same time share what is small, and take what is large from memory once.
  auto row_of = [&](int tile) { return ((KIND == SUM ? tile % down : tile / across) * 2 + (int)rank) * ROWS; };
  auto column_of = [&](int tile) { return (KIND == SUM ? tile / down : tile % across) * COLUMNS; };
  if (group == 0) {
    if (KIND == PARTS)
      asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    else
      asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (KIND == PARTS && vector != nullptr && thread >= 64) {
      const int warp = thread / 32 - 2, lane = thread % 32;
      const u32 sums = base + AT_COLUMN_SUMS;
      int stage = 0;
      u32 parity = 0;
      for (int tile = blockIdx.x / 2; tile < tiles; tile += clusters)
        for (int step = 0; step < steps; step++) {
          wait(barriers + 8 * (FULL + stage), parity);
          // Whoever has the same rows and other columns sees the same: each of them takes its turn.
          if (step % across == tile % across) add_columns(base + stage * STAGE, sums + step * INNER * 4, warp, lane);
          __syncwarp();
          if (lane == 0) arrive(barriers + 8 * (EMPTY + stage), rank);
          if (++stage == STAGES) stage = 0, parity ^= 1;
        }
      for (int step = 0; step < steps; step++) {
        const int column = step * INNER + warp * 32 + lane;
        float one;
        asm volatile("ld.shared.f32 %0, [%1];" : "=f"(one) : "r"(sums + column * 4) : "memory");
        ((float*)vector)[(size_t)blockIdx.x * inner + column] = one;
      }
    }
    if (thread == 0) {
      int stage = 0;
      u32 parity = 1;  // of a ring that nobody has used
      for (int tile = blockIdx.x / 2; tile < tiles; tile += clusters) {
        const int row = row_of(tile), column = column_of(tile);
        for (int step = 0; step < steps; step++) {
          const u32 at = base + stage * STAGE, full = barriers + 8 * (FULL + stage);
          wait(barriers + 8 * (EMPTY + stage), parity);
          expect(full, STAGE);
          if (LEFT_ACROSS) {
            for (int i = 0; i < ROWS / 64; i++) load(at + i * ACROSS, left, full, row + 64 * i, step * INNER);
          } else if (KIND == PARTS) {
            const int at_column = step * INNER;
            const bool in_first = at_column < second, in_second = at_column < third;
            load(at, in_first ? left : in_second ? kept : value, full,
                 at_column - (in_first ? 0 : in_second ? second : third), row);
          } else {
            load(at, left, full, step * INNER, row);
          }
          if (RIGHT_ACROSS) {
            for (int i = 0; i < COLUMNS / 64; i++)
              load_for_both(at + LEFT + i * ACROSS + rank * (ACROSS / 2), right, full, column + 64 * i,
                            step * INNER + rank * (INNER / 2));
          } else {
            load_for_both(at + LEFT + rank * (RIGHT / 2), right, full, step * INNER, column + rank * (COLUMNS / 2));
          }
          if (++stage == STAGES) stage = 0, parity ^= 1;
        }
      }
    }
  } else {
    if (KIND == PARTS)
      asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
    else
      asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    const int mine = group - 1;
    Place at;
    at.thread = thread, at.group = mine;
    at.buffers = base + AT_BUFFERS + mine * (KIND == PARTS ? 1 : BUFFERS) * BUFFER;
    at.sums = base + AT_SUMS + mine * 4 * CHUNK * 4;
    at.loaded = barriers + 8 * (LOADED + mine * BUFFERS);
    at.line = line(thread);
    u32 parity = 0;  // of the buffers, a bit each
    float sum[2][96];
    if (mine == 1) announce(1, 256);  // the first group may begin
    int turn = mine;
    for (int tile = blockIdx.x / 2 + mine * clusters; tile < tiles; tile += 2 * clusters, turn += 2) {
      at.row = row_of(tile), at.column = column_of(tile);
      if ((IS_GRADIENT || (KIND == SUM && !first)) && thread == 0) {
        wait_stores_read();
        for (int chunk = 0; chunk < BUFFERS; chunk++) {
          if (KIND == SUM)
            load_total(at, out, chunk);
          else
            load_kept<LEAN ? NARROW : CHUNK>(at, kept, chunk);
        }
      }
      if (IS_VALUE || KIND == BIASED) load_bias(at, (const float*)vector, columns);
      synchronise(1 + mine, 256);
      int used = turn * steps, stage = used % STAGES, previous = 0;
      u32 full_parity = used / STAGES & 1;
      for (int step = 0; step < steps; step++) {
        wait(barriers + 8 * (FULL + stage), full_parity);
        fence_wgmma();
        const u32 a = base + stage * STAGE;
        u64 left_at = describe(a, LEFT_ACROSS ? ACROSS : 16), right_at = describe(a + LEFT, RIGHT_ACROSS ? ACROSS : 16);
#pragma unroll
        for (int k = 0; k < INNER / 16; k++) {
          const int keep = step + k > 0;
          const u64 left_k = left_at + (LEFT_ACROSS ? 128 : 2) * k, right_k = right_at + (RIGHT_ACROSS ? 128 : 2) * k;
          multiply<LEFT_ACROSS, RIGHT_ACROSS>(sum[0], left_k, right_k, keep);
          multiply<LEFT_ACROSS, RIGHT_ACROSS>(sum[1], left_k + 512, right_k, keep);
        }
        commit_wgmma();
        wait_wgmma<1>();
        if (step > 0 && thread < 2) arrive(barriers + 8 * (EMPTY + previous), thread);
        previous = stage;
        if (++stage == STAGES) stage = 0, full_parity ^= 1;
      }
      if (tile + clusters < tiles) announce(1 + (mine ^ 1), 256);
      wait_wgmma<0>();
      if (thread < 2) arrive(barriers + 8 * (EMPTY + previous), thread);
      if (IS_VALUE) finish_value<LEAN>(sum, at, kept, value);
      if (IS_GRADIENT) finish_gradient<LEAN>(sum, at, kept, value, out, (float*)vector, columns, parity);
      if (KIND == SUM) finish_sum(sum, at, out, (unsigned short*)vector, rows, first, last, parity);
      if (KIND == PARTS) finish_plain<false>(sum, at, out);
      if (KIND == BIASED) finish_plain<true>(sum, at, out);
    }
    if (thread == 0) wait_stores();
  }
  synchronise_cluster();  // the other SM may still write here
}

#define KERNEL extern "C" __global__ void __launch_bounds__(384, 1) __cluster_dims__(2, 1, 1)
#define MAP(name) const __grid_constant__ Map name

#define GELU_MLP_VALUE(name, kind)                                                                                   \
  KERNEL name(MAP(left), MAP(right), MAP(kept), MAP(value), float* bias, int rows, int columns, int inner) {         \
    run<kind>(&left, &right, &kept, &value, nullptr, bias, rows, columns, inner);                                    \
  }
#if !defined(ONLY) || defined(ONLY_TILEWRIGHT_GELU_MLP_MATMUL_VALUE)
GELU_MLP_VALUE(tilewright_gelu_mlp_matmul_value, VALUE)
#endif
#if !defined(ONLY) || defined(ONLY_TILEWRIGHT_GELU_MLP_MATMUL_LEAN_VALUE)
GELU_MLP_VALUE(tilewright_gelu_mlp_matmul_lean_value, LEAN_VALUE)
#endif
#if !defined(ONLY) || defined(ONLY_TILEWRIGHT_GELU_MLP_MATMUL_GRADIENT)
KERNEL tilewright_gelu_mlp_matmul_gradient(MAP(left), MAP(right), MAP(slope), MAP(out), float* sums, int rows,
                                           int columns, int inner) {
  run<GRADIENT>(&left, &right, &slope, nullptr, &out, sums, rows, columns, inner);
}
#endif
#if !defined(ONLY) || defined(ONLY_TILEWRIGHT_GELU_MLP_MATMUL_LEAN_GRADIENT)
KERNEL tilewright_gelu_mlp_matmul_lean_gradient(MAP(left), MAP(right), MAP(sum), MAP(value), MAP(out), float* sums,
                                                int rows, int columns, int inner) {
  run<LEAN_GRADIENT>(&left, &right, &sum, &value, &out, sums, rows, columns, inner);
}
#endif
#if !defined(ONLY) || defined(ONLY_TILEWRIGHT_LINEAR_CROSS_ENTROPY_MATMUL_ADD)
KERNEL tilewright_linear_cross_entropy_matmul_add(MAP(left), MAP(right), MAP(total), unsigned short* scales, int rows,
                                                  int columns, int inner, int first, int last) {
  run<SUM>(&left, &right, nullptr, nullptr, &total, scales, rows, columns, inner, first, last);
}
#endif
#if !defined(ONLY) || defined(ONLY_TILEWRIGHT_LINEAR_MATMUL_PARTS_GRADIENT)
KERNEL tilewright_linear_matmul_parts_gradient(MAP(first), MAP(second), MAP(third), MAP(right), MAP(out), float* sums,
                                               int rows, int columns, int inner, int second_at, int third_at) {
  run<PARTS>(&first, &right, &second, &third, &out, sums, rows, columns, inner, true, true, second_at, third_at);
}
#endif
#if !defined(ONLY) || defined(ONLY_TILEWRIGHT_LINEAR_MATMUL_BIASED)
KERNEL tilewright_linear_matmul_biased(MAP(left), MAP(right), MAP(out), float* bias, int rows, int columns, int inner) {
  run<BIASED>(&left, &right, nullptr, nullptr, &out, bias, rows, columns, inner);
}
#endif
