"""Attention of few rows over the keys and values of a context."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from tilewright.tilesync.graph import WIDE, GraphError, Order, Region, Spec, Stage, Tile, Work, span
from tilewright.tilesync.stages.common import L2_SHARE, Sync, widen

NOTHING = -1e30  # the log of the sum of a split that sees no key
QUERIES = 16  # that a tile's warps compute together: rows times the heads that share a key head


class Attention(Stage):
    """Softmax attention of ``(rows, heads * head_dim)`` queries over the keys and values of a context.

    A tile is some rows of all heads that share a key head, which reads each key and value once. Where queries, keys and
    values are columns of one tensor, name it three times and give the `offsets` of their first columns. Causal, the
    last row sees the whole context.

    While decoding, k and v are a cache of which the first `length` rows are filled, a number on the device, and the
    keys and values of the rows themselves are columns of q's tensor, from `new` on: a row sees the cache, and the rows
    up to itself. By head, k and v are ``(key_heads * context, head_dim)``: the context of one head behind the other's.

    With splits, tiles along a first axis divide the context: each an equal part of what is filled of a cache, the last
    one the rows themselves, too. The output is ``(splits, rows, heads * (head_dim + 1))`` in float32, for a `Combined`
    x of a matmul: each part's own attention, then of each head the log of the sum that its softmax has divided by.
    """

    def __init__(
        self, output: str, q: str, k: str, v: str, *, rows: int, context: int, heads: int, head_dim: int,
        key_heads: int | None = None, offsets: tuple[int, int, int] = (0, 0, 0), causal: bool = False,
        length: str | None = None, new: tuple[int, int] = (0, 0), by_head: bool = False, scale: float | None = None,
        splits: int = 1, tile: int = 64, order: Order = "rows", sync: Sync = None,
    ) -> None:  # fmt: skip
        self.names, self.offsets, self.causal, self.tile = (q, k, v), offsets, causal, tile
        self.rows, self.context, self.heads, self.head_dim = rows, context, heads, head_dim
        self.key_heads, self.scale = key_heads or heads, scale or head_dim**-0.5
        self.length, self.new, self.integers = length, new, (length,) if length else ()
        self.by_head, self.splits = by_head, splits
        if heads % self.key_heads:
            raise GraphError(f"Stage {output}: {heads} heads cannot share {self.key_heads} key heads; take a divisor.")
        if not 1 <= splits <= context:
            raise GraphError(f"Stage {output}: a context of {context} has 1 to {context} splits, not {splits}.")
        self.shared = heads // self.key_heads
        grid = (-(-rows // tile), self.key_heads)
        spec = Spec((rows, heads * head_dim)) if splits == 1 else Spec((splits, rows, heads * (head_dim + 1)), WIDE)
        self.early = k, v
        names = tuple(dict.fromkeys(filter(None, (q, k, v, length))))
        super().__init__({output: spec}, names, grid if splits == 1 else (splits, *grid), order, sync)

    def _place(self, tile: Tile) -> tuple[int, tuple[int, int], int]:
        """Return a tile's split, rows and key head."""
        split, row, head = (0, *tile) if self.splits == 1 else tile
        return split, span(row, self.tile, self.rows), head

    def part(self, split: int) -> tuple[int, int]:
        """Return where a split begins and ends of a context that is full."""
        return self.context * split // self.splits, self.context * (split + 1) // self.splits

    def reads(self, tile: Tile) -> Iterable[Region]:
        split, rows, head = self._place(tile)
        start, stop = (0, self.context) if self.length else self.part(split)
        if self.causal:
            stop = min(stop, rows[1] + self.context - self.rows)
        first, size = self.offsets[0] + head * self.shared * self.head_dim, self.shared * self.head_dim
        yield Region(self.names[0], (rows, (first, first + size)))
        for first in self.new if self.length and split == self.splits - 1 else ():
            start_of_head = first + head * self.head_dim
            yield Region(self.names[0], ((0, rows[1]), (start_of_head, start_of_head + self.head_dim)))
        for which in (1, 2) if start < stop else ():
            above = head * self.context * self.by_head
            left = 0 if self.by_head else self.offsets[which] + head * self.head_dim
            yield Region(self.names[which], ((above + start, above + stop), (left, left + self.head_dim)))

    def writes(self, tile: Tile) -> Iterable[Region]:
        split, rows, head = self._place(tile)
        columns = head * self.shared * self.head_dim, (head + 1) * self.shared * self.head_dim
        if self.splits == 1:
            yield Region(self.name, (rows, columns))
            return
        behind = self.heads * self.head_dim + head * self.shared
        for each in (columns, (behind, behind + self.shared)):
            yield Region(self.name, ((split, split + 1), rows, each))

    def compute(self, *inputs: Tensor) -> Tensor:
        given = dict(zip(self.inputs, inputs, strict=True))
        q, k, v, hidden = self._whole(given)
        scores = (q @ k.repeat_interleave(self.shared, 0).transpose(1, 2) * self.scale).masked_fill(hidden, NOTHING)
        v = v.repeat_interleave(self.shared, 0)
        if self.splits == 1:
            return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1).to(given[self.names[0]].dtype)
        at, found = torch.arange(scores.shape[-1], device=scores.device), []
        filled = given[self.length].clamp(max=self.context) if self.length else self.context
        for split in range(self.splits):
            is_last = split == self.splits - 1
            outside = (at < filled * split // self.splits) | (at >= filled * (split + 1) // self.splits) & (not is_last)
            part = scores.masked_fill(outside, NOTHING)
            sums = part.logsumexp(-1, keepdim=True)
            y = (part - sums).exp().masked_fill(part == NOTHING, 0.0) @ v
            found.append(torch.cat((y.transpose(0, 1).flatten(1), sums[..., 0].t()), 1))
        return torch.stack(found)

    def _whole(self, given: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return queries, keys and values head by head, with those of the rows behind a cache; and what is hidden."""
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
        return q, k, v, hidden

    def _heads(self, x: Tensor, start: int, count: int) -> Tensor:
        columns = widen(x)[:, start : start + count * self.head_dim]
        return columns.unflatten(1, (count, self.head_dim)).transpose(0, 1)

    def work(self, tile: Tile) -> Work:
        split, rows, _ = self._place(tile)
        start, stop = self.part(split)
        queries = (rows[1] - rows[0]) * self.shared
        passes, of_keys = -(-queries // QUERIES), 4.0 * (stop - start) * self.head_dim
        written = queries * (self.head_dim if self.splits == 1 else 2 * (self.head_dim + 1))
        first = of_keys if rows[0] == 0 else L2_SHARE * of_keys  # whom other rows have read, too
        moved = first + (passes - 1) * L2_SHARE * of_keys + 2.0 * (queries * self.head_dim + written)
        return Work(passes * QUERIES * of_keys, moved, first)
