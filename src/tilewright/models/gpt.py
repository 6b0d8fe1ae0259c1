"""A GPT on one page, GPT-2's or Llama's.

`block.py` has its blocks, `recompute.py` what they compute again in backward.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilewright.models.block import NORMS, ROPES, Block, add_norm, new_norm
from tilewright.models.recompute import run_block
from tilewright.nn.experts import Experts
from tilewright.nn.hooks import is_own
from tilewright.ops import cross_entropy, linear, linear_cross_entropy
from tilewright.ops.attention.hopper_backward import compile_ahead as compile_attention_ahead
from tilewright.ops.cross_entropy import hopper as cross_entropy_hopper
from tilewright.ops.embedding.op import embedding, tied_embedding
from tilewright.plan.gpt import GPTConfig
from tilewright.runtime import hopper
from tilewright.runtime.dispatch import triton_ready


def _is_plain(table: nn.Module) -> bool:
    """Whether a table is PyTorch's own without options: then it need not run by itself."""
    if not is_own(table, nn.Embedding):
        return False
    return table.padding_idx is None and table.max_norm is None and not (table.scale_grad_by_freq or table.sparse)


@functools.cache
def _compile_ahead(device: torch.device, loss: str, vocabulary: int, head_dim: int) -> None:
    """Begins to compile what a first step on a Hopper would wait for, one kernel after the other."""
    hopper.compile_ahead(device)
    compile_attention_ahead(device, head_dim)
    if loss != "plain":
        cross_entropy_hopper.compile_ahead(device, vocabulary)


class GPT(nn.Module):
    """Returns the logits, or the mean cross-entropy where targets are given.

    >>> from tilewright.plan.gpt import LLAMA, GPTConfig
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
        if config.gpt_block == "optimized" and torch.version.cuda is not None:
            triton_ready.start()
        self.token = nn.Embedding(config.vocabulary, config.width)
        learned = config.position == "learned"
        self.position = nn.Embedding(config.sequence, config.width) if learned else None
        rope = ROPES[config.gpt_block == "optimized"]
        self.rope = None if learned else rope(config.head_dim, config.sequence, base=config.rope_base)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.set_recompute([config.recompute] * config.layers)
        self.norm = new_norm(config)
        sites = (module for module in self.modules() if isinstance(module, NORMS))
        for site, module in enumerate(sites):
            module.site = site
        self.head = None if config.tied else nn.Linear(config.width, config.vocabulary, bias=False)
        self.apply(self._initialise)
        for name, parameter in self.named_parameters():  # the residual stream sums 2 * layers branches
            if name.endswith(("out.weight", "down.weight", "down_proj.weight", "experts.down")):
                nn.init.normal_(parameter, std=0.02 / (2 * config.layers) ** 0.5)

    def set_recompute(self, policies: list[str]) -> None:
        """What each block computes again in backward: "none", "selective" or "full"."""
        self.recompute = policies
        for block, how in zip(self.blocks, policies, strict=True):
            # What runs again gains nothing by an MLP that would, and holds its inputs.
            if isinstance(block, Block) and how in ("selective", "full"):
                block.mlp.recompute = False  # type: ignore[assignment]

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, Experts):
            nn.init.normal_(module.up, std=0.02)

    def _embed(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The stream, and the weight of the output layer."""
        tables = [self.token] if self.position is None else [self.token, self.position]
        stream = torch.bfloat16 if self.config.residual == "bf16" else None
        if self.config.gpt_block == "optimized" and all(map(_is_plain, tables)):
            weights = [table.weight for table in tables]
            if len({weight.dtype for weight in weights}) == 1 and self.head is None:
                return tied_embedding(tokens, *weights, dtype=stream)
            if len({weight.dtype for weight in weights}) == 1:
                return embedding(tokens, *weights, dtype=stream), self._head_weight()
        x = self.token(tokens)
        if self.position is not None:
            x = x + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        return x if stream is None else x.to(stream), self._head_weight()

    def _head_weight(self) -> Tensor:
        name = "token" if self.head is None else "head"
        weight = getattr(getattr(self, name), "weight", None)
        if not isinstance(weight, Tensor):
            raise TypeError(
                f"GPT: the output layer is the weight of `{name}`; give the module in its place a `weight`."
            )
        return weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        sequence = tokens.shape[1]
        if sequence > self.config.sequence:
            raise ValueError(f"{sequence} tokens are more than the {self.config.sequence} positions of this model.")
        if self.config.gpt_block == "optimized" and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            config = self.config
            _compile_ahead(tokens.device, config.loss, config.vocabulary, config.head_dim)
        x, head = self._embed(tokens)
        residual = None
        for block, how in zip(self.blocks, self.recompute, strict=True):
            x, residual = run_block(block, how if torch.is_grad_enabled() else "none", x, residual, self.rope)
        x, _ = add_norm(self.norm, x, residual)
        return self._score(x, head, targets)

    def _score(self, x: Tensor, head: Tensor, targets: Tensor | None) -> Tensor:
        """The logits, or their loss."""
        if targets is not None and self.config.loss == "linear_fused":
            return linear_cross_entropy(x, head, targets)
        logits = (linear if self.config.gpt_block == "optimized" else F.linear)(x, head)
        if targets is None:
            return logits
        if self.config.loss == "fused":
            return cross_entropy(logits, targets, inplace=True)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))
