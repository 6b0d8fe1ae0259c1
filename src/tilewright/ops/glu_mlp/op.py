"""Three matmuls with a gated activation between them, which happens on the way out of the matmuls.

    g, u = x @ gate^T, x @ up^T            one kernel, which stores both
    a    = activation(g) * u               and this beside them
    y    = a @ down^T + down_bias
    d    = dy @ down                       never in memory: the kernel of this matmul reads g and u, and stores
    dg   = d * u * activation'(g)
    du   = d * activation(g)

The activation is SiLU, or the GELU by tanh or by erf, of g and u as they are kept, in 16 bits. A pass over memory less
each way, and no gradient of `a`, which would be as large as g.

`hopper.cu` has the kernels, for bfloat16 on a Hopper. Everything else is `linear_group`, `swiglu` or `geglu`, `linear`.

Saved for backward: x, g, u, a, and the weights in the dtype of the matmuls. Without `keep`, backward computes a again.

Floor: that of the matmuls, 3 forward and 6 backward, each of 2 x tokens x width x inner FLOPs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from tilewright.measure import work
from tilewright.ops.activation.op import geglu, swiglu
from tilewright.ops.linear import launch as linear_launch
from tilewright.ops.linear.group import linear_group
from tilewright.ops.linear.launch import as_matrix
from tilewright.ops.linear.op import cast_weight, linear, matmul_dtype, prepare
from tilewright.plan.cost import glu_mlp as cost
from tilewright.runtime import cublaslt, dispatch, hopper, nvrtc, paths, register

__all__ = ["cost", "fused_glu_mlp", "glu_mlp", "reference"]

_NAME = "glu_mlp"
ACTIVATIONS = ("silu", "gelu_tanh", "gelu")
IS_ON = False  # until a Hopper has timed it

hopper.add_gemms(Path(__file__).with_name("hopper.cu"), rare=(_NAME,))

Tensor = torch.Tensor


def reference(
    x: Tensor, gate: Tensor, up: Tensor, down: Tensor, down_bias: Tensor | None = None, *, activation: str = "silu"
) -> Tensor:
    """The definition in plain PyTorch."""
    return F.linear(_activate(F.linear(x, gate), activation) * F.linear(x, up), down, down_bias)


def _activate(x: Tensor, activation: str) -> Tensor:
    return F.silu(x) if activation == "silu" else F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def _gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return swiglu(gate, up)
    return geglu(gate, up, approximate="tanh" if activation == "gelu_tanh" else "none")


def _value(x: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor, Tensor]:
    """x @ gate^T, x @ up^T and what `down` takes."""
    (rows, inner), columns = x.shape, len(gate)
    g, u, a = (x.new_empty((rows, columns)) for _ in range(3))
    kernel = f"tilewright_{_NAME}_matmul_{activation}_value"
    with work.launching(kernel, (x, gate, up, g, u, a), 4.0 * x.numel() * columns):
        maps = (
            nvrtc.tensor_map(x, 64, 128),
            *(nvrtc.tensor_map(weight, 64, hopper.COLUMNS // 2) for weight in (gate, up)),
            *(nvrtc.tensor_map(out, 32, 128) for out in (g, u, a)),
        )
        hopper.start(kernel, maps, None, (rows, 2 * columns, inner), x.device)
    return g, u, a


def _gradient(dy: Tensor, down: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up."""
    (rows, inner), columns = dy.shape, down.shape[1]
    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    kernel = f"tilewright_{_NAME}_matmul_{activation}_gradient"
    with work.launching(kernel, (dy, down, gate, up, dgate, dup), 2.0 * dy.numel() * columns):
        maps = (
            nvrtc.tensor_map(dy, 64, 128), nvrtc.tensor_map(down, 64, 32),
            *(nvrtc.tensor_map(tensor, 32, 128) for tensor in (gate, up, dgate, dup)),
        )  # fmt: skip
        hopper.start(kernel, maps, None, (rows, columns, inner), dy.device)
    return dgate, dup


class Inputs(NamedTuple):
    """Each weight comes twice: the parameter, which gets the gradient, and what it is in the dtype of the matmuls."""

    x: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    down_bias: Tensor | None
    gate_cast: Tensor
    up_cast: Tensor
    down_cast: Tensor
    activation: str
    keep: bool


class Gradient(NamedTuple):
    """What backward takes; `activated` is None where it is computed again.

    `full`: which gradients of parameters are in float32; `needs`: which of x and the parameters are wanted.
    """

    dy: Tensor
    x: Tensor
    g: Tensor
    u: Tensor
    activated: Tensor | None
    gate_cast: Tensor
    up_cast: Tensor
    down_cast: Tensor
    full: Sequence[bool]
    needs: Sequence[bool]
    activation: str


def _launch(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The result, and what backward needs."""
    x = inputs.x
    g, u, activated = _value(as_matrix(x), as_matrix(inputs.gate_cast), as_matrix(inputs.up_cast), inputs.activation)
    layer = linear_launch.Inputs(
        activated.view(*x.shape[:-1], -1), inputs.down, inputs.down_bias, inputs.down_cast
    )  # fmt: skip
    return linear_launch.forward(layer), g, u, activated


def _launch_backward(inputs: Gradient) -> list[Tensor | None]:
    needs_x, needs_gate, needs_up, needs_down, needs_bias = inputs.needs
    full_gate, full_up, *full_down = inputs.full
    rows, g, u = as_matrix(inputs.dy), *dispatch.packed((inputs.g, inputs.u))
    activated = inputs.activated
    if needs_down and activated is None:
        activated = _gated(g, u, inputs.activation)
    _, ddown, dbias = linear_launch.backward(
        linear_launch.Gradient(
            rows, g if activated is None else activated, inputs.down_cast, full_down, [False, needs_down, needs_bias]
        )
    )
    del activated
    dg, du = _gradient(rows, as_matrix(inputs.down_cast), g, u, inputs.activation)
    dx, dgate, _ = linear_launch.backward(
        linear_launch.Gradient(dg, inputs.x, inputs.gate_cast, [full_gate, False], [needs_x, needs_gate, False])
    )
    _, dup, _ = linear_launch.backward(
        linear_launch.Gradient(du, inputs.x, inputs.up_cast, [full_up, False], [False, needs_up, False])
    )
    if dx is not None:
        linear_launch.add_matmul(dx, du, inputs.up_cast)
    return [dx, dgate, dup, ddown, dbias]


def _fake(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, between = inputs.x, (inputs.x.numel() // inputs.x.shape[-1], inputs.gate.shape[0])
    g, u, activated = (x.new_empty(between) for _ in range(3))
    return x.new_empty((*x.shape[:-1], inputs.down.shape[0])), g, u, activated


def _fake_backward(inputs: Gradient) -> list[Tensor | None]:
    down = inputs.down_cast
    shapes = inputs.x.shape, inputs.gate_cast.shape, inputs.up_cast.shape, down.shape, down.shape[:1]
    return [
        torch.empty(shape, dtype=torch.float32 if full else inputs.x.dtype, device=down.device) if need else None
        for shape, full, need in zip(shapes, (False, *inputs.full), inputs.needs, strict=True)
    ]


def _save(ctx: Any, inputs: Inputs, output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    _, g, u, activated = output
    casts = inputs.gate_cast, inputs.up_cast, inputs.down_cast
    ctx.save_for_backward(inputs.x, g, u, activated if inputs.keep else None, *casts)
    parameters = inputs.gate, inputs.up, inputs.down, inputs.down_bias
    ctx.full = [each is not None and each.dtype == torch.float32 for each in parameters]
    ctx.activation = inputs.activation
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, run: Any, dy: Any, *_: Any) -> Sequence[Tensor | None]:
    register.refuse_second_derivative(_NAME)
    if dy is None:
        return ()
    needs = list(ctx.needs_input_grad[:5])
    x, g, u, activated, gate_cast, up_cast, down_cast = ctx.saved_tensors
    casts = gate_cast, up_cast, down_cast
    gradients: list[Tensor | None] = run(Gradient(dy, x, g, u, activated, *casts, ctx.full, needs, ctx.activation))
    return gradients


_BACKWARD = register.Op(f"{_NAME}_backward", _launch_backward, _fake_backward)
_OP = register.Op(_NAME, _launch, _fake)
_eager, _registered = _OP.differentiate(_save, _differentiate, _BACKWARD, outputs=1), _OP.registered


def glu_mlp(
    x: Tensor, gate: Tensor, up: Tensor, down: Tensor, down_bias: Tensor | None = None, *, activation: str = "silu",
    keep: bool = True,
) -> Tensor:  # fmt: skip
    """``linear(activation(linear(x, gate)) * linear(x, up), down, down_bias)``.

    Args:
        x: ``(..., width)``.
        gate: ``(inner, width)``, of x's dtype, or of float32 under ``torch.autocast``; gradients of parameters are then
            computed in float32.
        up: ``(inner, width)``, likewise.
        down: ``(width out, inner)``, likewise.
        down_bias: ``(width out,)``, likewise.
        activation: ``"silu"``, ``"gelu_tanh"`` or ``"gelu"`` (by erf).
        keep: whether what goes into the last matmul is kept for backward, where the kernels run; if not, backward
            computes it again.

    There are kernels for bfloat16 on a Hopper GPU (H100, H200), with all widths multiples of 8, matmuls of at least 20
    GFLOP and three trained weights, which nobody has timed yet: set ``tilewright.ops.glu_mlp.op.IS_ON``. Everything
    else is `linear_group`, `swiglu` or `geglu`, `linear`.

    >>> import torch
    >>> x, gate, up, down = torch.randn(2, 3, 8), torch.randn(32, 8), torch.randn(32, 8), torch.randn(8, 32)
    >>> torch.allclose(glu_mlp(x, gate, up, down), reference(x, gate, up, down), atol=1e-4)
    True
    """
    y = fused_glu_mlp(x, gate, up, down, down_bias, activation=activation, keep=keep)
    if y is not None:
        return y
    g, u = linear_group(x, [(gate, None), (up, None)])
    return linear(_gated(g, u, activation), down, down_bias)


def fused_glu_mlp(
    x: Tensor, gate: Tensor, up: Tensor, down: Tensor, down_bias: Tensor | None = None, *, activation: str = "silu",
    keep: bool = True,
) -> Tensor | None:  # fmt: skip
    """`glu_mlp` where it is fused, else None."""
    _check(x, gate, up, down, down_bias, activation)
    why = _why_not(x, gate, up, down, down_bias, activation)
    layer = why or prepare(x, gate, None)  # which knows whether the first matmul fits
    if isinstance(layer, str):
        paths.note(_NAME, paths.PARTS, layer)
        return None
    paths.note(_NAME, paths.KERNEL)
    casts = layer.cast, cast_weight(up, torch.bfloat16), cast_weight(down, torch.bfloat16)
    inputs = Inputs(layer.x, gate, up, down, down_bias, *casts, activation, keep)
    y, *_ = (_registered if dispatch.is_traced(*inputs[:5]) else _eager)(*inputs)
    return y  # type: ignore[no-any-return]


def _why_not(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, down_bias: Tensor | None, activation: str) -> str:
    """Say why the fused kernels do not take it; nothing if all but the gate's matmul fits."""
    if not IS_ON:
        return "the kernels are off until they are timed"
    if not (torch.is_grad_enabled() and all(each.requires_grad for each in (gate, up, down))):
        return "the kernels pay where there is a backward of all weights"
    if torch.compiler.is_dynamo_compiling():
        return "Dynamo cannot capture whether there are kernels"
    if down.shape[0] % 8 or not x.numel():
        return "a size is no multiple of 8, or 0"
    others = [each for each in (up, down, down_bias) if each is not None]
    if any(matmul_dtype(each) != torch.bfloat16 for each in (x, *others)):
        return "the kernels are for bfloat16"
    if not all(map(dispatch.is_plain, others)):
        return "a parameter is a tensor subclass"
    if 2 * (x.numel() // x.shape[-1]) * down.numel() < cublaslt.WORTH_CHOOSING:
        return "the matmuls are small"
    names = (f"tilewright_{_NAME}_matmul_{activation}_{what}" for what in ("value", "gradient"))
    return "" if hopper.ready(x.device, *names) else "the kernels are for a Hopper, and need NVRTC"


def _check(x: Any, gate: Any, up: Any, down: Any, down_bias: Any, activation: str) -> None:
    """Refuse, with one sentence, what does not fit together."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"{_NAME}: activation is {activation!r}; choose {', '.join(ACTIVATIONS)}.")
    dispatch.check_tensor(_NAME, "x", x)
    if x is None or not x.ndim:
        raise ValueError(f"{_NAME}: x must be a tensor whose last dimension holds the features.")
    for name, weight in (("gate", gate), ("up", up), ("down", down)):
        if not isinstance(weight, Tensor) or weight.ndim != 2:
            raise ValueError(f"{_NAME}: {name} must be a matrix, features out by features in.")
    inner, out = len(gate), len(down)
    for name, weight, shape in (
        ("gate", gate, (inner, x.shape[-1])), ("up", up, (inner, x.shape[-1])), ("down", down, (out, inner)),
        ("down_bias", down_bias, (out,)),
    ):  # fmt: skip
        dispatch.check_tensor(_NAME, name, weight, torch.Size(shape), x)
