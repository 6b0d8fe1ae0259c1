"""The kernels of `quantized_linear`, by how they move the data.

Each program of a matmul walks along the inner dimension once, for BLOCK_M rows of x, as a batch of small matmuls, one
or more a warp, so that no weight is unpacked twice. Of few rows the batch is SLICES slices of the inner dimension, each
BLOCK_K long (int4: a span long), beside each other in memory, of BLOCK_N rows of the weight; their sums are added in
the end, in fixed order. Of more rows it is CHUNKS chunks of BLOCK_N rows of the weight, which share a tile of x: many
programs would read x more often than the weight. To have enough programs then, SPLITS of them share the inner
dimension, and a second kernel adds what they leave. Loads run STAGES - 1 steps ahead: that many bytes are in flight
while the tensor cores work.

Weights are unpacked between shared memory and the tensor core, in registers, to exact integers (or 8-bit floats) of x's
dtype. Scales multiply the accumulator: per channel in the end, per group after the group's matmul. Triton unpacks int8
well by itself. For fp8 and int4 four bytes at a time go through a few instructions of PTX; what becomes float32, as all
does under the interpreter, which would multiply the bits of bfloat16, is computed from plain integers.

In a chain (`runtime/pdl.py`) a program of a matmul has its first AHEAD steps of the weight brought into L2 before it
waits. The wait is in front of the loop: a load that is pipelined could get past one inside of it.
"""

import triton
import triton.language as tl

from tilewright.runtime import dispatch
from tilewright.runtime.activation_kernels import activate
from tilewright.runtime.pdl_kernels import let_next_begin, prefetch_rows, wait_for_previous

_INTERPRETED = tl.constexpr(dispatch.INTERPRETED)
_AHEAD = tl.constexpr(4)  # steps


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
def _finish(total, bias, residual, row, column, there, columns, residual_row, ACTIVATION: tl.constexpr):
    """What is done to a total before it is rounded; `row` and `column` broadcast to its shape."""
    if bias is not None:
        total += tl.load(bias + column, column < columns, 0.0).to(tl.float32)
    total = activate(total, ACTIVATION, 2)
    if residual is not None:
        total += tl.load(residual + row * residual_row + column, there, 0.0).to(tl.float32)
    return total


@triton.jit
def _store(
    total, bias, residual, y, row, column, rows, columns, residual_row, split, SPLITS: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Write a tile of (chunks, BLOCK_N, BLOCK_M); of a split, as it is, to `y` of (SPLITS, rows, columns)."""
    row = row[None, None, :]
    column = column[:, :, None]
    there = (row < rows) & (column < columns)
    if SPLITS == 1:
        total = _finish(total, bias, residual, row, column, there, columns, residual_row, ACTIVATION)
    tl.store(y + (split * rows + row) * columns + column, total.to(y.dtype.element_ty), there)


@triton.jit
def _place(BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, CHUNKS: tl.constexpr, SPLITS: tl.constexpr):
    """(columns of the program as (CHUNKS, BLOCK_N), rows of x, split)."""
    chunk = tl.program_id(0).to(tl.int64) * CHUNKS + tl.arange(0, CHUNKS)
    column = chunk[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    row = (tl.program_id(1) // SPLITS).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    return column, row, tl.program_id(1) % SPLITS


@triton.jit(do_not_specialize=["rows", "columns", "inner", "x_row", "residual_row"])
def tilewright_quantized_linear_matmul_8bit(
    x, weight, scale, bias, residual, y,
    rows: tl.int64, columns: tl.int64, inner: tl.int64, x_row: tl.int64, residual_row: tl.int64,
    FP8: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, SLICES: tl.constexpr,
    CHUNKS: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr, UNIT: tl.constexpr, EVEN: tl.constexpr,
    ACTIVATION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One byte a weight, one scale a row of it. EVEN: all splits have as many whole steps."""
    let_next_begin(PDL)
    FLOAT: tl.constexpr = tl.float32 if _INTERPRETED else x.dtype.element_ty
    STEP: tl.constexpr = SLICES * BLOCK_K
    inner = inner // UNIT * UNIT  # a factor that a number known at run time only would not show
    x_row = x_row // UNIT * UNIT
    column, row, split = _place(BLOCK_N, BLOCK_M, CHUNKS, SPLITS)
    # Either one chunk and many slices, or the other way round, which broadcasts to the two of the batched matmul.
    k = tl.arange(0, SLICES)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    first, last = _range(inner, STEP, split, SPLITS)
    # Rows of the weight that are not there are read as the last: that takes no mask.
    weights = weight + tl.minimum(column, columns - 1)[:, :, None] * inner + k[:, None, :] + first
    inputs = x + row[None, None, :] * x_row + k[:, :, None] + first
    there = (row < rows)[None, None, :]
    sums = tl.zeros([SLICES * CHUNKS, BLOCK_N, BLOCK_M], tl.float32)
    if UNIT == 16:  # else rows do not begin where a prefetch may
        _prefetch(weight + first, inner, last - first, columns, STEP, BLOCK_N * CHUNKS, PDL)
    wait_for_previous(PDL)
    for start in tl.range(first, last, STEP, num_stages=STAGES):
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
        part = tl.broadcast_to(part, [SLICES * CHUNKS, BLOCK_K, BLOCK_M]).to(FLOAT)
        sums = tl.dot(unpacked, part, sums, input_precision="ieee")
        weights += STEP
        inputs += STEP
    if SLICES > 1:
        sums = tl.sum(sums, 0, keep_dims=True)
    sums *= tl.load(scale + column, column < columns, 0.0).to(tl.float32)[:, :, None]
    _store(sums, bias, residual, y, row, column, rows, columns, residual_row, split, SPLITS, ACTIVATION)


@triton.jit
def _prefetch(weight, row_bytes, size, columns, STEP: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr):
    """Have the first steps, of STEP bytes, of a program's ROWS rows of the weight brought into L2; a row has `size`."""
    if PDL:
        first = tl.program_id(0).to(tl.int64) * ROWS
        there = tl.minimum(columns - first, ROWS)
        prefetch_rows(weight + first * row_bytes, row_bytes, tl.minimum(size, _AHEAD * STEP), there, ROWS, PDL)


@triton.jit
def _range(inner, STEP: tl.constexpr, split, SPLITS: tl.constexpr):
    """Where a split of the inner dimension begins and ends."""
    steps = tl.cdiv(tl.cdiv(inner.to(tl.int32), STEP), SPLITS)
    first = split * steps * STEP
    return first, tl.minimum(first + steps * STEP, inner.to(tl.int32))


@triton.jit(do_not_specialize=["rows", "columns", "inner", "x_row", "residual_row"])
def tilewright_quantized_linear_matmul_4bit(
    x, weight, scale, zero, bias, residual, y,
    rows: tl.int64, columns: tl.int64, inner: tl.int64, x_row: tl.int64, residual_row: tl.int64,
    GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, SLICES: tl.constexpr, CHUNKS: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr, UNIT: tl.constexpr, EVEN: tl.constexpr, ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Two weights a byte: the low nibbles of a span's bytes are its first half, the high ones its second.

    A slice is a span: a group, or two groups of 32. `scale` and `zero` are (groups, columns). EVEN: all splits have as
    many whole steps.
    """
    let_next_begin(PDL)
    FLOAT: tl.constexpr = tl.float32 if _INTERPRETED else x.dtype.element_ty
    SPAN: tl.constexpr = 2 * GROUP if GROUP == 32 else GROUP
    BYTES: tl.constexpr = SPAN // 2
    STEP: tl.constexpr = SLICES * SPAN
    inner = inner // SPAN * SPAN
    x_row = x_row // UNIT * UNIT
    column, row, split = _place(BLOCK_N, BLOCK_M, CHUNKS, SPLITS)
    known = tl.minimum(column, columns - 1)
    slice = tl.arange(0, SLICES)
    byte = tl.arange(0, BYTES)
    begin, last = _range(inner, STEP, split, SPLITS)
    weights = weight + known[:, :, None] * (inner // 2) + (slice[:, None] * BYTES + byte[None, :])[:, None, :]
    weights += begin // STEP * (STEP // 2)
    inputs = x + row[None, None, :] * x_row + (slice[:, None] * SPAN + byte[None, :])[:, :, None] + begin
    of_group = ((begin // STEP * SLICES + slice) * (SPAN // GROUP))[:, None] * columns + known
    there = (row < rows)[None, None, :]
    sums = tl.zeros([SLICES * CHUNKS, BLOCK_N, BLOCK_M], tl.float32)
    _prefetch(weight + begin // 2, inner // 2, (last - begin) // 2, columns, STEP // 2, BLOCK_N * CHUNKS, PDL)
    wait_for_previous(PDL)
    for start in tl.range(begin, last, STEP, num_stages=STAGES):
        inside = tl.full([SLICES], True, tl.int1) if EVEN else start + slice * SPAN < inner
        if EVEN:
            codes = tl.load(weights)
            first = tl.load(inputs, there, 0.0)
            second = tl.load(inputs + BYTES, there, 0.0)
        else:
            codes = tl.load(weights, inside[:, None, None], 0)
            first = tl.load(inputs, there & inside[:, None, None], 0.0)
            second = tl.load(inputs + BYTES, there & inside[:, None, None], 0.0)
        first = tl.broadcast_to(first, [SLICES * CHUNKS, BYTES, BLOCK_M]).to(FLOAT)
        second = tl.broadcast_to(second, [SLICES * CHUNKS, BYTES, BLOCK_M]).to(FLOAT)
        low, high = _from_int4(codes, FLOAT)
        scales = tl.load(scale + of_group, inside[:, None], 0.0).to(tl.float32)[:, :, None]
        if zero is not None:
            low += 8 - tl.load(zero + of_group, inside[:, None], 0).to(FLOAT)[:, :, None]
        if GROUP < SPAN:
            of_group += columns
        if zero is not None:
            high += 8 - tl.load(zero + of_group, inside[:, None], 0).to(FLOAT)[:, :, None]
        if GROUP < SPAN:
            sums += tl.dot(low, first, input_precision="ieee") * scales
            scales = tl.load(scale + of_group, inside[:, None], 0.0).to(tl.float32)[:, :, None]
            sums += tl.dot(high, second, input_precision="ieee") * scales
            of_group -= columns
        else:
            part = tl.dot(low, first, input_precision="ieee")
            sums += tl.dot(high, second, part, input_precision="ieee") * scales
        weights += SLICES * BYTES
        inputs += STEP
        of_group += (STEP // GROUP) * columns
    if SLICES > 1:
        sums = tl.sum(sums, 0, keep_dims=True)
    _store(sums, bias, residual, y, row, column, rows, columns, residual_row, split, SPLITS, ACTIVATION)


@triton.jit(do_not_specialize=["rows", "columns", "residual_row"])
def tilewright_quantized_linear_join(
    parts, bias, residual, y, rows: tl.int64, columns: tl.int64, residual_row: tl.int64,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add the splits of a result up, in their order; a program writes BLOCK columns of a row."""
    let_next_begin(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = column < columns
    total = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts + (split * rows + row) * columns + column, there, 0.0)
    total = _finish(total, bias, residual, row, column, there, columns, residual_row, ACTIVATION)
    tl.store(y + row * columns + column, total.to(y.dtype.element_ty), there)


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
