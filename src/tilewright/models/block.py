"""A block of a GPT: norm, attention, norm, MLP.

Between two sublayers a GPT always does the same three things: dropout on what the last sublayer gave, add it to the
residual stream, normalise the sum for the next sublayer. So a block takes and returns the pair (x, residual), x not yet
added, and those three things happen at the start of each sublayer, in one module. `gpt_block` chooses what runs
between the matmuls: `standard` are PyTorch's own ops, `optimized` is one fused kernel for each of embeddings, norm,
activation and rotation, and the quickest algorithm for each matmul. Both have the same parameters under the same names.

A submodule that somebody has replaced or hooked is called, with the arguments and results it has in a standard block. A
fused path that reads its parameters instead runs only where it `is_own`.
"""

from __future__ import annotations

import contextlib
from typing import Any

from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilewright.models.standard import (
    StandardDropoutAddNorm,
    StandardGatedMLP,
    StandardGeluMLP,
    StandardMixtureOfExperts,
    StandardRoPE,
    approximation,
)
from tilewright.nn import DropoutAddNorm, FusedMLP, GatedMLP, GeluMLP, Linear, MixtureOfExperts, RoPE
from tilewright.nn.hooks import is_own
from tilewright.ops import linear_parts
from tilewright.ops.attention.backends import by_pytorch
from tilewright.ops.attention.op import attention
from tilewright.plan.gpt import OWN_ATTENTION, GPTConfig

# (standard, optimized)
LINEARS = (nn.Linear, Linear)
NORMS = (StandardDropoutAddNorm, DropoutAddNorm)
GELU_MLPS = (StandardGeluMLP, GeluMLP)
GATED_MLPS = (StandardGatedMLP, GatedMLP)
MIXTURES = (StandardMixtureOfExperts, MixtureOfExperts)
ROPES = (StandardRoPE, RoPE)


def new_norm(config: GPTConfig) -> StandardDropoutAddNorm | DropoutAddNorm:
    """Make a norm of the kind that a model has."""
    norm: Any = NORMS[config.gpt_block == "optimized"]
    return norm(config.width, config.dropout, norm=config.norm, bias=config.bias, eps=config.norm_epsilon)


def _mlp(config: GPTConfig) -> nn.Module:
    fused = config.gpt_block == "optimized" if config.mlp == "auto" else config.mlp != "standard"
    width, inner, again = config.width, config.ffn_width, config.mlp == "recompute"
    if config.experts:
        return MIXTURES[fused](
            width, inner, experts=config.experts, per_token=config.experts_per_token, activation=config.activation,
            recompute=again,
        )  # fmt: skip
    if config.mlp == "tilesync":
        return FusedMLP(config.width, config.ffn_width, activation=config.activation, bias=config.bias)
    if config.gated:
        return GATED_MLPS[fused](width, inner, activation=config.activation, bias=config.bias, recompute=again)
    return GELU_MLPS[fused](width, inner, config.bias, approximation(config.activation), recompute=again)


ATTENTION = {
    "flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH,
}  # fmt: skip


class Attention(nn.Module):
    """Causal self-attention; several heads of queries may share one of keys and values."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads, self.key_heads, self.head_dim = config.heads, config.key_heads, config.head_dim
        self.backend = ATTENTION.get(config.attention)
        self.own = config.attention if config.attention in OWN_ATTENTION else "auto"
        self.fused = self.own != "auto" or (config.gpt_block == "optimized" and self.backend is None)
        linear = LINEARS[config.gpt_block == "optimized"]
        self.qkv = linear(config.width, (self.heads + 2 * self.key_heads) * self.head_dim, config.bias)
        self.out = linear(config.width, config.width, config.bias)

    def forward(self, x: Tensor, rope: nn.Module | None) -> Tensor:
        y: Tensor = self.out(self.mix(self.project(x), rope))
        return y

    def project(self, x: Tensor) -> list[Tensor]:
        """Queries, keys and values, each of (batch, sequence, heads, head_dim)."""
        sizes = [heads * self.head_dim for heads in (self.heads, self.key_heads, self.key_heads)]
        if is_own(self.qkv, Linear):
            parts = linear_parts(x, self.qkv.weight, self.qkv.bias, sizes)
        else:
            parts = self.qkv(x).split(sizes, -1)
        return [part.unflatten(-1, (-1, self.head_dim)) for part in parts]

    def mix(self, qkv: list[Tensor], rope: nn.Module | None) -> Tensor:
        """What lies between the two matmuls."""
        q, k, v = qkv
        if rope is not None:
            q, k = rope(q, k)
        if self.fused:
            y: Tensor = attention(q, k, v, backend=self.own)
            return y.flatten(2)
        with contextlib.nullcontext() if self.backend is None else sdpa_kernel(self.backend):
            return by_pytorch(q, k, v).flatten(2)


def add_norm(norm: nn.Module, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return what a norm does: the normalised sum, and the sum."""
    pair = norm(x, residual)
    if not isinstance(pair, (tuple, list)):
        raise TypeError("GPT: a norm must return the normalised sum and the sum, as DropoutAddNorm with prenorm=True.")
    out, total = pair
    return out, total


class Block(nn.Module):
    """Attention and MLP; takes and returns (x, residual), x not yet added to the residual."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = new_norm(config)
        self.attention = Attention(config)
        self.norm2 = new_norm(config)
        self.mlp = _mlp(config)

    def forward(self, x: Tensor, residual: Tensor | None, rope: nn.Module | None) -> tuple[Tensor, Tensor]:
        x, residual = add_norm(self.norm1, x, residual)
        return self.sublayers(x, residual, rope)

    def sublayers(self, x: Tensor, residual: Tensor, rope: nn.Module | None) -> tuple[Tensor, Tensor]:
        """What follows the first norm."""
        x, residual = add_norm(self.norm2, self.attention(x, rope), residual)
        return self.mlp(x), residual
