"""Experts on many ranks: the balance of what their routers choose, over the global batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from tilewright.nn import MixtureOfExperts
from tilewright.nn.experts import shift_balance, take_counts
from tilewright.parallel.mesh import Mesh


def balance(mixtures: Sequence[MixtureOfExperts], mesh: Mesh, rate: Tensor) -> Tensor:
    """After a step, balance each mixture by what all replicas counted; returns the largest share that an expert had.

    Rows are counted and not weighed, so the sums are the same on any mesh and in any micro batches.
    """
    counts = take_counts(mixtures)
    if mesh.replicas is not None:
        dist.all_reduce(counts, group=mesh.replicas.get_group())
    shift_balance(mixtures, counts, rate)
    return (counts.amax(-1) / counts.sum(-1)).max()
