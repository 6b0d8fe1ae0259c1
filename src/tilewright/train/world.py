"""The processes that train together: one, unless torch.distributed has been started.

What parallelism needs of the loop goes through here: who this is, who speaks, and the mean over all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class World:
    """This process among those that train together.

    >>> World().speaks
    True
    """

    rank: int = 0
    ranks: int = 1

    @classmethod
    def current(cls) -> World:
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        return cls()

    @property
    def speaks(self) -> bool:
        """Whether this is the one process that shows and writes figures."""
        return self.rank == 0

    def sum_(self, tensors: Iterable[torch.Tensor]) -> None:
        """Replace each tensor by its sum over all ranks."""
        if self.ranks > 1:
            for tensor in tensors:
                dist.all_reduce(tensor)
