"""A small Llama in plain PyTorch: what the plan's memory is checked against beside our own GPT."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tilewright.ops import dropout_add_norm


class RMSNorm(torch.autograd.Function):
    """Keeps what PyTorch's kernel keeps on a GPU, the input and 1/rms; on a CPU `F.rms_norm` runs op by op."""

    @staticmethod
    def forward(ctx, x, weight):
        rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
        ctx.save_for_backward(x, weight, rstd)
        return x * rstd * weight

    @staticmethod
    def backward(ctx, dout):
        x, weight, rstd = ctx.saved_tensors
        normed, scaled = x * rstd, dout * weight
        dx = (scaled - normed * (scaled * normed).mean(-1, keepdim=True)) * rstd
        return dx, (dout * normed).sum((0, 1))


class Norm(nn.Module):
    """Add and RMSNorm, fused or one after the other."""

    def __init__(self, width, fused):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.fused = fused

    def forward(self, x, residual):
        if self.fused:
            return dropout_add_norm(x, residual, self.weight, norm="rms", prenorm=True)
        residual = x if residual is None else x + residual
        return RMSNorm.apply(residual, self.weight), residual


class Block(nn.Module):
    def __init__(self, decoder, fused):
        super().__init__()
        h, d = decoder.width, decoder.head_dim
        self.head_dim = d
        self.norm1, self.norm2 = Norm(h, fused), Norm(h, fused)
        self.q = nn.Linear(h, decoder.heads * d, bias=False)
        self.k, self.v = (nn.Linear(h, decoder.kv_heads * d, bias=False) for _ in range(2))
        self.out = nn.Linear(decoder.heads * d, h, bias=False)
        self.gate, self.up = (nn.Linear(h, decoder.ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(decoder.ffn, h, bias=False)

    def forward(self, x, residual, cos, sin):
        x, residual = self.norm1(x, residual)
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in (self.q, self.k, self.v))
        q, k = (t * cos + torch.cat(t.chunk(2, -1)[::-1], -1) * sin for t in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x, residual = self.norm2(self.out(y.transpose(1, 2).flatten(-2)), residual)
        return self.down(F.silu(self.gate(x)) * self.up(x)), residual


class Llama(nn.Module):
    def __init__(self, decoder, fused=False, recompute=False):
        super().__init__()
        self.recompute = recompute
        self.token = nn.Embedding(decoder.vocabulary, decoder.width)
        self.blocks = nn.ModuleList(Block(decoder, fused) for _ in range(decoder.layers))
        self.norm = Norm(decoder.width, fused)
        self.head = nn.Linear(decoder.width, decoder.vocabulary, bias=False)
        angles = torch.outer(torch.arange(decoder.sequence), torch.ones(decoder.head_dim))
        self.cos, self.sin = angles.cos(), angles.sin()

    def forward(self, tokens, targets):
        x, residual = self.token(tokens), None
        for block in self.blocks:
            arguments = (x, residual, self.cos, self.sin)
            x, residual = checkpoint(block, *arguments, use_reentrant=False) if self.recompute else block(*arguments)
        logits = self.head(self.norm(x, residual)[0])
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
