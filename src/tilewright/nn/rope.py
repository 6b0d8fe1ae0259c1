"""`ops.rope` as a module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tilewright.ops.rope.op import rope, rope_tables


class RoPE(torch.nn.Module):
    """Rotary position embeddings of queries and keys: one kernel, tables in float32 whatever the model's dtype.

    It has no parameters and adds nothing to a checkpoint.

    Args:
        head_dim: size of a head, even.
        positions: the longest sequence, or the largest position id and one more.
        base: of the geometric series of wavelengths, also called theta.
        rotary_dim: how many elements of each head are rotated, the first ones; default: all.
        interleaved: pair neighbours, as GPT-J does, not the two halves of a head, as Llama does.

    >>> rope = RoPE(8, positions=16)
    >>> q, k = rope(torch.randn(2, 5, 4, 8), torch.randn(2, 5, 1, 8))
    >>> q.shape, k.shape, list(rope.state_dict())
    (torch.Size([2, 5, 4, 8]), torch.Size([2, 5, 1, 8]), [])
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(
        self,
        head_dim: int,
        positions: int,
        *,
        base: float = 10000.0,
        rotary_dim: int | None = None,
        interleaved: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.head_dim, self.positions, self.base, self.interleaved = head_dim, positions, base, interleaved
        self.rotary_dim = head_dim if rotary_dim is None else rotary_dim
        if self.rotary_dim > head_dim:
            raise ValueError(f"RoPE: rotary_dim is {rotary_dim}, but a head has {head_dim} elements.")
        for name, table in zip(("cos", "sin"), self._tables(device), strict=True):
            self.register_buffer(name, table, persistent=False)

    def _tables(self, device: torch.device | str | None) -> tuple[torch.Tensor, torch.Tensor]:
        return rope_tables(self.positions, self.rotary_dim, base=self.base, device=device)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Move the module as PyTorch does, but keep the tables' float32 bits, and make tables that were on meta."""
        before = self.cos, self.sin
        super()._apply(fn, recurse)
        device = self.cos.device
        if before[0].is_meta and not self.cos.is_meta:
            self.cos, self.sin = self._tables(device)
        elif self.cos.dtype != before[0].dtype:
            self.cos, self.sin = (table.to(device) for table in before)
        return self

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        heads_first: bool = False,
    ) -> Any:
        return rope(
            q, k, self.cos, self.sin, position_ids=position_ids, interleaved=self.interleaved, heads_first=heads_first
        )

    def extra_repr(self) -> str:
        return (
            f"{self.head_dim}, positions={self.positions}, base={self.base}, rotary_dim={self.rotary_dim}, "
            f"interleaved={self.interleaved}"
        )
