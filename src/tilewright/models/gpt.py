"""A GPT on one page, GPT-2's or Llama's.

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
import functools
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tilewright.nn import DropoutAddNorm, GatedMLP, GeluMLP, Linear, RoPE
from tilewright.nn.hooks import is_own
from tilewright.nn.recompute import Shared, forgetting, is_memory_of
from tilewright.ops import cross_entropy, linear, linear_cross_entropy, linear_parts
from tilewright.ops.attention.op import attention
from tilewright.ops.attention.op import compile_ahead as compile_attention_ahead
from tilewright.ops.attention.op import reference as attend
from tilewright.ops.cross_entropy import hopper as cross_entropy_hopper
from tilewright.ops.embedding.op import tied_embedding
from tilewright.ops.rope.op import reference as rotate
from tilewright.plan.gpt import GPTConfig
from tilewright.runtime import hopper
from tilewright.runtime.dispatch import forcing_kernels, is_traced, runs_kernel, triton_ready


class StandardDropoutAddNorm(nn.Module):
    """Dropout, add and norm as PyTorch does them, one after the other."""

    def __init__(self, width: int, p: float, *, norm: str, bias: bool) -> None:
        super().__init__()
        self.p = p
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias and norm == "layer" else None
        self.norm = norm

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        residual = self.add(x, residual)
        return self.normalise(residual), residual

    def add(self, x: Tensor, residual: Tensor | None) -> Tensor:
        x = F.dropout(x, self.p, self.training)
        return x if residual is None else x + residual

    def normalise(self, residual: Tensor) -> Tensor:
        if self.norm == "rms":
            return F.rms_norm(residual, self.weight.shape, self.weight, 1e-5)
        return F.layer_norm(residual, self.weight.shape, self.weight, self.bias, 1e-5)


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
        gate, approximate = self.gate_proj(x), _approximate(self.activation)
        gate = F.silu(gate) if self.activation == "swiglu" else F.gelu(gate, approximate=approximate)
        y: Tensor = self.down_proj(gate * self.up_proj(x))
        return y


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
        with contextlib.nullcontext() if self.backend is None else sdpa_kernel(self.backend):
            return (attention if self.fused else attend)(q, k, v).flatten(2)


def _add_norm(norm: nn.Module, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return what a norm does: the normalised sum, and the sum."""
    pair = norm(x, residual)
    if not isinstance(pair, (tuple, list)):
        raise TypeError("GPT: a norm must return the normalised sum and the sum, as DropoutAddNorm with prenorm=True.")
    out, total = pair
    return out, total


def _normalise(norm: Any, total: Tensor, dtype: torch.dtype) -> Tensor:
    """What a norm returned beside this sum, for an x of this dtype."""
    out: Tensor
    if not isinstance(norm, DropoutAddNorm) or torch.is_autocast_enabled(total.device.type):
        out = norm.normalise(total)
    else:
        out = norm.normalise(total.to(torch.promote_types(total.dtype, dtype))).to(dtype)
    return out


class Block(nn.Module):
    """Attention and MLP; takes and returns (x, residual), x not yet added to the residual."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = _norm(config)
        self.attention = Attention(config)
        self.norm2 = _norm(config)
        self.mlp = _mlp(config)

    def forward(self, x: Tensor, residual: Tensor | None, rope: nn.Module | None) -> tuple[Tensor, Tensor]:
        x, residual = _add_norm(self.norm1, x, residual)
        return self._sublayers(x, residual, rope)

    def _sublayers(self, x: Tensor, residual: Tensor, rope: nn.Module | None) -> tuple[Tensor, Tensor]:
        x, residual = _add_norm(self.norm2, self.attention(x, rope), residual)
        return self.mlp(x), residual

    def _feed_again(self, x: Tensor) -> Tensor:
        """The MLP, which keeps less for backward where it is one of ours."""
        y: Tensor = self.mlp(x, recompute=True) if is_own(self.mlp, GeluMLP, GatedMLP) else self.mlp(x)
        return y

    def recomputed(self, how: str, x: Tensor, residual: Tensor | None, rope: nn.Module | None) -> tuple[Tensor, Tensor]:
        """`forward`, keeping less for backward, which computes the rest again.

        "full" keeps what goes in. "selective" keeps the residual stream, once, and the large matmuls but the output's,
        and attention; norms and activations, which are cheap, and the output matmul, the smallest, run again.
        """
        if how == "full":
            return _checkpoint(how, self, x, residual, rope)
        own = is_own(self.norm1, DropoutAddNorm) and is_own(self.norm2, DropoutAddNorm)
        if own and is_own(self.attention, Attention) and runs_kernel(x) and not is_traced(x):
            return self._selectively(x, residual, rope)
        if not is_own(self.norm1, DropoutAddNorm, StandardDropoutAddNorm):
            return _checkpoint(how, self, x, residual, rope)
        total = self.norm1.add(x, residual)
        return _checkpoint(how, self._from_sum, total, x.dtype, rope)

    @forcing_kernels()
    def _selectively(self, x: Tensor, residual: Tensor | None, rope: nn.Module | None) -> tuple[Tensor, Tensor]:
        """By giving up tensors one by one, which a host can afford that launches op by op."""
        attention, norm1, norm2 = self.attention, self.norm1, self.norm2
        given = x.dtype
        x, first = _add_norm(norm1, x, residual)
        with forgetting(is_memory_of(x), lambda: _normalise(norm1, first, given)):
            qkv = attention.project(x)
        mixed = attention.mix(qkv, rope)
        branch = attention.out(mixed)
        # With dropout, in the norm or in a module put in place of the matmul, the sum cannot be made twice alike.
        if norm2.p > 0 or not is_own(attention.out, Linear):
            narrow = branch.dtype
            x, second = _add_norm(norm2, branch, first)
            del branch
            with forgetting(is_memory_of(x), lambda: _normalise(norm2, second, narrow)):
                return self._feed_again(x), second
        again = Shared(lambda: norm2(attention.out(mixed), first))
        # Of this shape the norm saves the sum that it returns and, where a scale needs its gradient, the branch.
        place, shape = branch.untyped_storage()._cdata, first.shape

        def is_sum(saved: Tensor) -> bool:
            return saved.shape == shape and saved.untyped_storage()._cdata != place

        with forgetting(is_sum, lambda: again.take(1, last=True)):
            x, second = _add_norm(norm2, branch, first)
        del branch
        with forgetting(is_memory_of(x), lambda: again.take(0)):
            return self._feed_again(x), second

    def _from_sum(self, residual: Tensor, dtype: torch.dtype, rope: nn.Module | None) -> tuple[Tensor, Tensor]:
        return self._sublayers(_normalise(self.norm1, residual, dtype), residual, rope)


def _is_own_block(block: nn.Module) -> TypeGuard[Block]:
    return is_own(block, Block)


def _checkpoint(how: str, region: Any, *inputs: Any) -> Any:
    """Run a region. "full" keeps nothing of it for backward but what goes in, "selective" large matmuls too."""
    if how == "selective":
        contexts = functools.partial(create_selective_checkpoint_contexts, _keeps)
        return checkpoint(region, *inputs, use_reentrant=False, context_fn=contexts)
    return checkpoint(region, *inputs, use_reentrant=False) if how == "full" else region(*inputs)


def _keeps(context: Any, op: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    """Keep a matmul that widens, and attention's output; the rest is computed again."""
    if op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
        left, right = arguments[-2:]
        keep = right.shape[1] > left.shape[1]
    elif op == torch.ops.tilewright.linear.default:
        keep = arguments[1].shape[0] > arguments[1].shape[1]
    else:
        keep = "scaled_dot_product" in op.name()
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def _is_plain(table: nn.Module) -> bool:
    """Whether a table is PyTorch's own without options: then it need not run by itself."""
    if not is_own(table, nn.Embedding):
        return False
    return table.padding_idx is None and table.max_norm is None and not (table.scale_grad_by_freq or table.sparse)


@functools.cache
def _compile_ahead(device: torch.device, loss: str, vocabulary: int) -> None:
    """Begins to compile what a first step on a Hopper would wait for, one kernel after the other."""
    hopper.compile_ahead(device)
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
            if isinstance(block, Block) and how in (
                "selective",
                "full",
            ):  # what runs again gains nothing by an MLP that would, and holds its inputs
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
        stream = torch.bfloat16 if self.config.residual == "bf16" else None
        if self.config.gpt_block == "optimized" and all(map(_is_plain, tables)):
            weights = [table.weight for table in tables]
            if len({weight.dtype for weight in weights}) == 1:
                return tied_embedding(tokens, *weights, dtype=stream)
        x = self.token(tokens)
        if self.position is not None:
            x = x + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        head = getattr(self.token, "weight", None)
        if not isinstance(head, Tensor):
            raise TypeError("GPT: the output layer is the weight of `token`; give the module in its place a `weight`.")
        return x if stream is None else x.to(stream), head

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        sequence = tokens.shape[1]
        if sequence > self.config.sequence:
            raise ValueError(f"{sequence} tokens are more than the {self.config.sequence} positions of this model.")
        if self.config.gpt_block == "optimized" and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            _compile_ahead(tokens.device, self.config.loss, self.config.vocabulary)
        x, head = self._embed(tokens)
        residual = None
        for block, how in zip(self.blocks, self.recompute, strict=True):
            how = how if torch.is_grad_enabled() else "none"
            if not _is_own_block(block):
                x, residual = _checkpoint(how, block, x, residual, self.rope)
            elif how in ("selective", "full"):
                x, residual = block.recomputed(how, x, residual, self.rope)
            else:
                x, residual = block(x, residual, self.rope)
        x, _ = _add_norm(self.norm, x, residual)
        if targets is not None and self.config.loss == "linear_fused":
            return linear_cross_entropy(x, head, targets)
        logits = (linear if self.config.gpt_block == "optimized" else F.linear)(x, head)
        if targets is None:
            return logits
        if self.config.loss == "fused":
            return cross_entropy(logits, targets, inplace=True)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))
