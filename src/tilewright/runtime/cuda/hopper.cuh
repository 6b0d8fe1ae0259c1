// What kernels for Hopper (sm_90a) have in common.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;

constexpr float LOG2E = 1.4426950408889634f;

__device__ __forceinline__ u32 shared(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void initialise(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}
__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
#if BOUNDED_WAITS  // what would wait forever ends in a trap: a kernel that hangs takes the GPU with it
#define BEGIN_WAIT ".reg .u32 begin, now;\nmov.u32 begin, %%globaltimer_lo;\n"
#define BOUND_WAIT                                                                                                     \
  "mov.u32 now, %%globaltimer_lo;\nsub.u32 now, now, begin;\nsetp.gt.u32 done, now, 2000000000;\n@done trap;\n"
#else
#define BEGIN_WAIT
#define BOUND_WAIT
#endif
__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\n" BEGIN_WAIT "AGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra.uni DONE;\n" BOUND_WAIT "bra.uni AGAIN;\nDONE:\n}" ::"r"(barrier), "r"(parity) : "memory");
}

__device__ __forceinline__ void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void synchronise(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void announce(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void fence_barriers() {  // after they were initialised
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Registers of each thread of a warpgroup, once its role is known.
template <int COUNT>
__device__ __forceinline__ void shrink_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT>
__device__ __forceinline__ void grow_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }

// TMA copies of boxes of a matrix. Rows of 128 bytes are swizzled: 16 bytes c of row r are where c ^ (r % 8) would be, so
// that neither side meets a bank twice.
struct alignas(64) Map { char bytes[128]; };  // CUtensorMap

__device__ __forceinline__ void load(u32 to, const Map* map, u32 barrier, int column, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(column), "r"(row) : "memory");
}
// Of a head: rows are of its batch, and what is beyond them is read as 0.
__device__ __forceinline__ void load(u32 to, const Map* map, u32 barrier, int column, int head, int row, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::
          "r"(to), "l"(map), "r"(barrier), "r"(column), "r"(head), "r"(row), "r"(batch) : "memory");
}
__device__ __forceinline__ void store(const Map* map, u32 from, int column, int row) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map), "r"(from),
               "r"(column), "r"(row) : "memory");
}
// Of a head: rows are of its batch, and none is written beyond them.
__device__ __forceinline__ void store(const Map* map, u32 from, int column, int head, int row, int batch) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
               "r"(from), "r"(column), "r"(head), "r"(row), "r"(batch) : "memory");
}
__device__ __forceinline__ void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ __forceinline__ void wait_stores_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void wait_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// TMA copies of numbers that lie side by side, a multiple of 16 bytes from a multiple of 16 on.
__device__ __forceinline__ void load_bytes(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
__device__ __forceinline__ void store_bytes(float* to, u32 from, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void add_bytes(float* to, u32 from, u32 bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from),
               "r"(bytes) : "memory");
}

// A count in memory, which blocks wait for, and what TMA has written before it.
__device__ __forceinline__ void wait_count(const int* at, int count) {
  asm volatile(
      "{\n.reg .pred done;\n.reg .s32 count;\n" BEGIN_WAIT "AGAIN:\nld.acquire.gpu.global.s32 count, [%0];\n"
      "setp.eq.s32 done, count, %1;\n@done bra.uni DONE;\n" BOUND_WAIT "bra.uni AGAIN;\nDONE:\n}" ::"l"(at),
      "r"(count) : "memory");
  asm volatile("fence.proxy.async.global;" ::: "memory");
}
__device__ __forceinline__ void set_count(int* at, int count) {
  asm volatile("fence.proxy.async.global;" ::: "memory");
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(at), "r"(count) : "memory");
}

// Matmuls, which run beside the threads that begin them.
__device__ __forceinline__ void fence_wgmma() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_wgmma() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void wait_wgmma() {  // until LEFT of those committed are running
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// Where a matrix in shared memory begins, and how its groups of 8 rows of 128 swizzled bytes follow each other. Along the
// contiguous dimension the next 64 elements are `leading` bytes on, where there are more.
__device__ __forceinline__ u64 describe(u32 at, u32 leading) {
  return (u64)((at & 0x3FFFF) >> 4) | (u64)(leading >> 4) << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

#define R4(x, i) "+f"(x[i]), "+f"(x[i + 1]), "+f"(x[i + 2]), "+f"(x[i + 3])
#define R16(x, i) R4(x, i), R4(x, i + 4), R4(x, i + 8), R4(x, i + 12)

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

// Where a thread's part of 16 rows and 16 columns lies: of rows of 128 bytes, 16 a warp.
__device__ __forceinline__ u32 line(int thread) {
  int lane = thread % 32, row = thread / 32 * 16 + lane % 16;
  return row * 128 + (lane / 16 ^ row % 8) * 16;
}

__device__ __forceinline__ void write_shared(u32 at, float2 x) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(x.x), "f"(x.y) : "memory");
}
__device__ __forceinline__ void write_four(u32 at, const float* x) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
}
__device__ __forceinline__ float2 read_shared(u32 at) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(at) : "memory");
  return x;
}

// Numbers of 16 bits are of bfloat16, or of float16 where HALF is 1.
#if HALF
#define NUMBER "f16"
#else
#define NUMBER "bf16"
#endif
__device__ __forceinline__ u32 pack(float low, float high) {  // two of them
  u32 both;
  asm("cvt.rn." NUMBER "x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
// Of two of bfloat16.
__device__ __forceinline__ float low(u32 both) { return __uint_as_float(both << 16); }
__device__ __forceinline__ float high(u32 both) { return __uint_as_float(both & 0xFFFF0000u); }

__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
