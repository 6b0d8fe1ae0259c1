"""The kernels of `dropout_add_norm`'s backward, by how they move the data.

A fixed grid of programs strides over the rows, the next ones always on their way into shared memory, and carries the
sums for weight and bias in registers; each program writes its sums once and a small second kernel adds them in a fixed
order, so the result is the same on every run. A row is held as CHUNKS tiles of BLOCK columns, BLOCK a power of two as
Triton wants it: 6144 columns are three tiles of 2048 and not one of 8192, a quarter of it idle. Beyond 8192 columns the
sums leave no registers for the row: two programs share it, each with half of the columns, and each also reads the other
half for the sums over the row, out of L2, where its neighbour's reads have just put it. (Near 16384 columns an RMSNorm,
which has one sum where LayerNorm has two, fits into one program of 32 warps.) Beyond 16384 a kernel of its own takes
the sums over the row first: 14 bytes an element in place of 10.
"""

import triton
import triton.language as tl

from tilewright.ops.dropout_add_norm.row_kernels import (
    column_exists,
    load_columns,
    load_tile,
    load_weight,
    row_shift,
    row_tile,
    store_tile,
)
from tilewright.runtime.philox_kernels import keep_mask, load_seed


@triton.jit
def _load_statistics(statistics, row, rows, RMS: tl.constexpr):
    """1/std and mean of each row; an RMSNorm has no mean, and takes 0 off."""
    rstd = tl.load(statistics + row, row < rows, 0.0)
    mean = tl.zeros_like(rstd)
    if not RMS:
        mean = tl.load(statistics + rows + row, row < rows, 0.0)
    return rstd, mean


@triton.jit
def _norm_terms(dout, z, factor, rstd, mean, tile, WIDTH: tl.constexpr, COMPUTE: tl.constexpr):
    """The incoming gradient, the normalised value and the gradient of the normalised value, for one tile.

    The mean is taken off first: beside a mean much larger than 1/rstd, z * rstd would be rounded to nothing.
    """
    normed = (load_tile(z, tile, WIDTH, COMPUTE) - mean[:, None]) * rstd[:, None]
    dy = load_tile(dout, tile, WIDTH, COMPUTE)
    return dy, normed, dy * factor


@triton.jit
def _row_means(along, plain, WIDTH: tl.constexpr, RMS: tl.constexpr):
    """The means over the rows of two tiles, in one reduction; the second, zero for RMSNorm, is not needed there."""
    if RMS:
        mean = tl.sum(along, 1) / WIDTH
        means = mean, tl.zeros_like(mean)
    else:
        means = tl.split(tl.sum(tl.join(along, plain), 1) / WIDTH)
    return means


@triton.jit(do_not_specialize=["rows"])
def tilewright_dropout_add_norm_row_sums(
    dout, z, weight, statistics, sums, rows: tl.int64,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, RMS: tl.constexpr, ZERO_CENTERED: tl.constexpr, DOUBLE: tl.constexpr,
):  # fmt: skip
    """The two sums over each row that the gradient of the norm needs, for rows of more than two slices."""
    COMPUTE: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    SPAN: tl.constexpr = WIDTH if WIDTH % 8 == 0 else WIDTH + 7
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    shift = row_shift(tl.program_id(0).to(tl.int64), WIDTH)
    rstd, mean = _load_statistics(statistics, row, rows, RMS)
    along = tl.zeros([1, BLOCK], COMPUTE)
    plain = tl.zeros([1, BLOCK], COMPUTE)
    for first in tl.range(0, SPAN, BLOCK, num_stages=3):
        tile = row_tile(row, shift, first, rows, WIDTH, BLOCK)
        factor = load_weight(weight, tile[1], WIDTH, ZERO_CENTERED, COMPUTE)
        _, normed, dnormed = _norm_terms(dout, z, factor, rstd, mean, tile, WIDTH, COMPUTE)
        along += normed * dnormed
        plain += dnormed
    along_mean, plain_mean = _row_means(along, plain, WIDTH, RMS)
    tl.store(sums + row, along_mean)
    tl.store(sums + rows + row, plain_mean)


@triton.jit(do_not_specialize=["seed", "rows", "threshold"])
def tilewright_dropout_add_norm_backward(
    dout, dresidual_out, z, x, rowscale, layerscale, weight, x_bias, statistics, sums, seed_tensor,
    dx, dsecond, dresidual, drowscale, dlayerscale, dweight, dbias, dx_bias,
    seed: tl.int64, rows: tl.int64, threshold: tl.int32, scale: tl.float64,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, PAIRED: tl.constexpr,
    STAGES: tl.constexpr, RMS: tl.constexpr, ZERO_CENTERED: tl.constexpr, DROPOUT: tl.constexpr,
    DOUBLE: tl.constexpr,
):  # fmt: skip
    """Program (i, j) takes every num_programs(0)-th group of rows and the j-th slice of CHUNKS x BLOCK lanes.

    A group is ROWS rows that follow each other or, where rows begin anywhere, num_programs(0) rows apart: a multiple
    of 8.

    The sums over whole rows come from `sums` or, with at most two slices, from reading both (PAIRED). The sums over
    its rows go to row i of dlayerscale, dweight, dbias and dx_bias.
    """
    COMPUTE: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0).to(tl.int64)
    shift = row_shift(program, WIDTH)
    APART: tl.constexpr = WIDTH % 8 != 0
    slice_start = tl.program_id(1) * (CHUNKS * BLOCK)
    other_start = CHUNKS * BLOCK - slice_start
    seed = load_seed(seed_tensor, seed)
    scale = tl.full([], scale, COMPUTE)
    lane = tl.arange(0, BLOCK) - shift
    zeros = tl.zeros([ROWS, BLOCK], COMPUTE)
    HOIST: tl.constexpr = PAIRED and CHUNKS * BLOCK <= 6144  # beyond, no registers for the other half's weights
    factors, other_factors, weight_sums, bias_sums, layerscale_sums, x_bias_sums = (), (), (), (), (), ()
    for chunk in tl.static_range(CHUNKS):
        start = slice_start + chunk * BLOCK
        factors = factors + (load_weight(weight, start + lane, WIDTH, ZERO_CENTERED, COMPUTE),)
        if HOIST:
            column = other_start + chunk * BLOCK + lane
            other_factors = other_factors + (load_weight(weight, column, WIDTH, ZERO_CENTERED, COMPUTE),)
        weight_sums = weight_sums + (zeros,)
        bias_sums = bias_sums + (zeros,)
        layerscale_sums = layerscale_sums + (zeros,)
        x_bias_sums = x_bias_sums + (zeros,)
    for first_row in tl.range(program if APART else program * ROWS, rows, programs * ROWS, num_stages=STAGES):
        row = (first_row + tl.arange(0, ROWS)).to(tl.int64)
        if APART:
            row = first_row + tl.arange(0, ROWS) * programs
        rstd, mean = _load_statistics(statistics, row, rows, RMS)
        by_row = tl.full([ROWS], 1.0, COMPUTE)
        if rowscale is not None:
            by_row = tl.load(rowscale + row, row < rows, 0.0).to(COMPUTE)
        along_tile = zeros
        plain_tile = zeros
        if PAIRED:
            for chunk in tl.static_range(CHUNKS):
                tile = row_tile(row, shift, other_start + chunk * BLOCK, rows, WIDTH, BLOCK)
                if HOIST:
                    factor = other_factors[chunk]
                else:
                    factor = load_weight(weight, tile[1], WIDTH, ZERO_CENTERED, COMPUTE)
                _, normed, dnormed = _norm_terms(dout, z, factor, rstd, mean, tile, WIDTH, COMPUTE)
                along_tile += normed * dnormed
                plain_tile += dnormed
        tiles, new_weight_sums, new_bias_sums, new_layerscale_sums, new_x_bias_sums = (), (), (), (), ()
        for chunk in tl.static_range(CHUNKS):
            tile = row_tile(row, shift, slice_start + chunk * BLOCK, rows, WIDTH, BLOCK)
            dy, normed, dnormed = _norm_terms(dout, z, factors[chunk], rstd, mean, tile, WIDTH, COMPUTE)
            along_tile += normed * dnormed
            plain_tile += dnormed
            tiles = tiles + ((normed, dnormed),)
            if dweight is not None:
                new_weight_sums = new_weight_sums + (weight_sums[chunk] + dy * normed,)
            if dbias is not None:
                new_bias_sums = new_bias_sums + (bias_sums[chunk] + dy,)
        if dweight is not None:
            weight_sums = new_weight_sums
        if dbias is not None:
            bias_sums = new_bias_sums
        if sums is not None:
            along = tl.load(sums + row, row < rows, 0.0)
            plain = tl.load(sums + rows + row, row < rows, 0.0)
        else:
            along, plain = _row_means(along_tile, plain_tile, WIDTH, RMS)
        along *= rstd
        plain *= rstd
        rowscale_tile = zeros
        for chunk in tl.static_range(CHUNKS):
            start = slice_start + chunk * BLOCK
            tile = row_tile(row, shift, start, rows, WIDTH, BLOCK)
            column = tile[1]
            at = row * WIDTH - shift + start
            normed, dnormed = tiles[chunk]
            dz = dnormed * rstd[:, None] - (normed * along[:, None] + plain[:, None])
            if dresidual_out is not None:
                dz += load_tile(dresidual_out, tile, WIDTH, COMPUTE)
            if dresidual is not None:
                store_tile(dresidual, tile, dz, WIDTH)
            if dsecond is not None:
                branch = dz
                if DROPOUT:
                    branch = tl.where(keep_mask(seed, at, threshold, 1, BLOCK), dz * scale, 0.0)
                store_tile(dsecond, tile, branch, WIDTH)
            if DROPOUT:
                dz = tl.where(keep_mask(seed, at, threshold, 0, BLOCK), dz * scale, 0.0)
            by_column = tl.full([1, BLOCK], 1.0, COMPUTE)
            if layerscale is not None:
                by_column = load_columns(layerscale, column, WIDTH, COMPUTE)
            if x is not None:
                scaled = load_tile(x, tile, WIDTH, COMPUTE)
                if x_bias is not None:
                    scaled += load_columns(x_bias, column, WIDTH, COMPUTE)
                product = dz * scaled
                rowscale_tile += product * by_column
                if dlayerscale is not None:
                    new_layerscale_sums = new_layerscale_sums + (layerscale_sums[chunk] + product * by_row[:, None],)
            dz *= by_row[:, None] * by_column
            if dx_bias is not None:  # nothing beyond the last row, where dresidual_out is not loaded and rstd is 0
                new_x_bias_sums = new_x_bias_sums + (x_bias_sums[chunk] + dz,)
            if dx is not None:
                store_tile(dx, tile, dz, WIDTH)
        if dlayerscale is not None:
            layerscale_sums = new_layerscale_sums
        if dx_bias is not None:
            x_bias_sums = new_x_bias_sums
        if drowscale is not None:
            tl.store(drowscale + tl.program_id(1) * rows + row, tl.sum(rowscale_tile, 1), row < rows)
    for chunk in tl.static_range(CHUNKS):
        column = slice_start + chunk * BLOCK + lane
        _store_sum(dlayerscale, layerscale_sums[chunk], program, column, WIDTH)
        _store_sum(dweight, weight_sums[chunk], program, column, WIDTH)
        _store_sum(dbias, bias_sums[chunk], program, column, WIDTH)
        _store_sum(dx_bias, x_bias_sums[chunk], program, column, WIDTH)


@triton.jit
def _store_sum(sums, tile, program, column, WIDTH: tl.constexpr):
    if sums is not None:
        total = tl.sum(tile, 0).to(sums.dtype.element_ty)
        tl.store(sums + program * WIDTH + column, total, column_exists(column, WIDTH))


@triton.jit(do_not_specialize=["programs"])
def tilewright_dropout_add_norm_add_partials(
    partials, first, second, third, fourth, programs: tl.int64, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Column sums over the programs of each slot of partials[4, programs, WIDTH], always in the same order."""
    slot = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    written = (slot == 0) & (first is not None) | (slot == 1) & (second is not None)
    written |= (slot == 2) & (third is not None) | (slot == 3) & (fourth is not None)
    if written:
        total = tl.zeros([ROWS, BLOCK], partials.dtype.element_ty)
        for start in range(0, programs, ROWS):
            row = start + tl.arange(0, ROWS)
            inside = (row < programs)[:, None] & (column < WIDTH)[None, :]
            total += tl.load(partials + (slot * programs + row)[:, None] * WIDTH + column[None, :], inside, 0.0)
        if slot == 0:
            _store_sum(first, total, 0, column, WIDTH)
        if slot == 1:
            _store_sum(second, total, 0, column, WIDTH)
        if slot == 2:
            _store_sum(third, total, 0, column, WIDTH)
        if slot == 3:
            _store_sum(fourth, total, 0, column, WIDTH)
