"""A decoder on one page: Llama, Qwen2, Qwen3, GPT-2 or a GPT of ours, over a KV cache of fixed size.

One forward serves a prompt, a token and the tokens of a draft: they come to lie behind those that each row of the cache
has, and see all that lies before them. The residual stream travels as (x, residual), so that each norm
adds what the sublayer before it computed. A matmul is whatever module lies in the place of an `nn.Linear`; of a plain
one the weights are read by `few_rows_linear` where there are few rows. The activation of an MLP without a gate is part
of the matmul before it, where that is ours: no kernel of PyTorch's comes between those of a step.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilewright.generate.cache import KVCache
from tilewright.generate.config import DecoderConfig, inverse_frequencies
from tilewright.nn.hooks import is_own
from tilewright.nn.quantized_linear import QuantizedLinear
from tilewright.ops import append_to_cache, decode_attention, dropout_add_norm, few_rows_linear, geglu, swiglu
from tilewright.ops.activation.op import activate
from tilewright.runtime import dispatch


def matmul(layer: nn.Module, x: Tensor, activation: str = "") -> Tensor:
    """Call a layer, or compute what it would where nobody could tell: one that is hooked or replaced is called.

    With an activation, return that of the output.

    >>> layer = nn.Linear(8, 4).requires_grad_(False)
    >>> torch.allclose(matmul(layer, torch.ones(1, 8)), layer(torch.ones(1, 8)), atol=1e-5)
    True
    """
    if isinstance(layer, nn.Linear) and is_own(layer, nn.Linear) and type(layer.weight) in dispatch.PLAIN:
        return few_rows_linear(x, layer.weight, layer.bias, activation=activation)
    fused = {"activation": activation} if activation and is_own(layer, QuantizedLinear) else {}
    y: Tensor = layer(x, **fused)
    return y if fused else activate(y, activation)


class Norm(nn.Module):
    """RMSNorm or LayerNorm of a sum, and the sum."""

    def __init__(self, width: int, config: DecoderConfig, *, kind: str = "") -> None:
        super().__init__()
        self.kind, self.epsilon = kind or config.shape.norm, config.epsilon
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if config.shape.norm_bias and self.kind == "layer" else None

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        pair: tuple[Tensor, Tensor] = dropout_add_norm(
            x, residual, self.weight, self.bias, eps=self.epsilon, norm=self.kind, prenorm=True
        )
        return pair


class Attention(nn.Module):
    """Self-attention over the cache; several heads of queries may share one of keys and values."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        shape = config.shape
        self.heads, self.kv_heads, self.head_dim = shape.heads, shape.kv_heads, shape.head_dim
        inner = self.heads * self.head_dim
        self.qkv = nn.Linear(shape.width, inner + 2 * self.kv_heads * self.head_dim, bias=shape.qkv_bias)
        self.out = nn.Linear(inner, shape.width, bias=shape.out_bias)
        self.q_norm = Norm(self.head_dim, config, kind="rms") if shape.qk_norm else None
        self.k_norm = Norm(self.head_dim, config, kind="rms") if shape.qk_norm else None

    def forward(self, x: Tensor, tables: tuple[Tensor, ...], cache: KVCache, layer: int) -> Tensor:
        sizes = [self.heads, self.kv_heads, self.kv_heads]
        heads = matmul(self.qkv, x).unflatten(-1, (-1, self.head_dim))
        q, k, v = heads.split(sizes, -2)
        if self.q_norm is not None and self.k_norm is not None:
            # Of all heads, of which each norm's own are kept: a norm would copy heads that lie apart, by a kernel more.
            q, k = self.q_norm(heads, None)[0].split(sizes, -2)[0], self.k_norm(heads, None)[0].split(sizes, -2)[1]
        keys, values = cache.keys[layer], cache.values[layer]
        k_scale, v_scale = cache.scales_of(layer)
        q = append_to_cache(q, k, v, keys, values, cache.before, *tables, k_scale=k_scale, v_scale=v_scale)
        if cache.is_prompt:  # nothing lies before it
            k, v = cache.read(layer, q.shape[1], q.dtype)
            q = q.transpose(1, 2)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
            mixed = mixed.transpose(1, 2)
        else:
            mixed = decode_attention(q, keys, values, cache.lengths, k_scale=k_scale, v_scale=v_scale)
        return matmul(self.out, mixed.flatten(2))


class MLP(nn.Module):
    """Two matmuls with an activation between them, the first one twice as wide where it is gated."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        shape, self.activation, self.gated = config.shape, config.activation, config.shape.gated
        self.up = nn.Linear(shape.width, shape.ffn * (2 if shape.gated else 1), bias=shape.mlp_bias)
        self.down = nn.Linear(shape.ffn, shape.width, bias=shape.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        if not self.gated:
            return matmul(self.down, matmul(self.up, x, self.activation))
        both = matmul(self.up, x)
        approximate = "tanh" if self.activation == "gelu_tanh" else "none"
        return matmul(self.down, swiglu(both) if self.activation == "silu" else geglu(both, approximate=approximate))


class Block(nn.Module):
    """Attention and MLP; takes and returns (x, residual), x not yet added to the residual."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.norm1, self.attention = Norm(config.shape.width, config), Attention(config)
        self.norm2, self.mlp = Norm(config.shape.width, config), MLP(config)

    def forward(
        self, x: Tensor, residual: Tensor | None, tables: tuple[Tensor, ...], cache: KVCache, layer: int
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.norm1(x, residual)
        x, residual = self.norm2(self.attention(x, tables, cache, layer), residual)
        return self.mlp(x), residual


class Decoder(nn.Module):
    """Returns the logits of tokens over a cache.

    >>> from tilewright.generate.config import of_gpt
    >>> from tilewright.plan.gpt import LLAMA, GPTConfig
    >>> config = of_gpt(GPTConfig(width=32, layers=2, heads=4, kv_heads=2, vocabulary=64, sequence=16, **LLAMA))
    >>> model, cache = Decoder(config).requires_grad_(False), KVCache(config.shape, batch=1, context=16)
    >>> cache.begin(torch.tensor([3]))
    >>> model(torch.tensor([[5, 6, 7]]), cache).shape
    torch.Size([1, 3, 64])
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config, shape = config, config.shape
        self.token = nn.Embedding(shape.vocabulary, shape.width)
        learned = shape.positions == "learned"
        self.position = nn.Embedding(shape.longest or shape.sequence, shape.width) if learned else None
        self.blocks = nn.ModuleList(Block(config) for _ in range(shape.layers))
        self.norm = Norm(shape.width, config)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if shape.tied:
            self.head.weight = self.token.weight
        self.tables: tuple[Tensor, Tensor] | None = None  # cosines and sines, made at the first forward

    @property
    def device(self) -> torch.device:
        return self.token.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.token.weight.dtype

    @property
    def longest(self) -> int:
        """Tokens that a sequence may have."""
        return self.config.shape.longest or self.config.shape.sequence

    def prepare(self, context: int) -> None:
        """Make the cosines and sines of so many positions, in float64 and rounded once."""
        made = self.tables
        if self.position is not None or (made and len(made[0]) >= context and made[0].device == self.device):
            return
        frequencies = torch.tensor(inverse_frequencies(self.config), dtype=torch.float64, device=self.device)
        angles = torch.outer(torch.arange(context, dtype=torch.float64, device=self.device), frequencies)
        self.tables = angles.cos().float(), angles.sin().float()

    def forward(self, tokens: Tensor, cache: KVCache, last: Tensor | None = None) -> Tensor:
        """The logits of all tokens or, where `last` names one of each row, of that alone."""
        cache.place(tokens.shape[1])
        self.prepare(cache.context)
        x: Tensor = self.token(tokens)
        residual: Tensor | None = None
        if self.position is not None:
            x = x + self.position(cache.positions(tokens.shape[1]))
        for layer, block in enumerate(self.blocks):
            x, residual = block(x, residual, self.tables or (), cache, layer)
        if last is not None:
            rows = torch.arange(len(x), device=x.device)
            x, residual = x[rows, last, None], None if residual is None else residual[rows, last, None]
        return matmul(self.head, self.norm(x, residual)[0])
