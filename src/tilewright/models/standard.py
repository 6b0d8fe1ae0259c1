"""The parts of a block as PyTorch does them: `gpt_block: standard`, with the parameters and names of the fused ones."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilewright.nn import GatedMLP, GeluMLP, RoPE
from tilewright.ops.rope.op import reference as rotate
from tilewright.runtime import philox


def approximation(activation: str) -> str:
    """Return which GELU an activation is, as PyTorch names them."""
    return "tanh" if activation.endswith("tanh") else "none"


class StandardDropoutAddNorm(nn.Module):
    """Dropout, add and norm as PyTorch does them, one after the other."""

    site: int | Tensor | None = None  # as in `DropoutAddNorm`

    def __init__(self, width: int, p: float, *, norm: str, bias: bool, eps: float = 1e-5) -> None:
        super().__init__()
        self.p = p
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias and norm == "layer" else None
        self.norm, self.eps = norm, eps

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        residual = self.add(x, residual)
        return self.normalise(residual), residual

    def add(self, x: Tensor, residual: Tensor | None) -> Tensor:
        seed = philox.seed_at(self.site, x) if self.training and self.p > 0 else None
        x = F.dropout(x, self.p, self.training) if seed is None else philox.dropout(x, self.p, seed)
        return x if residual is None else x + residual

    def normalise(self, residual: Tensor) -> Tensor:
        if self.norm == "rms":
            return F.rms_norm(residual, self.weight.shape, self.weight, self.eps)
        return F.layer_norm(residual, self.weight.shape, self.weight, self.bias, self.eps)


class StandardGeluMLP(GeluMLP):
    """Two matmuls with a GELU between them, as PyTorch does it."""

    linear = nn.Linear

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        y: Tensor = self.down(F.gelu(self.up(x), approximate=self.approximate))
        return y


class StandardGatedMLP(GatedMLP):
    """Three matmuls and a gate, as PyTorch does it."""

    linear = nn.Linear

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        gate, approximate = self.gate_proj(x), approximation(self.activation)
        gate = F.silu(gate) if self.activation == "swiglu" else F.gelu(gate, approximate=approximate)
        y: Tensor = self.down_proj(gate * self.up_proj(x))
        return y


class StandardRoPE(RoPE):
    """Rotary embeddings, as PyTorch does them."""

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return rotate(q, k, self.cos, self.sin)
