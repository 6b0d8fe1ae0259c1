"""Tables of the tiles of packed sequences, for attention's kernels in CUDA C++: written on the device, read there.

The host knows how many tokens and sequences there are, and so how many tiles at most. One small kernel looks at where
sequences begin: no host waits for it. A program takes the tiles of one place of all sequences, counts how many tiles
come before these, and writes an entry of 8 integers for each (`Entry` of `packed.cuh`), behind a first one with their
count. It orders them thus:

    forward     from the last blocks of queries to the first: under a causal mask the longest tiles come first
    backward    blocks of keys by sections, those of a section from its last to its first, as `hopper_backward.cu` wants

Tokens before the first sequence and behind the last one are two more sequences, whose queries see no key and whose keys
no query sees: what is theirs gets 0 by the same kernels. Starts that are out of place make all tokens such ones.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tilewright.runtime import dispatch

ENTRY = 8  # integers
CHUNK = 8 if dispatch.INTERPRETED else 256  # sequences at a time


@triton.jit
def _bounds(starts, index, sequences, tokens):
    """(first token, the one behind the last) of sequences, with what lies before and behind them."""
    first = tl.load(starts + index - 1, (index > 0) & (index <= sequences + 1), 0)
    return first, tl.load(starts + index, index <= sequences, tokens)


@triton.jit
def _safe_bounds(starts, index, sequences, tokens, bad):
    """The same, or all tokens before the first sequence."""
    first, end = _bounds(starts, index, sequences, tokens)
    return tl.where(bad & (index > 0), tokens, first), tl.where(bad, tokens, end)


@triton.jit
def _count(before, place, rows, ROWS: tl.constexpr, OF_KEYS: tl.constexpr):
    """`before`, and all tiles of sequences of so many rows that come before those at this place."""
    tiles = (rows + ROWS - 1) // ROWS
    earlier = tl.minimum(tiles, place) if OF_KEYS else tl.maximum(tiles - 1 - place, 0)
    return before + tl.sum(earlier)


@triton.jit(do_not_specialize=["sequences", "all_queries", "all_keys", "section"])
def tilewright_attention_tiles(
    q_starts, k_starts, table, bounds, sequences: tl.int32, all_queries: tl.int32, all_keys: tl.int32,
    section: tl.int32, ROWS: tl.constexpr, OF_KEYS: tl.constexpr, CHUNK: tl.constexpr, ENTRY: tl.constexpr,
):  # fmt: skip
    """The entries of all tiles at place `program_id`. The first program writes the count, and the bounds of queries."""
    place = tl.program_id(0)
    wrong = tl.full([], 0, tl.int32)
    for start in range(0, sequences + 2, CHUNK):
        index = start + tl.arange(0, CHUNK)
        q_first, q_end = _bounds(q_starts, index, sequences, all_queries)
        k_first, k_end = _bounds(k_starts, index, sequences, all_keys)
        falls = ((q_end < q_first) | (k_end < k_first)) & (index < sequences + 2)
        wrong += tl.sum(falls.to(tl.int32))
    bad = wrong > 0
    before = tl.full([], 0, tl.int32)
    count = tl.full([], 0, tl.int32)
    for start in range(0, sequences + 2, CHUNK):
        index = start + tl.arange(0, CHUNK)
        first, end = _safe_bounds(q_starts, index, sequences, all_queries, bad)
        if place == 0:
            tl.store(bounds + index, first, index < sequences + 2)
        if OF_KEYS:
            first, end = _safe_bounds(k_starts, index, sequences, all_keys, bad)
        rows = tl.where(index < sequences + 2, end - first, 0)
        before = _count(before, place, rows, ROWS, OF_KEYS)
        count += tl.sum((rows + ROWS - 1) // ROWS)
    if place == 0:
        tl.store(table, count)
        tl.store(bounds + sequences + 2, all_queries)
    for start in range(0, sequences + 2, CHUNK):
        index = start + tl.arange(0, CHUNK)
        q_first, q_end = _safe_bounds(q_starts, index, sequences, all_queries, bad)
        k_first, k_end = _safe_bounds(k_starts, index, sequences, all_keys, bad)
        queries, keys = q_end - q_first, k_end - k_first
        is_own = (index > 0) & (index <= sequences)  # and not of the tokens around them
        block = tl.zeros([CHUNK], tl.int32) + place
        if OF_KEYS:
            tiles = (keys + ROWS - 1) // ROWS
            begin = place // section * section
            block = tl.minimum(begin + section, tiles) - 1 - place % section
            queries = tl.where(is_own, queries, 0)
        else:
            tiles = (queries + ROWS - 1) // ROWS
            keys = tl.where(is_own, keys, 0)
        is_there = (place < tiles) & (index < sequences + 2)
        slot = before + tl.cumsum(is_there.to(tl.int32), 0)  # counts itself, as the first entry does
        before += tl.sum(is_there.to(tl.int32))
        to = table + slot * ENTRY
        tl.store(to, block, is_there)
        tl.store(to + 1, q_first, is_there)
        tl.store(to + 2, queries, is_there)
        tl.store(to + 3, k_first, is_there)
        tl.store(to + 4, keys, is_there)
        tl.store(to + 5, index, is_there)


@triton.jit
def place_rows(bounds, sequences, row, TILE: tl.constexpr, CHUNK: tl.constexpr):
    """(token, the one behind the last of its sequence) of a row, where each sequence has whole tiles of TILE rows.

    The tiles of sequence s begin at number ``first // TILE + s``: so no sequence's reach into the next one's.
    """
    tile = row // TILE
    number = tl.full([], -1, tl.int32)
    for start in range(0, sequences, CHUNK):
        index = start + tl.arange(0, CHUNK)
        first = tl.load(bounds + index, index < sequences, 0) // TILE + index
        number += tl.sum(((first <= tile) & (index < sequences)).to(tl.int32))
    first = tl.load(bounds + number)
    return first + (row - (first // TILE + number) * TILE), tl.load(bounds + number + 1)


class Tiles(NamedTuple):
    """A table of tiles, how many it has at most, and where the sequences of queries begin and the last one ends."""

    table: torch.Tensor
    most: int
    bounds: torch.Tensor  # with the tokens around them: two more than the caller has

    def count_padded(self, queries: int, rows: int) -> int:
        """Tiles of so many rows that all queries need at most, where each sequence begins with one of its own."""
        return queries // rows + len(self.bounds) - 1


@functools.cache
def _launch(device: torch.device, rows: int, of_keys: bool) -> dispatch.Launch:
    return dispatch.Launch(tilewright_attention_tiles, device, (rows, of_keys, CHUNK, ENTRY), 4)


def make_tiles(
    q_starts: torch.Tensor, k_starts: torch.Tensor, queries: int, keys: int, rows: int, section: int = 0
) -> Tiles:
    """The tiles of so many rows, of `queries` and `keys` tokens: of queries, or with a section of keys.

    >>> starts = torch.tensor([0, 5, 70], dtype=torch.int32)
    >>> tiles = make_tiles(starts, starts, 70, 70, 64)  # doctest: +SKIP
    >>> tiles.table[0, 0], tiles.table[1:4, 0]  # doctest: +SKIP
    (tensor(3), tensor([1, 0, 0]))
    """
    q_starts, k_starts = dispatch.packed((q_starts, k_starts))
    sequences, tokens = len(q_starts) - 1, keys if section else queries
    most = tokens // rows + sequences + 2
    table, bounds = q_starts.new_empty((1 + most, ENTRY)), q_starts.new_empty(sequences + 3)
    sizes = sequences, queries, keys, section
    launch = _launch(q_starts.device, rows, section > 0)
    launch((max(1, -(-tokens // rows)), 1), (q_starts, k_starts, table, bounds), sizes)
    return Tiles(table, most, bounds)
