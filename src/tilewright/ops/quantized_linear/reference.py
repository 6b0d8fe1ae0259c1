"""What quantised weights stand for, and a linear layer with them, in plain PyTorch: the definition."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.ops.activation.op import activation_of
from tilewright.runtime import dispatch

MIDDLE = 8  # the 4-bit code of zero where there are no zero points


def dequantize(weight: Tensor, scale: Tensor, zero: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """The ``(out, in)`` matrix that a packed weight stands for, rounded once to `dtype`.

    >>> dequantize(torch.tensor([[-127, 0, 2]], dtype=torch.int8), torch.tensor([0.5]))
    tensor([[-63.5000,   0.0000,   1.0000]])
    """
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    if weight.dtype != torch.uint8:
        return (weight.to(exact) * scale.to(exact)[:, None]).to(dtype)
    group = 2 * weight.shape[1] // len(scale)
    codes = unpack_nibbles(weight, group).to(exact).unflatten(1, (-1, group))
    codes = codes - (MIDDLE if zero is None else zero.t()[:, :, None].to(exact))
    return (codes * scale.t()[:, :, None].to(exact)).flatten(1).to(dtype)


def span_of(group: int) -> int:
    """How many weights lie interleaved: a group, or two groups of 32, so that a half of them is never below 32."""
    return max(64, group)


def unpack_nibbles(weight: Tensor, group: int) -> Tensor:
    """The 4-bit codes of a packed ``(out, in / 2)`` weight, as ``(out, in)`` uint8."""
    halves = weight.unflatten(1, (-1, span_of(group) // 2))
    return torch.cat((halves & 15, halves >> 4), -1).flatten(1)


def pack_nibbles(codes: Tensor, group: int) -> Tensor:
    """The inverse of `unpack_nibbles`: the low nibbles of a span's bytes are its first half, the high ones its second.

    >>> codes = torch.arange(64, dtype=torch.uint8)[None] % 16
    >>> packed = pack_nibbles(codes, 32)
    >>> packed[0, 2].item() == 2 + 16 * 2, torch.equal(unpack_nibbles(packed, 32), codes)
    (True, True)
    """
    low, high = codes.unflatten(1, (-1, span_of(group))).chunk(2, -1)
    return (low | high << 4).flatten(1)


def reference(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "",
) -> Tensor:
    """``activation(x @ dequantize(weight)^T + bias) + residual``, in float32 (float64 for float64), rounded once."""
    compute = dispatch.compute_dtype(x)
    with torch.autocast(x.device.type, enabled=False):
        y = F.linear(
            x.to(compute), dequantize(weight, scale, zero, compute), None if bias is None else bias.to(compute)
        )
    y = activation_of(y, activation)
    return (y if residual is None else y + residual).to(x.dtype)
