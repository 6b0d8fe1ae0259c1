// The matmuls of `ops/attention/matmuls.cuh` on a CPU: each happens when its group is waited for, on what shared memory
// and registers hold then.
#pragma once
#include "hopper.cuh"

inline u64 describe(u32 at, u32 leading) {
  return (u64)((at & 0x3FFFF) >> 4) | (u64)(leading >> 4) << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}
// Element `inner` of row `outer`: rows follow the inner dimension, or lie across it.
inline float element(u64 matrix, int outer, int inner, bool across) {
  const u32 start = (matrix & 0x3FFF) << 4, leading = (matrix >> 16 & 0x3FFF) << 4, stride = (matrix >> 32 & 0x3FFF) << 4;
  const u32 at = across ? start + outer / 64 * leading + inner / 8 * stride + inner % 8 * 128 + outer % 64 * 2
                        : start + outer / 8 * stride + outer % 8 * 128 + inner * 2;
  uint16_t x;
  memcpy(&x, memory + swizzled(at), 2);
  return widen(x);
}

struct Matmul {
  float* sum;
  int columns;
  bool keep;
  u64 left, right;
  const u32* registers;            // in place of `left`
  bool left_across, right_across;  // rows lie across the inner dimension
  int group;                       // of those that a thread has committed
};
static std::vector<Matmul> begun[1024];  // by thread
static int committed[1024];

inline void fence_wgmma() {}
inline void commit_wgmma() { committed[threadIdx.x]++; }
inline void begin(Matmul matmul) {
  matmul.group = committed[threadIdx.x];
  begun[threadIdx.x].push_back(matmul);
}
inline void multiply(const Matmul& it, const Matmul* of_quad[4]) {
  const int thread = threadIdx.x % 128, lane = thread % 32;
  for (int half = 0; half < 2; half++) {
    const int row = thread / 32 * 16 + lane / 4 + half * 8;
    float left[16];
    for (int k = 0; k < 16; k++)
      if (it.registers) {
        const u32 both = of_quad[k % 8 / 2]->registers[half + k / 8 * 2];
        left[k] = widen(k % 2 ? both >> 16 : both & 0xFFFF);
      } else {
        left[k] = element(it.left, row, k, it.left_across);
      }
    for (int i = 0; i < it.columns / 4; i++) {
      const int column = i / 2 * 8 + lane % 4 * 2 + i % 2;
      float& sum = it.sum[i / 2 * 4 + half * 2 + i % 2];
      float all = it.keep ? sum : 0.0f;
      for (int k = 0; k < 16; k++) all += left[k] * element(it.right, column, k, it.right_across);
      sum = all;
    }
  }
}
template <int LEFT>
inline void wait_wgmma() {
  if (threadIdx.x % 32 == 0)
    for (int late = dice() % 8; late > 0; late--) moved = true, yield();
  synchronise_warp();
  std::vector<Matmul>& mine = begun[threadIdx.x];
  const int ready = committed[threadIdx.x] - LEFT, quad = threadIdx.x / 4 * 4;
  size_t done = 0;
  for (; done < mine.size() && mine[done].group < ready; done++) {
    const Matmul* of_quad[4];
    for (int i = 0; i < 4; i++) of_quad[i] = &begun[quad + i].at(done);
    multiply(mine[done], of_quad);
  }
  synchronise_warp();
  mine.erase(mine.begin(), mine.begin() + done);
}
template <bool KEEP, int COUNT>
inline void multiply_rows(float (&sum)[COUNT], u64 left, u64 right) {
  begin({sum, 2 * COUNT, KEEP, left, right, nullptr, false, false});
}
template <int COUNT>
inline void multiply_registers(float (&sum)[COUNT], const u32 (&left)[4], u64 right) {
  begin({sum, 2 * COUNT, true, 0, right, left, false, true});
}
template <bool KEEP>
inline void multiply_across(float (&sum)[32], u64 left, u64 right) {
  begin({sum, 64, KEEP, left, right, nullptr, true, true});
}
