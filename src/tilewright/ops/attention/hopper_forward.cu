// Attention of heads of 64 or 128 in 16 bits; for Hopper (sm_90a).
//
//   S = Q K^T,  P = exp(scale S - lse),  out = P V,  lse = log of the sum of exp(scale S), of those keys a query sees
//
// A block takes one tile of queries after the other, 64 for each of its consumer groups of 128 threads, and walks over the
// keys that they see, the last ones first. Scores stay in registers, and become the left side of the second matmul there.
// Of one more group a single thread loads: queries, and keys and values through a ring of each, of this tile and already of
// the next. Two things keep the tensor cores at work while scores are exponentiated:
//
//   within a group     S of the next keys is begun before P V of these
//   between groups     they begin their matmuls in turn, so that one multiplies while another takes exponentials
//
// Exponentials are of scores less a reference, which softmax lets one choose. It is the greatest score of the first keys,
// and a greater one only once that is more than 2^8 times as likely: nearly always there is nothing to scale anew.
//
// Query i sees key j where j <= i + (keys - queries), if CAUSAL, and of those the last `window`. Every query has its own
// sums over all keys in an order that only its tile decides: results are the same bits on every run.
//
// PACKED: sequences of any lengths, one behind the other in a batch of 1. The tiles of all of them are in a table that
// was written on the device, and all else is the same.
#include "matmuls.cuh"
#include "packed.cuh"

// The host's: HEAD, columns of a head; GROUPS of consumers; KEYS of a tile; STAGES of each ring; CAUSAL, PACKED, HALF,
// SHARED_BYTES.
constexpr int ROWS = 64 * GROUPS, PANEL = 64, PANELS = HEAD / PANEL;            // a panel's rows are of 128 bytes
constexpr int QUERY_PANEL = 64 * PANEL * 2, QUERY_TILE = PANELS * QUERY_PANEL;  // bytes, of one group
constexpr int KEY_PANEL = KEYS * PANEL * 2, KEY_TILE = PANELS * KEY_PANEL;      // bytes, and as many of values
constexpr int AT_Q = 0, AT_K = AT_Q + GROUPS * QUERY_TILE, AT_V = AT_K + STAGES * KEY_TILE;
constexpr int AT_BARRIERS = AT_V + STAGES * KEY_TILE;
constexpr int FULL_Q = 0, EMPTY_Q = FULL_Q + GROUPS, FULL_K = EMPTY_Q + GROUPS, EMPTY_K = FULL_K + STAGES,
              FULL_V = EMPTY_K + STAGES, EMPTY_V = FULL_V + STAGES, BARRIERS = EMPTY_V + STAGES;
static_assert(AT_BARRIERS + 8 * BARRIERS == SHARED_BYTES, "what the host gives");
constexpr int THREADS = 128 * (GROUPS + 1);
constexpr int FEW_REGISTERS = GROUPS == 2 ? 24 : 32, MANY_REGISTERS = GROUPS == 2 ? 240 : 160;
constexpr float SLACK = 8.0f;  // powers of two
#define NOTHING __uint_as_float(0xFF800000u)  // -inf

struct Sizes {  // of what is asked
  int batch, heads, shared_by, queries, keys, window;  // `shared_by` heads have their keys in common; `window` may be huge
  int section;  // heads, of all batches, that are finished before the next begin: their keys and values stay in the L2
  const Entry* tiles;  // of packed sequences
};
struct Tile : Sequence {
  int head, row, first, last;  // row of the first query, and blocks of keys: `first` to before `last`
};
struct Ring {
  int stage;
  u32 parity;
  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

// The keys that a query sees end before this one, and begin with the other.
__device__ __forceinline__ int end_of(const Sequence& of, int row) {
  return CAUSAL ? min(of.keys, row + of.keys - of.queries + 1) : of.keys;
}
__device__ __forceinline__ int begin_of(const Sizes& sizes, const Sequence& of, int row) {
  return CAUSAL ? row + of.keys - of.queries + 1 - sizes.window : 0;
}

// Blocks of keys up to the last one that any of these queries sees.
__device__ __forceinline__ int blocks_for(const Sequence& of, int row, int count) {
  return row < of.queries ? (max(0, end_of(of, min(row + count, of.queries) - 1)) + KEYS - 1) / KEYS : 0;
}

// The tile of a block in its turn: the longest come first, and who had the longest of a turn has the shortest of the next.
__device__ __forceinline__ bool find(Tile& tile, const Sizes& sizes, int turn) {
  const int down = PACKED ? sizes.tiles->count : (sizes.queries + ROWS - 1) / ROWS, across = sizes.batch * sizes.heads;
  const int blocks = gridDim.x, place = turn % 2 ? blocks - 1 - (int)blockIdx.x : (int)blockIdx.x;
  const long long number = (long long)turn * blocks + place;
  if (number >= (long long)down * across) return false;
  const int whole = down * sizes.section, section = (int)(number / whole), within = (int)(number % whole);
  const int wide = min(sizes.section, across - section * sizes.section);
  const int head = section * sizes.section + within % wide, block = within / wide;
  tile.head = head % sizes.heads;
  if (PACKED) {
    const Entry& entry = sizes.tiles[1 + block];
    (Sequence&)tile = sequence_of(entry, sizes.queries, sizes.keys);
    tile.row = entry.block * ROWS;
  } else {
    (Sequence&)tile = sequence_of(head / sizes.heads, sizes.queries, sizes.keys);
    tile.row = (CAUSAL ? down - 1 - block : block) * ROWS;
  }
  tile.first = max(0, begin_of(sizes, tile, tile.row)) / KEYS;
  tile.last = blocks_for(tile, tile.row, ROWS);
  return true;
}

__device__ __forceinline__ void load_panels(u32 to, int panel, const Map* map, u32 barrier, int head, int row, int batch) {
#pragma unroll
  for (int i = 0; i < PANELS; i++) load(to + i * panel, map, barrier, i * PANEL, head, row, batch);
}

__device__ __forceinline__ void load_all(u32 base, const Map* queries, const Map* keys, const Map* values,
                                         const Sizes& sizes) {
  const u32 barriers = base + AT_BARRIERS;
  Ring k = {0, 1}, v = {0, 1};  // of which nobody has used any
  u32 query_parity = 1;
  Tile tile;
  for (int turn = 0; find(tile, sizes, turn); turn++) {
    const int key_head = tile.head / sizes.shared_by;
    auto load_keys = [&](int block) {
      wait(barriers + 8 * (EMPTY_K + k.stage), k.parity);
      expect(barriers + 8 * (FULL_K + k.stage), KEY_TILE);
      load_panels(base + AT_K + k.stage * KEY_TILE, KEY_PANEL, keys, barriers + 8 * (FULL_K + k.stage), key_head,
                  tile.key_row + block * KEYS, tile.key_batch);
      k.advance();
    };
    auto load_values = [&](int block) {
      wait(barriers + 8 * (EMPTY_V + v.stage), v.parity);
      expect(barriers + 8 * (FULL_V + v.stage), KEY_TILE);
      load_panels(base + AT_V + v.stage * KEY_TILE, KEY_PANEL, values, barriers + 8 * (FULL_V + v.stage), key_head,
                  tile.key_row + block * KEYS, tile.key_batch);
      v.advance();
    };
    if (tile.first >= tile.last) continue;
    load_keys(tile.last - 1);
    for (int group = 0; group < GROUPS; group++) {
      wait(barriers + 8 * (EMPTY_Q + group), query_parity);
      expect(barriers + 8 * (FULL_Q + group), QUERY_TILE);
      load_panels(base + AT_Q + group * QUERY_TILE, QUERY_PANEL, queries, barriers + 8 * (FULL_Q + group), tile.head,
                  tile.query_row + tile.row + group * 64, tile.query_batch);
    }
    query_parity ^= 1;
#pragma unroll 1
    for (int block = tile.last - 2; block >= tile.first; block--) {  // in the order in which they are used
      load_keys(block);
      load_values(block + 1);
    }
    load_values(tile.first);
  }
#if BOUNDED_WAITS  // until all were used: a wait at a named barrier has no bound of its own
  for (int i = 0; i < STAGES; i++, v.advance()) wait(barriers + 8 * (EMPTY_V + v.stage), v.parity);
#endif
}

// Of four words of each of four neighbouring lanes, lane i gets the ith of all.
__device__ __forceinline__ void exchange(u32 (&x)[4], int lane) {
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const u32 other = __shfl_xor_sync(0xFFFFFFFFu, lane & 1 ? x[i] : x[i + 1], 1);
    lane & 1 ? x[i] = other : x[i + 1] = other;
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const u32 other = __shfl_xor_sync(0xFFFFFFFFu, lane & 2 ? x[i] : x[i + 2], 2);
    lane & 2 ? x[i] = other : x[i + 2] = other;
  }
}

// Queries, keys and values are (head_dim, heads, sequence, batch) to TMA. `out` is packed: batch, sequence, heads, head_dim;
// and so is `lse`, the natural logarithm: batch, heads, sequence. A query that sees no key has 0 and -inf.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    tilewright_attention_forward(const __grid_constant__ Map queries, const __grid_constant__ Map keys,
                                 const __grid_constant__ Map values, void* out, float* lse,
                                 const __grid_constant__ Sizes sizes, float scale) {
  extern __shared__ __align__(1024) char memory[];
  const u32 base = shared(memory), barriers = base + AT_BARRIERS;
  const int group = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128, 0), thread = threadIdx.x % 128;
  if (threadIdx.x == 0) {
    for (int i = 0; i < GROUPS; i++) {
      initialise(barriers + 8 * (FULL_Q + i), 1);
      initialise(barriers + 8 * (EMPTY_Q + i), 4);  // a warp each
    }
    for (int i = 0; i < STAGES; i++) {
      initialise(barriers + 8 * (FULL_K + i), 1);
      initialise(barriers + 8 * (EMPTY_K + i), 4 * GROUPS);
      initialise(barriers + 8 * (FULL_V + i), 1);
      initialise(barriers + 8 * (EMPTY_V + i), 4 * GROUPS);
    }
    fence_barriers();
  }
  __syncthreads();

  if (group == 0) {
    shrink_registers<FEW_REGISTERS>();
    if (thread == 0) load_all(base, &queries, &keys, &values, sizes);
    return;
  }

  grow_registers<MANY_REGISTERS>();
  const int mine = group - 1, lane = thread % 32;
  const float factor = scale * LOG2E, slack = SLACK / factor;
  float s[KEYS / 2], sum[HEAD / 2], most[2], total[2];  // of two rows, the second one 8 below
  u32 p[KEYS / 16][4], query_parity = 0;
  Ring k = {0, 0}, v = {0, 0};

  auto release = [&](int barrier) {
    if (lane == 0) arrive(barriers + 8 * barrier);
  };
  auto start_scores = [&]() {
    const u64 left = describe(base + AT_Q + mine * QUERY_TILE, 16), right = describe(base + AT_K + k.stage * KEY_TILE, 16);
    fence_wgmma();
#pragma unroll
    for (int i = 0; i < HEAD / 16; i++) {
      const u64 l = left + i / 4 * (QUERY_PANEL / 16) + i % 4 * 2, r = right + i / 4 * (KEY_PANEL / 16) + i % 4 * 2;
      i == 0 ? multiply_rows<false>(s, l, r) : multiply_rows<true>(s, l, r);
    }
    commit_wgmma();
  };
  auto start_values = [&]() {
    const u64 right = describe(base + AT_V + v.stage * KEY_TILE, KEY_PANEL);
    fence_wgmma();
#pragma unroll
    for (int i = 0; i < KEYS / 16; i++) multiply_registers(sum, p[i], right + 128 * i);
    commit_wgmma();
  };
  // Scores of keys that a query does not see become -inf. `row` is the group's first one.
  auto mask = [&](const Tile& tile, int block, int row) {
    const int own = row + thread / 32 * 16 + lane / 4, column = block * KEYS + lane % 4 * 2;
    if ((block + 1) * KEYS > end_of(tile, row)) {
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const int end = end_of(tile, own + 8 * j) - column;
#pragma unroll
        for (int i = 0; i < KEYS / 4; i++)
          if (i / 2 * 8 + i % 2 >= end) s[i / 2 * 4 + j * 2 + i % 2] = NOTHING;
      }
    }
    if (CAUSAL && block * KEYS < begin_of(sizes, tile, row + 63)) {
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const int begin = begin_of(sizes, tile, own + 8 * j) - column;
#pragma unroll
        for (int i = 0; i < KEYS / 4; i++)
          if (i / 2 * 8 + i % 2 < begin) s[i / 2 * 4 + j * 2 + i % 2] = NOTHING;
      }
    }
  };
  // Scores become exponentials. What was summed up before is to be multiplied by `by`.
  auto exponentiate = [&](float (&by)[2]) {
#pragma unroll
    for (int j = 0; j < 2; j++) {
      float top[2] = {s[j * 2], s[j * 2 + 1]};
#pragma unroll
      for (int i = 1; i < KEYS / 8; i++)
        top[0] = fmaxf(top[0], s[i * 4 + j * 2]), top[1] = fmaxf(top[1], s[i * 4 + j * 2 + 1]);
      float greatest = fmaxf(top[0], top[1]);
      greatest = fmaxf(greatest, __shfl_xor_sync(0xFFFFFFFFu, greatest, 1));
      greatest = fmaxf(greatest, __shfl_xor_sync(0xFFFFFFFFu, greatest, 2));
      by[j] = 1.0f;
      if (greatest > most[j] + slack) {
        by[j] = power_of_two((most[j] - greatest) * factor);
        most[j] = greatest;
      }
      const float less = most[j] == NOTHING ? 0.0f : most[j] * factor;
      float part[2] = {0.0f, 0.0f};
#pragma unroll
      for (int i = 0; i < KEYS / 4; i++) {
        float& x = s[i / 2 * 4 + j * 2 + i % 2];
        x = power_of_two(x * factor - less);
        part[i % 2] += x;
      }
      total[j] = total[j] * by[j] + (part[0] + part[1]);
    }
  };
  auto round_scores = [&]() {
#pragma unroll
    for (int i = 0; i < KEYS / 8; i++)
      p[i / 2][i % 2 * 2] = pack(s[4 * i], s[4 * i + 1]), p[i / 2][i % 2 * 2 + 1] = pack(s[4 * i + 2], s[4 * i + 3]);
  };
  auto finish = [&](const Tile& tile) {
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int row = tile.row + mine * 64 + thread / 32 * 16 + lane / 4 + 8 * j;
      float all = total[j] + __shfl_xor_sync(0xFFFFFFFFu, total[j], 1);
      all += __shfl_xor_sync(0xFFFFFFFFu, all, 2);
      const float inverse = all == 0.0f ? 0.0f : 1.0f / all;
      const long long query = (long long)tile.batch * sizes.queries + tile.query + row;
      uint4* to = (uint4*)((char*)out + (query * sizes.heads + tile.head) * (HEAD * 2)) + lane % 4;
#pragma unroll
      for (int i = 0; i < HEAD / 32; i++) {
        u32 x[4];
#pragma unroll
        for (int w = 0; w < 4; w++) {
          const float* pair = &sum[i * 16 + w * 4 + j * 2];
          x[w] = pack(pair[0] * inverse, pair[1] * inverse);
        }
        exchange(x, lane);
        if (row < tile.queries) to[i * 4] = make_uint4(x[0], x[1], x[2], x[3]);
      }
      if (lane % 4 == 0 && row < tile.queries)
        lse[((long long)tile.batch * sizes.heads + tile.head) * sizes.queries + tile.query + row] =
            all == 0.0f ? NOTHING : most[j] * scale + logf(all);
    }
  };

  if (mine == GROUPS - 1) announce(1, 256);  // the first group may begin
  Tile tile;
  for (int turn = 0; find(tile, sizes, turn); turn++) {
    const int row = tile.row + mine * 64;
    float by[2];
    most[0] = most[1] = NOTHING, total[0] = total[1] = 0.0f;
#pragma unroll
    for (int i = 0; i < HEAD / 2; i++) sum[i] = 0.0f;
    int block = tile.last - 1;
    if (block >= tile.first) {
      // Keys that only other groups see; but one block is taken by all, for Q is freed with it.
#pragma unroll 1
      for (const int seen = max(blocks_for(tile, row, 64), tile.first + 1); block >= seen; block--) {
        wait(barriers + 8 * (FULL_K + k.stage), k.parity);
        release(EMPTY_K + k.stage);
        k.advance();
        synchronise(1 + mine, 256);
        announce(1 + (mine + 1) % GROUPS, 256);
        wait(barriers + 8 * (FULL_V + v.stage), v.parity);
        release(EMPTY_V + v.stage);
        v.advance();
      }
      wait(barriers + 8 * (FULL_K + k.stage), k.parity);
      wait(barriers + 8 * (FULL_Q + mine), query_parity);
      query_parity ^= 1;
      start_scores();
      wait_wgmma<0>();
      release(EMPTY_K + k.stage);
      k.advance();
      if (block == tile.first) release(EMPTY_Q + mine);
      mask(tile, block, row);
      exponentiate(by);
      round_scores();
      while (--block >= tile.first) {
        wait(barriers + 8 * (FULL_K + k.stage), k.parity);
        synchronise(1 + mine, 256);
        start_scores();
        wait(barriers + 8 * (FULL_V + v.stage), v.parity);
        start_values();
        announce(1 + (mine + 1) % GROUPS, 256);
        wait_wgmma<1>();
        release(EMPTY_K + k.stage);
        k.advance();
        if (block == tile.first) release(EMPTY_Q + mine);
        mask(tile, block, row);
        exponentiate(by);
        // The wait is in both branches: before them the assembler would move it ahead of the exponentials.
        if (__any_sync(0xFFFFFFFFu, by[0] != 1.0f || by[1] != 1.0f)) {
          wait_wgmma<0>();
#pragma unroll
          for (int i = 0; i < HEAD / 2; i++) sum[i] *= by[i / 2 % 2];
        } else {
          wait_wgmma<0>();
        }
        release(EMPTY_V + v.stage);
        v.advance();
        round_scores();
      }
      wait(barriers + 8 * (FULL_V + v.stage), v.parity);
      start_values();
      wait_wgmma<0>();
      release(EMPTY_V + v.stage);
      v.advance();
    }
    finish(tile);
  }
}
