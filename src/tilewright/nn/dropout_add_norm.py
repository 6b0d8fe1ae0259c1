"""`ops.dropout_add_norm` as a module."""

from __future__ import annotations

from typing import Any

import torch

from tilewright.ops import dropout_add_norm
from tilewright.ops.dropout_add_norm.op import reference
from tilewright.runtime import paths, philox


class DropoutAddNorm(torch.nn.Module):
    """Dropout on `x`, add to the residual stream, LayerNorm or RMSNorm: one kernel.

    Its parameters are named as in ``torch.nn.LayerNorm`` and ``torch.nn.RMSNorm``, so their checkpoints load.

    Args:
        width: size of the last dimension.
        p: dropout probability, applied in training mode.
        norm: ``"layer"`` (weight and bias) or ``"rms"`` (weight).
        bias: whether a LayerNorm has a bias.
        layerscale: initial value of a learned factor for each column of x, or None for none.
        prenorm: return ``(out, residual)`` instead of ``out``.

    >>> norm = DropoutAddNorm(8, p=0.1)
    >>> x, residual = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    >>> out, residual = norm(x, residual)
    >>> out.shape, sorted(norm.state_dict())
    (torch.Size([2, 3, 8]), ['bias', 'weight'])
    """

    # Which dropout of its model this is: by that it is drawn under `philox.by_position`.
    site: int | torch.Tensor | None = None

    def __init__(
        self,
        width: int,
        p: float = 0.0,
        *,
        norm: str = "layer",
        eps: float = 1e-5,
        bias: bool = True,
        zero_centered: bool = False,
        layerscale: float | None = None,
        prenorm: bool = True,
        residual_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.p, self.norm, self.eps = p, norm, eps
        self.zero_centered, self.prenorm, self.residual_dtype = zero_centered, prenorm, residual_dtype
        self.weight = torch.nn.Parameter(torch.empty(width, device=device, dtype=dtype))
        has_bias = bias and norm == "layer"
        self.bias = torch.nn.Parameter(torch.empty(width, device=device, dtype=dtype)) if has_bias else None
        self.initial_layerscale = layerscale
        scaled = layerscale is not None
        self.layerscale = torch.nn.Parameter(torch.empty(width, device=device, dtype=dtype)) if scaled else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        torch.nn.init.constant_(self.weight, 0.0 if self.zero_centered else 1.0)
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)
        if self.layerscale is not None and self.initial_layerscale is not None:
            torch.nn.init.constant_(self.layerscale, self.initial_layerscale)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        *,
        second: torch.Tensor | None = None,
        rowscale: torch.Tensor | None = None,
        x_bias: torch.Tensor | None = None,
    ) -> Any:
        p = self.p if self.training else 0.0
        seed = philox.seed_at(self.site, x) if p > 0.0 else None
        if seed is not None and philox.has_part_of_rows() and second is rowscale is x_bias is self.layerscale is None:
            paths.note("dropout_add_norm", paths.PARTS, "a rank has a part of each sequence: PyTorch's ops drop")
            x, p, seed = philox.dropout(x, p, seed), 0.0, None
        return dropout_add_norm(
            x,
            residual,
            self.weight,
            self.bias,
            second=second,
            rowscale=rowscale,
            layerscale=self.layerscale,
            x_bias=x_bias,
            p=p,
            eps=self.eps,
            norm=self.norm,
            zero_centered=self.zero_centered,
            prenorm=self.prenorm,
            residual_dtype=self.residual_dtype if residual is None else None,
            seed=seed,
        )

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """The sum that `forward` normalises and returns, in plain PyTorch."""
        p = self.p if self.training else 0.0
        seed = philox.seed_at(self.site, x) if p > 0.0 and self.layerscale is None else None
        if seed is not None:
            x, p = philox.dropout(x, p, seed), 0.0
        _, total = reference(
            x, residual, layerscale=self.layerscale, p=p,
            residual_dtype=self.residual_dtype if residual is None else None,
        )  # fmt: skip
        return total

    def normalise(self, residual: torch.Tensor) -> torch.Tensor:
        """The norm alone, of a stream to which everything has been added."""
        return dropout_add_norm(
            residual, None, self.weight, self.bias, eps=self.eps, norm=self.norm, zero_centered=self.zero_centered,
            prenorm=False,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, p={self.p}, norm={self.norm!r}, eps={self.eps}, prenorm={self.prenorm}"
