"""The classifier and its cross-entropy, without ever holding all logits.

    logits = x @ weight^T + bias
    loss   = cross_entropy(logits, targets)          with all of its options

Tokens go in chunks of as many as `memory` has room for. A chunk's logits are a product by the vendor's library, their
gradient takes their place (`cross_entropy`, in place), and the gradients of x, weight and bias are products with that,
all in forward. Saved for backward: these gradients, nothing else. Where a gradient has to wait for what comes from
above (float16, whose range needs the loss scale; reduction="none"), all of it is computed in backward.

The weight's gradient is a sum over chunks, and between chunks it is kept
- in float32 where the weight is float32 (also under autocast): the gradient's own memory is the sum;
- for a bfloat16 weight and large chunks in the gradient's own memory, in a float16 with scales that is three bits finer
  than bfloat16 (`linear_cross_entropy_kernels`): neither a float32 buffer, of twice the size of the gradient,
  nor a sum that is rounded to bfloat16 at every chunk;
- for a float16 weight, and for small chunks, where adding up would cost more than the product itself: nowhere. A
  second pass computes the logits again, by columns, and writes each row of the gradient once. Until then the
  gradient's memory is free, and holds the logits of the first pass.

Floor: three products of 2 x tokens x classes x width FLOPs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from tilewright.ops import _cublaslt, _op
from tilewright.ops.cross_entropy import AHEAD, Options, begin, check_loss, launch, scale
from tilewright.ops.cross_entropy import reference as loss_of_logits
from tilewright.plan.cost import linear_cross_entropy as cost

__all__ = ["cost", "linear_cross_entropy", "reference"]

_NAME = "linear_cross_entropy"
_ONCE = f"{_NAME} has no second derivative: leave out create_graph=True, or use its `reference`."
_MOST = 512 * 2**20  # bytes of logits at a time, unless told otherwise
_A_TOKEN = 64  # bytes, beside its logits: loss, statistics, and what a second pass makes of them
_SUMMED_FROM = 512  # tokens a chunk: the product of a smaller one takes less time than adding it to a sum
_MANY_TILES = 132 * 128 * 256  # elements: a tile for each processor of an H200
_TILE = 256  # rows of a tile of the large products

Tensor = torch.Tensor


def reference(x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, **options: Any) -> Any:
    """(loss, lse) in plain PyTorch: the definition."""
    class_weight = options.pop("class_weight", None)
    return loss_of_logits(F.linear(x, weight, bias), targets, weight=class_weight, **options)


def _product(left: Tensor, right: Tensor, out: Tensor, *, add: bool = False) -> None:
    """out (+)= left @ right, in float32 where `out` is, whatever the operands are."""
    # For a sum over tokens, of a transposed `left`, and where there are few tiles and the sum must be split for all
    # processors to have one, torch's own choice of algorithm is the best there is.
    suits = left.is_contiguous() and out.is_contiguous() and out.numel() >= _MANY_TILES
    if suits and not add and out.dtype == left.dtype and _cublaslt.product(left, right, out):
        return
    if out.dtype == left.dtype:
        torch.addmm(out, left, right, out=out) if add else torch.mm(left, right, out=out)
    elif left.is_cuda:
        if add:
            torch.addmm(out, left, right, out_dtype=out.dtype, out=out)
        else:
            torch.mm(left, right, out_dtype=out.dtype, out=out)
    else:
        product = left.to(out.dtype) @ right.to(out.dtype)
        out.add_(product) if add else out.copy_(product)


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if bias is None:
        _product(x, weight.t(), out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def _room(memory: int, each: int, most: int) -> int:
    """How many of `each` bytes fit, in whole tiles, and evenly: the last part is no smaller than it must be."""
    tile = _TILE if memory // each >= 4 * _TILE else 16
    fits = max(tile, memory // each // tile * tile)
    parts = max(1, -(-most // fits))
    return -(-most // (tile * parts)) * tile


def _plan(
    memory: int, a_row: int, count: int, dweight: Tensor | None, dx: Tensor | None
) -> tuple[int, bool, Tensor | None]:
    """(tokens a chunk, whether the weight's gradient takes a second pass, scales where it is summed in 16 bits).

    The scales lie in the rows of `dx`, if there is one, that the last chunk will write, and take no memory then.
    """
    chunk = max(16, _room(memory, a_row, count))
    if chunk >= count or dweight is None or dweight.dtype not in (torch.bfloat16, torch.float16):
        return chunk, False, None
    from tilewright.ops import linear_cross_entropy_kernels as kernels

    scales = kernels.scales(dweight) if dweight.dtype == torch.bfloat16 else None
    if scales is not None:
        shape, dtype = scales
        size, last = shape[0] * shape[1] * dtype.itemsize, (count - 1) % chunk + 1
        if chunk >= _SUMMED_FROM and dx is not None and last * dx[0].nbytes >= size:
            return chunk, False, dx[-last:].view(-1)[: size // dx.itemsize].view(dtype).view(shape)
        smaller = _room(memory - size, a_row, count)
        if smaller >= _SUMMED_FROM:
            return smaller, False, dweight.new_empty(shape, dtype=dtype)
    return chunk, True, None


def _chunks(
    index: Tensor | None, tokens: Tensor, classes: int, memory: int, needs_x: bool, dweight: Tensor | None
) -> tuple[int, int, bool, Tensor | None, Tensor | None, Tensor]:
    """How the tokens of `index` are taken, all where there is none, and the memory for it: how many they are, how many
    a chunk has, whether the weight's gradient takes a second pass, its scales where it is summed in 16 bits, x's
    gradient, and a buffer for the logits of a chunk."""
    count, (_, width), itemsize = len(tokens) if index is None else len(index), tokens.shape, tokens.itemsize
    dx = None
    if needs_x:
        dx = torch.empty_like(tokens) if index is None else torch.zeros_like(tokens)
    pitch = -(-classes // 64) * 64  # rows of logits begin on 128 bytes, whatever the vocabulary
    size, again, scales = _plan(memory, pitch * itemsize, count, dweight, dx if index is None else None)
    home = None
    if again and dweight is not None:
        free = dweight.numel() // pitch
        if index is not None:  # of what is not taken as it lies, there are copies
            free = min(free, memory // (2 * width * itemsize))
        size = max(size, _room(free, 1, count))
        home = dweight.view(-1)[: size * pitch] if size * pitch <= dweight.numel() else None
    buffer = tokens.new_empty(size, pitch) if home is None else home.view(size, pitch)
    if pitch > classes:
        buffer[:, classes:].zero_()  # a CPU's bfloat16 product multiplies what lies between the rows by zero
    return count, size, again, scales, dx, buffer


def _asked(wanted: Tensor) -> Callable[[], int]:
    """How many are true: a question to the device, and a function that waits for the answer."""
    number = torch.count_nonzero(wanted)
    if not number.is_cuda:
        return lambda: int(number)
    here, arrived = number.to("cpu", non_blocking=True), torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(number.device))

    def answer() -> int:
        arrived.synchronize()
        return int(here)

    return answer


def _run(
    upstream: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    class_weight: Tensor | None,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
    softcap: float,
    mean: bool,
    memory: int,
    wants_lse: bool,
    needs_x: bool,
    needs_weight: bool,
    needs_bias: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Loss and log-sum-exp of each row and the gradients of x, weight and bias, those that are wanted."""
    from tilewright.ops import linear_cross_entropy_kernels as kernels

    options = Options(ignore_index, smoothing, z_loss, softcap)
    (classes, width), dtype, compute = weight.shape, x.dtype, _op.compute_dtype(x)
    (tokens,) = _op.packed((x.reshape(-1, width),))
    targets, rows = targets.reshape(-1), targets.numel()
    wanted = needs_x or needs_weight or needs_bias
    memory = max(1, memory - _A_TOKEN * rows) if memory else min(_MOST, rows * classes * dtype.itemsize // 8)
    # Ignored tokens are left out. Whether there are any the host has to ask, and cannot while a graph is captured.
    # Until the answer is here, everything is made ready for the usual one.
    answer = None
    if not wants_lse and not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        answer = _asked(targets != ignore_index)
    w, b = weight.to(dtype), None if bias is None else bias.to(dtype)
    denominator, arrived = begin(targets, class_weight, classes, ignore_index, mean, compute)
    loss = targets.new_zeros(rows, dtype=compute)
    lse = torch.zeros_like(loss) if wants_lse else None
    dweight = torch.empty_like(weight, memory_format=torch.contiguous_format) if needs_weight else None
    dbias = torch.zeros_like(bias, dtype=compute) if needs_bias and bias is not None else None
    if upstream is not None and upstream.ndim:
        upstream = upstream.reshape(-1)
    index = None
    count, chunk, again, scales, dx, buffer = _chunks(index, tokens, classes, memory, needs_x, dweight)
    if answer is not None and answer() < rows:
        del scales, dx, buffer  # before there are others
        index = torch.nonzero(targets != ignore_index).reshape(-1)
        count, chunk, again, scales, dx, buffer = _chunks(index, tokens, classes, memory, needs_x, dweight)
    chunks = -(-count // chunk)
    if dweight is not None and count == 0:
        dweight.zero_()
    statistics: list[tuple[Tensor, Tensor]] = []  # of the chunks, for a second pass
    for number in range(chunks):
        part = slice(number * chunk, min((number + 1) * chunk, count))
        at = part if index is None else index[part]
        some, some_targets = tokens[at], targets[at]
        z = buffer[: len(some_targets), :classes]
        _logits(some, w, b, z)
        some_loss = loss[part] if index is None else torch.empty_like(loss[part])
        found = launch(
            z, some_targets, class_weight, denominator, options, arrived=arrived[part],
            upstream=upstream if upstream is None or upstream.ndim == 0 else upstream[at],
            loss=some_loss, lse=None if lse is None else lse[part], gradient=z if wanted else None,
        )  # fmt: skip
        if index is not None:
            loss[at] = some_loss
        if again:
            statistics.append((found[0], _of_rows(found[1])))
        if dbias is not None:
            dbias += z.sum(0, dtype=compute)
        if dweight is not None and not again:
            if scales is not None:
                kernels.launch(z, some, dweight, scales, number == 0, number == chunks - 1)
            else:
                _product(z.t(), some, dweight, add=number > 0)
        if dx is not None:
            if index is None:
                _product(z, w, dx[part])
            else:
                dx[at] = z @ w
    if again and dweight is not None:
        del buffer, z, some, some_loss, found
        if index is not None:
            tokens, targets = tokens[index], targets[index]
            memory = max(memory // 2, memory - tokens.numel() * dtype.itemsize)
            upstream = upstream[index] if upstream is not None and upstream.ndim else upstream
        given = tuple(torch.cat(parts) for parts in zip(*statistics, strict=True))
        _again(tokens, w, b, targets, class_weight, denominator, options, upstream, memory, given, dweight)
    if dx is not None:
        dx = dx.view(x.shape)
    if dbias is not None and bias is not None:
        dbias = dbias.to(bias.dtype)
    return loss, lse if wants_lse else None, dx, dweight, dbias


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
    fits = memory // (len(x) * x.element_size())
    columns = max(16, fits // 128 * 128 if fits >= 128 else fits // 16 * 16)  # whole tiles of the product
    weights = rows.new_full((), classes) if class_weight is None else class_weight.sum(dtype=rows.dtype)
    parts = torch.cat((rows, torch.zeros_like(rows), weights.expand(len(rows), 1)), -1)[:, None].contiguous()
    buffer = x.new_empty(len(x), columns)
    for first in range(0, classes, columns):
        part = slice(first, min(first + columns, classes))
        z = buffer[:, : part.stop - first]
        _logits(x, w[part], None if b is None else b[part], z)
        launch(
            z, targets, class_weight, denominator, options, upstream=upstream, gradient=z, offset=first,
            classes=classes, given=(x_targets, parts),
        )  # fmt: skip
        _product(z.t(), x, dweight[part])


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, reduced: bool, *inputs: Any) -> Any:
        x, _, _, targets, *_ = inputs
        ctx.later, ctx.gradients = None, None
        if reduced and x.dtype in AHEAD:
            loss, lse, *ctx.gradients = _run(*(None, *inputs))
        else:
            loss, lse, *_ = _run(*(None, *inputs[:-3], False, False, False))
            ctx.save_for_backward(*inputs[:5])
            ctx.later = (*inputs[5:-4], False, *inputs[-3:])
        if lse is not None:
            lse = lse.view(targets.shape)
            ctx.mark_non_differentiable(lse)
        return (loss.sum() if reduced else loss.view(targets.shape)), lse

    @staticmethod
    def backward(ctx: Any, upstream: Any, _: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(_ONCE)
        if ctx.later is not None:
            _, _, *gradients = _run(upstream, *ctx.saved_tensors, *ctx.later)
        else:
            gradients, ctx.gradients = ctx.gradients, None
            if gradients is None:
                raise RuntimeError(f"{_NAME}: an earlier backward took its gradients; run forward again.")
            gradients = [g if g is None else scale(g, upstream) for g in gradients]
        return None, *gradients, *(None,) * 12


_eager = _op.eager(_Function)


@torch.library.custom_op(
    "tilewright::linear_cross_entropy",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor? bias, Tensor targets, Tensor? class_weight, int ignore_index, "
    "float smoothing, float z_loss, float softcap, bool mean, int memory, bool wants_lse, bool needs_x, "
    "bool needs_weight, bool needs_bias) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _registered(*inputs: Any) -> tuple[Tensor, ...]:
    # A registered op cannot return None: an empty tensor stands for what nobody asked for.
    loss, lse, *gradients = _run(None, *inputs)
    lse = None if lse is None else lse.view(inputs[3].shape)
    return loss.sum(), *(inputs[0].new_empty(0) if t is None else t for t in (lse, *gradients))


@_op.fake_of(_registered)
def _(*inputs: Any) -> tuple[Tensor, ...]:
    x, weight, bias, targets, *_, wants_lse, needs_x, needs_weight, needs_bias = inputs
    compute, nothing = _op.compute_dtype(x), x.new_empty(0)
    return (
        x.new_empty((), dtype=compute),
        x.new_empty(targets.shape, dtype=compute) if wants_lse else nothing,
        torch.empty(x.shape, dtype=x.dtype, device=x.device) if needs_x else x.new_empty(0),
        torch.empty(weight.shape, dtype=weight.dtype, device=x.device) if needs_weight else x.new_empty(0),
        torch.empty(bias.shape, dtype=bias.dtype, device=x.device) if needs_bias else x.new_empty(0),
    )


def _registered_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*output[2:])
    ctx.needs = inputs[-3:]
    ctx.set_materialize_grads(False)


def _registered_backward(ctx: Any, upstream: Any, *_: Any) -> Any:
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(_ONCE)
    gradients = [
        (g * upstream).to(g.dtype) if needed and upstream is not None else None
        for g, needed in zip(ctx.saved_tensors, ctx.needs, strict=True)
    ]
    return *gradients, *(None,) * 12


_registered.register_autograd(_registered_backward, setup_context=_registered_setup)


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
    if weight is None or type(weight) in _op.PLAIN:
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
) -> Any:
    """Cross-entropy of ``x @ weight^T + bias`` with class indices, with a bounded part of the logits in memory.

    Args:
        x: ``(..., H)``, hidden states.
        weight: ``(V, H)``, of x's dtype, or of any under ``torch.autocast``; may be tied to an embedding, and may be a
            parameter that FSDP2 has sharded.
        targets: ``(...)``, int64 class indices.
        bias: ``(V,)``.
        class_weight, ignore_index, label_smoothing, z_loss, softcap, reduction, return_lse: as in
            ``tilewright.ops.cross_entropy``. Ignored tokens are not computed at all.
        memory: bytes to take beside the gradients: 64 a token, the rest for logits, of which it holds at least those of
            16 tokens or 16 classes. Left out: an eighth of all logits, and 512 MiB at most, and the 64 a token. More is
            faster, up to a point. (Under autocast the weight in its dtype comes on top; where some tokens are ignored
            and a second pass is needed, a copy of the others on top of half of it.)

    Returns:
        The loss in float32 (float64 for float64), or ``(loss, lse)``.

    Under ``torch.compile``, float16 and ``reduction="none"`` run the plain code, with all logits. Backward works once
    for each forward.

    >>> import torch
    >>> x, weight, targets = torch.randn(6, 8), torch.randn(50, 8), torch.tensor([1, 2, -100, 3, 4, 5])
    >>> loss = linear_cross_entropy(x, weight, targets)
    >>> torch.allclose(loss, torch.nn.functional.cross_entropy(x @ weight.t(), targets))
    True
    """
    options = Options(ignore_index, label_smoothing, z_loss, softcap)
    weight, bias = _whole(weight), _whole(bias)  # type: ignore[assignment]
    _check(x, weight, bias, targets, class_weight, options, reduction, memory)
    x = x.to(_dtype(x))
    traced = _op.is_traced(x, weight, bias, targets, class_weight)
    if not _op.runs_kernel(x) or (traced and (reduction == "none" or x.dtype not in AHEAD)):
        loss, lse = reference(
            x, weight, targets, bias, class_weight=class_weight, ignore_index=ignore_index,
            label_smoothing=label_smoothing, z_loss=z_loss, softcap=softcap, reduction=reduction,
        )  # fmt: skip
        return (loss, lse.detach()) if return_lse else loss
    needs = [t is not None and t.requires_grad and torch.is_grad_enabled() for t in (x, weight, bias)]
    inputs = (x, weight, bias, targets, class_weight, *options, reduction == "mean", memory or 0, return_lse, *needs)
    if traced:
        loss, lse, *_ = _registered(*inputs)
        lse = lse.detach()
    else:
        loss, lse = _eager(reduction != "none", *inputs)
    return (loss, lse) if return_lse else loss


def _dtype(x: Tensor) -> torch.dtype:
    """What the products are computed in: as a linear layer's would be."""
    kind = x.device.type
    autocast = x.dtype != torch.float64 and kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if autocast else x.dtype


def _check(
    x: Any, weight: Any, bias: Any, targets: Any, class_weight: Any, options: Options, reduction: Any, memory: Any
) -> None:
    _op.check_tensor(_NAME, "x", x)
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        raise ValueError(f"{_NAME}: weight must be a matrix, classes by width.")
    if not x.ndim or x.shape[-1] != weight.shape[1] or not weight.shape[1]:
        raise ValueError(
            f"{_NAME}: x has shape {tuple(x.shape)} and weight {tuple(weight.shape)}; the last must agree."
        )
    _op.check_tensor(_NAME, "weight", weight, weight.shape, x)
    _op.check_tensor(_NAME, "bias", bias, weight.shape[:1], x)
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype != x.dtype and _dtype(x) == x.dtype != _dtype(tensor):
            raise TypeError(
                f"{_NAME}: {name} is {tensor.dtype} and x is {x.dtype}; convert one, or use torch.autocast."
            )
        if tensor is not None and tensor.dtype not in (_dtype(x), torch.float32, torch.float64):
            raise TypeError(f"{_NAME}: {name} is {tensor.dtype} and autocast's dtype {_dtype(x)}; convert {name}.")
    check_loss(_NAME, x, len(weight), targets, "class_weight", class_weight, options, reduction)
    if memory is not None and (isinstance(memory, bool) or not isinstance(memory, int) or memory < 1):
        raise ValueError(f"{_NAME}: memory is {memory!r}; give bytes, at least 1.")
