"""Tensor and sequence parallel: the ranks of tp share every matmul, the heads and the vocabulary.

Parameters are DTensors over the mesh of tp; what computes with them, our fused ops too, sees the part of this rank. A
pair of matmuls sends twice, as in Megatron-LM: the first has some of the columns of its result, the second sums up over
them. With sequence parallel each rank has some of the tokens between two pairs.

    enter (gather)   qkv by heads, attention, out     leave (sum, or reduce-scatter)
    enter (gather)   up, activation, down             leave

A shared part is cut like this: `qkv` by heads, so that its rows are in the order of ranks, each with its queries, keys
and values; `row_orders` has that order, and checkpoints are written in the model's own.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.func import functional_call

from tilewright.models.block import Attention
from tilewright.nn import MixtureOfExperts
from tilewright.ops import cross_entropy, linear
from tilewright.parallel.collectives import enter, leave
from tilewright.parallel.mesh import Mesh

_COLUMNS = ("qkv", "up", "gate_proj", "up_proj")
_ROWS = ("out", "down", "down_proj")
_CHUNK = 4096  # tokens whose logits are there at once, where never all of them are to be


def local(parameter: Any) -> Tensor:
    """This rank's part of a parameter."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def cut(model: Any, mesh: Mesh, device: torch.device) -> dict[str, Tensor]:
    """Cut the matmuls of a GPT in place; returns the order of rows of those that are cut by heads."""
    orders: dict[str, Tensor] = {}
    for number, block in model.blocks.named_children():
        attention = block.attention
        order = _order_of_heads(attention, mesh.layout.tp)
        orders |= {f"blocks.{number}.attention.qkv.{name}": order for name, _ in attention.qkv.named_parameters()}
        _cut_pair(attention, mesh, device, order)
        if not isinstance(block.mlp, MixtureOfExperts):  # whose experts ranks share as they are
            _cut_pair(block.mlp, mesh, device, None)
    for table in (model.token, model.head):
        if table is not None:
            _cut(table, "weight", 0, mesh, device)
    return orders


def _order_of_heads(attention: Attention, ranks: int) -> Tensor:
    sizes = [heads * attention.head_dim for heads in (attention.heads, attention.key_heads, attention.key_heads)]
    q, k, v = (rows.chunk(ranks) for rows in torch.arange(sum(sizes)).split(sizes))
    return torch.cat([part for rank in range(ranks) for part in (q[rank], k[rank], v[rank])])


def _cut(
    module: Any, name: str, dimension: int, mesh: Mesh, device: torch.device, order: Tensor | None = None
) -> None:  # fmt: skip
    parameter = getattr(module, name, None)
    if parameter is None:
        return
    whole = parameter.data if order is None else parameter.data[order.to(parameter.device)]
    part = whole.chunk(mesh.layout.tp, dimension)[mesh.place("tp")].clone(memory_format=torch.contiguous_format)
    cut = DTensor.from_local(part.to(device), mesh.of("tp"), [Shard(dimension)], run_check=False)
    setattr(module, name, nn.Parameter(cut, requires_grad=parameter.requires_grad))


def _cut_pair(module: Any, mesh: Mesh, device: torch.device, order: Tensor | None) -> None:
    """Cut a module of two matmuls; it runs as it is, on its parts, between two messages."""
    groups = {id(each): each for each in vars(module).values() if isinstance(each, dist.ProcessGroup)}  # not copied
    part = copy.deepcopy(module, groups).to("meta")  # computes with tensors that it is given
    group, in_parts = mesh.group("tp"), mesh.layout.sp
    if isinstance(part, Attention):
        part.heads, part.key_heads = part.heads // mesh.layout.tp, part.key_heads // mesh.layout.tp
    for name, child in module.named_children():
        if name in _COLUMNS:
            _cut(child, "weight", 0, mesh, device, order)
            _cut(child, "bias", 0, mesh, device, order)
        if name in _ROWS:
            _cut(child, "weight", 1, mesh, device)
            last, getattr(part, name).bias = child, None

    def forward(x: Tensor, *rest: Any) -> Tensor:
        parameters = {name: local(p) for name, p in module.named_parameters() if p is not last.bias}
        y = leave(functional_call(part, parameters, (enter(x, group, in_parts), *rest)), group, in_parts)
        return y if last.bias is None else y + last.bias.to(y.dtype)

    module.forward = forward


def embed(tokens: Tensor, weight: Any, mesh: Mesh) -> Tensor:
    """Look up tokens in a table of which each rank of tp has some rows."""
    group = mesh.group("tp")
    if group is None:
        return F.embedding(tokens, weight)
    rows = local(weight)
    index = tokens - mesh.place("tp") * len(rows)
    inside = (index >= 0) & (index < len(rows))
    x = F.embedding(torch.where(inside, index, 0), rows)
    return leave(torch.where(inside[..., None], x, 0.0), group, mesh.layout.sp)


def loss(x: Tensor, weight: Any, targets: Tensor, mesh: Mesh, *, in_chunks: bool) -> Tensor:
    """The mean cross-entropy of a vocabulary of which each rank of tp has some; no rank ever has all logits of a token.

    Args:
        in_chunks: have the logits of some tokens at once, and compute them again in backward.
    """
    group, part = mesh.group("tp"), local(weight)
    rows, flat = enter(x, group, mesh.layout.sp).flatten(0, 1), targets.flatten()

    def summed(x: Tensor, targets: Tensor) -> Tensor:
        found: Tensor = cross_entropy(linear(x, part), targets, reduction="sum", group=group)
        return found

    if in_chunks and len(flat) > _CHUNK:
        chunks = zip(rows.split(_CHUNK), flat.split(_CHUNK), strict=True)
        total = torch.stack([torch.utils.checkpoint.checkpoint(summed, *one, use_reentrant=False) for one in chunks])
        return total.sum() / len(flat)
    return summed(rows, flat) / len(flat)
