"""The classifier and its cross-entropy, without ever holding all logits.

    logits = x @ weight^T + bias
    loss   = cross_entropy(logits, targets)          with all of its options

Tokens go in chunks of as many as `memory` has room for. Ignored tokens are computed like all others: how many there are
the host would have to ask the device, and wait. A chunk's logits are a matmul by the vendor's library, their
gradient takes their place (`cross_entropy`, in place), and the gradients of x, weight and bias are matmuls with that,
all in forward. Saved for backward: these gradients, nothing else. Where a gradient has to wait for what comes from
above (float16, whose range needs the loss scale; reduction="none"), all of it is computed in backward, from the logits
where one chunk has all of them and an eager call has kept it. What is needed
beside the logits lies in the rows of x's gradient that the last chunk writes, if it fits there until then.

The weight's gradient is a sum over chunks, and between chunks it is kept
- in float32 where the weight is float32 (also under autocast): the gradient's own memory is the sum;
- in float32 and in memory of its own, where half of `memory` has room for it;
- for a bfloat16 weight and large chunks in the gradient's own memory, in a float16 with scales that is three bits finer
  than bfloat16 (`kernels.py`): neither a float32 buffer, of twice the size of the gradient,
  nor a sum that is rounded to bfloat16 at every chunk; what is added is added in float32;
- for a float16 weight, for small chunks, where adding up would cost more than the matmul itself, and where the caller
  wants no sum in 16 bits (`sum_dtype`): nowhere. A second pass computes the logits again, by columns, and writes each
  row of the gradient once. Until then the gradient's memory is free, and holds the logits of the first pass.

Floor: three matmuls of 2 x tokens x classes x width FLOPs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from tilewright.ops.cross_entropy.launch import Options, begin, launch, scale, take_gradients
from tilewright.ops.cross_entropy.op import AHEAD, check_loss, cross_entropy
from tilewright.ops.cross_entropy.reference import reference as loss_of_logits
from tilewright.ops.linear.op import is_worth_padding, matmul_dtype
from tilewright.ops.linear.padding import VECTOR, pad
from tilewright.ops.linear_cross_entropy import matmuls
from tilewright.ops.linear_cross_entropy.memory import A_TOKEN, LARGEST, default_memory, plan_chunks, without
from tilewright.plan.cost import linear_cross_entropy as cost
from tilewright.runtime import dispatch, hopper, paths, register

__all__ = ["cost", "linear_cross_entropy", "reference"]

_NAME = "linear_cross_entropy"
HOST_BOUND = 32 * 2**20  # logits up to which an eager call leaves the matmuls to PyTorch
_MANY = 128  # tokens: for fewer it takes longer to copy the weight than to multiply by it as it is

hopper.add_gemms(Path(__file__).with_name("hopper.cu"))

Tensor = torch.Tensor


def reference(x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, **options: Any) -> Any:
    """(loss, lse) in plain PyTorch: the definition."""
    class_weight = options.pop("class_weight", None)
    return loss_of_logits(F.linear(x, weight, bias), targets, weight=class_weight, **options)


class Inputs(NamedTuple):
    """The arguments of a loss.

    `needs_x` and so on: which gradients are computed in this call. With an `upstream` the loss was known before, and is
    not computed again; with `logits`, a buffer that forward has left them in, neither are these.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor
    class_weight: Tensor | None
    ignore_index: int
    smoothing: float
    z_loss: float
    softcap: float
    reduction: str
    memory: int
    exact: bool
    wants_lse: bool
    needs_x: bool
    needs_weight: bool
    needs_bias: bool
    upstream: Tensor | None
    logits: Tensor | None = None
    keeps: bool = False  # the logits for backward, where one chunk has all of them


Outputs = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
_OUTPUTS = 5


def _launch(inputs: Inputs) -> Outputs:
    """Loss, log-sum-exp of each row, and the gradients of x, weight and bias, those that are wanted."""
    return _launch_eager(inputs)[:_OUTPUTS]  # type: ignore[return-value]


def _launch_eager(inputs: Inputs) -> tuple[Tensor | None, ...]:
    """The same, and the buffer with the logits that are kept."""
    from tilewright.ops.linear_cross_entropy import kernels

    (
        x, weight, bias, targets, class_weight, *numbers, reduction, memory, exact, wants_lse, needs_x, needs_weight,
        needs_bias, upstream, logits, keeps,
    ) = inputs  # fmt: skip
    options, shape = Options._make(numbers), targets.shape
    (classes, width), dtype, compute = weight.shape, x.dtype, dispatch.compute_dtype(x)
    (tokens,) = dispatch.packed((x.reshape(-1, width),))
    targets, rows = targets.reshape(-1), targets.numel()
    wanted = needs_x or needs_weight or needs_bias
    memory = memory or default_memory(rows, classes, dtype.itemsize)
    if classes % VECTOR:
        memory = min(memory, LARGEST * dtype.itemsize)
    w, b = weight.to(dtype), None if bias is None else bias.to(dtype)
    lse = targets.new_zeros(rows, dtype=compute) if wants_lse else None
    dweight = torch.empty_like(weight, memory_format=torch.contiguous_format) if needs_weight else None
    dbias = torch.zeros_like(bias, dtype=compute) if needs_bias and bias is not None else None
    if upstream is not None and upstream.ndim:
        upstream = upstream.reshape(-1)
    chunk, again, total, scales, scratch, dx, buffer = plan_chunks(
        tokens, classes, memory, exact, options.smoothing > 0.0, needs_x, dweight, logits
    )
    denominator, arrived = begin(
        targets, class_weight, classes, options.ignore_index, reduction == "mean", compute, scratch.new
    )
    loss = scratch.new(rows, compute)
    mark = scratch.next
    chunks = max(1, -(-rows // chunk))  # of nothing, the gradients are zeros
    statistics: list[tuple[Tensor, Tensor]] = []  # of the chunks, for a second pass
    for number in range(chunks):
        part = slice(number * chunk, min((number + 1) * chunk, rows))
        some, some_targets = tokens[part], targets[part]
        z = buffer[: len(some), :classes]
        if logits is None:
            matmuls.logits(some, w, b, z)
        scratch.next = mark
        found = launch(
            z, some_targets, class_weight, denominator, options, arrived=arrived[part],
            upstream=upstream if upstream is None or upstream.ndim == 0 else upstream[part],
            loss=loss[part], lse=None if lse is None else lse[part], gradient=z if wanted else None,
            keep=again, new=scratch.new,
        )  # fmt: skip
        if again:
            statistics.append((found[0], _of_rows(found[1])))
        del found
        if dbias is not None:
            dbias += z.sum(0, dtype=compute)
        if dweight is not None and not again:
            if scales is not None:
                kernels.launch(z, some, dweight, scales, number == 0, number == chunks - 1)
            else:
                matmuls.gradient_of_weight(z, some, dweight if total is None else total, add=number > 0)
        if dweight is not None and total is not None and number == chunks - 1:
            dweight.copy_(total)
        if reduction != "none" and upstream is None and number == chunks - 1:
            loss = loss.sum()  # which may lie where the gradient of x comes now
        if dx is not None:
            matmuls.gradient_of_x(z, w, dx[part])
    if again and dweight is not None:
        del buffer, z, some
        memory = without(memory, A_TOKEN * rows)
        given = tuple(torch.cat(parts) for parts in zip(*statistics, strict=True))
        _again(tokens, w, b, targets, class_weight, denominator, options, upstream, memory, given, dweight)
    if dx is not None:
        dx = dx.view(x.shape)
    if dbias is not None and bias is not None:
        dbias = dbias.to(bias.dtype)
    lse = None if lse is None else lse.view(shape)
    if upstream is not None:
        return None, lse, dx, dweight, dbias, None
    kept = buffer if keeps and chunk >= rows else None
    return loss.view(shape) if reduction == "none" else loss, lse, dx, dweight, dbias, kept


def _of_rows(parts: Tensor) -> Tensor:
    """(maximum, sum of exponentials) of each row out of those of its tiles, apart: together they would lose bits."""
    maximum, total = parts[..., 0], parts[..., 1]
    top = maximum.amax(1)
    return torch.stack((top, (total * (maximum - top[:, None]).exp()).sum(1)), -1)


def _again(
    x: Tensor, w: Tensor, b: Tensor | None, targets: Tensor, class_weight: Tensor | None, denominator: Tensor | None,
    options: Options, upstream: Tensor | None, memory: int, statistics: tuple[Tensor, ...], dweight: Tensor,
) -> None:  # fmt: skip
    """The weight's gradient by columns of the logits, which are computed once more; every row is written once."""
    classes = len(w)
    x_targets, rows = statistics
    fits = memory // max(1, len(x) * x.element_size())
    columns = 1 << max(4, fits.bit_length() - 1)  # a power of two: few kernels, whatever the number of tokens
    columns = min(columns, 1 << (classes - 1).bit_length())
    parts = rows
    if options.smoothing > 0.0:
        weights = rows.new_full((), classes) if class_weight is None else class_weight.sum(dtype=rows.dtype)
        parts = torch.cat((rows, torch.zeros_like(rows), weights.expand(len(rows), 1)), -1)
    parts = parts[:, None].contiguous()
    buffer = x.new_empty(len(x), columns)
    for first in range(0, classes, columns):
        part = slice(first, min(first + columns, classes))
        z = buffer[:, : part.stop - first]
        matmuls.logits(x, w[part], None if b is None else b[part], z)
        launch(
            z, targets, class_weight, denominator, options, upstream=upstream, gradient=z, offset=first,
            classes=classes, given=(x_targets, parts),
        )  # fmt: skip
        matmuls.gradient_of_weight(z, x, dweight[part])


def _fake(inputs: Inputs) -> Outputs:
    x = inputs.x
    lse = inputs.targets.to(dispatch.compute_dtype(x))
    loss = None if inputs.upstream is not None else torch.empty_like(lse) if inputs.reduction == "none" else lse.sum()
    gradients = [
        torch.empty_like(t, memory_format=torch.contiguous_format) if needed and t is not None else None
        for t, needed in ((x, inputs.needs_x), (inputs.weight, inputs.needs_weight), (inputs.bias, inputs.needs_bias))
    ]
    return loss, lse if inputs.wants_lse else None, *gradients  # type: ignore[return-value]


def _save(ctx: Any, inputs: Inputs, output: Any) -> None:
    """What a compiler may see saved, and what is saved where the gradients wait for backward."""
    x, weight, bias, targets, class_weight, *ctx.options, _, needs_x, needs_weight, needs_bias, _, _, _ = inputs
    ctx.ahead = needs_x or needs_weight or needs_bias
    ctx.save_for_backward(*(output[2:_OUTPUTS] if ctx.ahead else (x, weight, bias, targets, class_weight)))
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, run: Any, upstream: Any, *_: Any) -> Sequence[Any]:
    register.refuse_second_derivative(_NAME)
    if upstream is None:
        return ()
    needs = ctx.needs_input_grad[:3]
    if ctx.ahead:
        gradients = [(gradient * upstream).to(gradient.dtype) for gradient in ctx.saved_tensors]
    else:
        x, weight, bias, targets, class_weight = ctx.saved_tensors
        logits, ctx.logits = getattr(ctx, "logits", None), None  # which their gradient overwrites
        again = (*ctx.options, False, *needs, upstream, logits)  # no lse
        _, _, *gradients = run(Inputs(x, weight, bias, targets, class_weight, *again))
    return [gradient if needed else None for gradient, needed in zip(gradients, needs, strict=True)]


def _save_eager(ctx: Any, inputs: Inputs, output: Any) -> None:
    """Gradients that are there already are nobody else's: backward overwrites them."""
    _, lse, *gradients, kept = output
    ctx.ahead = inputs.needs_x or inputs.needs_weight or inputs.needs_bias
    if ctx.ahead:
        ctx.gradients = gradients
        ctx.set_materialize_grads(False)
    else:
        _save(ctx, inputs, output)
        ctx.logits = kept
    if lse is not None:
        ctx.mark_non_differentiable(lse)


def _differentiate_eager(ctx: Any, run: Any, upstream: Any, *_: Any) -> Sequence[Any]:
    return take_gradients(ctx, _NAME, upstream) if ctx.ahead else _differentiate(ctx, run, upstream)


def _foresee(ctx: Any, inputs: Inputs, output: Any) -> None:
    loss, _, *gradients, _ = output
    for gradient in gradients:
        if gradient is not None:
            scale(gradient, loss)


_OP = register.Op(_NAME, _launch, _fake)
_OP.register_gradient(_save, _differentiate)
_eager = register.make_eager(_launch_eager, _save_eager, _differentiate_eager, _OP, _foresee, outputs=2)


class _Mean(torch.autograd.Function):
    """Forward nothing; backward a gradient's share of a mean over `ranks`, which are then summed."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient / ctx.ranks, None


def _whole(weight: Tensor | None) -> Tensor | None:
    """A parameter that FSDP2 has sharded, gathered; its gradient goes back as the mean over the ranks, as FSDP2's."""
    if weight is None or type(weight) in dispatch.PLAIN:
        return weight
    from torch.distributed.tensor import DTensor, Partial

    if not isinstance(weight, DTensor):
        return weight
    mesh = weight.device_mesh
    return _Mean.apply(weight.full_tensor(grad_placements=[Partial()] * mesh.ndim), mesh.size())


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    reduction: str = "mean",
    return_lse: bool = False,
    memory: int | None = None,
    sum_dtype: torch.dtype | None = None,
) -> Any:
    """Cross-entropy of ``x @ weight^T + bias`` with class indices, with a bounded part of the logits in memory.

    Args:
        x: ``(..., H)``, hidden states.
        weight: ``(V, H)``, of x's dtype, or of any under ``torch.autocast``; may be tied to an embedding, and may be a
            parameter that FSDP2 has sharded.
        targets: ``(...)``, class indices, int64 or int32.
        bias: ``(V,)``.
        class_weight, ignore_index, label_smoothing, z_loss, softcap, reduction, return_lse: as in
            ``tilewright.ops.cross_entropy``. Ignored tokens take as long as others: leave out those you can.
        memory: bytes to take beside the gradients, for the logits of 16 tokens or 16 classes at least. Left out: all
            logits where they take no more than 256 MB, or are of 2,048 tokens and take no more than 512 MB; else an
            eighth of them and 384 MB at most, but those of 1,024 tokens at least. What else is needed, up to 64
            bytes a token, lies in the memory of x's gradient where that has room and one pass is enough, and is part of
            these bytes where not, but for what is more than half of them. More is faster, up to a point. Of a 16-bit
            weight, twice 4 bytes an element of it make room for the sum of its gradient in float32. (Under autocast the
            weight in its dtype comes on top; so do copies of x and weight where the width is no multiple of 8, with
            zeros up to the next one.)
        sum_dtype: ``torch.float32``: what lies in memory of a sum over chunks is float32, also of a 16-bit weight's
            gradient. Where `memory` has no room for that, a fourth matmul takes the place of the sum. Left out: such
            a sum may lie in 16 bits between chunks, three more than bfloat16 has; additions are in float32 always.

    Returns:
        The loss in float32 (float64 for float64), or ``(loss, lse)``.

    Backward works once for each forward. Float16 and ``reduction="none"`` compute their gradients there, where what
    comes from above is known; an eager call keeps the logits for it, where `memory` has room for all.

    >>> import torch
    >>> x, weight, targets = torch.randn(6, 8), torch.randn(50, 8), torch.tensor([1, 2, -100, 3, 4, 5])
    >>> loss = linear_cross_entropy(x, weight, targets)
    >>> torch.allclose(loss, torch.nn.functional.cross_entropy(x @ weight.t(), targets))
    True
    """
    options = Options(ignore_index, label_smoothing, z_loss, softcap)
    weight, bias = _whole(weight), _whole(bias)  # type: ignore[assignment]
    _check(x, weight, bias, targets, class_weight, options, reduction, memory, sum_dtype)
    x = x.to(matmul_dtype(x))
    tensors = (weight, bias, targets, class_weight)
    plain = memory is None and sum_dtype is None and all(t is None or t.dtype == x.dtype for t in (weight, bias))
    whole = x.shape[-1] % VECTOR == len(weight) % VECTOR == 0
    most = HOST_BOUND * x.shape[-1] // len(weight) if plain and whole else None
    path = paths.choose(_NAME, x, *tensors, host_bound=most)
    if path == paths.REFERENCE:
        loss, lse = reference(
            x, weight, targets, bias, class_weight=class_weight, ignore_index=ignore_index,
            label_smoothing=label_smoothing, z_loss=z_loss, softcap=softcap, reduction=reduction,
        )  # fmt: skip
        return (loss, lse.detach()) if return_lse else loss
    if path == paths.PYTORCH:
        return cross_entropy(
            F.linear(x, weight, bias), targets, weight=class_weight, ignore_index=ignore_index,
            label_smoothing=label_smoothing, z_loss=z_loss, softcap=softcap, reduction=reduction,
            return_lse=return_lse, inplace=True,
        )  # fmt: skip
    if x.shape[-1] % VECTOR and targets.numel() >= _MANY and is_worth_padding(x, weight):
        x, weight = pad(x, -1), pad(weight, 1)
    ahead = torch.is_grad_enabled() and reduction != "none" and x.dtype in AHEAD
    later = torch.is_grad_enabled() and not ahead and any(t is not None and t.requires_grad for t in (x, weight, bias))
    inputs = Inputs(
        x, weight, bias, targets, class_weight, *options, reduction, memory or 0, sum_dtype is not None, return_lse,
        needs_x=ahead and x.requires_grad, needs_weight=ahead and weight.requires_grad,
        needs_bias=ahead and bias is not None and bias.requires_grad, upstream=None,
        keeps=later,
    )  # fmt: skip
    if path == paths.REGISTERED:
        loss, lse, *_ = _OP.call_registered(inputs)
        lse = lse.detach()
    else:
        loss, lse = _eager(*inputs)
    return (loss, lse) if return_lse else loss


def _check(
    x: Any, weight: Any, bias: Any, targets: Any, class_weight: Any, options: Options, reduction: Any, memory: Any,
    sum_dtype: Any,
) -> None:  # fmt: skip
    dispatch.check_tensor(_NAME, "x", x)
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        raise ValueError(f"{_NAME}: weight must be a matrix, classes by width.")
    if not x.ndim or x.shape[-1] != weight.shape[1] or not weight.shape[1]:
        raise ValueError(
            f"{_NAME}: x has shape {tuple(x.shape)} and weight {tuple(weight.shape)}; the last must agree."
        )
    dispatch.check_tensor(_NAME, "weight", weight, weight.shape, x)
    dispatch.check_tensor(_NAME, "bias", bias, weight.shape[:1], x)
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype != x.dtype and matmul_dtype(x) == x.dtype != matmul_dtype(tensor):
            raise TypeError(
                f"{_NAME}: {name} is {tensor.dtype} and x is {x.dtype}; convert one, or use torch.autocast."
            )
        if tensor is not None and tensor.dtype not in (matmul_dtype(x), torch.float32, torch.float64):
            raise TypeError(
                f"{_NAME}: {name} is {tensor.dtype} and autocast's dtype {matmul_dtype(x)}; convert {name}."
            )
    check_loss(_NAME, x, len(weight), targets, "class_weight", class_weight, options, reduction)
    if memory is not None and (isinstance(memory, bool) or not isinstance(memory, int) or memory < 1):
        raise ValueError(f"{_NAME}: memory is {memory!r}; give bytes, at least 1.")
    if sum_dtype not in (None, torch.float32):
        raise ValueError(f"{_NAME}: sum_dtype is {sum_dtype!r}; give torch.float32, or nothing.")
