// `tilesync/sync.cuh` on a CPU: all blocks are there at once, as fibers, and stand still for random times.
//
// What a block writes is seen by others, at the latest that is allowed: when it posts. What it copies to shared memory
// is read when the copy begins or when it is waited for, and is there only then. So a post or a wait that is missing, or
// comes too early, shows as a wrong result.
#pragma once
#include <tuple>

#include "warp.cuh"
using std::max;

typedef uint64_t u64;
#define __grid_constant__

// Several launches at a time, each of which begins when launches that it is behind have ended and others have started. That
// another one has started is, as the driver has it, when all of its blocks have begun, or when it has ended, or any time
// after it could begin: drawn for each launch.
struct Size { int x; };
struct Launch {
  int blocks;
  u64 ended, started;  // a bit for each launch that it is behind
  void (*kernel)();
};
static std::vector<Launch> launches;
static std::vector<int> launch_of, index_of;  // of each block
inline int block() { return current / block_threads; }
inline Size grid() { return {launches[launch_of[block()]].blocks}; }
inline Index place() { return {index_of[block()]}; }
#define gridDim grid()
#define blockIdx place()
inline void begin_launch() { launches[launch_of[block()]].kernel(); }
static std::map<int, std::vector<std::tuple<void*, u32, int>>> written;  // by each block, and not seen yet: 2 or 4 bytes
inline void publish() {
  for (auto& [to, bits, bytes] : written[block()]) memcpy(to, &bits, bytes);
  written[block()].clear();
  moved = true;
}
inline void write_number(u16* to, u16 x) { written[block()].push_back({to, x, 2}); }
inline void write_number(float* to, float x) {
  u32 bits;
  memcpy(&bits, &x, 4);
  written[block()].push_back({to, bits, 4});
}
inline float read_number(const float* from) { return *from; }
inline u16 read_number(const u16* from) { return *from; }
inline uint4 read_four(const void* from) {
  if ((uintptr_t)from % 16) throw std::runtime_error("a read is not aligned");
  return *(const uint4*)from;
}
template <typename T>
inline u32 read_once(const T* from) {
  if ((uintptr_t)from % sizeof(T)) throw std::runtime_error("a read is not aligned");
  return *from;
}

static u64 now;
static int lost_post = -1, posts_done;  // which post of all gets lost
inline u32 acquire(const u32* at) {
  yield();
  return *at;
}
inline void release_add(u32* at, u32 amount) {
  publish();
  if (posts_done++ != lost_post) *at += amount;
}
inline void release_set(u32* at, u32 value) { *at = value, moved = true; }
inline u32 take(u32* at) { return (*at)++; }
inline u32 take_last(u32* at) {
  publish();
  return (*at)++;
}
inline bool claim(u32* at) { return *at == 0 ? (*at = 1, true) : false; }
inline void tell_host(u32* flag) { *flag = 1; }
inline u64 nanoseconds() { return now; }
inline u32 processor() { return block(); }
inline void pause() {}

struct Copy {
  char* to;
  const void* from;
  std::array<char, 16> read;
  bool there, is_read;
};
static std::vector<std::vector<std::vector<Copy>>> copies;  // of each fiber and group
inline void copy_sixteen(char* to, const void* from, bool there) {
  if ((uintptr_t)from % 16 || (to - blocks_memory.data()) % 16) throw std::runtime_error("a copy is not aligned");
  Copy copy{to, from, {}, there, dice() % 2 == 0};
  if (there && copy.is_read) memcpy(copy.read.data(), from, 16);
  copies[current].back().push_back(copy);
}
inline void commit_copies() { copies[current].emplace_back(); }
template <int LEFT>
inline void wait_copies() {
  auto& mine = copies[current];
  for (size_t group = 0; group + 1 + LEFT < mine.size(); group++) {
    for (Copy& copy : mine[group]) {
      if (copy.there && !copy.is_read) memcpy(copy.read.data(), copy.from, 16);
      memcpy(copy.to, copy.read.data(), 16);
    }
    mine[group].clear();
  }
}

template <typename T>
inline std::array<T, 32> from_lanes(T value) {
  static std::map<int, std::array<T, 32>> slots;
  const int warp = current / 32;
  slots[warp][current % 32] = value;
  gather(1000 + warp, 32);
  const std::array<T, 32> all = slots[warp];
  gather(2000 + warp, 32);
  return all;
}
inline void read_matrices(const char* at, u32 (&x)[4]) {
  const auto rows = from_lanes(at);
  for (int i = 0; i < 4; i++) memcpy(&x[i], rows[8 * i + current % 32 / 4] + current % 4 * 4, 4);
  gather(3000 + current / 32, 32);
}
inline void read_matrices_turned(const char* at, u32 (&x)[4]) {
  const auto rows = from_lanes(at);
  for (int i = 0; i < 4; i++)
    for (int j = 0; j < 2; j++)
      memcpy((char*)&x[i] + 2 * j, rows[8 * i + current % 4 * 2 + j] + current % 32 / 4 * 2, 2);
  gather(3000 + current / 32, 32);
}
inline bool all_of_warp(bool x) {
  for (bool each : from_lanes(x))
    if (!each) return false;
  return true;
}
inline float sum_of_four(float x) {
  const auto all = from_lanes(x);
  const int first = current % 32 / 4 * 4;
  return all[first] + all[first + 1] + all[first + 2] + all[first + 3];
}
inline float largest_of_four(float x) {
  const auto all = from_lanes(x);
  const int first = current % 32 / 4 * 4;
  return max(max(all[first], all[first + 1]), max(all[first + 2], all[first + 3]));
}
inline u32 from_lane(u32 x, int lane) { return from_lanes(x)[lane]; }
inline float sum_of_warp(float x) {
  float sum = 0;
  for (float each : from_lanes(x)) sum += each;
  return sum;
}
inline float __expf(float x) { return expf(x); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }

// An order of all launches in which each is behind those that it waits for: drawn, as a graph's is the driver's choice.
inline std::vector<int> draw_order() {
  std::vector<int> order;
  for (u64 issued = 0; order.size() < launches.size();) {
    std::vector<int> ready;
    for (size_t i = 0; i < launches.size(); i++)
      if (!(issued >> i & 1) && !((launches[i].ended | launches[i].started) & ~issued)) ready.push_back(i);
    order.push_back(ready[dice() % ready.size()]), issued |= 1ull << order.back();
  }
  return order;
}

// Runs launches on blocks that are all there, or on `resident` of them at a time. A place that is free goes to the next
// block of any launch that may begin, of which one is drawn; from one queue: of the first that has blocks left.
inline const char* run_all(int resident, int threads, bool one_queue) {
  body = begin_launch, failure = nullptr, block_threads = threads, first_block = 0;
  launch_of.clear(), index_of.clear();
  for (size_t launch = 0; launch < launches.size(); launch++)
    for (int i = 0; i < launches[launch].blocks; i++) launch_of.push_back(launch), index_of.push_back(i);
  const int blocks = launch_of.size();
  blocks_memory.assign((size_t)blocks * BLOCK_BYTES, (char)0xFF);  // NaN
  gatherings.clear(), written.clear();
  copies.assign(blocks * threads, {{}});
  fibers = std::vector<Fiber>(blocks * threads);
  for (Fiber& fiber : fibers) {
    getcontext(&fiber.context);
    fiber.stack.resize(1 << 16);
    fiber.context.uc_stack.ss_sp = fiber.stack.data(), fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = &scheduler;
    makecontext(&fiber.context, enter, 0);
  }
  std::vector<int> rest(blocks), left(blocks, threads);  // turns for which a block stands still; fibers that have not ended
  std::vector<int> warp_rest(blocks * threads / 32 + 1);   // the same of a warp, while the others of its block go on
  std::vector<bool> placed(blocks);
  std::vector<int> begun(launches.size()), unfinished;  // blocks of each launch
  std::vector<bool> may_begin(launches.size());
  for (const Launch& launch : launches) unfinished.push_back(launch.blocks);
  const std::vector<int> order = one_queue ? draw_order() : std::vector<int>();
  std::vector<int> kinds;
  for (size_t i = 0; i < launches.size(); i++) kinds.push_back(dice() % 3);
  const auto has_started = [&](int launch) {
    if (kinds[launch] == 2) return begun[launch] > 0 || may_begin[launch];
    return kinds[launch] == 1 ? begun[launch] == launches[launch].blocks : unfinished[launch] == 0;
  };
  const auto look = [&](size_t launch) {
    for (size_t i = 0; i < launches.size(); i++) {
      if (launches[launch].ended >> i & 1 && unfinished[i] > 0) return false;
      if (launches[launch].started >> i & 1 && !has_started(i)) return false;
    }
    return true;
  };
  int places = resident;
  for (int idle = 0;; now++) {
    bool running = false;
    moved = false;
    while (places > 0) {
      for (size_t i = 0; i < launches.size(); i++) may_begin[i] = may_begin[i] || look(i);
      std::vector<int> ready;
      for (size_t i = 0; i < launches.size(); i++) {
        const int launch = one_queue ? order[i] : i;
        if (begun[launch] == launches[launch].blocks) continue;
        if (may_begin[launch]) ready.push_back(launch);
        if (one_queue) break;
      }
      if (ready.empty()) break;
      const int chosen = ready[dice() % ready.size()];
      for (int b = 0; b < blocks; b++)
        if (launch_of[b] == chosen && index_of[b] == begun[chosen]) placed[b] = true;
      begun[chosen]++, places--, moved = true;
    }
    for (int b = 0; b < blocks; b++) {
      if (left[b] == 0) continue;
      running = true;
      if (!placed[b]) continue;
      if (rest[b] > 0) {
        rest[b]--, moved = true;
        continue;
      }
      if (dice() % 8 == 0) rest[b] = dice() % 20;
      for (int warp = b * threads / 32; warp < (b + 1) * threads / 32; warp++)
        if (warp_rest[warp] > 0)
          warp_rest[warp]--, moved = true;
        else if (dice() % 64 == 0)
          warp_rest[warp] = dice() % 20;
      const int first = dice() % threads;
      for (int i = 0; i < threads; i++) {
        const int fiber = b * threads + (first + i) % threads;
        if (fibers[fiber].ended || warp_rest[fiber / 32] > 0) continue;
        become(fiber);
        swapcontext(&scheduler, &fibers[fiber].context);
        if (failure) return failure;
        if (fibers[fiber].ended && --left[b] == 0) {
          become(fiber);
          publish();
          places++, unfinished[launch_of[b]]--, moved = true;
        }
      }
    }
    if (!running) return nullptr;
    idle = moved ? 0 : idle + 1;
    if (idle > 100000) return "nobody can go on";
  }
}
