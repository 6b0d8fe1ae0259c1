"""A linear layer whose matmuls are by the quickest algorithm there is, and whose gradients are not rounded twice.

    y  = x @ weight^T + bias                    by cuBLASLt, which adds the bias to the matmul before it is written;
                                                on a Hopper, where the sums are short, by a kernel of its own
    dx = dy @ weight                            by cuBLASLt
    dweight = dy^T @ x                          by PyTorch, whose choice of algorithm is the best one here, in two
                                                matmuls where one leaves processors idle
    dbias = sum of dy over tokens               one pass over dy

`linear_parts` gives y in parts, as attention wants queries, keys and values; their gradients are several tensors. On a
Hopper the matmul for dx reads three where they are and sums them on the way (`runtime/cuda/gemm.cu`), and dweight is a
matmul for each. Elsewhere they have to be one matrix: the pass that packs them sums them as well.

Which algorithm is quickest is measured when a shape is first seen; all of them give the same bits
(`runtime/cublaslt.py`). The gradient of a parameter is computed in the parameter's dtype: under autocast in float32,
neither rounded to 16 bits on the way nor copied after. Matmuls too small for a choice to pay are
`torch.nn.functional.linear`, whose host cost is less.

What else the library can do to a matmul on its way to memory does not pay on a Hopper. Its quickest algorithm for the
matmul of queries, keys and values adds no bias; `runtime/cuda/gemm.cu` is as quick with one. The gradient of the bias
on the way through dweight takes longer than a sum of its own; a GELU on the way out of the matmul before it, or its
derivative on the way out of the matmul behind it, longer than a kernel of its own. `gelu_mlp` has kernels for that.
Adding the residual stream takes the matmuls as much longer as the norm behind them is quicker for it.

Saved for backward: x, and the weight in the dtype of the matmuls.

Floor: forward one matmul of 2 x tokens x in x out FLOPs, backward two.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from tilewright.measure import work
from tilewright.ops.linear.padding import VECTOR, resize_matrix, round_up
from tilewright.plan.cost import matmul as cost
from tilewright.runtime import cublaslt, dispatch, hopper, nvrtc, paths

__all__ = ["cost", "linear", "linear_parts", "reference"]

_ONCE = "linear has no second derivative: leave out create_graph=True, or use torch.nn.functional.linear."
_DEVICES = ("cuda",)
_TILE = 192  # rows and columns of a tile of the weight's gradient
WORTH_PADDING = 4e9  # FLOPs
_SHORT = 2048  # inner dimension up to which a bias is better added by a kernel of ours, as far as was measured

Tensor = torch.Tensor


def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear layer in plain PyTorch: the definition."""
    return F.linear(x, weight, bias)


# The op. `weight` is the parameter, which gets the gradient, and `cast` what it is in the dtype of the matmuls.


def _matrix(x: Tensor) -> Tensor:
    """Tokens by features, as the library takes them."""
    return dispatch.packed((x if x.ndim == 2 else x.reshape(-1, x.shape[-1]),))[0]


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, cast: Tensor) -> Tensor:
    tokens, matrix = _matrix(x), _matrix(cast)
    y = tokens.new_empty((*x.shape[:-1], matrix.shape[0]))  # in its own shape: a view would hide whose memory it is
    out = y.view(tokens.shape[0], matrix.shape[0])
    short = x.shape[-1] <= _SHORT and x.dtype == torch.bfloat16 and x.numel() > 0
    if bias is not None and short and hopper.ready(x.device, "tilewright_linear_matmul_biased"):
        _biased(tokens, matrix, bias, out)
        return y
    vector = None if bias is None else dispatch.packed((bias.to(x.dtype),))[0]
    if not cublaslt.matmul(tokens, matrix.t(), out, vector):
        y = F.linear(tokens.view(x.shape), matrix, vector)
    return y


def _biased(tokens: Tensor, matrix: Tensor, bias: Tensor, out: Tensor) -> None:
    """Writes tokens @ matrix^T + bias to `out`, on a Hopper."""
    (rows, inner), columns = tokens.shape, matrix.shape[0]
    (vector,) = dispatch.packed((bias.detach().float(),))
    with work.launching(
        "tilewright_linear_matmul_biased", (tokens, matrix, vector, out), 2.0 * tokens.numel() * columns
    ):
        maps = (
            nvrtc.tensor_map(tokens, 64, 128), nvrtc.tensor_map(matrix, 64, hopper.COLUMNS // 2),
            nvrtc.tensor_map(out, 32, 128),
        )  # fmt: skip
        hopper.start("tilewright_linear_matmul_biased", maps, vector, (rows, columns, inner), tokens.device)


def _backward(dy: Tensor, x: Tensor, cast: Tensor, full: Sequence[bool], needs: Sequence[bool]) -> list[Tensor | None]:
    """The gradients of x, weight and bias, those that are needed, and of the latter two those `full` in float32."""
    rows, dx, dweight, dbias = _matrix(dy), None, None, None
    if needs[0]:
        matrix = _matrix(cast)
        dx = rows.new_empty((rows.shape[0], matrix.shape[1]))
        if not cublaslt.matmul(rows, matrix, dx):
            dx = torch.mm(rows, matrix)
        dx = dx.view(x.shape)
    if needs[1]:
        transposed = rows.t()
        cut = _cut(*cast.shape, dispatch.multiprocessors(x.device))
        dweight = _of_weight([transposed[:cut], transposed[cut:]] if cut else [transposed], x, full[0])
    if needs[2]:
        dbias = _sum(rows).to(torch.float32 if full[1] else rows.dtype)
    return [dx, dweight, dbias]


def _sum(rows: Tensor) -> Tensor:
    """Over the rows, in float32."""
    if not dispatch.runs_kernel(rows):
        return rows.sum(0, dtype=torch.float32)
    from tilewright.ops.linear.kernels import sum_rows

    return sum_rows(rows)


def _packed(parts: Sequence[Tensor | None], like: Sequence[int], sums: bool) -> tuple[Tensor, Tensor | None]:
    """Gradients beside each other in one matrix, of which `like` are the widths, and its sum over the rows."""
    some = next(part for part in parts if part is not None)
    shape = some.shape[:-1]
    matrices = [
        _matrix(some.new_zeros((*shape, width)) if part is None else part)
        for part, width in zip(parts, like, strict=True)
    ]
    if not sums or len(parts) != 3 or not dispatch.runs_kernel(some):
        packed = torch.cat(matrices, 1)
        return packed, _sum(packed) if sums else None
    from tilewright.ops.linear.kernels import pack_and_sum

    return pack_and_sum(matrices)


def _of_weight(dy: Sequence[Tensor], x: Tensor, full: bool) -> Tensor:
    """One matmul for each of `dy`, below each other."""
    tokens = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    features = [len(rows) for rows in dy]
    out = tokens.new_empty((sum(features), tokens.shape[1]), dtype=torch.float32 if full else x.dtype)
    for rows, part in zip(dy, out.split(features), strict=True):
        if not full:
            torch.mm(rows, tokens, out=part)
        elif x.is_cuda:
            torch.mm(rows, tokens, out_dtype=torch.float32, out=part)
        else:
            torch.mm(rows.float(), tokens.float(), out=part)
    return out


def _fits_hopper(parts: Sequence[Tensor | None], cast: Tensor) -> bool:
    """Whether a kernel takes the gradients of the parts as they are."""
    sizes = [part.shape[-1] for part in parts if part is not None and part.shape[-1] % hopper.STEP == 0]
    if not len(sizes) == len(parts) == 3 or sum(sizes) > hopper.MOST_SUMS:
        return False
    return cast.dtype == torch.bfloat16 and hopper.ready(cast.device, "tilewright_linear_matmul_parts_gradient")


def _of_parts(parts: Sequence[Tensor], matrix: Tensor, sums: bool) -> tuple[Any, Tensor | None]:
    """[parts] @ matrix, and the sums of the parts over their rows, in float32."""
    (inner, columns), rows = matrix.shape, parts[0].shape[0]
    second, third = parts[0].shape[1], parts[0].shape[1] + parts[1].shape[1]
    sizes, device = (rows, columns, inner), matrix.device
    dx, partials = matrix.new_empty((rows, columns)), None
    if sums:
        partials = dx.new_empty((hopper.blocks(sizes, device), inner), dtype=torch.float32)
    with work.launching(
        "tilewright_linear_matmul_parts_gradient", (*parts, matrix, dx, partials), 2.0 * dx.numel() * inner
    ):
        maps = (
            *[nvrtc.tensor_map(part, hopper.STEP, 128) for part in parts],
            nvrtc.tensor_map(matrix, 64, 32), nvrtc.tensor_map(dx, 32, 128),
        )  # fmt: skip
        hopper.start("tilewright_linear_matmul_parts_gradient", maps, partials, sizes, device, second, third)
    if partials is None:
        return dx, None
    from tilewright.ops.linear.kernels import add_up

    return dx, add_up(partials)


@functools.cache
def _cut(rows: int, columns: int, processors: int) -> int:
    """After how many rows a sum over many tokens is better done in two matmuls; 0 where one is as good.

    The library cuts so few tiles along the tokens, by a power of two. Three squares of 768 are 48 tiles of 192, and 96
    processors of 132 then have one; two squares and one square are 32 and 16, and 128 have one each time.

    >>> _cut(2304, 768, 132), _cut(3072, 768, 132), _cut(6144, 2048, 132)
    (1536, 0, 0)
    """
    square = (columns // _TILE) ** 2
    if rows != 3 * columns or columns % _TILE or 3 * square > processors:
        return 0

    def time(tiles: int) -> float:
        return 2.0 ** (1 - (processors // tiles).bit_length())

    return 2 * columns if time(2 * square) + time(square) < 0.85 * time(3 * square) else 0


# Autograd. Both ways in, the light eager one and the registered one, save and differentiate by the same functions.


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, cast = inputs
    ctx.save_for_backward(x, cast)
    ctx.full = [weight.dtype == torch.float32, bias is not None and bias.dtype == torch.float32]
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, backward: Any, dy: Any) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():
        raise RuntimeError(_ONCE)
    if dy is None:
        return None, None, None, None
    return *backward(dy, *ctx.saved_tensors, ctx.full, list(ctx.needs_input_grad[:3])), None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        output = _forward(*inputs)
        _save(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        return _differentiate(ctx, _backward, dy)


class _Parts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sizes: Sequence[int], *inputs: Any) -> tuple[Tensor, ...]:
        output = _forward(*inputs)
        _save(ctx, inputs, output)
        ctx.sizes = sizes
        if ctx.needs_input_grad[3]:
            from tilewright.ops.linear.kernels import foresee_add_up

            foresee_add_up(output.device, output.shape[-1])
        return output.split(sizes, -1)

    @staticmethod
    def backward(ctx: Any, *parts: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(_ONCE)
        if all(part is None for part in parts):
            return (None,) * 5
        x, cast = ctx.saved_tensors
        needs = list(ctx.needs_input_grad[1:4])
        dweight: Tensor | None = None
        if needs[0] and _fits_hopper(parts, cast):
            matrices = [_matrix(part) for part in parts]
            dx, dbias = _of_parts(matrices, _matrix(cast), needs[2])
            dx = dx.view(x.shape)
            if needs[1]:
                dweight = _of_weight([matrix.t() for matrix in matrices], x, ctx.full[0])
        else:
            dy, dbias = _packed(parts, ctx.sizes, needs[2])
            dx, dweight, _ = _backward(dy, x, cast, ctx.full, [*needs[:2], False])
        return None, dx, dweight, None if dbias is None else dbias.to(torch.float32 if ctx.full[1] else x.dtype), None


class _Padded(torch.autograd.Function):
    """A matmul of sizes that are no multiple of 8, on copies with zeros behind."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        matrix = x.reshape(-1, x.shape[-1])
        features_out, features_in = map(round_up, weight.shape)
        tokens = resize_matrix(matrix, len(matrix), features_in, dtype)
        cast = resize_matrix(weight, features_out, features_in, dtype)
        vector = None if bias is None else resize_matrix(bias[None], 1, features_out, dtype)[0]
        y = _forward(tokens, weight, vector, cast)
        _save(ctx, (tokens, weight, bias, cast), y)
        ctx.shape, ctx.sizes, ctx.dtypes = x.shape, weight.shape, (x.dtype, weight.dtype)
        return resize_matrix(y, len(y), len(weight), dtype).view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(_ONCE)
        if dy is None:
            return None, None, None, None
        tokens, cast = ctx.saved_tensors
        rows = resize_matrix(dy.reshape(-1, dy.shape[-1]), len(tokens), len(cast), dy.dtype)
        dx, dweight, dbias = _backward(rows, tokens, cast, ctx.full, ctx.needs_input_grad[:3])
        features_out, features_in = ctx.sizes
        if dx is not None:
            dx = resize_matrix(dx, len(dx), features_in, ctx.dtypes[0]).view(ctx.shape)
        if dweight is not None:
            dweight = resize_matrix(dweight, features_out, features_in, ctx.dtypes[1])
        return dx, dweight, None if dbias is None else dbias[:features_out].contiguous(), None


_eager, _eager_parts, _eager_padded = (dispatch.eager(function) for function in (_Linear, _Parts, _Padded))


@torch.library.custom_op(
    "tilewright::linear", mutates_args=(), schema="(Tensor x, Tensor weight, Tensor? bias, Tensor cast) -> Tensor"
)
def _registered(*inputs: Any) -> Tensor:
    return _forward(*inputs)


@dispatch.fake_of(_registered)
def _(*inputs: Any) -> Tensor:
    x, weight = inputs[:2]
    return torch.empty((*x.shape[:-1], weight.shape[0]), dtype=x.dtype, device=x.device)


@torch.library.custom_op(
    "tilewright::linear_backward",
    mutates_args=(),
    schema="(Tensor dy, Tensor x, Tensor cast, bool[] full, bool[] needs) -> Tensor[]",
)
def _registered_backward(*inputs: Any) -> list[Tensor]:
    # A registered op cannot return None: an empty tensor stands for a gradient nobody asked for.
    return [inputs[0].new_empty(0) if gradient is None else gradient for gradient in _backward(*inputs)]


@dispatch.fake_of(_registered_backward)
def _(*inputs: Any) -> list[Tensor]:
    _, x, cast, full, needs = inputs
    shapes = (x.shape, cast.shape, cast.shape[:1])
    return [
        torch.empty(shape, dtype=torch.float32 if is_full else x.dtype, device=x.device) if need else x.new_empty(0)
        for shape, is_full, need in zip(shapes, (False, *full), needs, strict=True)
    ]


def _asked(*inputs: Any) -> list[Tensor | None]:
    gradients = _registered_backward(*inputs)
    return [gradient if need else None for gradient, need in zip(gradients, inputs[-1], strict=True)]


_registered.register_autograd(lambda ctx, dy: _differentiate(ctx, _asked, dy), setup_context=_save)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight^T + bias`` as ``torch.nn.functional.linear`` has it, by the quickest algorithm there is.

    Args:
        x: ``(..., in)``.
        weight: ``(out, in)``, of x's dtype, or of float32 under ``torch.autocast``; its gradient is then computed in
            float32.
        bias: ``(out,)``, likewise.

    Returns:
        ``(..., out)`` in the dtype of the matmul.

    cuBLASLt computes bfloat16 and float16 on a GPU where ``in`` and ``out`` are multiples of 8 and the matmul has at
    least 20 GFLOP; everything else is plain PyTorch. Where they are no multiples of 8, and the matmul has at least 4
    GFLOP, zeros are added up to the next one: what cuBLAS has for such sizes is several times as slow.

    >>> import torch
    >>> x, weight, bias = torch.randn(2, 3, 8), torch.randn(16, 8), torch.randn(16)
    >>> torch.equal(linear(x, weight, bias), torch.nn.functional.linear(x, weight, bias))
    True
    """
    inputs = prepare(x, weight, bias)
    if isinstance(inputs, str):
        paths.note("linear", paths.PYTORCH, inputs)
        if is_worth_padding(x, weight):
            return _eager_padded(x, weight, bias, _dtype(x))
        return reference(x, weight, bias)
    paths.note("linear", paths.KERNEL)
    return (_registered if torch.compiler.is_compiling() else _eager)(*inputs)


def is_worth_padding(x: Tensor, weight: Tensor) -> bool:
    """Whether a matmul takes longer than to copy its operands into whole vectors. A compiler pads by itself."""
    features_out, features_in = weight.shape
    whole = features_out % VECTOR == features_in % VECTOR == 0
    if whole or x.device.type not in _DEVICES or 2 * x.numel() * features_out < WORTH_PADDING:
        return False
    return _dtype(x) in cublaslt.HALVES and not dispatch.is_traced(x, weight)


def linear_parts(x: Tensor, weight: Tensor, bias: Tensor | None, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """``linear(x, weight, bias).split(sizes, -1)``, with a backward that reads the parts' gradients once.

    >>> import torch
    >>> q, k, v = linear_parts(torch.randn(2, 3, 8), torch.randn(32, 8), None, (16, 8, 8))
    >>> q.shape, k.shape
    (torch.Size([2, 3, 16]), torch.Size([2, 3, 8]))
    """
    inputs = prepare(x, weight, bias)
    if sum(sizes) != weight.shape[0] or min(sizes) < 1:
        raise ValueError(
            f"linear: the parts {tuple(sizes)} are not the {weight.shape[0]} features; give positive sizes."
        )
    if isinstance(inputs, str) or torch.compiler.is_compiling():
        return linear(x, weight, bias).split(list(sizes), -1)
    paths.note("linear", paths.KERNEL)
    return _eager_parts(list(sizes), *inputs)


def prepare(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Any, ...] | str:
    """Return what the op takes; where it is plain PyTorch's to compute, a sentence that says why."""
    dtype = _check(x, weight, bias)
    if not weight.requires_grad and x.requires_grad and torch.is_grad_enabled():
        return "the weight is frozen, and PyTorch keeps no x for its gradient"
    why = _why_not(dtype, x, weight, bias)
    return why or (x.to(dtype), weight, bias, _cast(weight, dtype))


def _cast(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight in the dtype of the matmuls, without its graph. Made anew in every call: see docs/ops.md."""
    return weight if weight.dtype is dtype else weight.detach().to(dtype)


def _why_not(dtype: torch.dtype, x: Tensor, weight: Tensor, bias: Tensor | None) -> str:
    """Say why cuBLASLt should not compute it; nothing where it should."""
    if x.device.type not in _DEVICES:
        return dispatch.why_no_kernel(x)
    if dtype not in cublaslt.HALVES:
        return f"{dtype} matmuls are left to PyTorch"
    features_out, features_in = weight.shape
    if features_in % 8 or features_out % 8:
        return "a size is no multiple of 8"
    if 2 * x.numel() * features_out < cublaslt.WORTH_CHOOSING:
        return "the matmul is too small for a choice of algorithms to pay"
    for tensor in (x, weight, bias):
        if tensor is not None and type(tensor) not in dispatch.PLAIN:
            return f"{type(tensor).__name__} is a tensor subclass"
    for parameter in (weight, bias):
        if parameter is not None and parameter.dtype not in (dtype, torch.float32):
            return f"a parameter is {parameter.dtype}, and the matmul {dtype}"
    if torch._C._are_functorch_transforms_active():
        return dispatch.why_no_kernel(x)
    if not torch.compiler.is_compiling() and dispatch.has_mode():
        # Who traces without compiling (counts FLOPs, say) knows PyTorch's ops only.
        return "a dispatch mode sees PyTorch's own ops"
    return ""


def _dtype(x: Tensor) -> torch.dtype:
    """What the matmuls are computed in."""
    kind = x.device.type
    autocast = x.dtype != torch.float64 and kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if autocast else x.dtype


def _check(x: Any, weight: Any, bias: Any) -> torch.dtype:
    """Refuses what does not fit together; the dtype of the matmuls."""
    dispatch.check_tensor("linear", "x", x)
    if not x.ndim:
        raise ValueError("linear: x is a scalar; its last dimension must hold the features.")
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        raise ValueError("linear: weight must be a matrix, features out by features in.")
    features_out = weight.shape[0]
    dispatch.check_tensor("linear", "weight", weight, torch.Size((features_out, x.shape[-1])), x)
    dispatch.check_tensor("linear", "bias", bias, torch.Size((features_out,)), x)
    dtype = _dtype(x)
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype != x.dtype and dtype == x.dtype != _dtype(tensor):
            raise TypeError(f"linear: {name} is {tensor.dtype} and x is {x.dtype}; convert one, or use autocast.")
    return dtype
