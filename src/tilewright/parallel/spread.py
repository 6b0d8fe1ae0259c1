"""A model spread over a mesh: how its micro batches run, and what its optimizer is to step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from tilewright.parallel import replicas
from tilewright.parallel.mesh import Mesh
from tilewright.parallel.shards import Shards
from tilewright.runtime import philox


class Spread:
    """A model on the ranks of a mesh.

    Args:
        model: whole, and the same on every rank; it is cut in place.
        by_position: whether dropout is drawn by each token's place in the global batch.
    """

    def __init__(
        self, model: nn.Module, mesh: Mesh, policy: replicas.Policy, device: torch.device, *, by_position: bool
    ) -> None:
        self.model, self.mesh, self.policy = model, mesh, policy
        self.positions = philox.Positions(device) if by_position else None
        layout = mesh.layout
        self.forward: Any = model
        if layout.is_sharded:
            replicas.shard(model, list(getattr(model, "blocks", model).children()), mesh, policy)
        self.shards = Shards(model, mesh)
        # What gradients are to be divided by: DDP and FSDP2 take means themselves, in backward.
        self.divisor = 1 if layout.is_sharded or policy.overlap else layout.replicas

    def replicate(self) -> None:
        """Let DDP watch backward, once the model has its dtype and its compiler."""
        if self.mesh.layout.replicas > 1 and self.divisor == 1 and not self.mesh.layout.is_sharded:
            self.forward = replicas.replicate(self.model, self.mesh)

    @contextlib.contextmanager
    def micro_batch(self, seed: int, *, last: bool) -> Iterator[None]:
        """Around forward and backward of a micro batch; `seed` is what its dropout is drawn by, if by position."""
        if isinstance(self.forward, DistributedDataParallel) or isinstance(self.model, FSDPModule):
            replicas.prepare(self.forward, self.model, self.mesh, last=last)
        if self.positions is not None:
            self.positions.set(seed)
        with philox.by_position(self.positions):
            yield

    def reduce_gradients(self) -> None:
        """Complete what all micro batches have added up; divided by `divisor` it is a mean over the replicas."""
        found = self.shards.take_gradients()
        if self.divisor > 1:
            for gradient in found:
                dist.all_reduce(gradient, group=self.mesh.replicas.get_group())  # type: ignore[union-attr]

    def settle(self) -> None:
        """After an evaluation: let go of weights that were gathered for it."""
        if isinstance(self.model, FSDPModule):
            for module in self.model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
