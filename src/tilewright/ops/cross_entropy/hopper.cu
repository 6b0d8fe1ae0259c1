// Cross-entropy of rows of bfloat16 logits, and its gradient; for Hopper (sm_90a).
//
// A block holds a row in its registers from the first look at it to the gradient, so memory sees it once. One thread
// copies the rows that follow into a ring in shared memory meanwhile, as far as there is room: memory has work while
// maxima and sums go from warp to warp, and all of its time is that of its bytes.
//
// Every warp takes its own maximum, and sums exponentials beside that one; one barrier a row makes them the row's.
//
// A row is read in whole vectors of 8 logits, wherever it begins: of the first and the last vector some elements may
// belong to its neighbours. They count as minus infinity, and their gradient is not stored.
#include "hopper.cuh"

// THREADS share a row, each has EACH vectors of 8 logits of it. The ring has SLOTS, each of a vector for every thread.
// RAGGED: rows do not begin, or do not end, at a vector.
constexpr int SLOT = THREADS * 16, WARPS = THREADS / 32;
constexpr float LN2 = 0.6931471805599453f;
constexpr u32 LOWEST = 0xFF7FFF7Fu, NOTHING = 0xFF80FF80u;  // the lowest finite number and minus infinity, twice
constexpr u32 ALL = 0xFFFFFFFFu;
constexpr int FULL = EACH - 1 - RAGGED;  // vectors that every thread has; where a row begins decides on the others

__device__ __forceinline__ u32 larger(u32 a, u32 b) {
  u32 both;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(both) : "r"(a), "r"(b));
  return both;
}
__device__ __forceinline__ float largest_of_warp(float x) {
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) x = fmaxf(x, __shfl_xor_sync(ALL, x, apart));
  return x;
}
__device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) x += __shfl_xor_sync(ALL, x, apart);
  return x;
}
__device__ __forceinline__ uint4 read_vector(u32 at) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(at) : "memory");
  return x;
}

// The elements of a vector from `first` to `end`, minus infinity elsewhere.
__device__ __forceinline__ uint4 only(uint4 x, int first, int end) {
  u32 v[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int k = 0; k < 8; k++)
    if (k < first || k >= end) v[k / 2] = k % 2 ? (v[k / 2] & 0x0000FFFFu) | 0xFF800000u : (v[k / 2] & 0xFFFF0000u) | 0x0000FF80u;
  return make_uint4(v[0], v[1], v[2], v[3]);
}

// Rows are `stride` logits apart, and both matrices begin at a vector. `denominator` and `lse` may be null; `gradient`
// may be `logits`. Targets are of 4 bytes where they are `narrow`, else of 8.
extern "C" __global__ void __launch_bounds__(THREADS + 32, 1)
    tilewright_cross_entropy_rows(const uint4* logits, const void* targets, const float* denominator, float* loss,
                                  float* lse, uint4* gradient, long long ignore_index, long long rows,
                                  long long stride, int classes, int narrow, float z_loss) {
  extern __shared__ __align__(128) char memory[];
  __shared__ float2 parts[2][32];  // maximum and sum of each warp; of this row, and of the next
  __shared__ u64 barriers[2 * SLOTS];
  const u32 ring = shared(memory), full = shared(barriers), empty = full + 8 * SLOTS;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  if (thread == 0) {
    for (int i = 0; i < SLOTS; i++) {
      initialise(full + 8 * i, 1);
      initialise(empty + 8 * i, WARPS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  int slot = 0;

  if (warp == WARPS) {
    u32 parity = 1;  // of a ring that nobody has used
    for (long long row = blockIdx.x; row < rows && lane == 0; row += gridDim.x) {
      const long long begin = row * stride >> 3;
      const int shift = RAGGED ? (int)(row * stride & 7) : 0, vectors = (shift + classes + 7) / 8;
      for (int i = 0; i < EACH; i++) {
        const int first = i * THREADS, bytes = max(0, min(THREADS, vectors - first)) * 16;
        wait(empty + 8 * slot, parity);
        expect(full + 8 * slot, bytes);
        if (bytes > 0)
          asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                           ring + slot * SLOT), "l"(logits + begin + first), "r"(bytes), "r"(full + 8 * slot)
                       : "memory");
        if (++slot == SLOTS) slot = 0, parity ^= 1;
      }
    }
    return;
  }

  const float scale = denominator == nullptr ? 1.0f : *denominator > 0.0f ? 1.0f / *denominator : 0.0f;
  u32 parity = 0;
  int turn = 0;
  for (long long row = blockIdx.x; row < rows; row += gridDim.x, turn ^= 1) {
    const long long begin = row * stride >> 3;
    const int shift = RAGGED ? (int)(row * stride & 7) : 0, end = shift + classes, last = (end - 1) / 8;
    const long long target = narrow ? ((const int*)targets)[row] : ((const long long*)targets)[row];
    const bool ignored = target == ignore_index, known = target >= 0 && target < classes;
    const bool mine = thread == (known ? (int)((shift + target) >> 3) % THREADS : 0);  // who has the target's logit
    float x_target = 0.0f;  // read before the barrier: behind it the gradient may take its place
    if (mine && known) x_target = low(((const volatile unsigned short*)logits)[row * stride + target]);

    uint4 x[EACH];
    u32 both = LOWEST;  // finite: minus infinity less itself is no number
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      wait(full + 8 * slot, parity);
      x[i] = read_vector(ring + slot * SLOT + thread * 16);
      const int at = i * THREADS + thread;
      if (i >= FULL && at > last)
        x[i] = make_uint4(NOTHING, NOTHING, NOTHING, NOTHING);
      else if (RAGGED && (at == 0 || at == last))
        x[i] = only(x[i], at == 0 ? shift : 0, at == last ? end - 8 * at : 8);
      both = larger(larger(both, larger(x[i].x, x[i].y)), larger(x[i].z, x[i].w));
      __syncwarp();
      if (lane == 0) arrive(empty + 8 * slot);
      if (++slot == SLOTS) slot = 0, parity ^= 1;
    }
    float top = largest_of_warp(fmaxf(low(both), high(both))), total = 0.0f;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const u32 v[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
#pragma unroll
      for (int k = 0; k < 4; k++)
        total += power_of_two((low(v[k]) - top) * LOG2E) + power_of_two((high(v[k]) - top) * LOG2E);
    }
    total = sum_of_warp(total);
    if (lane == 0) parts[turn][warp] = make_float2(top, total);
    asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
    const float2 part = lane < WARPS ? parts[turn][lane] : make_float2(low(LOWEST), 0.0f);
    top = largest_of_warp(part.x);
    total = sum_of_warp(part.y * power_of_two((part.x - top) * LOG2E));

    const float log_total = __log2f(total) * LN2, row_lse = top + log_total;
    if (mine) {
      const float value = ((top - x_target) + log_total + z_loss * row_lse * row_lse) * scale;
      loss[row] = ignored ? 0.0f : known ? value : __uint_as_float(0x7FC00000u);
      if (lse != nullptr) lse[row] = row_lse;
    }
    // A class that there is not makes everything no number; where the target is ignored nothing counts, whatever it is.
    const float pull = ignored || known ? (scale + 2.0f * z_loss * row_lse * scale) / total : __uint_as_float(0x7FC00000u);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int at = i * THREADS + thread;
      if (i >= FULL && at > last) break;
      u32 v[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
#pragma unroll
      for (int k = 0; k < 4; k++) {
        v[k] = pack(power_of_two((low(v[k]) - top) * LOG2E) * pull, power_of_two((high(v[k]) - top) * LOG2E) * pull);
        if (ignored) v[k] = 0u;
      }
      if (RAGGED && (at == 0 || at == last)) {
        unsigned short* to = (unsigned short*)(gradient + begin + at);
#pragma unroll
        for (int k = 0; k < 8; k++)
          if (8 * at + k >= shift && 8 * at + k < end) to[k] = (unsigned short)(v[k / 2] >> k % 2 * 16);
        continue;
      }
      asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(gradient + begin + at), "r"(v[0]), "r"(v[1]),
                   "r"(v[2]), "r"(v[3]) : "memory");
    }
    if (mine && known && !ignored) {  // over what it has just written there
      const float g = power_of_two((x_target - top) * LOG2E) * pull - scale;
      ((volatile unsigned short*)gradient)[row * stride + target] = (unsigned short)pack(g, g);
    }
  }
}
