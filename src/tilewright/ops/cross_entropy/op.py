"""Cross-entropy whose forward also computes the gradient, in one pass over the logits.

    x    = softcap * tanh(logits / softcap)                                   where a softcap is given
    lse  = log(sum(exp(x)))
    loss = w[t] (1 - e) (lse - x[t]) + e / V * sum(w[c] (lse - x[c])) + z_loss * lse^2      with label smoothing e

Saved for backward: the gradient itself, nothing else. It takes the logits' own memory with `inplace=True`. (Float16,
which needs the loss scale, and reduction="none", where each row has a factor of its own, save the logits and compute
the gradient in backward, where these are known: it is rounded once.)

Floor at 2 bytes a logit: each is read once and its gradient is written once, 4 bytes, forward and backward together.
The arithmetic, two exponentials a logit, takes about as long as that on an H200 at worst, beside it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tilewright.ops.cross_entropy.launch import Options, begin, launch, scale, take_gradients
from tilewright.ops.cross_entropy.parallel import check_shards, parallel
from tilewright.ops.cross_entropy.reference import reference
from tilewright.plan.cost import cross_entropy as cost
from tilewright.runtime import dispatch, paths, register

__all__ = ["cost", "cross_entropy", "reference"]

_NAME = "cross_entropy"
_LARGEST = 2**24
_TARGETS = (torch.int64, torch.int32)
_REDUCTIONS = ("mean", "sum", "none")


class Inputs(NamedTuple):
    """The arguments of a loss; `inplace` lets the gradient take the logits' memory, and is for the eager op alone.

    `wants_gradient`: in this call. With an `upstream` the loss was known before, and is not computed again.
    """

    logits: torch.Tensor
    targets: torch.Tensor
    weight: torch.Tensor | None
    ignore_index: int
    smoothing: float
    z_loss: float
    softcap: float
    reduction: str
    wants_lse: bool
    wants_gradient: bool
    upstream: torch.Tensor | None
    inplace: bool = False


def _launch(inputs: Inputs) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """(loss, lse of each row, gradient), those that are wanted."""
    logits, targets, weight, *numbers, reduction, wants_lse, wants_gradient, upstream, inplace = inputs
    options, compute = Options._make(numbers), dispatch.compute_dtype(logits)
    (packed,) = dispatch.packed((logits,))
    denominator, arrived = begin(
        targets, weight, logits.shape[-1], options.ignore_index, reduction == "mean", compute
    )  # fmt: skip
    loss = logits.new_empty(targets.shape, dtype=compute)
    lse = torch.empty_like(loss) if wants_lse else None
    gradient = None
    if wants_gradient:
        gradient = packed if inplace or packed is not logits else torch.empty_like(packed)
    launch(
        packed, targets, weight, denominator, options, arrived=arrived, upstream=upstream, loss=loss, lse=lse,
        gradient=gradient,
    )  # fmt: skip
    if upstream is not None:
        return None, lse, gradient
    return loss if reduction == "none" else loss.sum(), lse, gradient


def _fake(inputs: Inputs) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    logits = inputs.logits
    rows = torch.empty(inputs.targets.shape, dtype=dispatch.compute_dtype(logits), device=logits.device)
    loss = None if inputs.upstream is not None else rows if inputs.reduction == "none" else rows.new_empty(())
    gradient = logits.new_empty(logits.shape) if inputs.wants_gradient else None
    return loss, torch.empty_like(rows) if inputs.wants_lse else None, gradient


# bfloat16 and float32 have room for a gradient before its factor is known. float16 has not: a mean over many targets
# would leave nothing for a loss scale to save, so its gradient waits for backward, as does float64's, for gradcheck.
AHEAD = (torch.bfloat16, torch.float32)


def _save(ctx: Any, inputs: Inputs, output: Any) -> None:
    """What a compiler may see saved, and what is saved where the gradient waits for backward."""
    ctx.ahead, ctx.inplace = inputs.wants_gradient, inputs.inplace
    ctx.options = inputs.ignore_index, inputs.smoothing, inputs.z_loss, inputs.softcap, inputs.reduction
    ctx.save_for_backward(*(output[2:] if ctx.ahead else (inputs.logits, inputs.targets, inputs.weight)))
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, run: Any, upstream: Any, *_: Any) -> Sequence[Any]:
    register.refuse_second_derivative(_NAME)
    if upstream is None:
        return ()
    saved = ctx.saved_tensors  # once: recompute allows no second access
    if ctx.ahead:
        return ((saved[0] * upstream).to(saved[0].dtype),)
    logits, targets, weight = saved
    again = (*ctx.options, False, True, upstream, ctx.inplace)  # no lse, the gradient alone
    _, _, gradient = run(Inputs(logits, targets, weight, *again))
    return (dispatch.claim_storage(gradient, logits),)


def _save_eager(ctx: Any, inputs: Inputs, output: Any) -> None:
    """A gradient that is there already is nobody else's: backward overwrites it."""
    _, lse, gradient = output
    ctx.gradients = None
    if not inputs.wants_gradient:
        _save(ctx, inputs, output)
    else:
        ctx.ahead, ctx.gradients = True, [dispatch.claim_storage(gradient, inputs.logits)]
        ctx.set_materialize_grads(False)
    if lse is not None:
        ctx.mark_non_differentiable(lse)


def _differentiate_eager(ctx: Any, run: Any, upstream: Any, *_: Any) -> Sequence[Any]:
    return take_gradients(ctx, _NAME, upstream) if ctx.ahead else _differentiate(ctx, run, upstream)


def _foresee(ctx: Any, inputs: Inputs, output: Any) -> None:
    loss, _, gradient = output
    if gradient is not None:
        scale(gradient, loss)


_OP = register.Op(_NAME, _launch, _fake)
_OP.register_gradient(_save, _differentiate)
_eager = register.make_eager(_launch, _save_eager, _differentiate_eager, _OP, _foresee, outputs=2)


def cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    reduction: str = "mean",
    return_lse: bool = False,
    inplace: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Any:
    """Cross-entropy of logits with class indices, its gradient computed in the same pass.

    Args:
        logits: ``(..., V)``, any floating dtype, V from 2 to 16,777,216; sums are in float32.
        targets: ``(...)``, class indices, int64 or int32.
        weight: ``(V,)``, a factor for each class, as in ``torch.nn.functional.cross_entropy``.
        ignore_index: a target that counts for nothing; where all are, the loss is 0 and so is its gradient.
        label_smoothing: share of the target's probability that is spread over all classes, in [0, 1).
        z_loss: factor of ``lse ** 2``, which keeps the logits from drifting; it adds to the loss of each target.
        softcap: bend the logits into (-softcap, softcap) first; 0: leave them.
        reduction: ``"mean"`` over the targets that count (by their weights), ``"sum"`` or ``"none"``.
        return_lse: also return the log-sum-exp of each row, which has no gradient.
        inplace: let the gradient take the logits' memory where their layout allows. They must not be used again.
        group: the logits are this rank's columns, ranks in order, all with as many; ``targets`` and ``weight`` are
            the same on every rank and for all classes. Every rank gets the loss and the gradient of its columns. Of
            shards of different sizes the loss is NaN; with ``TILEWRIGHT_DEBUG=1``, and on a CPU, it is an error.

    Returns:
        The loss in float32 (float64 for float64), or ``(loss, lse)``.

    A target outside of the vocabulary makes its loss NaN; with ``TILEWRIGHT_DEBUG=1`` in the environment, an error.
    Backward works once for each forward. Float16 and ``reduction="none"`` take a second pass there, where their factors
    are known: a gradient over the targets' number fits no float16, and one that is rounded first is rounded twice.

    >>> import torch
    >>> logits, targets = torch.randn(4, 10), torch.tensor([1, 2, -100, 3])
    >>> loss = cross_entropy(logits, targets)
    >>> torch.allclose(loss, torch.nn.functional.cross_entropy(logits, targets))
    True
    """
    options = Options(ignore_index, label_smoothing, z_loss, softcap)
    _check(logits, targets, weight, options, reduction, inplace, group)
    if group is not None:
        loss, lse = parallel(logits, targets, weight, options, reduction, inplace, group)
        return (loss, lse.detach()) if return_lse else loss
    path = paths.choose(_NAME, logits, targets, weight)
    if path == paths.REFERENCE:
        loss, lse = reference(
            logits, targets, weight=weight, ignore_index=ignore_index, label_smoothing=label_smoothing, z_loss=z_loss,
            softcap=softcap, reduction=reduction,
        )  # fmt: skip
        return (loss, lse.detach()) if return_lse else loss
    wants_gradient = logits.requires_grad and torch.is_grad_enabled()
    ahead = wants_gradient and reduction != "none" and logits.dtype in AHEAD
    inputs = Inputs(
        logits, targets, weight, *options, reduction, wants_lse=return_lse, wants_gradient=ahead, upstream=None,
        inplace=inplace and wants_gradient,
    )  # fmt: skip
    if path == paths.REGISTERED:
        loss, lse, _ = _OP.call_registered(inputs)
        lse = lse.detach()
    else:
        loss, lse = _eager(*inputs)
    return (loss, lse) if return_lse else loss


def _check(logits: Any, targets: Any, weight: Any, options: Options, reduction: Any, inplace: bool, group: Any) -> None:
    dispatch.check_tensor(_NAME, "logits", logits)
    if group is not None and os.environ.get("TILEWRIGHT_DEBUG") == "1":
        check_shards(logits, group)  # before anything that one rank alone could stumble over
    ranks = 1 if group is None else dist.get_world_size(group)
    vocabulary = ranks * logits.shape[-1] if logits.ndim else 0
    check_loss(_NAME, logits, vocabulary, targets, "weight", weight, options, reduction)
    # A compiler decides for itself what is in place.
    if inplace and logits.requires_grad and not dispatch.is_compiling() and dispatch.is_needed(logits):
        raise ValueError(f"{_NAME}: autograd still needs these logits; leave out inplace=True.")


def check_loss(
    op: str, x: torch.Tensor, vocabulary: int, targets: Any, weight_name: str, weight: Any, options: Options,
    reduction: Any,
) -> None:  # fmt: skip
    """Refuse, with one sentence, targets and options that no loss over `vocabulary` classes can take."""
    if not 2 <= vocabulary <= _LARGEST:
        raise ValueError(f"{op}: the vocabulary, of {vocabulary}, must be of 2 to {_LARGEST} classes.")
    if not isinstance(targets, torch.Tensor) or targets.dtype not in _TARGETS:
        kind = targets.dtype if isinstance(targets, torch.Tensor) else type(targets).__name__
        raise TypeError(f"{op}: targets are {kind}; give class indices as an int64 or int32 tensor.")
    if targets.shape != x.shape[:-1]:
        raise ValueError(f"{op}: targets have shape {tuple(targets.shape)}, but {tuple(x.shape[:-1])} is needed.")
    if targets.device != x.device:
        raise ValueError(f"{op}: targets are on {targets.device}, but the rest on {x.device}; move one of them.")
    dispatch.check_tensor(op, weight_name, weight, torch.Size([vocabulary]), x)
    if weight is not None and weight.requires_grad:
        raise ValueError(f"{op}: {weight_name} requires a gradient and gets none; detach it.")
    ignore_index, smoothing, z_loss, softcap = options
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise TypeError(f"{op}: ignore_index is {ignore_index!r}; give a whole number.")
    if not isinstance(smoothing, (int, float)) or not 0.0 <= smoothing < 1.0:
        raise ValueError(f"{op}: label_smoothing is {smoothing!r}; it must lie in [0, 1).")
    for name, value in (("z_loss", z_loss), ("softcap", softcap)):
        if not isinstance(value, (int, float)) or not 0.0 <= value < float("inf"):
            raise ValueError(f"{op}: {name} is {value!r}; give a number of at least 0.")
    if reduction not in _REDUCTIONS:
        raise ValueError(f"{op}: reduction is {reduction!r}; choose {', '.join(_REDUCTIONS)}.")
    if os.environ.get("TILEWRIGHT_DEBUG") == "1" and not dispatch.is_compiling():
        bad = (targets != ignore_index) & ((targets < 0) | (targets >= vocabulary))
        if bool(bad.any()):
            raise ValueError(
                f"{op}: target {targets[bad][0].item()} is not ignore_index {ignore_index} and not in the vocabulary "
                f"of {vocabulary}."
            )
