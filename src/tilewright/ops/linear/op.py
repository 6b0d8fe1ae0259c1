"""A linear layer whose matmuls are by the quickest algorithm there is, and whose gradients are not rounded twice.

    y  = x @ weight^T + bias                    by cuBLASLt, which adds the bias to the matmul before it is written;
                                                on a Hopper, where the sums are short, by a kernel of its own
    dx = dy @ weight                            by cuBLASLt
    dweight = dy^T @ x                          by PyTorch, whose choice of algorithm is the best one here, in two
                                                matmuls where one leaves processors idle
    dbias = sum of dy over tokens               one pass over dy

`linear_parts` gives y in parts, as attention wants queries, keys and values; their gradients are several tensors. On a
Hopper the matmul for dx reads three where they are and sums them on the way (`hopper.cu`), and dweight is a
matmul for each. Elsewhere they have to be one matrix: the pass that packs them sums them as well.

Which algorithm is quickest is measured when a shape is first seen; all of them give the same bits
(`runtime/cublaslt.py`). The gradient of a parameter is computed in the parameter's dtype: under autocast in float32,
neither rounded to 16 bits on the way nor copied after. Matmuls too small for a choice to pay are
`torch.nn.functional.linear`, whose host cost is less.

What else the library can do to a matmul on its way to memory does not pay on a Hopper. Its quickest algorithm for the
matmul of queries, keys and values adds no bias; `hopper.cu` is as quick with one. The gradient of the bias
on the way through dweight takes longer than a sum of its own; a GELU on the way out of the matmul before it, or its
derivative on the way out of the matmul behind it, longer than a kernel of its own. `gelu_mlp` has kernels for that.
Adding the residual stream takes the matmuls as much longer as the norm behind them is quicker for it.

Saved for backward: x, and the weight in the dtype of the matmuls.

Floor: forward one matmul of 2 x tokens x in x out FLOPs, backward two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from tilewright.ops.linear.launch import (
    Gradient,
    Inputs,
    as_matrix,
    backward,
    forward,
    gradient_of_parts,
    gradient_of_weight,
    pack_parts,
    takes_parts,
)  # fmt: skip
from tilewright.ops.linear.padding import VECTOR, resize_matrix, round_up
from tilewright.plan.cost import linear as cost
from tilewright.runtime import cublaslt, cublaslt_library, dispatch, paths, register

__all__ = ["cost", "linear", "linear_parts", "reference"]

_INSTEAD = "torch.nn.functional.linear"
_DEVICES = ("cuda",)
WORTH_PADDING = 3e9  # FLOPs

Tensor = torch.Tensor


def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear layer in plain PyTorch: the definition."""
    return F.linear(x, weight, bias)


def _fake(inputs: Inputs) -> Tensor:
    return inputs.x.new_empty((*inputs.x.shape[:-1], inputs.weight.shape[0]))


def _fake_backward(inputs: Gradient) -> list[Tensor | None]:
    x, cast = inputs.x, inputs.cast
    shapes = (x.shape, cast.shape, cast.shape[:1])
    return [
        torch.empty(shape, dtype=torch.float32 if full else x.dtype, device=x.device) if need else None
        for shape, full, need in zip(shapes, (False, *inputs.full), inputs.needs, strict=True)
    ]


def _save(ctx: Any, inputs: Inputs, output: Any) -> None:
    _, weight, bias, _ = inputs
    ctx.save_for_backward(inputs.x, inputs.cast)
    ctx.full = [weight.dtype == torch.float32, bias is not None and bias.dtype == torch.float32]
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, run: Any, dy: Any) -> Sequence[Tensor | None]:
    register.refuse_second_derivative("linear", _INSTEAD)
    if dy is None:
        return ()
    x, cast = ctx.saved_tensors
    gradients: list[Tensor | None] = run(Gradient(dy, x, cast, ctx.full, list(ctx.needs_input_grad[:3])))
    return gradients


_BACKWARD = register.Op("linear_backward", backward, _fake_backward)
_OP = register.Op("linear", forward, _fake)
_eager, _registered = _OP.differentiate(_save, _differentiate, _BACKWARD), _OP.registered


class Parts(NamedTuple):
    """A linear layer whose result comes in parts of these sizes; the rest is that of `Inputs`."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    cast: Tensor
    sizes: Sequence[int]


def _launch_parts(inputs: Parts) -> tuple[Tensor, ...]:
    x, weight, bias, cast, sizes = inputs
    return forward(Inputs(x, weight, bias, cast)).split(sizes, -1)


def _save_parts(ctx: Any, inputs: Parts, output: Any) -> None:
    x, weight, bias, cast, ctx.sizes = inputs
    _save(ctx, Inputs(x, weight, bias, cast), output)
    if ctx.needs_input_grad[2]:
        from tilewright.ops.linear.kernels import foresee_add_up

        foresee_add_up(cast.device, len(cast))


def _differentiate_parts(ctx: Any, run: Any, *parts: Any) -> Sequence[Tensor | None]:
    register.refuse_second_derivative("linear", _INSTEAD)
    if all(part is None for part in parts):
        return ()
    x, cast = ctx.saved_tensors
    needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    dweight: Tensor | None = None
    if needs_x and takes_parts(parts, cast):
        matrices = [as_matrix(part) for part in parts]
        dx, dbias = gradient_of_parts(matrices, as_matrix(cast), needs_bias)
        dx = dx.view(x.shape)
        if needs_weight:
            dweight = gradient_of_weight([matrix.t() for matrix in matrices], x, ctx.full[0])
    else:
        dy, dbias = pack_parts(parts, ctx.sizes, needs_bias)
        dx, dweight, _ = run(Gradient(dy, x, cast, ctx.full, [needs_x, needs_weight, False]))
    return dx, dweight, None if dbias is None else dbias.to(torch.float32 if ctx.full[1] else x.dtype)


class Padded(NamedTuple):
    """A linear layer of sizes that are no multiple of 8, to be computed in `dtype` on copies with zeros behind."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype


def _launch_padded(inputs: Padded) -> tuple[Tensor, Inputs]:
    """The result, and what was multiplied."""
    x, weight, bias, dtype = inputs
    matrix = x.reshape(-1, x.shape[-1])
    features_out, features_in = map(round_up, weight.shape)
    tokens = resize_matrix(matrix, len(matrix), features_in, dtype)
    cast = resize_matrix(weight, features_out, features_in, dtype)
    vector = None if bias is None else resize_matrix(bias[None], 1, features_out, dtype)[0]
    layer = Inputs(tokens, weight, vector, cast)
    y = forward(layer)
    return resize_matrix(y, len(y), len(weight), dtype).view(*x.shape[:-1], len(weight)), layer._replace(bias=bias)


def _save_padded(ctx: Any, inputs: Padded, output: tuple[Tensor, Inputs]) -> None:
    _, layer = output
    _save(ctx, layer, None)
    ctx.shape, ctx.sizes, ctx.dtypes = inputs.x.shape, inputs.weight.shape, (inputs.x.dtype, inputs.weight.dtype)


def _differentiate_padded(ctx: Any, run: Any, dy: Any) -> Sequence[Tensor | None]:
    register.refuse_second_derivative("linear", _INSTEAD)
    if dy is None:
        return ()
    tokens, cast = ctx.saved_tensors
    rows = resize_matrix(dy.reshape(-1, dy.shape[-1]), len(tokens), len(cast), dy.dtype)
    dx, dweight, dbias = run(Gradient(rows, tokens, cast, ctx.full, ctx.needs_input_grad[:3]))
    features_out, features_in = ctx.sizes
    if dx is not None:
        dx = resize_matrix(dx, len(dx), features_in, ctx.dtypes[0]).view(ctx.shape)
    if dweight is not None:
        dweight = resize_matrix(dweight, features_out, features_in, ctx.dtypes[1])
    return dx, dweight, None if dbias is None else dbias[:features_out].contiguous()


_eager_parts = register.make_eager(_launch_parts, _save_parts, _differentiate_parts, _BACKWARD)
_eager_padded = register.make_eager(_launch_padded, _save_padded, _differentiate_padded, _BACKWARD, outputs=1)


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
    least 20 GFLOP; everything else is plain PyTorch. Where they are no multiples of 8, and the matmul has at least 3
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
            (y,) = _eager_padded(x, weight, bias, matmul_dtype(x))
            return y  # type: ignore[no-any-return]
        return reference(x, weight, bias)
    paths.note("linear", paths.KERNEL)
    return (_registered if dispatch.is_compiling() else _eager)(*inputs)


def is_worth_padding(x: Tensor, weight: Tensor) -> bool:
    """Whether a matmul takes longer than to copy its operands into whole vectors. A compiler pads by itself."""
    features_out, features_in = weight.shape
    whole = features_out % VECTOR == features_in % VECTOR == 0
    if whole or x.device.type not in _DEVICES or 2 * x.numel() * features_out < WORTH_PADDING:
        return False
    return matmul_dtype(x) in cublaslt_library.HALVES and not dispatch.is_traced(x, weight)


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
    if isinstance(inputs, str) or dispatch.is_compiling():
        return linear(x, weight, bias).split(list(sizes), -1)
    paths.note("linear", paths.KERNEL)
    return _eager_parts(*inputs, list(sizes))


def prepare(x: Tensor, weight: Tensor, bias: Tensor | None) -> Inputs | str:
    """Return what the op takes; where it is plain PyTorch's to compute, a sentence that says why."""
    dtype = _check(x, weight, bias)
    if not weight.requires_grad and x.requires_grad and torch.is_grad_enabled():
        return "the weight is frozen, and PyTorch keeps no x for its gradient"
    why = _why_not(dtype, x, weight, bias)
    return why or Inputs(x.to(dtype), weight, bias, cast_weight(weight, dtype))


def cast_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight in the dtype of the matmuls, without its graph. Made anew in every call: see docs/ops.md."""
    return weight if weight.dtype is dtype else weight.detach().to(dtype)


def _why_not(dtype: torch.dtype, x: Tensor, weight: Tensor, bias: Tensor | None) -> str:
    """Say why cuBLASLt should not compute it; nothing where it should."""
    if x.device.type not in _DEVICES:
        return dispatch.why_no_kernel(x)
    if dtype not in cublaslt_library.HALVES:
        return f"{dtype} matmuls are left to PyTorch"
    features_out, features_in = weight.shape
    if features_in % 8 or features_out % 8:
        return "a size is no multiple of 8"
    if 2 * x.numel() * features_out < cublaslt.WORTH_CHOOSING:
        return "the matmul is too small for a choice of algorithms to pay"
    for tensor in (x, weight, bias):
        if tensor is not None and not dispatch.is_plain(tensor):
            return f"{type(tensor).__name__} is a tensor subclass"
    for parameter in (weight, bias):
        if parameter is not None and parameter.dtype not in (dtype, torch.float32):
            return f"a parameter is {parameter.dtype}, and the matmul {dtype}"
    if torch._C._are_functorch_transforms_active():
        return dispatch.why_no_kernel(x)
    if not dispatch.is_compiling() and dispatch.has_mode():
        # Who traces without compiling (counts FLOPs, say) knows PyTorch's ops only.
        return "a dispatch mode sees PyTorch's own ops"
    return ""


def matmul_dtype(x: Tensor) -> torch.dtype:
    """Return what the matmuls of a linear layer are computed in."""
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
    dtype = matmul_dtype(x)
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype != x.dtype and dtype == x.dtype != matmul_dtype(tensor):
            raise TypeError(f"linear: {name} is {tensor.dtype} and x is {x.dtype}; convert one, or use autocast.")
    return dtype
