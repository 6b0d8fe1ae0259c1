"""DDP and FSDP2: the ranks that take their own batches, and what of the model each of them holds."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from tilewright.parallel.experts import experts_of
from tilewright.parallel.mesh import Mesh
from tilewright.parallel.tensor import local

# A block may return a view; nothing here writes to one.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
_DTYPES = {"auto": None, "fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Policy:
    """How FSDP2 and DDP go about it; the words are those of the section `parallel` of a run."""

    parameters: str = "auto"
    gradients: str = "auto"
    reshard: int = 0
    prefetch: int = 1
    overlap: bool = True


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """What FSDP2 makes a group of each."""
    return list(getattr(model, "blocks", model).children())


def shard(model: nn.Module, blocks: list[nn.Module], mesh: Mesh, policy: Policy) -> None:
    """Shard the parameters of a model by FSDP2: a group each block, and one of what is left.

    With zero 2 weights stay gathered from forward to backward, with zero 3 they are gathered twice. What is left is
    needed at both ends of the model and stays gathered. The schedule of interleaved stages gathers and releases a
    stage as a whole. Experts that ranks share are groups of their own, over those ranks that have the same.
    """
    # The stream between blocks keeps its dtype: only weights and gradients change theirs.
    precision = MixedPrecisionPolicy(
        param_dtype=_DTYPES[policy.parameters], reduce_dtype=_DTYPES[policy.gradients], cast_forward_inputs=False
    )
    reshard: bool | int = mesh.layout.zero == 3 and mesh.layout.pieces == 1 and (policy.reshard or True)
    # As many neighbours as share the experts have all of these among them if each keeps its own.
    of_experts = bool(reshard) and policy.reshard not in (1, mesh.layout.ep)
    assert mesh.sharding is not None
    groups: list[list[Any]] = []
    for block in blocks:
        shared = list(experts_of(block)) if mesh.layout.sharing > 1 else []
        for module in (*shared, block):
            among = mesh.sharding if module is block else mesh.copies
            # Selective recompute may gather nothing in a block that its forward did not gather there. Backward has the
            # experts of all blocks ready but those of the last: these stay gathered.
            how = reshard if module is block else block is not blocks[-1] and of_experts
            fully_shard(
                module, mesh=among, mp_policy=precision, reshard_after_forward=how,
                shard_placement_fn=None if policy.reshard and module is block else partial(_cut, ranks=among.shape[-1]),
            )  # fmt: skip
        groups.append([block, *shared])
    fully_shard(model, mesh=mesh.sharding, mp_policy=precision, reshard_after_forward=False)
    for number, (block, *_) in enumerate(groups):
        ahead = list(chain(*groups[number + 1 : number + 1 + policy.prefetch]))
        behind = list(chain(*groups[max(0, number - policy.prefetch) : number][::-1]))
        if ahead:
            block.set_modules_to_forward_prefetch(ahead)
        if behind:
            block.set_modules_to_backward_prefetch(behind)


def _cut(parameter: nn.Parameter, ranks: int) -> Shard | None:
    """Where stacked weights of experts are cut: along the first dimension that the ranks divide.

    FSDP2 would cut the first, and pad few experts to as many as ranks. With `reshard` it takes no other.
    """
    shape = local(parameter).shape
    return next((Shard(dim) for dim, size in enumerate(shape) if size % ranks == 0), None) if len(shape) == 3 else None


def replicate(model: nn.Module, mesh: Mesh) -> nn.Module:
    """A model whose gradients DDP averages while backward goes on."""
    assert mesh.replicas is not None
    device = next(model.parameters()).device
    # Tables of angles are alike everywhere, and experts that ranks share are not: no business of DDP's.
    names = [name for name, _ in model.named_buffers()]
    names += [name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    return DistributedDataParallel(
        model, device_ids=[device] if device.type == "cuda" else None, process_group=mesh.replicas.get_group(),
        gradient_as_bucket_view=True,
    )  # fmt: skip


def prepare(forward: nn.Module, model: nn.Module, mesh: Mesh, *, last: bool) -> None:
    """Before a micro batch: DDP averages gradients after the last, FSDP2 after each, but groups with the same weights
    after the last; zero 2 gathers weights once.
    """
    if isinstance(forward, DistributedDataParallel):
        forward.require_backward_grad_sync = last
    elif isinstance(model, FSDPModule):
        model.set_reshard_after_backward(last or mesh.layout.zero == 3)
        model.set_requires_all_reduce(last)
