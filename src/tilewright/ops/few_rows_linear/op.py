"""A linear layer of a few rows without a gradient, as each step of decoding has it: limited by the weight's bytes.

    y = activation(x @ weight^T + bias)

Matmuls of libraries work in tiles of 64 rows and more, of which all but a few are empty here, and split the sums of
narrow layers over several programs, to be added up by another launch. This kernel has no tiles: a program sums one
feature of every row from 16 bytes of the weight a load. It computes in float32 and rounds once.

Nothing is saved, for there is no backward: where autograd wants one, `torch.nn.functional.linear` computes the call.

Floor at 2 bytes an element: the weight is read once. x and y are of a lower order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.ops.activation.op import activation_of, check_activation
from tilewright.plan.cost import few_rows_linear as cost
from tilewright.runtime import dispatch, paths, register

__all__ = ["MOST_ROWS", "cost", "few_rows_linear", "reference"]

_NAME = "few_rows_linear"
MOST_ROWS = 4  # of more, the arithmetic of the rows takes longer than to read the weight


def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "") -> Tensor:
    """The same in plain PyTorch: the definition."""
    return activation_of(F.linear(x, weight, bias), activation)


class Inputs(NamedTuple):
    """The arguments of a call."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    activation: str


def _launch(inputs: Inputs) -> Tensor:
    from tilewright.ops.few_rows_linear import kernels

    x, bias = dispatch.packed((inputs.x, inputs.bias))
    weight = inputs.weight
    if not weight.is_contiguous() or weight.is_neg():
        weight = weight.resolve_neg().clone(memory_format=torch.contiguous_format)
    features, width = weight.shape
    out = torch.empty((*x.shape[:-1], features), dtype=x.dtype, device=x.device)
    launch = kernels.launch(
        x.device, dispatch.dtypes((x, bias)), weight.data_ptr() % 16 == 0, x.numel() // width, width, inputs.activation
    )  # fmt: skip
    launch((features, 1), (x, weight, bias, out), (features,))
    return out


def _fake(inputs: Inputs) -> Tensor:
    return inputs.x.new_empty((*inputs.x.shape[:-1], inputs.weight.shape[0]))


_OP = register.Op(_NAME, _launch, _fake)
_registered = _OP.registered


def few_rows_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str = "") -> Tensor:
    """``torch.nn.functional.linear`` at the memory's speed where x has 1 to 4 rows and nobody needs a gradient.

    Args:
        x: ``(..., in)``, in bfloat16, float16 or float32; its leading dimensions are its rows.
        weight: ``(out, in)``, contiguous, in the dtype of x.
        bias: ``(out,)``, in the dtype of x.
        activation: ``"silu"``, ``"gelu"`` or ``"gelu_tanh"``, before the result is rounded; left out, there is none.

    Returns:
        ``(..., out)``, contiguous, in the dtype of x.

    What it does not take, such as more rows, autocast or a weight of other strides, is left to PyTorch.

    >>> import torch
    >>> x, weight, bias = torch.randn(2, 8), torch.randn(16, 8), torch.randn(16)
    >>> with torch.no_grad():
    ...     y = few_rows_linear(x, weight, bias)
    >>> torch.allclose(y, torch.nn.functional.linear(x, weight, bias), atol=1e-5)
    True
    """
    _check(x, weight, bias)
    check_activation(_NAME, activation)
    why = _why_not(x, weight, bias)
    if why:
        paths.note(_NAME, paths.PYTORCH, why)
        return reference(x, weight, bias, activation)
    path = paths.choose(_NAME, x, weight, bias)
    if path == paths.REFERENCE:
        return reference(x, weight, bias, activation)
    inputs = Inputs(x, weight, bias, activation)
    return _launch(inputs) if path == paths.KERNEL else _OP.call_registered(inputs)


def _why_not(x: Tensor, weight: Tensor, bias: Tensor | None) -> str:
    """Say why the kernel should not compute it; nothing where it should."""
    if not x.numel() or not len(weight) or x.numel() > MOST_ROWS * x.shape[-1]:
        return f"x does not have 1 to {MOST_ROWS} rows, or a size is 0"
    if x.dtype == torch.float64 or torch.is_autocast_enabled(x.device.type):
        return "float64 and autocast are left to PyTorch"
    if not weight.is_contiguous():
        return "the weight is not contiguous"
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias)):
        return "a gradient is needed"
    return ""


def _check(x: Any, weight: Any, bias: Any) -> None:
    dispatch.check_tensor(_NAME, "x", x)
    if not x.ndim:
        raise ValueError(f"{_NAME}: x is a scalar; its last dimension must hold the features.")
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        raise ValueError(f"{_NAME}: weight must be a matrix, features out by features in.")
    dispatch.check_tensor(_NAME, "weight", weight, torch.Size((weight.shape[0], x.shape[-1])), x)
    dispatch.check_tensor(_NAME, "bias", bias, torch.Size((weight.shape[0],)), x)
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
            raise TypeError(f"{_NAME}: {name} is {tensor.dtype} and x is {x.dtype}; convert one, or use autocast.")
