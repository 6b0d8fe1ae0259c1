"""Attention of the newest tokens of each sequence over a KV cache, which splits the context over the whole GPU.

    out[t] = sum over the keys j < length - tokens + 1 + t of softmax(scale * q[t] . k[j]) v[j]

The newest `tokens` queries of a sequence see every key up to their own. `length`, how many keys of the cache are there,
is on the device: the launch is the same at every step, so that a captured graph serves them all, and what lies behind
the length is not read.

At batch 1 there are fewer heads of keys than multiprocessors. So each head's keys are split into up to SPLITS parts; a
program computes one part for all queries that share the head, and a second kernel joins the parts in their order: the
same bits on every run. There is no gradient, and nothing is saved.

A cache of 8 bits, int8 or fp8 with one scale for each token and head, is drawn in `eight_bits.py`; codes are unpacked
in registers, and attention is computed as over the numbers that they stand for.

Floor at 2 bytes an element: keys and values are read once, 4 bytes for each element of a key, and of 8 bits 2 bytes and
their share of 8 bytes of scales. Queries and results are of a lower order.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from tilewright.ops.decode_attention import eight_bits
from tilewright.plan.cost import decode_attention as cost
from tilewright.runtime import dispatch, paths, register

__all__ = ["cost", "decode_attention", "reference"]

_NAME = "decode_attention"
_WIDEST = 256  # of a head
_MOST_ROWS = 128  # queries that share a head of keys: tokens x heads


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor, k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None, *, scale: float | None = None,
) -> torch.Tensor:  # fmt: skip
    """The same in plain PyTorch: the definition."""
    _, tokens, heads, head_dim = q.shape
    dtype = dispatch.compute_dtype(q)
    if q.device.type == "cpu" and not torch.compiler.is_compiling() and lengths.numel():
        longest = max(0, int(lengths.max()))  # nobody sees those behind it
        k, v = k[:, :, :longest], v[:, :, :longest]
        k_scale, v_scale = (x if x is None else x[:, :, :longest] for x in (k_scale, v_scale))
    if k_scale is not None and v_scale is not None:
        k, v = eight_bits.dequantize(k, k_scale, dtype), eight_bits.dequantize(v, v_scale, dtype)
    result, group = q.dtype, heads // k.shape[1]
    q = q.to(dtype).transpose(1, 2).unflatten(1, (-1, group))
    scores = (q @ k.to(dtype)[:, :, None].transpose(-1, -2)) * (head_dim**-0.5 if scale is None else scale)
    places = torch.arange(tokens, device=q.device) - tokens + lengths[:, None]
    seen = torch.arange(k.shape[2], device=q.device) <= places[..., None]
    seen = seen[:, None, None]
    weights = scores.masked_fill(~seen, -math.inf).softmax(-1).masked_fill(~seen, 0.0)
    values = v.to(dtype)[:, :, None].masked_fill(~seen.any(-2, keepdim=True).transpose(-1, -2), 0.0)
    return (weights @ values).flatten(1, 2).transpose(1, 2).to(result).contiguous()


class Inputs(NamedTuple):
    """The arguments of a call."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    lengths: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    scale: float


def _walkable(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 and not x.is_neg() else x.resolve_neg().clone(memory_format=torch.contiguous_format)


def _launch(inputs: Inputs) -> torch.Tensor:
    q, k, v = (_walkable(x) for x in inputs[:3])
    (lengths,) = dispatch.packed((inputs.lengths,))
    batch, tokens, heads, head_dim = q.shape
    kv_heads, capacity = k.shape[1], k.shape[2]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not out.numel():
        return out
    from tilewright.ops.decode_attention import kernels

    queries, keys = q.stride()[:3], (*k.stride()[:3], *v.stride()[:3])
    units = math.gcd(16 // q.element_size(), *queries), math.gcd(16 // k.element_size(), *keys)
    plan = kernels.plan(
        q.device, (q.dtype, k.dtype), tuple([x.data_ptr() % 16 == 0 for x in (q, k, v)]), batch, tokens, heads,
        kv_heads, head_dim, capacity, units,
    )  # fmt: skip
    k, v = eight_bits.as_bytes(k), eight_bits.as_bytes(v)
    partial = state = None
    if plan.join is not None:
        partial = q.new_empty(
            (batch * kv_heads * plan.splits, tokens * heads // kv_heads, head_dim), dtype=torch.float32
        )
        state = q.new_empty((2, batch * kv_heads * plan.splits, tokens * heads // kv_heads), dtype=torch.float32)
    plan.split(
        (plan.splits * kv_heads * batch, 1),
        (q, k, v, *dispatch.packed((inputs.k_scale, inputs.v_scale)), lengths, None if plan.join else out, partial,
         state),
        (inputs.scale * math.log2(math.e), capacity, batch * kv_heads * plan.splits * tokens * heads // kv_heads,
         *queries, *keys),
    )  # fmt: skip
    if plan.join is not None:
        rows = batch * tokens * heads
        plan.join((rows, 1), (partial, state, out), (batch * kv_heads * plan.splits * tokens * heads // kv_heads,))
    return out


def _fake(inputs: Inputs) -> torch.Tensor:
    return torch.empty(inputs.q.shape, dtype=inputs.q.dtype, device=inputs.q.device)


_OP = register.Op(_NAME, _launch, _fake)
_registered = _OP.registered


def decode_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor, *, k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None, scale: float | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attention of the newest tokens over a KV cache.

    Args:
        q: ``(batch, tokens, heads, head_dim)``, in bfloat16, float16 or float32 (float64 runs the reference); head_dim
            from 1 to 256. Tokens times the heads that share one of keys are at most 128.
        k, v: ``(batch, kv_heads, capacity, head_dim)``, the cache, in the dtype of q, or both int8 or float8_e4m3fn
            with scales; heads divide by kv_heads. Any strides as long as the last is 1, else they are copied.
        lengths: ``(batch,)``, int32: how many keys of each row are there, those of the `tokens` included. What lies
            behind them is not read. A length beyond the capacity counts as the capacity.
        k_scale, v_scale: ``(batch, kv_heads, capacity)``, float32 and contiguous, of a cache of 8 bits, as
            `append_to_cache` writes them: what a code stands for is the code times the scale.
        scale: of the scores; left out, ``head_dim ** -0.5``.

    Returns:
        ``(batch, tokens, heads, head_dim)`` in the dtype of q, contiguous; zeros for a query that sees no key.

    There is no gradient: a call that would need one is refused.

    >>> import torch
    >>> q, cache = torch.randn(2, 1, 4, 8), torch.randn(2, 2, 32, 8)
    >>> out = decode_attention(q, cache, cache, torch.tensor([1, 20], dtype=torch.int32))
    >>> out.shape, torch.allclose(out[0, 0, 1], cache[0, 0, 0], atol=1e-6)  # who sees one key gets its value
    (torch.Size([2, 1, 4, 8]), True)
    """
    _check(q, k, v, lengths, k_scale, v_scale)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if q.dtype == torch.float64:
        paths.note(_NAME, paths.REFERENCE, "the kernel has no float64")
        return reference(q, k, v, lengths, k_scale, v_scale, scale=scale)
    path = paths.choose(_NAME, q, k, v, lengths, k_scale, v_scale)
    if path == paths.REFERENCE:
        return reference(q, k, v, lengths, k_scale, v_scale, scale=scale)
    inputs = Inputs(q, k, v, lengths, k_scale, v_scale, scale)
    return _launch(inputs) if path == paths.KERNEL else _OP.call_registered(inputs)


def _check(q: Any, k: Any, v: Any, lengths: Any, k_scale: Any, v_scale: Any) -> None:
    for name, x, order in (
        ("q", q, "(batch, tokens, heads, head_dim)"), ("k", k, "(batch, kv_heads, capacity, head_dim)"),
        ("v", v, "(batch, kv_heads, capacity, head_dim)"),
    ):  # fmt: skip
        eight = name != "q" and isinstance(x, torch.Tensor) and x.dtype in eight_bits.LARGEST
        if not eight:
            dispatch.check_tensor(_NAME, name, x)
        if x.ndim != 4:
            raise ValueError(f"{_NAME}: {name} has shape {tuple(x.shape)}, but {order} is needed.")
        if x.dtype != q.dtype and not eight:
            raise TypeError(f"{_NAME}: {name} is {x.dtype}, but q is {q.dtype}; convert one of them.")
        if x.device != q.device:
            raise ValueError(f"{_NAME}: {name} is on {x.device}, but q on {q.device}; move one of them.")
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{_NAME}: {name} requires a gradient and there is none; call it under torch.no_grad().")
    batch, tokens, heads, head_dim = q.shape
    if not 1 <= head_dim <= _WIDEST:
        raise ValueError(f"{_NAME}: head_dim is {head_dim}; it must be from 1 to {_WIDEST}.")
    if k.shape != v.shape:
        raise ValueError(f"{_NAME}: k has shape {tuple(k.shape)}, but v {tuple(v.shape)}; make them equal.")
    if k.dtype != v.dtype:
        raise TypeError(f"{_NAME}: k is {k.dtype}, but v is {v.dtype}; give both in one format.")
    eight_bits.check_scale(_NAME, "k", k_scale, k)
    eight_bits.check_scale(_NAME, "v", v_scale, v)
    if (k.shape[0], k.shape[3]) != (batch, head_dim):
        raise ValueError(
            f"{_NAME}: k has shape {tuple(k.shape)} and q {tuple(q.shape)}; make batch and head_dim equal."
        )
    if not k.shape[1] or heads % k.shape[1]:
        raise ValueError(f"{_NAME}: {heads} heads do not divide into {k.shape[1]} of keys.")
    if tokens * heads // k.shape[1] > _MOST_ROWS:
        raise ValueError(
            f"{_NAME}: {tokens} tokens of {heads // k.shape[1]} heads share a head of keys, {_MOST_ROWS} queries at "
            "most may; give fewer tokens at a time."
        )
    if not isinstance(lengths, torch.Tensor) or lengths.dtype != torch.int32:
        kind = lengths.dtype if isinstance(lengths, torch.Tensor) else type(lengths).__name__
        raise TypeError(f"{_NAME}: lengths are {kind}; give an int32 tensor.")
    if lengths.shape != (batch,):
        raise ValueError(f"{_NAME}: lengths have shape {tuple(lengths.shape)}, but ({batch},) is needed.")
    if lengths.device != q.device:
        raise ValueError(f"{_NAME}: lengths are on {lengths.device}, but q on {q.device}; move one of them.")
