"""dropout_add_norm in plain PyTorch: the definition."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilewright.runtime.philox import quantised, reference_mask


def reference(
    x: torch.Tensor,
    residual: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    second: torch.Tensor | None = None,
    rowscale: torch.Tensor | None = None,
    layerscale: torch.Tensor | None = None,
    x_bias: torch.Tensor | None = None,
    p: float = 0.0,
    eps: float = 1e-5,
    norm: str = "layer",
    zero_centered: bool = False,
    residual_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    masks: Sequence[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, residual_out) in plain PyTorch: the definition. `masks` names the elements that dropout keeps."""
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    p = quantised(p)
    if masks is None:
        masks = draw_masks(x, second, p)
    z = x.to(compute)
    if x_bias is not None:
        z = z + x_bias.to(compute)
    if rowscale is not None:
        z = z * rowscale.to(compute).unsqueeze(-1)
    if layerscale is not None:
        z = z * layerscale.to(compute)
    if p > 0.0:
        z = torch.where(masks[0], z / (1.0 - p), 0.0)
    if second is not None:
        branch = second.to(compute)
        z = z + (torch.where(masks[1], branch / (1.0 - p), 0.0) if p > 0.0 else branch)
    if residual is not None:
        z = z + residual.to(compute)
    residual_out = z.to(residual_dtype or (x if residual is None else residual).dtype)
    if residual_out is x:  # nothing to add and nothing to round: still a tensor of its own
        residual_out = x.clone()
    z = residual_out.to(compute)
    if norm == "layer":
        z = z - z.mean(-1, keepdim=True)
    out = z * torch.rsqrt(z.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        out = out * (weight.to(compute) + 1.0 if zero_centered else weight.to(compute))
    if bias is not None:
        out = out + bias.to(compute)
    return out.to(out_dtype or x.dtype), residual_out


def draw_masks(
    x: torch.Tensor, second: torch.Tensor | None, p: float, seed: int | torch.Tensor | None = None
) -> list[torch.Tensor]:  # fmt: skip
    """Which elements of each branch dropout keeps: by the kernels' generator where there is a seed, else by torch's."""
    streams = range(0 if p == 0.0 else 1 if second is None else 2)
    if seed is not None:
        return [reference_mask(x, seed, p, stream) for stream in streams]
    return [torch.rand(x.shape, device=x.device) >= p for _ in streams]
