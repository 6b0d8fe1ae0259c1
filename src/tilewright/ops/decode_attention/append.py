"""New keys and values into a cache, behind those that are there, and rotary positions on the way: one launch.

    keys[before + t] = turned k[t]        values[before + t] = v[t]        result[t] = turned q[t]

A cache of 8 bits (`eight_bits.py`) gets the codes of its new keys and values, and their scales.

Token t of a sequence has position before + t, and is turned by that row of the tables as `rope` does it. How many
tokens are there is on the device, so a captured graph serves every step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewright.ops.decode_attention import eight_bits
from tilewright.runtime import dispatch, paths

_NAME = "append_to_cache"


def reference(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, before: Tensor, cos: Tensor | None = None,
    sin: Tensor | None = None, k_scale: Tensor | None = None, v_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The same in plain PyTorch: the definition."""
    places = before[:, None].long() + torch.arange(q.shape[1], device=q.device)
    if cos is not None and sin is not None:
        cosine, sine = (table[places][:, :, None].to(dispatch.compute_dtype(q)) for table in (cos, sin))
        turned, k = _turned(q, cosine, sine).to(q.dtype), _turned(k, cosine, sine)
    else:
        turned = q
    rows = torch.arange(len(q), device=q.device)[:, None]
    for x, cache, scale in ((k, keys, k_scale), (v, values, v_scale)):
        if scale is None:
            cache[rows, :, places] = x.to(q.dtype)
        else:  # indexed as bytes: not every device indexes floats of 8 bits
            codes, found = eight_bits.quantize(x, cache.dtype)
            eight_bits.as_bytes(cache)[rows, :, places] = eight_bits.as_bytes(codes)
            scale[rows, :, places] = found
    return turned


def _turned(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.to(cosine.dtype).chunk(2, -1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)


def _launch(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, before: Tensor, cos: Tensor | None,
    sin: Tensor | None, k_scale: Tensor | None = None, v_scale: Tensor | None = None,
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
        q.device, dispatch.dtypes((q, keys, before, cos)), aligned, heads, k.shape[2], head_dim
    )
    strides = [stride for x in moved for stride in x.stride()[:3]]
    cache = eight_bits.as_bytes(keys), eight_bits.as_bytes(values)
    tensors = (q, k, v, out, *cache, before, cos, sin, k_scale, v_scale)
    sizes = (tokens, keys.shape[2], 0 if cos is None else len(cos))
    launch((programs * batch * tokens, 1), tensors, (*sizes, *strides))
    return out


_registered = torch.library.custom_op(
    f"tilewright::{_NAME}", _launch,
    mutates_args=("keys", "values", "k_scale", "v_scale"),
    # Without defaults: torch 2.11 looks for what is written among the arguments, of which those left out are none.
    schema="(Tensor q, Tensor k, Tensor v, Tensor(a!) keys, Tensor(b!) values, Tensor before, Tensor? cos, Tensor? sin,"
    " Tensor(c!)? k_scale, Tensor(d!)? v_scale) -> Tensor",
)  # fmt: skip


@dispatch.fake_of(_registered)
def _fake(q: Any, k: Any, v: Any, keys: Any, values: Any, before: Any, cos: Any, *_: Any) -> Any:
    return q.new_empty(0) if cos is None else q.new_empty(q.shape)


def append_to_cache(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, before: Tensor, cos: Tensor | None = None,
    sin: Tensor | None = None, *, k_scale: Tensor | None = None, v_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Write the keys and values of new tokens into a cache, and return the queries; turned, where there are tables.

    Args:
        q: ``(batch, tokens, heads, head_dim)``, in bfloat16, float16, float32 or float64.
        k, v: ``(batch, tokens, kv_heads, head_dim)``.
        keys, values: ``(batch, kv_heads, capacity, head_dim)``, the cache, whose last stride is 1, with
            room for the tokens; in the dtype of q, or both int8 or float8_e4m3fn.
        before: ``(batch,)``, int32: how many tokens of each row are there.
        cos, sin: ``(positions, head_dim / 2)``, as `rope_tables` makes them; left out, nothing is turned.
        k_scale, v_scale: ``(batch, kv_heads, capacity)``, float32 and contiguous: the scales of a cache of 8
            bits, which are written too.

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
    _check(q, k, v, keys, values, before, cos, sin, k_scale, v_scale)
    if q.dtype == torch.float64:
        paths.note(_NAME, paths.REFERENCE, "the kernel has no float64")
        return reference(q, k, v, keys, values, before, cos, sin, k_scale, v_scale)
    path = paths.choose(_NAME, q, k, v, keys, values, before, cos, sin, k_scale, v_scale)
    if path == paths.REFERENCE:
        return reference(q, k, v, keys, values, before, cos, sin, k_scale, v_scale)
    run = _launch if path == paths.KERNEL else _registered
    turned: Tensor = run(q, k, v, keys, values, before, cos, sin, k_scale, v_scale)
    return q if cos is None else turned


def _check(
    q: Any, k: Any, v: Any, keys: Any, values: Any, before: Any, cos: Any, sin: Any, k_scale: Any, v_scale: Any
) -> None:
    for name, x in (("q", q), ("k", k), ("v", v), ("keys", keys), ("values", values)):
        eight = name in ("keys", "values") and isinstance(x, Tensor) and x.dtype in eight_bits.LARGEST
        if not eight:
            dispatch.check_tensor(_NAME, name, x)
        if x.ndim != 4 or (x.dtype != q.dtype and not eight) or x.device != q.device:
            raise ValueError(f"{_NAME}: {name} must have 4 dimensions, and the dtype and device of q; convert it.")
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{_NAME}: {name} requires a gradient and there is none; call it under torch.no_grad().")
    batch, tokens, _, head_dim = q.shape
    kv_heads, capacity = keys.shape[1:3]
    dispatch.check_tensor(_NAME, "k", k, torch.Size((batch, tokens, kv_heads, head_dim)), q)
    dispatch.check_tensor(_NAME, "v", v, k.shape, q)
    for name, x, scale in (("keys", keys, k_scale), ("values", values, v_scale)):
        if x.shape != (batch, kv_heads, capacity, head_dim):
            raise ValueError(
                f"{_NAME}: {name} has shape {tuple(x.shape)}, but {(batch, kv_heads, capacity, head_dim)} is needed."
            )
        if x.dtype != keys.dtype:
            raise ValueError(f"{_NAME}: keys are {keys.dtype} and values {x.dtype}; give both in one format.")
        eight_bits.check_scale(_NAME, name, scale, x)
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
