"""Linear layers with weights of 8 or 4 bits and inputs of 16.

    y = activation(x @ W^T + bias) + residual

    int8_linear    W[n, k] = scale[n] * weight[n, k]                              int8
    fp8_linear     W[n, k] = scale[n] * weight[n, k]                              float8 e4m3
    int4_linear    W[n, k] = scale[k / group, n] * (code[n, k] - zero[k / group, n])    two codes a byte

Where few rows of x meet the weight, as when a model generates text, reading the weight is all that takes time, and
fewer bytes take less. Above about 48 rows a weight of 16 bits and cuBLAS are faster on an H200. The weight becomes
numbers of x's dtype in registers, exactly; sums are float32, scales multiply them there, and the result is rounded
once.

Saved for backward: the packed weight, nothing of x. The weight and its scales get no gradient; dx is dy @ W by cuBLAS
on an unpacked copy. Where a gradient goes through an activation, that is an op of its own.

Floor: the packed weight and its scales, x, the bias and the residual are read once, y is written once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilewright.ops.activation.op import activate, check_activation
from tilewright.ops.linear.op import matmul_dtype
from tilewright.ops.quantized_linear.launch import FEW_ROWS, HALVES, Inputs, Packed, dequantize, forward
from tilewright.ops.quantized_linear.reference import reference, span_of
from tilewright.plan.cost import quantized_linear as cost
from tilewright.runtime import dispatch, paths, register

__all__ = ["cost", "fp8_linear", "int4_linear", "int8_linear", "reference"]

GROUPS = (32, 64, 128)
_MANY_ROWS = f"above {FEW_ROWS} rows a weight of 16 bits is faster: this one saves memory, not time"


def _fake(inputs: Inputs) -> Tensor:
    return inputs.x.new_empty((*inputs.x.shape[:-1], inputs.weight.shape[0]))


def _fake_matrix(inputs: Packed) -> Tensor:
    columns, inner = inputs.weight.shape
    if inputs.weight.dtype == torch.uint8:
        inner = 2 * inner
    return torch.empty(columns, inner, dtype=inputs.dtype, device=inputs.weight.device)


def _save(ctx: Any, inputs: Inputs, output: Any) -> None:
    ctx.save_for_backward(inputs.weight, inputs.scale, inputs.zero)
    ctx.bias_dtype = None if inputs.bias is None else inputs.bias.dtype
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, unpack: Any, dy: Any) -> Sequence[Tensor | None]:
    if dy is None:
        return ()
    needs_x, *_, needs_bias, needs_residual = ctx.needs_input_grad[:6]
    dx = dbias = None
    rows = dy.reshape(-1, dy.shape[-1])
    if needs_x:
        weight, scale, zero = ctx.saved_tensors
        matrix = unpack(Packed(weight, scale, zero, dy.dtype))
        dx = (rows @ matrix).view(*dy.shape[:-1], matrix.shape[1])
    if needs_bias:
        dbias = rows.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
    return dx, None, None, None, dbias, dy if needs_residual else None


_UNPACK = register.Op("dequantize", dequantize, _fake_matrix)
_OP = register.Op("quantized_linear", forward, _fake)
_eager, _registered = _OP.differentiate(_save, _differentiate, _UNPACK), _OP.registered


def int8_linear(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, *,
    activation: str = "",
) -> Tensor:  # fmt: skip
    """``activation(x @ W^T + bias) + residual`` with a weight of int8 and a scale for each output.

    Args:
        x: ``(..., in)``. bfloat16 and float16 are for the kernels; others are plain PyTorch on an unpacked weight.
        weight: ``(out, in)``, int8.
        scale: ``(out,)``, float32, bfloat16 or float16.
        bias: ``(out,)``, added before the result is rounded.
        residual: ``(..., out)`` in x's dtype, likewise.
        activation: ``"silu"``, ``"gelu"`` or ``"gelu_tanh"``, before the residual is added; left out, there is none.

    Returns:
        ``(..., out)`` in x's dtype, or in autocast's. x, bias and residual get gradients.

    >>> import torch
    >>> weight, scale = torch.tensor([[2, -3], [0, 127]], dtype=torch.int8), torch.tensor([0.5, 1.0])
    >>> int8_linear(torch.ones(1, 2), weight, scale)
    tensor([[ -0.5000, 127.0000]])
    """
    return _linear("int8_linear", torch.int8, x, weight, scale, None, bias, residual, activation)


def fp8_linear(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, *,
    activation: str = "",
) -> Tensor:  # fmt: skip
    """``activation(x @ W^T + bias) + residual`` with a weight of 8-bit floats, e4m3, and a scale for each output.

    The arguments are those of `int8_linear`, but for the weight, which is ``torch.float8_e4m3fn`` and has no NaN: the
    kernels do not look for one.

    >>> import torch
    >>> weight, scale = torch.tensor([[1.5, -2.0]]).to(torch.float8_e4m3fn), torch.tensor([2.0])
    >>> fp8_linear(torch.ones(1, 2), weight, scale)
    tensor([[-1.]])
    """
    return _linear("fp8_linear", torch.float8_e4m3fn, x, weight, scale, None, bias, residual, activation)


def int4_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    activation: str = "",
) -> Tensor:
    """``activation(x @ W^T + bias) + residual`` with a weight of 4 bits, scales for each output and group of inputs.

    Args:
        x: ``(..., in)``, as of `int8_linear`; ``in`` is a multiple of the group, which is 32, 64 or 128, and of 64.
        weight: ``(out, in / 2)``, uint8. A span is a group, or two groups of 32. In a span's bytes the low nibbles are
            the codes of its first half, the high ones those of the second.
        scale: ``(in / group, out)``, float32, bfloat16 or float16.
        zero: ``(in / group, out)``, uint8, the codes that stand for 0; 8 everywhere where it is left out.
        bias, residual, activation: as of `int8_linear`.

    >>> import torch
    >>> weight, scale = torch.full((1, 32), 0x9A, dtype=torch.uint8), torch.tensor([[0.5]])
    >>> int4_linear(torch.ones(1, 64), weight, scale)  # 32 times 2 and 32 times 1, halved
    tensor([[48.]])
    """
    return _linear("int4_linear", torch.uint8, x, weight, scale, zero, bias, residual, activation)


def _linear(
    name: str, dtype: torch.dtype, x: Any, weight: Any, scale: Any, zero: Any, bias: Any, residual: Any, activation: Any
) -> Tensor:
    _check(name, dtype, x, weight, scale, zero, bias, residual)
    check_activation(name, activation)
    x = x.to(matmul_dtype(x))
    if residual is not None:
        residual = residual.to(x.dtype)
    if activation and torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, bias)):
        y = activate(_linear(name, dtype, x, weight, scale, zero, bias, None, ""), activation)
        return y if residual is None else y + residual
    if x.dtype not in HALVES:
        paths.note(name, paths.REFERENCE, f"kernels take bfloat16 and float16, and x is {x.dtype}")
        return reference(x, weight, scale, zero, bias, residual, activation)
    remark = _MANY_ROWS if x.numel() > FEW_ROWS * x.shape[-1] else ""
    path = paths.choose(name, x, weight, scale, zero, bias, residual, remark=remark)
    if path == paths.REFERENCE:
        return reference(x, weight, scale, zero, bias, residual, activation)
    inputs = Inputs(x, weight, scale, zero, bias, residual, activation)
    return _eager(*inputs) if path == paths.KERNEL else _OP.call_registered(inputs)


def _check(name: str, dtype: torch.dtype, x: Any, weight: Any, scale: Any, zero: Any, bias: Any, residual: Any) -> None:
    dispatch.check_tensor(name, "x", x)
    if not x.ndim:
        raise ValueError(f"{name}: x is a scalar; its last dimension must hold the features.")
    _check_packed(name, "weight", weight, (dtype,), x)
    if weight.ndim != 2 or not weight.shape[0] or not weight.shape[1]:
        raise ValueError(f"{name}: weight has shape {tuple(weight.shape)}, but a matrix is needed, outputs first.")
    features = weight.shape[1] * (2 if dtype == torch.uint8 else 1)
    if x.shape[-1] != features:
        raise ValueError(f"{name}: x has {x.shape[-1]} features and the weight {features}; make them equal.")
    if features >= 2**31:
        raise ValueError(f"{name}: the weight has {features} features; fewer than 2^31 are needed.")
    _check_packed(name, "scale", scale, (torch.float32, torch.bfloat16, torch.float16), x)
    if scale.requires_grad:
        raise ValueError(f"{name}: scale requires a gradient and gets none; detach it.")
    outputs = weight.shape[0]
    if dtype == torch.uint8:
        _check_groups(name, scale, zero, features, outputs, x)
    elif tuple(scale.shape) != (outputs,):
        raise ValueError(f"{name}: scale has shape {tuple(scale.shape)}, but {(outputs,)} is needed.")
    dispatch.check_tensor(name, "bias", bias, torch.Size((outputs,)), x)
    dispatch.check_tensor(name, "residual", residual, torch.Size((*x.shape[:-1], outputs)), x)
    if residual is not None and residual.dtype not in (x.dtype, matmul_dtype(x)):
        raise TypeError(f"{name}: residual is {residual.dtype} and x is {x.dtype}; convert one of them.")


def _check_groups(name: str, scale: Tensor, zero: Any, features: int, outputs: int, x: Tensor) -> None:
    groups = scale.shape[0] if scale.ndim == 2 and scale.shape[1] == outputs else 0
    if not groups or features % groups or features // groups not in GROUPS or features % span_of(features // groups):
        needed = " or ".join(f"{(features // group, outputs)}" for group in GROUPS if features % span_of(group) == 0)
        wanted = f"{needed} is needed" if needed else f"{features} features are no multiple of 64, as int4 needs"
        raise ValueError(f"{name}: scale has shape {tuple(scale.shape)}, but {wanted}.")
    if zero is not None:
        _check_packed(name, "zero", zero, (torch.uint8,), x)
        if zero.shape != scale.shape:
            raise ValueError(f"{name}: zero has shape {tuple(zero.shape)}, but {tuple(scale.shape)} is needed.")


def _check_packed(op: str, name: str, tensor: Any, dtypes: tuple[torch.dtype, ...], x: Tensor) -> None:
    """Refuse what is no tensor of these dtypes beside x."""
    words = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    needed = " or ".join([", ".join(words[:-1]), words[-1]] if words[1:] else words)
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, not {type(tensor).__name__}.")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{op}: {name} has dtype {tensor.dtype}, but {needed} is needed.")
    if tensor.device != x.device:
        raise ValueError(f"{op}: {name} is on {tensor.device}, but x is on {x.device}; move one of them.")
