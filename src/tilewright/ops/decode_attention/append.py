"""New keys and values into a cache, behind those that are there, and rotary positions on the way: one launch.

    keys[before + t] = turned k[t]        values[before + t] = v[t]        result[t] = turned q[t]

Token t of a sequence has position before + t, and is turned by that row of the tables as `rope` does it. How many
tokens are there is on the device, so a captured graph serves every step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewright.runtime import dispatch, paths

_NAME = "append_to_cache"


def reference(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, before: Tensor, cos: Tensor | None = None,
    sin: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The same in plain PyTorch: the definition."""
    places = before[:, None].long() + torch.arange(q.shape[1], device=q.device)
    if cos is not None and sin is not None:
        cosine, sine = (table[places][:, :, None].to(dispatch.compute_dtype(q)) for table in (cos, sin))
        q, k = (_turned(x, cosine, sine) for x in (q, k))
    rows = torch.arange(len(q), device=q.device)[:, None]
    keys[rows, :, places] = k
    values[rows, :, places] = v
    return q


def _turned(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.to(cosine.dtype).chunk(2, -1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1).to(x.dtype)


def _launch(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, before: Tensor, cos: Tensor | None,
    sin: Tensor | None,
) -> Tensor:  # fmt: skip
    """Start the kernel; without tables what it returns is empty."""
    from tilewright.ops.decode_attention import kernels

    batch, tokens, heads, head_dim = q.shape
    out = torch.empty(0 if cos is None else q.shape, dtype=q.dtype, device=q.device)
    if not k.numel():
        return out
    q, k, v = (x if x.stride(-1) == 1 and not x.is_neg() else x.resolve_neg().contiguous() for x in (q, k, v))
    before, cos, sin = dispatch.packed((before, cos, sin))
    moved = (q, k, v, keys, values)
    aligned = tuple([x.data_ptr() % 16 == 0 for x in moved])
    programs, launch = kernels.append_launch(
        q.device, dispatch.dtypes((q, before, cos)), aligned, heads, k.shape[2], head_dim
    )
    strides = [stride for x in moved for stride in x.stride()[:3]]
    tensors = (q, k, v, out, keys, values, before, cos, sin)
    sizes = (tokens, keys.shape[2], 0 if cos is None else len(cos))
    launch((programs * batch * tokens, 1), tensors, (*sizes, *strides))
    return out


_registered = torch.library.custom_op(
    f"tilewright::{_NAME}", _launch, mutates_args=("keys", "values"),
    schema="(Tensor q, Tensor k, Tensor v, Tensor(a!) keys, Tensor(b!) values, Tensor before, Tensor? cos, Tensor? sin)"
    " -> Tensor",
)  # fmt: skip


@dispatch.fake_of(_registered)
def _fake(q: Any, k: Any, v: Any, keys: Any, values: Any, before: Any, cos: Any, sin: Any) -> Any:
    return q.new_empty(0) if cos is None else q.new_empty(q.shape)


def append_to_cache(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, before: Tensor, cos: Tensor | None = None,
    sin: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Write the keys and values of new tokens into a cache, and return the queries; turned, where there are tables.

    Args:
        q: ``(batch, tokens, heads, head_dim)``, in bfloat16, float16, float32 or float64.
        k, v: ``(batch, tokens, kv_heads, head_dim)``.
        keys, values: ``(batch, kv_heads, capacity, head_dim)``, the cache, whose last stride is 1, with
            room for the tokens.
        before: ``(batch,)``, int32: how many tokens of each row are there.
        cos, sin: ``(positions, head_dim / 2)``, as `rope_tables` makes them; left out, nothing is turned.

    Returns:
        q, or the turned q, which is contiguous.

    There is no gradient: call it under ``torch.no_grad()``.

    >>> import torch
    >>> q, keys, values = torch.randn(1, 2, 4, 8), torch.zeros(1, 2, 16, 8), torch.zeros(1, 2, 16, 8)
    >>> k = torch.ones(1, 2, 2, 8)
    >>> _ = append_to_cache(q, k, 2 * k, keys, values, torch.tensor([3], dtype=torch.int32))
    >>> keys[0, 0, :6, 0].tolist(), values[0, 1, 4, 0].item()
    ([0.0, 0.0, 0.0, 1.0, 1.0, 0.0], 2.0)
    """
    _check(q, k, v, keys, values, before, cos, sin)
    if q.dtype == torch.float64:
        paths.note(_NAME, paths.REFERENCE, "the kernel has no float64")
        return reference(q, k, v, keys, values, before, cos, sin)
    path = paths.choose(_NAME, q, k, v, keys, values, before, cos, sin)
    if path == paths.REFERENCE:
        return reference(q, k, v, keys, values, before, cos, sin)
    run = _launch if path == paths.KERNEL else _registered
    turned: Tensor = run(q, k, v, keys, values, before, cos, sin)
    return q if cos is None else turned


def _check(q: Any, k: Any, v: Any, keys: Any, values: Any, before: Any, cos: Any, sin: Any) -> None:
    for name, x in (("q", q), ("k", k), ("v", v), ("keys", keys), ("values", values)):
        dispatch.check_tensor(_NAME, name, x)
        if x.ndim != 4 or x.dtype != q.dtype or x.device != q.device:
            raise ValueError(f"{_NAME}: {name} must have 4 dimensions, and the dtype and device of q; convert it.")
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{_NAME}: {name} requires a gradient and there is none; call it under torch.no_grad().")
    batch, tokens, _, head_dim = q.shape
    kv_heads, capacity = keys.shape[1:3]
    dispatch.check_tensor(_NAME, "k", k, torch.Size((batch, tokens, kv_heads, head_dim)), q)
    dispatch.check_tensor(_NAME, "v", v, k.shape, q)
    for name, x in (("keys", keys), ("values", values)):
        dispatch.check_tensor(_NAME, name, x, torch.Size((batch, kv_heads, capacity, head_dim)), q)
        if x.stride(-1) != 1 and head_dim > 1:
            raise ValueError(f"{_NAME}: the last dimension of {name} has no stride of 1; make the cache contiguous.")
    if tokens > capacity:
        raise ValueError(f"{_NAME}: {tokens} tokens do not fit a cache of {capacity}; give a longer one.")
    if not isinstance(before, Tensor) or before.dtype != torch.int32 or before.shape != (batch,):
        raise ValueError(f"{_NAME}: before must be an int32 tensor of shape ({batch},).")
    if before.device != q.device:
        raise ValueError(f"{_NAME}: before is on {before.device}, but q on {q.device}; move one of them.")
    if (cos is None) != (sin is None):
        raise ValueError(f"{_NAME}: give both cos and sin, or neither.")
    if cos is None:
        return
    if head_dim % 2:
        raise ValueError(f"{_NAME}: head_dim is {head_dim}; to be turned it must be even.")
    for name, x in (("cos", cos), ("sin", sin)):
        dispatch.check_tensor(_NAME, name, x)
        if x.ndim != 2 or x.shape != (len(cos), head_dim // 2) or x.dtype != cos.dtype or x.device != q.device:
            raise ValueError(
                f"{_NAME}: {name} must be (positions, {head_dim // 2}), in one dtype and on the device of q."
            )
