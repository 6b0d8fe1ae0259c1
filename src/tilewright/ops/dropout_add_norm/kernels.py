"""The kernels of `dropout_add_norm`'s forward, by how they move the data; `backward_kernels.py` has those of backward.

A program holds whole rows in registers, so that one read and one write suffice; a wide one as CHUNKS tiles of BLOCK
columns where that is quicker. A row of more than 16384 columns or 64 KiB is walked twice, the second time out of L2.
`row_kernels.py` says how the tiles lie in a row.
"""

import triton
import triton.language as tl

from tilewright.ops.dropout_add_norm.row_kernels import (
    load_affine,
    load_tile,
    residual_sum,
    row_shift,
    row_tile,
    store_tile,
    where_stored,
)
from tilewright.runtime.pdl_kernels import let_next_begin, prefetch_vector, wait_for_previous
from tilewright.runtime.philox_kernels import load_seed


@triton.jit
def _begin(weight, bias, WIDTH: tl.constexpr, PDL: tl.constexpr):
    """In a chain, have weight and bias brought into L2 and wait for the rest."""
    let_next_begin(PDL)
    prefetch_vector(weight, WIDTH, PDL)
    prefetch_vector(bias, WIDTH, PDL)
    wait_for_previous(PDL)


@triton.jit(do_not_specialize=["seed", "rows", "threshold"])
def tilewright_dropout_add_norm_forward(
    x, second, residual, rowscale, layerscale, weight, bias, x_bias, seed_tensor, out, residual_out, statistics,
    seed: tl.int64, rows: tl.int64, threshold: tl.int32, scale: tl.float64, eps: tl.float64,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr,
    RMS: tl.constexpr, ZERO_CENTERED: tl.constexpr, DROPOUT: tl.constexpr, DOUBLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ROWS whole rows in registers; the weights are loaded before the reductions where there are registers for it."""
    _begin(weight, bias, WIDTH, PDL)
    COMPUTE: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    WHOLE: tl.constexpr = CHUNKS * BLOCK == WIDTH
    seed = load_seed(seed_tensor, seed)
    scale = tl.full([], scale, COMPUTE)
    stored = where_stored(x, residual_out)
    program = tl.program_id(0).to(tl.int64)
    if WIDTH % 8 == 0:
        row = program * ROWS + tl.arange(0, ROWS)
    else:
        row = program // 8 * (8 * ROWS) + program % 8 + tl.arange(0, ROWS) * 8
    shift = row_shift(program, WIDTH)
    tiles, affine = (), ()
    for chunk in tl.static_range(CHUNKS):  # all loads before the first store, behind which no load may move
        tile = row_tile(row, shift, chunk * BLOCK, rows, WIDTH, BLOCK, WHOLE)
        column = tile[1]
        z = residual_sum(
            x, x_bias, second, residual, rowscale, layerscale, seed, rows, row * WIDTH - shift + chunk * BLOCK,
            threshold, scale, row, tile, WIDTH, BLOCK, DROPOUT, COMPUTE,
        ).to(stored.dtype.element_ty)  # fmt: skip
        tiles = tiles + (z,)
        if EARLY:
            affine = affine + (load_affine(weight, bias, column, WIDTH, ZERO_CENTERED, COMPUTE),)
    total = tl.zeros([ROWS, BLOCK], COMPUTE)
    for chunk in tl.static_range(CHUNKS):
        if residual_out is not None:
            store_tile(
                residual_out, row_tile(row, shift, chunk * BLOCK, rows, WIDTH, BLOCK, WHOLE), tiles[chunk], WIDTH
            )
        total += tiles[chunk].to(COMPUTE)
    mean = tl.zeros([ROWS], COMPUTE)
    if not RMS:
        mean = tl.sum(total, 1) / WIDTH
    squares = tl.zeros([ROWS, BLOCK], COMPUTE)
    drift = tl.zeros([ROWS, BLOCK], COMPUTE)
    for chunk in tl.static_range(CHUNKS):
        inside = row_tile(row, shift, chunk * BLOCK, rows, WIDTH, BLOCK, WHOLE)[2]
        distance = tl.where(inside, tiles[chunk].to(COMPUTE) - mean[:, None], 0.0)
        squares += distance * distance
        drift += distance
    if RMS or stored.dtype.element_ty.primitive_bitwidth <= 16:
        variance = tl.sum(squares, 1) / WIDTH
    else:
        # The mean of the distances is what rounding has taken from the mean: beside a mean much larger than the
        # standard deviation it counts. 16 bits have lost more by themselves.
        variance, error = tl.split(tl.sum(tl.join(squares, drift), 1) / WIDTH)
        variance -= error * error
        mean += error
    if not RMS:
        tl.store(statistics + rows + row, mean, row < rows)
    rstd = tl.rsqrt(variance + tl.full([], eps, COMPUTE))
    tl.store(statistics + row, rstd, row < rows)
    if not EARLY:
        for chunk in tl.static_range(CHUNKS):
            column = chunk * BLOCK + tl.arange(0, BLOCK) - shift
            affine = affine + (load_affine(weight, bias, column, WIDTH, ZERO_CENTERED, COMPUTE),)
    for chunk in tl.static_range(CHUNKS):
        factor, offset = affine[chunk]
        y = (tiles[chunk].to(COMPUTE) - mean[:, None]) * rstd[:, None] * factor + offset
        store_tile(out, row_tile(row, shift, chunk * BLOCK, rows, WIDTH, BLOCK, WHOLE), y, WIDTH)


@triton.jit(do_not_specialize=["seed", "rows", "threshold"])
def tilewright_dropout_add_norm_wide_forward(
    x, second, residual, rowscale, layerscale, weight, bias, x_bias, seed_tensor, out, residual_out, statistics,
    seed: tl.int64, rows: tl.int64, threshold: tl.int32, scale: tl.float64, eps: tl.float64,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, RMS: tl.constexpr,
    ZERO_CENTERED: tl.constexpr, DROPOUT: tl.constexpr, DOUBLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row that registers do not hold: tile by tile for the sum and its statistics, then again for the output."""
    _begin(weight, bias, WIDTH, PDL)
    COMPUTE: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    stored = where_stored(x, residual_out)
    seed = load_seed(seed_tensor, seed)
    scale = tl.full([], scale, COMPUTE)
    SPAN: tl.constexpr = WIDTH if WIDTH % 8 == 0 else WIDTH + 7
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    shift = row_shift(tl.program_id(0).to(tl.int64), WIDTH)
    # Welford's running mean and squared distance, one lane a column of the tile.
    count = tl.zeros([1, BLOCK], COMPUTE)
    lane_mean = tl.zeros([1, BLOCK], COMPUTE)
    squares = tl.zeros([1, BLOCK], COMPUTE)
    for first in tl.range(0, SPAN, BLOCK, num_stages=3):
        tile = row_tile(row, shift, first, rows, WIDTH, BLOCK)
        inside = tile[2]
        z = residual_sum(
            x, x_bias, second, residual, rowscale, layerscale, seed, rows, row * WIDTH - shift + first, threshold,
            scale, row, tile, WIDTH, BLOCK, DROPOUT, COMPUTE,
        ).to(stored.dtype.element_ty)  # fmt: skip
        if residual_out is not None:
            store_tile(residual_out, tile, z, WIDTH)
        z = z.to(COMPUTE)
        if RMS:
            squares += z * z
        else:
            count += tl.where(inside, 1.0, 0.0)
            distance = z - lane_mean
            lane_mean += tl.where(inside, distance / count, 0.0)
            squares += tl.where(inside, distance * (z - lane_mean), 0.0)
    mean = tl.sum(lane_mean * count, 1) / WIDTH
    if not RMS:
        squares += count * (lane_mean - mean[:, None]) * (lane_mean - mean[:, None])
        tl.store(statistics + rows + row, mean)
    rstd = tl.rsqrt(tl.sum(squares, 1) / WIDTH + tl.full([], eps, COMPUTE))
    tl.store(statistics + row, rstd)
    tl.debug_barrier()  # what the threads stored above, other threads may read below
    LAST: tl.constexpr = (SPAN - 1) // BLOCK * BLOCK
    for step in tl.range(0, SPAN, BLOCK, num_stages=3):
        # Backwards: what was stored last is the likeliest to be in L2 still.
        tile = row_tile(row, shift, LAST - step, rows, WIDTH, BLOCK)
        z = load_tile(stored, tile, WIDTH, COMPUTE)
        factor, offset = load_affine(weight, bias, tile[1], WIDTH, ZERO_CENTERED, COMPUTE)
        y = (z - mean[:, None]) * rstd[:, None] * factor + offset
        store_tile(out, tile, y, WIDTH)
