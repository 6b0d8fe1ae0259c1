"""The kernel of `rope`, by how it moves the data.

A program takes HEADS heads of q or of k and TOKENS tokens of one sequence, some 4 KiB: both members of every pair are
loaded, turned and stored, once each. One launch does both: the programs of a token's heads, those of q and then those
of k, follow each other, so that all but the first find its cosines and sines in L2.

Tensors may have any strides as long as the last is 1. UNIT is a power of two that divides all of them: with 16 bytes
of elements it lets every thread load and store 16 bytes at a time.

Arithmetic is in COMPUTE, float32 or float64 for float64 input.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from tilewright.runtime import dispatch

_BYTES = 4096  # that a program reads


@triton.jit
def _rows(x, batch, token, head, batch_stride, token_stride, head_stride, UNIT: tl.constexpr):
    """Where the heads of some tokens begin."""
    # The factor UNIT, which a number known at run time only would not show.
    batch_stride = batch_stride // UNIT * UNIT
    token_stride = token_stride // UNIT * UNIT
    head_stride = head_stride // UNIT * UNIT
    return x + batch * batch_stride + (head * head_stride)[:, None, None] + (token * token_stride)[None, :, None]


@triton.jit
def _rotate_heads(
    x, out, cos, sin, position, known, batch, token, inside, group, sign,
    x_batch, x_token, x_head, out_batch, out_token, out_head,
    ALL_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
    BLOCK: tl.constexpr, REST: tl.constexpr, UNIT: tl.constexpr, INTERLEAVED: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """The group-th HEADS heads of the tokens."""
    head = (group * HEADS + tl.arange(0, HEADS)).to(tl.int64)
    there = (head < ALL_HEADS)[:, None, None] & inside[None, :, None]
    source = _rows(x, batch, token, head, x_batch, x_token, x_head, UNIT)
    target = _rows(out, batch, token, head, out_batch, out_token, out_head, UNIT)
    pair = tl.arange(0, BLOCK)[None, None, :]
    # All loads of x before those of cosines and sines, which in part wait for a position.
    if REST > 0:
        rest = 2 * HALF + tl.arange(0, REST)[None, None, :]
        unchanged = tl.load(source + rest, there & (rest < HEAD_DIM))
    if INTERLEAVED:
        both = tl.arange(0, 2 * BLOCK)[None, None, :]
        pairs = tl.load(source + both, there & (both < 2 * HALF))
        first, second = tl.split(tl.reshape(pairs, [HEADS, TOKENS, BLOCK, 2]))
    else:
        first = tl.load(source + pair, there & (pair < HALF))
        second = tl.load(source + HALF + pair, there & (pair < HALF))
    at = position[None, :, None] * HALF + pair
    listed = known[None, :, None] & (pair < HALF)
    # Loaded once a token, for all its heads, they lie in other threads than x and are moved, which is quicker than to
    # load them more often. But where a thread's pairs are as many as elements of 16 bytes, x is what would be moved:
    # then once a head, out of L1.
    if not INTERLEAVED:
        at = tl.broadcast_to(at, [HEADS, TOKENS, BLOCK])
        listed = tl.broadcast_to(listed, [HEADS, TOKENS, BLOCK])
    cosine = tl.load(cos + at, listed, float("nan")).to(COMPUTE)
    sine = tl.load(sin + at, listed, float("nan")).to(COMPUTE) * sign
    first = first.to(COMPUTE)
    second = second.to(COMPUTE)
    turned_first = (first * cosine - second * sine).to(out.dtype.element_ty)
    turned_second = (second * cosine + first * sine).to(out.dtype.element_ty)
    if INTERLEAVED:
        turned = tl.reshape(tl.join(turned_first, turned_second), [HEADS, TOKENS, 2 * BLOCK])
        tl.store(target + both, turned, there & (both < 2 * HALF))
    else:
        tl.store(target + pair, turned_first, there & (pair < HALF))
        tl.store(target + HALF + pair, turned_second, there & (pair < HALF))
    if REST > 0:
        tl.store(target + rest, unchanged, there & (rest < HEAD_DIM))


@triton.jit(
    do_not_specialize=[
        "sequence", "blocks", "positions", "q_batch", "q_token", "q_head", "k_batch", "k_token", "k_head",
        "q_out_batch", "q_out_token", "q_out_head", "k_out_batch", "k_out_token", "k_out_head",
    ]
)  # fmt: skip
def tilewright_rope_rotate(
    q, k, q_out, k_out, cos, sin, position_ids,
    sequence: tl.int64, blocks: tl.int32, positions: tl.int64, sign: tl.float64,
    q_batch: tl.int64, q_token: tl.int64, q_head: tl.int64, k_batch: tl.int64, k_token: tl.int64, k_head: tl.int64,
    q_out_batch: tl.int64, q_out_token: tl.int64, q_out_head: tl.int64,
    k_out_batch: tl.int64, k_out_token: tl.int64, k_out_head: tl.int64,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, TOKENS: tl.constexpr,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, UNIT: tl.constexpr, INTERLEAVED: tl.constexpr,
    DOUBLE: tl.constexpr,
):  # fmt: skip
    """Turn q into q_out and k, where it is not None, into k_out, which may be the same memory.

    `blocks` of TOKENS tokens make a sequence; `sign` is -1 for the inverse. A position outside of the tables gives NaN.
    """
    COMPUTE: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    Q_GROUPS: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    K_GROUPS: tl.constexpr = (K_HEADS + HEADS - 1) // HEADS
    sign = tl.full([], sign, COMPUTE)
    block = tl.program_id(0) // (Q_GROUPS + K_GROUPS)
    group = tl.program_id(0) % (Q_GROUPS + K_GROUPS)
    batch = (block // blocks).to(tl.int64)
    token = (block % blocks).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    inside = token < sequence
    position = token
    if position_ids is not None:
        position = tl.load(position_ids + batch * sequence + token, inside, 0)
    known = inside & (position >= 0) & (position < positions)
    if group < Q_GROUPS:
        _rotate_heads(
            q, q_out, cos, sin, position, known, batch, token, inside, group, sign,
            q_batch, q_token, q_head, q_out_batch, q_out_token, q_out_head,
            Q_HEADS, HEAD_DIM, HALF, TOKENS, HEADS, BLOCK, REST, UNIT, INTERLEAVED, COMPUTE,
        )  # fmt: skip
    elif k is not None:
        _rotate_heads(
            k, k_out, cos, sin, position, known, batch, token, inside, group - Q_GROUPS, sign,
            k_batch, k_token, k_head, k_out_batch, k_out_token, k_out_head,
            K_HEADS, HEAD_DIM, HALF, TOKENS, HEADS, BLOCK, REST, UNIT, INTERLEAVED, COMPUTE,
        )  # fmt: skip


def _power_of_two(n: int) -> int:
    """The smallest power of two that is not below `n`; 0 for 0."""
    return 1 << (n - 1).bit_length() if n else 0


@functools.cache
def rotate_launch(
    device: torch.device, dtypes: tuple[Any, ...], aligned: tuple[bool, ...], q_heads: int, k_heads: int,
    head_dim: int, half: int, unit: int, interleaved: bool, inplace: bool,
) -> tuple[int, int, dispatch.Launch]:  # fmt: skip
    """(tokens of a program, programs that share them, the kernel).

    `aligned` says which of q and k begin at a multiple of 16 bytes, which Triton compiles for. In place, what lies
    beyond the pairs stays where it is.
    """
    block, rest = _power_of_two(half), 0 if inplace else _power_of_two(head_dim - 2 * half)
    width = _power_of_two(head_dim) if rest else 2 * block
    rows = max(1, _BYTES // dtypes[0].itemsize // width)  # tokens x heads of a program
    # Interleaved, a few heads share cosines that are loaded once. Else the most, for few programs to read the same ones
    # from L2. At most a fifth of them do not exist.
    heads = min(4 if interleaved else 32, rows)
    while heads > 1 and 4 * heads * (-(-q_heads // heads) - (-k_heads // heads)) > 5 * (q_heads + k_heads):
        heads //= 2
    tokens, warps = rows // heads, max(4, min(16, rows * width // 1024))
    constants = (q_heads, k_heads, head_dim, half, tokens, heads, block, rest, unit, interleaved)
    launch = dispatch.Launch(tilewright_rope_rotate, device, (*constants, dtypes[0] == torch.float64), warps)
    return tokens, -(-q_heads // heads) - (-k_heads // heads), launch
