"""What the kernels of `attention` share: where a program works, what a query sees, and what becomes of a score.

Rows are queries and columns are keys of one sequence. Tiles may lie either way round: `row` and `column` come as
tensors of two dimensions, one of which has one element, and broadcast.
"""

import triton
import triton.language as tl

from tilewright.runtime import dispatch

LOG2E = tl.constexpr(1.4426950408889634)
_INTERPRETED = tl.constexpr(dispatch.INTERPRETED)


@triton.jit
def dot(a, b, acc):
    """a b + acc, in float32 without TF32. The interpreter would multiply the bits of bfloat16."""
    if _INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def place(program, blocks, heads, group, REVERSED: tl.constexpr):
    """(block, head) of a program.

    `group` heads take turns block by block, so that what their programs share is in L2. With REVERSED the last block is
    the first: under a causal mask it is the longest.
    """
    first = program // (group * blocks) * group
    size = tl.minimum(group, heads - first)
    rest = program % (group * blocks)
    block = rest // size
    if REVERSED:
        block = blocks - 1 - block
    return block, first + rest % size


@triton.jit
def sequence_bounds(starts, batch, length, total):
    """(batch to address, first token, number of tokens). Whatever `starts` contains, all of it is in the tensor."""
    first = 0
    count = length
    if starts is not None:
        first = tl.minimum(tl.maximum(tl.load(starts + batch), 0), total)
        end = tl.minimum(tl.maximum(tl.load(starts + batch + 1), first), total)
        count = tl.minimum(end - first, length)
        batch = batch * 0
    return batch, first, count


@triton.jit
def tile_pointers(x, batch, first, head, batch_stride, token_stride, head_stride,
                  ROWS: tl.constexpr, COLUMNS: tl.constexpr, UNIT: tl.constexpr):  # fmt: skip
    """Pointers to a head of ROWS tokens from `first` on. Strides count vectors of UNIT elements, 16 bytes."""
    batch_stride, token_stride, head_stride = batch_stride * UNIT, token_stride * UNIT, head_stride * UNIT
    token = tl.arange(0, ROWS).to(tl.int64)
    start = x + batch * batch_stride + first * token_stride + head * head_stride
    return start + token[:, None] * token_stride + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def load_tile(at, exists, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr):
    """Rows of a tile, 0 where there are none; WHOLE: all rows exist."""
    if WHOLE and WIDTH == COLUMNS:
        tile = tl.load(at)
    elif WHOLE:
        tile = tl.load(at, (tl.arange(0, COLUMNS) < WIDTH)[None, :], 0.0)
    elif WIDTH == COLUMNS:
        tile = tl.load(at, exists[:, None], 0.0)
    else:
        tile = tl.load(at, exists[:, None] & (tl.arange(0, COLUMNS) < WIDTH)[None, :], 0.0)
    return tile


@triton.jit
def visible(row, column, keys, offset, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """Which keys each query sees."""
    seen = column < keys
    if HAS_LEFT:
        seen = seen & (column >= row + offset - left)
    if HAS_RIGHT:
        seen = seen & (column <= row + offset + right)
    return seen


@triton.jit
def key_range(
    first, queries, keys, offset, left, right,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    """(low, full_low, full_high, high): the keys that BLOCK_M queries from `first` on see any of, and between
    `full_low` and `full_high` those that each of them sees. All but `high` are multiples of BLOCK_N."""
    high = keys
    full_high = keys
    if HAS_RIGHT:
        last = tl.minimum(first + BLOCK_M, queries) - 1
        high = tl.minimum(high, tl.maximum(last + offset + right + 1, 0))
        full_high = tl.minimum(full_high, tl.maximum(first + offset + right + 1, 0))
    full_high = full_high // BLOCK_N * BLOCK_N
    low = 0
    full_low = 0
    if HAS_LEFT:
        low = tl.minimum(tl.maximum(first + offset - left, 0), high) // BLOCK_N * BLOCK_N
        full_low = (tl.maximum(first + BLOCK_M - 1 + offset - left, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
        full_low = tl.maximum(low, tl.minimum(full_low, (high + BLOCK_N - 1) // BLOCK_N * BLOCK_N))
    full_high = tl.maximum(full_low, full_high)
    return low, full_low, full_high, high


@triton.jit
def query_range(
    first, queries, offset, left, right,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    """(low, high): the queries that see any of BLOCK_N keys from `first` on; `low` is a multiple of BLOCK_M."""
    low = 0
    high = queries
    if HAS_LEFT:
        high = tl.minimum(high, tl.maximum(first + BLOCK_N - offset + left, 0))
    if HAS_RIGHT:
        low = tl.minimum(tl.maximum(first - offset - right, 0), high) // BLOCK_M * BLOCK_M
    return low, high


@triton.jit
def tanh(x, PRECISE: tl.constexpr):
    """The hyperbolic tangent. PRECISE: small numbers, which 1 - e**-2x would round away, by their series."""
    power = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    size = (1.0 - power) / (1.0 + power)
    if PRECISE:
        square = x * x
        series = 1.0 + square * (-0.33333334 + square * (0.13333334 + square * (-0.053968254 + square * 0.021869488)))
        size = tl.where(tl.abs(x) < 0.2, tl.abs(x) * series, size)
    return tl.where(x < 0, -size, size)


@triton.jit
def finish_scores(s, row, column, exists, offset, slope, bias, bias_row, bias_column, scale, softcap,
                  ALIBI: tl.constexpr, SOFTCAP: tl.constexpr, PRECISE: tl.constexpr):  # fmt: skip
    """(scores, factor, slope): `factor` times a score is the exponent of 2 in softmax; `slope` is that of the soft-cap.

    `bias` points to the first row and column of a head. One of bytes hides the keys that have a 0.
    """
    factor = scale * LOG2E
    damping = 1.0
    if SOFTCAP or ALIBI or bias is not None:
        factor = 1.0
        s = s * scale
        if SOFTCAP:
            bent = tanh(s / softcap, PRECISE)
            damping = 1.0 - bent * bent
            s = softcap * bent
        if ALIBI:
            s -= slope * tl.abs(row + offset - column).to(tl.float32)
        if bias is not None:
            added = tl.load(bias + row * bias_row + column * bias_column, exists, 0.0)
            if bias.dtype.element_ty == tl.uint8:
                s = tl.where(added != 0, s, float("-inf"))
            else:
                s += added.to(tl.float32)
        s = s * LOG2E
    return s, factor, damping
