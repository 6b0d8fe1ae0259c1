"""The backward kernels of `attention`, by how they move the data. Each computes the scores again; no sum uses atomics.

    delta          sum of out dout, and the log-sum-exp as a power of 2, for each query
    key_gradients  a program keeps BLOCK_N keys and values, and reads all queries that see them, of all heads they serve
    query_gradients  a program keeps BLOCK_M queries, and reads all keys that they see
    bias_gradient  a program keeps a tile of the bias, and adds up all batches and heads that share it

Tiles of `key_gradients` lie with keys down: so the left sides of its sums are where a matmul leaves them.
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
    query_range,
    sequence_bounds,
    tile_pointers,
    visible,
)
from tilewright.runtime.philox_kernels import keep_mask, load_seed


@triton.jit(do_not_specialize=["rows", "heads", "queries", "dout_batch", "dout_token", "dout_head"])
def tilewright_attention_delta(
    out, dout, lse, dlse, log, delta,
    rows: tl.int64, heads: tl.int32, queries: tl.int32, dout_batch: tl.int64, dout_token: tl.int64, dout_head: tl.int64,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """delta = sum of out dout - dlse,  log = lse as a power of 2, inf where a query sees no key, and has no weights.

    `rows` are those of all heads, as they lie in lse.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = row < rows
    pair, query = row // queries, row % queries
    batch, head = pair // heads, pair % heads
    column = tl.arange(0, COLUMNS)[None, :]
    inside = there[:, None] & (column < WIDTH)
    start = ((batch * queries + query) * heads + head) * WIDTH
    slope_start = batch * dout_batch * UNIT + query * dout_token * UNIT + head * dout_head * UNIT
    value = tl.load(out + start[:, None] + column, inside, 0.0).to(tl.float32)
    slope = tl.load(dout + slope_start[:, None] + column, inside, 0.0).to(tl.float32)
    result = tl.sum(value * slope, 1)
    if dlse is not None:
        result -= tl.load(dlse + row, there, 0.0)
    tl.store(delta + row, result, there)
    largest = tl.load(lse + row, there, 0.0)
    tl.store(log + row, tl.where(largest == float("-inf"), float("inf"), largest * LOG2E), there)


@triton.jit
def _add_queries(
    dk, dv, k_tile, v_tile, q_at, dout_at, q_token, dout_token, log_at, delta_at, low, high, column, queries, keys,
    offset, left, right, slope, bias, bias_row, bias_column, scale, softcap, seed, row_place, row_width, column_first,
    threshold, keep_scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, ALIBI: tl.constexpr, SOFTCAP: tl.constexpr,
    DROPOUT: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """Adds what the queries from `low` to `high` say to the gradients of a tile of keys and values.

    One loop for all of them, each with a mask: loops of their own for those that see all keys cost more registers than
    there are. What a key gets that is not there is not stored.
    """
    for first in tl.range(low, high, BLOCK_M, num_stages=STAGES):
        row = first + tl.arange(0, BLOCK_M)
        there = row < queries
        q_tile = load_tile(q_at + first * q_token, there, WIDTH, COLUMNS, False)
        s = dot(k_tile, tl.trans(q_tile), None)
        exists = (column < keys)[:, None] & there[None, :]
        s, factor, damping = finish_scores(
            s, row[None, :], column[:, None], exists, offset, slope, bias, bias_row, bias_column, scale, softcap,
            ALIBI, SOFTCAP, PRECISE,
        )  # fmt: skip
        # From one address on: in the layout of a matmul a thread has many of these numbers, and as many addresses.
        each = tl.arange(0, BLOCK_M)
        log = tl.load(log_at + first + each, there, float("inf"))
        mean = tl.load(delta_at + first + each, there, 0.0)
        p = tl.exp2(s * factor - log[None, :])
        if HAS_LEFT or HAS_RIGHT:
            seen = visible(row[None, :], column[:, None], keys, offset, left, right, HAS_LEFT, HAS_RIGHT)
            p = tl.where(seen, p, 0.0)
        dout_tile = load_tile(dout_at + first * dout_token, there, WIDTH, COLUMNS, False)
        dp = dot(v_tile, tl.trans(dout_tile), None)
        if DROPOUT:
            kept = tl.trans(keep_mask(seed, (row_place + row) * row_width + column_first, threshold, 0, BLOCK_N))
            dv = dot(tl.where(kept, p * keep_scale, 0.0).to(dout_tile.dtype), dout_tile, dv)
            dp = tl.where(kept, dp * keep_scale, 0.0)
        else:
            dv = dot(p.to(dout_tile.dtype), dout_tile, dv)
        ds = p * (dp - mean[None, :]) * damping
        dk = dot(ds.to(q_tile.dtype), q_tile, dk)
    return dk, dv


@triton.jit(
    do_not_specialize=[
        "seed", "heads", "shared", "sequences", "queries", "keys", "all_queries", "all_keys", "blocks", "group", "left",
        "right", "threshold", "q_batch", "q_token", "q_head", "k_batch", "k_token", "k_head", "v_batch", "v_token",
        "v_head", "bias_batch", "bias_head", "bias_row", "bias_column", "slope_batch", "dout_batch", "dout_token",
        "dout_head",
    ]
)  # fmt: skip
def tilewright_attention_key_gradients(
    q, k, v, bias, slopes, q_starts, k_starts, seed_tensor, dout, log, delta, dk, dv,
    seed: tl.int64, heads: tl.int32, shared: tl.int32, sequences: tl.int32, queries: tl.int32, keys: tl.int32,
    all_queries: tl.int32, all_keys: tl.int32, blocks: tl.int32, group: tl.int32, left: tl.int32, right: tl.int32,
    threshold: tl.int32, scale: tl.float32, softcap: tl.float32, keep_scale: tl.float32,
    q_batch: tl.int64, q_token: tl.int64, q_head: tl.int64, k_batch: tl.int64, k_token: tl.int64, k_head: tl.int64,
    v_batch: tl.int64, v_token: tl.int64, v_head: tl.int64,
    bias_batch: tl.int64, bias_head: tl.int64, bias_row: tl.int64, bias_column: tl.int64, slope_batch: tl.int64,
    dout_batch: tl.int64, dout_token: tl.int64, dout_head: tl.int64,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """dk and dv of BLOCK_N keys of a head of them."""
    ALIBI: tl.constexpr = slopes is not None
    PRECISE: tl.constexpr = q.dtype.element_ty == tl.float32
    kv_heads = heads // shared
    block, pair = place(tl.program_id(0), blocks, sequences * kv_heads, group, False)
    sequence, kv_head = pair // kv_heads, pair % kv_heads
    row_width = (keys + 7) // 8 * 8
    q_address, q_first, queries = sequence_bounds(q_starts, sequence, queries, all_queries)
    _k_address, k_first, keys = sequence_bounds(k_starts, sequence, keys, all_keys)
    start = block * BLOCK_N
    if start >= keys:
        return
    column = start + tl.arange(0, BLOCK_N)
    inside = column < keys
    batch, q_place, k_place = q_address.to(tl.int64), q_first + tl.full([], 0, tl.int64), (k_first + start).to(tl.int64)
    k_at = tile_pointers(k, batch, k_place, kv_head, k_batch, k_token, k_head, BLOCK_N, COLUMNS, UNIT)
    v_at = tile_pointers(v, batch, k_place, kv_head, v_batch, v_token, v_head, BLOCK_N, COLUMNS, UNIT)
    k_tile = load_tile(k_at, inside, WIDTH, COLUMNS, False)
    v_tile = load_tile(v_at, inside, WIDTH, COLUMNS, False)
    seed = load_seed(seed_tensor, seed)
    offset = keys - queries
    low, high = query_range(start, queries, offset, left, right, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT)
    dk_sum = tl.zeros([BLOCK_N, COLUMNS], tl.float32)
    dv_sum = tl.zeros([BLOCK_N, COLUMNS], tl.float32)
    for member in range(shared):
        head = kv_head * shared + member
        q_at = tile_pointers(q, batch, q_place, head, q_batch, q_token, q_head, BLOCK_M, COLUMNS, UNIT)
        dout_at = tile_pointers(dout, batch, q_place, head, dout_batch, dout_token, dout_head, BLOCK_M, COLUMNS, UNIT)
        row_place = (batch * heads + head) * all_queries + q_place
        log_at, delta_at = log + row_place, delta + row_place
        slope = 0.0
        if ALIBI:
            slope = tl.load(slopes + sequence * slope_batch + head)
        head_bias = bias
        if bias is not None:
            head_bias = bias + sequence * bias_batch + head * bias_head
        dk_sum, dv_sum = _add_queries(
            dk_sum, dv_sum, k_tile, v_tile, q_at, dout_at, q_token * UNIT, dout_token * UNIT, log_at, delta_at,
            low, high, column, queries, keys, offset, left, right, slope, head_bias, bias_row, bias_column,
            scale, softcap, seed, row_place, row_width, start, threshold, keep_scale,
            BLOCK_M, BLOCK_N, WIDTH, COLUMNS, STAGES, HAS_LEFT, HAS_RIGHT, ALIBI, SOFTCAP, DROPOUT, PRECISE,
        )  # fmt: skip
    width = kv_heads * WIDTH
    stored = inside[:, None] & (tl.arange(0, COLUMNS) < WIDTH)[None, :]
    batch_width = (all_keys + tl.full([], 0, tl.int64)) * width
    dk_at = tile_pointers(dk, batch, k_place, kv_head, batch_width, width, WIDTH, BLOCK_N, COLUMNS, 1)
    dv_at = tile_pointers(dv, batch, k_place, kv_head, batch_width, width, WIDTH, BLOCK_N, COLUMNS, 1)
    tl.store(dk_at, (dk_sum * scale).to(dk.dtype.element_ty), stored)
    tl.store(dv_at, dv_sum.to(dv.dtype.element_ty), stored)


@triton.jit
def _score_slopes(
    q_tile, dout_tile, k_tile, v_tile, row, column, there, log, mean, keys, offset, left, right, slope,
    bias, bias_row, bias_column, scale, softcap, seed, draws, threshold, keep_scale,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    ALIBI: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """(gradient of finished scores, slope of the soft-cap) of a tile with queries down."""
    s = dot(q_tile, tl.trans(k_tile), None)
    exists = there[:, None] & (column < keys)[None, :]
    s, factor, damping = finish_scores(
        s, row[:, None], column[None, :], exists, offset, slope, bias, bias_row, bias_column, scale, softcap,
        ALIBI, SOFTCAP, PRECISE,
    )  # fmt: skip
    p = tl.exp2(s * factor - log[:, None])
    if MASKED:
        seen = visible(row[:, None], column[None, :], keys, offset, left, right, HAS_LEFT, HAS_RIGHT)
        p = tl.where(seen, p, 0.0)
    dp = dot(dout_tile, tl.trans(v_tile), None)
    if DROPOUT:
        dp = tl.where(keep_mask(seed, draws, threshold, 0, BLOCK_N), dp * keep_scale, 0.0)
    return p * (dp - mean[:, None]), damping


@triton.jit
def _add_keys(
    dq, q_tile, dout_tile, k_at, v_at, k_token, v_token, low, high, row, there, log, mean, keys, offset, left, right,
    slope, bias, bias_row, bias_column, scale, softcap, seed, draws, threshold, keep_scale,
    BLOCK_N: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, MASKED: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, ALIBI: tl.constexpr, SOFTCAP: tl.constexpr,
    DROPOUT: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """Adds what the keys from `low` to `high` say to the gradient of a tile of queries."""
    for first in tl.range(low, high, BLOCK_N, num_stages=STAGES):
        column = first + tl.arange(0, BLOCK_N)
        k_tile = load_tile(k_at + first * k_token, column < keys, WIDTH, COLUMNS, not MASKED)
        v_tile = load_tile(v_at + first * v_token, column < keys, WIDTH, COLUMNS, not MASKED)
        ds, damping = _score_slopes(
            q_tile, dout_tile, k_tile, v_tile, row, column, there, log, mean, keys, offset, left, right, slope,
            bias, bias_row, bias_column, scale, softcap, seed, draws + first, threshold, keep_scale,
            BLOCK_N, MASKED, HAS_LEFT, HAS_RIGHT, ALIBI, SOFTCAP, DROPOUT, PRECISE,
        )  # fmt: skip
        dq = dot((ds * damping).to(k_tile.dtype), k_tile, dq)
    return dq


@triton.jit(
    do_not_specialize=[
        "seed", "heads", "shared", "sequences", "queries", "keys", "all_queries", "all_keys", "blocks", "group", "left",
        "right", "threshold", "q_batch", "q_token", "q_head", "k_batch", "k_token", "k_head", "v_batch", "v_token",
        "v_head", "bias_batch", "bias_head", "bias_row", "bias_column", "slope_batch", "dout_batch", "dout_token",
        "dout_head",
    ]
)  # fmt: skip
def tilewright_attention_query_gradients(
    q, k, v, bias, slopes, q_starts, k_starts, seed_tensor, dout, log, delta, dq,
    seed: tl.int64, heads: tl.int32, shared: tl.int32, sequences: tl.int32, queries: tl.int32, keys: tl.int32,
    all_queries: tl.int32, all_keys: tl.int32, blocks: tl.int32, group: tl.int32, left: tl.int32, right: tl.int32,
    threshold: tl.int32, scale: tl.float32, softcap: tl.float32, keep_scale: tl.float32,
    q_batch: tl.int64, q_token: tl.int64, q_head: tl.int64, k_batch: tl.int64, k_token: tl.int64, k_head: tl.int64,
    v_batch: tl.int64, v_token: tl.int64, v_head: tl.int64,
    bias_batch: tl.int64, bias_head: tl.int64, bias_row: tl.int64, bias_column: tl.int64, slope_batch: tl.int64,
    dout_batch: tl.int64, dout_token: tl.int64, dout_head: tl.int64,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """dq of BLOCK_M queries of a head."""
    ALIBI: tl.constexpr = slopes is not None
    PRECISE: tl.constexpr = q.dtype.element_ty == tl.float32
    block, pair = place(tl.program_id(0), blocks, sequences * heads, group, HAS_RIGHT)
    sequence, head = pair // heads, pair % heads
    row_width = (keys + 7) // 8 * 8
    q_address, q_first, queries = sequence_bounds(q_starts, sequence, queries, all_queries)
    _k_address, k_first, keys = sequence_bounds(k_starts, sequence, keys, all_keys)
    start = block * BLOCK_M
    if start >= queries:
        return
    row = start + tl.arange(0, BLOCK_M)
    there = row < queries
    batch, q_place, k_place = q_address.to(tl.int64), (q_first + start).to(tl.int64), k_first + tl.full([], 0, tl.int64)
    q_at = tile_pointers(q, batch, q_place, head, q_batch, q_token, q_head, BLOCK_M, COLUMNS, UNIT)
    dout_at = tile_pointers(dout, batch, q_place, head, dout_batch, dout_token, dout_head, BLOCK_M, COLUMNS, UNIT)
    q_tile = load_tile(q_at, there, WIDTH, COLUMNS, False)
    dout_tile = load_tile(dout_at, there, WIDTH, COLUMNS, False)
    kv_head = head // shared
    k_at = tile_pointers(k, batch, k_place, kv_head, k_batch, k_token, k_head, BLOCK_N, COLUMNS, UNIT)
    v_at = tile_pointers(v, batch, k_place, kv_head, v_batch, v_token, v_head, BLOCK_N, COLUMNS, UNIT)
    slope = 0.0
    if ALIBI:
        slope = tl.load(slopes + sequence * slope_batch + head)
    if bias is not None:
        bias += sequence * bias_batch + head * bias_head
    place_of_row = (batch * heads + head) * all_queries + q_place + tl.arange(0, BLOCK_M)
    power, mean = tl.load(log + place_of_row, there, float("inf")), tl.load(delta + place_of_row, there, 0.0)
    draws = place_of_row * row_width
    seed = load_seed(seed_tensor, seed)
    offset = keys - queries
    low, full_low, full_high, high = key_range(
        start, queries, keys, offset, left, right, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT
    )
    acc = tl.zeros([BLOCK_M, COLUMNS], tl.float32)
    if HAS_LEFT:
        acc = _add_keys(
            acc, q_tile, dout_tile, k_at, v_at, k_token * UNIT, v_token * UNIT, low, full_low, row, there, power, mean,
            keys, offset, left, right, slope, bias, bias_row, bias_column, scale, softcap, seed, draws, threshold,
            keep_scale, BLOCK_N, WIDTH, COLUMNS, STAGES, True, HAS_LEFT, HAS_RIGHT, ALIBI, SOFTCAP, DROPOUT, PRECISE,
        )  # fmt: skip
    acc = _add_keys(
        acc, q_tile, dout_tile, k_at, v_at, k_token * UNIT, v_token * UNIT, full_low, full_high, row, there, power,
        mean, keys, offset, left, right, slope, bias, bias_row, bias_column, scale, softcap, seed, draws, threshold,
        keep_scale, BLOCK_N, WIDTH, COLUMNS, STAGES, False, HAS_LEFT, HAS_RIGHT, ALIBI, SOFTCAP, DROPOUT, PRECISE,
    )  # fmt: skip
    acc = _add_keys(
        acc, q_tile, dout_tile, k_at, v_at, k_token * UNIT, v_token * UNIT, full_high, high, row, there, power, mean,
        keys, offset, left, right, slope, bias, bias_row, bias_column, scale, softcap, seed, draws, threshold,
        keep_scale, BLOCK_N, WIDTH, COLUMNS, STAGES, True, HAS_LEFT, HAS_RIGHT, ALIBI, SOFTCAP, DROPOUT, PRECISE,
    )  # fmt: skip
    width = heads * WIDTH
    dq_at = tile_pointers(dq, batch, q_place, head, (all_queries + tl.full([], 0, tl.int64)) * width, width, WIDTH,
                          BLOCK_M, COLUMNS, 1)  # fmt: skip
    stored = there[:, None] & (tl.arange(0, COLUMNS) < WIDTH)[None, :]
    tl.store(dq_at, (acc * scale).to(dq.dtype.element_ty), stored)


@triton.jit(
    do_not_specialize=[
        "seed", "heads", "shared", "sequences", "queries", "keys", "all_queries", "all_keys", "blocks", "group", "left",
        "right", "threshold", "q_batch", "q_token", "q_head", "k_batch", "k_token", "k_head", "v_batch", "v_token",
        "v_head", "bias_batch", "bias_head", "bias_row", "bias_column", "slope_batch", "dout_batch", "dout_token",
        "dout_head", "bias_sequences", "bias_heads",
    ]
)  # fmt: skip
def tilewright_attention_bias_gradient(
    q, k, v, bias, slopes, q_starts, k_starts, seed_tensor, dout, log, delta, dbias,
    seed: tl.int64, heads: tl.int32, shared: tl.int32, sequences: tl.int32, queries: tl.int32, keys: tl.int32,
    all_queries: tl.int32, all_keys: tl.int32, blocks: tl.int32, group: tl.int32, left: tl.int32, right: tl.int32,
    threshold: tl.int32, scale: tl.float32, softcap: tl.float32, keep_scale: tl.float32,
    q_batch: tl.int64, q_token: tl.int64, q_head: tl.int64, k_batch: tl.int64, k_token: tl.int64, k_head: tl.int64,
    v_batch: tl.int64, v_token: tl.int64, v_head: tl.int64,
    bias_batch: tl.int64, bias_head: tl.int64, bias_row: tl.int64, bias_column: tl.int64, slope_batch: tl.int64,
    dout_batch: tl.int64, dout_token: tl.int64, dout_head: tl.int64, bias_sequences: tl.int32, bias_heads: tl.int32,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """The gradient of a BLOCK_M x BLOCK_N tile of the bias.

    dbias is (bias_sequences, bias_heads, queries, keys); a size of 1 stands for a bias that all sequences or heads
    share. `blocks` are the tiles of one head.
    """
    ALIBI: tl.constexpr = slopes is not None
    PRECISE: tl.constexpr = q.dtype.element_ty == tl.float32
    program = tl.program_id(0)
    tile, pair = program % blocks, program // blocks
    across = (keys + BLOCK_N - 1) // BLOCK_N
    start, column_first = tile // across * BLOCK_M, tile % across * BLOCK_N
    row, column = start + tl.arange(0, BLOCK_M), column_first + tl.arange(0, BLOCK_N)
    there, inside = row < queries, column < keys
    row_width = (keys + 7) // 8 * 8
    seed = load_seed(seed_tensor, seed)
    offset = keys - queries
    zero = tl.full([], 0, tl.int64)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    # Of the batches and heads of a call, those that this tile of the bias is added to.
    sequence_first, head_first = pair // bias_heads, pair % bias_heads
    low, _full_low, _full_high, high = key_range(
        start, queries, keys, offset, left, right, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT
    )
    members = sequences // bias_sequences * (heads // bias_heads)
    if (column_first >= high) | (column_first + BLOCK_N <= low):
        members = members * 0
    for member in tl.range(0, members, 1, num_stages=1):
        sequence = sequence_first + member // (heads // bias_heads)
        head = head_first + member % (heads // bias_heads)
        batch, kv_head = sequence.to(tl.int64), head // shared
        q_at = tile_pointers(q, batch, start + zero, head, q_batch, q_token, q_head, BLOCK_M, COLUMNS, UNIT)
        dout_at = tile_pointers(
            dout, batch, start + zero, head, dout_batch, dout_token, dout_head, BLOCK_M, COLUMNS, UNIT
        )
        k_at = tile_pointers(k, batch, column_first + zero, kv_head, k_batch, k_token, k_head, BLOCK_N, COLUMNS, UNIT)
        v_at = tile_pointers(v, batch, column_first + zero, kv_head, v_batch, v_token, v_head, BLOCK_N, COLUMNS, UNIT)
        slope = 0.0
        if ALIBI:
            slope = tl.load(slopes + sequence * slope_batch + head)
        row_place = (batch * heads + head) * all_queries + row
        power, mean = tl.load(log + row_place, there, float("inf")), tl.load(delta + row_place, there, 0.0)
        ds, _damping = _score_slopes(
            load_tile(q_at, there, WIDTH, COLUMNS, False), load_tile(dout_at, there, WIDTH, COLUMNS, False),
            load_tile(k_at, inside, WIDTH, COLUMNS, False), load_tile(v_at, inside, WIDTH, COLUMNS, False),
            row, column, there, power, mean, keys, offset, left, right, slope,
            bias + sequence * bias_batch + head * bias_head, bias_row, bias_column, scale, softcap,
            seed, row_place * row_width + column_first, threshold, keep_scale,
            BLOCK_N, True, HAS_LEFT, HAS_RIGHT, ALIBI, SOFTCAP, DROPOUT, PRECISE,
        )  # fmt: skip
        acc += ds
    at = (pair.to(tl.int64) * queries + row)[:, None] * keys + column[None, :]
    tl.store(dbias + at, acc.to(dbias.dtype.element_ty), there[:, None] & inside[None, :])
