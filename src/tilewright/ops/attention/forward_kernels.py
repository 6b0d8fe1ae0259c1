"""The forward kernel of `attention`, by how it moves the data.

A program takes BLOCK_M queries of a head and keeps them. It reads the keys and values that they see, BLOCK_N at a time,
and carries three things for each query: the largest score yet, the sum of all exponentials over it, and the sum of the
values they weigh. A block that every query sees whole takes no mask. Exponentials are powers of 2.
"""

import triton
import triton.language as tl

from tilewright.ops.attention.score_kernels import (
    LOG2E,
    dot,
    finish_scores,
    key_range,
    load_tile,
    place,
    sequence_bounds,
    tile_pointers,
    visible,
)
from tilewright.runtime.philox_kernels import keep_mask, load_seed


@triton.jit
def _attend(
    acc, total, most, q_tile, k_at, v_at, k_token, v_token, low, high, row, there, keys, offset, left, right,
    slope, bias, bias_row, bias_column, scale, softcap, seed, draws, threshold, keep_scale,
    BLOCK_N: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, MASKED: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, ALIBI: tl.constexpr, SOFTCAP: tl.constexpr,
    DROPOUT: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """Adds the keys from `low` to `high`; MASKED: not every query sees all of them."""
    for first in tl.range(low, high, BLOCK_N, num_stages=STAGES):
        column = first + tl.arange(0, BLOCK_N)
        k_tile = load_tile(k_at + first * k_token, column < keys, WIDTH, COLUMNS, not MASKED)
        s = dot(q_tile, tl.trans(k_tile), None)
        exists = there[:, None] & (column < keys)[None, :]
        s, factor, _slope = finish_scores(
            s, row[:, None], column[None, :], exists, offset, slope, bias, bias_row, bias_column, scale, softcap,
            ALIBI, SOFTCAP, PRECISE,
        )  # fmt: skip
        if MASKED:
            seen = visible(row[:, None], column[None, :], keys, offset, left, right, HAS_LEFT, HAS_RIGHT)
            s = tl.where(seen, s, float("-inf"))
        larger = tl.maximum(most, tl.max(s, 1) * factor)
        # A query that has seen no key yet: -inf less -inf is not a number.
        origin = tl.where(larger == float("-inf"), 0.0, larger)
        p = tl.exp2(s * factor - origin[:, None])
        shrink = tl.exp2(most - origin)
        total = total * shrink + tl.sum(p, 1)
        if DROPOUT:
            p = tl.where(keep_mask(seed, draws + first, threshold, 0, BLOCK_N), p * keep_scale, 0.0)
        v_tile = load_tile(v_at + first * v_token, column < keys, WIDTH, COLUMNS, not MASKED)
        acc = dot(p.to(v_tile.dtype), v_tile, acc * shrink[:, None])
        most = larger
    return acc, total, most


@triton.jit(
    do_not_specialize=[
        "seed", "heads", "shared", "sequences", "queries", "keys", "all_queries", "all_keys", "blocks", "group", "left",
        "right", "threshold", "q_batch", "q_token", "q_head", "k_batch", "k_token", "k_head", "v_batch", "v_token",
        "v_head", "bias_batch", "bias_head", "bias_row", "bias_column", "slope_batch",
    ]
)  # fmt: skip
def tilewright_attention_forward(
    q, k, v, bias, slopes, q_starts, k_starts, seed_tensor, out, lse,
    seed: tl.int64, heads: tl.int32, shared: tl.int32, sequences: tl.int32, queries: tl.int32, keys: tl.int32,
    all_queries: tl.int32, all_keys: tl.int32, blocks: tl.int32, group: tl.int32, left: tl.int32, right: tl.int32,
    threshold: tl.int32, scale: tl.float32, softcap: tl.float32, keep_scale: tl.float32,
    q_batch: tl.int64, q_token: tl.int64, q_head: tl.int64, k_batch: tl.int64, k_token: tl.int64, k_head: tl.int64,
    v_batch: tl.int64, v_token: tl.int64, v_head: tl.int64,
    bias_batch: tl.int64, bias_head: tl.int64, bias_row: tl.int64, bias_column: tl.int64, slope_batch: tl.int64,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """`queries` and `keys` are the lengths of every sequence or, with starts, the longest of them.

    `all_queries` and `all_keys` are those of one batch of the tensors. Writes 0 for a query that sees no key.
    """
    ALIBI: tl.constexpr = slopes is not None
    PRECISE: tl.constexpr = q.dtype.element_ty == tl.float32
    block, pair = place(tl.program_id(0), blocks, sequences * heads, group, HAS_RIGHT)
    sequence, head = pair // heads, pair % heads
    row_width = (keys + 7) // 8 * 8  # draws of a query
    q_address, q_first, queries = sequence_bounds(q_starts, sequence, queries, all_queries)
    _k_address, k_first, keys = sequence_bounds(k_starts, sequence, keys, all_keys)
    start = block * BLOCK_M
    if start >= queries:
        return
    row = start + tl.arange(0, BLOCK_M)
    there = row < queries
    batch, q_place, k_place = q_address.to(tl.int64), (q_first + start).to(tl.int64), k_first + tl.full([], 0, tl.int64)
    q_at = tile_pointers(q, batch, q_place, head, q_batch, q_token, q_head, BLOCK_M, COLUMNS, UNIT)
    q_tile = load_tile(q_at, there, WIDTH, COLUMNS, False)
    kv_head = head // shared
    k_at = tile_pointers(k, batch, k_place, kv_head, k_batch, k_token, k_head, BLOCK_N, COLUMNS, UNIT)
    v_at = tile_pointers(v, batch, k_place, kv_head, v_batch, v_token, v_head, BLOCK_N, COLUMNS, UNIT)
    slope = 0.0
    if ALIBI:
        slope = tl.load(slopes + sequence * slope_batch + head)
    if bias is not None:
        bias += sequence * bias_batch + head * bias_head
    place_of_row = (batch * heads + head) * all_queries + q_place + tl.arange(0, BLOCK_M)  # in lse
    draws = place_of_row * row_width
    seed = load_seed(seed_tensor, seed)
    offset = keys - queries
    low, full_low, full_high, high = key_range(
        start, queries, keys, offset, left, right, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT
    )
    acc = tl.zeros([BLOCK_M, COLUMNS], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    most = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if HAS_LEFT:
        acc, total, most = _attend(
            acc, total, most, q_tile, k_at, v_at, k_token * UNIT, v_token * UNIT, low, full_low, row, there,
            keys, offset, left, right, slope, bias, bias_row, bias_column, scale, softcap, seed, draws, threshold,
            keep_scale, BLOCK_N, WIDTH, COLUMNS, STAGES, True, HAS_LEFT, HAS_RIGHT, ALIBI, SOFTCAP, DROPOUT, PRECISE,
        )  # fmt: skip
    acc, total, most = _attend(
        acc, total, most, q_tile, k_at, v_at, k_token * UNIT, v_token * UNIT, full_low, full_high, row, there,
        keys, offset, left, right, slope, bias, bias_row, bias_column, scale, softcap, seed, draws, threshold,
        keep_scale, BLOCK_N, WIDTH, COLUMNS, STAGES, False, HAS_LEFT, HAS_RIGHT, ALIBI, SOFTCAP, DROPOUT, PRECISE,
    )  # fmt: skip
    acc, total, most = _attend(
        acc, total, most, q_tile, k_at, v_at, k_token * UNIT, v_token * UNIT, full_high, high, row, there,
        keys, offset, left, right, slope, bias, bias_row, bias_column, scale, softcap, seed, draws, threshold,
        keep_scale, BLOCK_N, WIDTH, COLUMNS, STAGES, True, HAS_LEFT, HAS_RIGHT, ALIBI, SOFTCAP, DROPOUT, PRECISE,
    )  # fmt: skip
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    width = heads * WIDTH
    out_at = tile_pointers(out, batch, q_place, head, (all_queries + tl.full([], 0, tl.int64)) * width, width, WIDTH,
                           BLOCK_M, COLUMNS, 1)  # fmt: skip
    inside = there[:, None] & (tl.arange(0, COLUMNS) < WIDTH)[None, :]
    tl.store(out_at, acc.to(out.dtype.element_ty), inside)
    tl.store(lse + place_of_row, (most + tl.log2(total)) / LOG2E, there)
