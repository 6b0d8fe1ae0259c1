// `runtime/cuda/warp.cuh` on a CPU. Threads of all blocks of a cluster are fibers; clusters run one after the other.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <random>
#include <stdexcept>
#include <vector>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
using std::min;

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)

struct uint4 { u32 x, y, z, w; };
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
struct Index { int x; };
struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  bool ended = false;
};
static std::vector<Fiber> fibers;
static ucontext_t scheduler;
static int current, block_threads;  // of the fibers, and how many make a block
static Index threadIdx, blockIdx;
static int first_block;
static bool moved;
static std::mt19937 dice;
constexpr int BLOCK_BYTES = 232448;
static std::vector<char> blocks_memory;

inline void become(int fiber) {
  current = fiber, threadIdx.x = fiber % block_threads, blockIdx.x = first_block + fiber / block_threads;
}
inline void yield() {
  const int mine = current;
  swapcontext(&fibers[mine].context, &scheduler);
  become(mine);
}
struct Gathering { int arrived = 0, generation = 0; };
static std::map<int, Gathering> gatherings;
inline void gather(int name, int threads) {
  Gathering& it = gatherings[name];
  const int generation = it.generation;
  if (++it.arrived == threads) it.arrived = 0, it.generation++;
  while (gatherings[name].generation == generation) yield();
  moved = true;
}
inline void __syncthreads() { gather(current / block_threads, block_threads); }
inline void synchronise_cluster() { gather(-1, (int)fibers.size()); }
inline char* block_memory() { return blocks_memory.data() + current / block_threads * BLOCK_BYTES; }
inline float read_of_rank(const float* mine, int rank) {
  return *(const float*)((const char*)mine + (rank - current / block_threads) * BLOCK_BYTES);
}
inline void let_next_kernel_begin() {}
inline void wait_for_previous_kernel() {}
template <int WORDS>
inline void read_once(const void* from, u32 (&to)[WORDS]) {
  if ((uintptr_t)from % (4 * WORDS)) throw std::runtime_error("a read is not aligned");
  memcpy(to, from, 4 * WORDS);
}

inline float __uint_as_float(u32 bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
inline u32 __float_as_uint(float x) {
  u32 bits;
  memcpy(&bits, &x, 4);
  return bits;
}
inline float widen_bf16(u16 x) { return __uint_as_float((u32)x << 16); }
inline float widen_f16(u16 x) { return (float)*(const _Float16*)&x; }
inline float widen(u16 x) { return HALF ? widen_f16(x) : widen_bf16(x); }
inline u16 narrow(float x) {
  if (HALF) {
    const _Float16 y = (_Float16)x;
    return *(const u16*)&y;
  }
  u32 bits;
  memcpy(&bits, &x, 4);
  return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
inline float element(u32 word, int at) { return widen((u16)(word >> 16 * at)); }
inline u32 pair(float low, float high) { return narrow(low) | (u32)narrow(high) << 16; }
inline u32 put_into(u32 x, u32 mask, u32 base) { return x & mask | base; }
inline u32 add_pairs(u32 x, u32 y) { return pair(element(x, 0) + element(y, 0), element(x, 1) + element(y, 1)); }
inline u32 multiply_pairs(u32 x, u32 y) { return pair(element(x, 0) * element(y, 0), element(x, 1) * element(y, 1)); }
inline u32 __byte_perm(u32 x, u32 y, int order) {
  const uint64_t both = x | (uint64_t)y << 32;
  u32 bytes = 0;
  for (int i = 0; i < 4; i++) bytes |= (u32)(both >> 8 * (order >> 4 * i & 7) & 255) << 8 * i;
  return bytes;
}
#include "unpack.cuh"

struct Operands {
  float* sum;
  u32 a[4], b[2];
};
inline void multiply(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {  // by the last lane that comes, for all
  static std::map<int, std::array<Operands, 32>> warps;
  std::array<Operands, 32>& warp = warps[current / 32];
  warp[current % 32] = {sum, {a[0], a[1], a[2], a[3]}, {b0, b1}};
  gather(1000 + current / 32, 32);
  for (int i = 0; i < 4; i++) {
    const int row = current % 32 / 4, column = current % 4 * 2 + i % 2;
    for (int k = 0; k < 4; k++)
      for (int part = 0; part < 2; part++)
        for (int at = 0; at < 2; at++)
          sum[i] += element(warp[row * 4 + k].a[i / 2 + 2 * part], at) * element(warp[column * 4 + k].b[part], at);
  }
  gather(2000 + current / 32, 32);
}

// Runs `kernel` for each cluster, one after the other. What stopped it, or nothing.
static void (*body)();
static const char* failure;
static void enter() {
  const int mine = current;
  try {
    body();
  } catch (const std::exception& error) {
    failure = strdup(error.what());
  }
  fibers[mine].ended = moved = true;
}
inline const char* run_clusters(int clusters, int cluster, int threads, void (*kernel)()) {
  body = kernel, failure = nullptr, block_threads = threads;
  for (int number = 0; number < clusters; number++) {
    first_block = number * cluster;
    blocks_memory.assign(cluster * BLOCK_BYTES, (char)0xFF);  // NaN
    gatherings.clear();
    fibers = std::vector<Fiber>(cluster * threads);
    for (Fiber& fiber : fibers) {
      getcontext(&fiber.context);
      fiber.stack.resize(1 << 16);
      fiber.context.uc_stack.ss_sp = fiber.stack.data(), fiber.context.uc_stack.ss_size = fiber.stack.size();
      fiber.context.uc_link = &scheduler;
      makecontext(&fiber.context, enter, 0);
    }
    for (bool running = true; running;) {
      running = moved = false;
      const int first = dice() % fibers.size();
      for (size_t i = 0; i < fibers.size(); i++) {
        become((first + i) % fibers.size());
        if (fibers[current].ended) continue;
        running = true;
        swapcontext(&scheduler, &fibers[current].context);
        if (failure) return failure;
      }
      if (running && !moved) return "nobody can go on";
    }
  }
  return nullptr;
}
