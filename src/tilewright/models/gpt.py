"""A GPT on one page, GPT-2's or Llama's.

Between two sublayers a GPT always does the same three things: dropout on what the last sublayer gave, add it to the
residual stream, normalise the sum for the next sublayer. So a block takes and returns the pair (x, residual), x not yet
added, and those three things happen at the start of each sublayer, in one module (which may add the bias of the product
before it as well). `gpt_block` chooses what runs between the products: `standard` are PyTorch's own ops, `optimized` is
one fused kernel for each of embeddings, norm, activation and rotation, and the quickest algorithm for each product.
Both have the same parameters under the same names.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tilewright.nn import DropoutAddNorm, GatedMLP, GeluMLP, Linear, RoPE
from tilewright.nn.linear import is_unheard
from tilewright.nn.recompute import Shared, forgetting, is_memory_of
from tilewright.ops import _hopper, cross_entropy, cross_entropy_hopper, linear, linear_cross_entropy
from tilewright.ops._op import is_traced, runs_kernel, triton_ready
from tilewright.ops.attention import attention
from tilewright.ops.attention import compile_ahead as compile_attention_ahead
from tilewright.ops.attention import reference as attend
from tilewright.ops.dropout_add_norm import HOST_BOUND
from tilewright.ops.embedding import tied_embedding
from tilewright.ops.rope import reference as rotate
from tilewright.plan.gpt import GPTConfig


def _sum(x: Tensor, residual: Tensor | None, x_bias: Tensor | None, p: float) -> Tensor:
    x = F.dropout(x if x_bias is None else (x + x_bias).to(x.dtype), p)
    return x if residual is None else x + residual


class StandardDropoutAddNorm(nn.Module):
    """Dropout, add and norm as PyTorch does them, one after the other."""

    def __init__(self, width: int, p: float, *, norm: str, bias: bool) -> None:
        super().__init__()
        self.p = p
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias and norm == "layer" else None
        self.norm = norm

    def forward(self, x: Tensor, residual: Tensor | None = None, x_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        residual = _sum(x, residual, x_bias, self.p if self.training else 0.0)
        return self.normalise(residual), residual

    def normalise(self, residual: Tensor) -> Tensor:
        if self.norm == "rms":
            return F.rms_norm(residual, self.weight.shape, self.weight, 1e-5)
        return F.layer_norm(residual, self.weight.shape, self.weight, self.bias, 1e-5)


class StandardGeluMLP(GeluMLP):
    """Two products with a GELU between them, as PyTorch does it."""

    def forward(self, x: Tensor, recompute: bool = False, *, with_bias: bool = True) -> Tensor:
        inner = F.gelu(F.linear(x, self.up.weight, self.up.bias), approximate=self.approximate)
        return F.linear(inner, self.down.weight, self.down.bias if with_bias else None)


class StandardGatedMLP(GatedMLP):
    """Three products and a gate, as PyTorch does it."""

    def forward(self, x: Tensor, recompute: bool = False, *, with_bias: bool = True) -> Tensor:
        gate, up, down = self.gate_proj, self.up_proj, self.down_proj
        x, gated = F.linear(x, up.weight, up.bias), F.linear(x, gate.weight, gate.bias)
        approximate = _approximate(self.activation)
        gated = F.silu(gated) if self.activation == "swiglu" else F.gelu(gated, approximate=approximate)
        return F.linear(gated * x, down.weight, down.bias if with_bias else None)


class StandardRoPE(RoPE):
    """Rotary embeddings, as PyTorch does them."""

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return rotate(q, k, self.cos, self.sin)


# (standard, optimized)
LINEARS = (nn.Linear, Linear)
NORMS = (StandardDropoutAddNorm, DropoutAddNorm)
GELU_MLPS = (StandardGeluMLP, GeluMLP)
GATED_MLPS = (StandardGatedMLP, GatedMLP)
ROPES = (StandardRoPE, RoPE)


def _approximate(activation: str) -> str:
    return "tanh" if activation.endswith("tanh") else "none"


def _norm(config: GPTConfig) -> StandardDropoutAddNorm | DropoutAddNorm:
    norm: Any = NORMS[config.gpt_block == "optimized"]
    return norm(config.width, config.dropout, norm=config.norm, bias=config.bias)


def _mlp(config: GPTConfig) -> nn.Module:
    fused = config.gpt_block == "optimized" if config.mlp == "auto" else config.mlp != "standard"
    width, inner, again = config.width, config.ffn_width, config.mlp == "recompute"
    if config.gated:
        return GATED_MLPS[fused](width, inner, activation=config.activation, bias=config.bias, recompute=again)
    return GELU_MLPS[fused](width, inner, config.bias, _approximate(config.activation), recompute=again)


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
        self.fused = config.gpt_block == "optimized" and self.backend is None
        linear = LINEARS[config.gpt_block == "optimized"]
        self.qkv = linear(config.width, (self.heads + 2 * self.key_heads) * self.head_dim, config.bias)
        self.out = linear(config.width, config.width, config.bias)

    def forward(self, x: Tensor, rope: nn.Module | None, with_bias: bool = True) -> Tensor:
        return self.project_out(self.mix(self.project(x), rope), with_bias)

    def project_out(self, mixed: Tensor, with_bias: bool) -> Tensor:
        return self.out(mixed) if with_bias else self.out(mixed, with_bias=False)

    def project(self, x: Tensor) -> list[Tensor]:
        """Queries, keys and values, each of (batch, sequence, heads, head_dim)."""
        sizes = [heads * self.head_dim for heads in (self.heads, self.key_heads, self.key_heads)]
        parts = self.qkv(x, sizes) if type(self.qkv) is Linear else self.qkv(x).split(sizes, -1)
        return [part.unflatten(-1, (-1, self.head_dim)) for part in parts]

    def mix(self, qkv: list[Tensor], rope: nn.Module | None) -> Tensor:
        """What lies between the two products."""
        q, k, v = qkv
        if rope is not None:
            q, k = rope(q, k)
        with contextlib.nullcontext() if self.backend is None else sdpa_kernel(self.backend):
            return (attention if self.fused else attend)(q, k, v).flatten(2)


def _late_bias(product: nn.Module) -> Tensor | None:
    """The bias that a norm may add in the product's stead: where there will be a backward, which then sums up its
    gradient on the way. Of nobody else's module, and not of a parameter that is in pieces until its module runs."""
    if type(product) is not Linear or type(product.bias) is not nn.Parameter or not torch.is_grad_enabled():
        return None
    return product.bias


class Block(nn.Module):
    """Attention and MLP; takes and returns (x, residual), x not yet added to the residual."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = _norm(config)
        self.attention = Attention(config)
        self.norm2 = _norm(config)
        self.mlp = _mlp(config)
        self.leaves_biases = config.gpt_block == "optimized"  # to the norms

    def late_bias(self) -> Tensor | None:
        """What the next norm may add to the x that this block returns, if `forward` is told."""
        if not self.leaves_biases or type(self.mlp) not in (GeluMLP, GatedMLP):
            return None
        return _late_bias(self.mlp.down if type(self.mlp) is GeluMLP else self.mlp.down_proj)  # type: ignore[arg-type]

    def forward(
        self, x: Tensor, residual: Tensor | None, rope: nn.Module | None, x_bias: Tensor | None = None,
        with_bias: bool = True,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Args: `x_bias` is what was left out of x; without `with_bias`, `late_bias` is left out of the result."""
        x, residual = self.norm1(x, residual, x_bias=x_bias)
        return self._sublayers(x, residual, rope, with_bias)

    def _sublayers(self, x: Tensor, residual: Tensor, rope: nn.Module | None, with_bias: bool) -> tuple[Tensor, Tensor]:
        late = self._attention_bias()
        x = self.attention(x, rope) if late is None else self.attention(x, rope, with_bias=False)
        x, residual = self.norm2(x, residual, x_bias=late)
        return self._feed(x, with_bias), residual

    def _attention_bias(self) -> Tensor | None:
        """What the second norm is to add to what attention returns."""
        return _late_bias(self.attention.out) if self.leaves_biases and type(self.attention) is Attention else None

    def _feed(self, x: Tensor, with_bias: bool, **options: bool) -> Tensor:
        return self.mlp(x, **options) if with_bias else self.mlp(x, with_bias=False, **options)

    def recomputed(
        self, how: str, x: Tensor, residual: Tensor | None, rope: nn.Module | None, x_bias: Tensor | None = None,
        with_bias: bool = True,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """`forward`, keeping less for backward, which computes the rest again.

        "full" keeps what goes in. "selective" keeps the residual stream, once, and the large products but the output's,
        and attention; norms and activations, which are cheap, and the output product, the smallest, run again.
        """
        if how == "full":
            return checkpoint(self, x, residual, rope, x_bias, with_bias, use_reentrant=False)
        if isinstance(self.norm1, DropoutAddNorm) and runs_kernel(x) and not is_traced(x):
            return self._selectively(x, residual, rope, x_bias, with_bias)
        residual = _sum(x, residual, x_bias, self.norm1.p if self.training else 0.0)
        contexts = functools.partial(create_selective_checkpoint_contexts, _keeps)
        return checkpoint(self._from_sum, residual, rope, with_bias, use_reentrant=False, context_fn=contexts)

    def _selectively(
        self, x: Tensor, residual: Tensor | None, rope: nn.Module | None, x_bias: Tensor | None, with_bias: bool
    ) -> tuple[Tensor, Tensor]:
        """By giving up tensors one by one, which a host can afford that launches op by op."""
        attention, norm1, norm2 = self.attention, self.norm1, self.norm2
        x, first = norm1(x, residual, x_bias=x_bias)
        with forgetting(is_memory_of(x), lambda: norm1.normalise(first)):
            qkv = attention.project(x)
        mixed = attention.mix(qkv, rope)
        late = self._attention_bias()  # now, for what runs again must run alike
        # With dropout the sum cannot be made twice alike; a small norm is PyTorch's, which saves what it likes.
        if norm2.p > 0 or (first.is_cuda and first.numel() <= HOST_BOUND):
            x, second = norm2(attention.project_out(mixed, late is None), first, x_bias=late)
            with forgetting(is_memory_of(x), lambda: norm2.normalise(second)):
                return self._feed(x, with_bias, recompute=True), second
        again = Shared(lambda: norm2(attention.project_out(mixed, late is None), first, x_bias=late))
        branch = attention.project_out(mixed, late is None)
        # The one tensor of this shape that the norm saves is the sum that it returns.
        with forgetting(lambda kept: kept.shape == first.shape, lambda: again.take(1, last=True)):
            x, second = norm2(branch, first, x_bias=late)
        with forgetting(is_memory_of(x), lambda: again.take(0)):
            return self._feed(x, with_bias, recompute=True), second

    def _from_sum(self, residual: Tensor, rope: nn.Module | None, with_bias: bool) -> tuple[Tensor, Tensor]:
        return self._sublayers(self.norm1.normalise(residual), residual, rope, with_bias)


def _keeps(context: Any, op: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    """Keep a product that widens, and attention's output; the rest is computed again."""
    if op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
        left, right = arguments[-2:]
        keep = right.shape[1] > left.shape[1]
    elif op == torch.ops.tilewright.linear.default:
        keep = arguments[1].shape[0] > arguments[1].shape[1]
    else:
        keep = "scaled_dot_product" in op.name()
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def _is_plain(table: nn.Module) -> bool:
    """Whether a table is PyTorch's own, and nobody listens to what it returns: then it need not run by itself."""
    own = type(table) is nn.Embedding and table.padding_idx is None and table.max_norm is None
    return own and is_unheard(table)


@functools.cache
def _compile_ahead(device: torch.device, loss: str, vocabulary: int) -> None:
    """Begins to compile what a first step on a Hopper would wait for, one kernel after the other."""
    _hopper.compile_ahead(device)
    compile_attention_ahead(device)
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
        self.rope = None if learned else rope(config.head_dim, config.sequence)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.set_recompute([config.recompute] * config.layers)
        self.norm = _norm(config)
        self.apply(self._initialise)
        for name, parameter in self.named_parameters():  # the residual stream sums 2 * layers branches
            if name.endswith(("out.weight", "down.weight", "down_proj.weight")):
                nn.init.normal_(parameter, std=0.02 / (2 * config.layers) ** 0.5)

    def set_recompute(self, policies: list[str]) -> None:
        """What each block computes again in backward: "none", "selective" or "full"."""
        self.recompute = policies
        for block, how in zip(self.blocks, policies, strict=True):
            assert isinstance(block, Block)
            if how in ("selective", "full"):  # what runs again gains nothing by an MLP that would, and holds its inputs
                block.mlp.recompute = False  # type: ignore[assignment]

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def _embed(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The stream, and the weight of the output layer."""
        tables = [self.token] if self.position is None else [self.token, self.position]
        stream = torch.bfloat16 if self.config.residual == "bf16" else tables[-1].weight.dtype
        if self.config.gpt_block == "optimized" and all(map(_is_plain, tables)):
            return tied_embedding(tokens, *(table.weight for table in tables), dtype=stream)
        x = self.token(tokens)
        if self.position is not None:
            x = x + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        return x.to(stream), self.token.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        sequence = tokens.shape[1]
        if sequence > self.config.sequence:
            raise ValueError(f"{sequence} tokens are more than the {self.config.sequence} positions of this model.")
        if self.config.gpt_block == "optimized" and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            _compile_ahead(tokens.device, self.config.loss, self.config.vocabulary)
        x, head = self._embed(tokens)
        residual = x_bias = None
        for block, how in zip(self.blocks, self.recompute, strict=True):
            assert isinstance(block, Block)
            late = block.late_bias()  # asked once: who leaves it out and who adds it must be of one mind
            if how in ("selective", "full") and torch.is_grad_enabled():
                x, residual = block.recomputed(how, x, residual, self.rope, x_bias, late is None)
            else:
                x, residual = block(x, residual, self.rope, x_bias, late is None)
            x_bias = late
        x, _ = self.norm(x, residual, x_bias=x_bias)
        if targets is not None and self.config.loss == "linear_fused":
            return linear_cross_entropy(x, head, targets)
        logits = (linear if self.config.gpt_block == "optimized" else F.linear)(x, head)
        if targets is None:
            return logits
        if self.config.loss == "fused":
            return cross_entropy(logits, targets, inplace=True)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))
