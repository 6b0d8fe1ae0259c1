// Products that something happens to on their way to memory; for Hopper (sm_90a).
//
//   VALUE       z = left right^T + bias     stores gelu(z) and its slope         (the first product of an MLP)
//   GRADIENT    g = (left right) slope      stores g, and its sum over 128 rows  (in backward of the second one)
//   SUM         total^T += left^T right     where total has 16 bits              (a classifier's weight, by chunks)
//   PARTS       x = left right              left is three matrices side by side  (in backward of queries, keys, values)
//
// A LEAN_VALUE stores z in place of the slope. Then nobody has to keep gelu(z): LEAN_GRADIENT takes z, has the slope of
// it, and stores gelu(z) once more. While PARTS multiplies, two warps that have nothing else to do sum `left` over its
// rows.
//
// What happens is as many instructions, or as much memory, as an SM manages in half the time of the product itself, so it
// has to run beside it. Two groups of 128 threads therefore take turns (ping-pong): while one multiplies a tile of
// 128 x 192, the other finishes its own. A third group is one thread that loads. What it loads goes through one ring of
// stages, in the order of the tiles, and a group begins its product when the other has seen the last of its own stages.
//
// Two neighbouring SMs (a cluster) take tiles that lie one below the other, and each loads half of what both need of
// `right`, for both: without that the L2 cannot feed them.
//
// Results go to shared memory in the order that the tensor cores leave them, by stmatrix, some columns at a time, and
// from there by one bulk copy, as slopes come in. Rows of 128 bytes are swizzled: 16 bytes c of row r are where
// c ^ (r % 8) would be, so that neither side meets a bank twice.

#include "hopper.cuh"

struct alignas(64) Map { char bytes[128]; };  // CUtensorMap
enum Kind { VALUE, LEAN_VALUE, GRADIENT, LEAN_GRADIENT, SUM, PARTS };

// SHARED_BYTES, PAIR_ROWS and COLUMNS are the host's: of a block, and of the tiles of two neighbours.
constexpr int ROWS = PAIR_ROWS / 2, INNER = 64;  // of a tile, and of what a stage holds of the inner dimension
constexpr int STAGES = 4, CHUNK = 64, CHUNKS = COLUMNS / CHUNK;
constexpr int NARROW = CHUNK / 2;  // columns at a time where two tensors are stored
constexpr int LEFT = ROWS * INNER * 2, RIGHT = COLUMNS * INNER * 2, STAGE = LEFT + RIGHT;  // bytes
constexpr int BUFFER = ROWS * CHUNK * 2, BUFFERS = 2;
constexpr int AT_BUFFERS = STAGES * STAGE, AT_SUMS = AT_BUFFERS + 2 * BUFFERS * BUFFER;
constexpr int AT_BARRIERS = AT_SUMS + 2 * 4 * CHUNK * 4;
static_assert(AT_BARRIERS + 8 * (2 * STAGES + 2 * BUFFERS) == SHARED_BYTES, "what the host gives");
constexpr int AT_COLUMN_SUMS = AT_BUFFERS + 2 * BUFFER;  // of PARTS, whose groups need half as much
constexpr int FULL = 0, EMPTY = STAGES, LOADED = 2 * STAGES;  // barriers: of the stages, and of each group's buffers

__device__ __forceinline__ void arrive(u32 barrier, u32 rank) {
  asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier), "r"(rank) : "memory");
}
__device__ __forceinline__ void load(u32 to, const Map* map, u32 barrier, int column, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(column), "r"(row) : "memory");
}
__device__ __forceinline__ void load_for_both(u32 to, const Map* map, u32 barrier, int column, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to), "l"(map), "r"(barrier), "r"(column), "r"(row), "h"((short)3) : "memory");
}
__device__ __forceinline__ void store(const Map* map, u32 from, int column, int row) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map), "r"(from),
               "r"(column), "r"(row) : "memory");
}
__device__ __forceinline__ void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ __forceinline__ void wait_stores_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void wait_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void synchronise(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void announce(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void synchronise_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Where a matrix in shared memory begins, and how its groups of 8 rows of 128 swizzled bytes follow each other. Along the
// contiguous dimension the next 64 elements are `leading` bytes on, where there are more.
__device__ __forceinline__ u64 describe(u32 at, u32 leading) {
  return (u64)((at & 0x3FFFF) >> 4) | (u64)(leading >> 4) << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

#define R4(x, i) "+f"(x[i]), "+f"(x[i + 1]), "+f"(x[i + 2]), "+f"(x[i + 3])
#define R16(x, i) R4(x, i), R4(x, i + 4), R4(x, i + 8), R4(x, i + 12)

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

// Four matrices of 8 x 8, to shared memory and from there: by their rows, or by their columns.
#define MATRICES(put, get, how)                                                                                      \
  __device__ __forceinline__ void put(u32 at, const u32 (&x)[4]) {                                                   \
    asm volatile("stmatrix.sync.aligned.m8n8.x4" how ".shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(x[0]),      \
                 "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");                                                        \
  }                                                                                                                  \
  __device__ __forceinline__ void get(u32 at, u32 (&x)[4]) {                                                         \
    asm volatile("ldmatrix.sync.aligned.m8n8.x4" how ".shared.b16 {%0, %1, %2, %3}, [%4];"                           \
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at) : "memory");                             \
  }
MATRICES(put, get, "")
MATRICES(put_transposed, get_transposed, ".trans")

__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

constexpr float TANH = 1.5957691216057308f, CUBIC = 0.07135481627260025f;

// Slopes are stored times 7/8. Many lie between 1 and 1.13, where bfloat16 is at its coarsest; below 1 it is twice as fine.
constexpr float SCALE = 0.875f, UNSCALE = 1.0f / SCALE;

// The GELU by tanh is z sigmoid(v), v = 2 sqrt(2 / pi) (z + 0.044715 z^3). Beyond 1e19, where z^2 is infinite, there is no
// slope, as there is none in PyTorch. The slope is times `scale`.
__device__ __forceinline__ void activate(float z, float scale, float& value, float& slope) {
  float square = z * z;
  float share = reciprocal(1.0f + power_of_two(z * fmaf(-LOG2E * CUBIC, square, -LOG2E * TANH)));
  value = z * share;
  slope = fmaf(fmaf(-value, share, value), fmaf(3.0f * scale * CUBIC, square, scale * TANH), scale * share);
}

struct Place {
  int row, column, thread, group;  // of the tile; in the group; which group
  u32 buffers, sums, loaded;       // of the group
  u32 line;                        // where a thread's part of 16 rows and 16 columns lies in a buffer
};

__device__ __forceinline__ u32 line(int thread) {
  int lane = thread % 32, row = thread / 32 * 16 + lane % 16;
  return row * 128 + (lane / 16 ^ row % 8) * 16;
}
__device__ __forceinline__ u32 where(const Place& at, int buffer, int half, int pair) {
  return at.buffers + buffer * BUFFER + half * (BUFFER / 2) + (at.line ^ pair * 32);
}
// The same where rows are of 64 bytes: 16 bytes c of row r are where c ^ (r / 2 % 4) would be, and a buffer is half as long.
__device__ __forceinline__ u32 narrow_line(int thread) {
  int lane = thread % 32, row = thread / 32 * 16 + lane % 16;
  return row * 64 + (lane / 16 ^ row / 2 % 4) * 16;
}
__device__ __forceinline__ u32 narrow_where(const Place& at, u32 line, int buffer, int half, int pair) {
  return at.buffers + buffer * (BUFFER / 2) + half * (BUFFER / 4) + (line ^ pair * 32);
}

__device__ __forceinline__ void write_shared(u32 at, float2 x) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(x.x), "f"(x.y) : "memory");
}
__device__ __forceinline__ float2 read_shared(u32 at) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(at) : "memory");
  return x;
}

// The bias of a tile's columns, to where the group finds it after the product.
__device__ __forceinline__ void load_bias(const Place& at, const float* bias, int columns) {
  int column = 2 * at.thread;
  if (column >= COLUMNS) return;
  float2 both = make_float2(0.0f, 0.0f);
  if (bias != nullptr && at.column + column < columns) both = __ldg((const float2*)(bias + at.column + column));
  write_shared(at.sums + column * 4, both);
}

// Values in one buffer and slopes, or sums, in the next, and while copies read those two, more go to two others.
template <bool LEAN>
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
          activate(first, SCALE, y[2 * k], slope[2 * k]);
          activate(second, SCALE, y[2 * k + 1], slope[2 * k + 1]);
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
template <bool LEAN>
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
            activate(low(kept[k]), 1.0f, y[0], first);
            activate(high(kept[k]), 1.0f, y[1], second);
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

// Between two parts of a sum `total` holds float16, three bits finer than bfloat16, times a power of two for every row
// (a column of `total`) and 192 columns, which lies in `scales` as a bfloat16. The last part leaves bfloat16. An infinite
// number stays infinite, and leaves nothing of the other 191: who finds it in a gradient has no use for them.
__device__ __forceinline__ void load_total(const Place& at, const Map* total, int chunk) {
  const u32 buffer = chunk % BUFFERS, loaded = at.loaded + 8 * buffer;
  expect(loaded, BUFFER);
  for (int half = 0; half < 2; half++)
    load(at.buffers + buffer * BUFFER + half * (BUFFER / 2), total, loaded, at.row + half * 64, at.column + chunk * CHUNK);
}

__device__ __forceinline__ u32 pack_half(float low, float high) {
  u32 both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
__device__ __forceinline__ float2 unpack_half(u32 both) {
  float2 x;
  asm("{\n.reg .f16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}"
      : "=f"(x.x), "=f"(x.y) : "r"(both));
  return x;
}

__device__ __forceinline__ void finish_sum(float (&sum)[2][96], const Place& at, const Map* total, unsigned short* scales,
                                           int rows, bool first, bool last, u32& parity) {
  const int warp = at.thread / 32, lane = at.thread % 32, row = at.row + warp * 16 + lane / 4;
  // In a buffer lie 64 columns, each of 128 bytes: 64 rows of the tile, and behind all those the other 64.
  const u32 line = at.buffers + (lane / 16 * 8 + lane % 8) * 128 + ((2 * warp + lane / 8 % 2) ^ lane % 8) * 16;
  unsigned short* mine = scales + (size_t)(at.column / COLUMNS) * rows + row;
  if (!first) {
    float scale[4];
#pragma unroll
    for (int k = 0; k < 4; k++) {  // rows 8 further down where k is odd, 64 from 2 on
      const int below = k / 2 * 64 + k % 2 * 8;
      scale[k] = row + below < rows ? __uint_as_float((u32)mine[below] << 16) : 0.0f;
    }
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
      const int buffer = chunk % BUFFERS;
      wait(at.loaded + 8 * buffer, parity >> buffer & 1);
      parity ^= 1 << buffer;
#pragma unroll
      for (int part = 0; part < 8; part++) {
        const int half = part / 4, pair = part % 4;
        float* x = &sum[half][(chunk * 8 + pair * 2) * 4];
        u32 old[4];
        get_transposed(line + buffer * BUFFER + half * (BUFFER / 2) + pair * 2048, old);
#pragma unroll
        for (int k = 0; k < 4; k++) {
          const float2 both = unpack_half(old[k]);
          x[2 * k] = fmaf(both.x, scale[half * 2 + k % 2], x[2 * k]);
          x[2 * k + 1] = fmaf(both.y, scale[half * 2 + k % 2], x[2 * k + 1]);
        }
      }
      if (chunk + BUFFERS < CHUNKS) {
        synchronise(3 + at.group, 128);  // all have seen this chunk
        if (at.thread == 0) load_total(at, total, chunk + BUFFERS);
      }
    }
  }
  float inverse[4];
#pragma unroll
  for (int k = 0; k < 4 && !last; k++) {
    const float* x = &sum[k / 2][k % 2 * 2];
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < 96; i += 4) largest = fmaxf(largest, fmaxf(fabsf(x[i]), fabsf(x[i + 1])));
    largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, 2));
    // The largest comes to lie between 2^14 and 2^15, of what lies above 2^-112.
    const u32 exponent = max(__float_as_uint(largest) >> 23, 15u) - 14u;
    inverse[k] = __uint_as_float((254u - exponent) << 23);
    const int below = k / 2 * 64 + k % 2 * 8;
    if (lane % 4 == 0 && row + below < rows) mine[below] = (unsigned short)(exponent << 7);
  }
#pragma unroll
  for (int chunk = 0; chunk < CHUNKS; chunk++) {
    const int buffer = chunk % BUFFERS;
    if (at.thread == 0) {  // what was stored from this buffer before has been read
      if (chunk == 0)
        wait_stores_read();
      else
        asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
    }
    synchronise(3 + at.group, 128);
#pragma unroll
    for (int part = 0; part < 8; part++) {
      const int half = part / 4, pair = part % 4;
      const float* x = &sum[half][(chunk * 8 + pair * 2) * 4];
      u32 packed[4];
#pragma unroll
      for (int k = 0; k < 4; k++) {
        const float by = inverse[half * 2 + k % 2];
        packed[k] = last ? pack(x[2 * k], x[2 * k + 1]) : pack_half(x[2 * k] * by, x[2 * k + 1] * by);
      }
      put_transposed(line + buffer * BUFFER + half * (BUFFER / 2) + pair * 2048, packed);
    }
    fence_async();
    synchronise(3 + at.group, 128);
    if (at.thread == 0) {
      for (int half = 0; half < 2; half++)
        store(total, at.buffers + buffer * BUFFER + half * (BUFFER / 2), at.row + half * 64, at.column + chunk * CHUNK);
      commit_stores();
    }
  }
}

// What the product is, some columns at a time.
__device__ __forceinline__ void finish_plain(float (&sum)[2][96], const Place& at, const Map* out_map) {
  const u32 line = narrow_line(at.thread);
#pragma unroll
  for (int chunk = 0; chunk < COLUMNS / NARROW; chunk++) {
    const int buffer = chunk % 2;
    if (at.thread == 0) asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
    synchronise(3 + at.group, 128);
#pragma unroll
    for (int part = 0; part < 4; part++) {
      const int half = part / 2, pair = part % 2;
      const float* x = &sum[half][(chunk * 4 + pair * 2) * 4];
      u32 packed[4];
#pragma unroll
      for (int k = 0; k < 4; k++) packed[k] = pack(x[2 * k], x[2 * k + 1]);
      put(narrow_where(at, line, buffer, half, pair), packed);
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

// `vector`: the bias, which may be null; of a GRADIENT the sums, one for 128 rows and a column; of a SUM the scales;
// of PARTS sums, one for a block and a column of `left`, or null. Those have their second and third matrix in `kept` and
// `value`, which begin at the columns `second` and `third`.
template <Kind KIND>
__device__ __forceinline__ void run(const Map* left, const Map* right, const Map* kept, const Map* value, const Map* out,
                                    void* vector, int rows, int columns, int inner, bool first = true, bool last = true,
                                    int second = 0, int third = 0) {
  constexpr bool LEAN = KIND == LEAN_VALUE || KIND == LEAN_GRADIENT;
  constexpr bool IS_VALUE = KIND == VALUE || KIND == LEAN_VALUE, IS_GRADIENT = KIND == GRADIENT || KIND == LEAN_GRADIENT;
  constexpr bool LEFT_ACROSS = KIND == SUM, RIGHT_ACROSS = !IS_VALUE;
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
      if (IS_VALUE) load_bias(at, (const float*)vector, columns);
      synchronise(1 + mine, 256);
      int used = turn * steps, stage = used % STAGES, previous = 0;
      u32 full_parity = used / STAGES & 1;
      for (int step = 0; step < steps; step++) {
        wait(barriers + 8 * (FULL + stage), full_parity);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        const u32 a = base + stage * STAGE;
        u64 left_at = describe(a, LEFT_ACROSS ? ACROSS : 16), right_at = describe(a + LEFT, RIGHT_ACROSS ? ACROSS : 16);
#pragma unroll
        for (int k = 0; k < INNER / 16; k++) {
          const int keep = step + k > 0;
          const u64 left_k = left_at + (LEFT_ACROSS ? 128 : 2) * k, right_k = right_at + (RIGHT_ACROSS ? 128 : 2) * k;
          multiply<LEFT_ACROSS, RIGHT_ACROSS>(sum[0], left_k, right_k, keep);
          multiply<LEFT_ACROSS, RIGHT_ACROSS>(sum[1], left_k + 512, right_k, keep);
        }
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        if (step > 0 && thread < 2) arrive(barriers + 8 * (EMPTY + previous), thread);
        previous = stage;
        if (++stage == STAGES) stage = 0, full_parity ^= 1;
      }
      if (tile + clusters < tiles) announce(1 + (mine ^ 1), 256);
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      if (thread < 2) arrive(barriers + 8 * (EMPTY + previous), thread);
      if (IS_VALUE) finish_value<LEAN>(sum, at, kept, value);
      if (IS_GRADIENT) finish_gradient<LEAN>(sum, at, kept, value, out, (float*)vector, columns, parity);
      if (KIND == SUM) finish_sum(sum, at, out, (unsigned short*)vector, rows, first, last, parity);
      if (KIND == PARTS) finish_plain(sum, at, out);
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
GELU_MLP_VALUE(gelu_mlp_value, VALUE)
GELU_MLP_VALUE(gelu_mlp_lean_value, LEAN_VALUE)

KERNEL gelu_mlp_gradient(MAP(left), MAP(right), MAP(slope), MAP(out), float* sums, int rows, int columns, int inner) {
  run<GRADIENT>(&left, &right, &slope, nullptr, &out, sums, rows, columns, inner);
}
KERNEL gelu_mlp_lean_gradient(MAP(left), MAP(right), MAP(sum), MAP(value), MAP(out), float* sums, int rows, int columns,
                              int inner) {
  run<LEAN_GRADIENT>(&left, &right, &sum, &value, &out, sums, rows, columns, inner);
}
KERNEL linear_cross_entropy_add(MAP(left), MAP(right), MAP(total), unsigned short* scales, int rows, int columns, int inner,
                                int first, int last) {
  run<SUM>(&left, &right, nullptr, nullptr, &total, scales, rows, columns, inner, first, last);
}
KERNEL linear_parts_gradient(MAP(first), MAP(second), MAP(third), MAP(right), MAP(out), float* sums, int rows, int columns,
                             int inner, int second_at, int third_at) {
  run<PARTS>(&first, &right, &second, &third, &out, sums, rows, columns, inner, true, true, second_at, third_at);
}
