// y = x W^T + bias + residual of up to 32 rows of x, with a weight of 4, 8 or 16 bits.
//
// The time is that of reading the weight, so all is about having enough of it on its way. Four lanes of a warp read STEP
// inputs of one output together, 16 bytes each, straight into registers; a lane reads outputs g and g + 8, and unpacks
// them into the fragments of 16 outputs for the tensor cores. Which inputs a lane has does not matter to a sum over them
// as long as the other operand, x, has the same ones in the same places: so nothing is packed anew or moved between
// lanes. DEPTH steps are on their way while one is multiplied.
//
// A block has 16 outputs a warp. The CLUSTER blocks of a cluster share outputs and divide the inputs: each keeps in shared
// memory only its part of x, and in the end each adds up, scales and writes its part of the results, reading from the
// others' shared memory. No order depends on time: results are bit-equal from run to run.
//
// The weight does not depend on the kernel before. The first steps are read before it has ended.
#include "warp.cuh"

#define INT8 0
#define FP8 1
#define INT4 2
#define WIDE 3  // 16 bits, not packed

constexpr int WARPS = 8, THREADS = 32 * WARPS, OUTPUTS = 16 * WARPS;
constexpr int SPAN = GROUP > 64 ? GROUP : 64;  // int4: see quantize/formats/int4.py
constexpr int STEP = FORMAT == INT4 ? SPAN : FORMAT == WIDE ? 32 : 64;  // inputs
constexpr int WORDS = FORMAT == INT4 && SPAN == 64 ? 2 : 4;            // that a lane reads of an output in a step
constexpr int STEP_BYTES = 16 * WORDS;
constexpr int GROUPS = FORMAT == INT4 && GROUP == 32 ? 2 : 1;   // of a step
constexpr int NIBBLES = FORMAT == INT4 ? 2 : 1;                 // of a byte: the halves of a step
constexpr int PAIRS = STEP / NIBBLES / 8;                       // of inputs that a lane has in a half of a step
constexpr int PAD = PAIRS == 8 ? 16 : 64;                       // so that rows of x begin in other banks

enum Kind { BFLOAT16, FLOAT16, FLOAT32 };
struct Sizes {
  int rows, columns, inner;
  int scale, bias;           // their kinds
  long long x_row, residual_row;
};

__device__ __forceinline__ float number(const void* from, long long at, int kind) {
  if (kind == FLOAT32) return ((const float*)from)[at];
  const u16 bits = ((const u16*)from)[at];
  return kind == FLOAT16 ? widen_f16(bits) : widen_bf16(bits);
}

struct Step {
  u32 words[2][WORDS];
  u16 scales[2][GROUPS];
  u8 zeros[2][GROUPS];
};

struct Weight {
  const char* rows[2];  // where this lane's bytes begin
  const u16* scales;
  const u8* zeros;
  int outputs[2], columns, lanes_inner;  // inputs of the row from this lane's first on

  __device__ __forceinline__ void read(Step& to, int step) const {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      if (FORMAT == INT4 || step * STEP < lanes_inner)
        read_once(rows[i] + (long long)step * STEP_BYTES, to.words[i]);
      else
#pragma unroll
        for (int word = 0; word < WORDS; word++) to.words[i][word] = 0;
      if (FORMAT == INT4)
#pragma unroll
        for (int group = 0; group < GROUPS; group++) {
          const long long at = (long long)(step * GROUPS + group) * columns + outputs[i];
          to.scales[i][group] = scales[at];
          if (ZEROS) to.zeros[i][group] = zeros[at];
        }
    }
  }
};

// The two pairs of an output for one matmul, numbered `at`.
__device__ __forceinline__ void unpack(const u32 (&words)[WORDS], int at, int nibble, u32 zero, u32& first, u32& second) {
  if (FORMAT == INT8) unpack_int8(words[at], first, second);
  if (FORMAT == FP8) unpack_fp8(words[at], first, second);
  if (FORMAT == INT4) unpack_int4(words[at], nibble, zero, first, second);
  if (FORMAT == WIDE) first = words[2 * at % WORDS], second = words[(2 * at + 1) % WORDS];
}

__device__ __forceinline__ void multiply_step(const Step& step, const char* x, int x_bytes, int rows, float (&sums)[TILES][4]) {
  const int lane = threadIdx.x % 32, row = lane / 4;
  float part[TILES][4];
#pragma unroll
  for (int half = 0; half < NIBBLES; half++) {
    const int group = half % GROUPS;
    if (half == 0 || GROUPS == 2)
#pragma unroll
      for (int tile = 0; tile < TILES; tile++)
#pragma unroll
        for (int i = 0; i < 4; i++) part[tile][i] = 0;
    u32 zero[2];
#pragma unroll
    for (int i = 0; i < 2; i++) zero[i] = negative_zero(ZEROS ? step.zeros[i][group] : 8);
    u32 inputs[TILES][PAIRS];
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
      for (int pair = 0; pair < PAIRS; pair += 4) {
        uint4 four = make_uint4(0, 0, 0, 0);
        if (tile * 8 + row < rows)
          four = *(const uint4*)(x + (tile * 8 + row) * x_bytes + half * STEP + (lane % 4 * PAIRS + pair) * 4);
        inputs[tile][pair] = four.x, inputs[tile][pair + 1] = four.y;
        inputs[tile][pair + 2] = four.z, inputs[tile][pair + 3] = four.w;
      }
#pragma unroll
    for (int at = 0; at < PAIRS / 2; at++) {
      u32 outputs[4];
#pragma unroll
      for (int i = 0; i < 2; i++) unpack(step.words[i], at, half, zero[i], outputs[i], outputs[i + 2]);
#pragma unroll
      for (int tile = 0; tile < TILES; tile++)
        multiply(part[tile], outputs, inputs[tile][2 * at], inputs[tile][2 * at + 1]);
    }
    if (half == NIBBLES - 1 || GROUPS == 2)
#pragma unroll
      for (int tile = 0; tile < TILES; tile++)
#pragma unroll
        for (int i = 0; i < 4; i++)
          sums[tile][i] += FORMAT == INT4 ? part[tile][i] * widen_bf16(step.scales[i / 2][group]) : part[tile][i];
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) __cluster_dims__(CLUSTER, 1, 1)
tilewright_quantized_linear_few_rows(const char* weight, const void* scale, const u8* zero, const u16* x, const void* bias,
                                     const u16* residual, u16* y, const Sizes sizes) {
  const int thread = threadIdx.x, lane = thread % 32, rank = blockIdx.x % CLUSTER;
  const int first_output = blockIdx.x / CLUSTER * OUTPUTS, steps = (sizes.inner + STEP - 1) / STEP;
  const int first = steps * rank / CLUSTER, last = steps * (rank + 1) / CLUSTER;
  let_next_kernel_begin();

  Weight mine;
  mine.scales = (const u16*)scale, mine.zeros = zero, mine.columns = sizes.columns;
  mine.lanes_inner = sizes.inner - lane % 4 * (STEP / 4);
  const long long row_bytes = (long long)sizes.inner * STEP_BYTES / STEP;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    mine.outputs[i] = min(first_output + thread / 32 * 16 + lane / 4 + 8 * i, sizes.columns - 1);
    mine.rows[i] = weight + mine.outputs[i] * row_bytes + lane % 4 * (STEP_BYTES / 4);
  }
  Step on_the_way[DEPTH];
#pragma unroll
  for (int i = 0; i < DEPTH; i++)
    if (first + i < last) mine.read(on_the_way[i], first + i);

  wait_for_previous_kernel();
  char* memory = block_memory();
  const int most_steps = (steps + CLUSTER - 1) / CLUSTER, x_bytes = most_steps * STEP * 2 + PAD;
  for (int i = thread; i < sizes.rows * (last - first) * (STEP / 8); i += THREADS) {
    const int row = i / ((last - first) * (STEP / 8)), at = i % ((last - first) * (STEP / 8));
    const int input = first * STEP + at * 8;
    uint4 eight = make_uint4(0, 0, 0, 0);
    if (input < sizes.inner) eight = *(const uint4*)(x + row * sizes.x_row + input);
    *(uint4*)(memory + row * x_bytes + at * 16) = FORMAT == WIDE ? eight : interleave(eight);
  }
  __syncthreads();

  float sums[TILES][4] = {};
  for (int begin = first; begin < last; begin += DEPTH)
#pragma unroll
    for (int i = 0; i < DEPTH; i++)
      if (begin + i < last) {
        multiply_step(on_the_way[i], memory + (begin + i - first) * STEP * 2, x_bytes, sizes.rows, sums);
        if (begin + i + DEPTH < last) mine.read(on_the_way[i], begin + i + DEPTH);
      }

  float* totals = (float*)(memory + sizes.rows * x_bytes);  // of OUTPUTS outputs a row of x
#pragma unroll
  for (int tile = 0; tile < TILES; tile++)
#pragma unroll
    for (int i = 0; i < 4; i++)
      totals[(tile * 8 + lane % 4 * 2 + i % 2) * OUTPUTS + thread / 32 * 16 + lane / 4 + i / 2 * 8] = sums[tile][i];
  synchronise_cluster();
  for (int i = rank * THREADS + thread; i < sizes.rows * OUTPUTS; i += CLUSTER * THREADS) {
    const int row = i / OUTPUTS, output = first_output + i % OUTPUTS;
    float total = 0;
#pragma unroll
    for (int other = 0; other < CLUSTER; other++) total += read_of_rank(totals + i, other);
    if (output >= sizes.columns) continue;
    if (FORMAT == INT8 || FORMAT == FP8) total *= number(scale, output, sizes.scale);
    if (bias) total += number(bias, output, sizes.bias);
    if (residual) total += widen(residual[row * sizes.residual_row + output]);
    y[(long long)row * sizes.columns + output] = narrow(total);
  }
  synchronise_cluster();  // what is read from here must stay until it has been
}
