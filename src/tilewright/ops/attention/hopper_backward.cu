// Gradients of attention of heads of 64 or 128 in 16 bits; for Hopper (sm_90a).
//
//   S = Q K^T,  P = exp(scale S - lse),  dP = dO V^T,  dS = P (dP - delta),  dV = P^T dO,  dK = scale dS^T Q,
//   dQ = scale dS K
//
// A block takes 128 keys of a head and walks over the queries that see them, a tile in a turn: of the first query head
// that these keys serve, then of the next. Two groups of 128 threads have 64 keys each. They compute S and dP transposed,
// keys by queries: so P and dS lie in registers as the matmuls for dV and dK want them for their left side. What a group
// does in a turn, and what the tensor cores do meanwhile:
//
//   hand over dQ       dK, and S of the next turn
//   exponentials: P    dP
//   dS                 dV
//
// dQ is a sum over keys. For that dS goes through shared memory, and each group multiplies it with all keys: of 64 of the
// 128 queries, or, where a head has 128 columns and a tile 64 queries, for 64 of the columns. What comes out is added to
// memory by TMA, in the order of registers: nobody here has to read it, and who comes next puts it right.
//
// The order of that sum is always the same: `rank_of` is how many blocks add to a tile before this one does, and
// `counts` how many have. A block waits only for blocks of lower numbers: the order in which the blocks of a head add is
// the order of their numbers. Blocks begin in that order, and the first that has not ended waits for nobody: so all end.
// A head's blocks are numbered by sections of `section` of them. Sections with the first keys, which most queries see,
// come first, for a grid that ends with short walks ends evenly; the blocks within one begin with the last keys. Under a
// causal mask those are a turn ahead of each other from the beginning, and nobody waits in fact.
//
// Of a third group one thread loads, and one for each of the others adds its part of dQ.
//
// PACKED: sequences of any lengths, one behind the other in a batch of 1. The blocks of keys of all of them are in a table
// that was written on the device, those of one sequence in the order that the sections of a head have. A number stands for
// one of them of one head; numbers behind the last do nothing.
#include "matmuls.cuh"
#include "packed.cuh"

// The host's: HEAD, columns of a head; QUERIES of a tile; stages of the rings, Q_STAGES and DO_STAGES; PACKED, HALF,
// SHARED_BYTES.
constexpr int KEYS = 128, PANEL = 64, PANELS = HEAD / PANEL;                     // a panel's rows are of 128 bytes
constexpr int KEY_PANEL = KEYS * PANEL * 2, KEY_TILE = PANELS * KEY_PANEL;       // bytes
constexpr int QUERY_PANEL = QUERIES * PANEL * 2, QUERY_TILE = PANELS * QUERY_PANEL;
constexpr int ROW = QUERIES * 4;                                                 // of a number for each query
constexpr int SCORES = KEYS * QUERIES * 2, PART = 64 * 64 * 4;                   // of dS, and of a group's share of dQ
constexpr int AT_K = 0, AT_V = AT_K + KEY_TILE, AT_Q = AT_V + KEY_TILE, AT_DO = AT_Q + Q_STAGES * QUERY_TILE;
constexpr int AT_DS = AT_DO + DO_STAGES * QUERY_TILE, AT_DQ = AT_DS + 2 * SCORES, AT_STARTS = AT_DQ + 2 * PART;
constexpr int AT_SLOPE_STARTS = AT_STARTS + Q_STAGES * ROW, AT_BARRIERS = AT_SLOPE_STARTS + DO_STAGES * ROW;
constexpr int FULL_Q = 0, EMPTY_Q = FULL_Q + Q_STAGES, FULL_DO = EMPTY_Q + Q_STAGES, EMPTY_DO = FULL_DO + DO_STAGES,
              FULL_DQ = EMPTY_DO + DO_STAGES, EMPTY_DQ = FULL_DQ + 2, FULL_KEYS = EMPTY_DQ + 2, BARRIERS = FULL_KEYS + 1;
constexpr int THREADS = 384, FEW_REGISTERS = 24, MANY_REGISTERS = 240;
constexpr int GIVEN_REGISTERS = 65536 / THREADS / 8 * 8;  // at first; who asks for more than are free waits
static_assert(FEW_REGISTERS + 2 * MANY_REGISTERS <= 3 * GIVEN_REGISTERS, "some would wait forever");
static_assert(AT_BARRIERS + 8 * BARRIERS == SHARED_BYTES, "what the host gives");
static_assert(QUERIES * HEAD == 2 * 64 * 64, "each group has 64 x 64 numbers of dQ");

struct Sizes {  // of what is asked; query i sees keys from i + keys - queries - left to i + keys - queries + right
  int batch, heads, shared_by, queries, keys, left, right;  // `shared_by` heads have their keys in common
  int section;                                              // blocks
  int tiles;                                                // of queries of a head that `dqueries` has room for
  const Entry* blocks;                                      // of packed sequences
};

// What a block does: its keys, and the tiles of queries that see them, of each of `shared_by` heads.
struct Walk : Sequence {
  int key_head, block, first, tiles;
  int begin, end;  // of the section: blocks
  int tile;        // of a head: number of the sequence's first one
};
__device__ __forceinline__ bool find(Walk& walk, const Sizes& sizes) {
  const int key_heads = sizes.heads / sizes.shared_by;
  if (PACKED) {
    const int number = blockIdx.x / key_heads;
    if (number >= sizes.blocks->count) return false;
    const Entry& entry = sizes.blocks[1 + number];
    (Sequence&)walk = sequence_of(entry, sizes.queries, sizes.keys);
    walk.key_head = blockIdx.x % key_heads, walk.block = entry.block;
    walk.begin = walk.block / sizes.section * sizes.section;
    walk.end = min(walk.begin + sizes.section, (walk.keys + KEYS - 1) / KEYS);
    walk.tile = entry.query / QUERIES + entry.number;  // of each sequence before it at most one is not full
  } else {
    const int section = blockIdx.x / (sizes.batch * key_heads * sizes.section);
    const int within = blockIdx.x - section * (sizes.batch * key_heads * sizes.section);
    walk.begin = section * sizes.section, walk.end = min(walk.begin + sizes.section, (sizes.keys + KEYS - 1) / KEYS);
    const int count = walk.end - walk.begin, head = within / count;
    (Sequence&)walk = sequence_of(head / key_heads, sizes.queries, sizes.keys);
    walk.key_head = head % key_heads, walk.block = walk.end - 1 - within % count, walk.tile = 0;
  }
  const int same = walk.block * KEYS - (walk.keys - walk.queries);  // the query that would be at the first key
  walk.first = max(0, same - sizes.right) / QUERIES;
  const int last = min(walk.queries - 1, same + KEYS - 1 + sizes.left);
  walk.tiles = last < 0 ? 0 : max(0, last / QUERIES - walk.first + 1);
  return true;
}

// Where they are no constants they take registers.
__device__ __forceinline__ int queries_of(const Sizes& sizes, const Walk& walk) { return PACKED ? walk.queries : sizes.queries; }
__device__ __forceinline__ int keys_of(const Sizes& sizes, const Walk& walk) { return PACKED ? walk.keys : sizes.keys; }

// How many blocks add to a tile of queries before this one: those of earlier sections, and of this one those behind it.
__device__ __forceinline__ int rank_of(const Sizes& sizes, const Walk& walk, int tile) {
  const int offset = keys_of(sizes, walk) - queries_of(sizes, walk);
  const int from = max(0, tile * QUERIES + offset - sizes.left) / KEYS;
  const int last = (min((tile + 1) * QUERIES, queries_of(sizes, walk)) - 1 + offset + sizes.right) / KEYS;
  return max(0, walk.begin - from) + min(last, walk.end - 1) - walk.block;
}

// What a column begins with, in all rows: a thread has two neighbours of every eight, in two rows.
__device__ __forceinline__ void begin_columns(float (&sum)[QUERIES / 2], u32 from, int lane) {
#pragma unroll
  for (int i = 0; i < QUERIES / 4; i++) {
    const float2 both = read_shared(from + i / 2 * 32 + lane % 4 * 8);
    sum[2 * i] = both.x, sum[2 * i + 1] = both.y;
  }
}

__device__ __forceinline__ void load_panels(u32 to, int panel, const Map* map, u32 barrier, int head, int row, int batch) {
#pragma unroll
  for (int i = 0; i < PANELS; i++) load(to + i * panel, map, barrier, i * PANEL, head, row, batch);
}

// Queries, keys and all gradients are (head_dim, heads, sequence, batch) to TMA. `starts` are -lse / scale, and
// `slope_starts` are -delta, from which S and dP start: a row a head, of whole tiles, with -inf and 0 behind the last
// query. `dqueries` has two parts of 64 x 64 numbers for each tile of queries of a head, and `counts` how often each part
// was added to, which is 0 at first.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    tilewright_attention_backward(const __grid_constant__ Map queries, const __grid_constant__ Map keys,
                                  const __grid_constant__ Map values, const __grid_constant__ Map dout,
                                  const __grid_constant__ Map dkeys, const __grid_constant__ Map dvalues,
                                  const float* starts, const float* slope_starts, float* dqueries, int* counts,
                                  const __grid_constant__ Sizes sizes, float scale) {
  extern __shared__ __align__(1024) char memory[];
  const u32 base = shared(memory), barriers = base + AT_BARRIERS;
  const int group = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128, 0), thread = threadIdx.x % 128;
  Walk walk;
  if (!find(walk, sizes)) return;
  const int turns = walk.tiles * sizes.shared_by;
  if (threadIdx.x == 0) {
    for (int i = 0; i < Q_STAGES; i++) {
      initialise(barriers + 8 * (FULL_Q + i), 1);
      initialise(barriers + 8 * (EMPTY_Q + i), 8);  // a warp each
    }
    for (int i = 0; i < DO_STAGES; i++) {
      initialise(barriers + 8 * (FULL_DO + i), 1);
      initialise(barriers + 8 * (EMPTY_DO + i), 2);
    }
    for (int i = 0; i < 2; i++) {
      initialise(barriers + 8 * (FULL_DQ + i), 128);
      initialise(barriers + 8 * (EMPTY_DQ + i), 1);
    }
    initialise(barriers + 8 * FULL_KEYS, 1);
    fence_barriers();
  }
  __syncthreads();

  if (group == 0) {
    shrink_registers<FEW_REGISTERS>();
    int head = walk.key_head * sizes.shared_by, tile = walk.first;
    int number = (walk.batch * sizes.heads + head) * sizes.tiles + walk.tile + tile;  // of the tile, of all heads
    auto advance = [&]() {
      number++;
      if (++tile == walk.first + walk.tiles) tile = walk.first, number += sizes.tiles - walk.tiles, head++;
    };
    if (thread == 0) {
      expect(barriers + 8 * FULL_KEYS, 2 * KEY_TILE);
      const int row = walk.key_row + walk.block * KEYS;
      load_panels(base + AT_K, KEY_PANEL, &keys, barriers + 8 * FULL_KEYS, walk.key_head, row, walk.key_batch);
      load_panels(base + AT_V, KEY_PANEL, &values, barriers + 8 * FULL_KEYS, walk.key_head, row, walk.key_batch);
#pragma unroll 1
      for (int turn = 0; turn < turns; turn++, advance()) {
        const int q = turn % Q_STAGES, g = turn % DO_STAGES;
        wait(barriers + 8 * (EMPTY_Q + q), turn / Q_STAGES + 1 & 1);
        expect(barriers + 8 * (FULL_Q + q), QUERY_TILE + ROW);
        load_panels(base + AT_Q + q * QUERY_TILE, QUERY_PANEL, &queries, barriers + 8 * (FULL_Q + q), head,
                    walk.query_row + tile * QUERIES, walk.query_batch);
        load_bytes(base + AT_STARTS + q * ROW, starts + (size_t)number * QUERIES, ROW, barriers + 8 * (FULL_Q + q));
        wait(barriers + 8 * (EMPTY_DO + g), turn / DO_STAGES + 1 & 1);
        expect(barriers + 8 * (FULL_DO + g), QUERY_TILE + ROW);
        load_panels(base + AT_DO + g * QUERY_TILE, QUERY_PANEL, &dout, barriers + 8 * (FULL_DO + g), head,
                    walk.query_row + tile * QUERIES, walk.query_batch);
        load_bytes(base + AT_SLOPE_STARTS + g * ROW, slope_starts + (size_t)number * QUERIES, ROW,
                   barriers + 8 * (FULL_DO + g));
      }
    } else if (thread == 32 || thread == 64) {
      const int whose = thread / 64;
      const u32 from = base + AT_DQ + whose * PART;
#pragma unroll 1
      for (int turn = 0; turn < turns; turn++, advance()) {
        const size_t part = (size_t)number * 2 + whose;
        const int rank = rank_of(sizes, walk, tile);
        wait(barriers + 8 * (FULL_DQ + whose), turn & 1);
        wait_count(counts + part, rank);
        rank == 0 ? store_bytes(dqueries + part * (PART / 4), from, PART)
                  : add_bytes(dqueries + part * (PART / 4), from, PART);
        commit_stores();
        wait_stores_read();
        arrive(barriers + 8 * (EMPTY_DQ + whose));
        wait_stores();
        set_count(counts + part, rank + 1);
      }
    }
    return;
  }

  grow_registers<MANY_REGISTERS>();
  const int mine = group - 1, lane = thread % 32, warp = thread / 32;
  const int last_tile = walk.first + walk.tiles - 1;
  const u32 at_line = line(thread), part = base + AT_DQ + mine * PART;
  const float factor = scale * LOG2E;
  float s[QUERIES / 2], dp[QUERIES / 2], dk[HEAD / 2], dv[HEAD / 2], dq[32];
  u32 p[QUERIES / 16][4], ds[QUERIES / 16][4];
#pragma unroll
  for (int i = 0; i < HEAD / 2; i++) dk[i] = dv[i] = 0.0f;

  // sum = left right^T, of this group's half of the rows of K or V and of a tile of queries.
  auto multiply_tile = [&](float (&sum)[QUERIES / 2], u32 left_at, u32 right_at) {
    const u64 left = describe(left_at + mine * (KEY_PANEL / 2), 16), right = describe(right_at, 16);
    fence_wgmma();
#pragma unroll
    for (int i = 0; i < HEAD / 16; i++)
      multiply_rows<true>(sum, left + i / 4 * (KEY_PANEL / 16) + i % 4 * 2,
                          right + i / 4 * (QUERY_PANEL / 16) + i % 4 * 2);
    commit_wgmma();
  };
  auto start_scores = [&](int turn) {  // S^T of the keys of this group
    const int q = turn % Q_STAGES;
    wait(barriers + 8 * (FULL_Q + q), turn / Q_STAGES & 1);
    begin_columns(s, base + AT_STARTS + q * ROW, lane);
    multiply_tile(s, base + AT_K, base + AT_Q + q * QUERY_TILE);
  };
  auto start_slopes = [&](int turn) {  // dP^T
    const int g = turn % DO_STAGES;
    wait(barriers + 8 * (FULL_DO + g), turn / DO_STAGES & 1);
    begin_columns(dp, base + AT_SLOPE_STARTS + g * ROW, lane);
    multiply_tile(dp, base + AT_V, base + AT_DO + g * QUERY_TILE);
  };
  // Probabilities of keys that a query does not see, or that there are not, become 0.
  auto mask = [&](int tile) {
    const int key = walk.block * KEYS + mine * 64;
    const int ahead = tile * QUERIES + keys_of(sizes, walk) - queries_of(sizes, walk) - key;
    if (ahead - 63 + sizes.right >= 0 && ahead + QUERIES - 1 <= sizes.left && key + 64 <= keys_of(sizes, walk)) return;
    const int row = warp * 16 + lane / 4, own = ahead + lane % 4 * 2 - row;
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const bool is_there = key + row + 8 * j < keys_of(sizes, walk);
      const int begin = is_there ? 8 * j - own - sizes.right : QUERIES, end = 8 * j - own + sizes.left;
#pragma unroll
      for (int i = 0; i < QUERIES / 4; i++)
        if (i / 2 * 8 + i % 2 < begin || i / 2 * 8 + i % 2 > end) s[i / 2 * 4 + j * 2 + i % 2] = 0.0f;
    }
  };
  auto take_scores = [&](int turn, int tile) {  // P^T, dV and dS^T
    const int g = turn % DO_STAGES;
    wait_wgmma<1>();
#pragma unroll
    for (int i = 0; i < QUERIES / 2; i++) s[i] = power_of_two(s[i] * factor);
    mask(tile);
#pragma unroll
    for (int i = 0; i < QUERIES / 4; i++) p[i / 4][i % 4] = pack(s[2 * i], s[2 * i + 1]);
    const u64 gradient = describe(base + AT_DO + g * QUERY_TILE, QUERY_PANEL);
    fence_wgmma();
#pragma unroll
    for (int k = 0; k < QUERIES / 16; k++) multiply_registers(dv, p[k], gradient + 128 * k);
    commit_wgmma();
    wait_wgmma<1>();
#pragma unroll
    for (int i = 0; i < QUERIES / 4; i++) ds[i / 4][i % 4] = pack(s[2 * i] * dp[2 * i], s[2 * i + 1] * dp[2 * i + 1]);
    const u32 scores = base + AT_DS + turn % 2 * SCORES + mine * (KEY_PANEL / 2);  // 64 queries a panel; a row a key
#pragma unroll
    for (int k = 0; k < QUERIES / 16; k++) put(scores + k / 4 * KEY_PANEL + (at_line ^ k % 4 * 32), ds[k]);
    fence_async();
    wait_wgmma<0>();  // dV: once both groups are here nobody reads these gradients any more
    synchronise(1, 256);
    if (thread == 0) arrive(barriers + 8 * (EMPTY_DO + g));
  };
  auto start_gradients = [&](int turn) {  // dQ, of this group's queries or columns, then dK
    const u32 scores = base + AT_DS + turn % 2 * SCORES + (PANELS == 1 ? mine * KEY_PANEL : 0);
    const u64 left = describe(scores, 16), right = describe(base + AT_K + (PANELS == 1 ? 0 : mine * KEY_PANEL), 16);
    const u64 query = describe(base + AT_Q + turn % Q_STAGES * QUERY_TILE, QUERY_PANEL);
    fence_wgmma();
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++)
      k == 0 ? multiply_across<false>(dq, left, right) : multiply_across<true>(dq, left + 128 * k, right + 128 * k);
    commit_wgmma();
#pragma unroll
    for (int k = 0; k < QUERIES / 16; k++) multiply_registers(dk, ds[k], query + 128 * k);
    commit_wgmma();
  };
  auto hand_over = [&](int turn) {  // dQ
    wait(barriers + 8 * (EMPTY_DQ + mine), turn + 1 & 1);
#pragma unroll
    for (int i = 0; i < 8; i++) write_four(part + i * 2048 + thread * 16, &dq[4 * i]);
    fence_async();
    arrive(barriers + 8 * (FULL_DQ + mine));
  };

  wait(barriers + 8 * FULL_KEYS, 0);
  if (turns > 0) {  // a window may end before the first query
    int tile = walk.first;
    start_scores(0);
    wait_wgmma<0>();  // for the assembler, which else says that it has put one here
    start_slopes(0);
    take_scores(0, tile);
    for (int turn = 0; turn < turns - 1; turn++) {
      start_gradients(turn);
      start_scores(turn + 1);
      wait_wgmma<2>();
      hand_over(turn);
      wait_wgmma<1>();
      if (lane == 0) arrive(barriers + 8 * (EMPTY_Q + turn % Q_STAGES));
      start_slopes(turn + 1);
      tile = tile == last_tile ? walk.first : tile + 1;
      take_scores(turn + 1, tile);
    }
    start_gradients(turns - 1);
    wait_wgmma<1>();
    hand_over(turns - 1);
    wait_wgmma<0>();
  }

  // dK by the way of the memory of dQ, dV by that of this group's values.
  wait(barriers + 8 * (EMPTY_DQ + mine), turns + 1 & 1);
  const u32 own_values = base + AT_V + mine * (KEY_PANEL / 2);
#pragma unroll
  for (int k = 0; k < HEAD / 16; k++) {
    u32 x[4], y[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      x[i] = pack(scale * dk[8 * k + 2 * i], scale * dk[8 * k + 2 * i + 1]);
      y[i] = pack(dv[8 * k + 2 * i], dv[8 * k + 2 * i + 1]);
    }
    put(part + k / 4 * (KEY_PANEL / 2) + (at_line ^ k % 4 * 32), x);
    put(own_values + k / 4 * KEY_PANEL + (at_line ^ k % 4 * 32), y);
  }
  fence_async();
  synchronise(2 + mine, 128);
  if (thread == 0) {
    auto put_gradients = [&](const Walk& to) {
#pragma unroll
      for (int i = 0; i < PANELS; i++) {
        const int row = to.key_row + to.block * KEYS + mine * 64;
        store(&dkeys, part + i * (KEY_PANEL / 2), i * PANEL, to.key_head, row, to.key_batch);
        store(&dvalues, own_values + i * KEY_PANEL, i * PANEL, to.key_head, row, to.key_batch);
      }
    };
    if (PACKED) {
      Walk again;  // from the table: what is kept until here takes registers
      find(again, sizes);
      put_gradients(again);
    } else {
      put_gradients(walk);
    }
    commit_stores();
    wait_stores();
  }
}
