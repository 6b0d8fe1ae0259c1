"""SwiGLU, GEGLU and GELU with a bias, each in one pass over memory.

    swiglu    = silu(gate + gate_bias) * (up + up_bias)
    geglu     = gelu(gate + gate_bias) * (up + up_bias)                       gelu by tanh or by erf
    bias_gelu = gelu(x + bias)

Saved for backward: the inputs, nothing else; it computes the activation again.

Floor at 2 bytes an element: gated, forward reads gate and up and writes one matrix, 6 bytes; backward reads those two
and the incoming gradient and writes two gradients, 10. Not gated, 4 and 6. The gradient of the bias is summed up in the
same pass. Arithmetic is 13 to 45 instructions an element at 2 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from tilewright.plan.cost import activation as cost
from tilewright.runtime import dispatch, paths, register

__all__ = ["bias_gelu", "cost", "geglu", "reference", "swiglu"]

_GELU = {"tanh": "gelu_tanh", "none": "gelu"}
_FLAT = 1024  # elements of a row, where rows are nobody's concern
HOST_BOUND = 4 * 2**20  # elements of gate up to which PyTorch's own ops run an eager call


def reference(
    gate: torch.Tensor,
    up: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    activation: str = "silu",
    gated: bool = True,
) -> torch.Tensor:
    """The three functions in plain PyTorch: the definition. `activation` is "silu", "gelu_tanh" or "gelu"."""
    dtype = dispatch.compute_dtype(gate)
    up, bias = (None if tensor is None else tensor.to(dtype) for tensor in (up, bias))
    return _compute(gate.to(dtype), up, bias, activation, gated).to(gate.dtype)


def _compute(gate: Any, up: Any, bias: Any, activation: str, gated: bool) -> torch.Tensor:
    """The three functions by PyTorch's ops, in the dtype of the inputs."""
    if gated and up is None:
        gate, up = gate.chunk(2, -1)
    if bias is not None and up is None:
        gate = gate + bias
    elif bias is not None:
        width = gate.shape[-1]
        gate, up = gate + bias[:width], up + bias[width:]
    if activation == "silu":
        out = F.silu(gate)
    else:
        out = F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")
    return out if up is None else out * up


def activation_of(x: torch.Tensor, activation: str) -> torch.Tensor:
    """An activation by PyTorch's own op; `x` itself where the name is empty."""
    return _compute(x, None, None, activation, False) if activation else x


def check_activation(op: str, activation: Any) -> None:
    """Refuse an activation that `activation_of` does not know."""
    if not isinstance(activation, str) or activation not in ("", "silu", *_GELU.values()):
        raise ValueError(f"{op}: activation is {activation!r}; choose 'silu', 'gelu' or 'gelu_tanh', or leave it out.")


def activate(x: torch.Tensor, activation: str) -> torch.Tensor:
    """An activation by name: "silu", "gelu" or "gelu_tanh"; `x` itself where the name is empty.

    >>> activate(torch.zeros(2), "silu"), activate(torch.ones(1), "")
    (tensor([0., 0.]), tensor([1.]))
    """
    return _apply("activation", x, None, None, activation, False) if activation else x


def _width(gate: torch.Tensor, up: torch.Tensor | None, gated: bool) -> int:
    """Return the width of the output."""
    return gate.shape[-1] // 2 if gated and up is None else gate.shape[-1]


def _by_rows(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The tensor and the distance between its rows; a copy where that differs, or where a row's elements lie apart."""
    shape, strides = tensor.shape, tensor.stride()
    if tensor.is_neg() or (strides[-1] != 1 and shape[-1] > 1):
        return tensor.resolve_neg().clone(memory_format=torch.contiguous_format), shape[-1]
    distance, following = shape[-1], None
    for size, stride in zip(shape[-2::-1], strides[-2::-1], strict=True):
        if size != 1:
            if following is None:
                distance = stride
            elif stride != following:
                return tensor.contiguous(), shape[-1]
            following = stride * size
    return tensor, distance


def _prepare(
    step: str, gate: torch.Tensor, up: torch.Tensor | None, bias: torch.Tensor | None, activation: str, gated: bool,
    needs: tuple[bool, ...] = (),
) -> tuple[Any, tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None], tuple[int, int, int, int]]:  # fmt: skip
    """The plan of a kernel, the inputs as it takes them, and its scalars: rows, columns of a last one that is not
    whole, and the distances between rows."""
    from tilewright.ops.activation import kernels

    width, item, rows = _width(gate, up, gated), gate.itemsize, gate.numel() // gate.shape[-1]
    gate, gate_stride = _by_rows(gate)
    up, up_stride = (None, gate_stride) if up is None else _by_rows(up)
    (bias,) = dispatch.packed((bias,))
    alone = bias is None and (up is not None or not gated)  # a packed gate has up in its rows
    flat, left = alone and gate_stride == up_stride == width, 0
    if flat:
        (rows, left), width, gate_stride, up_stride = divmod(gate.numel(), _FLAT), _FLAT, _FLAT, _FLAT
    aligned = 16 | gate.data_ptr() | gate_stride * item | width * item
    if up is not None:
        aligned |= up.data_ptr() | up_stride * item
    # The lowest bit that is set anywhere: a multiple of so many bytes is where every row starts.
    vector = (aligned & -aligned) // item
    dtypes = dispatch.dtypes((gate, up, bias))
    kernel = kernels.tilewright_activation_backward if step == "backward" else kernels.tilewright_activation_forward
    plan = kernels.plan(kernel, gate.device, width, dtypes, vector, activation, gated, needs, flat)
    return plan, (gate, up, bias), (rows, left, gate_stride, up_stride)


class Inputs(NamedTuple):
    """The arguments of the three functions; a gate without up holds both where the activation is gated."""

    gate: torch.Tensor
    up: torch.Tensor | None
    bias: torch.Tensor | None
    activation: str
    gated: bool


class Gradient(NamedTuple):
    """The arguments of backward; `needs` says which gradients are wanted, of gate, up and bias."""

    dout: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor | None
    bias: torch.Tensor | None
    activation: str
    gated: bool
    needs: Sequence[bool]


def _forward(inputs: Inputs) -> torch.Tensor:
    gate, up, _, _, gated = inputs
    out = gate.new_empty((*gate.shape[:-1], _width(gate, up, gated)))
    if out.numel():
        plan, tensors, scalars = _prepare("forward", *inputs)
        plan.launch((plan.groups(*scalars[:2]) * plan.columns, 1), (*tensors, out), scalars)
    return out


def _fake_forward(inputs: Inputs) -> torch.Tensor:
    gate = inputs.gate
    shape = (*gate.shape[:-1], _width(gate, inputs.up, inputs.gated))
    return torch.empty(shape, dtype=gate.dtype, device=gate.device)


def _backward(gradient: Gradient) -> list[torch.Tensor | None]:
    """The gradients of gate, up and bias, those that are needed; a packed gate and up have one between them."""
    dout, gate, up, bias, activation, gated, needs = gradient
    dgate = gate.new_empty(gate.shape) if needs[0] else None
    dup = gate.new_empty(gate.shape) if needs[1] else None
    if not dout.numel():
        return [dgate, dup, torch.zeros_like(bias) if needs[2] and bias is not None else None]
    plan, inputs, scalars = _prepare("backward", gate, up, bias, activation, gated, tuple(needs))
    groups, dbias, partials = plan.groups(*scalars[:2]), None, None
    if needs[2] and bias is not None:
        partials = gate.new_empty((groups, len(bias)), dtype=dispatch.compute_dtype(gate))
    tensors = (*dispatch.packed((dout,)), *inputs, dgate, dup, partials)
    plan.launch((groups * plan.columns, 1), tensors, scalars)
    if partials is not None and bias is not None:
        dbias = partials.sum(0).to(bias.dtype)
    return [dgate, dup, dbias]


def _fake_backward(gradient: Gradient) -> list[torch.Tensor | None]:
    likes = gradient.gate, gradient.up, gradient.bias
    return [
        torch.empty(like.shape, dtype=like.dtype, device=like.device) if need and like is not None else None
        for like, need in zip(likes, gradient.needs, strict=True)
    ]


def _save(ctx: Any, inputs: Inputs, output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs.gate, inputs.up, inputs.bias)
    ctx.options = inputs.activation, inputs.gated
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, backward: Any, dout: Any) -> tuple[torch.Tensor | None, ...]:
    register.refuse_second_derivative("activation")
    if dout is None:
        return ()
    gate, up, bias = ctx.saved_tensors
    activation, gated = ctx.options
    return tuple(backward(Gradient(dout, gate, up, bias, activation, gated, ctx.needs_input_grad[:3])))


def _foresee_backward(ctx: Any, inputs: Inputs, output: torch.Tensor) -> None:
    dout, gate, up = (dispatch.one_row(tensor) for tensor in (output, inputs.gate, inputs.up))
    needs = ctx.needs_input_grad[:3]
    _backward(Gradient(dout, gate, up, inputs.bias, inputs.activation, inputs.gated, needs))


_OP = register.Op("activation", _forward, _fake_forward)
_eager = _OP.differentiate(
    _save, _differentiate, register.Op("activation_backward", _backward, _fake_backward), _foresee_backward
)
_registered = _OP.registered


def swiglu(gate: torch.Tensor, up: torch.Tensor | None = None, *, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``silu(gate) * up``, fused.

    Args:
        gate: ``(..., W)``, any floating dtype; without `up`, ``(..., 2 W)``, the gate in front of up. The arithmetic is
            in float32 (float64 for float64), rounded once.
        up: same shape and dtype as gate.
        bias: ``(2 W,)``, added to gate (its first half) and to up (its second); its dtype may differ.

    Returns:
        ``(..., W)`` in the dtype of gate.

    Rows that lie apart, as those of the two halves that ``chunk(2, -1)`` returns do, are read without a copy. A gate of
    up to 4,194,304 elements in an eager call on a GPU is left to PyTorch's own ops, which take the host less time, and
    round after each.

    >>> import torch
    >>> gate, up = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    >>> torch.allclose(swiglu(gate, up), torch.nn.functional.silu(gate) * up, atol=1e-6)
    True
    >>> torch.equal(swiglu(torch.cat([gate, up], -1)), swiglu(gate, up))
    True
    """
    return _apply("swiglu", gate, up, bias, "silu", True)


def geglu(
    gate: torch.Tensor,
    up: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    approximate: str = "tanh",
) -> torch.Tensor:
    """``gelu(gate) * up``, fused; its arguments are those of `swiglu`.

    `approximate` is ``"tanh"`` or ``"none"``, as in ``torch.nn.functional.gelu``, whose default is ``"none"``.

    >>> import torch
    >>> gate, up = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    >>> torch.allclose(geglu(gate, up, approximate="none"), torch.nn.functional.gelu(gate) * up, atol=1e-6)
    True
    """
    return _apply("geglu", gate, up, bias, _gelu("geglu", approximate), True)


def bias_gelu(x: torch.Tensor, bias: torch.Tensor | None = None, *, approximate: str = "tanh") -> torch.Tensor:
    """``gelu(x + bias)``, fused.

    Args:
        x: ``(..., W)``, any floating dtype. The arithmetic is in float32 (float64 for float64), rounded once.
        bias: ``(W,)``; its dtype may differ.
        approximate: ``"tanh"`` or ``"none"``, as in ``torch.nn.functional.gelu``, whose default is ``"none"``.

    >>> import torch
    >>> x, bias = torch.randn(2, 3, 8), torch.randn(8)
    >>> torch.allclose(bias_gelu(x, bias, approximate="none"), torch.nn.functional.gelu(x + bias), atol=1e-6)
    True
    """
    return _apply("bias_gelu", x, None, bias, _gelu("bias_gelu", approximate), False)


def _gelu(op: str, approximate: Any) -> str:
    if not isinstance(approximate, str) or approximate not in _GELU:
        raise ValueError(f"{op}: approximate is {approximate!r}; choose 'tanh' or 'none'.")
    return _GELU[approximate]


def _apply(op: str, gate: Any, up: Any, bias: Any, activation: str, gated: bool) -> torch.Tensor:
    _check(op, gate, up, bias, gated)
    most = HOST_BOUND if bias is None or bias.dtype == gate.dtype else None
    path = paths.choose(op, gate, up, bias, host_bound=most)
    if path == paths.REFERENCE:
        return reference(gate, up, bias, activation=activation, gated=gated)
    run = {paths.PYTORCH: _compute, paths.REGISTERED: _registered, paths.KERNEL: _eager}[path]
    return run(gate, up, bias, activation, gated)


def _check(op: str, gate: Any, up: Any, bias: Any, gated: bool) -> None:
    name = "gate" if gated else "x"
    dispatch.check_tensor(op, name, gate)
    shape = gate.shape
    if not shape or not shape[-1]:
        raise ValueError(f"{op}: {name} has shape {tuple(shape)}; its last dimension must be at least 1 wide.")
    if gated and up is None and shape[-1] % 2:
        raise ValueError(f"{op}: gate holds gate and up where up is left out, and {shape[-1]} columns have no halves.")
    dispatch.check_tensor(op, "up", up, shape, gate)
    if up is not None and up.dtype != gate.dtype:
        raise TypeError(f"{op}: up is {up.dtype}, but gate is {gate.dtype}; convert one of them.")
    if bias is not None:
        columns = 2 * shape[-1] if up is not None else shape[-1]
        dispatch.check_tensor(op, "bias", bias, torch.Size((columns,)), gate)
