// The matmuls of attention, of one warpgroup of Hopper (sm_90a), on tiles whose rows are of 128 swizzled bytes.
//
// `sum` has 64 rows. KEEP says whether the matmul adds to it or begins it. Each runs over 16 of the inner dimension.
#pragma once
#include "hopper.cuh"

#define N32                                                                                                            \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "         \
  "%23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define N64                                                                                                            \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "         \
  "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, "          \
  "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"
#define N88                                                                                                            \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "         \
  "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, "          \
  "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, "          \
  "%65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, "          \
  "%86, %87}"
#define W4(x, i) "=f"(x[i]), "=f"(x[i + 1]), "=f"(x[i + 2]), "=f"(x[i + 3])
#define W16(x, i) W4(x, i), W4(x, i + 4), W4(x, i + 8), W4(x, i + 12)
#define R32(x) R16(x, 0), R16(x, 16)
#define R64(x) R32(x), R16(x, 32), R16(x, 48)
#define R88(x) R64(x), R16(x, 64), R4(x, 80), R4(x, 84)
#define W32(x) W16(x, 0), W16(x, 16)
#define W64(x) W32(x), W16(x, 32), W16(x, 48)
#define W88(x) W64(x), W16(x, 64), W4(x, 80), W4(x, 84)
#define MULTIPLY(keep, columns)                                                                                        \
  "{\n.reg .pred keep;\nsetp.ne.b32 keep, 0, " keep ";\nwgmma.mma_async.sync.aligned.m64n" columns "k16.f32." NUMBER     \
  "." NUMBER " "

// sum += left right^T: rows of both follow the inner dimension.
#define MULTIPLY_ROWS(count, columns, left_at, right_at)                                                              \
  template <bool KEEP>                                                                                                 \
  __device__ __forceinline__ void multiply_rows(float (&sum)[count], u64 left, u64 right) {                            \
    if (KEEP)                                                                                                          \
      asm volatile(MULTIPLY("1", columns) N##count ", " left_at ", " right_at ", keep, 1, 1, 0, 0;\n}"                 \
                   : R##count(sum) : "l"(left), "l"(right));                                                           \
    else                                                                                                               \
      asm volatile(MULTIPLY("0", columns) N##count ", " left_at ", " right_at ", keep, 1, 1, 0, 0;\n}"                 \
                   : W##count(sum) : "l"(left), "l"(right));                                                           \
  }
MULTIPLY_ROWS(32, "64", "%32", "%33")
MULTIPLY_ROWS(64, "128", "%64", "%65")
MULTIPLY_ROWS(88, "176", "%88", "%89")

// sum += left right: left in registers, rows of right across the inner dimension.
#define MULTIPLY_REGISTERS(count, columns, left_at, right_at)                                                         \
  __device__ __forceinline__ void multiply_registers(float (&sum)[count], const u32 (&left)[4], u64 right) {           \
    asm volatile(MULTIPLY("1", columns) N##count ", " left_at ", " right_at ", keep, 1, 1, 1;\n}"                      \
                 : R##count(sum) : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right));                \
  }
MULTIPLY_REGISTERS(32, "64", "{%32, %33, %34, %35}", "%36")
MULTIPLY_REGISTERS(64, "128", "{%64, %65, %66, %67}", "%68")

// sum += left^T right: rows of both across the inner dimension.
template <bool KEEP>
__device__ __forceinline__ void multiply_across(float (&sum)[32], u64 left, u64 right) {
  if (KEEP)
    asm volatile(MULTIPLY("1", "64") N32 ", %32, %33, keep, 1, 1, 1, 1;\n}" : R32(sum) : "l"(left), "l"(right));
  else
    asm volatile(MULTIPLY("0", "64") N32 ", %32, %33, keep, 1, 1, 1, 1;\n}" : W32(sum) : "l"(left), "l"(right));
}
