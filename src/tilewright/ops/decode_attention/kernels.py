"""The kernels of `decode_attention`, by how they move the data.

`split`: a program has one head of keys of one sequence, and of its keys one of SPLITS parts. It loads all queries that
share the head, ROWS of them, once; then BLOCK keys and values at a time, each once, and keeps maximum, sum and weighted
values of every query in registers. A part is a multiple of 16 keys, by the length that is on the device: a program
whose part is empty ends at once.

`join`: a program has one query. It loads what the parts have found, scales it to their common maximum and adds it up in
the order of the parts.

`append`: a program has a token's next GROUP heads of q, of k or of v, and moves them once. Members of a pair of rotary
positions lie half a head apart, and are loaded, turned in float32 and stored by the same threads.

Scores are in powers of two: log2(e) is part of the scale.
"""

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tilewright.runtime import dispatch

_INTERPRETED = tl.constexpr(dispatch.INTERPRETED)
_PART = 16  # keys of the smallest part
_PROGRAMS = 2  # for each multiprocessor
_APPENDED = 1024  # elements that a program of `append` moves


@triton.jit
def _dot(a, b):
    """A matmul without TF32. The interpreter would multiply the bits of bfloat16."""
    if _INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    return tl.dot(a, b, input_precision="ieee")


@triton.jit(
    do_not_specialize=[
        "capacity", "states", "q_batch", "q_token", "q_head", "k_batch", "k_head", "k_token", "v_batch", "v_head",
        "v_token",
    ]
)  # fmt: skip
def tilewright_decode_attention_split(
    q, k, v, lengths, out, partial, state, scale: tl.float64, capacity: tl.int64, states: tl.int64,
    q_batch: tl.int64, q_token: tl.int64, q_head: tl.int64, k_batch: tl.int64, k_head: tl.int64, k_token: tl.int64,
    v_batch: tl.int64, v_head: tl.int64, v_token: tl.int64,
    TOKENS: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr, PART: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Attention of all queries of one head of keys over one part of its keys; the whole where SPLITS is 1."""
    program = tl.program_id(0)
    split = program % SPLITS
    head = ((program // SPLITS) % KV_HEADS).to(tl.int64)
    batch = (program // SPLITS // KV_HEADS).to(tl.int64)
    length = tl.minimum(tl.maximum(tl.load(lengths + batch).to(tl.int64), 0), capacity)
    share = ((length + SPLITS - 1) // SPLITS + PART - 1) // PART * PART
    begin = split * share
    end = tl.minimum(begin + share, length)

    row, dim = tl.arange(0, ROWS), tl.arange(0, DIM)
    token, inner = row // GROUP, row % GROUP
    there = (row < TOKENS * GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    at = batch * (q_batch // UNIT * UNIT) + token * (q_token // UNIT * UNIT)
    at += (head * GROUP + inner) * (q_head // UNIT * UNIT)
    queries = tl.load(q + at[:, None] + dim[None, :], there, 0.0)
    last = length - TOKENS + token  # key that a query sees
    k += batch * (k_batch // UNIT * UNIT) + head * (k_head // UNIT * UNIT)
    v += batch * (v_batch // UNIT * UNIT) + head * (v_head // UNIT * UNIT)
    k_token = k_token // UNIT * UNIT
    v_token = v_token // UNIT * UNIT

    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, DIM], tl.float32)
    factor = tl.full([], scale, tl.float32)
    for start in range(begin, end, BLOCK):
        key = start + tl.arange(0, BLOCK)
        known = (key < end)[:, None] & (dim < HEAD_DIM)[None, :]
        keys = tl.load(k + (key * k_token)[:, None] + dim[None, :], known, 0.0)
        values = tl.load(v + (key * v_token)[:, None] + dim[None, :], known, 0.0)
        scores = _dot(queries, tl.trans(keys)) * factor
        seen = (key < end)[None, :] & (key[None, :] <= last[:, None])
        scores = tl.where(seen, scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(higher == -float("inf"), 0.0, higher)
        weights = tl.exp2(scores - base[:, None])
        faded = tl.exp2(top - base)
        total = total * faded + tl.sum(weights, 1)
        mixed = mixed * faded[:, None] + _dot(weights.to(values.dtype), values)
        top = higher

    if SPLITS == 1:
        mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
        at = ((batch * TOKENS + token) * KV_HEADS + head) * GROUP + inner
        tl.store(out + (at * HEAD_DIM)[:, None] + dim[None, :], mixed.to(out.dtype.element_ty), there)
    else:
        at = program.to(tl.int64) * TOKENS * GROUP + row
        tl.store(state + at, top, row < TOKENS * GROUP)
        tl.store(state + states + at, total, row < TOKENS * GROUP)
        if begin < end:
            tl.store(partial + (at * HEAD_DIM)[:, None] + dim[None, :], mixed, there)


@triton.jit(do_not_specialize=["states"])
def tilewright_decode_attention_join(
    partial, state, out, states: tl.int64,
    TOKENS: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr,
    PARTS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """The result of one query from those of its parts."""
    query = tl.program_id(0).to(tl.int64)
    inner = query % GROUP
    head = query // GROUP % KV_HEADS
    token = query // (GROUP * KV_HEADS) % TOKENS
    batch = query // (GROUP * KV_HEADS * TOKENS)
    part, dim = tl.arange(0, PARTS), tl.arange(0, DIM)
    at = ((batch * KV_HEADS + head) * SPLITS + part) * (TOKENS * GROUP) + token * GROUP + inner
    top = tl.load(state + at, part < SPLITS, -float("inf"))
    total = tl.load(state + states + at, part < SPLITS, 0.0)
    highest = tl.max(top, 0)
    highest = tl.where(highest == -float("inf"), 0.0, highest)
    weight = tl.exp2(top - highest)
    whole = tl.sum(total * weight, 0)
    used = (total > 0.0)[:, None] & (dim < HEAD_DIM)[None, :]
    mixed = tl.load(partial + (at * HEAD_DIM)[:, None] + dim[None, :], used, 0.0)
    mixed = tl.sum(mixed * weight[:, None], 0) / tl.where(whole == 0.0, 1.0, whole)
    tl.store(out + query * HEAD_DIM + dim, mixed.to(out.dtype.element_ty), dim < HEAD_DIM)


class Plan(NamedTuple):
    """Into how many parts the keys of a head are split, and the kernels; `join` is None where there is one."""

    splits: int
    split: dispatch.Launch
    join: dispatch.Launch | None


@functools.cache
def plan(
    device: torch.device, dtype: torch.dtype, aligned: tuple[bool, ...], batch: int, tokens: int, heads: int,
    kv_heads: int, head_dim: int, capacity: int, unit: int,
) -> Plan:  # fmt: skip
    """The plan for a size; `aligned` says which tensors begin at a multiple of 16 bytes, which Triton compiles for."""
    group = heads // kv_heads
    rows, dim = (max(16, triton.next_power_of_2(size)) for size in (tokens * group, head_dim))
    block = 32 if rows > 64 or dim * dtype.itemsize > 256 else 64
    warps = 4
    if dtype == torch.float32:  # no tensor core: a tile is in registers
        block, warps = 16 if dim > 64 else 32, 8
    wanted = _PROGRAMS * dispatch.multiprocessors(device) // (batch * kv_heads)
    splits = max(1, min(wanted, -(-capacity // _PART), 128))
    constants: tuple[Any, ...] = (tokens, group, kv_heads, head_dim, splits)
    split = dispatch.Launch(
        tilewright_decode_attention_split, device, (*constants, rows, block, dim, _PART, unit), warps
    )  # fmt: skip
    if splits == 1:
        return Plan(splits, split, None)
    join = dispatch.Launch(
        tilewright_decode_attention_join, device, (*constants, triton.next_power_of_2(splits), dim), 4
    )  # fmt: skip
    return Plan(splits, split, join)


@triton.jit
def _turn(source, target, cosine, sine, dim, there, HALF: tl.constexpr):
    """Turn heads, or copy them where HALF is 0: `dim` then counts all of a head, and otherwise its pairs."""
    first = tl.load(source + dim, there, 0.0)
    if HALF == 0:
        tl.store(target + dim, first, there)
    else:
        second = tl.load(source + HALF + dim, there, 0.0)
        x, y = first.to(tl.float32), second.to(tl.float32)
        tl.store(target + dim, (x * cosine - y * sine).to(first.dtype), there)
        tl.store(target + HALF + dim, (y * cosine + x * sine).to(first.dtype), there)


@triton.jit(
    do_not_specialize=[
        "tokens", "capacity", "positions", "q_batch", "q_token", "q_head", "k_batch", "k_token", "k_head", "v_batch",
        "v_token", "v_head", "keys_batch", "keys_head", "keys_token", "values_batch", "values_head", "values_token",
    ]
)  # fmt: skip
def tilewright_decode_attention_append(
    q, k, v, out, keys, values, before, cos, sin, tokens: tl.int64, capacity: tl.int64, positions: tl.int64,
    q_batch: tl.int64, q_token: tl.int64, q_head: tl.int64, k_batch: tl.int64, k_token: tl.int64, k_head: tl.int64,
    v_batch: tl.int64, v_token: tl.int64, v_head: tl.int64,
    keys_batch: tl.int64, keys_head: tl.int64, keys_token: tl.int64,
    values_batch: tl.int64, values_head: tl.int64, values_token: tl.int64,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    DIM: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Turned q into `out`, turned k into `keys`, v into `values`; a place that the cache does not have is left out."""
    Q_GROUPS: tl.constexpr = (HEADS + GROUP - 1) // GROUP
    K_GROUPS: tl.constexpr = (KV_HEADS + GROUP - 1) // GROUP
    group = tl.program_id(0) % (Q_GROUPS + 2 * K_GROUPS)
    place = (tl.program_id(0) // (Q_GROUPS + 2 * K_GROUPS)).to(tl.int64)
    batch, token = place // tokens, place % tokens
    position = tl.load(before + batch + tl.zeros([1, 1], tl.int64)).to(tl.int64) + token
    inside = (position >= 0) & (position < capacity)
    pair = tl.arange(0, BLOCK)[None, :]
    size: tl.constexpr = HALF if HALF > 0 else HEAD_DIM
    cosine = 0.0
    sine = 0.0
    if HALF > 0:
        known = (pair < HALF) & (position >= 0) & (position < positions)
        cosine = tl.load(cos + position * HALF + pair, known, float("nan")).to(tl.float32)
        sine = tl.load(sin + position * HALF + pair, known, float("nan")).to(tl.float32)
    if group < Q_GROUPS:
        head = (group * GROUP + tl.arange(0, GROUP)).to(tl.int64)[:, None]
        there = (head < HEADS) & (pair < size)
        source = q + batch * q_batch + token * q_token + head * q_head
        target = out + (place * HEADS + head) * HEAD_DIM
        _turn(source, target, cosine, sine, pair, there, HALF)
    elif group < Q_GROUPS + K_GROUPS:
        head = ((group - Q_GROUPS) * GROUP + tl.arange(0, GROUP)).to(tl.int64)[:, None]
        there = (head < KV_HEADS) & (pair < size) & inside
        source = k + batch * k_batch + token * k_token + head * k_head
        target = keys + batch * keys_batch + position * keys_token + head * keys_head
        _turn(source, target, cosine, sine, pair, there, HALF)
    else:
        head = ((group - Q_GROUPS - K_GROUPS) * GROUP + tl.arange(0, GROUP)).to(tl.int64)[:, None]
        dim = tl.arange(0, DIM)[None, :]
        whole = (head < KV_HEADS) & (dim < HEAD_DIM) & inside
        source = v + batch * v_batch + token * v_token + head * v_head
        target = values + batch * values_batch + position * values_token + head * values_head
        _turn(source, target, 0.0, 0.0, dim, whole, 0)


@functools.cache
def append_launch(
    device: torch.device, dtypes: tuple[torch.dtype | None, ...], aligned: tuple[bool, ...], heads: int, kv_heads: int,
    head_dim: int,
) -> tuple[int, dispatch.Launch]:  # fmt: skip
    """(programs of a token, the kernel); without tables in `dtypes`, q stays as it is and is left out.

    `aligned` says which tensors begin at a multiple of 16 bytes, which Triton compiles for.
    """
    half = 0 if dtypes[-1] is None else head_dim // 2
    dim = triton.next_power_of_2(head_dim)
    group = min(max(1, _APPENDED // dim), triton.next_power_of_2(kv_heads))
    heads = heads if half else 0
    block = triton.next_power_of_2(half) if half else dim
    constants = (heads, kv_heads, head_dim, half, block, dim, group)
    programs = triton.cdiv(heads, group) + 2 * triton.cdiv(kv_heads, group)
    return programs, dispatch.Launch(tilewright_decode_attention_append, device, constants, 4)
