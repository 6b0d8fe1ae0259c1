"""What the kernels of `cross_entropy` do with a row: its logits and weights, its loss, and which columns are whose.

Loads and stores move vectors of 16 bytes. Where a row does not begin at a vector (a contiguous row of 50257 logits), or
does not end at one, the vectors that lie within the row are its *body*, and the logits before and behind it are its
*edges*: at most one vector's worth at each end, which the program of the first tile takes one by one.

Sums are in float32, or float64 for float64 input; exponentials are powers of two.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def tanh(u):
    """Compute tanh by the exponential, and near 0, where the difference from 1 would cancel, by its series."""
    square = u * u
    series = 0.003592128036572481 - square * 0.0014558343870513183
    series = 0.021869488536155203 + square * (-0.008863235529902197 + square * series)
    series = 0.13333333333333333 + square * (-0.05396825396825397 + square * series)
    series = u * (1.0 + square * (-0.3333333333333333 + square * series))
    return tl.where(square < 0.01, series, 1.0 - 2.0 / (tl.exp2(u * (2.0 * LOG2E)) + 1.0))


@triton.jit
def load_logits(logits, at, inside, softcap, SOFTCAP: tl.constexpr, COMPUTE: tl.constexpr):
    """The logits as the loss sees them, and what the cap lets through of their gradient."""
    x = tl.load(logits + at, inside, float("-inf")).to(COMPUTE)
    slope = tl.full(x.shape, 1.0, COMPUTE)
    if SOFTCAP:
        bent = tanh(x / softcap)
        slope = 1.0 - bent * bent
        x = tl.where(inside, bent * softcap, float("-inf"))
    return x, slope


@triton.jit
def class_weights(weight, column, inside, COMPUTE: tl.constexpr):
    """The weight of each class: ones where there is none."""
    if weight is None:
        factor = tl.where(inside, tl.full(column.shape, 1.0, COMPUTE), 0.0)
    else:
        factor = tl.load(weight + column, inside, 0.0).to(COMPUTE)
    return factor


@triton.jit
def smooth_sum(top, total, pivot, spread, weights):
    """The sum of weight x (log-sum-exp - logit)."""
    return weights * ((top - pivot) + tl.log2(total) * LN2) - spread


@triton.jit
def combine_tiles(
    picked, partials, row, counts, TILES: tl.constexpr, ROUND: tl.constexpr, NUMBERS: tl.constexpr,
    SMOOTH: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """What tiles have left, as one: (target's logit, maximum, sum of exponentials, `smooth_sum`, sum of weights)."""
    tile = tl.arange(0, ROUND)
    at = partials + (row * TILES + tile) * NUMBERS
    inside = tile < TILES
    # Past the caches that are not kept in step with other processors: other programs have written these.
    x_target = tl.load(picked + row, counts, 0.0, cache_modifier=".cg")
    maximum = tl.load(at, inside, float("-inf"), cache_modifier=".cg")
    total = tl.load(at + 1, inside, 0.0, cache_modifier=".cg")
    top = tl.max(maximum, 0)
    total = tl.sum(tl.where(inside, total * tl.exp2((maximum - top) * LOG2E), 0.0), 0)
    smooth = tl.zeros([], COMPUTE)
    weights = tl.zeros([], COMPUTE)
    if SMOOTH:
        pivot = tl.load(at + 2, inside, 0.0, cache_modifier=".cg")
        spread = tl.load(at + 3, inside, 0.0, cache_modifier=".cg")
        weight = tl.load(at + 4, inside, 0.0, cache_modifier=".cg")
        smooth = tl.sum(smooth_sum(top, total, pivot, spread, weight), 0)
        weights = tl.sum(weight, 0)
    return x_target, top, total, smooth, weights


@triton.jit
def row_factors(target, counts, weight, denominator, COMPUTE: tl.constexpr):
    """What a row's loss is multiplied by: its class's weight, and one over the denominator of a mean."""
    row_weight = tl.full([], 1.0, COMPUTE)
    if weight is not None:
        row_weight = tl.load(weight + tl.where(counts, target, 0)).to(COMPUTE)
    scale = tl.full([], 1.0, COMPUTE)
    if denominator is not None:
        count = tl.load(denominator).to(COMPUTE)
        scale = tl.where(count > 0.0, 1.0 / count, 0.0)
    return row_weight, scale


@triton.jit
def store_loss(
    row, target, ignored, known, x_target, top, total, smooth, weight, denominator, loss, lse, smoothing, z_loss,
    CLASSES: tl.constexpr, SMOOTH: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Loss and log-sum-exp of a row."""
    log_total = tl.log2(total) * LN2  # apart from `top`: their sum would lose what is small beside large logits
    row_lse = top + log_total
    if lse is not None:
        tl.store(lse + row, row_lse)
    if loss is not None:
        row_weight, scale = row_factors(target, known & (ignored == 0), weight, denominator, COMPUTE)
        row_loss = row_weight * (1.0 - smoothing) * ((top - x_target) + log_total) + z_loss * row_lse * row_lse
        if SMOOTH:
            row_loss += smoothing / CLASSES * smooth
        tl.store(loss + row, tl.where(ignored, 0.0, tl.where(known, row_loss * scale, float("nan"))))


@triton.jit
def row_body(row, COLUMNS: tl.constexpr, STRIDE: tl.constexpr, EACH: tl.constexpr):
    """The columns from `first` to `end` of a row are whole vectors; without edges they are all of its columns."""
    first = 0
    if STRIDE % EACH != 0:
        first = tl.minimum((EACH - row * STRIDE % EACH) % EACH, COLUMNS).to(tl.int32)
    end = first + (COLUMNS - first) // EACH * EACH
    return first, end


@triton.jit
def body_vectors(row, first, at, COLUMNS: tl.constexpr, STRIDE: tl.constexpr, LANES: tl.constexpr, EACH: tl.constexpr):
    """LANES vectors of a row's body from its column `at` on: (offsets, columns, which of them exist).

    A vector exists or it does not: the compiler sees that its elements share their mask.
    """
    EDGES: tl.constexpr = COLUMNS % EACH != 0 or STRIDE % EACH != 0
    lane = tl.arange(0, LANES)[:, None] * EACH
    begin = row * STRIDE
    if EDGES:
        begin = tl.multiple_of(begin + first, EACH)
        inside = tl.broadcast_to(first + at + lane + EACH <= COLUMNS, [LANES, EACH])
    else:
        inside = at + lane + tl.arange(0, EACH)[None, :] < COLUMNS
    column = at + lane + tl.arange(0, EACH)[None, :]
    return begin + column, first + column, inside


@triton.jit
def row_edges(tile, first, end, COLUMNS: tl.constexpr, EACH: tl.constexpr):
    """The columns before and behind a row's body, and which of them exist: for the first tile only."""
    lane = tl.arange(0, 2 * EACH)
    column = tl.where(lane < EACH, lane, end + lane - EACH)
    exists = (column < first) | ((lane >= EACH) & (column < COLUMNS))
    return column, exists & (lane * 0 + tile == 0)


@triton.jit
def is_in_tile(target, tile, first, end, COLUMNS: tl.constexpr, TILE: tl.constexpr):
    """Whether a column belongs to a tile: to its part of the body, or, for the first tile, to the edges."""
    body = (target >= first) & (target < end)
    edge = (target >= 0) & (target < COLUMNS) & (body == 0)
    return (body & ((target - first) // TILE == tile)) | (edge & (tile == 0))
