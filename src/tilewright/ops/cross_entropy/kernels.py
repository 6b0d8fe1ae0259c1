"""The kernels of `cross_entropy`, by how they move the data.

Two things happen to a row of logits: its *statistics* are taken (maximum and sum of exponentials), then its *gradient*
is written, which reads the logits again. Memory shall see them once, so the second time they must be near.

A row of up to 128 KiB is one program's: it walks the row twice, and the second walk finds it in the processor's L1.
A longer row is cut into tiles. A program then takes one tile in one of the two roles, both in one grid, the gradient of
a row a fixed number of rows behind its statistics: far enough that these are there when it asks, near enough that the
logits are still in L2. Programs wait for programs of a lower number only, which are started first, so none waits for
one that cannot run. On a Hopper, `hopper.cu` takes the rows in bfloat16 that a block's registers hold.

The two roles in grids of their own serve logits that are cut by columns: over the ranks of a process group, or over
time in `linear_cross_entropy`. There `offset` is the class of the first column and CLASSES the size of the whole.

Every lane has its own running maximum, so that nothing is exchanged between threads before the end of a tile.
`row_kernels.py` has what happens within a row: its vectors, its edges, its loss.
"""

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tilewright.ops.cross_entropy.row_kernels import (
    LN2,
    LOG2E,
    body_vectors,
    class_weights,
    combine_tiles,
    is_in_tile,
    load_logits,
    row_body,
    row_edges,
    row_factors,
    smooth_sum,
    store_loss,
)
from tilewright.runtime import dispatch


def numbers(smooth: bool) -> int:
    """How many numbers a tile leaves: maximum, sum of exponentials and, for label smoothing, a number near the logits,
    the weighted sum of their differences from it, and the sum of the weights."""
    return 5 if smooth else 2


@triton.jit
def _statistics(
    row, tile, target, logits, weight, offset, softcap,
    COLUMNS: tl.constexpr, STRIDE: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr, EACH: tl.constexpr,
    SMOOTH: tl.constexpr, SOFTCAP: tl.constexpr, DOUBLE: tl.constexpr,
):  # fmt: skip
    """(whether the target is in the tile, its logit, and what a tile leaves)."""
    COMPUTE: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    EDGES: tl.constexpr = COLUMNS % EACH != 0 or STRIDE % EACH != 0
    start = row * STRIDE
    begin = tile * TILE
    body_first, body_end = row_body(row, COLUMNS, STRIDE, EACH)
    pivot = tl.zeros([], COMPUTE)
    if SMOOTH:
        pivot, _slope = load_logits(logits, start + begin, begin < COLUMNS, softcap, SOFTCAP, COMPUTE)
        pivot = tl.where(tl.abs(pivot) < float("inf"), pivot, 0.0)

    # A finite start: a row may begin with -inf, and -inf - -inf is no number.
    maximum = tl.full([LANES], -1.7976931348623157e308 if DOUBLE else -3.4028234663852886e38, COMPUTE)
    total = tl.zeros([LANES], COMPUTE)
    spread = tl.zeros([LANES], COMPUTE)
    weights = tl.zeros([LANES], COMPUTE)
    for first in tl.range(0, TILE, LANES * EACH, num_stages=1):
        at, column, inside = body_vectors(row, body_first, begin + first, COLUMNS, STRIDE, LANES, EACH)
        x, _slopes = load_logits(logits, at, inside, softcap, SOFTCAP, COMPUTE)
        if SMOOTH:
            factor = class_weights(weight, offset + column, inside, COMPUTE)
            spread += tl.sum(tl.where(inside, factor * (x - pivot), 0.0), 1)
            weights += tl.sum(factor, 1)
        highest = tl.maximum(maximum, tl.max(x, 1))
        total *= tl.exp2((maximum - highest) * LOG2E)
        total += tl.sum(tl.exp2((x - highest[:, None]) * LOG2E), 1)
        maximum = highest
    # After the loop: nothing waits for the target before the logits are on their way.
    here = is_in_tile(target, tile, body_first, body_end, COLUMNS, TILE)
    x_target, _slope = load_logits(logits, start + target, here, softcap, SOFTCAP, COMPUTE)
    top = tl.max(maximum, 0)
    total_spread = tl.sum(spread, 0)
    total_weight = tl.sum(weights, 0)
    if EDGES:
        column, inside = row_edges(tile, body_first, body_end, COLUMNS, EACH)
        x, _slopes = load_logits(logits, start + column, inside, softcap, SOFTCAP, COMPUTE)
        if SMOOTH:
            factor = class_weights(weight, offset + column, inside, COMPUTE)
            total_spread += tl.sum(tl.where(inside, factor * (x - pivot), 0.0), 0)
            total_weight += tl.sum(factor, 0)
        highest = tl.maximum(top, tl.max(x, 0))
        total = tl.sum(total * tl.exp2((maximum - highest) * LOG2E), 0)
        total += tl.sum(tl.exp2((x - highest) * LOG2E), 0)
        top = highest
    else:
        total = tl.sum(total * tl.exp2((maximum - top) * LOG2E), 0)
    return here, x_target, top, total, pivot, total_spread, total_weight


@triton.jit
def _gradient_of(
    logits, at, column, inside, weight, top, pull, spread, softcap, SMOOTH: tl.constexpr, SOFTCAP: tl.constexpr,
    COMPUTE: tl.constexpr,
):  # fmt: skip
    """The gradients of some logits, as if none of them were the target's."""
    x, slope = load_logits(logits, at, inside, softcap, SOFTCAP, COMPUTE)
    g = tl.exp2((x - top) * LOG2E) * pull
    if SMOOTH:
        g -= class_weights(weight, column, inside, COMPUTE) * spread
    return g * slope


@triton.jit
def _gradient(
    row, tile, target, ignored, known, x_target, top, total, weights, logits, weight, denominator, upstream, gradient,
    offset, stride, smoothing, z_loss, softcap,
    COLUMNS: tl.constexpr, STRIDE: tl.constexpr, CLASSES: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr,
    EACH: tl.constexpr, SMOOTH: tl.constexpr, SOFTCAP: tl.constexpr, DOUBLE: tl.constexpr, PAST: tl.constexpr,
):  # fmt: skip
    """PAST: what is written makes room in L2 first, for logits that are to be read again."""
    COMPUTE: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    CACHE: tl.constexpr = ".cs" if PAST else ""
    EDGES: tl.constexpr = COLUMNS % EACH != 0 or STRIDE % EACH != 0
    start = row * STRIDE
    begin = tile * TILE
    body_first, body_end = row_body(row, COLUMNS, STRIDE, EACH)
    edge_column, edge_inside = row_edges(tile, body_first, body_end, COLUMNS, EACH)
    if ignored | (known == 0):
        nothing = tl.where(ignored, 0.0, float("nan"))
        for first in tl.range(0, TILE, LANES * EACH):
            at, column, inside = body_vectors(row, body_first, begin + first, COLUMNS, STRIDE, LANES, EACH)
            filled = tl.full([LANES, EACH], 0.0, COMPUTE) + nothing
            tl.store(gradient + at, filled.to(gradient.dtype.element_ty), inside)
        if EDGES:
            filled = tl.full([2 * EACH], 0.0, COMPUTE) + nothing
            tl.store(gradient + start + edge_column, filled.to(gradient.dtype.element_ty), edge_inside)
    else:
        row_weight, scale = row_factors(target + offset, known, weight, denominator, COMPUTE)
        if upstream is not None:
            scale *= tl.load(upstream + row * stride).to(COMPUTE)
        hit = row_weight * (1.0 - smoothing) * scale
        pull = hit + 2.0 * z_loss * (top + tl.log2(total) * LN2) * scale
        spread = smoothing / CLASSES * scale
        if SMOOTH:
            pull += spread * weights
        pull /= total
        # From right to left: what the statistics have read last is the nearest.
        for first in tl.range(0, TILE, LANES * EACH, num_stages=1):
            last = begin + (TILE - LANES * EACH - first)
            at, column, inside = body_vectors(row, body_first, last, COLUMNS, STRIDE, LANES, EACH)
            of_body = _gradient_of(
                logits, at, offset + column, inside, weight, top, pull, spread, softcap, SMOOTH, SOFTCAP, COMPUTE
            )
            tl.store(gradient + at, of_body.to(gradient.dtype.element_ty), inside, cache_modifier=CACHE)
        if EDGES:
            edge_at = start + edge_column
            of_edges = _gradient_of(
                logits, edge_at, offset + edge_column, edge_inside, weight, top, pull, spread, softcap, SMOOTH, SOFTCAP,
                COMPUTE,
            )  # fmt: skip
            tl.store(gradient + edge_at, of_edges.to(gradient.dtype.element_ty), edge_inside)
        if is_in_tile(target, tile, body_first, body_end, COLUMNS, TILE):
            tl.debug_barrier()  # after the store above, which another thread did
            g = tl.exp2((x_target - top) * LOG2E) * pull - hit
            if SMOOTH:
                g -= row_weight * spread
            if SOFTCAP:
                g *= 1.0 - (x_target / softcap) * (x_target / softcap)
            tl.store(gradient + start + target, g.to(gradient.dtype.element_ty))


@triton.jit(do_not_specialize=["ignore_index", "stride", "rows", "offset", "lag"])
def tilewright_cross_entropy_tiles(
    logits, targets, weight, denominator, upstream, loss, lse, gradient, picked, partials, arrived,
    ignore_index: tl.int64, stride: tl.int64, rows: tl.int64, offset: tl.int64, lag: tl.int64, smoothing: tl.float64,
    z_loss: tl.float64, softcap: tl.float64,
    COLUMNS: tl.constexpr, STRIDE: tl.constexpr, CLASSES: tl.constexpr, TILE: tl.constexpr, GIVEN: tl.constexpr,
    ROUND: tl.constexpr, NUMBERS: tl.constexpr, LANES: tl.constexpr, EACH: tl.constexpr, SMOOTH: tl.constexpr,
    SOFTCAP: tl.constexpr, DOUBLE: tl.constexpr,
):  # fmt: skip
    """Statistics where GIVEN is false, gradients where `gradient` is not None; loss and log-sum-exp of whole rows.

    The gradient is for `upstream`, one number (stride 0) or one a row (stride 1), or for 1 where that is None. It may
    overwrite the logits. Rows of logits and gradient are STRIDE apart. GIVEN: `partials` hold one part a row. Without
    `arrived`, zeros, the rows are not whole, and their statistics are left in `picked` and `partials`, of which there
    are none where a row is one program's and nobody asks for them afterwards.
    """
    COMPUTE: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    smoothing = tl.full([], smoothing, COMPUTE)
    z_loss = tl.full([], z_loss, COMPUTE)
    softcap = tl.full([], softcap, COMPUTE)
    TILES: tl.constexpr = (COLUMNS + TILE - 1) // TILE
    PARTS: tl.constexpr = 1 if GIVEN else TILES
    ALONE: tl.constexpr = TILES == 1 and (not GIVEN) and (arrived is not None)  # one program does it all
    APART: tl.constexpr = TILES > 1 and (not GIVEN) and (gradient is not None)  # the roles are different programs'
    number = tl.program_id(0).to(tl.int64)
    row = number // (2 * TILES if APART else TILES)
    tile = (number % (2 * TILES if APART else TILES)).to(tl.int32)
    follows = tile >= TILES
    if APART:
        row -= tl.where(follows, lag, 0)
        tile -= tl.where(follows, TILES, 0)
    if (row >= 0) & (row < rows):
        target = tl.load(targets + row).to(tl.int64)
        ignored = target == ignore_index
        known = (target >= 0) & (target < CLASSES)
        counts = known & (ignored == 0)
        local = target - offset
        if not GIVEN:
            if follows == 0:
                here, x_target, top, total, pivot, spread, weights = _statistics(
                    row, tile, local, logits, weight, offset, softcap,
                    COLUMNS, STRIDE, TILE, LANES, EACH, SMOOTH, SOFTCAP, DOUBLE,
                )  # fmt: skip
                if partials is not None:
                    tl.store(picked + row, x_target, here)
                    at = partials + (row * TILES + tile) * NUMBERS
                    tl.store(at, top)
                    tl.store(at + 1, total)
                if ALONE:
                    smooth = smooth_sum(top, total, pivot, spread, weights)
                    store_loss(
                        row, target, ignored, known, x_target, top, total, smooth, weight, denominator, loss, lse,
                        smoothing, z_loss, CLASSES, SMOOTH, COMPUTE,
                    )  # fmt: skip
                    if gradient is not None:
                        _gradient(
                            row, tile, local, ignored, known, x_target, top, total, weights, logits, weight,
                            denominator, upstream, gradient, offset, stride, smoothing, z_loss, softcap,
                            COLUMNS, STRIDE, CLASSES, TILE, LANES, EACH, SMOOTH, SOFTCAP, DOUBLE, False,
                        )  # fmt: skip
                else:
                    if SMOOTH:
                        tl.store(at + 2, pivot)
                        tl.store(at + 3, spread)
                        tl.store(at + 4, weights)
                    if arrived is not None:
                        tl.debug_barrier()  # what every thread stored comes before the count
                        if tl.atomic_add(arrived + row, 1, sem="acq_rel") == TILES - 1:
                            x_target, top, total, smooth, weights = combine_tiles(
                                picked, partials, row, counts, TILES, ROUND, NUMBERS, SMOOTH, COMPUTE
                            )
                            store_loss(
                                row, target, ignored, known, x_target, top, total, smooth, weight, denominator, loss,
                                lse, smoothing, z_loss, CLASSES, SMOOTH, COMPUTE,
                            )  # fmt: skip
        if GIVEN or APART:
            if GIVEN or follows:
                if APART:
                    while tl.atomic_add(arrived + row, 0, sem="acquire") < TILES:
                        pass
                x_target, top, total, smooth, weights = combine_tiles(
                    picked, partials, row, counts, PARTS, ROUND, NUMBERS, SMOOTH, COMPUTE
                )
                if GIVEN:
                    if tile == 0:
                        store_loss(
                            row, target, ignored, known, x_target, top, total, smooth, weight, denominator, loss, lse,
                            smoothing, z_loss, CLASSES, SMOOTH, COMPUTE,
                        )  # fmt: skip
                if gradient is not None:
                    _gradient(
                        row, tile, local, ignored, known, x_target, top, total, weights, logits, weight, denominator,
                        upstream, gradient, offset, stride, smoothing, z_loss, softcap,
                        COLUMNS, STRIDE, CLASSES, TILE, LANES, EACH, SMOOTH, SOFTCAP, DOUBLE, APART,
                    )  # fmt: skip


@triton.jit(do_not_specialize=["ignore_index", "rows"])
def tilewright_cross_entropy_prepare(
    targets, weight, denominator, arrived, ignore_index: tl.int64, rows: tl.int64,
    CLASSES: tl.constexpr, BLOCK: tl.constexpr, DOUBLE: tl.constexpr,
):  # fmt: skip
    """What a mean divides by, the targets that count, each by its class's weight; and zeros in `arrived`."""
    COMPUTE: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    total = tl.zeros([BLOCK], COMPUTE)
    for first in tl.range(0, rows, BLOCK):
        row = first + tl.arange(0, BLOCK)
        inside = row < rows
        if arrived is not None:
            tl.store(arrived + row, tl.zeros([BLOCK], tl.int32), inside)
        if denominator is not None:
            target = tl.load(targets + row, inside, 0).to(tl.int64)
            kept = inside & (target != ignore_index)
            if weight is None:
                total += tl.where(kept, 1.0, 0.0)
            else:
                total += tl.load(weight + target, kept & (target >= 0) & (target < CLASSES), 0.0).to(COMPUTE)
    if denominator is not None:
        tl.store(denominator, tl.sum(total, 0))


SCALING = 16  # programs a processor that scale a gradient: about as many as run side by side
SCALED = 2048  # elements that one of them scales at a time


@triton.jit(do_not_specialize=["count"])
def tilewright_cross_entropy_scale_all(gradient, factor, count: tl.int64, BLOCK: tl.constexpr):
    """gradient *= factor, a number; a factor of 1, the usual one, costs a look at it."""
    by = tl.load(factor)
    if by != 1.0:
        step = tl.num_programs(0).to(tl.int64) * BLOCK
        whole = count // BLOCK * BLOCK  # unmasked, for vectors
        for first in range(tl.program_id(0).to(tl.int64) * BLOCK, whole, step):
            at = gradient + first + tl.arange(0, BLOCK)
            g = tl.load(at)
            tl.store(at, (g * by).to(g.dtype))
        if tl.program_id(0) == 0:
            at = whole + tl.arange(0, BLOCK)
            g = tl.load(gradient + at, at < count, 0.0)
            tl.store(gradient + at, (g * by).to(g.dtype), at < count)


def _block(columns: int, most: int) -> int:
    return min(most, max(16, 1 << (columns - 1).bit_length()))


class Tiling(NamedTuple):
    """How a row is divided into tiles, and a tile into steps."""

    tiles_a_row: int
    tile: int  # columns of one
    block: int  # columns of a step through it
    warps: int


def _tiling(columns: int, size: int, given: bool) -> Tiling:
    """The launch config for numbers of `size` bytes."""
    if columns * size <= 131072 or given:
        tile = block = _block(columns, 32768 // size)
        warps = max(1, block * size // 1024)
        tile = tile if given else -(-columns // block) * block
    else:
        tile, warps = 16384 // size, 8
        block = tile
    return Tiling(-(-columns // tile), tile, block, warps)


def left(columns: int, size: int, smooth: bool) -> int:
    """How many numbers the tiles of a row leave for those who write its gradient: none where that is one program."""
    tiles_a_row = _tiling(columns, size, False).tiles_a_row
    return 0 if tiles_a_row == 1 else 1 + tiles_a_row * numbers(smooth)


@functools.cache
def tiles_launch(
    device: torch.device,
    columns: int,
    stride: int,
    classes: int,
    dtypes: tuple[Any, ...],
    given: bool,
    keep: bool,  # two arguments more, where a row is one program's
    smooth: bool,
    softcap: bool,
) -> tuple[int, int, dispatch.Launch]:
    """(tiles a row, rows that a gradient stays behind its statistics, the launch)."""
    size = dtypes[0].itemsize
    tiles_a_row, tile, block, warps = _tiling(columns, size, given)
    each = 16 // size
    parts = 1 if given else tiles_a_row
    constants = (
        columns, stride, classes, tile, given, 1 << (parts - 1).bit_length(), numbers(smooth), block // each, each,
        smooth, softcap, dtypes[0] == torch.float64,
    )  # fmt: skip
    # As many programs as run side by side are between a tile's statistics and its gradient.
    lag = -(-dispatch.multiprocessors(device) * (64 // warps) // (2 * tiles_a_row))
    return tiles_a_row, lag, dispatch.Launch(tilewright_cross_entropy_tiles, device, constants, warps)


@functools.cache
def prepare_launch(device: torch.device, classes: int, dtypes: tuple[Any, ...], double: bool) -> dispatch.Launch:
    return dispatch.Launch(tilewright_cross_entropy_prepare, device, (classes, 4096, double), 8)


@functools.cache
def scale_launch(device: torch.device, dtype: torch.dtype, factor: torch.dtype) -> dispatch.Launch:
    return dispatch.Launch(tilewright_cross_entropy_scale_all, device, (SCALED,), 4, (0,))
