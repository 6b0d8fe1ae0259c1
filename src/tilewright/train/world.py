"""The processes that train together: one, unless torch.distributed has been started.

What parallelism needs of the loop goes through here: who this is, who speaks, and the mean over all.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
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

    @staticmethod
    @contextlib.contextmanager
    def joined() -> Iterator[None]:
        """Join those that torchrun has started, if it has: each its own GPU, or processes on a CPU."""
        if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
            yield
            return
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        try:
            yield
        finally:
            dist.destroy_process_group()

    def sum_(self, tensors: Iterable[torch.Tensor]) -> None:
        """Replace each tensor by its sum over all ranks."""
        if self.ranks > 1:
            for tensor in tensors:
                dist.all_reduce(tensor)
