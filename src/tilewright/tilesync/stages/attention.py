"""Attention of few rows over the keys and values of a context."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from tilewright.tilesync.graph import GraphError, Order, Region, Spec, Stage, Tile, Work, span
from tilewright.tilesync.stages.common import Sync, widen


class Attention(Stage):
    """Softmax attention of ``(rows, heads * head_dim)`` queries over the keys and values of a context.

    A tile is some rows of one head. Where queries, keys and values are columns of one tensor, name it three times and
    give the `offsets` of their first columns. Causal, the last row sees the whole context.

    While decoding, k and v are a cache of which the first `length` rows are filled, a number on the device, and the
    keys and values of the rows themselves are columns of q's tensor, from `new` on: a row sees the cache, and the rows
    up to itself. By head, k and v are ``(key_heads * context, head_dim)``: the context of one head behind the other's.
    """

    def __init__(
        self, output: str, q: str, k: str, v: str, *, rows: int, context: int, heads: int, head_dim: int,
        key_heads: int | None = None, offsets: tuple[int, int, int] = (0, 0, 0), causal: bool = False,
        length: str | None = None, new: tuple[int, int] = (0, 0), by_head: bool = False, scale: float | None = None,
        tile: int = 64, order: Order = "rows", sync: Sync = None,
    ) -> None:  # fmt: skip
        self.names, self.offsets, self.causal, self.tile = (q, k, v), offsets, causal, tile
        self.rows, self.context, self.heads, self.head_dim = rows, context, heads, head_dim
        self.key_heads, self.scale = key_heads or heads, scale or head_dim**-0.5
        self.length, self.new, self.integers = length, new, (length,) if length else ()
        self.by_head = by_head
        if heads % self.key_heads:
            raise GraphError(f"Stage {output}: {heads} heads cannot share {self.key_heads} key heads; take a divisor.")
        grid = -(-rows // tile), heads
        super().__init__(
            {output: Spec((rows, heads * head_dim))},
            tuple(dict.fromkeys(filter(None, (q, k, v, length)))),
            grid,
            order,
            sync,
        )

    def _columns(self, which: int, head: int) -> tuple[int, int]:
        start = self.offsets[which] + head * self.head_dim
        return start, start + self.head_dim

    def reads(self, tile: Tile) -> Iterable[Region]:
        rows, shared = span(tile[0], self.tile, self.rows), tile[1] // (self.heads // self.key_heads)
        seen = min(self.context, rows[1] + self.context - self.rows) if self.causal else self.context
        yield Region(self.names[0], (rows, self._columns(0, tile[1])))
        for first in self.new if self.length else ():
            start = first + shared * self.head_dim
            yield Region(self.names[0], ((0, rows[1]), (start, start + self.head_dim)))
        for which in (1, 2):
            first = shared * self.context * self.by_head
            columns = (0, self.head_dim) if self.by_head else self._columns(which, shared)
            yield Region(self.names[which], ((first, first + seen), columns))

    def writes(self, tile: Tile) -> Iterable[Region]:
        head = tile[1] * self.head_dim
        yield Region(self.name, (span(tile[0], self.tile, self.rows), (head, head + self.head_dim)))

    def compute(self, *inputs: Tensor) -> Tensor:
        given = dict(zip(self.inputs, inputs, strict=True))
        counts = self.heads, self.key_heads, self.key_heads
        q, k, v = (
            self._heads(given[name], start, count)
            if name == self.names[0] or not self.by_head
            else widen(given[name]).unflatten(0, (count, self.context))
            for name, start, count in zip(self.names, self.offsets, counts, strict=True)
        )
        at, row = torch.arange(self.context, device=q.device), torch.arange(self.rows, device=q.device)
        hidden = at > row[:, None] + self.context - self.rows if self.causal else at < row[:, None] * 0
        if self.length:
            fresh = [self._heads(given[self.names[0]], start, self.key_heads) for start in self.new]
            k, v = (torch.cat(pair, 1) for pair in zip((k, v), fresh, strict=True))
            hidden = torch.cat(((at >= given[self.length]).expand(self.rows, -1), row > row[:, None]), 1)
            v = v.masked_fill(hidden.all(0)[:, None], 0.0)  # what the cache holds there may be no number
        share = self.heads // self.key_heads
        scores = q @ k.repeat_interleave(share, 0).transpose(1, 2) * self.scale
        y = scores.masked_fill(hidden, -math.inf).softmax(-1) @ v.repeat_interleave(share, 0)
        return y.transpose(0, 1).flatten(1).to(inputs[0].dtype)

    def _heads(self, x: Tensor, start: int, count: int) -> Tensor:
        columns = widen(x)[:, start : start + count * self.head_dim]
        return columns.unflatten(1, (count, self.head_dim)).transpose(0, 1)

    def work(self, tile: Tile) -> Work:
        rows = span(tile[0], self.tile, self.rows)
        flops = 4.0 * (rows[1] - rows[0]) * self.context * self.head_dim
        return Work(flops, 2.0 * (2 * (rows[1] - rows[0]) + 2 * self.context) * self.head_dim)
