// Gradients of causal attention, of heads of 64 in bfloat16; for Hopper (sm_90a).
//
//   S = Q K^T,  P = exp(scale S - lse),  dP = dO V^T,  dS = P (dP - delta),  dV = P^T dO,  dK = scale dS^T Q,
//   dQ = scale dS K
//
// A block takes 128 keys of a head and walks over the queries that see them, 128 at a time. Two groups of 128 threads have
// 64 keys each. They compute S and dP transposed, keys by queries: so P and dS lie in registers as the matmuls for dV and
// dK want them for their left side. What a group does in a turn, and what the tensor cores do meanwhile:
//
//   hand over dQ       dK, and S of the next turn
//   exponentials: P    dP
//   dS                 dV
//
// dQ is a sum over keys. For that dS goes through shared memory, and each group multiplies half of the queries with all
// keys. What comes out is added to memory by TMA, in the order of registers: nobody here has to read it, and who
// comes next puts it right. The order of the sum is always the same. The block of keys b adds to the queries b + t in its
// turn t, and it is the (t + 1)th to do so: all blocks begin with queries of their own, which they only store, and then
// follow each other, without anybody waiting. For that a head's last keys come first: blocks begin in the order of their
// numbers, so whom one of them waits for has begun. (Blocks that stay, and take one task after the other, begin them in no
// such order, and lose more time waiting for each other than they save.)
//
// Of a third group one thread loads, and one for each of the others adds its part of dQ.
#include "matmuls.cuh"

constexpr int BLOCK = 128, WIDTH = 64, TILE = BLOCK * WIDTH * 2;  // bytes
constexpr int QUERIES = 3, GRADIENTS = 2;                         // stages
constexpr int ROW = BLOCK * 4;                                    // bytes of a number for each query
constexpr int AT_K = 0, AT_V = AT_K + TILE, AT_Q = AT_V + TILE, AT_DO = AT_Q + QUERIES * TILE;
constexpr int AT_DS = AT_DO + GRADIENTS * TILE, DS = BLOCK * BLOCK * 2, AT_DQ = AT_DS + 2 * DS;
constexpr int PART = BLOCK / 2 * WIDTH * 4;  // bytes of a group's share of dQ
constexpr int AT_STARTS = AT_DQ + 2 * PART, AT_SLOPE_STARTS = AT_STARTS + QUERIES * ROW;
constexpr int AT_BARRIERS = AT_SLOPE_STARTS + GRADIENTS * ROW;
constexpr int FULL_Q = 0, EMPTY_Q = FULL_Q + QUERIES, FULL_DO = EMPTY_Q + QUERIES, EMPTY_DO = FULL_DO + GRADIENTS,
              FULL_DQ = EMPTY_DO + GRADIENTS, EMPTY_DQ = FULL_DQ + 2, KEYS = EMPTY_DQ + 2, BARRIERS = KEYS + 1;
static_assert(AT_BARRIERS + 8 * BARRIERS == SHARED_BYTES, "what the host gives");

__device__ __forceinline__ void load_row(u32 to, const float* from, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "n"(ROW), "r"(barrier) : "memory");
}
__device__ __forceinline__ void store_part(float* to, u32 from) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "n"(PART) : "memory");
}
__device__ __forceinline__ void add_part(float* to, u32 from) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from),
               "n"(PART) : "memory");
}
// A count in memory, and what TMA has written before it.
__device__ __forceinline__ void wait_count(const int* at, int count) {
  int now;
  do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(at) : "memory");
  while (now != count);
  asm volatile("fence.proxy.async.global;" ::: "memory");
}
__device__ __forceinline__ void set_count(int* at, int count) {
  asm volatile("fence.proxy.async.global;" ::: "memory");
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(at), "r"(count) : "memory");
}
__device__ __forceinline__ void write_four(u32 at, const float* x) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
}

// What a column begins with, in all rows: a thread has two neighbours of every eight, in two rows.
__device__ __forceinline__ void begin_columns(float (&sum)[64], u32 from, int lane) {
#pragma unroll
  for (int i = 0; i < 32; i++) {
    const float2 both = read_shared(from + i / 2 * 32 + lane % 4 * 8);
    sum[2 * i] = both.x, sum[2 * i + 1] = both.y;
  }
}

// Heads lie side by side in the columns of queries, keys, values and gradients, and one batch's rows below another's.
// `starts` are -lse / scale, and `slope_starts` are -delta: a row a head, from which S and dP start. `dqueries` has 64 x 64
// numbers for each 64 queries of a head, and `counts` how often each was added to, which is 0 at first.
extern "C" __global__ void __launch_bounds__(384, 1)
    tilewright_attention_backward(const __grid_constant__ Map queries, const __grid_constant__ Map keys,
                                  const __grid_constant__ Map values, const __grid_constant__ Map dout,
                                  const __grid_constant__ Map dkeys, const __grid_constant__ Map dvalues,
                                  const float* starts, const float* slope_starts, float* dqueries, int* counts,
                                  int length, int heads, float scale) {
  extern __shared__ __align__(1024) char memory[];
  const u32 base = shared(memory), barriers = base + AT_BARRIERS;
  const int group = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128, 0), thread = threadIdx.x % 128;
  const int turns = blockIdx.x % (length / BLOCK) + 1, head = blockIdx.x / (length / BLOCK);  // of all batches
  const int block = length / BLOCK - turns, column = head % heads * WIDTH, first_row = head / heads * length;
  if (threadIdx.x == 0) {
    for (int i = 0; i < QUERIES; i++) {
      initialise(barriers + 8 * (FULL_Q + i), 1);
      initialise(barriers + 8 * (EMPTY_Q + i), 2);
    }
    for (int i = 0; i < GRADIENTS; i++) {
      initialise(barriers + 8 * (FULL_DO + i), 1);
      initialise(barriers + 8 * (EMPTY_DO + i), 2);
    }
    for (int i = 0; i < 2; i++) {
      initialise(barriers + 8 * (FULL_DQ + i), 128);
      initialise(barriers + 8 * (EMPTY_DQ + i), 1);
    }
    initialise(barriers + 8 * KEYS, 1);
    fence_barriers();
  }
  __syncthreads();

  if (group == 0) {
    shrink_registers<24>();
    if (thread == 0) {
      expect(barriers + 8 * KEYS, 2 * TILE);
      load(base + AT_K, &keys, barriers + 8 * KEYS, column, first_row + block * BLOCK);
      load(base + AT_V, &values, barriers + 8 * KEYS, column, first_row + block * BLOCK);
      for (int turn = 0; turn < turns; turn++) {
        const int at = (block + turn) * BLOCK, q = turn % QUERIES, g = turn % GRADIENTS;
        wait(barriers + 8 * (EMPTY_Q + q), turn / QUERIES + 1 & 1);
        expect(barriers + 8 * (FULL_Q + q), TILE + ROW);
        load(base + AT_Q + q * TILE, &queries, barriers + 8 * (FULL_Q + q), column, first_row + at);
        load_row(base + AT_STARTS + q * ROW, starts + (size_t)head * length + at, barriers + 8 * (FULL_Q + q));
        wait(barriers + 8 * (EMPTY_DO + g), turn / GRADIENTS + 1 & 1);
        expect(barriers + 8 * (FULL_DO + g), TILE + ROW);
        load(base + AT_DO + g * TILE, &dout, barriers + 8 * (FULL_DO + g), column, first_row + at);
        load_row(base + AT_SLOPE_STARTS + g * ROW, slope_starts + (size_t)head * length + at, barriers + 8 * (FULL_DO + g));
      }
    } else if (thread == 32 || thread == 64) {
      const int whose = thread / 64;
      const u32 from = base + AT_DQ + whose * PART;
      for (int turn = 0; turn < turns; turn++) {
        const size_t part = (size_t)head * (length / 64) + (block + turn) * 2 + whose;
        wait(barriers + 8 * (FULL_DQ + whose), turn & 1);
        wait_count(counts + part, turn);
        turn == 0 ? store_part(dqueries + part * (PART / 4), from) : add_part(dqueries + part * (PART / 4), from);
        commit_stores();
        wait_stores_read();
        arrive(barriers + 8 * (EMPTY_DQ + whose));
        wait_stores();
        set_count(counts + part, turn + 1);
      }
    }
    return;
  }

  grow_registers<240>();
  const int mine = group - 1, lane = thread % 32, warp = thread / 32;
  const u32 at_line = line(thread), part = base + AT_DQ + mine * PART;
  const float factor = scale * LOG2E;
  float s[64], dp[64], dk[32], dv[32], dq[32];
  u32 p[8][4], ds[8][4];
#pragma unroll
  for (int i = 0; i < 32; i++) dk[i] = dv[i] = 0.0f;

  auto start_scores = [&](int turn) {  // S^T of the keys of this group
    const int q = turn % QUERIES;
    const u64 left = describe(base + AT_K + mine * (TILE / 2), 16), right = describe(base + AT_Q + q * TILE, 16);
    wait(barriers + 8 * (FULL_Q + q), turn / QUERIES & 1);
    begin_columns(s, base + AT_STARTS + q * ROW, lane);
    fence_wgmma();
#pragma unroll
    for (int k = 0; k < WIDTH / 16; k++) multiply_rows<true>(s, left + 2 * k, right + 2 * k);
    commit_wgmma();
  };
  auto start_slopes = [&](int turn) {  // dP^T
    const int g = turn % GRADIENTS;
    const u64 left = describe(base + AT_V + mine * (TILE / 2), 16), right = describe(base + AT_DO + g * TILE, 16);
    wait(barriers + 8 * (FULL_DO + g), turn / GRADIENTS & 1);
    begin_columns(dp, base + AT_SLOPE_STARTS + g * ROW, lane);
    fence_wgmma();
#pragma unroll
    for (int k = 0; k < WIDTH / 16; k++) multiply_rows<true>(dp, left + 2 * k, right + 2 * k);
    commit_wgmma();
  };
  auto take_scores = [&](int turn, bool masked) {  // P^T, dV and dS^T
    const int g = turn % GRADIENTS;
    wait_wgmma<1>();
#pragma unroll
    for (int i = 0; i < 16; i++) {
      float* x = &s[4 * i];
#pragma unroll
      for (int k = 0; k < 4; k++) {
        x[k] = power_of_two(x[k] * factor);
        if (masked && i * 8 + lane % 4 * 2 + k % 2 < mine * 64 + warp * 16 + lane / 4 + k / 2 * 8) x[k] = 0.0f;
      }
      p[i / 2][i % 2 * 2] = pack(x[0], x[1]), p[i / 2][i % 2 * 2 + 1] = pack(x[2], x[3]);
    }
    const u64 gradient = describe(base + AT_DO + g * TILE, 16);
    fence_wgmma();
#pragma unroll
    for (int k = 0; k < BLOCK / 16; k++) multiply_registers(dv, p[k], gradient + 128 * k);
    commit_wgmma();
    wait_wgmma<1>();
#pragma unroll
    for (int i = 0; i < 32; i++) ds[i / 4][i % 4] = pack(s[2 * i] * dp[2 * i], s[2 * i + 1] * dp[2 * i + 1]);
    const u32 scores = base + AT_DS + turn % 2 * DS;  // queries 0 to 63, then the others; a row a key
#pragma unroll
    for (int k = 0; k < 8; k++) put(scores + k / 4 * (DS / 2) + mine * (DS / 4) + (at_line ^ k % 4 * 32), ds[k]);
    fence_async();
    wait_wgmma<0>();  // dV: once both groups are here nobody reads these gradients any more
    synchronise(1, 256);
    if (thread == 0) arrive(barriers + 8 * (EMPTY_DO + g));
  };
  auto start_gradients = [&](int turn) {  // dQ of this group's queries, then dK
    const u64 left = describe(base + AT_DS + turn % 2 * DS + mine * (DS / 2), 16), right = describe(base + AT_K, 16);
    const u64 query = describe(base + AT_Q + turn % QUERIES * TILE, 16);
    fence_wgmma();
#pragma unroll
    for (int k = 0; k < BLOCK / 16; k++)
      k == 0 ? multiply_across<false>(dq, left, right) : multiply_across<true>(dq, left + 128 * k, right + 128 * k);
    commit_wgmma();
#pragma unroll
    for (int k = 0; k < BLOCK / 16; k++) multiply_registers(dk, ds[k], query + 128 * k);
    commit_wgmma();
  };
  auto hand_over = [&](int turn) {  // dQ
    wait(barriers + 8 * (EMPTY_DQ + mine), turn + 1 & 1);
#pragma unroll
    for (int i = 0; i < 8; i++) write_four(part + i * 2048 + thread * 16, &dq[4 * i]);
    fence_async();
    arrive(barriers + 8 * (FULL_DQ + mine));
  };

  wait(barriers + 8 * KEYS, 0);
  start_scores(0);
  wait_wgmma<0>();  // for the assembler, which else says that it has put one here
  start_slopes(0);
  take_scores(0, true);  // the queries of the same places as the keys
  for (int turn = 0; turn < turns - 1; turn++) {
    start_gradients(turn);
    start_scores(turn + 1);
    wait_wgmma<2>();
    hand_over(turn);
    wait_wgmma<1>();
    if (thread == 0) arrive(barriers + 8 * (EMPTY_Q + turn % QUERIES));
    start_slopes(turn + 1);
    take_scores(turn + 1, false);
  }
  start_gradients(turns - 1);
  wait_wgmma<1>();
  hand_over(turns - 1);
  wait_wgmma<0>();

  // The gradients of keys and values, by the way of the memory of dQ.
  wait(barriers + 8 * (EMPTY_DQ + mine), turns + 1 & 1);
#pragma unroll
  for (int k = 0; k < 4; k++) {
    u32 x[4], y[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      x[i] = pack(scale * dk[8 * k + 2 * i], scale * dk[8 * k + 2 * i + 1]);
      y[i] = pack(dv[8 * k + 2 * i], dv[8 * k + 2 * i + 1]);
    }
    put(part + (at_line ^ k * 32), x);
    put(part + PART / 2 + (at_line ^ k * 32), y);
  }
  fence_async();
  synchronise(2 + mine, 128);
  if (thread == 0) {
    store(&dkeys, part, column, first_row + block * BLOCK + mine * 64);
    store(&dvalues, part + PART / 2, column, first_row + block * BLOCK + mine * 64);
    commit_stores();
    wait_stores();
  }
}
