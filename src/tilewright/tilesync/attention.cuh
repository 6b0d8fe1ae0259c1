// Attention of a tile's rows, of all heads that share a key head, over a split of the context.
//
// Keys and values come through a ring of SLOTS in shared memory, KEYS of each at a time; the first of a cache before the
// tile waits for its queries. The heads that share a key head are rows of one matmul, of QUERIES with those of other rows,
// so each key is read once for all of them. A warp has 16 keys of a slot (of heads above 128, half of the values' columns):
// scores, softmax and output are those of its own keys, and in the end all warps' are added up.
#pragma once
#include "program.cuh"

#if ATTENTION
constexpr int HEAD = ATTENTION, QUERIES = 16;  // the largest head, 64, 128 or 256
constexpr int SIDES = HEAD > 128 ? 2 : 1, DIMS = HEAD / SIDES, TEAMS = WARPS / SIDES;
constexpr int KEYS = 16 * TEAMS, SLOTS = HEAD > 64 ? 2 : 3, KEY_LINE = HEAD * 2 + 16;
constexpr int SLOT_BYTES = 2 * KEYS * KEY_LINE, PART = HEAD + 2;  // numbers of a team and query: largest, sum, output
constexpr float NO_KEY = -1.0e30f;  // the log of the sum of a split that sees none
static_assert(TEAMS * QUERIES * PART * 4 <= SLOTS * SLOT_BYTES, "all warps' outputs fit where keys and values were");

struct Attend {
  const Stage& stage;
  const Tensors& tensors;
  char* memory;
  int size, head, row, split, queries;  // the first query's head and row; how many queries there are
  int start, cached, keys;              // where the split begins; keys of the cache, and all
  const u16 *q, *from[2], *fresh[2];    // keys and values: of the cache, and of the rows themselves
  long long stride, strides[2];         // from a row to the next
  bool is_whole;                        // whether 16 bytes can be copied at a time

  __device__ __forceinline__ Attend(const Stage& stage, const Task& task, const Tensors& tensors, char* memory)
      : stage(stage), tensors(tensors), memory(memory) {
    size = stage.channels, head = task.column * stage.kernel, row = task.row * stage.tile_rows;
    split = task.split;
    const int behind = min(row + stage.tile_rows, stage.rows), context = stage.inner;
    queries = (behind - row) * stage.kernel;
    const bool grows = stage.extra[0] >= 0;
    const int filled = grows ? min(context, *(const int*)tensors.at[stage.extra[0]]) : context;
    start = (int)((long long)filled * task.split / stage.splits);
    int stop = (int)((long long)filled * (task.split + 1) / stage.splits);
    if (stage.more[0]) stop = min(stop, behind + context - stage.rows);
    cached = max(0, stop - start);
    keys = cached + (grows && task.split == stage.splits - 1 ? behind : 0);
    stride = stage.height, strides[0] = stage.width, strides[1] = stage.gated;
    q = (const u16*)tensors.at[stage.x] + stage.more[1] + head * size;
    is_whole = (size | stage.more[1] | stage.height) % 8 == 0;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      from[i] = (const u16*)tensors.at[i ? stage.bias : stage.weight] + stage.more[2 + i] + task.column * (long long)stage.more[4];
      fresh[i] = (const u16*)tensors.at[stage.x] + stage.extra[1 + i] + task.column * size;
      is_whole = is_whole && (strides[i] | stage.more[2 + i] | stage.extra[1 + i]) % 8 == 0;
    }
  }
  __device__ __forceinline__ int chunks() const { return (keys + KEYS - 1) / KEYS; }
  __device__ __forceinline__ char* slot(int chunk) const { return memory + chunk % SLOTS * SLOT_BYTES; }
  __device__ __forceinline__ char* queries_memory() const { return memory + SLOTS * SLOT_BYTES; }

  __device__ __forceinline__ void copy_eight(char* to, const u16* at, int column, bool there) const {
    if (is_whole) return copy_sixteen(to, there && column < size ? at + column : q, there && column < size);
    for (int i = 0; i < 8; i++) ((u16*)to)[i] = there && column + i < size ? read_number(at + column + i) : (u16)0;
  }
  // Keys and values of a chunk: those of the cache, and the others, and zeros behind them.
  __device__ __forceinline__ void load(int chunk, bool of_cache, bool others) const {
    for (int i = threadIdx.x; i < KEYS * (HEAD / 4); i += THREADS) {
      const int which = i / (KEYS * (HEAD / 8)), key = i / (HEAD / 8) % KEYS, column = i % (HEAD / 8) * 8;
      const int at = chunk * KEYS + key;
      if (at < cached ? !of_cache : !others) continue;
      const u16* line = at < cached ? (which ? from[1] + (start + at) * strides[1] : from[0] + (start + at) * strides[0])
                                    : (which ? fresh[1] : fresh[0]) + (at - cached) * stride;
      copy_eight(slot(chunk) + (which * KEYS + key) * KEY_LINE + column * 2, line, column, at < keys);
    }
  }
  // Before the tile waits: what no other stage writes.
  __device__ __forceinline__ void begin() const {
    if (stage.early)
      for (int chunk = 0; chunk < min(SLOTS - 1, chunks()); chunk++) load(chunk, true, false);
  }

  // Whether a row sees a key.
  __device__ __forceinline__ bool sees(int query, int key) const {
    const int mine = row + query / stage.kernel;
    if (query >= queries || key >= keys) return false;
    if (key >= cached) return key - cached <= mine;
    return !stage.more[0] || start + key <= mine + stage.inner - stage.rows;
  }

  __device__ __forceinline__ void run() const {
    for (int first = 0; first < queries; first += QUERIES) run_queries(first);
  }
  __device__ __forceinline__ void run_queries(int first) const {
    const int lane = threadIdx.x % 32, team = threadIdx.x / 32 / SIDES, side = threadIdx.x / 32 % SIDES;
    for (int i = threadIdx.x; i < QUERIES * (HEAD / 8); i += THREADS) {
      const int query = first + i / (HEAD / 8);
      const u16* line = q + (row + query / stage.kernel) * stride + query % stage.kernel * size;
      copy_eight(queries_memory() + i / (HEAD / 8) * KEY_LINE + i % (HEAD / 8) * 16, line, i % (HEAD / 8) * 8, query < queries);
    }
    for (int chunk = 0; chunk < SLOTS - 1; chunk++) {
      if (chunk < chunks()) load(chunk, first > 0 || !stage.early, true);
      commit_copies();
    }
    float output[DIMS / 8][4] = {}, largest[2] = {LOWEST, LOWEST}, total[2] = {};  // of queries lane / 4 and 8 more
    for (int chunk = 0; chunk < chunks(); chunk++) {
      wait_copies<SLOTS - 2>();
      __syncthreads();  // all have copied this chunk, and read the one whose place is filled now
      if (chunk + SLOTS - 1 < chunks()) load(chunk + SLOTS - 1, true, true);
      commit_copies();
      const int at = chunk * KEYS + team * 16;  // of the warp's first key
      if (at >= keys) continue;
      const char *of_keys = slot(chunk) + team * 16 * KEY_LINE, *of_values = of_keys + KEYS * KEY_LINE;
      float scores[2][4] = {};
      for (int k = 0; k * 16 < size; k++) {
        u32 a[4], b[4];
        read_matrices(queries_memory() + lane % 16 * KEY_LINE + k * 32 + lane / 16 * 16, a);
        read_matrices(of_keys + (lane / 16 * 8 + lane % 8) * KEY_LINE + k * 32 + lane / 8 % 2 * 16, b);
        multiply(scores[0], a, b[0], b[1]), multiply(scores[1], a, b[2], b[3]);
      }
      u32 weights[4];
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int query = first + lane / 4 + half * 8;
        float most = LOWEST, weight[4], sum = 0;
        bool seen[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          seen[i] = sees(query, at + i / 2 * 8 + lane % 4 * 2 + i % 2);
          if (seen[i]) most = fmaxf(most, scores[i / 2][half * 2 + i % 2] * stage.eps);
        }
        most = fmaxf(largest[half], largest_of_four(most));
#pragma unroll
        for (int i = 0; i < 4; i++) {
          weight[i] = seen[i] ? __expf(scores[i / 2][half * 2 + i % 2] * stage.eps - most) : 0.0f;
          sum += weight[i];
        }
        const float keep = __expf(largest[half] - most);
        largest[half] = most, total[half] = total[half] * keep + sum_of_four(sum);
#pragma unroll
        for (int i = 0; i < DIMS / 8; i++) output[i][half * 2] *= keep, output[i][half * 2 + 1] *= keep;
        weights[half] = narrow(weight[0]) | (u32)narrow(weight[1]) << 16;
        weights[half + 2] = narrow(weight[2]) | (u32)narrow(weight[3]) << 16;
      }
#pragma unroll
      for (int i = 0; i < DIMS / 16; i++) {
        if (side * DIMS + i * 16 >= size) continue;
        u32 b[4];
        read_matrices_turned(of_values + lane % 16 * KEY_LINE + (side * DIMS + i * 16) * 2 + lane / 16 * 16, b);
        multiply(output[2 * i], weights, b[0], b[1]), multiply(output[2 * i + 1], weights, b[2], b[3]);
      }
    }
    wait_copies<0>();
    __syncthreads();  // all have read the last chunk
    float* parts = (float*)memory;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float* mine = parts + (team * QUERIES + lane / 4 + half * 8) * PART;
      if (side == 0 && lane % 4 == 0) mine[0] = largest[half], mine[1] = total[half];
#pragma unroll
      for (int i = 0; i < DIMS / 8; i++)
#pragma unroll
        for (int j = 0; j < 2; j++) mine[2 + side * DIMS + i * 8 + lane % 4 * 2 + j] = output[i][half * 2 + j];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < min(QUERIES, queries - first) * size; i += THREADS)
      write(first + i / size, i % size, parts + i / size * PART);
    __syncthreads();  // all have read what the next queries' keys overwrite
  }
  __device__ __forceinline__ void write(int query, int column, const float* parts) const {
    float most = LOWEST, sum = 0, y = 0;
#pragma unroll
    for (int team = 0; team < TEAMS; team++) most = fmaxf(most, parts[team * QUERIES * PART]);
#pragma unroll
    for (int team = 0; team < TEAMS; team++) {
      const float* of_team = parts + team * QUERIES * PART;
      const float keep = __expf(of_team[0] - most);
      sum += of_team[1] * keep, y += of_team[2 + column] * keep;
    }
    y = sum > 0 ? y / sum : 0.0f;
    const int heads = stage.columns / size, mine = head + query % stage.kernel;
    const long long line = row + query / stage.kernel;
    if (stage.splits == 1) return write_number((u16*)tensors.at[stage.y] + line * stage.columns + mine * size + column, narrow(y));
    float* to = (float*)tensors.at[stage.y] + (split * (long long)stage.rows + line) * (stage.columns + heads);
    write_number(to + mine * size + column, y);
    if (column == 0) write_number(to + stage.columns + mine, sum > 0 ? most + logf(sum) : NO_KEY);
  }
};
#endif
