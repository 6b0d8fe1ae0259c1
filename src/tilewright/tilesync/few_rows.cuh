// A tile of a matmul with few rows: groups of 16 rows of the weight, all rows of x. The weight has 16, 8 or 4 bits.
//
// The warps divide the inner dimension, in turns: a lane reads 16 bytes of two rows of the weight, 4 lanes together 64 of a
// row, and multiplies them as they are, or unpacks them in registers, as in `ops/quantized_linear/few_rows.cu`. DEPTH of
// these reads are on their way, 64 KB of a block, the first ones of the next group or tile among them: they do not depend on
// any other tile, and begin before this group's last sums and the next tile's waits. They are bytes, of whatever layout: a
// tile of int4 fetches the first ones of a tile of 16 bits. Between groups the warps meet once, for their sums: those of the
// next group are beside them.
//
// Scales of the weight's rows multiply a group's sums. Int4 has blocks of 32, 64 or 128 inputs, whose scales multiply the sums
// of the tensor cores: each lane of four fetches those of one block of four, as early as the weight, and the others have them
// from it.
//
// The floor is the weight's bytes, scales and zero points among them; x comes from L2. 17.7 bytes a clock come to each of 132
// SMs at 4.28 TB/s: 1,024 of them, which a warp has in a step, in 58 clocks, in which an SM issues 231 instructions. Those of
// a step, for up to 8 rows of x, by the source; addresses and bounds add some 50:
//
//              what a lane has of a row, in inputs                     unpack  mma  x  scales  reads  all
//   16 bits    8                                                            0    2  1       0      2    5
//   int8       16: two bytes each in the mantissas of 128                  56    4  2       0      2   64
//   fp8        16: exponent and mantissa shifted, times 2^120              72    4  2       0      2   80
//   int4, 128  32: 16 of a span's first half, low nibbles, 16 of the other 88    8  4       8      3  111
//   int4, 64   32: of two spans, 8 bytes each; a matmul has one block      88    8  4      16      5  121
//   int4, 32   the same                                                    88    8  4      32      6  138
#pragma once
#include "prologue.cuh"

#if FEW_TILES
enum Layout { WIDE, INT8, FP8, INT4_32, INT4_64, INT4_128 };
enum ScaleKind { BFLOAT16, FLOAT16, FLOAT32 };
constexpr int FEW_ROWS = 8 * FEW_TILES;
constexpr int SUMS_BYTES = WARPS * FEW_ROWS * 16 * 4;
constexpr bool HAS_INT4 = LAYOUTS >> INT4_32, HAS_SPANS_OF_64 = LAYOUTS >> INT4_32 & 3;  // bit L of LAYOUTS: there is L
// Steps on their way: there are registers for 4 beside int4 and more than 16 rows, or groups of 32 and more than 8.
constexpr int DEPTH = FEW_TILES > (LAYOUTS >> INT4_32 & 1 ? 1 : 2) && HAS_INT4 ? 4 : 8;
constexpr int TURN = 64 * WARPS;  // bytes of a row that all warps have in a step

__device__ __forceinline__ long long bytes_of(const Stage& stage, long long inputs) {
  return stage.layout == WIDE ? inputs * 2 : stage.layout >= INT4_32 ? inputs / 2 : inputs;
}
__device__ __forceinline__ float number(u32 bits, int kind) {
  return kind == FLOAT32 ? __uint_as_float(bits) : kind == FLOAT16 ? widen_f16((u16)bits) : widen_bf16((u16)bits);
}

template <int LAYOUT>
struct Packing {
  static constexpr bool IS_INT4 = LAYOUT >= INT4_32;
  static constexpr int STEP = LAYOUT == WIDE ? 32 : IS_INT4 ? 128 : 64, INPUTS = STEP * WARPS;  // of a warp, of all
  static constexpr int PARTS = STEP / 32;  // of a lane's step, 8 inputs each
  static constexpr int BLOCKS = IS_INT4 ? 4 >> (LAYOUT - INT4_32) : 0;  // of a step
  static constexpr bool IS_SPREAD = LAYOUT == WIDE || (IS_INT4 && BLOCKS > 1);  // 4 lanes have 32 inputs side by side
  static constexpr int PAD = IS_SPREAD ? 64 : 16;  // bytes, so that rows of x begin in other banks
  static constexpr int FITTING = (X_BYTES / FEW_ROWS / 2 - 32) / INPUTS;  // steps of x in shared memory
  static constexpr int PANEL = FITTING >= DEPTH ? DEPTH : FITTING >= 4 ? 4 : FITTING >= 2 ? 2 : 1;  // a part of DEPTH
  static_assert(FITTING >= 1 && DEPTH % PANEL == 0, "x of a step fits in shared memory");

  // The first input of a part that a lane has. Parts of int4: the two halves of a span, of its first bytes and of the others.
  __device__ __forceinline__ static int input(int part, int lane) {
    if (LAYOUT == WIDE) return lane % 4 * 8;
    if (!IS_INT4) return lane % 4 * 16 + part * 8;
    if (BLOCKS > 1) return part * 32 + lane % 4 * 8;
    return part % 2 * 64 + lane % 4 * 16 + part / 2 * 8;
  }
  // The two pairs of one of a part's two matmuls.
  __device__ __forceinline__ static void unpack(const u32 (&words)[4], int part, int at, u32 zero, u32& first, u32& second) {
    if (LAYOUT == WIDE) first = words[2 * at], second = words[2 * at + 1];
    if (LAYOUT == INT8) unpack_int8(words[2 * part + at], first, second);
    if (LAYOUT == FP8) unpack_fp8(words[2 * part + at], first, second);
    if (IS_INT4) unpack_int4(words[part / 2 * 2 + at], part % 2, zero, first, second);
  }
};

struct Steps {
  u32 words[2][4];
};
struct Quad {  // of four blocks of int4, one of each lane of four: as they are stored, or, when they are used, as they are needed
  u32 scales[2], zeros[2];
};

struct FewRows {
  Steps on_the_way[DEPTH];
  Quad quads[HAS_INT4 ? DEPTH : 1];
  int held_stage = -1, held_row = -1;  // whose x is in shared memory

  struct Weight {
    const char* rows[2];
    int bytes[2];  // of a row's part from this lane's first on
    // Of int4: the first block's scales, of which each is wide or has 16 bits; how many blocks there are, and, as a power
    // of two, in a step of the warp.
    const char* scales;
    const u8* zeros;
    int outputs[2], width, blocks, power;
    bool is_wide;

    __device__ __forceinline__ void read(Steps& to, int step) const {
      const int at = step * TURN;
#pragma unroll
      for (int i = 0; i < 8; i++) to.words[i / 4][i % 4] = 0;
#pragma unroll
      for (int i = 0; i < 2; i++) {
        if (at >= bytes[i]) continue;
        if (HAS_SPANS_OF_64 && power > 0) {  // 8 bytes of two spans, so that a matmul of the tensor cores has one block
          typedef u32(&Half)[2];
          read_once(rows[i] + at, (Half)to.words[i][0]);
          if (at + 32 < bytes[i]) read_once(rows[i] + at + 32, (Half)to.words[i][2]);
        } else {
          read_once(rows[i] + at, to.words[i]);
        }
      }
    }
    // The blocks 4 `number` to 4 `number` + 3 of those that the warp has from a step on.
    __device__ __forceinline__ void read(Quad& to, int number, int step) const {
      const int place = 4 * number + threadIdx.x % 4;
      const int block = ((step + (place >> power)) * WARPS + threadIdx.x / 32 << power) + (place & (1 << power) - 1);
      to.scales[0] = to.scales[1] = to.zeros[0] = to.zeros[1] = 0;
      if (block >= blocks) return;
      const long long first = (long long)block * width + outputs[0], second = first + outputs[1] - outputs[0];
      if (is_wide)
        to.scales[0] = read_once((const u32*)scales + first), to.scales[1] = read_once((const u32*)scales + second);
      else
        to.scales[0] = read_once((const u16*)scales + first), to.scales[1] = read_once((const u16*)scales + second);
      if (zeros) to.zeros[0] = read_once(zeros + first), to.zeros[1] = read_once(zeros + second);
    }
  };

  struct Next {  // the group that follows, of this tile or another one
    const Stage& stage;
    Task task;
    int group;
    bool is_there;
  };

  // Columns, or pairs of them: of a group, and of a tile.
  __device__ __forceinline__ static int group_columns(const Stage& stage) { return stage.gated ? 8 : 16; }
  __device__ __forceinline__ static int columns_of(const Stage& stage, const Task& task) {
    return min(stage.tile_columns, sum_columns(stage) - task.column * stage.tile_columns);
  }
  __device__ __forceinline__ Weight weight_of(const Stage& stage, const Task& task, const Tensors& tensors, int group) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, columns = columns_of(stage, task);
    const int first = split_begin(stage, task.split), end = split_begin(stage, task.split + 1);
    Weight weight;
    weight.power = stage.layout >= INT4_32 ? INT4_128 - stage.layout : -1;
    const int offset = warp * 64 + lane % 4 * (weight.power > 0 ? 8 : 16);
    weight.width = stage.columns * (stage.gated && !stage.head ? 2 : 1), weight.is_wide = stage.scale_kind == FLOAT32;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int own = group * group_columns(stage) + lane / 4 + (stage.gated ? 0 : 8 * i), half = stage.gated ? i : 0;
      const int column = task.column * stage.tile_columns + min(own, columns - 1);
      const char* from = weight_row(stage, tensors, column, half, bytes_of(stage, stage.inner));
      weight.rows[i] = from + bytes_of(stage, first) + offset;
      weight.bytes[i] = own < columns ? (int)bytes_of(stage, end - first) - offset : 0;
      weight.outputs[i] = weight_output(stage, column, half);
    }
    weight.scales = nullptr, weight.zeros = nullptr, weight.blocks = 0;
    if (HAS_INT4 && weight.power >= 0) {
      const int inputs = 128 >> weight.power;
      const long long before = (long long)(first / inputs) * weight.width;
      weight.blocks = (end - first) / inputs;
      weight.scales = (const char*)tensors.at[stage.scale] + before * (weight.is_wide ? 4 : 2);
      if (stage.zero >= 0) weight.zeros = (const u8*)tensors.at[stage.zero] + before;
    }
    return weight;
  }

  __device__ __forceinline__ void begin(const Stage& stage, const Task& task, const Tensors& tensors) {
    const Weight weight = weight_of(stage, task, tensors, 0);
#pragma unroll
    for (int i = 0; i < DEPTH; i++) weight.read(on_the_way[i], i);
    read_first_quads(weight);
  }
  __device__ __forceinline__ void read_first_quads(const Weight& weight) {
    if (HAS_INT4 && weight.power >= 0)
#pragma unroll
      for (int number = 0; number < DEPTH; number++)
        if (4 * number < DEPTH << weight.power) weight.read(quads[number], number, 0);
  }

  __device__ __forceinline__ void read_x(const Stage& stage, const Task& task, const Tensors& tensors, char* x, int from,
                                         int inputs, int x_bytes, const float* squares) const {
    const int first = task.row * stage.tile_rows, rows = min(stage.tile_rows, stage.rows - first);
    const int end = split_begin(stage, task.split + 1), eights = inputs / 8;
    for (int i = threadIdx.x; i < rows * eights; i += THREADS) {
      const int row = i / eights, at = i % eights * 8;
      uint4 eight = make_uint4(0, 0, 0, 0);
      if (from + at < end) eight = make_eight(stage, tensors, first + row, from + at, squares + row);
      *(uint4*)(x + row * x_bytes + at * 2) = stage.layout == WIDE ? eight : interleave(eight);
    }
  }

  // The step that is in `slot`; x: its first input of this warp in the first row.
  template <int LAYOUT>
  __device__ __forceinline__ void multiply_step(int slot, const char* x, int x_bytes, int rows, const Stage& stage,
                                                float (&sums)[FEW_TILES][4]) {
    typedef Packing<LAYOUT> Packed;
    const int lane = threadIdx.x % 32;
    float of_block[FEW_TILES][4] = {};
    u32 zero[2] = {};
#pragma unroll
    for (int part = 0; part < Packed::PARTS; part++) {
      const int place = slot * Packed::BLOCKS + part * Packed::BLOCKS / 4;  // of its block, among those on their way
      Quad& quad = quads[place / 4];
      if (Packed::IS_INT4 && part * Packed::BLOCKS % 4 == 0)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          if (place % 4 == 0) {
            quad.scales[i] = __float_as_uint(number(quad.scales[i], stage.scale_kind));
            quad.zeros[i] = negative_zero(stage.zero < 0 ? 8 : quad.zeros[i]);
          }
          zero[i] = stage.zero < 0 ? quad.zeros[i] : from_lane(quad.zeros[i], lane / 4 * 4 + place % 4);
        }
      u32 weight[2][4];
#pragma unroll
      for (int at = 0; at < 2; at++)
#pragma unroll
        for (int i = 0; i < 2; i++)
          Packed::unpack(on_the_way[slot].words[i], part, at, zero[i], weight[at][i], weight[at][i + 2]);
#pragma unroll
      for (int tile = 0; tile < FEW_TILES; tile++) {
        uint4 eight = make_uint4(0, 0, 0, 0);
        if (tile * 8 + lane / 4 < rows)
          eight = *(const uint4*)(x + (tile * 8 + lane / 4) * x_bytes + Packed::input(part, lane) * 2);
        float(&into)[4] = Packed::IS_INT4 ? of_block[tile] : sums[tile];
        multiply(into, weight[0], eight.x, eight.y);
        multiply(into, weight[1], eight.z, eight.w);
      }
      if (Packed::IS_INT4 && (part + 1) * Packed::BLOCKS % 4 == 0)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const float scale = __uint_as_float(from_lane(quad.scales[i], lane / 4 * 4 + place % 4));
#pragma unroll
          for (int tile = 0; tile < FEW_TILES; tile++)
#pragma unroll
            for (int j = 2 * i; j < 2 * i + 2; j++) sums[tile][j] += scale * of_block[tile][j], of_block[tile][j] = 0;
        }
    }
  }

  // Adds up a warp's share of a group, and fetches what comes behind it: in the end of the next group or tile, where there is
  // one, and `source`, which was this group's weight, is that one's.
  template <int LAYOUT>
  __device__ __forceinline__ void accumulate(const Stage& stage, const Task& task, int group, const Next& next,
                                             const Tensors& tensors, char* memory, Weight& source,
                                             float (&sums)[FEW_TILES][4]) {
    if (!(LAYOUTS >> LAYOUT & 1) || stage.layout != LAYOUT) return;
    typedef Packing<LAYOUT> Packed;
    const int warp = threadIdx.x / 32, rows = min(stage.tile_rows, stage.rows - task.row * stage.tile_rows);
    const int begin = split_begin(stage, task.split), inner = split_begin(stage, task.split + 1) - begin;
    const int steps = (inner + Packed::INPUTS - 1) / Packed::INPUTS;
    const int panels = max(1, (X_BYTES / rows / 2 - 32) / (Packed::INPUTS * Packed::PANEL));  // that fit in shared memory
    const int panel = max(1, min(panels, (steps + Packed::PANEL - 1) / Packed::PANEL)) * Packed::PANEL;  // steps
    const int x_bytes = panel * Packed::INPUTS * 2 + Packed::PAD;
    const bool held = panel >= steps && held_stage == task.stage && held_row == task.row && (stage.splits == 1 || group > 0);
    float* squares = (float*)(memory + 2 * SUMS_BYTES);
    char* x = memory + 2 * SUMS_BYTES + SQUARES_BYTES;
    if (stage.prologue == NORMED && group == 0 && !held) sum_squares(stage, tensors, task.row * stage.tile_rows, rows, squares);
    int at = panel;  // of the panel, where the next step is
    for (int step = 0; step == 0 || step < steps; step += DEPTH) {
      int ahead = step + DEPTH;  // of the source, the step that comes to the first slot
      const bool is_last = ahead >= steps;
      if (is_last && next.is_there) source = weight_of(next.stage, next.task, tensors, next.group), ahead = 0;
#pragma unroll
      for (int i = 0; i < DEPTH; i++) {
        if (i % Packed::PANEL == 0 && at == panel && step + i < steps) {
          at = 0;
          if (!held) {
            __syncthreads();  // the panel before was read
            read_x(stage, task, tensors, x, begin + (step + i) * Packed::INPUTS, panel * Packed::INPUTS, x_bytes, squares);
            __syncthreads();
          }
        }
        if (step + i < steps)
          multiply_step<LAYOUT>(i, x + (at * Packed::INPUTS + warp * Packed::STEP) * 2, x_bytes, rows, stage, sums);
        at++;
        source.read(on_the_way[i], ahead + i);
        const int quad = max(0, (i + 1) * Packed::BLOCKS / 4 - 1);
        if (Packed::IS_INT4 && !is_last && (i + 1) * Packed::BLOCKS % 4 == 0) source.read(quads[quad], quad, ahead);
      }
    }
  }

  // `next` is a task of this kind, or null.
  __device__ __forceinline__ void run(const Stage& stage, const Task& task, const Stage* next_stage, const Task* next,
                                      const Tensors& tensors, char* memory) {
    const int columns = columns_of(stage, task), each = group_columns(stage);
    for (int group = 0; group * each < columns; group++) {
      const bool is_last = (group + 1) * each >= columns, leaves = is_last && next;
      const Next following{leaves ? *next_stage : stage, leaves ? *next : task, is_last ? 0 : group + 1, !is_last || next};
      run_group(stage, task, group, following, tensors, memory);
      held_stage = task.stage, held_row = task.row;
    }
  }
  __device__ __forceinline__ void run_group(const Stage& stage, const Task& task, int group, const Next& next,
                                            const Tensors& tensors, char* memory) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int first = task.row * stage.tile_rows, rows = min(stage.tile_rows, stage.rows - first);
    // In the epilogue a thread has the same column of each of its rows.
    const int each = group_columns(stage), column = threadIdx.x % each, columns = columns_of(stage, task) - group * each;
    const int output = task.column * stage.tile_columns + group * each + column;
    const bool is_scaled = stage.layout == INT8 || stage.layout == FP8, is_wide = stage.scale_kind == FLOAT32;
    u32 scales[2] = {};
#pragma unroll
    for (int half = 0; half < 2; half++)
      if (is_scaled && half <= stage.gated && column < columns) {
        const void* from = tensors.at[stage.scale];
        const int at = weight_output(stage, output, half);
        scales[half] = is_wide ? read_once((const u32*)from + at) : read_once((const u16*)from + at);
      }
    float sums[FEW_TILES][4] = {};
    Weight source = weight_of(stage, task, tensors, group);
    accumulate<WIDE>(stage, task, group, next, tensors, memory, source, sums);
    accumulate<INT8>(stage, task, group, next, tensors, memory, source, sums);
    accumulate<FP8>(stage, task, group, next, tensors, memory, source, sums);
    accumulate<INT4_32>(stage, task, group, next, tensors, memory, source, sums);
    accumulate<INT4_64>(stage, task, group, next, tensors, memory, source, sums);
    accumulate<INT4_128>(stage, task, group, next, tensors, memory, source, sums);
    if (next.is_there) read_first_quads(source);

    float* totals = (float*)(memory + group % 2 * SUMS_BYTES);
#pragma unroll
    for (int tile = 0; tile < FEW_TILES; tile++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        totals[(warp * FEW_ROWS + tile * 8 + lane % 4 * 2 + i % 2) * 16 + lane / 4 + i / 2 * 8] = sums[tile][i];
    __syncthreads();
    const Epilogue epilogue{stage, tensors, task.split};
    for (int row = threadIdx.x / each; row < rows && column < columns; row += THREADS / each) {
      float sum = 0, up = 0;
#pragma unroll
      for (int other = 0; other < WARPS; other++) {
        const float* of_warp = totals + (other * FEW_ROWS + row) * 16;
        sum += of_warp[column];
        if (stage.gated) up += of_warp[column + 8];
      }
      if (is_scaled) sum *= number(scales[0], stage.scale_kind), up *= number(scales[1], stage.scale_kind);
      epilogue.write(first + row, output, sum, up);
    }
  }
};
#endif
