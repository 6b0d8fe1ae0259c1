// What kernels of few rows have in common: matmuls of a warp, numbers of 16 bits in pairs, clusters of blocks.
// HALF is 0 for bfloat16 and 1 for float16.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;

extern __shared__ __align__(16) char dynamic_memory[];
__device__ __forceinline__ char* block_memory() { return dynamic_memory; }

// Reads what is read once: past L1, and the line beside it into L2.
__device__ __forceinline__ void read_once(const void* from, u32 (&to)[4]) {
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "l"(from));
}
__device__ __forceinline__ void read_once(const void* from, u32 (&to)[2]) {
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v2.u32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "l"(from));
}

// Programmatic dependent launch, whose rule is in pdl.py. Without it both do nothing.
__device__ __forceinline__ void let_next_kernel_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ __forceinline__ void synchronise_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// What another block of the cluster has where this one has `mine`.
__device__ __forceinline__ float read_of_rank(const float* mine, int rank) {
  float x;
  u32 at = (u32)__cvta_generic_to_shared(mine);
  asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %1, %2;\nld.shared::cluster.f32 %0, [there];\n}"
               : "=f"(x) : "r"(at), "r"(rank) : "memory");
  return x;
}

#if HALF
#define HALF_NAME "f16"
#else
#define HALF_NAME "bf16"
#endif

// sum (16 x 8) += a (16 x 16) b (16 x 8). Of lane 4 g + c: a[0] is of row g, a[1] of row g + 8, a[2] of row g and a[3] of
// row g + 8 again, two numbers each; b0 and b1 are of column g. Which two of the 16 they are nobody asks, if a[0] and b0,
// and a[2] and b1, are the same two. sum is of rows g, g, g + 8, g + 8 and columns 2 c and 2 c + 1.
__device__ __forceinline__ void multiply(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." HALF_NAME "." HALF_NAME
               ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// What `unpack.cuh` is made of: x & mask | base in one instruction, and two numbers of 16 bits at a time.
__device__ __forceinline__ u32 put_into(u32 x, u32 mask, u32 base) {
  u32 y;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(y) : "r"(x), "r"(mask), "r"(base));
  return y;
}
__device__ __forceinline__ u32 add_pairs(u32 x, u32 y) {
  u32 sum;
#if HALF
  asm("add.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(x), "r"(y));
#else
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(x), "r"(0x3F803F80), "r"(y));
#endif
  return sum;
}
__device__ __forceinline__ u32 multiply_pairs(u32 x, u32 y) {
  u32 z;
#if HALF
  asm("mul.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
#else
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(z) : "r"(x), "r"(y), "r"(0x80008000));
#endif
  return z;
}
#include "unpack.cuh"

__device__ __forceinline__ float widen_bf16(u16 x) { return __uint_as_float((u32)x << 16); }
__device__ __forceinline__ float widen_f16(u16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}
__device__ __forceinline__ float widen(u16 x) { return HALF ? widen_f16(x) : widen_bf16(x); }
__device__ __forceinline__ u16 narrow(float x) {
  u16 y;
  asm("cvt.rn." HALF_NAME ".f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}
