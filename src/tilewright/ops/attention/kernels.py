"""What goes before and behind the backward of `attention`; the kernel between them is `hopper_backward.cu`.

Rows are a multiple of 8 elements apart, and told in eights: so the compiler knows that they may be read by vectors.

`prepare`: a program takes 64 queries of a head.

`finish`: what was added up lies as the tensor cores had it, 64 queries of a head at a time: of a group of 128 threads
each has 32 numbers, and four of one thread lie beside four of the next. A program takes one such part.
"""

import functools

import torch
import triton
import triton.language as tl

from tilewright.runtime import dispatch

_QUERIES = 64  # of a part


@triton.jit(do_not_specialize=["heads", "sequence", "out_stride", "dout_stride", "scale"])
def tilewright_attention_prepare(
    out, dout, lse, starts, slope_starts, counts,
    heads: tl.int32, sequence: tl.int64, out_stride: tl.int64, dout_stride: tl.int64, scale: tl.float32,
    QUERIES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """starts = -lse / scale,  slope_starts = -sum of out dout,  counts = 0"""
    part = tl.program_id(0).to(tl.int64)
    head, first = part * QUERIES // sequence, part * QUERIES % sequence
    row = head // heads * sequence + first + tl.arange(0, QUERIES)
    column = head % heads * WIDTH + tl.arange(0, WIDTH)
    value = tl.load(out + row[:, None] * (out_stride * 8) + column[None, :]).to(tl.float32)
    slope = tl.load(dout + row[:, None] * (dout_stride * 8) + column[None, :]).to(tl.float32)
    query = part * QUERIES + tl.arange(0, QUERIES)
    tl.store(slope_starts + query, -tl.sum(value * slope, 1))
    tl.store(starts + query, -tl.load(lse + query) / scale)
    tl.store(counts + part, 0)


@triton.jit(do_not_specialize=["heads", "sequence", "stride", "scale"])
def tilewright_attention_finish(
    sums, dq, heads: tl.int32, sequence: tl.int64, stride: tl.int64, scale: tl.float32,
    QUERIES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """dq = scale sums"""
    part = tl.program_id(0).to(tl.int64)
    head, first = part * QUERIES // sequence, part * QUERIES % sequence
    numbers = tl.load(sums + part * QUERIES * WIDTH + tl.arange(0, QUERIES * WIDTH)) * scale
    # Eight columns at a time; 16 rows a warp; of those a thread has one and the one 8 below, and two columns of both.
    numbers = tl.reshape(numbers, [WIDTH // 8, QUERIES // 16, 8, 4, 2, 2])
    tile = tl.reshape(tl.permute(numbers, (1, 4, 2, 0, 3, 5)), [QUERIES, WIDTH])
    row = head // heads * sequence + first + tl.arange(0, QUERIES)
    column = head % heads * WIDTH + tl.arange(0, WIDTH)
    tl.store(dq + row[:, None] * (stride * 8) + column[None, :], tile.to(dq.dtype.element_ty))


@functools.cache
def _launches(device: torch.device, width: int) -> tuple[dispatch.Launch, dispatch.Launch]:
    return tuple(
        dispatch.Launch(kernel, device, (_QUERIES, width), 4)
        for kernel in (tilewright_attention_prepare, tilewright_attention_finish)
    )


def prepare(
    out: torch.Tensor, dout: torch.Tensor, lse: torch.Tensor, heads: int, sequence: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What scores start from, for packed `lse`, a row a head, and what their slopes start from; and a 0 for each part.

    `out` and `dout` are tokens of all batches by the columns of all heads; rows of both are contiguous.
    """
    width, queries = out.shape[1] // heads, len(out) * heads
    starts, slope_starts = (out.new_empty(queries, dtype=torch.float32) for _ in range(2))
    parts = queries // _QUERIES
    counts = out.new_empty(parts, dtype=torch.int32)
    launch, _ = _launches(out.device, width)
    tensors = (out, dout, *dispatch.packed((lse,)), starts, slope_starts, counts)
    launch((parts, 1), tensors, (heads, sequence, out.stride(0) // 8, dout.stride(0) // 8, scale))
    return starts, slope_starts, counts


def finish(sums: torch.Tensor, dq: torch.Tensor, heads: int, sequence: int, scale: float) -> None:
    """Writes scaled `sums`, by parts, to `dq`, tokens by columns, whose rows are contiguous."""
    width = dq.shape[1] // heads
    _, launch = _launches(dq.device, width)
    parts = sums.numel() // (_QUERIES * width)
    launch((parts, 1), (sums, dq), (heads, sequence, dq.stride(0) // 8, scale))
