"""The launches of `cross_entropy`, which `linear_cross_entropy` and logits of several ranks share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from tilewright.ops.cross_entropy.hopper import start as start_rows
from tilewright.runtime import dispatch, register


class Options(NamedTuple):
    """What a loss is apart from its tensors."""

    ignore_index: int
    smoothing: float
    z_loss: float
    softcap: float


def begin(
    targets: torch.Tensor, weight: torch.Tensor | None, classes: int, ignore_index: int, mean: bool,
    dtype: torch.dtype, new: Callable[..., torch.Tensor] | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor]:  # fmt: skip
    """(what a mean divides by, zeros for the rows' tiles to be counted in), in memory from `new`, by a small kernel."""
    from tilewright.ops.cross_entropy import kernels

    new = new or targets.new_empty
    denominator = new((), dtype=dtype) if mean else None
    arrived = new(targets.numel(), dtype=torch.int32)
    tensors = (*dispatch.packed((targets, weight)), denominator, arrived)
    start = kernels.prepare_launch(targets.device, classes, dispatch.dtypes(tensors), dtype == torch.float64)
    start((1, 1), tensors, (ignore_index, targets.numel()))
    return denominator, arrived


def launch(
    logits: torch.Tensor,
    targets: torch.Tensor,
    weight: torch.Tensor | None,
    denominator: torch.Tensor | None,
    options: Options,
    *,
    arrived: torch.Tensor | None = None,
    upstream: torch.Tensor | None = None,
    loss: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    gradient: torch.Tensor | None = None,
    offset: int = 0,
    classes: int | None = None,
    given: tuple[torch.Tensor, torch.Tensor] | None = None,
    keep: bool = False,
    new: Callable[..., torch.Tensor] | None = None,
) -> Any:
    """Fill `loss`, `lse` and `gradient`, those that are not None.

    `logits` are packed, or a matrix with rows further apart than they are long, and so is the gradient.

    Where they are the columns from `offset` on of a row of `classes`: without `arrived`, only the statistics of these
    columns are taken and come back, (target's logit, what each tile leaves); `given` are those of whole rows, one part
    a row. To `keep` them they come back from whole rows too, and their memory from `new`.
    """
    from tilewright.ops.cross_entropy import kernels

    columns = logits.shape[-1]
    rows, compute = targets.numel(), dispatch.compute_dtype(logits)
    smooth, capped = options.smoothing > 0.0, options.softcap > 0.0
    targets, weight, upstream = dispatch.packed((targets, weight, upstream))
    plain = rows and weight is None and upstream is None and not (smooth or capped or keep)
    if (
        plain and arrived is not None and loss is not None and gradient is not None
        and start_rows(logits, targets, denominator, loss, lse, gradient, options.ignore_index, options.z_loss)
    ):  # fmt: skip
        return None, None
    first = (logits, targets, weight, denominator, upstream, loss, lse, gradient)
    tiles, lag, start = kernels.tiles_launch(
        logits.device,
        columns,
        columns if logits.is_contiguous() else logits.stride(-2),
        classes or columns,
        dispatch.dtypes((*first, arrived)),
        given is not None,
        keep,
        smooth,
        capped,
    )
    statistics = given or (None, None)
    if given is None and (tiles > 1 or keep or arrived is None):
        new = new or logits.new_empty
        statistics = new(rows, dtype=compute), new((rows, tiles, kernels.numbers(smooth)), dtype=compute)
        if arrived is None:
            statistics[0].zero_()  # where the target is in other columns, its logit is 0 here
    lag = min(lag, rows)
    apart = gradient is not None and arrived is not None and tiles > 1
    programs = (rows + lag) * 2 * tiles if apart else rows * tiles
    if rows:
        stride = 0 if upstream is None or upstream.ndim == 0 else 1
        scalars = (options.ignore_index, stride, rows, offset, lag, options.smoothing, options.z_loss)
        start((programs, 1), (*first, *statistics, arrived), (*scalars, options.softcap if capped else 1.0))
    return statistics


def scale(gradient: torch.Tensor, upstream: torch.Tensor) -> torch.Tensor:
    """gradient *= upstream, a number."""
    from tilewright.ops.cross_entropy import kernels

    count = gradient.numel()
    if count:
        start = kernels.scale_launch(gradient.device, gradient.dtype, upstream.dtype)
        programs = min(-(-count // kernels.SCALED), kernels.SCALING * dispatch.multiprocessors(gradient.device))
        start((programs, 1), (gradient, upstream), (count,))
    return gradient


def take_gradients(ctx: Any, op: str, upstream: torch.Tensor | None) -> Sequence[torch.Tensor | None]:
    """The gradients that an eager forward left in `ctx`, times `upstream`, in their own memory: once."""
    register.refuse_second_derivative(op)
    if upstream is None:
        return ()
    gradients, ctx.gradients = ctx.gradients, None
    if gradients is None:
        raise RuntimeError(f"{op}: an earlier backward took its gradients; run forward again.")
    (factor,) = dispatch.packed((upstream,))
    return [None if gradient is None else scale(gradient, factor) for gradient in gradients]
