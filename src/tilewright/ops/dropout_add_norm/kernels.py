"""The kernels of `dropout_add_norm`, by how they move the data.

Forward: a program holds whole rows in registers, so that one read and one write suffice; a wide one as CHUNKS tiles of
BLOCK columns where that is quicker. A row of more than 16384 columns or 64 KiB is walked twice, the second time out of
L2.

Backward: a fixed grid of programs strides over the rows, the next ones always on their way into shared memory, and
carries the sums for weight and bias in registers; each program writes its sums once and a small second kernel adds
them in a fixed order, so the result is the same on every run. A row is held as CHUNKS tiles of BLOCK columns, BLOCK a
power of two as Triton wants it: 6144 columns are three tiles of 2048 and not one of 8192, a quarter of it idle. Beyond
8192 columns the sums leave no registers for the row: two programs share it, each with half of the columns, and each
also reads the other half for the sums over the row, out of L2, where its neighbour's reads have just put it. (Near
16384 columns an RMSNorm, which has one sum where LayerNorm has two, fits into one program of 32 warps.) Beyond 16384 a
kernel of its own takes the sums over the row first: 14 bytes an element in place of 10.

Loads and stores move vectors of 8 elements, at addresses that are multiples of them. A row of another width than a
multiple of 8 begins within such a vector: its tiles begin there too, `shift` elements before the row's first column,
and what they hold of the row before is masked. Programs take every eighth row then, or fewer, so that all rows of a
program have the same shift: its columns lie in the same lanes in every row.

All arithmetic is in COMPUTE: float32, or float64 for float64 input.
"""

import triton
import triton.language as tl

from tilewright.runtime.pdl_kernels import let_next_begin, prefetch_vector, wait_for_previous
from tilewright.runtime.philox_kernels import keep_mask, load_seed


@triton.jit
def _shift(row, WIDTH: tl.constexpr):
    """How many elements a row begins behind the start of a vector."""
    shift = 0
    if WIDTH % 8 != 0:
        shift = (row * WIDTH % 8).to(tl.int32)
    return shift


@triton.jit
def _tile(row, shift, first, rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr = False):
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
def _load(x, tile, WIDTH: tl.constexpr, COMPUTE: tl.constexpr):
    """The elements of a tile, 0 where there are none."""
    at, _column, inside, touched, _full = tile
    if WIDTH % 8 == 0 or x.dtype.element_ty.primitive_bitwidth > 16:
        # A vector of wider elements has more than the 16 bytes that a tensor is aligned to, and could end behind it.
        loaded = tl.load(x + at, inside, 0.0).to(COMPUTE)
    else:
        loaded = tl.where(inside, tl.load(x + at, touched, 0.0).to(COMPUTE), 0.0)
    return loaded


@triton.jit
def _store(x, tile, value, WIDTH: tl.constexpr):
    at, _column, inside, _touched, full = tile
    tl.store(x + at, value.to(x.dtype.element_ty), full)
    if WIDTH % 8 != 0:
        tl.store(x + at, value.to(x.dtype.element_ty), inside & (full == 0))


@triton.jit
def _exists(column, WIDTH: tl.constexpr):
    exists = column < WIDTH
    if WIDTH % 8 != 0:
        exists = exists & (column >= 0)
    return exists


@triton.jit
def _load_columns(vector, column, WIDTH: tl.constexpr, COMPUTE: tl.constexpr):
    """A number for each column, loaded as a tile of one row: so it lies in registers as the tiles of data do, whatever
    its dtype, where a vector of another dtype than theirs would have to move between threads."""
    return tl.load(vector + column[None, :], _exists(column, WIDTH)[None, :], 0.0).to(COMPUTE)


@triton.jit
def _residual_sum(
    x, x_bias, second, residual, rowscale, layerscale, seed, rows, start, threshold, scale, row, tile,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, DROPOUT: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """dropout((x + x_bias) * rowscale * layerscale) + dropout(second) + residual for one tile, not yet rounded.

    `start` is where the tile's first lane lies, in each row.
    """
    _at, column, _inside, _touched, _full = tile
    z = _load(x, tile, WIDTH, COMPUTE)
    if x_bias is not None:
        z += _load_columns(x_bias, column, WIDTH, COMPUTE)
    if rowscale is not None:
        z *= tl.load(rowscale + row, row < rows, 0.0).to(COMPUTE)[:, None]
    if layerscale is not None:
        z *= _load_columns(layerscale, column, WIDTH, COMPUTE)
    if DROPOUT:
        z = tl.where(keep_mask(seed, start, threshold, 0, BLOCK), z * scale, 0.0)
    if second is not None:
        branch = _load(second, tile, WIDTH, COMPUTE)
        if DROPOUT:
            branch = tl.where(keep_mask(seed, start, threshold, 1, BLOCK), branch * scale, 0.0)
        z += branch
    if residual is not None:
        z += _load(residual, tile, WIDTH, COMPUTE)
    return z


@triton.jit
def _load_weight(weight, column, WIDTH: tl.constexpr, ZERO_CENTERED: tl.constexpr, COMPUTE: tl.constexpr):
    """The factor of each column: ones where there is no weight."""
    if weight is None:
        factor = tl.full([1, column.shape[0]], 1.0, COMPUTE)
    else:
        factor = _load_columns(weight, column, WIDTH, COMPUTE)
        if ZERO_CENTERED:
            factor += 1.0
    return factor


@triton.jit
def _load_affine(weight, bias, column, WIDTH: tl.constexpr, ZERO_CENTERED: tl.constexpr, COMPUTE: tl.constexpr):
    """The factor and the offset of each column."""
    offset = tl.zeros([1, column.shape[0]], COMPUTE)
    if bias is not None:
        offset = _load_columns(bias, column, WIDTH, COMPUTE)
    return _load_weight(weight, column, WIDTH, ZERO_CENTERED, COMPUTE), offset


@triton.jit
def _stored(x, residual_out):
    """Where the sum is in memory: in residual_out or, where nothing is added to x or dropped, in x itself."""
    stored = residual_out
    if residual_out is None:
        stored = x
    return stored


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
    stored = _stored(x, residual_out)
    program = tl.program_id(0).to(tl.int64)
    if WIDTH % 8 == 0:
        row = program * ROWS + tl.arange(0, ROWS)
    else:
        row = program // 8 * (8 * ROWS) + program % 8 + tl.arange(0, ROWS) * 8
    shift = _shift(program, WIDTH)
    tiles, affine = (), ()
    for chunk in tl.static_range(CHUNKS):  # all loads before the first store, behind which no load may move
        tile = _tile(row, shift, chunk * BLOCK, rows, WIDTH, BLOCK, WHOLE)
        column = tile[1]
        z = _residual_sum(
            x, x_bias, second, residual, rowscale, layerscale, seed, rows, row * WIDTH - shift + chunk * BLOCK,
            threshold, scale, row, tile, WIDTH, BLOCK, DROPOUT, COMPUTE,
        ).to(stored.dtype.element_ty)  # fmt: skip
        tiles = tiles + (z,)
        if EARLY:
            affine = affine + (_load_affine(weight, bias, column, WIDTH, ZERO_CENTERED, COMPUTE),)
    total = tl.zeros([ROWS, BLOCK], COMPUTE)
    for chunk in tl.static_range(CHUNKS):
        if residual_out is not None:
            _store(residual_out, _tile(row, shift, chunk * BLOCK, rows, WIDTH, BLOCK, WHOLE), tiles[chunk], WIDTH)
        total += tiles[chunk].to(COMPUTE)
    mean = tl.zeros([ROWS], COMPUTE)
    if not RMS:
        mean = tl.sum(total, 1) / WIDTH
    squares = tl.zeros([ROWS, BLOCK], COMPUTE)
    drift = tl.zeros([ROWS, BLOCK], COMPUTE)
    for chunk in tl.static_range(CHUNKS):
        inside = _tile(row, shift, chunk * BLOCK, rows, WIDTH, BLOCK, WHOLE)[2]
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
            affine = affine + (_load_affine(weight, bias, column, WIDTH, ZERO_CENTERED, COMPUTE),)
    for chunk in tl.static_range(CHUNKS):
        factor, offset = affine[chunk]
        y = (tiles[chunk].to(COMPUTE) - mean[:, None]) * rstd[:, None] * factor + offset
        _store(out, _tile(row, shift, chunk * BLOCK, rows, WIDTH, BLOCK, WHOLE), y, WIDTH)


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
    stored = _stored(x, residual_out)
    seed = load_seed(seed_tensor, seed)
    scale = tl.full([], scale, COMPUTE)
    SPAN: tl.constexpr = WIDTH if WIDTH % 8 == 0 else WIDTH + 7
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    shift = _shift(tl.program_id(0).to(tl.int64), WIDTH)
    # Welford's running mean and squared distance, one lane a column of the tile.
    count = tl.zeros([1, BLOCK], COMPUTE)
    lane_mean = tl.zeros([1, BLOCK], COMPUTE)
    squares = tl.zeros([1, BLOCK], COMPUTE)
    for first in tl.range(0, SPAN, BLOCK, num_stages=3):
        tile = _tile(row, shift, first, rows, WIDTH, BLOCK)
        inside = tile[2]
        z = _residual_sum(
            x, x_bias, second, residual, rowscale, layerscale, seed, rows, row * WIDTH - shift + first, threshold,
            scale, row, tile, WIDTH, BLOCK, DROPOUT, COMPUTE,
        ).to(stored.dtype.element_ty)  # fmt: skip
        if residual_out is not None:
            _store(residual_out, tile, z, WIDTH)
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
        tile = _tile(row, shift, LAST - step, rows, WIDTH, BLOCK)
        z = _load(stored, tile, WIDTH, COMPUTE)
        factor, offset = _load_affine(weight, bias, tile[1], WIDTH, ZERO_CENTERED, COMPUTE)
        y = (z - mean[:, None]) * rstd[:, None] * factor + offset
        _store(out, tile, y, WIDTH)


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
    normed = (_load(z, tile, WIDTH, COMPUTE) - mean[:, None]) * rstd[:, None]
    dy = _load(dout, tile, WIDTH, COMPUTE)
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
    shift = _shift(tl.program_id(0).to(tl.int64), WIDTH)
    rstd, mean = _load_statistics(statistics, row, rows, RMS)
    along = tl.zeros([1, BLOCK], COMPUTE)
    plain = tl.zeros([1, BLOCK], COMPUTE)
    for first in tl.range(0, SPAN, BLOCK, num_stages=3):
        tile = _tile(row, shift, first, rows, WIDTH, BLOCK)
        factor = _load_weight(weight, tile[1], WIDTH, ZERO_CENTERED, COMPUTE)
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
    shift = _shift(program, WIDTH)
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
        factors = factors + (_load_weight(weight, start + lane, WIDTH, ZERO_CENTERED, COMPUTE),)
        if HOIST:
            column = other_start + chunk * BLOCK + lane
            other_factors = other_factors + (_load_weight(weight, column, WIDTH, ZERO_CENTERED, COMPUTE),)
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
                tile = _tile(row, shift, other_start + chunk * BLOCK, rows, WIDTH, BLOCK)
                if HOIST:
                    factor = other_factors[chunk]
                else:
                    factor = _load_weight(weight, tile[1], WIDTH, ZERO_CENTERED, COMPUTE)
                _, normed, dnormed = _norm_terms(dout, z, factor, rstd, mean, tile, WIDTH, COMPUTE)
                along_tile += normed * dnormed
                plain_tile += dnormed
        tiles, new_weight_sums, new_bias_sums, new_layerscale_sums, new_x_bias_sums = (), (), (), (), ()
        for chunk in tl.static_range(CHUNKS):
            tile = _tile(row, shift, slice_start + chunk * BLOCK, rows, WIDTH, BLOCK)
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
            tile = _tile(row, shift, start, rows, WIDTH, BLOCK)
            column = tile[1]
            at = row * WIDTH - shift + start
            normed, dnormed = tiles[chunk]
            dz = dnormed * rstd[:, None] - (normed * along[:, None] + plain[:, None])
            if dresidual_out is not None:
                dz += _load(dresidual_out, tile, WIDTH, COMPUTE)
            if dresidual is not None:
                _store(dresidual, tile, dz, WIDTH)
            if dsecond is not None:
                branch = dz
                if DROPOUT:
                    branch = tl.where(keep_mask(seed, at, threshold, 1, BLOCK), dz * scale, 0.0)
                _store(dsecond, tile, branch, WIDTH)
            if DROPOUT:
                dz = tl.where(keep_mask(seed, at, threshold, 0, BLOCK), dz * scale, 0.0)
            by_column = tl.full([1, BLOCK], 1.0, COMPUTE)
            if layerscale is not None:
                by_column = _load_columns(layerscale, column, WIDTH, COMPUTE)
            if x is not None:
                scaled = _load(x, tile, WIDTH, COMPUTE)
                if x_bias is not None:
                    scaled += _load_columns(x_bias, column, WIDTH, COMPUTE)
                product = dz * scaled
                rowscale_tile += product * by_column
                if dlayerscale is not None:
                    new_layerscale_sums = new_layerscale_sums + (layerscale_sums[chunk] + product * by_row[:, None],)
            dz *= by_row[:, None] * by_column
            if dx_bias is not None:  # nothing beyond the last row, where dresidual_out is not loaded and rstd is 0
                new_x_bias_sums = new_x_bias_sums + (x_bias_sums[chunk] + dz,)
            if dx is not None:
                _store(dx, tile, dz, WIDTH)
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
        tl.store(sums + program * WIDTH + column, total, _exists(column, WIDTH))


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
