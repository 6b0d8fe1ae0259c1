"""The definition of `cross_entropy`, in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tilewright.runtime import dispatch


def reference(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    reduction: str = "mean",
) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, lse) in plain PyTorch: the definition."""
    x = logits.to(dispatch.compute_dtype(logits))
    if softcap > 0.0:
        x = softcap * torch.tanh(x / softcap)
    lse = torch.logsumexp(x, -1)
    flat, flat_targets = x.reshape(-1, x.shape[-1]), targets.reshape(-1).long()
    kept = flat_targets != ignore_index
    loss = F.cross_entropy(
        flat, flat_targets, None if weight is None else weight.to(x.dtype), ignore_index=ignore_index,
        label_smoothing=label_smoothing, reduction="none",
    )  # fmt: skip
    if z_loss > 0.0:
        loss = loss + torch.where(kept, z_loss * lse.reshape(-1).square(), 0.0)
    if reduction == "none":
        return loss.view(targets.shape), lse
    total = loss.sum()
    if reduction == "mean":
        count = _denominator(flat_targets, weight, ignore_index, x.dtype)
        total = torch.where(count > 0, total / count.clamp_min(torch.finfo(x.dtype).tiny), total * 0.0)
    return total, lse


def _denominator(
    targets: torch.Tensor, weight: torch.Tensor | None, ignore_index: int, dtype: torch.dtype
) -> torch.Tensor:
    """What a mean divides by: the targets that count, each by its class's weight."""
    kept = targets != ignore_index
    if weight is None:
        return kept.sum().to(dtype)
    known = kept & (targets >= 0) & (targets < len(weight))
    return torch.where(known, weight.to(dtype)[torch.where(known, targets, 0)], 0.0).sum()
