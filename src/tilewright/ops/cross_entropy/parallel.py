"""`cross_entropy` of logits whose columns are spread over the ranks of a process group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tilewright.ops.cross_entropy.launch import Options, begin, launch
from tilewright.ops.cross_entropy.reference import reference
from tilewright.runtime import dispatch, register


class _Parallel(torch.autograd.Function):
    """Logits whose columns are spread over a process group: statistics here, two small reductions, gradient here."""

    @staticmethod
    def forward(
        ctx: Any, logits: Any, targets: Any, weight: Any, options: Options, mean: bool, inplace: bool, group: Any
    ) -> Any:
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        columns, compute = logits.shape[-1], dispatch.compute_dtype(logits)
        shard = {"offset": rank * columns, "classes": ranks * columns}
        (packed,) = dispatch.packed((logits,))
        denominator, _ = begin(targets, weight, shard["classes"], options.ignore_index, mean, compute)
        x_target, parts = launch(packed, targets, weight, denominator, options, **shard)
        maximum, total, *rest = parts.unbind(-1)
        # With the rows' maxima, the most and the fewest columns of a rank: shards that do not fit together are NaN.
        sizes = torch.cat((maximum.new_full((1,), columns), maximum.new_full((1,), -columns)))
        tops = torch.cat((maximum.amax(1), sizes))
        dist.all_reduce(tops, dist.ReduceOp.MAX, group=group)
        top = torch.where((tops[-2:] == sizes).all(), tops[:-2], float("nan"))
        total = (total * (maximum - top[:, None]).exp()).sum(1)
        if rest:  # for label smoothing
            pivot, spread, weights = rest
            rest = [(spread + weights * (pivot - top[:, None])).sum(1), weights.sum(1)]
        sums = torch.stack((x_target, total, *rest))
        dist.all_reduce(sums, group=group)
        x_target, total, *rest = sums
        whole = torch.stack((top, total, *((top, *rest) if rest else ())), -1)[:, None].contiguous()
        loss = logits.new_empty(targets.shape, dtype=compute)
        lse = torch.empty_like(loss)
        given = (x_target.contiguous(), whole)
        launch(packed, targets, weight, denominator, options, loss=loss, lse=lse, given=given, **shard)
        ctx.save_for_backward(logits, targets, weight, denominator, *given)
        ctx.options, ctx.inplace, ctx.shard = options, inplace, shard
        ctx.mark_non_differentiable(lse)
        return loss, lse

    @staticmethod
    def backward(ctx: Any, upstream: Any, _: Any) -> Any:
        register.refuse_second_derivative("cross_entropy")
        logits, targets, weight, denominator, *given = ctx.saved_tensors
        (packed,) = dispatch.packed((logits,))
        gradient = packed if ctx.inplace or packed is not logits else torch.empty_like(packed)
        launch(
            packed, targets, weight, denominator, ctx.options, upstream=upstream, gradient=gradient,
            given=tuple(given), **ctx.shard,
        )  # fmt: skip
        return dispatch.claim_storage(gradient, logits), *(None,) * 6


@torch.compiler.disable  # type: ignore[untyped-decorator]
def parallel(
    logits: Any, targets: Any, weight: Any, options: Options, reduction: str, inplace: bool, group: Any
) -> Any:
    """(loss, lse) of sharded logits."""
    if dispatch.runs_kernel(logits):
        loss, lse = _Parallel.apply(logits, targets, weight, options, reduction == "mean", inplace, group)
        return (loss if reduction == "none" else loss.sum()), lse
    check_shards(logits, group)
    if weight is None and options[1:] == (0.0, 0.0, 0.0) and dispatch.compute_dtype(logits) == torch.float32:
        loss, lse = _Plain.apply(logits, targets, options.ignore_index, group)
        counted = (targets != options.ignore_index).sum()
        if reduction == "none":
            return loss, lse
        return (loss.sum() / counted.clamp_min(1) if reduction == "mean" else loss.sum()), lse
    everything = _Gathered.apply(logits, group)
    return reference(
        everything, targets, weight=weight, ignore_index=options.ignore_index, label_smoothing=options.smoothing,
        z_loss=options.z_loss, softcap=options.softcap, reduction=reduction,
    )  # fmt: skip


@torch.compiler.disable  # type: ignore[untyped-decorator]
def check_shards(logits: torch.Tensor, group: Any) -> None:
    """Refuse, on every rank, shards of different sizes."""
    widest = torch.tensor([logits.shape[-1], -logits.shape[-1]], device=logits.device)
    dist.all_reduce(widest, dist.ReduceOp.MAX, group=group)
    most, least = widest[0].item(), -widest[1].item()
    if most != least:
        raise ValueError(f"cross_entropy: ranks have {least} to {most} columns; give every rank as many.")


class _Plain(torch.autograd.Function):
    """The loss of each row in PyTorch's ops, without options: three messages of a number a row."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, ignore_index: int, group: Any) -> Any:
        x, first = logits.float(), dist.get_rank(group) * logits.shape[-1]
        top = x.amax(-1)
        dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        index = targets.long() - first
        here = (index >= 0) & (index < x.shape[-1])
        index = torch.where(here, index, 0)
        at_target = torch.where(here, x.gather(-1, index[..., None])[..., 0], 0.0)
        sums = torch.stack((at_target, (x - top[..., None]).exp().sum(-1)))
        dist.all_reduce(sums, group=group)
        lse = top + sums[1].log()
        counts = targets != ignore_index
        ctx.save_for_backward(logits, lse, index, here, counts)
        ctx.mark_non_differentiable(lse)
        ranks = dist.get_world_size(group)
        outside = counts & ((targets < 0) | (targets >= ranks * x.shape[-1]))
        return torch.where(counts, torch.where(outside, float("nan"), lse - sums[0]), 0.0), lse

    @staticmethod
    def backward(ctx: Any, upstream: Any, _: Any) -> Any:
        register.refuse_second_derivative("cross_entropy")
        logits, lse, index, here, counts = ctx.saved_tensors
        gradient = (logits.float() - lse[..., None]).exp()
        gradient.scatter_add_(-1, index[..., None], -here.float()[..., None])
        gradient *= torch.where(counts, upstream, 0.0)[..., None]
        return gradient.to(logits.dtype), None, None, None


class _Gathered(torch.autograd.Function):
    """The columns of all ranks, for the plain path; every rank computes the whole loss and keeps its own gradient."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, group: Any) -> torch.Tensor:
        shards = [
            torch.empty_like(logits, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))
        ]
        dist.all_gather(shards, logits.contiguous(), group=group)
        ctx.rank, ctx.columns = dist.get_rank(group), logits.shape[-1]
        return torch.cat(shards, -1)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient.narrow(-1, ctx.rank * ctx.columns, ctx.columns), None
