"""What goes before and behind the backward of `attention`; the kernel between them is `hopper_backward.cu`.

Rows are a multiple of 8 elements apart, and told in eights: so the compiler knows that they may be read by vectors.

`prepare`: a program takes 64 queries of a head. The numbers it writes are a row a head, of whole tiles of queries:
behind the last query they are such that nothing comes of them.

`finish`: what was added up lies as the tensor cores had it, 64 queries and 64 columns of a head at a time: of a group
of 128 threads each has 32 numbers, and four of one thread lie beside four of the next. A program takes one such part.

Rows of packed sequences are those of their tokens, each sequence from a new tile on: `place_rows` says which.
"""

import functools

import torch
import triton
import triton.language as tl

from tilewright.ops.attention.packed_kernels import CHUNK, Tiles, place_rows
from tilewright.runtime import dispatch

_QUERIES = 64  # of a part
_PANEL = 64  # columns of a part


@triton.jit
def _rows_of(tensor, batch, head, query, batch_stride, row_stride, head_stride, queries, WIDTH: tl.constexpr):
    """Some queries of a head, in float32, and 0 behind the last. Strides are in eights."""
    at = tensor + batch * (batch_stride * 8) + head * (head_stride * 8)
    column = tl.arange(0, WIDTH)
    return tl.load(
        at + query[:, None] * (row_stride * 8) + column[None, :], mask=query[:, None] < queries, other=0.0
    ).to(tl.float32)


@triton.jit(
    do_not_specialize=[
        "heads", "queries", "padded", "sequences", "out_batch", "out_row", "out_head", "dout_batch", "dout_row",
        "dout_head", "scale",
    ]
)  # fmt: skip
def tilewright_attention_prepare(
    out, dout, lse, starts, slope_starts, counts, bounds,
    heads: tl.int32, queries: tl.int64, padded: tl.int64, sequences: tl.int32,
    out_batch: tl.int64, out_row: tl.int64, out_head: tl.int64,
    dout_batch: tl.int64, dout_row: tl.int64, dout_head: tl.int64, scale: tl.float32,
    QUERIES: tl.constexpr, WIDTH: tl.constexpr, PANELS: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """starts = -lse / scale,  slope_starts = -sum of out dout,  counts = 0"""
    program = tl.program_id(0).to(tl.int64)
    both, first = program * QUERIES // padded, program * QUERIES % padded
    batch, head, row = both // heads, both % heads, first + tl.arange(0, QUERIES)
    query, end = row, queries
    if bounds is not None:
        token, end = place_rows(bounds, sequences, first, TILE, CHUNK)
        query = token + tl.arange(0, QUERIES)
    value = _rows_of(out, batch, head, query, out_batch, out_row, out_head, end, WIDTH)
    slope = _rows_of(dout, batch, head, query, dout_batch, dout_row, dout_head, end, WIDTH)
    log = tl.load(lse + both * queries + query, mask=query < end, other=float("inf"))
    # A query that sees no key has a logarithm of -inf, and no probabilities either.
    log = tl.where(log == float("-inf"), float("inf"), log)
    tl.store(starts + both * padded + row, -log / scale)
    tl.store(slope_starts + both * padded + row, -tl.sum(value * slope, 1))
    tl.store(counts + program * PANELS + tl.arange(0, PANELS), tl.zeros([PANELS], tl.int32))


@triton.jit(do_not_specialize=["heads", "queries", "padded", "sequences", "scale"])
def tilewright_attention_finish(
    sums, counts, dq, bounds, heads: tl.int32, queries: tl.int64, padded: tl.int64, sequences: tl.int32,
    scale: tl.float32,
    QUERIES: tl.constexpr, PANELS: tl.constexpr, PANEL: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """dq = scale sums, and 0 where nobody has added anything"""
    part = tl.program_id(0).to(tl.int64)
    both, first = part // PANELS * QUERIES // padded, part // PANELS * QUERIES % padded
    number, written = tl.arange(0, QUERIES * PANEL), tl.where(tl.load(counts + part) > 0, QUERIES * PANEL, 0)
    numbers = tl.load(sums + part * QUERIES * PANEL + number, mask=number < written, other=0.0) * scale
    # Eight columns at a time; 16 rows a warp; of those a thread has one and the one 8 below, and two columns of both.
    numbers = tl.reshape(numbers, [PANEL // 8, QUERIES // 16, 8, 4, 2, 2])
    tile = tl.reshape(tl.permute(numbers, (1, 4, 2, 0, 3, 5)), [QUERIES, PANEL])
    query, column, end = first + tl.arange(0, QUERIES), part % PANELS * PANEL + tl.arange(0, PANEL), queries
    if bounds is not None:
        token, end = place_rows(bounds, sequences, first, TILE, CHUNK)
        query = token + tl.arange(0, QUERIES)
    row = (both // heads * queries + query) * heads + both % heads
    to = dq + row[:, None] * (PANELS * PANEL) + column[None, :]
    tl.store(to, tile.to(dq.dtype.element_ty), mask=query[:, None] < end)


@functools.cache
def _launches(
    device: torch.device, dtype: torch.dtype, width: int, tile: int, is_packed: bool
) -> tuple[dispatch.Launch, dispatch.Launch]:
    panels = width // _PANEL
    return (
        dispatch.Launch(tilewright_attention_prepare, device, (_QUERIES, width, panels, tile, CHUNK), 4),
        dispatch.Launch(tilewright_attention_finish, device, (_QUERIES, panels, _PANEL, tile, CHUNK), 4),
    )


def count_tiles(queries: int, tile: int, packed: Tiles | None) -> int:
    """Tiles of so many queries that a head has; of packed sequences, at most."""
    return -(-queries // tile) if packed is None else packed.count_padded(queries, tile)


def prepare(
    out: torch.Tensor, dout: torch.Tensor, lse: torch.Tensor, tile: int, scale: float, packed: Tiles | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What scores start from, and what their slopes do, each a row a head of whole tiles; and a 0 for each part.

    `out` and `dout` are (batch, queries, heads, head_dim), their columns contiguous; `lse` is (batch, heads, queries).
    """
    batch, queries, heads, width = out.shape
    padded = count_tiles(queries, tile, packed) * tile
    starts, slope_starts = (out.new_empty(batch * heads * padded, dtype=torch.float32) for _ in range(2))
    programs = batch * heads * padded // _QUERIES
    counts = out.new_empty(programs * (width // _PANEL), dtype=torch.int32)
    launch, _ = _launches(out.device, out.dtype, width, tile, packed is not None)
    bounds = None if packed is None else packed.bounds
    tensors = (out, dout, *dispatch.packed((lse,)), starts, slope_starts, counts, bounds)
    strides = [t.stride(i) // 8 for t in (out, dout) for i in (0, 1, 2)]
    sequences = 0 if bounds is None else len(bounds) - 1
    launch((programs, 1), tensors, (heads, queries, padded, sequences, *strides, scale))
    return starts, slope_starts, counts


def finish(
    sums: torch.Tensor, counts: torch.Tensor, dq: torch.Tensor, tile: int, scale: float, packed: Tiles | None = None
) -> None:
    """Writes scaled `sums`, by parts, to `dq`, which is packed: (batch, queries, heads, head_dim)."""
    queries, heads, width = dq.shape[1:]
    _, launch = _launches(dq.device, dq.dtype, width, tile, packed is not None)
    padded, bounds = count_tiles(queries, tile, packed) * tile, None if packed is None else packed.bounds
    sequences = 0 if bounds is None else len(bounds) - 1
    launch((counts.numel(), 1), (sums, counts, dq, bounds), (heads, queries, padded, sequences, scale))
