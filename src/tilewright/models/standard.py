"""The parts of a block as PyTorch does them: `gpt_block: standard`, with the parameters and names of the fused ones."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilewright.nn import GatedMLP, GeluMLP, MixtureOfExperts, RoPE
from tilewright.nn.activation import GATED
from tilewright.nn.experts import Experts
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


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Return what a gated activation makes of two halves."""
    return up * (F.silu(gate) if activation == "swiglu" else F.gelu(gate, approximate=approximation(activation)))


class StandardGatedMLP(GatedMLP):
    """Three matmuls and a gate, as PyTorch does it."""

    linear = nn.Linear

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        y: Tensor = self.down_proj(gated(self.gate_proj(x), self.up_proj(x), self.activation))
        return y


class StandardExperts(Experts):
    """One expert after the other, as PyTorch does it; the host waits for how many rows each has."""

    def forward(self, rows: Tensor, ends: Tensor, recompute: bool = False) -> Tensor:
        counts = ends.diff(prepend=ends.new_zeros(1)).tolist()
        each = zip(rows.split(counts), self.up.unbind(), self.down.unbind(), strict=True)
        return torch.cat([F.linear(self.activate(F.linear(x, up)), down) for x, up, down in each])

    def activate(self, hidden: Tensor) -> Tensor:
        if self.activation in GATED:
            gate, up = hidden.chunk(2, -1)
            return gated(gate, up, self.activation)
        return F.gelu(hidden, approximate=approximation(self.activation))


class StandardMixtureOfExperts(MixtureOfExperts):
    """A mixture of experts as PyTorch does it."""

    linear, kind = nn.Linear, StandardExperts


class StandardRoPE(RoPE):
    """Rotary embeddings, as PyTorch does them."""

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return rotate(q, k, self.cos, self.sin)
