"""Self-attention of a few new tokens over a cache as one graph of tiles that wait for each other."""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import Tensor

from tilewright import tilesync
from tilewright.nn.linear import Linear
from tilewright.ops.linear.op import matmul_dtype
from tilewright.tilesync import chains
from tilewright.tilesync.stages.common import MOST_FEW_ROWS


@functools.lru_cache(256)  # to describe a graph takes longer than to launch it
def _compile_once(mode: str, *sizes: Any) -> str:
    return tilesync.compile(chains.attention_step(*sizes), mode).name


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _compile(mode: str, *sizes: Any) -> str:
    """Return the name of the compiled graph; under torch.compile, when it is traced."""
    return _compile_once(mode, *sizes)


class FusedAttentionBlock(torch.nn.Module):
    """``x + out(attention(qkv(x)))`` of up to 32 new tokens of one sequence, over a cache of keys and values.

    A token sees the cache and the new tokens up to itself, whose keys and values come to lie behind what is filled.
    Queries, keys and values are not rotated. Each number of tokens is a graph of its own, which is checked and measured
    at its first call. On a GPU it is for 16-bit weights. There are no gradients.

    Args:
        width: size of the last dimension, in and out.
        heads: of queries, each of `head_dim`.
        kv_heads: of keys and values; as many as `heads` if left out.
        head_dim: ``width // heads`` if left out.
        mode: how it runs (`tilesync.compile`).

    >>> block, cache = FusedAttentionBlock(16, 4, kv_heads=2), torch.zeros(2, 2, 10, 4)
    >>> length = torch.zeros(1, dtype=torch.int32)
    >>> block(torch.randn(3, 16), cache[0], cache[1], length).shape
    torch.Size([3, 16])
    """

    def __init__(
        self, width: int, heads: int, *, kv_heads: int | None = None, head_dim: int | None = None, mode: str = "auto",
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if mode not in tilesync.MODES:
            raise ValueError(f"FusedAttentionBlock: mode is {mode!r}; choose {', '.join(tilesync.MODES)}.")
        if head_dim is None and width % heads:
            raise ValueError(f"FusedAttentionBlock: {heads} heads do not divide a width of {width}; give head_dim.")
        self.width, self.heads, self.mode = width, heads, mode
        self.kv_heads, self.head_dim = kv_heads or heads, head_dim or width // heads
        if heads % self.kv_heads:
            raise ValueError(f"FusedAttentionBlock: {self.kv_heads} key heads do not divide {heads} heads.")
        inner, shared = heads * self.head_dim, self.kv_heads * self.head_dim
        self.qkv = Linear(width, inner + 2 * shared, False, device=device, dtype=dtype)
        self.out = Linear(inner, width, False, device=device, dtype=dtype)

    @torch.no_grad()
    def forward(self, x: Tensor, keys: Tensor, values: Tensor, length: Tensor) -> Tensor:
        """Return the output (rows, width) of x, and put its keys and values into the cache.

        Args:
            x: (rows, width).
            keys: (kv_heads, context, head_dim), of which the first `length` of each head are filled.
            values: as keys.
            length: one number, int32, on x's device. The caller adds the rows; they must fit behind it.
        """
        self._check(x, keys, values, length)
        # Constants, also where torch.compile has other rows in mind.
        rows, context = operator.index(x.shape[0]), operator.index(keys.shape[1])
        dtype = matmul_dtype(x)
        if rows == 0:
            return torch.zeros_like(x)
        name = _compile(self.mode, rows, self.width, self.heads, self.head_dim, context, self.kv_heads)
        weights = {"qkv": self.qkv.weight.to(dtype), "out": self.out.weight.to(dtype)}
        cache = {"k": keys.reshape(-1, self.head_dim), "v": values.reshape(-1, self.head_dim)}
        y, mixed = tilesync.find(name)(x=x.to(dtype), length=length, **weights, **cache)
        fresh = mixed[:, self.heads * self.head_dim :].unflatten(1, (2, self.kv_heads, self.head_dim))
        places = length.long() + torch.arange(rows, device=x.device)
        for each, new in zip((keys, values), fresh.permute(1, 2, 0, 3), strict=True):
            each.index_copy_(1, places, new)
        result: Tensor = y
        return result

    def _check(self, x: Tensor, keys: Tensor, values: Tensor, length: Tensor) -> None:
        if x.dim() != 2 or x.shape[1] != self.width or len(x) > MOST_FEW_ROWS:
            raise ValueError(
                f"FusedAttentionBlock: x is {tuple(x.shape)}, but (rows, {self.width}) is needed, up to "
                f"{MOST_FEW_ROWS} rows; more of them are a prefill."
            )
        for name, each in (("keys", keys), ("values", values)):
            if (
                each.dim() != 3
                or (each.shape[0], each.shape[2]) != (self.kv_heads, self.head_dim)
                or each.shape != keys.shape
            ):
                raise ValueError(
                    f"FusedAttentionBlock: {name} are {tuple(each.shape)}, but ({self.kv_heads}, context, "
                    f"{self.head_dim}) is needed, of keys and values the same."
                )
            if each.dtype != matmul_dtype(x):
                raise ValueError(f"FusedAttentionBlock: {name} are {each.dtype}, but {matmul_dtype(x)} is needed.")
        if length.numel() != 1 or length.dtype != torch.int32:
            raise ValueError("FusedAttentionBlock: length is one number of int32, how many tokens the cache has.")

    def extra_repr(self) -> str:
        return f"heads={self.heads}, kv_heads={self.kv_heads}, head_dim={self.head_dim}, mode={self.mode!r}"
