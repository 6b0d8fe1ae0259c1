// A program as a GPU has it: `tilesync/device.py` writes the same structures.
#pragma once
#include "sync.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int APART = 32;  // numbers from a semaphore to the next: each has 128 bytes to itself
constexpr float LOWEST = -3.0e38f;  // than any score; NVRTC has no INFINITY
constexpr int HEAD_BYTES = 128;  // of shared memory, for what all threads of a block must know

enum Activation { NONE, GELU, GELU_TANH, SILU, RELU };
enum Prologue { AS_IT_IS, NORMED, COMBINED };
enum Flags { WAITS = 1, DEPENDENT = 2, TIMES = 4, STREAMS = 8 };

struct Stage {
  int kind, rows, columns, inner;          // of its output, and of the sums in it
  int tile_rows, tile_columns, splits, activation;
  int x, weight, bias, residual, y, gated;  // slots of tensors; -1 for none
  int height, width, channels, kernel;      // of a convolution
  float eps;
  int more[5];   // of attention: causal, first columns of q, k and v, from a head's keys to the next one's
  int extra[3];  // of attention while decoding: the slot of the cache's length, first columns of new keys and values
  int early;     // of attention: whether no stage writes keys and values
  int prologue, norm, heads, parts;  // of a matmul's x: what makes it, of which weight, or of how many heads and splits
  // Of a matmul's weight: see `few_rows.cuh`; inputs that no split divides; slots of scales and zero points, the scales' kind.
  int layout, unit, scale, zero, scale_kind;
  int head, rotated, cos, sin, place;  // of a matmul whose first columns are rotated: numbers of a head, columns, slots
};
struct Task { int stage, split, row, column, first_wait, waits, first_post, posts; };
struct Wait { u32 semaphore, value, total, unused; };  // total: what a launch adds to it
struct Post { u32 semaphore, amount; };
struct Control { u32 epoch, ticket, finished, failed, unused[APART - 4]; };  // in front of the semaphores
struct Cell { u32 ticket, begun, unused[APART - 2]; };  // of a stage that is a launch of its own, behind the semaphores
struct Failure { u32 is_there, task, semaphore, wanted, found; };
struct Time { u32 processor, unused; u64 start, ready, end; };

struct Program {
  const Stage* stages;
  const Task* tasks;
  const Wait* waits;
  const Post* posts;
  Control* control;
  Failure *failure, *report;  // the latter in the host's memory, for who does not wait
  Time* times;
  u64 patience;  // nanoseconds
  int first, count, semaphores, flags;
  int cell, cells, blocks;  // of STREAMS: this stage's number, of how many, and the blocks of all of them
};
struct Tensors { void* at[TENSORS]; };

__device__ __forceinline__ float activate(float x, int activation) {
  switch (activation) {
    case GELU: return 0.5f * x * (1.0f + erff(x * 0.70710678f));
    case GELU_TANH: return x / (1.0f + __expf(-1.5957691216f * (x + 0.044715f * x * x * x)));
    case SILU: return x / (1.0f + __expf(-x));
    case RELU: return x > 0.0f ? x : 0.0f;
  }
  return x;
}

// Columns of sums. `gated`, each is a pair: of the gate and the other half, or of the halves of a head that is rotated.
__device__ __forceinline__ int sum_columns(const Stage& stage) { return stage.head ? stage.columns / 2 : stage.columns; }
__device__ __forceinline__ int column_of_pair(const Stage& stage, int pair) {
  return pair / (stage.head / 2) * stage.head + pair % (stage.head / 2);
}

// The row of the weight that a column of sums is of, and the row of its pair's second half: behind all rows of the gate, or
// half a head further.
__device__ __forceinline__ int weight_output(const Stage& stage, int column, int half) {
  if (stage.head) return column_of_pair(stage, column) + half * stage.head / 2;
  return column + (half ? stage.columns : 0);
}
// Where that row begins, of so many bytes; the other half of a gated matmul may be a tensor of its own.
__device__ __forceinline__ const char* weight_row(const Stage& stage, const Tensors& tensors, int column, int half, long long bytes) {
  const int other = half && stage.gated ? stage.more[0] : 0;
  if (other) return (const char*)tensors.at[other - 1] + column * bytes;
  return (const char*)tensors.at[stage.weight] + weight_output(stage, column, half) * bytes;
}

// What a stage of the user's own is given: where its tile begins, how large it is, and how wide the output.
struct UserTile {
  int row, column, rows, columns, width;
  const void* inputs[5];
  void* output;
  char* memory;  // shared, as much as the stage has asked for
};

// What happens to a sum on its way to memory.
struct Epilogue {
  const Stage& stage;
  const Tensors& tensors;
  int split;

  __device__ __forceinline__ void write(int row, int column, float sum, float up) const {
    if (row >= stage.rows || column >= sum_columns(stage)) return;
    if (stage.head) return rotate(row, column, sum, up);
    const long long at = (long long)row * stage.columns + column;
    if (stage.splits > 1) {
      write_number((float*)tensors.at[stage.y] + (long long)split * stage.rows * stage.columns + at, sum);
      return;
    }
    if (stage.bias >= 0) sum += widen(read_number((const u16*)tensors.at[stage.bias] + column));
    sum = activate(sum, stage.activation);
    if (stage.gated) sum *= up;
    if (stage.residual >= 0) sum += widen(read_number((const u16*)tensors.at[stage.residual] + at));
    write_number((u16*)tensors.at[stage.y] + at, narrow(sum));
  }
  __device__ __forceinline__ void rotate(int row, int pair, float first, float second) const {
    const int half = stage.head / 2, column = column_of_pair(stage, pair);
    if (stage.bias >= 0) {
      const u16* bias = (const u16*)tensors.at[stage.bias] + column;
      first += widen(read_number(bias)), second += widen(read_number(bias + half));
    }
    if (column < stage.rotated) {
      const long long angle = (long long)(*(const int*)tensors.at[stage.place] + row) * half + pair % half;
      const float cosine = ((const float*)tensors.at[stage.cos])[angle], sine = ((const float*)tensors.at[stage.sin])[angle];
      const float turned = first * cosine - second * sine;
      second = second * cosine + first * sine, first = turned;
    }
    u16* y = (u16*)tensors.at[stage.y] + (long long)row * stage.columns + column;
    write_number(y, narrow(first)), write_number(y + half, narrow(second));
  }
};

// Where a split begins, in units of the inner dimension.
__device__ __forceinline__ int split_begin(const Stage& stage, int split) {
  return min(stage.inner, (stage.inner + stage.unit - 1) / stage.unit * split / stage.splits * stage.unit);
}
