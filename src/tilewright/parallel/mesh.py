"""The ranks of a run as one DeviceMesh, and this rank's place in it."""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tilewright.parallel.layout import Layout

DIMENSIONS = ("pp", "dp", "cp", "tp")
GROUPS = ("dp_replicate", "dp_shard")


class Mesh:
    """A layout over the processes there are; alone, no process group is needed.

    >>> Mesh(Layout(), "cpu").place("dp")
    0
    """

    def __init__(self, layout: Layout, device_type: str) -> None:
        self.layout = layout
        self.whole: DeviceMesh | None = None
        self.replicas: DeviceMesh | None = None
        self.sharding: DeviceMesh | None = None  # what FSDP2 takes: replicas, or groups of them that have the same
        self._weights: DeviceMesh | None = None  # what weights are cut over
        if layout.is_alone:
            return
        sizes = (layout.pp, layout.dp, layout.cp, layout.tp)
        self.whole = init_device_mesh(device_type, sizes, mesh_dim_names=DIMENSIONS)
        # Gradients are averaged over, and weights sharded over, all that hold the same part of the model.
        self.replicas = self.whole["dp", "cp"]._flatten("replicas")
        self._weights, self.sharding = self.whole, self.replicas
        if layout.dp_replicate > 1:  # the same ranks, once more: neighbours share weights, groups have the same
            groups = layout.pp, layout.dp_replicate, layout.shards, layout.tp
            self._weights = init_device_mesh(device_type, groups, mesh_dim_names=("pp", *GROUPS, "tp"))
            self.sharding = self._weights[GROUPS]

    def __deepcopy__(self, memo: Any) -> Mesh:
        return self  # there is one, whatever is copied that knows it

    def place(self, dimension: str) -> int:
        """This rank's number along a dimension."""
        return 0 if self.whole is None else self.whole.get_local_rank(dimension)

    def of(self, dimension: str) -> DeviceMesh:
        """The mesh along one dimension, for weights that are cut along it."""
        assert self._weights is not None
        return self._weights[dimension]

    @functools.cached_property
    def _experts(self) -> DeviceMesh:
        """The same ranks, once more, for a model that has experts: neighbours share them, also those of tp."""
        layout = self.layout
        sizes = {"pp": layout.pp, "dp_replicate": layout.dp_replicate, "copies": layout.shards // layout.ep,
                 "ep": layout.sharing}  # fmt: skip
        if layout.dp_replicate == 1:
            del sizes["dp_replicate"]
        assert self.whole is not None
        return init_device_mesh(self.whole.device_type, (*sizes.values(),), mesh_dim_names=(*sizes,))

    @property
    def experts(self) -> DeviceMesh:
        """The mesh of the ranks that share experts."""
        return self._experts["ep"]

    @property
    def copies(self) -> DeviceMesh:
        """The mesh of the ranks that have the same experts, as FSDP2 takes it."""
        return self._experts["copies" if self.layout.dp_replicate == 1 else ("dp_replicate", "copies")]

    def group(self, dimension: str) -> Any:
        """The process group along a dimension; None where it has one rank."""
        if self.whole is None or self.whole[dimension].size() == 1:
            return None
        return self.whole.get_group(dimension)

    @property
    def has_loss(self) -> bool:
        """Whether this rank computes the loss: it has the last stage of the pipeline."""
        return self.place("pp") == self.layout.pp - 1

    @property
    def share(self) -> float:
        """The factor by which what this rank has of all sequences goes into a sum over all ranks that is their mean."""
        return self.layout.pp / self.layout.ranks if self.has_loss else 0.0

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replace a tensor by its sum over all ranks."""
        if self.whole is not None:
            dist.all_reduce(tensor)
        return tensor


def limit_waiting(seconds: float) -> None:
    """Let a rank that waits for others give up after so many seconds, in every process group that there is.

    Meshes, and what is made of them, have groups with PyTorch's own limit; there is no public way to set another.
    """
    if dist.is_initialized():
        for group in list(distributed_c10d._world.pg_map):
            distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)
