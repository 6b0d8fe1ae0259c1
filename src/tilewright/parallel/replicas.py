"""DDP and FSDP2: the ranks that take their own batches, and what of the model each of them holds."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from tilewright.parallel.mesh import Mesh

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
    stage as a whole.
    """
    # The stream between blocks keeps its dtype: only weights and gradients change theirs.
    precision = MixedPrecisionPolicy(
        param_dtype=_DTYPES[policy.parameters], reduce_dtype=_DTYPES[policy.gradients], cast_forward_inputs=False
    )
    reshard: bool | int = mesh.layout.zero == 3 and mesh.layout.pieces == 1 and (policy.reshard or True)
    assert mesh.sharding is not None
    for block in blocks:
        fully_shard(block, mesh=mesh.sharding, mp_policy=precision, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh.sharding, mp_policy=precision, reshard_after_forward=False)
    sharded: Any = blocks
    for number, block in enumerate(sharded):
        ahead = sharded[number + 1 : number + 1 + policy.prefetch]
        behind = sharded[max(0, number - policy.prefetch) : number][::-1]
        if ahead:
            block.set_modules_to_forward_prefetch(ahead)
        if behind:
            block.set_modules_to_backward_prefetch(behind)


def replicate(model: nn.Module, mesh: Mesh) -> nn.Module:
    """A model whose gradients DDP averages while backward goes on."""
    assert mesh.replicas is not None
    device = next(model.parameters()).device
    # Tables of angles: alike everywhere, and no business of DDP's.
    names = [name for name, _ in model.named_buffers()]
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
