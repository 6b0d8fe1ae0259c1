"""Experts on many ranks: who has which, how rows get to them, and their balance over the global batch.

Ranks that share the experts of a mixture each have some of them, whole. A rank routes its own tokens as ever; the rows,
sorted by expert, are then in the order of ranks. They go to their experts' ranks, are sorted there, and come back:

    rows by expert -> exchange -> sort by expert -> the experts that are here -> undo -> exchange -> rows by expert

How many rows each rank has for each other one is a message of its own, for whose result the host waits: an exchange
takes its sizes from there. No row is padded and none is dropped.

Ranks of tp share experts, too, and no expert is cut: each rank routes a part of every sequence. With sequence
parallel that is what it has; else it takes its part ahead of the mixture, and all parts are gathered behind it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.func import functional_call

from tilewright.nn import MixtureOfExperts
from tilewright.nn.experts import Experts, Order, shift_balance, take_counts
from tilewright.parallel.collectives import exchange, gather_whole, keep_part
from tilewright.parallel.mesh import Mesh
from tilewright.parallel.tensor import local


def experts_of(model: nn.Module) -> Iterator[Experts]:
    """The experts of each mixture in a model."""
    return (module for module in model.modules() if isinstance(module, Experts))


def share(model: nn.Module, mesh: Mesh, device: torch.device) -> None:
    """Leave of the experts of a model, in place, those of this rank, and let it send rows to the others."""
    for experts in experts_of(model):
        _share(experts, mesh, device)
    if mesh.layout.tp > 1 and not mesh.layout.sp:
        for module in model.modules():
            if isinstance(module, MixtureOfExperts):
                _share_tokens(module, mesh.group("tp"))


def routers_of(model: nn.Module) -> Iterator[str]:
    """The names of the parameters of all routers in a model."""
    for name, module in model.named_modules():
        if isinstance(module, MixtureOfExperts):
            yield from (f"{name}.router.{parameter}" for parameter, _ in module.router.named_parameters())


def _share_tokens(mixture: Any, group: Any) -> None:
    run = mixture.forward

    def forward(x: Tensor, *rest: Any) -> Tensor:
        return gather_whole(run(keep_part(x, group), *rest), group)

    mixture.forward = forward


def _share(experts: Any, mesh: Mesh, device: torch.device) -> None:
    part = copy.deepcopy(experts).to("meta")  # computes with tensors that it is given
    along, group = mesh.experts, mesh.experts.get_group()
    for name, parameter in list(experts.named_parameters()):
        here = parameter.data.chunk(along.size())[along.get_local_rank()].clone().to(device)
        cut = DTensor.from_local(here, along, [Shard(0)], run_check=False)
        setattr(experts, name, nn.Parameter(cut, requires_grad=parameter.requires_grad))

    def forward(rows: Tensor, ends: Tensor, recompute: bool = False) -> Tensor:
        if torch.is_autocast_enabled(rows.device.type):  # matmuls would round them anyway: send half as much
            rows = rows.to(torch.get_autocast_dtype(rows.device.type))
        way = _Way(ends, group)
        weights = {name: local(parameter) for name, parameter in experts.named_parameters()}
        return way.back(functional_call(part, weights, (way.there(rows), way.ends, recompute)))

    experts.forward = forward


class _Way:
    """The way of rows to the ranks of their experts, and back.

    Args:
        ends: where the rows of each expert end, of all there are.
        group: the ranks that share them.
    """

    def __init__(self, ends: Tensor, group: Any) -> None:
        self._group, ranks = group, dist.get_world_size(group)
        counts = ends.diff(prepend=ends.new_zeros(1))
        here = len(counts) // ranks
        came = exchange(counts, [here] * ranks, [here] * ranks, group)
        self._sent, self._came = torch.stack((counts, came)).view(2, ranks, here).sum(-1).tolist()
        number = torch.arange(here, device=ends.device).repeat(ranks)
        self._order = Order(number.repeat_interleave(came, output_size=sum(self._came)), here)
        self.ends = self._order.ends

    def there(self, rows: Tensor) -> Tensor:
        """The rows of all ranks for the experts of this one, sorted by expert."""
        return self._order.sort(exchange(rows, self._sent, self._came, self._group))

    def back(self, rows: Tensor) -> Tensor:
        """What the experts of all ranks made of this one's rows."""
        return exchange(self._order.undo(rows), self._came, self._sent, self._group)


def balance(mixtures: Sequence[MixtureOfExperts], mesh: Mesh, rate: Tensor) -> Tensor:
    """After a step, balance each mixture by what all replicas counted; returns the largest share that an expert had.

    Rows are counted and not weighed, so the sums are the same on any mesh and in any micro batches.
    """
    counts = take_counts(mixtures)
    if mesh.replicas is not None:
        dist.all_reduce(counts, group=mesh.replicas.get_group())
    if mesh.layout.tp > 1:
        dist.all_reduce(counts, group=mesh.group("tp"))
    shift_balance(mixtures, counts, rate)
    largest = (counts.amax(-1) / counts.sum(-1)).max()
    if mesh.layout.pp > 1:  # the other layers are elsewhere
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=mesh.group("pp"))
    return largest
