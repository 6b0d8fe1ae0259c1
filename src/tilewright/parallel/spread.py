"""A model spread over a mesh: how its micro batches run, and what its optimizer is to step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from tilewright.models import GPT
from tilewright.parallel import experts, replicas, tensor
from tilewright.parallel.compiled import compile_blocks
from tilewright.parallel.context import ContextAttention
from tilewright.parallel.mesh import Mesh
from tilewright.parallel.ordered import Ordered
from tilewright.parallel.own_time import OwnTime
from tilewright.parallel.pipeline import Pipeline, ends_group, keep_stages
from tilewright.parallel.shards import Shards
from tilewright.parallel.split import SplitGPT, own_rows
from tilewright.runtime import philox


def split(model: GPT, mesh: Mesh, device: torch.device) -> tuple[list[Any], dict[str, Tensor]]:
    """Make a GPT, in place, compute this rank's part; what to call, and the order of rows of what is cut by heads."""
    model.__class__ = SplitGPT
    roots = keep_stages(model, mesh) if mesh.layout.pp > 1 else [model]
    if mesh.layout.cp > 1:
        for block in model.blocks.children():
            attention: Any = block.attention
            attention.__class__ = ContextAttention
            attention.join(mesh)
    orders = tensor.cut(model, mesh, device) if mesh.layout.tp > 1 else {}
    if mesh.layout.sharing > 1:
        experts.share(model, mesh, device)
    model.mesh = mesh  # type: ignore[assignment]
    model.to(device)
    return roots, orders


class Spread:
    """A model on the ranks of a mesh.

    Args:
        model: whole, and the same on every rank; it is cut in place.
        by_position: whether dropout is drawn by each token's place in the global batch.
    """

    def __init__(
        self, model: nn.Module, mesh: Mesh, policy: replicas.Policy, device: torch.device, *, by_position: bool
    ) -> None:
        self.model: Any = model
        self.mesh, self.policy, self.device = mesh, policy, device
        layout = mesh.layout
        self.forward: Any = model
        self.roots: list[Any] = [model]  # what is called as a whole: the model, or of a pipeline this rank's stages
        self.orders: dict[str, Tensor] = {}
        rows, length = None, 0
        if layout.tp > 1 or layout.cp > 1 or layout.pp > 1:
            assert isinstance(model, GPT)
            length = model.config.sequence
            rows = own_rows(mesh, length)
            self.roots, self.orders = split(model, mesh, device)
        elif layout.ep > 1:
            experts.share(model, mesh, device)
            if not layout.is_sharded:
                model.to(device)
        self.positions = philox.Positions(device, rows, length) if by_position else None
        tied = layout.pp > 1 and isinstance(model, GPT) and model.config.tied
        self.ends = ends_group(mesh) if tied else None
        if layout.is_sharded:
            for root in self.roots:
                replicas.shard(root, replicas.blocks_of(root), mesh, policy)
        self.shards = Shards(model, mesh, twice="token.weight" if tied else "")
        self.shares_experts = layout.sharing > 1 and any(experts.experts_of(model))
        self.routers = set(experts.routers_of(model)) if layout.tp > 1 else set()
        # DDP takes no model of which only some parameters are DTensors: with tp, gradients are added up after backward.
        watches = layout.tp == 1 and (layout.replicas > 1 or layout.wrap)
        self.overlaps = policy.overlap and watches and not layout.is_sharded
        # What gradients are to be divided by: DDP and FSDP2 take means themselves, in backward.
        self.divisor = 1 if layout.is_sharded or self.overlaps else layout.replicas

    def replicate(self, streams: tuple[torch.dtype, torch.dtype]) -> None:
        """Let DDP watch backward, once the model has its dtype and its compiler.

        Args:
            streams: dtypes of what a sublayer returns and of the residual stream.
        """
        forwards = [replicas.replicate(root, self.mesh) if self.overlaps else root for root in self.roots]
        self.forward = forwards[0]
        self.pipeline: Pipeline | None = None
        if self.mesh.layout.pp > 1:
            self.pipeline = Pipeline(self.roots, forwards, self.mesh, self.device, streams, self.positions)

    def compiled(self, options: dict[str, Any]) -> Any:
        """What to call, compiled: all of it, or where ranks send between blocks or inside of them each block."""
        if self.mesh.layout.is_replicated:
            return torch.compile(self.forward, options=options)
        for root in self.roots:
            compile_blocks(root, self.device, options)
        return self.forward

    def watch(self, own: OwnTime) -> bool:
        """Measure what this rank does between two messages, where that is less than the whole forward."""
        if self.mesh.layout.is_replicated:
            return False
        layout = self.mesh.layout  # the last stage of a pipeline has the output layer besides
        for module in replicas.blocks_of(self.model) if layout.is_sharded or layout.pp > 1 else [self.model]:
            module.forward = own.timed(module.forward)
        return True

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
        self.shards.take_gradients()
        for part in self.shards.parts:  # what every rank of tp has whole, and saw a part of the tokens on each
            in_parts = (self.mesh.layout.sp and not part.cut & {"tp", "ep"}) or part.name in self.routers
            if part.local.grad is not None and in_parts:
                dist.all_reduce(part.local.grad, group=self.mesh.group("tp"))
        table = getattr(self.model, "token", None)
        if self.ends is not None and table is not None:
            dist.all_reduce(self.shards.gradient("token.weight"), group=self.ends)
        if self.divisor > 1:
            for gradient in self.shards.gradients():
                dist.all_reduce(gradient, group=self.mesh.replicas.get_group())  # type: ignore[union-attr]
        if self.shares_experts:
            self._reduce_gradients_of_experts()

    def _reduce_gradients_of_experts(self) -> None:
        """The same for experts that ranks share, whose gradients are sums over the rows of those ranks."""
        layout, copies = self.mesh.layout, self.mesh.copies
        gradients = self.shards.gradients(of_experts=True)
        if copies.size() > 1 and not layout.is_sharded:
            for gradient in gradients:
                dist.all_reduce(gradient, group=copies.get_group())
        if self.divisor == 1:  # FSDP2 has taken the mean over copies, and DDP does not know them
            torch._foreach_div_(gradients, layout.ep if layout.is_sharded else layout.replicas)

    def tensors(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """What a checkpoint is to hold, in place: the parts of this rank."""
        model, states = self.model.state_dict(), self.shards.state(optimizer)
        for name, order in self.orders.items():
            shape = model[name].shape
            model[name] = Ordered(model[name], order)
            states[name] = {key: Ordered(value, order) if value.shape == shape else value
                            for key, value in states[name].items()}  # fmt: skip
        return {"model": model, "optimizer": states}

    def settle(self) -> None:
        """After an evaluation: let go of weights that were gathered for it."""
        for root in self.roots:
            for module in root.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
