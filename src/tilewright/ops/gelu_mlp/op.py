"""Two matmuls with a GELU between them, the GELU on the way out of the matmuls: no pass of its own over memory.

    z    = x @ up^T + up_bias                    never in memory
    a    = gelu(z), s = gelu'(z)                 both stored by the kernel that computes z
    y    = a @ down^T + down_bias
    dz   = (dy @ down) * s                       by the kernel of that matmul, which sums up the bias's gradient

The derivative is computed in forward, from z in float32, and stored in its place: beside the exponential that the GELU
takes anyway it is a few instructions, while in backward it would take longer than the matmul that it has to hide
behind. It is rounded to 16 bits (times 7/8, for the better), but what it multiplies is not; plain PyTorch rounds that,
and z: its error is the larger one.

Lean, z is kept in 16 bits and neither a nor s: both are computed once more on the way out of backward's matmul, which
stores a again. Half as much lies between forward and backward, and nothing makes a pass of its own; that the kernel
takes longer than its matmul is the price, the lower the wider the model.

`hopper.cu` has the kernels, for bfloat16 on a Hopper. Everything else is `linear`, `bias_gelu`, `linear`.

Saved for backward: x, a, s (lean: x, z), and both weights in the dtype of the matmuls.

Floor: that of the matmuls, 2 forward and 4 backward, each of 2 x tokens x width x inner FLOPs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from tilewright.measure import work
from tilewright.ops.activation.op import bias_gelu
from tilewright.ops.linear import launch as linear_launch
from tilewright.ops.linear.launch import as_matrix
from tilewright.ops.linear.op import cast_weight, is_worth_padding, linear, matmul_dtype, prepare
from tilewright.ops.linear.padding import pad, resize
from tilewright.plan.cost import gelu_mlp as cost
from tilewright.runtime import cublaslt, dispatch, hopper, nvrtc, paths, register

__all__ = ["cost", "fused_gelu_mlp", "gelu_mlp", "reference"]

_NAME = "gelu_mlp"
HOST_BOUND = 4 * 2**20  # elements between the matmuls up to which PyTorch's own ops run an eager call
_SMALL = 4e9  # FLOPs of a matmul below which no kernel of ours pays
_LEAST_BUSY = 0.83  # of the processors: with less, cuBLAS's smaller tiles gain more than the GELU's own pass costs

hopper.add_gemms(Path(__file__).with_name("hopper.cu"), rare=("lean", "erf"))

Tensor = torch.Tensor


def reference(
    x: Tensor, up: Tensor, up_bias: Tensor | None, down: Tensor, down_bias: Tensor | None = None,
    *, approximate: str = "tanh",
) -> Tensor:  # fmt: skip
    """The definition in plain PyTorch."""
    return F.linear(F.gelu(F.linear(x, up, up_bias), approximate=approximate), down, down_bias)


def _kernel(what: str, lean: bool, erf: bool) -> str:
    """The name of a kernel. Not lean, the gradient takes the slope as it is, whatever the GELU."""
    erf = erf and (lean or what == "value")
    return f"tilewright_{_NAME}_matmul_{'lean_' * lean}{'erf_' * erf}{what}"


def _value(x: Tensor, up: Tensor, bias: Tensor | None, lean: bool, erf: bool) -> tuple[Tensor, Tensor]:
    """gelu(x @ up^T + bias) and its derivative, or lean what it is the GELU of; `bias` is in float32."""
    (rows, inner), columns = x.shape, up.shape[0]
    out, kept = (x.new_empty((rows, columns)) for _ in range(2))
    with work.launching(f"tilewright_{_NAME}_matmul_value", (x, up, bias, out, kept), 2.0 * x.numel() * columns):
        maps = (
            nvrtc.tensor_map(x, 64, 128), nvrtc.tensor_map(up, 64, hopper.COLUMNS // 2),
            nvrtc.tensor_map(kept, 32, 128), nvrtc.tensor_map(out, 32, 128),
        )  # fmt: skip
        hopper.start(_kernel("value", lean, erf), maps, bias, (rows, columns, inner), x.device)
    return out, kept


def _gradient(dy: Tensor, down: Tensor, kept: Tensor, lean: bool, erf: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """(dy @ down) * slope, its sum over the rows, the latter in float32, and lean the GELU again."""
    from tilewright.ops.linear.kernels import add_up

    (rows, inner), columns = dy.shape, down.shape[1]
    out, value = torch.empty_like(kept), torch.empty_like(kept) if lean else None
    sums = dy.new_empty((-(-rows // hopper.PAIR_ROWS) * 2, columns), dtype=torch.float32)
    tensors = (dy, down, kept, value, out, sums)
    with work.launching(f"tilewright_{_NAME}_matmul_gradient", tensors, 2.0 * dy.numel() * columns):
        wide = 32 if lean else 64  # columns of what is kept that are copied at a time
        maps = (
            nvrtc.tensor_map(dy, 64, 128), nvrtc.tensor_map(down, 64, 32),
            *[nvrtc.tensor_map(tensor, wide, 128) for tensor in (kept, value, out) if tensor is not None],
        )  # fmt: skip
        hopper.start(_kernel("gradient", lean, erf), maps, sums, (rows, columns, inner), dy.device)
    return out, add_up(sums), value


class Inputs(NamedTuple):
    """Each weight comes twice: the parameter, which gets the gradient, and what it is in the dtype of the matmuls."""

    x: Tensor
    up: Tensor
    up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    up_cast: Tensor
    down_cast: Tensor
    lean: bool
    erf: bool


class Gradient(NamedTuple):
    """What backward takes; lean there is no `activated`.

    `full`: which gradients of parameters are in float32; `needs`: which of x and the parameters are wanted.
    """

    dy: Tensor
    x: Tensor
    activated: Tensor | None
    kept: Tensor
    up_cast: Tensor
    down_cast: Tensor
    full: Sequence[bool]
    needs: Sequence[bool]
    erf: bool


def _launch(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """The result, what goes into the second matmul, and what is kept beside it."""
    x, up_bias = inputs.x, inputs.up_bias
    bias = None if up_bias is None else dispatch.packed((up_bias.detach().float(),))[0]
    activated, kept = _value(as_matrix(x), as_matrix(inputs.up_cast), bias, inputs.lean, inputs.erf)
    layer = linear_launch.Inputs(
        activated.view(*x.shape[:-1], -1), inputs.down, inputs.down_bias, inputs.down_cast
    )  # fmt: skip
    return linear_launch.forward(layer), activated, kept


def _launch_backward(inputs: Gradient) -> list[Tensor | None]:
    needs_x, needs_up, needs_up_bias, needs_down, needs_down_bias = inputs.needs
    full_up, full_up_bias, *full_down = inputs.full
    rows, up_cast, down_cast = as_matrix(inputs.dy), inputs.up_cast, inputs.down_cast
    kept = dispatch.packed((inputs.kept,))[0]
    dz, sums, again = _gradient(rows, as_matrix(down_cast), kept, inputs.activated is None, inputs.erf)
    activated = again if inputs.activated is None else inputs.activated
    assert activated is not None
    _, ddown, ddown_bias = linear_launch.backward(
        linear_launch.Gradient(rows, activated, down_cast, full_down, [False, needs_down, needs_down_bias])
    )
    del activated, again
    dup_bias = sums.to(torch.float32 if full_up_bias else rows.dtype) if needs_up_bias else None
    dx, dup, _ = linear_launch.backward(
        linear_launch.Gradient(dz, inputs.x, up_cast, [full_up, False], [needs_x, needs_up, False])
    )
    return [dx, dup, dup_bias, ddown, ddown_bias]


def _fake(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    x, between = inputs.x, (inputs.x.numel() // inputs.x.shape[-1], inputs.up.shape[0])
    return x.new_empty((*x.shape[:-1], inputs.down.shape[0])), x.new_empty(between), x.new_empty(between)


def _fake_backward(inputs: Gradient) -> list[Tensor | None]:
    up, down = inputs.up_cast, inputs.down_cast
    shapes = inputs.x.shape, up.shape, up.shape[:1], down.shape, down.shape[:1]
    return [
        torch.empty(shape, dtype=torch.float32 if full else inputs.x.dtype, device=up.device) if need else None
        for shape, full, need in zip(shapes, (False, *inputs.full), inputs.needs, strict=True)
    ]


def _save(ctx: Any, inputs: Inputs, output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, activated, kept = output
    if not dispatch.is_traced(activated):
        from tilewright.ops.linear.kernels import foresee_add_up

        foresee_add_up(activated.device, activated.shape[1])
    ctx.save_for_backward(inputs.x, None if inputs.lean else activated, kept, inputs.up_cast, inputs.down_cast)
    parameters = inputs.up, inputs.up_bias, inputs.down, inputs.down_bias
    ctx.full, ctx.erf = [t is not None and t.dtype == torch.float32 for t in parameters], inputs.erf
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, run: Any, dy: Any, *_: Any) -> Sequence[Tensor | None]:
    register.refuse_second_derivative(_NAME)
    if dy is None:
        return ()
    x, activated, kept, up_cast, down_cast = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:5])
    gradients: list[Tensor | None] = run(Gradient(dy, x, activated, kept, up_cast, down_cast, ctx.full, needs, ctx.erf))
    return gradients


_BACKWARD = register.Op(f"{_NAME}_backward", _launch_backward, _fake_backward)
_OP = register.Op(_NAME, _launch, _fake)
_eager, _registered = _OP.differentiate(_save, _differentiate, _BACKWARD, outputs=1), _OP.registered


def gelu_mlp(
    x: Tensor, up: Tensor, up_bias: Tensor | None, down: Tensor, down_bias: Tensor | None = None,
    *, approximate: str = "tanh",
) -> Tensor:  # fmt: skip
    """``linear(gelu(linear(x, up, up_bias)), down, down_bias)``, whose GELU makes no pass of its own over memory.

    Args:
        x: ``(..., width)``.
        up: ``(inner, width)``, of x's dtype, or of float32 under ``torch.autocast``; gradients of parameters are then
            computed in float32.
        up_bias: ``(inner,)``, likewise.
        down: ``(width out, inner)``, likewise.
        down_bias: ``(width out,)``, likewise.
        approximate: ``"tanh"`` or ``"none"``, as in ``torch.nn.functional.gelu``.

    Fused is bfloat16 on a Hopper GPU (H100, H200), where all widths are multiples of 8, a matmul has at least 20 GFLOP
    and tiles of 256 x 192 that keep 83 % of the processors busy, both weights are trained and torch has its NVRTC;
    everything else, and where Dynamo captures the call all, is `linear`, `bias_gelu`, `linear`.

    >>> import torch
    >>> x, up, down = torch.randn(2, 3, 8), torch.randn(32, 8), torch.randn(8, 32)
    >>> torch.allclose(gelu_mlp(x, up, None, down), reference(x, up, None, down), atol=1e-4)
    True
    """
    _check(x, up, up_bias, down, down_bias, approximate)
    pays_to_pad = is_worth_padding(x, up) or is_worth_padding(x, down.t())
    if 2 * x.numel() * len(up) < _SMALL and not pays_to_pad:
        most = HOST_BOUND * x.shape[-1] // max(1, len(up))
        if dispatch.is_host_bound(x, most, up, up_bias, down, down_bias):
            paths.note(_NAME, paths.PYTORCH, paths.why_host_bound(most))
            return reference(x, up, up_bias, down, down_bias, approximate=approximate)
    y = fused_gelu_mlp(x, up, up_bias, down, down_bias, approximate=approximate)
    if y is not None:
        return y
    if pays_to_pad:
        biases = [None if bias is None else pad(bias[None], 1)[0] for bias in (up_bias, down_bias)]
        padded = pad(x, -1), pad(up, 0, 1), biases[0], pad(down, 0, 1), biases[1]
        return resize(gelu_mlp(*padded, approximate=approximate), [*x.shape[:-1], len(down)])
    return linear(bias_gelu(linear(x, up), up_bias, approximate=approximate), down, down_bias)


def fused_gelu_mlp(
    x: Tensor, up: Tensor, up_bias: Tensor | None, down: Tensor, down_bias: Tensor | None = None,
    *, approximate: str = "tanh", lean: bool = False,
) -> Tensor | None:  # fmt: skip
    """`gelu_mlp` where it is fused, else None. Lean, half as much is kept for backward."""
    _check(x, up, up_bias, down, down_bias, approximate)
    why = _why_not(x, up, down, down_bias, approximate, lean)
    layer = why or prepare(x, up, up_bias)  # which knows whether the first matmul fits
    if isinstance(layer, str):
        paths.note(_NAME, paths.PARTS, layer)
        return None
    paths.note(_NAME, paths.KERNEL)
    casts = layer.cast, cast_weight(down, torch.bfloat16)
    inputs = Inputs(layer.x, up, up_bias, down, down_bias, *casts, lean, approximate == "none")
    y, *_ = (_registered if dispatch.is_traced(*inputs[:5]) else _eager)(*inputs)
    return y  # type: ignore[no-any-return]


def _why_not(x: Tensor, up: Tensor, down: Tensor, down_bias: Tensor | None, approximate: str, lean: bool) -> str:
    """Say why the fused kernels do not take it; nothing if all but the first matmul fits."""
    if not (torch.is_grad_enabled() and up.requires_grad and down.requires_grad):
        return "the kernels pay where there is a backward of both weights"
    if torch.compiler.is_dynamo_compiling():
        return "Dynamo cannot capture whether there are kernels"
    if down.shape[0] % 8 or not x.numel():
        return "a size is no multiple of 8, or 0"
    for tensor in (x, down, down_bias):
        if tensor is not None and matmul_dtype(tensor) != torch.bfloat16:
            return "the kernels are for bfloat16"
    if not all(dispatch.is_plain(each) for each in (down, down_bias) if each is not None):
        return "a parameter is a tensor subclass"
    if 2 * (x.numel() // x.shape[-1]) * down.numel() < cublaslt.WORTH_CHOOSING:
        return "the matmuls are small"
    if not lean and hopper.busy_share(x.numel() // x.shape[-1], down.shape[1], x.device) < _LEAST_BUSY:
        return "its large tiles would leave too many processors idle"
    erf = approximate == "none"
    ready = hopper.ready(x.device, _kernel("value", lean, erf), _kernel("gradient", lean, erf))
    return "" if ready else "the kernels are for a Hopper, and need NVRTC"


def _check(x: Any, up: Any, up_bias: Any, down: Any, down_bias: Any, approximate: str) -> None:
    """Refuse, with one sentence, what does not fit together."""
    if approximate not in ("tanh", "none"):
        raise ValueError(f"{_NAME}: approximate is {approximate!r}; choose tanh or none.")
    dispatch.check_tensor(_NAME, "x", x)
    if x is None or not x.ndim:
        raise ValueError(f"{_NAME}: x must be a tensor whose last dimension holds the features.")
    for name, weight in (("up", up), ("down", down)):
        if not isinstance(weight, Tensor) or weight.ndim != 2:
            raise ValueError(f"{_NAME}: {name} must be a matrix, features out by features in.")
    inner, out = up.shape[0], down.shape[0]
    dispatch.check_tensor(_NAME, "up", up, torch.Size((inner, x.shape[-1])), x)
    dispatch.check_tensor(_NAME, "up_bias", up_bias, torch.Size((inner,)), x)
    dispatch.check_tensor(_NAME, "down", down, torch.Size((out, inner)), x)
    dispatch.check_tensor(_NAME, "down_bias", down_bias, torch.Size((out,)), x)
