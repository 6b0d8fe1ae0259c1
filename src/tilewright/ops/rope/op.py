"""Rotary position embeddings of queries and keys, in one launch and one pass over memory.

    first'  = first * cos[p] - second * sin[p]          for each pair (first, second) of a token at position p
    second' = second * cos[p] + first * sin[p]

The pairs are (i, i + rotary_dim / 2), half-rotated as in Llama and NeoX, or (2i, 2i + 1), interleaved as in GPT-J.
What lies beyond rotary_dim passes through.

Saved for backward: cos, sin and the position ids, nothing of q and k. Backward is the inverse rotation, the same kernel
with the sine negated, and so has derivatives of every order.

Floor at 2 bytes an element, forward and backward alike: q and k are read once and written once, 4 bytes. The tables,
a row of which serves all heads of a token, are of a lower order.
"""

from __future__ import annotations

import math
import os
from typing import Any, NamedTuple

import torch

from tilewright.plan.cost import rope as cost
from tilewright.runtime import dispatch, paths, register

__all__ = ["cost", "reference", "rope", "rope_tables"]

_NAME = "rope"
_WIDEST = 8192


def rope_tables(
    positions: int,
    rotary_dim: int,
    *,
    base: float = 10000.0,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) of ``position * base ** (-2 i / rotary_dim)``, each of shape ``(positions, rotary_dim / 2)``.

    Computed in float64 and rounded once: a float32 angle is off by a thirtieth of a radian at position 1,000,000.

    >>> cos, sin = rope_tables(4, 8)
    >>> cos.shape, cos[0].tolist()
    (torch.Size([4, 4]), [1.0, 1.0, 1.0, 1.0])
    """
    if not isinstance(positions, int) or positions < 0:
        raise ValueError(f"rope_tables: positions is {positions!r}; give how many there are.")
    if not isinstance(rotary_dim, int) or rotary_dim < 2 or rotary_dim % 2:
        raise ValueError(f"rope_tables: rotary_dim is {rotary_dim!r}; give an even number of at least 2.")
    if not isinstance(base, (int, float)) or not 0.0 < base < float("inf"):
        raise ValueError(f"rope_tables: base is {base!r}; give a number above 0.")
    exponents = torch.arange(0, rotary_dim, 2, device=device, dtype=torch.float64) / rotary_dim
    angles = torch.outer(torch.arange(positions, device=device, dtype=torch.float64), float(base) ** -exponents)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def reference(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    position_ids: torch.Tensor | None = None,
    interleaved: bool = False,
    heads_first: bool = False,
) -> Any:
    """(q', k'), or q' where k is None, in plain PyTorch: the definition."""
    sequence = q.shape[2 if heads_first else 1]
    rows = []
    for table in (cos, sin):
        table = table.to(dispatch.compute_dtype(q))
        if position_ids is None:
            row = table[None, :sequence]
        else:
            known = (position_ids >= 0) & (position_ids < len(table))
            row = torch.where(known[..., None], table[torch.where(known, position_ids, 0)], float("nan"))
        rows.append(row.unsqueeze(1 if heads_first else 2))
    turned = [None if x is None else _turn(x, rows[0], rows[1], interleaved) for x in (q, k)]
    return turned[0] if k is None else (turned[0], turned[1])


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    rotary_dim = 2 * cos.shape[-1]
    pairs = x[..., :rotary_dim].to(cos.dtype)
    first, second = (pairs[..., 0::2], pairs[..., 1::2]) if interleaved else pairs.chunk(2, -1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    joined = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat((joined.to(x.dtype), x[..., rotary_dim:]), -1)


def _is_walkable(x: torch.Tensor) -> bool:
    """Whether the kernel can take the tensor as it lies in memory."""
    return x.stride(3) == 1 and not x.is_neg()


def _empty_like(x: torch.Tensor, heads_first: bool) -> torch.Tensor:
    """Contiguous as (batch, sequence, heads, head_dim), unless x has, heads first, those further apart than tokens."""
    _, heads, sequence, head_dim = x.shape
    if heads_first and x.stride(1) < x.stride(2):
        strides = (sequence * heads * head_dim, head_dim, heads * head_dim, 1)
        return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _strides(x: torch.Tensor | None, heads_first: bool) -> tuple[int, ...]:
    """Return the strides of batch, token and head."""
    if x is None:
        return 0, 0, 0
    batch, outer, inner, _ = x.stride()
    return (batch, inner, outer) if heads_first else (batch, outer, inner)


class Inputs(NamedTuple):
    """The arguments of a rotation; `inplace` lets the results take the memory of q and k, and is for `rope` alone."""

    q: torch.Tensor
    k: torch.Tensor | None
    cos: torch.Tensor
    sin: torch.Tensor
    position_ids: torch.Tensor | None
    interleaved: bool
    heads_first: bool
    inverse: bool
    inplace: bool = False


def _rotate(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(q', k'), or q and k themselves in place. Forward and, with `inverse`, backward."""
    q, k, cos, sin, position_ids, interleaved, heads_first, inverse, inplace = inputs
    outputs = (q, k) if inplace else tuple(None if x is None else _empty_like(x, heads_first) for x in (q, k))
    walked = [
        x if x is None or _is_walkable(x) else x.resolve_neg().clone(memory_format=torch.contiguous_format)
        for x in (q, k)
    ]
    tensors = (*walked, *outputs, *dispatch.packed((cos, sin, position_ids)))
    batch, sequence, q_heads, head_dim = q.shape
    k_heads = 0 if k is None else k.shape[1 if heads_first else 2]
    if heads_first:
        sequence, q_heads = q_heads, sequence
    if batch * sequence * (q_heads + k_heads):
        from tilewright.ops.rope import kernels

        strides = [stride for x in tensors[:4] for stride in _strides(x, heads_first)]
        tokens, groups, launch = kernels.rotate_launch(
            q.device, dispatch.dtypes(tensors), tuple([x is None or x.data_ptr() % 16 == 0 for x in walked]),
            q_heads, k_heads, head_dim, cos.shape[1], math.gcd(16 // q.element_size(), *strides), interleaved, inplace,
        )  # fmt: skip
        blocks = -(-sequence // tokens)
        launch((batch * blocks * groups, 1), tensors, (sequence, blocks, len(cos), -1.0 if inverse else 1.0, *strides))
    if inplace:
        return dispatch.claim_storage(q, q), dispatch.claim_storage(k, k)  # type: ignore[return-value]
    return outputs[0], outputs[1]  # type: ignore[return-value]


def _fake(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor | None]:
    q, k, heads_first = inputs.q, inputs.k, inputs.heads_first
    return _empty_like(q, heads_first), None if k is None else _empty_like(k, heads_first)


def _save(ctx: Any, inputs: Inputs, output: Any) -> None:
    ctx.save_for_backward(inputs.cos, inputs.sin, inputs.position_ids)
    ctx.options = inputs.interleaved, inputs.heads_first, inputs.inverse
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, rotate: Any, dq: Any, dk: Any) -> tuple[Any, ...]:
    """The gradients of q and k: the upstream ones, rotated the other way round."""
    needs_q, needs_k = ctx.needs_input_grad[:2]
    if not needs_q:
        dq = None
    if dk is not None and not needs_k:
        dk = None
    if dq is None and dk is None:
        return ()
    interleaved, heads_first, inverse = ctx.options
    rest = (*ctx.saved_tensors, interleaved, heads_first, not inverse)
    if dq is None:
        return None, rotate(Inputs(dk, None, *rest))[0]
    turned_q, turned_k = rotate(Inputs(dq, dk, *rest))
    return turned_q, None if dk is None else turned_k


_OP = register.Op(_NAME, _rotate, _fake)
_eager, _registered = _OP.differentiate(_save, _differentiate), _OP.registered


def rope(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    position_ids: torch.Tensor | None = None,
    interleaved: bool = False,
    heads_first: bool = False,
    inplace: bool = False,
) -> Any:
    """Rotary position embeddings of queries and keys, fused.

    Args:
        q: ``(batch, sequence, heads, head_dim)``, any floating dtype, any even head_dim up to 8192. A view, such as a
            part of packed queries, keys and values, is not copied as long as its last dimension has stride 1.
        k: the same with its own number of heads, or None to rotate q alone.
        cos, sin: ``(positions, rotary_dim / 2)`` in float32 or q's dtype, as `rope_tables` makes them. The first
            rotary_dim elements of each head are rotated, the others pass through. They get no gradient.
        position_ids: ``(batch, sequence)``, int64, each token's row of the tables; left out, 0 to sequence - 1.
        interleaved: pair neighbours, ``(2 i, 2 i + 1)``, as GPT-J does, not ``(i, i + rotary_dim / 2)`` as Llama does.
        heads_first: q and k are ``(batch, heads, sequence, head_dim)``.
        inplace: let the results take the memory of q and k, which must not be used again. A compiler decides for
            itself what is in place.

    Returns:
        ``(q', k')``, or ``q'`` alone where k is None, in the dtype of q; arithmetic is in float32 (float64 for
        float64). Contiguous as ``(batch, sequence, heads, head_dim)``, unless they come heads first with tokens closer
        together in memory than heads, which is kept.

    A position outside of the tables gives NaN; with ``TILEWRIGHT_DEBUG=1`` in the environment, an error.

    >>> import torch
    >>> q, k = torch.randn(2, 5, 4, 8), torch.randn(2, 5, 1, 8)
    >>> cos, sin = rope_tables(16, 8)
    >>> turned_q, turned_k = rope(q, k, cos, sin)
    >>> torch.allclose(turned_q.norm(dim=-1), q.norm(dim=-1)), torch.equal(turned_k[:, 0], k[:, 0])
    (True, True)
    """
    _check(q, k, cos, sin, position_ids, heads_first, inplace)
    path = paths.choose(_NAME, q, k, cos, sin, position_ids)
    if path == paths.REFERENCE:
        return reference(
            q, k, cos, sin, position_ids=position_ids, interleaved=interleaved, heads_first=heads_first
        )  # fmt: skip
    inputs = Inputs(q, k, cos, sin, position_ids, interleaved, heads_first, inverse=False, inplace=inplace)
    turned_q, turned_k = _eager(*inputs) if path == paths.KERNEL else _OP.call_registered(inputs)
    return turned_q if k is None else (turned_q, turned_k)


def _check(q: Any, k: Any, cos: Any, sin: Any, position_ids: Any, heads_first: bool, inplace: bool) -> None:
    order = "(batch, heads, sequence, head_dim)" if heads_first else "(batch, sequence, heads, head_dim)"
    dispatch.check_tensor(_NAME, "q", q)
    if q.ndim != 4:
        raise ValueError(f"{_NAME}: q has shape {tuple(q.shape)}, but {order} is needed.")
    batch, sequence, head_dim = q.shape[0], q.shape[2 if heads_first else 1], q.shape[3]
    if not 2 <= head_dim <= _WIDEST or head_dim % 2:
        raise ValueError(f"{_NAME}: head_dim is {head_dim}; it must be an even number from 2 to {_WIDEST}.")
    if k is not None:
        dispatch.check_tensor(_NAME, "k", k)
        if k.ndim != 4 or (k.shape[0], k.shape[2 if heads_first else 1], k.shape[3]) != (batch, sequence, head_dim):
            raise ValueError(
                f"{_NAME}: k has shape {tuple(k.shape)} and q {tuple(q.shape)}; {order} may differ in heads alone."
            )
        if k.dtype != q.dtype:
            raise TypeError(f"{_NAME}: k is {k.dtype}, but q is {q.dtype}; convert one of them.")
        if k.device != q.device:
            raise ValueError(f"{_NAME}: k is on {k.device}, but q on {q.device}; move one of them.")
    for name, table in (("cos", cos), ("sin", sin)):
        dispatch.check_tensor(_NAME, name, table)
        if table.ndim != 2:
            raise ValueError(
                f"{_NAME}: {name} has shape {tuple(table.shape)}, but (positions, rotary_dim / 2) is needed."
            )
        if table.dtype not in (torch.float32, q.dtype):
            raise TypeError(f"{_NAME}: {name} is {table.dtype}; give it in float32 or in q's dtype, {q.dtype}.")
        if table.device != q.device:
            raise ValueError(f"{_NAME}: {name} is on {table.device}, but q on {q.device}; move one of them.")
        if table.requires_grad:
            raise ValueError(f"{_NAME}: {name} requires a gradient and gets none; detach it.")
    if cos.shape != sin.shape:
        raise ValueError(f"{_NAME}: cos has shape {tuple(cos.shape)}, but sin {tuple(sin.shape)}; make them equal.")
    positions, half = cos.shape
    if not 2 <= 2 * half <= head_dim:
        raise ValueError(f"{_NAME}: cos rotates {2 * half} elements of a head of {head_dim}; rotate 2 to {head_dim}.")
    if position_ids is None:
        if positions < sequence:
            raise ValueError(f"{_NAME}: cos has {positions} positions, fewer than the sequence of {sequence}.")
    else:
        _check_position_ids(position_ids, (batch, sequence), positions, q)
    # A compiler decides for itself what is in place.
    if inplace and not dispatch.is_compiling():
        _check_inplace(q, k)


def _check_position_ids(position_ids: Any, shape: tuple[int, int], positions: int, q: torch.Tensor) -> None:
    if not isinstance(position_ids, torch.Tensor) or position_ids.dtype != torch.int64:
        kind = position_ids.dtype if isinstance(position_ids, torch.Tensor) else type(position_ids).__name__
        raise TypeError(f"{_NAME}: position_ids are {kind}; give an int64 tensor.")
    if position_ids.shape != shape:
        raise ValueError(f"{_NAME}: position_ids have shape {tuple(position_ids.shape)}, but {shape} is needed.")
    if position_ids.device != q.device:
        raise ValueError(f"{_NAME}: position_ids are on {position_ids.device}, but q on {q.device}; move one of them.")
    if positions == 0:
        raise ValueError(f"{_NAME}: cos has no positions; make it as long as the largest position id and one more.")
    if os.environ.get("TILEWRIGHT_DEBUG") == "1" and not dispatch.is_compiling():
        bad = (position_ids < 0) | (position_ids >= positions)
        if bool(bad.any()):
            raise ValueError(f"{_NAME}: position id {position_ids[bad][0].item()} is not in the {positions} of cos.")


def _check_inplace(q: torch.Tensor, k: torch.Tensor | None) -> None:
    for name, x in (("q", q), ("k", k)):
        if x is None:
            continue
        if x.requires_grad and dispatch.is_needed(x):
            raise ValueError(f"{_NAME}: autograd still needs {name}; leave out inplace=True.")
        if x.requires_grad and torch.is_grad_enabled() and _is_one_of_many(x):
            raise ValueError(
                f"{_NAME}: autograd lets no output of unbind, split or chunk, as {name} is, be overwritten; "
                "index the tensor instead, or leave out inplace=True."
            )
        if not _is_walkable(x):
            raise ValueError(f"{_NAME}: the last dimension of {name} has no stride of 1; leave out inplace=True.")
        if any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape, strict=True)):
            raise ValueError(f"{_NAME}: elements of {name} share memory; leave out inplace=True.")
    if k is not None and q.numel() and q.data_ptr() == k.data_ptr():
        raise ValueError(f"{_NAME}: q and k are the same memory; leave out inplace=True.")


def _is_one_of_many(x: torch.Tensor) -> bool:
    """Whether an op that returns several views at once made this view."""
    return x._base is not None and x.grad_fn is not None and len(x.grad_fn._input_metadata) > 1
