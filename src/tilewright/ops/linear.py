"""Linear layers, and the MLP of two of them around a GELU, without passes over memory between the products.

    linear = x @ weight^T + bias
    mlp    = gelu_tanh(u) @ down_weight^T + down_bias,         u = x @ up_weight^T + up_bias

What a pass would do, cuBLASLt (`_cublaslt`) does to a product before it is written: forward the bias and the GELU,
which also leaves u behind; backward the gradient through the GELU (to dy @ down_weight) and the sum over tokens that is
the bias's gradient (on the way through dy^T @ x). The weight's gradient leaves its product in the weight's dtype: under
autocast in float32, neither rounded to 16 bits on the way nor copied after.

Each of these steps can also be done apart, a product and a kernel after it. Which is quicker depends on shape, device
and version: it is measured when a shape is first seen (`_cublaslt.Choice`), so two processes may differ in the last
bit; `torch.use_deterministic_algorithms(True)` forbids that.

Saved for backward: x and the weights in the dtype of the products; of the MLP also u and gelu(u), or u alone with
`recompute`.

Floor of a linear layer: forward one product of 2 x tokens x in x out FLOPs, backward two.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from tilewright.ops import _cublaslt, _op, activation
from tilewright.ops._cublaslt import Epilogue
from tilewright.plan.cost import product as cost

__all__ = ["cost", "linear", "mlp", "mlp_reference", "reference"]

_ONCE = "linear and mlp have no second derivative: leave out create_graph=True, or use their references."
_DEVICES = ("cuda",)
_HALVES = (torch.bfloat16, torch.float16)

Tensor = torch.Tensor


def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear layer in plain PyTorch: the definition."""
    return F.linear(x, weight, bias)


def mlp_reference(
    x: Tensor, up_weight: Tensor, up_bias: Tensor | None, down_weight: Tensor, down_bias: Tensor | None
) -> Tensor:
    """The MLP in plain PyTorch: the definition."""
    return F.linear(F.gelu(F.linear(x, up_weight, up_bias), approximate="tanh"), down_weight, down_bias)


# The steps, on matrices of tokens by features. Each is one product with an epilogue, or else several things apart.


@functools.lru_cache(4096)
def _choice(*key: Hashable) -> _cublaslt.Choice:
    return _cublaslt.Choice()


def _best(step: Any, *inputs: Any) -> Any:
    """The result of the quickest way that `step` yields, for these shapes and dtypes."""
    key = [(t.device, t.shape, t.dtype) if isinstance(t, Tensor) else t for t in inputs]
    return _choice(step, *key)(step(*inputs))


def _fused(
    left: Tensor, right: Tensor, dtype: torch.dtype, epilogue: Epilogue = Epilogue.DEFAULT,
    bias: Tensor | None = None, aux: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    out = left.new_empty((left.shape[0], right.shape[1]), dtype=dtype)
    return out if _cublaslt.product(left, right, out, epilogue, bias, aux) else None


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """left @ right in `dtype`."""
    out = _fused(left, right, dtype)
    if out is not None:
        return out
    if dtype == left.dtype:
        return torch.mm(left, right)
    return torch.mm(left, right, out_dtype=dtype) if left.is_cuda else left.to(dtype) @ right.to(dtype)


def _biased(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weight^T + bias."""
    if bias is None:
        return _product(x, weight.t(), x.dtype)
    out = _fused(x, weight.t(), x.dtype, Epilogue.BIAS, bias)
    return torch.addmm(bias, x, weight.t()) if out is None else out


def _activated(x: Tensor, weight: Tensor, bias: Tensor | None) -> Sequence[Any]:
    """(u, gelu(u)) of u = x @ weight^T + bias."""

    def fused() -> tuple[Tensor, Tensor] | None:
        u = x.new_empty((x.shape[0], weight.shape[0]))
        epilogue = Epilogue.GELU_AUX if bias is None else Epilogue.GELU_AUX_BIAS
        out = _fused(x, weight.t(), x.dtype, epilogue, bias, u)
        return None if out is None else (u, out)

    def apart() -> tuple[Tensor, Tensor]:
        u = _biased(x, weight, bias)
        return u, activation.bias_gelu(u)

    return fused, apart


def _of_activated(dy: Tensor, weight: Tensor, u: Tensor, wants_bias: bool) -> Sequence[Any]:
    """(du, the gradient of u's bias where wanted) of y = gelu(u) @ weight^T."""

    def fused() -> tuple[Tensor, Tensor | None] | None:
        bias = u.new_empty(u.shape[1]) if wants_bias else None
        du = _fused(dy, weight, u.dtype, Epilogue.DGELU_BGRAD if wants_bias else Epilogue.DGELU, bias, u)
        return None if du is None else (du, bias)

    def summed_apart() -> tuple[Tensor, Tensor | None] | None:
        du = _fused(dy, weight, u.dtype, Epilogue.DGELU, None, u) if wants_bias else None
        return None if du is None else (du, du.sum(0, dtype=torch.float32))

    def apart() -> tuple[Tensor | None, Tensor | None]:
        gradient = _product(dy, weight, u.dtype)
        if not _op.runs_kernel(u):
            du = torch.ops.aten.gelu_backward(gradient, u, approximate="tanh")
            return du, du.sum(0, dtype=torch.float32) if wants_bias else None
        bias = u.new_zeros(u.shape[1], dtype=torch.float32) if wants_bias else None  # u has it already
        needs = (True, False, wants_bias)
        gradients = activation._backward(gradient, u, None, bias, "gelu_tanh", False, needs)
        return gradients[0], gradients[2]

    return fused, summed_apart, apart


def _of_weight(dy: Tensor, x: Tensor, dtype: torch.dtype, wants_bias: bool) -> Sequence[Any]:
    """(dweight in `dtype`, the bias's gradient where wanted) of y = x @ weight^T + bias."""

    def fused() -> tuple[Tensor, Tensor] | None:
        if not wants_bias:
            return None
        bias = dy.new_empty(dy.shape[1], dtype=dtype)
        dweight = _fused(dy.t(), x, dtype, Epilogue.BGRADB, bias)
        return None if dweight is None else (dweight, bias)

    def apart() -> tuple[Tensor, Tensor | None]:
        return _product(dy.t(), x, dtype), dy.sum(0, dtype=torch.float32) if wants_bias else None

    return fused, apart


def _parameters(
    dy: Tensor, x: Tensor | None, full: Sequence[bool], needs: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of weight and bias, those that are needed, in float32 where `full` says so."""
    dweight, dbias = None, None
    if needs[0]:
        dweight, dbias = _best(_of_weight, dy, x, torch.float32 if full[0] else dy.dtype, needs[1])
    elif needs[1]:
        dbias = dy.sum(0, dtype=torch.float32)
    return dweight, None if dbias is None else dbias.to(torch.float32 if full[1] else dy.dtype)


def _matrix(x: Tensor) -> Tensor:
    """Tokens by features, as the library takes them."""
    return _op.packed((x.reshape(-1, x.shape[-1]),))[0]


def _vector(bias: Tensor | None, dtype: torch.dtype) -> Any:
    return None if bias is None else _op.packed((bias.to(dtype),))[0]


# The ops. `weight` is the parameter, which gets the gradient, and `cast` what it is in the dtype of the products.


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, cast: Tensor) -> Tensor:
    y = _biased(_matrix(x), _matrix(cast), _vector(bias, x.dtype))
    return y.view(*x.shape[:-1], y.shape[1])


def _backward(dy: Tensor, x: Tensor, cast: Tensor, full: Sequence[bool], needs: Sequence[bool]) -> list[Tensor | None]:
    """The gradients of x, weight and bias, those that are needed."""
    rows, tokens = _matrix(dy), _matrix(x)
    dx = _product(rows, _matrix(cast), x.dtype).view(x.shape) if needs[0] else None
    return [dx, *_parameters(rows, tokens, full, needs[1:])]


def _mlp_forward(
    x: Tensor, up_weight: Tensor, up_bias: Tensor | None, down_weight: Tensor, down_bias: Tensor | None,
    up_cast: Tensor, down_cast: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(y, u, gelu(u)), the last two as matrices."""
    u, activated = _best(_activated, _matrix(x), _matrix(up_cast), _vector(up_bias, x.dtype))
    y = _biased(activated, _matrix(down_cast), _vector(down_bias, x.dtype))
    return y.view(*x.shape[:-1], y.shape[1]), u, activated


def _mlp_backward(
    dy: Tensor, x: Tensor, u: Tensor, activated: Tensor | None, up_cast: Tensor, down_cast: Tensor,
    full: Sequence[bool], needs: Sequence[bool],
) -> list[Tensor | None]:  # fmt: skip
    """The gradients of x, up_weight, up_bias, down_weight and down_bias, those that are needed."""
    rows, tokens = _matrix(dy), _matrix(x)
    if activated is None and needs[3]:
        activated = activation.bias_gelu(u)
    ddown = _parameters(rows, activated, full[2:], needs[3:])
    del activated
    dx, dweight, dbias = None, None, None
    if any(needs[:3]):
        du, dbias = _best(_of_activated, rows, _matrix(down_cast), u, needs[2])
        dbias = None if dbias is None else dbias.to(torch.float32 if full[1] else du.dtype)
        dweight, _ = _parameters(du, tokens, full, (needs[1], False))
        dx = _product(du, _matrix(up_cast), x.dtype).view(x.shape) if needs[0] else None
    return [dx, dweight, dbias, *ddown]


# Autograd. Both ways in, the light eager one and the registered one, save and differentiate by the same functions.


def _in_full(*parameters: Tensor | None) -> list[bool]:
    """Which gradients are in float32; the others are in the dtype of the products."""
    return [t is not None and t.dtype == torch.float32 for t in parameters]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, cast = inputs
    ctx.save_for_backward(x, cast)
    ctx.full = _in_full(weight, bias)
    ctx.set_materialize_grads(False)


def _mlp_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, *parameters, up_cast, down_cast, recompute = inputs
    ctx.save_for_backward(x, output[1], None if recompute else output[2], up_cast, down_cast)
    ctx.full = _in_full(*parameters)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, backward: Any, dy: Any, parameters: int) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():
        raise RuntimeError(_ONCE)
    inputs = len(ctx.needs_input_grad)
    if dy is None:
        return (None,) * inputs
    needs = list(ctx.needs_input_grad[: 1 + parameters])
    return *backward(dy, *ctx.saved_tensors, ctx.full, needs), *(None,) * (inputs - 1 - parameters)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        output = _forward(*inputs)
        _save(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        return _differentiate(ctx, _backward, dy, 2)


class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        output = _mlp_forward(*inputs[:-1])
        _mlp_save(ctx, inputs, output)
        return output[0]

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        return _differentiate(ctx, _mlp_backward, dy, 4)


_eager, _mlp_eager = _op.eager(_Linear), _op.eager(_MLP)


@torch.library.custom_op(
    "tilewright::linear", mutates_args=(), schema="(Tensor x, Tensor weight, Tensor? bias, Tensor cast) -> Tensor"
)
def _registered(*inputs: Any) -> Tensor:
    return _forward(*inputs)


@_op.fake_of(_registered)
def _(*inputs: Any) -> Tensor:
    x, weight = inputs[:2]
    return torch.empty((*x.shape[:-1], weight.shape[0]), dtype=x.dtype, device=x.device)


@torch.library.custom_op(
    "tilewright::linear_backward",
    mutates_args=(),
    schema="(Tensor dy, Tensor x, Tensor cast, bool[] full, bool[] needs) -> Tensor[]",
)
def _registered_backward(*inputs: Any) -> list[Tensor]:
    return _present(inputs[0], _backward(*inputs))


def _present(like: Tensor, gradients: Sequence[Tensor | None]) -> list[Tensor]:
    """A registered op cannot return None: an empty tensor stands for a gradient nobody asked for."""
    return [like.new_empty(0) if gradient is None else gradient for gradient in gradients]


def _fake_gradients(x: Tensor, casts: Sequence[Tensor], full: Any, needs: Any) -> list[Tensor]:
    shapes = [x.shape, *(shape for cast in casts for shape in (cast.shape, cast.shape[:1]))]
    return [
        torch.empty(shape, dtype=torch.float32 if is_full else x.dtype, device=x.device) if need else x.new_empty(0)
        for shape, is_full, need in zip(shapes, (False, *full), needs, strict=True)
    ]


@_op.fake_of(_registered_backward)
def _(*inputs: Any) -> list[Tensor]:
    _, x, cast, full, needs = inputs
    return _fake_gradients(x, (cast,), full, needs)


@torch.library.custom_op(
    "tilewright::mlp",
    mutates_args=(),
    schema="(Tensor x, Tensor up_weight, Tensor? up_bias, Tensor down_weight, Tensor? down_bias, Tensor up_cast, "
    "Tensor down_cast, bool recompute) -> (Tensor, Tensor, Tensor)",
)
def _mlp_registered(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    y, u, activated = _mlp_forward(*inputs[:-1])
    return y, u, u.new_empty(0) if inputs[-1] else activated


@_op.fake_of(_mlp_registered)
def _(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    x, up_weight, _, down_weight, *_, recompute = inputs
    tokens = x.numel() // x.shape[-1]
    y = torch.empty((*x.shape[:-1], down_weight.shape[0]), dtype=x.dtype, device=x.device)
    u = x.new_empty((tokens, up_weight.shape[0]))
    return y, u, x.new_empty(0) if recompute else torch.empty_like(u)


@torch.library.custom_op(
    "tilewright::mlp_backward",
    mutates_args=(),
    schema="(Tensor dy, Tensor x, Tensor u, Tensor? activated, Tensor up_cast, Tensor down_cast, bool[] full, "
    "bool[] needs) -> Tensor[]",
)
def _mlp_registered_backward(*inputs: Any) -> list[Tensor]:
    return _present(inputs[0], _mlp_backward(*inputs))


@_op.fake_of(_mlp_registered_backward)
def _(*inputs: Any) -> list[Tensor]:
    _, x, _, _, *casts, full, needs = inputs
    return _fake_gradients(x, casts, full, needs)


def _asked(registered: Any, *inputs: Any) -> list[Tensor | None]:
    return [gradient if need else None for gradient, need in zip(registered(*inputs), inputs[-1], strict=True)]


_registered.register_autograd(
    lambda ctx, dy: _differentiate(ctx, functools.partial(_asked, _registered_backward), dy, 2),
    setup_context=_save,
)
_mlp_registered.register_autograd(
    lambda ctx, dy, *_: _differentiate(ctx, functools.partial(_asked, _mlp_registered_backward), dy, 4),
    setup_context=_mlp_save,
)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight^T + bias`` as ``torch.nn.functional.linear`` has it, with its gradients out of the products.

    Args:
        x: ``(..., in)``.
        weight: ``(out, in)``, of x's dtype, or of float32 under ``torch.autocast``; its gradient is then computed in
            float32.
        bias: ``(out,)``, likewise.

    Returns:
        ``(..., out)`` in the dtype of the product.

    cuBLASLt computes bfloat16 and float16 on a GPU where ``in`` and ``out`` are multiples of 8; everything else is
    plain PyTorch.

    >>> import torch
    >>> x, weight, bias = torch.randn(2, 3, 8), torch.randn(16, 8), torch.randn(16)
    >>> torch.equal(linear(x, weight, bias), torch.nn.functional.linear(x, weight, bias))
    True
    """
    dtype = _check("linear", x, ("", weight, bias))
    if not _fits(dtype, x, weight, bias):
        return reference(x, weight, bias)
    run = _registered if torch.compiler.is_compiling() else _eager
    return run(x.to(dtype), weight, bias, weight.detach().to(dtype))


def mlp(
    x: Tensor,
    up_weight: Tensor,
    up_bias: Tensor | None,
    down_weight: Tensor,
    down_bias: Tensor | None,
    recompute: bool = False,
) -> Tensor:
    """``linear(gelu(linear(x, up_weight, up_bias)), down_weight, down_bias)``, the GELU by tanh, inside the products.

    Args:
        x: ``(..., width)``.
        up_weight, up_bias: ``(inner, width)`` and ``(inner,)``, dtypes as in `linear`.
        down_weight, down_bias: ``(out, inner)`` and ``(out,)``.
        recompute: keep only the input of the GELU for backward, which computes its output again: one tensor of
            ``(..., inner)`` less, for one pass over memory. Of no effect where plain PyTorch runs.

    >>> import torch
    >>> x, up, down = torch.randn(2, 3, 8), torch.nn.Linear(8, 32), torch.nn.Linear(32, 8)
    >>> expected = down(torch.nn.functional.gelu(up(x), approximate="tanh"))
    >>> torch.equal(mlp(x, up.weight, up.bias, down.weight, down.bias), expected)
    True
    """
    dtype = _check("mlp", x, ("up_", up_weight, up_bias), ("down_", down_weight, down_bias))
    parameters = (up_weight, up_bias, down_weight, down_bias)
    if not _fits(dtype, x, *parameters):
        return mlp_reference(x, *parameters)
    inputs = (x.to(dtype), *parameters, up_weight.detach().to(dtype), down_weight.detach().to(dtype), bool(recompute))
    return _mlp_registered(*inputs)[0] if torch.compiler.is_compiling() else _mlp_eager(*inputs)


def _fits(dtype: torch.dtype, x: Tensor, *parameters: Tensor | None) -> bool:
    """Whether cuBLASLt may compute it. Who traces without compiling (counts FLOPs, say) knows PyTorch's ops only."""
    if x.device.type not in _DEVICES or dtype not in _HALVES or torch._C._are_functorch_transforms_active():
        return False
    if not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack() > 0:
        return False
    for tensor in (x, *parameters):
        if tensor is not None and type(tensor) not in _op.PLAIN:
            return False
    for parameter in parameters:
        if parameter is not None and (
            parameter.dtype not in (dtype, torch.float32) or not all(n and n % 8 == 0 for n in parameter.shape)
        ):
            return False
    return True


def _dtype(x: Tensor) -> torch.dtype:
    """What the products are computed in."""
    kind = x.device.type
    autocast = x.dtype != torch.float64 and kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if autocast else x.dtype


def _check(op: str, x: Any, *layers: tuple[str, Any, Any]) -> torch.dtype:
    """Refuses what does not fit together; the dtype of the products."""
    _op.check_tensor(op, "x", x)
    if not x.ndim:
        raise ValueError(f"{op}: x is a scalar; its last dimension must hold the features.")
    dtype, features = _dtype(x), x.shape[-1]
    for prefix, weight, bias in layers:
        if not isinstance(weight, Tensor) or weight.ndim != 2:
            raise ValueError(f"{op}: {prefix}weight must be a matrix, features out by features in.")
        _op.check_tensor(op, f"{prefix}weight", weight, torch.Size((weight.shape[0], features)), x)
        _op.check_tensor(op, f"{prefix}bias", bias, weight.shape[:1], x)
        for name, tensor in ((f"{prefix}weight", weight), (f"{prefix}bias", bias)):
            if tensor is not None and tensor.dtype != x.dtype and dtype == x.dtype != _dtype(tensor):
                raise TypeError(f"{op}: {name} is {tensor.dtype} and x is {x.dtype}; convert one, or use autocast.")
        features = weight.shape[0]
    return dtype
