"""Messages inside of forward whose gradients are messages, too. A sequence is the second dimension."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional

# Named anew in PyTorch 2.13, which warns of the old names.
_all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def gather(x: Tensor, group: Any) -> Tensor:
    """The parts of a sequence that all ranks have, in the order of ranks."""
    ahead = x.transpose(0, 1).contiguous()
    out = ahead.new_empty((dist.get_world_size(group) * ahead.shape[0], *ahead.shape[1:]))
    _all_gather(out, ahead, group=group)
    return out.transpose(0, 1)


def scatter(x: Tensor, group: Any) -> Tensor:
    """This rank's part of the sequence of the sum over all ranks."""
    ahead = x.transpose(0, 1).contiguous()
    out = ahead.new_empty((ahead.shape[0] // dist.get_world_size(group), *ahead.shape[1:]))
    _reduce_scatter(out, ahead, group=group)
    return out.transpose(0, 1)


def _part(x: Tensor, group: Any) -> Tensor:
    return x.chunk(dist.get_world_size(group), 1)[dist.get_rank(group)].contiguous()


def _sum(x: Tensor, group: Any) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x


class _Message(torch.autograd.Function):
    """`forward` one of the functions above, None for nothing to send; and another one for the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, there: Any, back: Any) -> Tensor:
        ctx.group, ctx.back = group, back
        return x.view_as(x) if there is None else there(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return (gradient if ctx.back is None else ctx.back(gradient, ctx.group)), None, None, None


def enter(x: Tensor, group: Any, in_parts: bool) -> Tensor:
    """What every rank of tensor parallel is to have whole: it is, or each has a part of the sequence."""
    return _Message.apply(x, group, gather if in_parts else None, scatter if in_parts else _sum)


def leave(x: Tensor, group: Any, in_parts: bool) -> Tensor:
    """The sum of what the ranks of tensor parallel have; of that each gets all, or its part of the sequence."""
    return _Message.apply(x, group, scatter if in_parts else _sum, gather if in_parts else None)


def keep_part(x: Tensor, group: Any) -> Tensor:
    """This rank's part of a sequence that every rank has whole."""
    return _Message.apply(x, group, _part, gather)


def gather_whole(x: Tensor, group: Any) -> Tensor:
    """The whole of a sequence of which each rank has a part, for all to go on alike: gradients are not added up."""
    return _Message.apply(x, group, gather, _part)


def gather_sequence(x: Tensor, group: Any) -> Tensor:
    """The whole of a sequence of which each rank has a part and, later, the gradient of a part."""
    return _Message.apply(x, group, gather, scatter)


def exchange(x: Tensor, sent: Sequence[int], came: Sequence[int], group: Any) -> Tensor:
    """The rows that every rank has for this one; so many go to each rank, and so many come from each."""
    return _Message.apply(x, group, _exchanging(sent, came), _exchanging(came, sent))


def _exchanging(sent: Sequence[int], came: Sequence[int]) -> Any:
    return functools.partial(_exchange, sent=list(sent), came=list(came))


def _exchange(x: Tensor, group: Any, sent: list[int], came: list[int]) -> Tensor:
    # Functional: selective recompute can keep what it returns.
    return functional.wait_tensor(functional.all_to_all_single(x.contiguous(), came, sent, group))
