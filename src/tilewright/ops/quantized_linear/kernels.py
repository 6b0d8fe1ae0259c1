"""The kernels of `quantized_linear`, by how they move the data.

Each program of a matmul has BLOCK_N rows of the weight and BLOCK_M rows of x, and walks along the inner dimension once.
A step of it is SLICES slices, each BLOCK_K long (int4: a group long), which lie beside each other in memory; a warp
multiplies its own slices, so all warps of a program share one narrow tile of the output and no weight is unpacked
twice. Loads run STAGES - 1 steps ahead: that many bytes are in flight while the tensor cores work. The slices' sums
are added in the end, in fixed order.

Weights are unpacked between shared memory and the tensor core, in registers, to exact integers (or 8-bit floats) of x's
dtype. Scales multiply the accumulator: per channel in the end, per group after the group's matmul. Triton unpacks int8
well by itself. For fp8 and int4 four bytes at a time go through a few instructions of PTX; what becomes float32, as all
does under the interpreter, which would multiply the bits of bfloat16, is computed from plain integers.
"""

import triton
import triton.language as tl

from tilewright.runtime import dispatch

_INTERPRETED = tl.constexpr(dispatch.INTERPRETED)


@triton.jit
def _from_fp8(codes, FLOAT: tl.constexpr):
    """e4m3 as uint8 to another float: its bits in their places, and the exponent's bias by a multiplication."""
    if FLOAT == tl.float32:
        wide = codes.to(tl.uint32)
        bits = ((wide & 0x80) << 24) | ((wide & 0x7F) << 20)
        return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2 ** 120
    elif FLOAT == tl.bfloat16:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, t, c, z;
            mov.b32 c, 0x7b807b80;
            mov.b32 z, 0x80008000;
            prmt.b32 a, $2, 0, 0x1404;
            prmt.b32 b, $2, 0, 0x3424;
            shr.b32 t, a, 4;
            and.b32 t, t, 0x07f007f0;
            lop3.b32 t, a, 0x80008000, t, 0xea;
            fma.rn.bf16x2 $0, t, c, z;
            shr.b32 t, b, 4;
            and.b32 t, t, 0x07f007f0;
            lop3.b32 t, b, 0x80008000, t, 0xea;
            fma.rn.bf16x2 $1, t, c, z;
            }""",
            "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, t, c;
            mov.b32 c, 0x5c005c00;
            prmt.b32 a, $2, 0, 0x1404;
            prmt.b32 b, $2, 0, 0x3424;
            shr.b32 t, a, 1;
            and.b32 t, t, 0x3f803f80;
            lop3.b32 t, a, 0x80008000, t, 0xea;
            mul.f16x2 $0, t, c;
            shr.b32 t, b, 1;
            and.b32 t, t, 0x3f803f80;
            lop3.b32 t, b, 0x80008000, t, 0xea;
            mul.f16x2 $1, t, c;
            }""",
            "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4,
        )  # fmt: skip


@triton.jit
def _from_int4(codes, FLOAT: tl.constexpr):
    """(low nibbles, high nibbles) of bytes, less 8.

    A nibble in the low bits of 128 in bfloat16, or of 1024 in float16, is that number and the nibble. Before Hopper
    the only arithmetic on pairs of bfloat16 is the fused multiply-add.
    """
    if FLOAT == tl.float32:
        low = (codes & 15).to(tl.float32) - 8
        high = (codes >> 4).to(tl.float32) - 8
    elif FLOAT == tl.bfloat16:
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, m, t, c, z;
            mov.b32 m, 0x43004300;
            mov.b32 c, 0x3f803f80;
            mov.b32 z, 0xc308c308;
            prmt.b32 a, $4, 0, 0x4140;
            prmt.b32 b, $4, 0, 0x4342;
            lop3.b32 t, a, 0x000f000f, m, 0xea;
            fma.rn.bf16x2 $0, t, c, z;
            lop3.b32 t, b, 0x000f000f, m, 0xea;
            fma.rn.bf16x2 $1, t, c, z;
            shr.b32 a, a, 4;
            shr.b32 b, b, 4;
            lop3.b32 t, a, 0x000f000f, m, 0xea;
            fma.rn.bf16x2 $2, t, c, z;
            lop3.b32 t, b, 0x000f000f, m, 0xea;
            fma.rn.bf16x2 $3, t, c, z;
            }""",
            "=r,=r,=r,=r,r", [codes], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, m, t, z;
            mov.b32 m, 0x64006400;
            mov.b32 z, 0x64086408;
            prmt.b32 a, $4, 0, 0x4140;
            prmt.b32 b, $4, 0, 0x4342;
            lop3.b32 t, a, 0x000f000f, m, 0xea;
            sub.f16x2 $0, t, z;
            lop3.b32 t, b, 0x000f000f, m, 0xea;
            sub.f16x2 $1, t, z;
            shr.b32 a, a, 4;
            shr.b32 b, b, 4;
            lop3.b32 t, a, 0x000f000f, m, 0xea;
            sub.f16x2 $2, t, z;
            lop3.b32 t, b, 0x000f000f, m, 0xea;
            sub.f16x2 $3, t, z;
            }""",
            "=r,=r,=r,=r,r", [codes], dtype=(tl.float16, tl.float16), is_pure=True, pack=4,
        )  # fmt: skip
    return low, high


@triton.jit
def _store(total, bias, residual, y, row, column, rows, columns, residual_row):
    """Write the tile, transposed, with the bias and the residual added before it is rounded."""
    there = (row < rows)[None, :] & (column < columns)[:, None]
    if bias is not None:
        total += tl.load(bias + column, column < columns, 0.0).to(tl.float32)[:, None]
    if residual is not None:
        total += tl.load(residual + row[None, :] * residual_row + column[:, None], there, 0.0).to(tl.float32)
    tl.store(y + row[None, :] * columns + column[:, None], total.to(y.dtype.element_ty), there)


@triton.jit(do_not_specialize=["rows", "columns", "inner", "x_row", "residual_row"])
def tilewright_quantized_linear_matmul_8bit(
    x, weight, scale, bias, residual, y,
    rows: tl.int64, columns: tl.int64, inner: tl.int64, x_row: tl.int64, residual_row: tl.int64,
    FP8: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, SLICES: tl.constexpr,
    STAGES: tl.constexpr, UNIT: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """One byte a weight, one scale a row of it. EVEN: the steps fit into the inner dimension."""
    FLOAT: tl.constexpr = tl.float32 if _INTERPRETED else x.dtype.element_ty
    STEP: tl.constexpr = SLICES * BLOCK_K
    inner = inner // UNIT * UNIT  # a factor that a number known at run time only would not show
    x_row = x_row // UNIT * UNIT
    column = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, SLICES)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    # Rows of the weight that are not there are read as the last: that takes no mask.
    weights = weight + tl.minimum(column, columns - 1)[None, :, None] * inner + k[:, None, :]
    inputs = x + row[None, None, :] * x_row + k[:, :, None]
    there = (row < rows)[None, None, :]
    sums = tl.zeros([SLICES, BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(0, inner.to(tl.int32), STEP, num_stages=STAGES):
        if EVEN:
            codes = tl.load(weights)
            part = tl.load(inputs, there, 0.0)
        else:
            inside = start + k < inner
            codes = tl.load(weights, inside[:, None, :], 0)
            part = tl.load(inputs, there & inside[:, :, None], 0.0)
        if FP8:
            unpacked = _from_fp8(codes, FLOAT)
        else:
            unpacked = codes.to(FLOAT)
        sums = tl.dot(unpacked, part.to(FLOAT), sums, input_precision="ieee")
        weights += STEP
        inputs += STEP
    total = tl.sum(sums, 0) * tl.load(scale + column, column < columns, 0.0).to(tl.float32)[:, None]
    _store(total, bias, residual, y, row, column, rows, columns, residual_row)


@triton.jit(do_not_specialize=["rows", "columns", "inner", "x_row", "residual_row"])
def tilewright_quantized_linear_matmul_4bit(
    x, weight, scale, zero, bias, residual, y,
    rows: tl.int64, columns: tl.int64, inner: tl.int64, x_row: tl.int64, residual_row: tl.int64,
    GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, SLICES: tl.constexpr, STAGES: tl.constexpr,
    UNIT: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Two weights a byte: the low nibbles of a span's bytes are its first half, the high ones its second.

    A slice is a span: a group, or two groups of 32. `scale` and `zero` are (groups, columns). EVEN: the steps fit into
    the inner dimension.
    """
    FLOAT: tl.constexpr = tl.float32 if _INTERPRETED else x.dtype.element_ty
    SPAN: tl.constexpr = 2 * GROUP if GROUP == 32 else GROUP
    BYTES: tl.constexpr = SPAN // 2
    STEP: tl.constexpr = SLICES * SPAN
    inner = inner // SPAN * SPAN
    x_row = x_row // UNIT * UNIT
    column = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    known = tl.minimum(column, columns - 1)
    slice = tl.arange(0, SLICES)
    byte = tl.arange(0, BYTES)
    weights = weight + known[None, :, None] * (inner // 2) + (slice[:, None] * BYTES + byte[None, :])[:, None, :]
    inputs = x + row[None, None, :] * x_row + (slice[:, None] * SPAN + byte[None, :])[:, :, None]
    of_group = (slice * (SPAN // GROUP))[:, None] * columns + known[None, :]
    there = (row < rows)[None, None, :]
    sums = tl.zeros([SLICES, BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(0, inner.to(tl.int32), STEP, num_stages=STAGES):
        inside = tl.full([SLICES], True, tl.int1) if EVEN else start + slice * SPAN < inner
        if EVEN:
            codes = tl.load(weights)
            first = tl.load(inputs, there, 0.0)
            second = tl.load(inputs + BYTES, there, 0.0)
        else:
            codes = tl.load(weights, inside[:, None, None], 0)
            first = tl.load(inputs, there & inside[:, None, None], 0.0)
            second = tl.load(inputs + BYTES, there & inside[:, None, None], 0.0)
        low, high = _from_int4(codes, FLOAT)
        scales = tl.load(scale + of_group, inside[:, None], 0.0).to(tl.float32)[:, :, None]
        if zero is not None:
            low += 8 - tl.load(zero + of_group, inside[:, None], 0).to(FLOAT)[:, :, None]
        if GROUP < SPAN:
            of_group += columns
        if zero is not None:
            high += 8 - tl.load(zero + of_group, inside[:, None], 0).to(FLOAT)[:, :, None]
        if GROUP < SPAN:
            sums += tl.dot(low, first.to(FLOAT), input_precision="ieee") * scales
            scales = tl.load(scale + of_group, inside[:, None], 0.0).to(tl.float32)[:, :, None]
            sums += tl.dot(high, second.to(FLOAT), input_precision="ieee") * scales
            of_group -= columns
        else:
            part = tl.dot(low, first.to(FLOAT), input_precision="ieee")
            sums += tl.dot(high, second.to(FLOAT), part, input_precision="ieee") * scales
        weights += SLICES * BYTES
        inputs += STEP
        of_group += (STEP // GROUP) * columns
    _store(tl.sum(sums, 0), bias, residual, y, row, column, rows, columns, residual_row)


@triton.jit(do_not_specialize=["inner"])
def tilewright_quantized_linear_dequantize_8bit(
    weight, scale, matrix, inner: tl.int64, FP8: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr
):
    """A program writes BLOCK weights of a row."""
    inner = inner // UNIT * UNIT
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    codes = tl.load(weight + row * inner + k, k < inner, 0)
    if FP8:
        unpacked = _from_fp8(codes, tl.float32)
    else:
        unpacked = codes.to(tl.float32)
    unpacked *= tl.load(scale + row).to(tl.float32)
    tl.store(matrix + row * inner + k, unpacked.to(matrix.dtype.element_ty), k < inner)


@triton.jit(do_not_specialize=["columns", "inner"])
def tilewright_quantized_linear_dequantize_4bit(
    weight, scale, zero, matrix, columns: tl.int64, inner: tl.int64, GROUP: tl.constexpr, SLICES: tl.constexpr
):
    """A program writes SLICES spans of a row."""
    SPAN: tl.constexpr = 2 * GROUP if GROUP == 32 else GROUP
    BYTES: tl.constexpr = SPAN // 2
    inner = inner // SPAN * SPAN
    row = tl.program_id(0).to(tl.int64)
    slice = tl.program_id(1) * SLICES + tl.arange(0, SLICES)
    byte = tl.arange(0, BYTES)[None, :]
    inside = slice < inner // SPAN
    there = inside[:, None] & (byte < BYTES)
    codes = tl.load(weight + row * (inner // 2) + slice[:, None] * BYTES + byte, there, 0)
    halves = _from_int4(codes, tl.float32)
    out = matrix + row * inner + slice[:, None] * SPAN + byte
    for half in tl.static_range(2):
        group = slice * SPAN // GROUP + half * (SPAN // GROUP - 1)
        at = group * columns + row
        values = halves[half]
        if zero is not None:
            values += 8 - tl.load(zero + at, inside, 0).to(tl.float32)[:, None]
        values *= tl.load(scale + at, inside, 0.0).to(tl.float32)[:, None]
        tl.store(out + half * BYTES, values.to(matrix.dtype.element_ty), there)
