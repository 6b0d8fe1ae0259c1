"""Context parallel: the ranks of cp share every sequence.

A causal query sees what is before it, so later tokens take longer. A sequence is cut into twice as many pieces as there
are ranks, and each rank gets one from the front and its counterpart from the back. Keys and values are gathered for
each layer, as Llama 3 was trained: with grouped heads they are a fraction of the queries. PyTorch's own
`context_parallel` sends them round a ring, and has no kernel for a CPU and none that ours could take the place of.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from tilewright.models.block import Attention
from tilewright.ops.attention.op import attention
from tilewright.ops.rope.op import reference as rotate
from tilewright.ops.rope.op import rope as fused_rotate
from tilewright.parallel.collectives import gather_sequence
from tilewright.parallel.mesh import Mesh


def rows_of(rank: int, ranks: int, length: int) -> Tensor:
    """The tokens of a rank.

    >>> rows_of(0, 2, 8).tolist(), rows_of(1, 2, 8).tolist()
    ([0, 1, 6, 7], [2, 3, 4, 5])
    """
    pieces = torch.arange(length).chunk(2 * ranks)
    return torch.cat((pieces[rank], pieces[-1 - rank])) if ranks > 1 else torch.arange(length)


class ContextAttention(Attention):
    """Attention of a part of the queries to all keys before them."""

    group: Any  # of the ranks of cp
    rank: int
    ranks: int

    def join(self, mesh: Mesh) -> None:
        """Take a place among the ranks of cp: as numbers, which a compiler reads."""
        self.group, self.rank, self.ranks = mesh.group("cp"), mesh.place("cp"), mesh.layout.cp

    def mix(self, qkv: list[Tensor], rope: Any) -> Tensor:
        q, k, v = qkv
        ranks, rank, half = self.ranks, self.rank, q.shape[1] // 2
        length = 2 * half * ranks
        if rope is not None:
            rows = rows_of(rank, ranks, length).to(q.device)
            turn = fused_rotate if self.fused else rotate
            q, k = turn(q, k, rope.cos[rows], rope.sin[rows])
        order = torch.cat([rows_of(each, ranks, length) for each in range(ranks)]).argsort().to(q.device)
        k, v = gather_sequence(torch.cat((k, v), -1), self.group)[:, order].split(self.head_dim, -1)
        ends = (rank + 1) * half, (2 * ranks - rank) * half
        parts = [self._attend(part, k[:, :end], v[:, :end]) for part, end in zip(q.split(half, 1), ends, strict=True)]
        return torch.cat(parts, 1).flatten(2)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The last query is at the last key."""
        if self.fused:
            y: Tensor = attention(q, k, v, backend=self.own)
            return y
        sizes = q.shape[1], k.shape[1]
        if q.is_cuda:
            bias: Any = causal_lower_right(*sizes)
        else:  # where that has no kernel
            bias = torch.ones(sizes, dtype=torch.bool).tril(sizes[1] - sizes[0])
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        if q.shape[1] != k.shape[1]:
            k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
        return F.scaled_dot_product_attention(q, k, v, bias).transpose(1, 2)
