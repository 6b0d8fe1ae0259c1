"""The kernels of `cross_entropy`, by how they move the data.

One program takes one row of logits and walks it twice. First from left to right for the log-sum-exp: every lane keeps
its own running maximum and sum, so that nothing is exchanged between threads before the end, and one exponential an
element suffices: exp(-|x - maximum|) is either what the element adds or what the sum shrinks by. Then from right to
left for the gradient, out of L2, where the first walk has left the row: 132 rows of 256 KiB are less than an H200's L2
has. Memory sees the logits read once and the gradient written once.

Arithmetic is in COMPUTE, float32 or float64 for float64 input, and in powers of two.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from tilewright.ops import _op

_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _tanh(u):
    """Through the exponential, but by its series near 0, where the difference from 1 would cancel."""
    square = u * u
    series = 0.003592128036572481 - square * 0.0014558343870513183
    series = 0.021869488536155203 + square * (-0.008863235529902197 + square * series)
    series = 0.13333333333333333 + square * (-0.05396825396825397 + square * series)
    series = u * (1.0 + square * (-0.3333333333333333 + square * series))
    return tl.where(square < 0.01, series, 1.0 - 2.0 / (tl.exp2(u * (2.0 * _LOG2E)) + 1.0))


@triton.jit
def _load(logits, at, inside, softcap, SOFTCAP: tl.constexpr, COMPUTE: tl.constexpr):
    """The logits as the loss sees them, and what the cap lets through of their gradient."""
    x = tl.load(logits + at, inside, float("-inf")).to(COMPUTE)
    slope = tl.full(x.shape, 1.0, COMPUTE)
    if SOFTCAP:
        bent = _tanh(x / softcap)
        slope = 1.0 - bent * bent
        x = tl.where(inside, bent * softcap, float("-inf"))
    return x, slope


@triton.jit
def _factor(weight, column, inside, COMPUTE: tl.constexpr):
    """The weight of each class: ones where there is none."""
    if weight is None:
        factor = tl.full(column.shape, 1.0, COMPUTE)
    else:
        factor = tl.load(weight + column, inside, 0.0).to(COMPUTE)
    return factor


@triton.jit(do_not_specialize=["ignore_index", "stride"])
def forward(
    logits, targets, weight, weight_sum, denominator, upstream, loss, lse, gradient,
    ignore_index: tl.int64, stride: tl.int64, smoothing: tl.float64, z_loss: tl.float64, softcap: tl.float64,
    VOCABULARY: tl.constexpr, BLOCK: tl.constexpr, SMOOTH: tl.constexpr, SOFTCAP: tl.constexpr, DOUBLE: tl.constexpr,
):  # fmt: skip
    """Loss and log-sum-exp of a row and, where `gradient` is not None, its gradient, which may overwrite the logits.

    The gradient is for `upstream`, one number (stride 0) or one a row (stride 1), or for 1 where that is None.
    """
    COMPUTE: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    smoothing = tl.full([], smoothing, COMPUTE)
    z_loss = tl.full([], z_loss, COMPUTE)
    softcap = tl.full([], softcap, COMPUTE)
    row = tl.program_id(0).to(tl.int64)
    start = row * VOCABULARY
    target = tl.load(targets + row)
    ignored = target == ignore_index
    known = (target >= 0) & (target < VOCABULARY)
    at_target = tl.where(known, target, 0)

    one = tl.zeros([1], tl.int64)
    x_target, _one_slope = _load(logits, start + at_target + one, one == 0, softcap, SOFTCAP, COMPUTE)
    x_target = tl.sum(x_target, 0)
    pivot = tl.where(x_target > float("-inf"), x_target, 0.0)  # a number near the logits to take differences from

    # A finite start: a row may begin with -inf, and -inf - -inf is no number.
    maximum = tl.full([BLOCK], -1.7976931348623157e308 if DOUBLE else -3.4028234663852886e38, COMPUTE)
    total = tl.zeros([BLOCK], COMPUTE)
    spread_sum = tl.zeros([BLOCK], COMPUTE)  # of weight x (logit - pivot), for label smoothing
    for first in tl.range(0, VOCABULARY, BLOCK, num_stages=3):
        column = first + tl.arange(0, BLOCK)
        inside = column < VOCABULARY
        x, slope = _load(logits, start + column, inside, softcap, SOFTCAP, COMPUTE)
        if SMOOTH:
            spread_sum += tl.where(inside, _factor(weight, column, inside, COMPUTE) * (x - pivot), 0.0)
        shrink = tl.exp2(-tl.abs(x - maximum) * _LOG2E)
        total = tl.where(x > maximum, total * shrink + 1.0, total + shrink)
        maximum = tl.maximum(maximum, x)
    # The log-sum-exp in two parts: their sum would lose what is small beside large logits.
    top = tl.max(maximum, 0)
    log2_total = tl.log2(tl.sum(total * tl.exp2((maximum - top) * _LOG2E), 0))
    above_target = top - x_target + log2_total * _LN2
    row_lse = top + log2_total * _LN2
    if lse is not None:
        tl.store(lse + row, row_lse)

    row_weight = tl.full([], 1.0, COMPUTE)
    if weight is not None:
        row_weight = tl.load(weight + at_target).to(COMPUTE)
    scale = tl.full([], 1.0, COMPUTE)
    if denominator is not None:
        count = tl.load(denominator).to(COMPUTE)
        scale = tl.where(count > 0.0, 1.0 / count, 0.0)
    all_weights = tl.full([], VOCABULARY, COMPUTE)
    if weight_sum is not None:
        all_weights = tl.load(weight_sum).to(COMPUTE)
    row_loss = row_weight * (1.0 - smoothing) * above_target + z_loss * row_lse * row_lse
    if SMOOTH:
        above_pivot = top - pivot + log2_total * _LN2
        row_loss += smoothing / VOCABULARY * (all_weights * above_pivot - tl.sum(spread_sum, 0))
    row_loss = tl.where(ignored, 0.0, tl.where(known, row_loss * scale, float("nan")))
    if loss is not None:
        tl.store(loss + row, row_loss)

    if gradient is not None:
        tl.debug_barrier()  # the gradient may overwrite the logits: the target's was read above by every thread
        if upstream is not None:
            scale *= tl.load(upstream + row * stride).to(COMPUTE)
        pull = (row_weight * (1.0 - smoothing) + 2.0 * z_loss * row_lse) * scale
        spread = tl.zeros([], COMPUTE)
        if SMOOTH:
            pull += smoothing / VOCABULARY * all_weights * scale
            spread = smoothing / VOCABULARY * scale
        hit = row_weight * (1.0 - smoothing) * scale
        LAST: tl.constexpr = (VOCABULARY - 1) // BLOCK * BLOCK
        for step in tl.range(0, VOCABULARY, BLOCK, num_stages=3):
            column = LAST - step + tl.arange(0, BLOCK)
            inside = column < VOCABULARY
            x, slope = _load(logits, start + column, inside, softcap, SOFTCAP, COMPUTE)
            g = tl.exp2((x - top) * _LOG2E - log2_total) * pull
            if SMOOTH:
                g -= _factor(weight, column, inside, COMPUTE) * spread
            g = tl.where(column == target, g - hit, g) * slope
            g = tl.where(ignored, 0.0, tl.where(known, g, float("nan")))
            tl.store(gradient + start + column, g.to(gradient.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["stride"])
def scale_rows(gradient, factor, stride: tl.int64, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    """gradient *= factor, a number (stride 0) or one a row; a factor of 1, the usual one, costs a look at it."""
    row = tl.program_id(0).to(tl.int64)
    by = tl.load(factor + row * stride)
    if by != 1.0:
        for first in range(0, VOCABULARY, BLOCK):
            column = first + tl.arange(0, BLOCK)
            inside = column < VOCABULARY
            g = tl.load(gradient + row * VOCABULARY + column, inside, 0.0)
            tl.store(gradient + row * VOCABULARY + column, (g * by).to(g.dtype), inside)


@functools.cache
def forward_launch(
    device: torch.device, vocabulary: int, dtypes: tuple[Any, ...], smooth: bool, softcap: bool
) -> _op.Launch:
    """How a row is walked: in blocks of up to 4096 columns."""
    block = min(4096, max(16, 1 << (vocabulary - 1).bit_length()))
    constants = (vocabulary, block, smooth, softcap, dtypes[0] == torch.float64)
    return _op.Launch(forward, device, constants, max(1, min(8, block // 256)))


@functools.cache
def scale_launch(device: torch.device, vocabulary: int, dtype: torch.dtype, factor: torch.dtype) -> _op.Launch:
    """The same blocks for the scaling."""
    block = min(4096, max(16, 1 << (vocabulary - 1).bit_length()))
    return _op.Launch(scale_rows, device, (vocabulary, block), 4)
