"""A GPT on one page.

Between two sublayers a GPT always does the same three things: dropout on what the last sublayer gave, add it to the
residual stream, normalise the sum for the next sublayer. So a block takes and returns the pair (x, residual), x not yet
added, and those three things happen at the start of each sublayer, in one module. `gpt_block` chooses it:
`standard` runs three PyTorch ops, `optimized` runs one fused kernel. Nothing else differs, and both have the same
parameters under the same names.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tilewright.nn import DropoutAddNorm
from tilewright.ops import cross_entropy
from tilewright.plan.gpt import GPTConfig


class StandardDropoutAddNorm(nn.LayerNorm):
    """Dropout, add and LayerNorm as PyTorch does them, one after the other."""

    def __init__(self, width: int, p: float) -> None:
        super().__init__(width)
        self.p = p

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x = F.dropout(x, self.p, self.training)
        residual = x if residual is None else x + residual
        return super().forward(residual), residual


NORMS = {"standard": StandardDropoutAddNorm, "optimized": DropoutAddNorm}


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, width = x.shape
        q, k, v = self.qkv(x).view(batch, sequence, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, sequence, width))


class MLP(nn.Module):
    """Two products with a GELU between them, four times as wide inside."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    """Attention and MLP; takes and returns (x, residual), x not yet added to the residual."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        norm = NORMS[config.gpt_block]
        self.norm1 = norm(config.width, config.dropout)
        self.attention = Attention(config)
        self.norm2 = norm(config.width, config.dropout)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        x, residual = self.norm1(x, residual)
        x, residual = self.norm2(self.attention(x), residual)
        return self.mlp(x), residual


class GPT(nn.Module):
    """Returns the logits, or the mean cross-entropy where targets are given.

    >>> from tilewright.plan.gpt import GPTConfig
    >>> model = GPT(GPTConfig(width=32, layers=2, heads=2, vocabulary=64, sequence=16, gpt_block="optimized"))
    >>> tokens = torch.randint(64, (1, 16))
    >>> model(tokens).shape, model(tokens, tokens).shape
    (torch.Size([1, 16, 64]), torch.Size([]))
    >>> sum(p.numel() for p in model.parameters()) == model.config.parameters
    True
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.sequence, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = NORMS[config.gpt_block](config.width, config.dropout)
        self.apply(self._initialise)
        for name, parameter in self.named_parameters():  # the residual stream sums 2 * layers branches
            if name.endswith(("out.weight", "down.weight")):
                nn.init.normal_(parameter, std=0.02 / (2 * config.layers) ** 0.5)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        sequence = tokens.shape[1]
        if sequence > self.config.sequence:
            raise ValueError(f"{sequence} tokens are more than the {self.config.sequence} positions of this model.")
        x = self.token(tokens) + self.position(torch.arange(sequence, device=tokens.device))
        residual = None
        for block in self.blocks:
            if self.config.recompute == "full" and torch.is_grad_enabled():
                x, residual = checkpoint(block, x, residual, use_reentrant=False)
            else:
                x, residual = block(x, residual)
        x, _ = self.norm(x, residual)
        logits = F.linear(x, self.token.weight)
        if targets is None:
            return logits
        if self.config.loss == "fused":
            return cross_entropy(logits, targets, inplace=True)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))
