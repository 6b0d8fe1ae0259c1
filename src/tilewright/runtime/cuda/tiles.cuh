// Tiles of a matmul on Hopper (sm_90a): how two neighbours load and multiply them, and where a group's results lie.
//
// Results go to shared memory in the order that the tensor cores leave them, by stmatrix, some columns at a time, and
// from there by one TMA copy, as slopes come in.
#pragma once
#include "hopper.cuh"

// SHARED_BYTES, PAIR_ROWS and COLUMNS are the host's: of a block, and of the tiles of two neighbours.
constexpr int ROWS = PAIR_ROWS / 2, INNER = 64;  // of a tile, and of what a stage holds of the inner dimension
constexpr int STAGES = 4, CHUNK = 64, CHUNKS = COLUMNS / CHUNK;
constexpr int NARROW = CHUNK / 2;  // columns at a time where two tensors are stored
constexpr int LEFT = ROWS * INNER * 2, RIGHT = COLUMNS * INNER * 2, STAGE = LEFT + RIGHT;  // bytes
constexpr int BUFFER = ROWS * CHUNK * 2, BUFFERS = 2;
constexpr int AT_BUFFERS = STAGES * STAGE, AT_SUMS = AT_BUFFERS + 2 * BUFFERS * BUFFER;
constexpr int AT_BARRIERS = AT_SUMS + 2 * 4 * CHUNK * 4;
static_assert(AT_BARRIERS + 8 * (2 * STAGES + 2 * BUFFERS) == SHARED_BYTES, "what the host gives");
constexpr int FULL = 0, EMPTY = STAGES, LOADED = 2 * STAGES;  // barriers: of the stages, and of each group's buffers

__device__ __forceinline__ void arrive(u32 barrier, u32 rank) {
  asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier), "r"(rank) : "memory");
}
__device__ __forceinline__ void load_for_both(u32 to, const Map* map, u32 barrier, int column, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to), "l"(map), "r"(barrier), "r"(column), "r"(row), "h"((short)3) : "memory");
}
__device__ __forceinline__ void synchronise_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// sum += left right, 64 x 192 x 16. In memory rows of `left` and columns of `right` follow the inner dimension; where
// LEFT_ACROSS or RIGHT_ACROSS is 1, it is the other way round.
template <int LEFT_ACROSS, int RIGHT_ACROSS>
__device__ __forceinline__ void multiply(float (&sum)[96], u64 left, u64 right, int keep) {
  asm volatile(
      "{\n.reg .pred keep;\nsetp.ne.b32 keep, %98, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
      "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, "
      "%46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, "
      "%68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, "
      "%90, %91, %92, %93, %94, %95}, %96, %97, keep, 1, 1, %99, %100;\n}"
      : R16(sum, 0), R16(sum, 16), R16(sum, 32), R16(sum, 48), R16(sum, 64), R16(sum, 80)
      : "l"(left), "l"(right), "r"(keep), "n"(LEFT_ACROSS), "n"(RIGHT_ACROSS));
}

struct Place {
  int row, column, thread, group;  // of the tile; in the group; which group
  u32 buffers, sums, loaded;       // of the group
  u32 line;                        // where a thread's part of 16 rows and 16 columns lies in a buffer
};

__device__ __forceinline__ u32 where(const Place& at, int buffer, int half, int pair) {
  return at.buffers + buffer * BUFFER + half * (BUFFER / 2) + (at.line ^ pair * 32);
}
// As `line`, where rows are of 64 bytes: 16 bytes c of row r are where c ^ (r / 2 % 4) would be, and a buffer is half as long.
__device__ __forceinline__ u32 narrow_line(int thread) {
  int lane = thread % 32, row = thread / 32 * 16 + lane % 16;
  return row * 64 + (lane / 16 ^ row / 2 % 4) * 16;
}
__device__ __forceinline__ u32 narrow_where(const Place& at, u32 line, int buffer, int half, int pair) {
  return at.buffers + buffer * (BUFFER / 2) + half * (BUFFER / 4) + (line ^ pair * 32);
}

// The bias of a tile's columns, to where the group finds it after the matmul.
__device__ __forceinline__ void load_bias(const Place& at, const float* bias, int columns) {
  int column = 2 * at.thread;
  if (column >= COLUMNS) return;
  float2 both = make_float2(0.0f, 0.0f);
  if (bias != nullptr && at.column + column < columns) both = __ldg((const float2*)(bias + at.column + column));
  write_shared(at.sums + column * 4, both);
}
