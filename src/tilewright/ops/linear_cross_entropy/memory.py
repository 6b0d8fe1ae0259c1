"""The memory of `linear_cross_entropy`: how many tokens go at a time, and where what they need lies."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from tilewright.plan.memory import logits_at_once
from tilewright.runtime import dispatch

A_TOKEN = 64  # bytes, beside its logits: loss, a count, and what a second pass makes of its statistics
_ALIGNED = 128  # bytes, where a tensor begins
_SUMMED_FROM = 512  # tokens a chunk: the matmul of a smaller one takes less time than adding it to a sum
_TILE = 256  # rows of a tile of the large matmuls
LARGEST = 2**31 - 1  # elements of a matrix of which a few columns are multiplied: cuBLAS counts these in 32 bits

Tensor = torch.Tensor


def default_memory(rows: int, classes: int, itemsize: int) -> int:
    """Return the bytes that a call takes which names none: room for all logits, in whole tiles, or for some of them."""
    whole = rows * classes * itemsize
    some = int(logits_at_once(whole, rows))
    return some if some < whole else 2 * max(_TILE, rows + _TILE) * (-(-classes // 64) * 64 * itemsize + A_TOKEN)


def _room(memory: int, each: int, most: int) -> int:
    """How many of `each` bytes fit, in whole tiles, and evenly: the last part is no smaller than it must be."""
    tile = _TILE if min(memory // each, most) >= 4 * _TILE else 16
    fits = max(tile, memory // each // tile * tile)
    parts = max(1, -(-most // fits))
    return max(tile, -(-most // (tile * parts)) * tile)


def without(memory: int, taken: int) -> int:
    """What is left of it for logits: half of it at least."""
    return max(memory // 2, memory - taken)


class _Scratch:
    """New tensors in memory that lies idle; where there is none of it, or no more, in memory of their own."""

    def __init__(self, like: Tensor, idle: Tensor | None) -> None:
        self.like = like
        self.idle = like.new_empty(0, dtype=torch.uint8) if idle is None else idle.view(-1).view(torch.uint8)
        self.next = -self.idle.data_ptr() % _ALIGNED

    def new(self, shape: int | tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = (shape if isinstance(shape, int) else math.prod(shape)) * dtype.itemsize
        first, end = self.next, self.next + size
        if not size or end > len(self.idle):
            return self.like.new_empty(shape, dtype=dtype)
        self.next = -(-end // _ALIGNED) * _ALIGNED
        return self.idle[first:end].view(dtype).view(shape)


class ChunkPlan(NamedTuple):
    """How the tokens are divided into chunks, and the memory for it."""

    chunk: int  # tokens at a time
    again: bool  # the weight's gradient takes a second pass
    total: Tensor | None  # of the weight's gradient in float32, where that is not itself in it
    scales: Tensor | None  # of the weight's gradient, where it is summed in 16 bits
    scratch: _Scratch  # memory until the last chunk's gradient of x
    dx: Tensor | None
    buffer: Tensor  # for the logits of a chunk


def plan_chunks(
    tokens: Tensor, classes: int, memory: int, exact: bool, smooth: bool, needs_x: bool, dweight: Tensor | None,
    logits: Tensor | None = None,
) -> ChunkPlan:  # fmt: skip
    """Plan what `memory` has room for.

    Whatever is not logits lies in the rows of x's gradient that the last chunk will write, if it fits, and takes no
    memory then. `exact`: no sum is in 16 bits. `logits`: a buffer that has all of them, from an earlier plan.
    """
    from tilewright.ops.cross_entropy import kernels as cross_entropy_kernels
    from tilewright.ops.linear_cross_entropy import kernels as linear_cross_entropy_kernels

    (rows, width), itemsize = tokens.shape, tokens.itemsize
    pitch = -(-classes // 64) * 64  # rows of logits begin on 128 bytes, whatever the vocabulary
    number = dispatch.compute_dtype(tokens).itemsize
    dx = torch.empty_like(tokens) if needs_x else None
    of_rows, each = rows * (number + 4), pitch * itemsize  # losses and counts; a token's logits
    statistics = cross_entropy_kernels.left(classes, itemsize, smooth) * number
    all_of_it = min(2 * each, each + statistics)
    # Where a sum over chunks would not be in float32 it has memory of its own that is, if half of what there is has
    # room for it; else it is in 16 bits with scales, or there is none.
    rounded, of_total = dweight is not None and dweight.dtype in (torch.bfloat16, torch.float16), 4 * classes * width
    apart = rounded and of_total + of_rows <= memory // 2
    if apart and _room(without(memory, of_rows), all_of_it, rows) < rows:
        rounded, memory = False, memory - of_total
    scales, of_scales = None, 0
    if dweight is not None and rounded and not exact and dweight.dtype == torch.bfloat16:
        scales = linear_cross_entropy_kernels.scales(dweight)
    if scales is not None:
        of_scales = math.prod(scales[0]) * scales[1].itemsize + _ALIGNED

    def sums(chunk: int) -> bool:
        return chunk >= rows or not rounded or (scales is not None and chunk >= _SUMMED_FROM)

    idle, again = None, False
    chunk = _room(memory, each, rows)
    if dx is not None and rows and sums(chunk):
        idle = dx[-((rows - 1) % chunk + 1) :]
        if idle.nbytes < of_rows + chunk * statistics + of_scales + 6 * _ALIGNED:
            idle = None
    if idle is None:
        chunk = _room(without(memory, of_rows), all_of_it, rows)
        if chunk < rows and scales is not None:
            chunk = _room(without(memory, of_rows + of_scales), all_of_it, rows)
        again = not sums(chunk)
        if again:
            chunk = _room(without(memory, A_TOKEN * rows), all_of_it, rows)
    scratch, home = _Scratch(tokens, idle), None
    if again and dweight is not None:
        most = LARGEST if classes % 8 else dweight.numel()
        chunk = max(chunk, _room(min(most, dweight.numel()) // pitch, 1, rows))
        home = dweight.view(-1)[: chunk * pitch] if chunk * pitch <= dweight.numel() else None
    if logits is not None:
        return ChunkPlan(len(logits), False, None, None, scratch, dx, logits)
    buffer = tokens.new_empty(chunk, pitch) if home is None else home.view(chunk, pitch)
    if pitch > classes:
        buffer[:, classes:].zero_()  # a CPU's bfloat16 matmul multiplies what lies between the rows by zero
    summed = rounded and not again and chunk < rows
    held = scratch.new(*scales) if summed and scales is not None else None
    total = None
    if apart and not rounded and chunk < rows:
        total = tokens.new_empty((classes, width), dtype=torch.float32)
    return ChunkPlan(chunk, again, total, held, scratch, dx, buffer)
