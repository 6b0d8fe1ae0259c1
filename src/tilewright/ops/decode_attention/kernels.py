"""The kernels of `decode_attention`, by how they move the data.

`split`: a program has one head of keys of one sequence, and of its keys one of SPLITS parts. It loads all queries that
share the head, ROWS of them, once; then BLOCK keys and values at a time, each once, and keeps maximum, sum and weighted
values of every query in registers. A part is a multiple of 16 keys, by the length that is on the device: a program
whose part is empty ends at once.

In a chain (`runtime/pdl.py`) a program of `split` has its part's first _AHEAD blocks of keys and values brought into L2
before it waits. Most of the cache is older than the chain, but the newest TOKENS keys are what `append`, the launch
before, writes: they are left out, and what is fetched goes to no register and no L1. So nothing stale can be used,
whatever the lengths say: L2 is where the writes of all multiprocessors meet, and every key is loaded after the wait.
How many keys are there is read before the wait as a hint alone, past L1, and bounded by the capacity; it is read again.

`join`: a program has one query. It loads what the parts have found, scales it to their common maximum and adds it up in
the order of the parts.

`append`: a program has a token's next GROUP heads of q, of k or of v, and moves them once. Members of a pair of rotary
positions lie half a head apart, and are loaded, turned in float32 and stored by the same threads.

Scores are in powers of two: log2(e) is part of the scale.

A cache of 8 bits (`eight_bits.py`) is half the bytes. `split` unpacks codes in registers to exact numbers of q's dtype;
a key's scale multiplies its scores, a value's its weights, so that no element is multiplied. `append` keeps a head's
element in registers, has its largest from all of them, and writes codes and scale.
"""

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tilewright.ops.quantized_linear.kernels import _from_fp8
from tilewright.runtime import dispatch
from tilewright.runtime.pdl_kernels import let_next_begin, prefetch_rows, wait_for_previous

_INTERPRETED = tl.constexpr(dispatch.INTERPRETED)
_PART = 16  # keys of the smallest part
_PROGRAMS = 2  # for each multiprocessor
_AHEAD = 2  # blocks of keys
_APPENDED = 1024  # elements that a program of `append` moves
_INT8, _FP8 = tl.constexpr(1), tl.constexpr(2)  # CODES of a cache of 8 bits; 0: floats
CODES = {torch.int8: 1, torch.float8_e4m3fn: 2}


@triton.jit
def _dot(a, b):
    """A matmul without TF32. The interpreter would multiply the bits of bfloat16."""
    if _INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _unpack(codes, FLOAT: tl.constexpr, CODES: tl.constexpr):
    """Codes as exact numbers of the dtype FLOAT; what is a float stays as it is."""
    if CODES == _FP8:
        return _from_fp8(codes, FLOAT)
    elif CODES == _INT8:
        return codes.to(FLOAT)
    else:
        return codes


@triton.jit
def _part(length, capacity, split, SPLITS: tl.constexpr, PART: tl.constexpr):
    """(keys that are there, where a split's part of them begins, where it ends)."""
    length = tl.minimum(tl.maximum(length.to(tl.int64), 0), capacity)
    share = ((length + SPLITS - 1) // SPLITS + PART - 1) // PART * PART
    begin = split * share
    return length, begin, tl.minimum(begin + share, length)


@triton.jit(
    do_not_specialize=[
        "capacity", "states", "q_batch", "q_token", "q_head", "k_batch", "k_head", "k_token", "v_batch", "v_head",
        "v_token",
    ]
)  # fmt: skip
def tilewright_decode_attention_split(
    q, k, v, k_scale, v_scale, lengths, out, partial, state, scale: tl.float64, capacity: tl.int64, states: tl.int64,
    q_batch: tl.int64, q_token: tl.int64, q_head: tl.int64, k_batch: tl.int64, k_head: tl.int64, k_token: tl.int64,
    v_batch: tl.int64, v_head: tl.int64, v_token: tl.int64,
    TOKENS: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr, PART: tl.constexpr, UNIT: tl.constexpr,
    KEY_UNIT: tl.constexpr, AHEAD: tl.constexpr, CODES: tl.constexpr, FOLD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attention of all queries of one head of keys over one part of its keys; the whole where SPLITS is 1.

    AHEAD: how many keys are fetched before the wait; 0 where rows of the cache do not begin at multiples of 16 bytes.
    """
    let_next_begin(PDL)
    program = tl.program_id(0)
    split = program % SPLITS
    head = ((program // SPLITS) % KV_HEADS).to(tl.int64)
    batch = (program // SPLITS // KV_HEADS).to(tl.int64)
    k += batch * (k_batch // KEY_UNIT * KEY_UNIT) + head * (k_head // KEY_UNIT * KEY_UNIT)
    v += batch * (v_batch // KEY_UNIT * KEY_UNIT) + head * (v_head // KEY_UNIT * KEY_UNIT)
    k_token = k_token // KEY_UNIT * KEY_UNIT
    v_token = v_token // KEY_UNIT * KEY_UNIT
    if PDL and AHEAD > 0:
        old, begin, end = _part(tl.load(lengths + batch, cache_modifier=".cg"), capacity, split, SPLITS, PART)
        count = tl.minimum(end, old - TOKENS) - begin  # without those that the kernel before writes
        SIZE: tl.constexpr = k.dtype.element_ty.primitive_bitwidth // 8
        prefetch_rows(k + begin * k_token, k_token * SIZE, HEAD_DIM * SIZE, count, AHEAD, PDL)
        prefetch_rows(v + begin * v_token, v_token * SIZE, HEAD_DIM * SIZE, count, AHEAD, PDL)
    wait_for_previous(PDL)
    length, begin, end = _part(tl.load(lengths + batch), capacity, split, SPLITS, PART)

    row, dim = tl.arange(0, ROWS), tl.arange(0, DIM)
    token, inner = row // GROUP, row % GROUP
    there = (row < TOKENS * GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    at = batch * (q_batch // UNIT * UNIT) + token * (q_token // UNIT * UNIT)
    at += (head * GROUP + inner) * (q_head // UNIT * UNIT)
    queries = tl.load(q + at[:, None] + dim[None, :], there, 0.0)
    last = length - TOKENS + token  # key that a query sees

    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, DIM], tl.float32)
    factor = tl.full([], scale, tl.float32)
    scales = (batch * KV_HEADS + head) * capacity
    FLOAT: tl.constexpr = tl.float32 if _INTERPRETED else q.dtype.element_ty
    for start in range(begin, end, BLOCK):
        key = start + tl.arange(0, BLOCK)
        known = (key < end)[:, None] & (dim < HEAD_DIM)[None, :]
        keys = tl.load(k + (key * k_token)[:, None] + dim[None, :], known, 0.0)
        values = tl.load(v + (key * v_token)[:, None] + dim[None, :], known, 0.0)
        scores = _dot(queries, tl.trans(_unpack(keys, FLOAT, CODES))) * factor
        if CODES > 0:
            scores *= tl.load(k_scale + scales + key, key < end, 0.0)[None, :]
        seen = (key < end)[None, :] & (key[None, :] <= last[:, None])
        scores = tl.where(seen, scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(higher == -float("inf"), 0.0, higher)
        weights = tl.exp2(scores - base[:, None])
        faded = tl.exp2(top - base)
        total = total * faded + tl.sum(weights, 1)
        unpacked = _unpack(values, FLOAT, CODES)
        if CODES > 0:
            # They are rounded next, and in float16 a scale alone may be too small: FOLD moves a power of two.
            weights *= tl.load(v_scale + scales + key, key < end, 0.0)[None, :] * FOLD
            if FOLD > 1:
                unpacked *= 1 / FOLD
        mixed = mixed * faded[:, None] + _dot(weights.to(q.dtype.element_ty), unpacked)
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
    PARTS: tl.constexpr, DIM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The result of one query from those of its parts."""
    let_next_begin(PDL)
    wait_for_previous(PDL)
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
    device: torch.device, dtypes: tuple[torch.dtype, torch.dtype], aligned: tuple[bool, ...], batch: int, tokens: int,
    heads: int, kv_heads: int, head_dim: int, capacity: int, units: tuple[int, int],
) -> Plan:  # fmt: skip
    """The plan for a size.

    Args:
        dtypes: of the queries and of the cache.
        aligned: which tensors begin at a multiple of 16 bytes, which Triton compiles for.
        units: elements that divide all strides of the queries, and of the cache.
    """
    dtype, codes = dtypes[0], CODES.get(dtypes[1], 0)
    group = heads // kv_heads
    rows, dim = (max(16, triton.next_power_of_2(size)) for size in (tokens * group, head_dim))
    block = 32 if rows > 64 or dim * dtype.itemsize > 256 else 64
    warps = 4
    if dtype == torch.float32:  # no tensor core: a tile is in registers
        block, warps = 16 if dim > 64 else 32, 8
    wanted = _PROGRAMS * dispatch.multiprocessors(device) // (batch * kv_heads)
    splits = max(1, min(wanted, -(-capacity // _PART), 128))
    constants: tuple[Any, ...] = (tokens, group, kv_heads, head_dim, splits)
    size = dtypes[1].itemsize
    begins = all(aligned[1:]) and head_dim * size % 16 == 0 and units[1] * size % 16 == 0
    ahead = _AHEAD * block if begins else 0
    fold = {0: 1, 1: 128, 2: 512}[codes] if dtype == torch.float16 else 1
    sizes = (*constants, rows, block, dim, _PART, *units, ahead, codes, fold)
    split = dispatch.Launch(tilewright_decode_attention_split, device, sizes, warps, chained=True)
    if splits == 1:
        return Plan(splits, split, None)
    join = dispatch.Launch(
        tilewright_decode_attention_join, device, (*constants, triton.next_power_of_2(splits), dim), 4, chained=True
    )  # fmt: skip
    return Plan(splits, split, join)


@triton.jit
def _encode(x, CODES: tl.constexpr):
    """Codes of numbers within their range, rounded to nearest, ties to even; those of fp8 as bytes, by integers alone.

    The sum with a power of two has the rounded number in its last bits: so int8, and what fp8 has no exponent for.
    """
    if CODES == _INT8:
        return ((x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000).to(tl.int8)  # 1.5 * 2 ** 23
    else:
        bits = tl.abs(x).to(tl.uint32, bitcast=True)
        rounded = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960  # to 3 of 23 bits; the bias from 127 to 7
        small = (tl.abs(x) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000  # in units of 2 ** -9
        sign = (x.to(tl.uint32, bitcast=True) >> 24) & 0x80
        return (tl.where(bits < 0x3C800000, small, rounded) | sign).to(tl.uint8)  # below 2 ** -6


@triton.jit
def _turn(
    source, target, scales, at, cosine, sine, dim, head_there, HALF: tl.constexpr, SIZE: tl.constexpr,
    CODES: tl.constexpr,
):  # fmt: skip
    """Turn heads, or copy them where HALF is 0: `dim` then counts all of a head, and otherwise its pairs.

    As codes they have their scale at `scales + at`.
    """
    there = head_there & (dim < SIZE)
    first = tl.load(source + dim, there, 0.0)
    x = first.to(tl.float32)
    y = x
    if HALF > 0:
        second = tl.load(source + HALF + dim, there, 0.0).to(tl.float32)
        y = second * cosine + x * sine
        x = x * cosine - second * sine
    if CODES == 0:
        tl.store(target + dim, x.to(first.dtype), there)
        if HALF > 0:
            tl.store(target + HALF + dim, y.to(first.dtype), there)
    else:
        x, y = tl.where(there, x, 0.0), tl.where(there, y, 0.0)
        most = tl.maximum(tl.max(tl.abs(x), 1), tl.max(tl.abs(y), 1))
        most += tl.sum((x + y) * 0.0, 1)  # NaN where one is NaN or Inf, which a maximum leaves out
        scale = tl.div_rn(most, 127.0 if CODES == _INT8 else 448.0)[:, None]
        scale = tl.where(scale < 1.1754943508222875e-38, 1.0, scale)  # the smallest normal float32
        tl.store(scales + at, scale, head_there)
        tl.store(target + dim, _encode(tl.div_rn(x, scale + tl.zeros_like(x)), CODES), there)
        if HALF > 0:
            tl.store(target + HALF + dim, _encode(tl.div_rn(y, scale + tl.zeros_like(y)), CODES), there)


@triton.jit(
    do_not_specialize=[
        "tokens", "capacity", "positions", "q_batch", "q_token", "q_head", "k_batch", "k_token", "k_head", "v_batch",
        "v_token", "v_head", "keys_batch", "keys_head", "keys_token", "values_batch", "values_head", "values_token",
    ]
)  # fmt: skip
def tilewright_decode_attention_append(
    q, k, v, out, keys, values, before, cos, sin, k_scale, v_scale,
    tokens: tl.int64, capacity: tl.int64, positions: tl.int64,
    q_batch: tl.int64, q_token: tl.int64, q_head: tl.int64, k_batch: tl.int64, k_token: tl.int64, k_head: tl.int64,
    v_batch: tl.int64, v_token: tl.int64, v_head: tl.int64,
    keys_batch: tl.int64, keys_head: tl.int64, keys_token: tl.int64,
    values_batch: tl.int64, values_head: tl.int64, values_token: tl.int64,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    DIM: tl.constexpr, GROUP: tl.constexpr, CODES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Turned q into `out`, turned k into `keys`, v into `values`; a place that the cache does not have is left out."""
    let_next_begin(PDL)
    wait_for_previous(PDL)
    Q_GROUPS: tl.constexpr = (HEADS + GROUP - 1) // GROUP
    K_GROUPS: tl.constexpr = (KV_HEADS + GROUP - 1) // GROUP
    group = tl.program_id(0) % (Q_GROUPS + 2 * K_GROUPS)
    place = (tl.program_id(0) // (Q_GROUPS + 2 * K_GROUPS)).to(tl.int64)
    batch, token = place // tokens, place % tokens
    position = tl.load(before + batch + tl.zeros([1, 1], tl.int64)).to(tl.int64) + token
    inside = (position >= 0) & (position < capacity)
    pair = tl.arange(0, BLOCK)[None, :]
    SIZE: tl.constexpr = HALF if HALF > 0 else HEAD_DIM
    cosine = 0.0
    sine = 0.0
    if HALF > 0:
        known = (pair < HALF) & (position >= 0) & (position < positions)
        cosine = tl.load(cos + position * HALF + pair, known, float("nan")).to(tl.float32)
        sine = tl.load(sin + position * HALF + pair, known, float("nan")).to(tl.float32)
    # What the branches write to differs in type, and a name has one type in all of them.
    if group < Q_GROUPS:
        head = (group * GROUP + tl.arange(0, GROUP)).to(tl.int64)[:, None]
        source = q + batch * q_batch + token * q_token + head * q_head
        turned = out + (place * HEADS + head) * HEAD_DIM
        _turn(source, turned, None, 0, cosine, sine, pair, head < HEADS, HALF, SIZE, 0)
    elif group < Q_GROUPS + K_GROUPS:
        head = ((group - Q_GROUPS) * GROUP + tl.arange(0, GROUP)).to(tl.int64)[:, None]
        source = k + batch * k_batch + token * k_token + head * k_head
        new_key = keys + batch * keys_batch + position * keys_token + head * keys_head
        at = (batch * KV_HEADS + head) * capacity + position
        _turn(source, new_key, k_scale, at, cosine, sine, pair, (head < KV_HEADS) & inside, HALF, SIZE, CODES)
    else:
        head = ((group - Q_GROUPS - K_GROUPS) * GROUP + tl.arange(0, GROUP)).to(tl.int64)[:, None]
        dim = tl.arange(0, DIM)[None, :]
        source = v + batch * v_batch + token * v_token + head * v_head
        new_value = values + batch * values_batch + position * values_token + head * values_head
        at = (batch * KV_HEADS + head) * capacity + position
        _turn(source, new_value, v_scale, at, 0.0, 0.0, dim, (head < KV_HEADS) & inside, 0, HEAD_DIM, CODES)


@functools.cache
def append_launch(
    device: torch.device, dtypes: tuple[torch.dtype | None, ...], aligned: tuple[bool, ...], heads: int, kv_heads: int,
    head_dim: int,
) -> tuple[int, dispatch.Launch]:  # fmt: skip
    """(programs of a token, the kernel).

    Of the `dtypes` of q, the cache, `before` and the tables the last may be None: q stays as it is and is left out.
    `aligned` says which tensors begin at a multiple of 16 bytes, which Triton compiles for.
    """
    assert dtypes[1] is not None
    half = 0 if dtypes[-1] is None else head_dim // 2
    dim = triton.next_power_of_2(head_dim)
    group = min(max(1, _APPENDED // dim), triton.next_power_of_2(kv_heads))
    heads = heads if half else 0
    block = triton.next_power_of_2(half) if half else dim
    constants = (heads, kv_heads, head_dim, half, block, dim, group, CODES.get(dtypes[1], 0))
    programs = triton.cdiv(heads, group) + 2 * triton.cdiv(kv_heads, group)
    return programs, dispatch.Launch(tilewright_decode_attention_append, device, constants, 4, chained=True)
