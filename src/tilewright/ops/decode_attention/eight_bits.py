"""Keys and values of 8 bits: one byte an element, one float32 scale for each token and head.

    codes  (batch, kv_heads, capacity, head_dim)
           int8           | c[0] | c[1] | ... | c[head_dim - 1] |    -127 to 127, two's complement
           float8_e4m3fn  | s e e e e m m m |  each: sign, exponent with bias 7, mantissa; -448 to 448
    scale  (batch, kv_heads, capacity)
           float32        x[j, d] = scale[j] * c[j, d],  scale[j] = max over d of |x[j, d]| / 127 or 448

A token is quantized when it is written, from float32 where rotary positions turn it, and never again. A head of zeros,
or of numbers so small that the scale would be no normal float32, has scale 1. Where an element is NaN or Inf, the scale
is NaN or Inf, and so is what is computed with it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # the greatest code of each format


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The codes and scales of ``(..., head_dim)``, rounded to nearest, ties to even.

    >>> codes, scale = quantize(torch.tensor([[1.0, -2.0], [0.0, 0.0]]), torch.int8)
    >>> codes.tolist(), scale
    ([[64, -127], [0, 0]], tensor([0.0157, 1.0000]))
    >>> dequantize(codes, scale)[0, 1].item()
    -2.0
    """
    most = LARGEST[dtype]
    x = x.float()
    scale = x.abs().amax(-1) / x.new_full((), most)  # by a number, a GPU would multiply by the reciprocal
    scale = torch.where(scale < torch.finfo(torch.float32).tiny, 1.0, scale)
    codes = (x / scale[..., None]).clamp(-most, most).nan_to_num(0.0)
    return (codes.round() if dtype == torch.int8 else codes).to(dtype), scale


def dequantize(codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """What codes and scales stand for, rounded once."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return (codes.to(wide) * scale.to(wide)[..., None]).to(dtype)


def check_scale(op: str, name: str, scale: Any, codes: Tensor) -> None:
    """Raise unless `scale` is what codes, the cache `name`, need: nothing beside a cache of floats."""
    eight = codes.dtype in LARGEST
    if scale is None and not eight:
        return
    if (scale is None) == eight:
        raise ValueError(f"{op}: {name} is {codes.dtype}; a scale goes with int8 and float8_e4m3fn, and with no other.")
    if not isinstance(scale, Tensor) or scale.dtype != torch.float32 or scale.shape != codes.shape[:3]:
        raise ValueError(f"{op}: the scale of {name} must be a float32 tensor of shape {tuple(codes.shape[:3])}.")
    if scale.device != codes.device or not scale.is_contiguous():
        raise ValueError(f"{op}: the scale of {name} must be contiguous and on {codes.device}; copy it there.")


def as_bytes(codes: Tensor) -> Tensor:
    """Codes as a kernel takes them: of fp8 the bytes, which every GPU knows."""
    return codes.view(torch.uint8) if codes.dtype == torch.float8_e4m3fn else codes
