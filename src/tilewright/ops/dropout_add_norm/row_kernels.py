"""What forward and backward of `dropout_add_norm` share: the tiles of rows, and how they are loaded and stored.

Loads and stores move vectors of 8 elements, at addresses that are multiples of them. A row of another width than a
multiple of 8 begins within such a vector: its tiles begin there too, `shift` elements before the row's first column,
and what they hold of the row before is masked. Programs take every eighth row then, or fewer, so that all rows of a
program have the same shift: its columns lie in the same lanes in every row.

All arithmetic is in COMPUTE: float32, or float64 for float64 input.
"""

import triton
import triton.language as tl

from tilewright.runtime.philox_kernels import keep_mask


@triton.jit
def row_shift(row, WIDTH: tl.constexpr):
    """How many elements a row begins behind the start of a vector."""
    shift = 0
    if WIDTH % 8 != 0:
        shift = (row * WIDTH % 8).to(tl.int32)
    return shift


@triton.jit
def row_tile(row, shift, first, rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr = False):
    """A tile of BLOCK lanes from the lane `first` on: (offsets, columns, which elements exist, which vectors have an
    element that does, which vectors have only such). WHOLE: no tile ends beyond the last column."""
    lane = first + tl.arange(0, BLOCK)
    exists = (row < rows)[:, None]
    if WIDTH % 8 == 0:
        column = lane
        at = row[:, None] * WIDTH + lane[None, :]
        inside = exists
        if not WHOLE:
            inside = inside & (lane < WIDTH)[None, :]
        touched = inside
        full = inside
    else:
        column = lane - shift
        at = tl.multiple_of(row * WIDTH - shift, 8)[:, None] + lane[None, :]
        inside = exists & ((column >= 0) & (column < WIDTH))[None, :]
        vector = lane // 8 * 8 - shift  # the column of its first element: all elements share it, and so their masks
        touched = exists & ((vector > -8) & (vector < WIDTH))[None, :]
        full = exists & ((vector >= 0) & (vector + 8 <= WIDTH))[None, :]
    return at, column, inside, touched, full


@triton.jit
def load_tile(x, tile, WIDTH: tl.constexpr, COMPUTE: tl.constexpr):
    """The elements of a tile, 0 where there are none."""
    at, _column, inside, touched, _full = tile
    if WIDTH % 8 == 0 or x.dtype.element_ty.primitive_bitwidth > 16:
        # A vector of wider elements has more than the 16 bytes that a tensor is aligned to, and could end behind it.
        loaded = tl.load(x + at, inside, 0.0).to(COMPUTE)
    else:
        loaded = tl.where(inside, tl.load(x + at, touched, 0.0).to(COMPUTE), 0.0)
    return loaded


@triton.jit
def store_tile(x, tile, value, WIDTH: tl.constexpr):
    at, _column, inside, _touched, full = tile
    tl.store(x + at, value.to(x.dtype.element_ty), full)
    if WIDTH % 8 != 0:
        tl.store(x + at, value.to(x.dtype.element_ty), inside & (full == 0))


@triton.jit
def column_exists(column, WIDTH: tl.constexpr):
    exists = column < WIDTH
    if WIDTH % 8 != 0:
        exists = exists & (column >= 0)
    return exists


@triton.jit
def load_columns(vector, column, WIDTH: tl.constexpr, COMPUTE: tl.constexpr):
    """A number for each column, loaded as a tile of one row: so it lies in registers as the tiles of data do, whatever
    its dtype, where a vector of another dtype than theirs would have to move between threads."""
    return tl.load(vector + column[None, :], column_exists(column, WIDTH)[None, :], 0.0).to(COMPUTE)


@triton.jit
def residual_sum(
    x, x_bias, second, residual, rowscale, layerscale, seed, rows, start, threshold, scale, row, tile,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, DROPOUT: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """dropout((x + x_bias) * rowscale * layerscale) + dropout(second) + residual for one tile, not yet rounded.

    `start` is where the tile's first lane lies, in each row.
    """
    _at, column, _inside, _touched, _full = tile
    z = load_tile(x, tile, WIDTH, COMPUTE)
    if x_bias is not None:
        z += load_columns(x_bias, column, WIDTH, COMPUTE)
    if rowscale is not None:
        z *= tl.load(rowscale + row, row < rows, 0.0).to(COMPUTE)[:, None]
    if layerscale is not None:
        z *= load_columns(layerscale, column, WIDTH, COMPUTE)
    if DROPOUT:
        z = tl.where(keep_mask(seed, start, threshold, 0, BLOCK), z * scale, 0.0)
    if second is not None:
        branch = load_tile(second, tile, WIDTH, COMPUTE)
        if DROPOUT:
            branch = tl.where(keep_mask(seed, start, threshold, 1, BLOCK), branch * scale, 0.0)
        z += branch
    if residual is not None:
        z += load_tile(residual, tile, WIDTH, COMPUTE)
    return z


@triton.jit
def load_weight(weight, column, WIDTH: tl.constexpr, ZERO_CENTERED: tl.constexpr, COMPUTE: tl.constexpr):
    """The factor of each column: ones where there is no weight."""
    if weight is None:
        factor = tl.full([1, column.shape[0]], 1.0, COMPUTE)
    else:
        factor = load_columns(weight, column, WIDTH, COMPUTE)
        if ZERO_CENTERED:
            factor += 1.0
    return factor


@triton.jit
def load_affine(weight, bias, column, WIDTH: tl.constexpr, ZERO_CENTERED: tl.constexpr, COMPUTE: tl.constexpr):
    """The factor and the offset of each column."""
    offset = tl.zeros([1, column.shape[0]], COMPUTE)
    if bias is not None:
        offset = load_columns(bias, column, WIDTH, COMPUTE)
    return load_weight(weight, column, WIDTH, ZERO_CENTERED, COMPUTE), offset


@triton.jit
def where_stored(x, residual_out):
    """Where the sum is in memory: in residual_out or, where nothing is added to x or dropped, in x itself."""
    stored = residual_out
    if residual_out is None:
        stored = x
    return stored
