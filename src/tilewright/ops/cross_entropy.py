"""Cross-entropy whose forward also computes the gradient, in one pass over the logits.

    x    = softcap * tanh(logits / softcap)                                   where a softcap is given
    lse  = log(sum(exp(x)))
    loss = w[t] (1 - e) (lse - x[t]) + e / V * sum(w[c] (lse - x[c])) + z_loss * lse^2      with label smoothing e

Saved for backward: the gradient itself, nothing else. It takes the logits' own memory with `inplace=True`. (Float16
saves the logits and computes the gradient in backward, where the loss scale is known.)

Floor at 2 bytes a logit: each is read once and its gradient is written once, 4 bytes, forward and backward together.
The arithmetic, two exponentials a logit, takes about as long as that on an H200 at worst, beside it.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn.functional as F

from tilewright.ops import _op
from tilewright.plan.cost import cross_entropy as cost

__all__ = ["cost", "cross_entropy", "reference"]

_NAME = "cross_entropy"
_LARGEST = 262144
_REDUCTIONS = ("mean", "sum", "none")
_ONCE = f"{_NAME} has no second derivative: leave out create_graph=True, or use its `reference`."


def reference(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    reduction: str = "mean",
) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, lse) in plain PyTorch: the definition."""
    x = logits.to(_compute_dtype(logits))
    if softcap > 0.0:
        x = softcap * torch.tanh(x / softcap)
    lse = torch.logsumexp(x, -1)
    flat, flat_targets = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
    kept = flat_targets != ignore_index
    loss = F.cross_entropy(
        flat, flat_targets, None if weight is None else weight.to(x.dtype), ignore_index=ignore_index,
        label_smoothing=label_smoothing, reduction="none",
    )  # fmt: skip
    if z_loss > 0.0:
        loss = loss + torch.where(kept, z_loss * lse.reshape(-1).square(), 0.0)
    if reduction == "none":
        return loss.view(targets.shape), lse
    total = loss.sum()
    if reduction == "mean":
        count = _denominator(flat_targets, weight, ignore_index, x.dtype)
        total = torch.where(count > 0, total / count.clamp_min(torch.finfo(x.dtype).tiny), total * 0.0)
    return total, lse


def _compute_dtype(logits: torch.Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _denominator(
    targets: torch.Tensor, weight: torch.Tensor | None, ignore_index: int, dtype: torch.dtype
) -> torch.Tensor:
    """What a mean divides by: the targets that count, each by its class's weight."""
    kept = targets != ignore_index
    if weight is None:
        return kept.sum().to(dtype)
    known = kept & (targets >= 0) & (targets < len(weight))
    return torch.where(known, weight.to(dtype)[torch.where(known, targets, 0)], 0.0).sum()


def _launch(
    logits: torch.Tensor,
    targets: torch.Tensor,
    weight: torch.Tensor | None,
    denominator: torch.Tensor | None,
    upstream: torch.Tensor | None,
    loss: torch.Tensor | None,
    lse: torch.Tensor | None,
    gradient: torch.Tensor | None,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
    softcap: float,
) -> None:
    """Fill `loss`, `lse` and `gradient`, those that are not None; `logits` are packed."""
    from tilewright.ops import cross_entropy_kernels as kernels

    targets, weight = _op.packed((targets, weight))
    vocabulary = logits.shape[-1]
    rows = logits.numel() // vocabulary
    weight_sum = weight.sum(dtype=_compute_dtype(logits)) if weight is not None and smoothing > 0.0 else None
    if rows:
        tensors = (logits, targets, weight, weight_sum, denominator, upstream, loss, lse, gradient)
        launch = kernels.forward_launch(logits.device, vocabulary, _op.dtypes(tensors), smoothing > 0.0, softcap > 0.0)
        stride = 0 if upstream is None or upstream.ndim == 0 else 1
        launch((rows, 1), tensors, (ignore_index, stride, smoothing, z_loss, softcap if softcap > 0.0 else 1.0))


def _forward(
    logits: torch.Tensor,
    targets: torch.Tensor,
    weight: torch.Tensor | None,
    denominator: torch.Tensor | None,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
    softcap: float,
    wants_lse: bool,
    wants_gradient: bool,
    inplace: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(loss of each row over the denominator, lse of each row, gradient): the last two where they are wanted."""
    (packed,) = _op.packed((logits,))
    loss = logits.new_empty(targets.shape, dtype=_compute_dtype(logits))
    lse = torch.empty_like(loss) if wants_lse else None
    gradient = None
    if wants_gradient:
        gradient = packed if inplace or packed is not logits else torch.empty_like(packed)
    _launch(
        packed, targets, weight, denominator, None, loss, lse, gradient, ignore_index, smoothing, z_loss, softcap
    )  # fmt: skip
    return loss, lse, gradient


def _scale(gradient: torch.Tensor, upstream: torch.Tensor) -> torch.Tensor:
    """gradient *= upstream, one number for all or one a row."""
    from tilewright.ops import cross_entropy_kernels as kernels

    vocabulary = gradient.shape[-1]
    rows = gradient.numel() // vocabulary
    if rows:
        launch = kernels.scale_launch(gradient.device, vocabulary, gradient.dtype, upstream.dtype)
        launch((rows, 1), (gradient, upstream), (1 if upstream.ndim else 0,))
    return gradient


# bfloat16 and float32 have room for a gradient before its factor is known. float16 has not: a mean over many targets
# would leave nothing for a loss scale to save, so its gradient waits for backward, as does float64's, for gradcheck.
_AHEAD = (torch.bfloat16, torch.float32)


def _taken(gradient: torch.Tensor | None, logits: torch.Tensor) -> torch.Tensor | None:
    """The gradient without a graph of its own. Where it has taken the logits' memory, autograd is told: whoever saved
    them for a backward of their own gets an error then, and not a gradient for a logit."""
    if gradient is logits:
        torch.autograd.graph.increment_version(logits)
    return None if gradient is None else gradient.detach()


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inplace: bool, reduced: bool, *inputs: Any) -> Any:
        logits, *rest = inputs
        ctx.options, ctx.inplace = rest[3:7], inplace
        if logits.dtype in _AHEAD:
            loss, lse, gradient = _forward(*(*inputs, inplace))
            ctx.gradient = _taken(gradient, logits)
        else:
            loss, lse, _ = _forward(*(*inputs[:-1], False))
            ctx.save_for_backward(logits, *rest[:3])
        if lse is not None:
            ctx.mark_non_differentiable(lse)
        return (loss.sum() if reduced else loss), lse

    @staticmethod
    def backward(ctx: Any, upstream: Any, _: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(_ONCE)
        (upstream,) = _op.packed((upstream,))
        if ctx.saved_tensors:
            logits, targets, weight, denominator = ctx.saved_tensors
            (packed,) = _op.packed((logits,))
            gradient = packed if ctx.inplace or packed is not logits else torch.empty_like(packed)
            _launch(packed, targets, weight, denominator, upstream, None, None, gradient, *ctx.options)
            gradient = _taken(gradient, logits)
        else:
            gradient, ctx.gradient = ctx.gradient, None
            if gradient is None:
                raise RuntimeError(f"{_NAME}: an earlier backward took its gradient; run forward again.")
            _scale(gradient, upstream)
        return None, None, gradient, *(None,) * 9


_eager = _op.eager(_Function)


@torch.library.custom_op(
    "tilewright::cross_entropy",
    mutates_args=(),
    schema="(Tensor logits, Tensor targets, Tensor? weight, Tensor? denominator, int ignore_index, float smoothing, "
    "float z_loss, float softcap, bool wants_lse, bool wants_gradient) -> (Tensor, Tensor, Tensor)",
)
def _registered(*inputs: Any) -> tuple[torch.Tensor, ...]:
    # A registered op cannot return None: an empty tensor stands for what nobody asked for.
    return tuple(inputs[0].new_empty(0) if t is None else t for t in _forward(*inputs))


@_registered.register_fake
def _(*inputs: Any) -> tuple[torch.Tensor, ...]:
    logits, targets, wants_lse, wants_gradient = inputs[0], inputs[1], inputs[8], inputs[9]
    rows = torch.empty(targets.shape, dtype=_compute_dtype(logits), device=logits.device)
    gradient = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    nothing = logits.new_empty(0)
    return rows, torch.empty_like(rows) if wants_lse else nothing, gradient if wants_gradient else nothing


def _registered_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(output[2])
    ctx.set_materialize_grads(False)


def _registered_backward(ctx: Any, upstream: Any, *_: Any) -> Any:
    (gradient,) = ctx.saved_tensors
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(_ONCE)
    scaled = None if upstream is None else (gradient * upstream.unsqueeze(-1)).to(gradient.dtype)
    return scaled, *(None,) * 9


_registered.register_autograd(_registered_backward, setup_context=_registered_setup)


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
) -> Any:
    """Cross-entropy of logits with class indices, its gradient computed in the same pass.

    Args:
        logits: ``(..., V)``, any floating dtype, V from 2 to 262,144; sums are in float32.
        targets: ``(...)``, int64 class indices.
        weight: ``(V,)``, a factor for each class, as in ``torch.nn.functional.cross_entropy``.
        ignore_index: a target that counts for nothing; where all are, the loss is 0 and so is its gradient.
        label_smoothing: share of the target's probability that is spread over all classes, in [0, 1).
        z_loss: factor of ``lse ** 2``, which keeps the logits from drifting; it adds to the loss of each target.
        softcap: bend the logits into (-softcap, softcap) first; 0: leave them.
        reduction: ``"mean"`` over the targets that count (by their weights), ``"sum"`` or ``"none"``.
        return_lse: also return the log-sum-exp of each row, which has no gradient.
        inplace: let the gradient take the logits' memory where their layout allows. They must not be used again.

    Returns:
        The loss in float32 (float64 for float64), or ``(loss, lse)``.

    A target outside of the vocabulary makes its loss NaN; with ``TILEWRIGHT_DEBUG=1`` in the environment, an error.
    Float16 takes a second pass in backward, where its factor is known: a gradient over the targets' number fits no
    float16.

    >>> import torch
    >>> logits, targets = torch.randn(4, 10), torch.tensor([1, 2, -100, 3])
    >>> loss = cross_entropy(logits, targets)
    >>> torch.allclose(loss, torch.nn.functional.cross_entropy(logits, targets))
    True
    """
    _check(logits, targets, weight, ignore_index, label_smoothing, z_loss, softcap, reduction, inplace)
    traced = _op.is_traced(logits, targets, weight)
    if not _op.runs_kernel(logits) or (traced and logits.dtype not in _AHEAD):
        loss, lse = reference(
            logits, targets, weight=weight, ignore_index=ignore_index, label_smoothing=label_smoothing, z_loss=z_loss,
            softcap=softcap, reduction=reduction,
        )  # fmt: skip
        return (loss, lse.detach()) if return_lse else loss
    wants_gradient = logits.requires_grad and torch.is_grad_enabled()
    reduced = reduction != "none"
    denominator = None
    if reduction == "mean":
        denominator = _denominator(targets, weight, ignore_index, _compute_dtype(logits))
    inputs = (
        logits, targets, weight, denominator, ignore_index, label_smoothing, z_loss, softcap, return_lse,
        wants_gradient,
    )  # fmt: skip
    if traced:
        rows, lse, _ = _registered(*inputs)
        loss, lse = rows.sum() if reduced else rows, lse.detach()
    else:
        loss, lse = _eager(inplace and wants_gradient, reduced, *inputs)
    return (loss, lse) if return_lse else loss


def _check(
    logits: Any, targets: Any, weight: Any, ignore_index: Any, smoothing: Any, z_loss: Any, softcap: Any,
    reduction: Any, inplace: bool,
) -> None:  # fmt: skip
    _op.check_tensor(_NAME, "logits", logits)
    shape = logits.shape
    vocabulary = shape[-1] if shape else 0
    if not 2 <= vocabulary <= _LARGEST:
        raise ValueError(f"{_NAME}: logits have shape {tuple(shape)}; the vocabulary, last, must be 2 to {_LARGEST}.")
    if not isinstance(targets, torch.Tensor) or targets.dtype != torch.int64:
        kind = targets.dtype if isinstance(targets, torch.Tensor) else type(targets).__name__
        raise TypeError(f"{_NAME}: targets are {kind}; give class indices as an int64 tensor.")
    if targets.shape != shape[:-1]:
        raise ValueError(f"{_NAME}: targets have shape {tuple(targets.shape)}, but {tuple(shape[:-1])} is needed.")
    if targets.device != logits.device:
        raise ValueError(f"{_NAME}: targets are on {targets.device}, but logits on {logits.device}; move one of them.")
    _op.check_tensor(_NAME, "weight", weight, shape[-1:], logits)
    if weight is not None and weight.requires_grad:
        raise ValueError(f"{_NAME}: weight requires a gradient and gets none; detach it.")
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise TypeError(f"{_NAME}: ignore_index is {ignore_index!r}; give a whole number.")
    if not isinstance(smoothing, (int, float)) or not 0.0 <= smoothing < 1.0:
        raise ValueError(f"{_NAME}: label_smoothing is {smoothing!r}; it must lie in [0, 1).")
    for name, value in (("z_loss", z_loss), ("softcap", softcap)):
        if not isinstance(value, (int, float)) or not 0.0 <= value < float("inf"):
            raise ValueError(f"{_NAME}: {name} is {value!r}; give a number of at least 0.")
    if reduction not in _REDUCTIONS:
        raise ValueError(f"{_NAME}: reduction is {reduction!r}; choose {', '.join(_REDUCTIONS)}.")
    # A compiler decides for itself what is in place.
    if inplace and logits.requires_grad and not torch.compiler.is_compiling() and _is_needed(logits):
        raise ValueError(f"{_NAME}: autograd still needs these logits; leave out inplace=True.")
    if os.environ.get("TILEWRIGHT_DEBUG") == "1" and not torch.compiler.is_compiling():
        _check_targets(targets, vocabulary, ignore_index)


def _is_needed(logits: torch.Tensor) -> bool:
    """Whether these are somebody's parameter, or a result that the op which made them keeps for its backward."""
    base = logits if logits._base is None else logits._base
    return torch.is_grad_enabled() and (base.is_leaf or hasattr(type(logits.grad_fn), "_saved_result"))


def _check_targets(targets: torch.Tensor, vocabulary: int, ignore_index: int) -> None:
    bad = (targets != ignore_index) & ((targets < 0) | (targets >= vocabulary))
    if bool(bad.any()):
        first = targets[bad][0].item()
        raise ValueError(
            f"{_NAME}: target {first} is not ignore_index {ignore_index} and not in the vocabulary of {vocabulary}."
        )
