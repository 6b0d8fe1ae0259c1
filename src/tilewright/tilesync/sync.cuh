// What a program's tiles need beside `warp.cuh`: semaphores, tickets, copies to shared memory, matrices from there.
#pragma once
#include "warp.cuh"

typedef unsigned long long u64;

// A semaphore: a number in memory that only grows. Who has seen its value sees all that was written before the posts:
// the threads of a block meet at a barrier before one of them posts, and after one of them has seen.
__device__ __forceinline__ u32 acquire(const u32* at) {
  u32 value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}
__device__ __forceinline__ void release_add(u32* at, u32 amount) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(at), "r"(amount) : "memory");
}
__device__ __forceinline__ void release_set(u32* at, u32 value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}
__device__ __forceinline__ u32 take(u32* at) { return atomicAdd(at, 1u); }
__device__ __forceinline__ u32 take_last(u32* at) {  // the last of all sees what the others have written
  u32 value;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(value) : "l"(at) : "memory");
  return value;
}
__device__ __forceinline__ bool claim(u32* at) { return atomicCAS(at, 0u, 1u) == 0; }
__device__ __forceinline__ void tell_host(u32* flag) {  // what was written before is there when the flag is
  asm volatile("st.release.sys.global.u32 [%0], 1;" ::"l"(flag) : "memory");
}
__device__ __forceinline__ u64 nanoseconds() {
  u64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}
__device__ __forceinline__ u32 processor() {
  u32 number;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(number));
  return number;
}
__device__ __forceinline__ void pause() { asm volatile("nanosleep.u32 32;"); }

// Numbers that another block may have written: from L2.
__device__ __forceinline__ uint4 read_four(const void* from) {
  uint4 x;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(from) : "memory");
  return x;
}
__device__ __forceinline__ u16 read_number(const u16* from) {
  u16 x;
  asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(x) : "l"(from) : "memory");
  return x;
}
__device__ __forceinline__ float read_number(const float* from) {
  float x;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(x) : "l"(from) : "memory");
  return x;
}
// Numbers of a weight, as they are stored.
__device__ __forceinline__ u32 read_once(const u8* from) {
  u32 x;
  asm volatile("ld.global.nc.L1::no_allocate.u8 %0, [%1];" : "=r"(x) : "l"(from));
  return x;
}
__device__ __forceinline__ u32 read_once(const u16* from) {
  u16 x;
  asm volatile("ld.global.nc.L1::no_allocate.u16 %0, [%1];" : "=h"(x) : "l"(from));
  return x;
}
__device__ __forceinline__ u32 read_once(const u32* from) {
  u32 x;
  asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(x) : "l"(from));
  return x;
}
__device__ __forceinline__ void write_number(u16* to, u16 x) { *to = x; }
__device__ __forceinline__ void write_number(float* to, float x) { *to = x; }

// Copies of 16 bytes to shared memory, which run beside the threads; zeros where there is nothing to copy.
__device__ __forceinline__ u32 shared(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void copy_sixteen(char* to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared(to)), "l"(from), "r"(there ? 16 : 0) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }

// Four matrices of 8 x 8: lane 8 i + r names where row r of matrix i is.
__device__ __forceinline__ void read_matrices(const char* at, u32 (&x)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(shared(at)) : "memory");
}
// The same, each turned: its columns are rows.
__device__ __forceinline__ void read_matrices_turned(const char* at, u32 (&x)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(shared(at)) : "memory");
}
__device__ __forceinline__ bool all_of_warp(bool x) { return __all_sync(0xFFFFFFFFu, x); }
// Of lanes 4 i to 4 i + 3.
__device__ __forceinline__ float sum_of_four(float x) {
  x += __shfl_xor_sync(0xFFFFFFFFu, x, 1);
  return x + __shfl_xor_sync(0xFFFFFFFFu, x, 2);
}
__device__ __forceinline__ float largest_of_four(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 2));
}
__device__ __forceinline__ u32 from_lane(u32 x, int lane) { return __shfl_sync(0xFFFFFFFFu, x, lane); }
__device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, lanes);
  return x;
}
