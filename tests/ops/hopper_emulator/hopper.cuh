// `runtime/cuda/hopper.cuh` on a CPU: what kernels call, without the GPU, so that a kernel's own source can be run.
//
// Threads of a block are fibers that take turns wherever they wait. Whatever runs beside threads on a Hopper happens as
// late as it may here: a copy at some random moment until its barrier is waited for, a matmul when it is waited for. So a
// wait that is missing, or a stage that is freed too early, shows as a wrong result, and a deadlock as an error. How
// memory is ordered is not emulated. Blocks run one after the other, in the order of their numbers: where one waits for a
// count that a later one sets, nobody can go on.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <stdexcept>
#include <vector>

typedef uint32_t u32;
typedef uint64_t u64;
using std::max;
using std::min;
constexpr float LOG2E = 1.4426950408889634f;

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__
#define __align__(bytes) __attribute__((aligned(bytes)))

alignas(1024) char memory[232448];

struct float2 { float x, y; };
struct uint4 { u32 x, y, z, w; };
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }

// Fibers.
struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  bool ended = false;
};
struct Index { int x; };
static std::vector<Fiber> fibers;
static ucontext_t scheduler;
static Index threadIdx, blockIdx, gridDim;
static bool moved;  // whether anything happened since the scheduler looked
static std::mt19937 dice;

inline void yield() {
  const int mine = threadIdx.x;
  swapcontext(&fibers[mine].context, &scheduler);
  threadIdx.x = mine;
}
template <typename Condition>
inline void wait_until(Condition condition) {
  while (!condition()) yield();
  moved = true;
}

// Copies that were begun.
struct Barrier {
  int count, pending, bytes, phase;
  void settle() {
    if (pending == 0 && bytes == 0) phase ^= 1, pending = count;
  }
};
struct Map {
  const char* data;
  long long sizes[4], strides[4];  // of elements: column, head, row, batch
  int rows;                        // of a box
};
struct Copy {
  u32 to, barrier;
  const Map* map;
  int at[4];
  const void* from;  // of numbers side by side, where there is no map
  u32 bytes;
};
static std::map<u32, Barrier> barriers_;
static std::vector<Copy> copies;

inline u32 swizzled(u32 at) { return at ^ (at >> 7 & 7) << 4; }
// Of each number of a box: where it is in shared memory, and in the tensor, or nowhere.
template <typename Visit>
inline void visit_box(const Map& map, u32 shared, const int (&at)[4], Visit visit) {
  for (int row = 0; row < map.rows; row++)
    for (int column = 0; column < 64; column++) {
      const int where[4] = {at[0] + column, at[1], at[2] + row, at[3]};
      const char* there = map.data;
      bool inside = true;
      for (int i = 0; i < 4; i++) {
        inside &= where[i] >= 0 && where[i] < map.sizes[i];
        there += where[i] * map.strides[i] * 2;
      }
      visit(memory + swizzled(shared + row * 128 + column * 2), inside ? (char*)there : nullptr);
    }
}
inline void copy_one() {
  std::swap(copies[dice() % copies.size()], copies.back());
  const Copy copy = copies.back();
  copies.pop_back();
  if (copy.map)
    visit_box(*copy.map, copy.to, copy.at, [](char* to, const char* from) {
      from ? memcpy(to, from, 2) : memset(to, 0, 2);
    });
  else
    memcpy(memory + copy.to, copy.from, copy.bytes);
  Barrier& barrier = barriers_.at(copy.barrier);
  barrier.bytes -= copy.map ? copy.map->rows * 128 : copy.bytes;
  barrier.settle();
  moved = true;
}

// Copies to global memory, of each thread: shared memory is read when that is waited for, and the other written then.
struct Store {
  u32 from, bytes;
  float* to;
  bool adds;
  const Map* map;  // in place of `to`
  int at[4];
  std::vector<char> read;
};
static std::vector<Store> stores[1024];
inline void store_bytes(float* to, u32 from, u32 bytes) { stores[threadIdx.x].push_back({from, bytes, to, false}); }
inline void add_bytes(float* to, u32 from, u32 bytes) { stores[threadIdx.x].push_back({from, bytes, to, true}); }
inline void store(const Map* map, u32 from, int column, int head, int row, int batch) {
  stores[threadIdx.x].push_back({from, 0, nullptr, false, map, {column, head, row, batch}});
}
inline void commit_stores() {}
inline void wait_stores_read() {
  for (int late = dice() % 8; late > 0; late--) moved = true, yield();
  for (Store& it : stores[threadIdx.x]) {
    if (!it.read.empty()) continue;
    if (it.map)
      visit_box(*it.map, it.from, it.at, [&](char* from, char*) { it.read.insert(it.read.end(), from, from + 2); });
    else
      it.read.assign(memory + it.from, memory + it.from + it.bytes);
  }
}
inline void wait_stores() {
  wait_stores_read();
  for (Store& it : stores[threadIdx.x]) {
    const char* next = it.read.data();
    if (it.map)
      visit_box(*it.map, it.from, it.at, [&](char*, char* to) {
        if (to) memcpy(to, next, 2);
        next += 2;
      });
    else
      for (u32 i = 0; i < it.bytes / 4; i++) it.to[i] = ((const float*)next)[i] + (it.adds ? it.to[i] : 0.0f);
  }
  stores[threadIdx.x].clear();
}
inline void fence_async() {}

inline u32 shared(const void* p) { return (u32)((const char*)p - memory); }
inline void initialise(u32 barrier, u32 count) { barriers_[barrier] = {(int)count, (int)count, 0, 0}; }
inline void fence_barriers() {}
inline void arrive(u32 barrier) {
  Barrier& it = barriers_.at(barrier);
  if (it.pending-- <= 0) throw std::runtime_error("more arrivals than a barrier expects");
  it.settle();
}
inline void expect(u32 barrier, u32 bytes) {
  barriers_.at(barrier).bytes += bytes;
  arrive(barrier);
}
inline void wait(u32 barrier, u32 parity) {
  wait_until([&] { return barriers_.at(barrier).phase != (int)parity; });
}
inline void load(u32 to, const Map* map, u32 barrier, int column, int head, int row, int batch) {
  copies.push_back({to, barrier, map, {column, head, row, batch}});
}
inline void load_bytes(u32 to, const void* from, u32 bytes, u32 barrier) {
  if (to % 16 || (uintptr_t)from % 16 || bytes % 16) throw std::runtime_error("a copy is not aligned");
  copies.push_back({to, barrier, nullptr, {}, from, bytes});
}
inline void wait_count(const int* at, int count) {
  wait_until([&] { return *at == count; });
}
inline void set_count(int* at, int count) { *at = count; }

// Registers: threads begin with equal shares of all, and who wants more waits until others have given back enough.
static int free_registers, registers[1024];
template <int COUNT>
inline void set_registers() {
  static_assert(COUNT % 8 == 0 && COUNT >= 24 && COUNT <= 256, "what a warp can have");
  const int more = COUNT - registers[threadIdx.x];
  wait_until([&] { return free_registers >= more; });
  free_registers -= more, registers[threadIdx.x] = COUNT;
}
template <int COUNT>
inline void shrink_registers() {
  if (COUNT > registers[threadIdx.x]) throw std::runtime_error("a thread gives back registers that it does not have");
  set_registers<COUNT>();
}
template <int COUNT>
inline void grow_registers() {
  if (COUNT < registers[threadIdx.x]) throw std::runtime_error("a thread asks for fewer registers than it has");
  set_registers<COUNT>();
}

// Named barriers, and what a warp does together.
struct Gathering { int arrived = 0, generation = 0; };
static std::map<int, Gathering> named;
inline void announce(int name, int threads) {
  Gathering& it = named[name];
  if (++it.arrived == threads) it.arrived = 0, it.generation++;
}
inline void synchronise(int name, int threads) {
  const int generation = named[name].generation;
  announce(name, threads);
  wait_until([&] { return named[name].generation != generation; });
}
inline void __syncthreads() { synchronise(0, (int)fibers.size()); }

inline void synchronise_warp() { synchronise(1000 + threadIdx.x / 32, 32); }
template <typename T>
inline std::array<T, 32> from_lanes(T value) {
  static std::array<T, 32> slots[32];
  std::array<T, 32>& warp = slots[threadIdx.x / 32];
  warp[threadIdx.x % 32] = value;
  synchronise_warp();
  const std::array<T, 32> all = warp;
  synchronise_warp();
  return all;
}
template <typename T>
inline T __shfl_sync(u32, T value, int lane) { return from_lanes(value)[lane]; }
template <typename T>
inline T __shfl_xor_sync(u32, T value, int mask) { return from_lanes(value)[threadIdx.x % 32 ^ mask]; }
inline bool __any_sync(u32, bool value) {
  const auto all = from_lanes(value);
  return std::any_of(all.begin(), all.end(), [](bool one) { return one; });
}

// Numbers in shared memory.
inline float2 read_shared(u32 at) {
  float2 x;
  memcpy(&x, memory + at, 8);
  return x;
}
inline void write_four(u32 at, const float* x) { memcpy(memory + at, x, 16); }
inline void put(u32 at, const u32 (&x)[4]) {  // lane 8 i + r says where row r of matrix i is
  const int lane = threadIdx.x % 32;
  const auto rows = from_lanes(at);
  for (int i = 0; i < 4; i++) memcpy(memory + rows[8 * i + lane / 4] + lane % 4 * 4, &x[i], 4);
  synchronise_warp();
}
inline u32 line(int thread) {
  const int lane = thread % 32, row = thread / 32 * 16 + lane % 16;
  return row * 128 + (lane / 16 ^ row % 8) * 16;
}

// Numbers.
inline float __uint_as_float(u32 bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
inline float widen(uint16_t x) {
#if HALF
  return (float)*(_Float16*)&x;
#else
  return __uint_as_float((u32)x << 16);
#endif
}
inline uint16_t narrow(float x) {
#if HALF
  const _Float16 y = (_Float16)x;
  return *(const uint16_t*)&y;
#else
  u32 bits;
  memcpy(&bits, &x, 4);
  return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
#endif
}
inline u32 pack(float low, float high) { return narrow(low) | (u32)narrow(high) << 16; }
inline float power_of_two(float x) { return exp2f(x); }
inline float reciprocal(float x) { return 1.0f / x; }

// Runs `kernel` for each block, one after the other. What stopped it, or nothing.
static void (*body)();
static const char* failure;
static void enter() {
  const int mine = threadIdx.x;
  try {
    body();
  } catch (const std::exception& error) {
    failure = strdup(error.what());
  }
  fibers[mine].ended = moved = true;
}
inline const char* run_blocks(int blocks, int threads, void (*kernel)()) {
  body = kernel, failure = nullptr, gridDim.x = blocks;
  for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) {
    memset(memory, 0xFF, sizeof memory);  // NaN
    barriers_.clear(), named.clear(), copies.clear();
    free_registers = 0;
    std::fill_n(registers, threads, 65536 / threads / 8 * 8);
    fibers = std::vector<Fiber>(threads);
    for (Fiber& fiber : fibers) {
      getcontext(&fiber.context);
      fiber.stack.resize(1 << 16);
      fiber.context.uc_stack.ss_sp = fiber.stack.data(), fiber.context.uc_stack.ss_size = fiber.stack.size();
      fiber.context.uc_link = &scheduler;
      makecontext(&fiber.context, enter, 0);
    }
    for (bool running = true; running;) {
      running = moved = false;
      const int first = dice() % (threads / 32) * 32;  // who is ahead of whom changes
      for (int i = 0; i < threads; i++) {
        threadIdx.x = (first + i) % threads;
        if (fibers[threadIdx.x].ended) continue;
        running = true;
        swapcontext(&scheduler, &fibers[threadIdx.x].context);
        if (failure) return failure;
      }
      if (!copies.empty() && (!moved || dice() % 4 == 0)) copy_one();
      if (running && !moved) return "nobody can go on";
    }
    for (const auto& of_thread : stores)
      if (!of_thread.empty()) return "a store is not waited for";
    for (auto& [at, barrier] : barriers_)
      if (barrier.bytes) return "a copy is missing";
  }
  return nullptr;
}
