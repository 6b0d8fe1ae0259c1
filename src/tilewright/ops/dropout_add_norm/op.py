"""Dropout, residual add and a norm in one pass over memory.

    residual_out = dropout((x + x_bias) * rowscale * layerscale) + dropout(second) + residual
    out          = norm(residual_out) * weight + bias                                   LayerNorm or RMSNorm

residual_out is rounded to residual_dtype before its norm is taken. x_bias is the bias of the matmul that made x: its
gradient, the sum of x's over all rows, comes with those of the norm and takes no pass of its own.

Where nothing is added to x or dropped and residual_out is not asked for, it is x itself: the norm alone reads x and
writes out.

Saved for backward: residual_out, 1/std and mean of every row, weight, x_bias and a 64-bit seed; x only when a scale
needs its gradient. The dropout mask is never stored: backward draws it again from the seed.

Floor at 2 bytes an element, prenorm: forward reads x and residual, writes out and residual_out: 8 bytes. Backward
reads two gradients and residual_out, writes two gradients: 10 bytes, or 8 when p = 0 lets one tensor serve as the
gradient of both x and residual. Arithmetic is far below that on any current GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tilewright.ops.dropout_add_norm.reference import draw_masks, reference
from tilewright.plan.cost import dropout_add_norm as cost
from tilewright.runtime import dispatch, paths, register
from tilewright.runtime.philox import (
    draw_seed,
    drop_threshold,
    dropout_mask,
    quantised,
    split_seed,
)

__all__ = ["cost", "dropout_add_norm", "reference"]

_NAME = "dropout_add_norm"
_WIDEST = 65536
HOST_BOUND = 4 * 2**20  # elements up to which PyTorch's own ops run an eager call


def _seed(x: torch.Tensor, given: int | torch.Tensor | None, as_tensor: bool) -> int | torch.Tensor:
    if given is None:
        return draw_seed(x, as_tensor=as_tensor)
    if as_tensor and not isinstance(given, torch.Tensor):
        return torch.full((1,), given, dtype=torch.int64, device=x.device)
    return given


class Inputs(NamedTuple):
    """The arguments of forward. Without a residual_dtype the sum is x itself. Only the eager op takes a seed that is a
    number."""

    x: torch.Tensor
    second: torch.Tensor | None
    residual: torch.Tensor | None
    rowscale: torch.Tensor | None
    layerscale: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    x_bias: torch.Tensor | None
    seed: torch.Tensor | int | None
    p: float
    eps: float
    rms: bool
    zero_centered: bool
    residual_dtype: torch.dtype | None
    out_dtype: torch.dtype


class Gradient(NamedTuple):
    """The arguments of backward; `needs` says which gradients are wanted, of the first eight inputs."""

    dout: torch.Tensor
    dresidual_out: torch.Tensor | None
    z: torch.Tensor
    x: torch.Tensor | None
    rowscale: torch.Tensor | None
    layerscale: torch.Tensor | None
    weight: torch.Tensor | None
    x_bias: torch.Tensor | None
    statistics: torch.Tensor
    seed: torch.Tensor | int | None
    p: float
    rms: bool
    zero_centered: bool
    x_dtype: torch.dtype
    needs: Sequence[bool]


def _forward(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """(out, residual_out, statistics); statistics holds 1/std and, for LayerNorm, the mean of every row."""
    x, p, rms, residual_dtype = inputs.x, inputs.p, inputs.rms, inputs.residual_dtype
    packed = dispatch.packed(inputs[:8])  # the tensors, in the kernel's order
    width = x.shape[-1]
    rows = x.numel() // width
    out = torch.empty_like(packed[0], dtype=inputs.out_dtype)
    residual_out = None if residual_dtype is None else torch.empty_like(packed[0], dtype=residual_dtype)
    statistics = x.new_empty((1 if rms else 2, rows), dtype=_statistics_dtype(x))
    if rows:
        seed_tensor, seed_value = split_seed(inputs.seed, x.device)
        tensors = (*packed, seed_tensor, out, residual_out)
        from tilewright.ops.dropout_add_norm.launch import forward_launch

        tile_rows, together, launch = forward_launch(
            x.device, width, dispatch.dtypes(tensors), rms, inputs.zero_centered, p > 0.0
        )
        scalars = (seed_value, rows, drop_threshold(p), 1.0 / (1.0 - p), inputs.eps)
        programs = -(-rows // (tile_rows * together)) * together
        launch((programs, 1), (*tensors, statistics), scalars)
    return out, residual_out, statistics


def _fake_forward(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    x, residual_dtype, device = inputs.x, inputs.residual_dtype, inputs.x.device
    return (
        torch.empty(x.shape, dtype=inputs.out_dtype, device=device),
        None if residual_dtype is None else torch.empty(x.shape, dtype=residual_dtype, device=device),
        torch.empty((1 if inputs.rms else 2, x.numel() // x.shape[-1]), dtype=_statistics_dtype(x), device=device),
    )


def _statistics_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _backward(gradient: Gradient) -> list[torch.Tensor | None]:
    """The gradients of x, second, residual, rowscale, layerscale, weight, bias and x_bias, those that are needed."""
    (
        dout, dresidual_out, z, x, rowscale, layerscale, weight, x_bias, statistics, seed,
        p, rms, zero_centered, x_dtype, needs,
    ) = gradient  # fmt: skip
    inputs = dispatch.packed((dout, dresidual_out, z, x, rowscale, layerscale, weight, x_bias))
    dout, _, z, _, _, _, weight, _ = inputs
    seed_tensor, seed_value = split_seed(seed, z.device)
    width = z.shape[-1]
    rows = z.numel() // width
    from tilewright.ops.dropout_add_norm.launch import backward_plan

    plan = backward_plan(
        z.device, width, dispatch.dtypes(inputs), statistics.dtype, x_dtype, tuple(needs),
        rms, zero_centered, p > 0.0,
    )  # fmt: skip
    programs = max(1, min(-(-rows // plan.rows), plan.programs))  # with no rows, one writes zeros
    programs = -(-programs // plan.together) * plan.together
    dx = torch.empty_like(z, dtype=x_dtype) if needs[0] else None
    dsecond = torch.empty_like(z, dtype=x_dtype) if needs[1] else None
    dresidual = torch.empty_like(z) if needs[2] else None
    drowscale = z.new_empty((plan.slices, rows), dtype=statistics.dtype) if needs[3] else None
    parameters = [
        torch.empty_like(parameter) if need and parameter is not None else None
        for parameter, need in zip((layerscale, weight, weight, x_bias), needs[4:], strict=True)
    ]
    partials = z.new_empty((4, programs, width), dtype=statistics.dtype)
    sums = [None if parameter is None else partials[i] for i, parameter in enumerate(parameters)]
    row_sums = None
    if plan.row_sums is not None:
        row_sums = z.new_empty((2, rows), dtype=statistics.dtype)
        if rows:
            plan.row_sums((rows, 1), (dout, z, weight, statistics, row_sums), (rows,))
    plan.main(
        (programs, plan.slices),
        (*inputs, statistics, row_sums, seed_tensor, dx, dsecond, dresidual, drowscale, *sums),
        (seed_value, rows, drop_threshold(p), 1.0 / (1.0 - p)),
    )
    if any(needs[4:]):
        plan.add_partials((-(-width // plan.band), 4), (partials, *parameters), (programs,))
    if drowscale is not None and rowscale is not None:
        drowscale = drowscale.sum(0).to(rowscale.dtype).reshape(z.shape[:-1])
    return [dx, dsecond, dresidual, drowscale, *parameters]


def _fake_backward(gradient: Gradient) -> list[torch.Tensor | None]:
    z, x_dtype, device = gradient.z, gradient.x_dtype, gradient.z.device
    branches = [torch.empty(z.shape, dtype=dtype, device=device) for dtype in (x_dtype, x_dtype, z.dtype)]
    parameters = gradient.rowscale, gradient.layerscale, gradient.weight, gradient.weight, gradient.x_bias
    likes = [*branches, *parameters]
    return [
        torch.empty(like.shape, dtype=like.dtype, device=device) if need and like is not None else None
        for like, need in zip(likes, gradient.needs, strict=True)
    ]


def _save(ctx: Any, inputs: Inputs, output: tuple[Any, ...]) -> None:
    x, rowscale, layerscale, x_bias, seed = inputs.x, inputs.rowscale, inputs.layerscale, inputs.x_bias, inputs.seed
    _, residual_out, statistics = output
    z = x if inputs.residual_dtype is None else residual_out
    needs = ctx.needs_input_grad
    seed_tensor, seed_value = (seed, None) if isinstance(seed, torch.Tensor) else (None, seed)
    kept_x = x if needs[3] or needs[4] else None
    kept_bias = x_bias if kept_x is not None or needs[7] else None
    ctx.save_for_backward(z, kept_x, rowscale, layerscale, inputs.weight, kept_bias, statistics, seed_tensor)
    # With nothing between x and the sum, the gradients of the summands are the same numbers: one tensor serves all.
    shared = inputs.p == 0.0 and rowscale is None and layerscale is None and x.dtype == z.dtype
    wanted = (any(needs[:3]), False, False, *needs[3:8]) if shared else needs[:8]
    ctx.seed, ctx.shared, ctx.has_sum = seed_value, shared, inputs.residual_dtype is not None
    ctx.options = (inputs.p, inputs.rms, inputs.zero_centered, x.dtype, wanted)
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, saved: Sequence[Any], dout: torch.Tensor, dresidual_out: torch.Tensor | None) -> Gradient:
    z, x, rowscale, layerscale, weight, x_bias, statistics, seed = saved
    p, rms, zero_centered, x_dtype, needs = ctx.options
    return Gradient(
        dout, dresidual_out, z, x, rowscale, layerscale, weight, x_bias, statistics, ctx.seed if seed is None else seed,
        p, rms, zero_centered, x_dtype, needs,
    )  # fmt: skip


def _differentiate(ctx: Any, backward: Any, dout: Any, dresidual_out: Any, *_: Any) -> tuple[torch.Tensor | None, ...]:
    saved = ctx.saved_tensors
    register.refuse_second_derivative(_NAME)
    if not ctx.has_sum:
        dresidual_out = None  # of the empty tensor that stands for it
    if dout is None:
        if dresidual_out is None:
            return ()
        z, *_ = saved
        *_, x_dtype, _ = ctx.options
        dout = torch.zeros(z.shape, dtype=x_dtype, device=z.device)
    dx, dsecond, dresidual, *rest = backward(_gradient(ctx, saved, dout, dresidual_out))
    if ctx.shared:
        needs = ctx.needs_input_grad
        dx, dsecond, dresidual = (dx if need else None for need in needs[:3])
    return dx, dsecond, dresidual, *rest


def _foresee_backward(ctx: Any, inputs: Inputs, output: Any) -> None:
    """Backward of one row, with a gradient of the sum and without."""
    z, x, rowscale, layerscale, weight, x_bias, statistics, seed = ctx.to_save
    dout, z, x = (dispatch.one_row(t) for t in (output[0], z, x))
    rowscale = None if rowscale is None else rowscale.reshape(-1)[:1]
    saved = z, x, rowscale, layerscale, weight, x_bias, statistics[:, :1], seed
    for dresidual_out in (z, None):
        _backward(_gradient(ctx, saved, dout, dresidual_out))


_OP = register.Op("dropout_add_norm", _forward, _fake_forward)
_BACKWARD = register.Op("dropout_add_norm_backward", _backward, _fake_backward)
_eager = _OP.differentiate(_save, _differentiate, _BACKWARD, _foresee_backward, outputs=2)
_registered = _OP.registered


def dropout_add_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    second: torch.Tensor | None = None,
    rowscale: torch.Tensor | None = None,
    layerscale: torch.Tensor | None = None,
    x_bias: torch.Tensor | None = None,
    p: float = 0.0,
    eps: float = 1e-5,
    norm: str = "layer",
    zero_centered: bool = False,
    prenorm: bool = False,
    residual_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    return_mask: bool = False,
    seed: int | torch.Tensor | None = None,
) -> Any:
    """Dropout, residual add and LayerNorm or RMSNorm, fused.

    Computes ``residual_out = dropout((x + x_bias) * rowscale * layerscale) + dropout(second) + residual`` and
    ``out = norm(residual_out) * weight + bias``.

    Args:
        x: the branch's output, any shape ``(..., width)`` with width from 1 to 65,536.
        residual: the residual stream, same shape, in its own dtype (float32 beside bfloat16 activations works).
        weight, bias: ``(width,)``, of one dtype, which may differ from that of x.
        second: a second branch for parallel residual blocks, same shape and dtype as x; it has its own dropout mask
            and takes no scale.
        rowscale: one factor a row, shape ``x.shape[:-1]`` (stochastic depth).
        layerscale: one factor a column, shape ``(width,)``.
        x_bias: one summand a column, shape ``(width,)``: the bias of the matmul that made x, left out there. Its
            gradient, a sum over all rows, then costs no pass over x's. Not for a residual of 16 bits: x is rounded by
            then, its sum with the residual is often a tie, and a bias of any size decides it.
        p: dropout probability in [0, 1), rounded to a multiple of 2**-16; 0 draws nothing. There is no training flag:
            pass 0 to evaluate. The mask follows ``torch.manual_seed`` and is drawn again, not stored, for backward.
        norm: ``"layer"`` or ``"rms"``.
        zero_centered: the weight is stored as its distance from one (RMSNorm).
        prenorm: also return ``residual_out``.
        residual_dtype: dtype of ``residual_out`` where no residual is given; default: that of x.
        out_dtype: dtype of ``out``, also inside ``torch.autocast``; default: autocast's inside of it, else that of x.
        return_mask: also return the boolean mask of what dropout kept, and that of `second` behind it.
        seed: of the mask, below 2**62, a number or an int64 tensor of one element; default: from torch's generator.

    Returns:
        ``out``, or a tuple ``(out, residual_out, mask, second_mask)`` of the parts asked for, in this order.

    >>> import torch
    >>> x, residual = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    >>> out, new_residual = dropout_add_norm(x, residual, torch.ones(8), p=0.1, prenorm=True)
    >>> out.shape, torch.allclose(out.mean(-1), torch.zeros(2, 3), atol=1e-5)
    (torch.Size([2, 3, 8]), True)
    """
    if second is rowscale is layerscale is None is residual_dtype and not (zero_centered or return_mask):
        outputs = _by_torch(x, residual, weight, bias, x_bias, p, eps, norm, out_dtype)
        if outputs is not None:
            paths.note(_NAME, paths.PYTORCH, paths.why_host_bound(HOST_BOUND))
            return outputs if prenorm else outputs[0]
    _check(x, residual, weight, bias, second, rowscale, layerscale, x_bias, p, eps, norm, zero_centered, residual_dtype)
    _check_dtype("out_dtype", out_dtype, x)
    p = quantised(p)
    if residual_dtype is None:
        residual_dtype = (x if residual is None else residual).dtype
    if out_dtype is None:
        kind = x.device.type
        autocast = x.dtype != torch.float64 and kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind)
        out_dtype = torch.get_autocast_dtype(kind) if autocast else x.dtype
    path = paths.choose(_NAME, x, second, residual, rowscale, layerscale, weight, bias, x_bias)
    traced = path == paths.REGISTERED
    masks: list[torch.Tensor] = []
    if path != paths.REFERENCE:
        seed = _seed(x, seed, traced) if p > 0.0 else None
        is_alone = residual is second is rowscale is layerscale is x_bias is None and p == 0.0
        if is_alone and not prenorm and residual_dtype == x.dtype:
            residual_dtype = None  # the sum is x: it takes no memory and no pass of its own
        inputs = Inputs(
            x, second, residual, rowscale, layerscale, weight, bias, x_bias, seed,
            p, eps, norm == "rms", zero_centered, residual_dtype, out_dtype,
        )  # fmt: skip
        out, residual_out, *_ = _OP.call_registered(inputs) if traced else _eager(*inputs)
        if return_mask:
            masks = [dropout_mask(x, seed, p, stream) for stream in range(1 if second is None else 2)]
    else:
        masks = draw_masks(x, second, p, seed)
        out, residual_out = reference(
            x, residual, weight, bias, second=second, rowscale=rowscale, layerscale=layerscale, x_bias=x_bias, p=p,
            eps=eps, norm=norm, zero_centered=zero_centered, residual_dtype=residual_dtype, out_dtype=out_dtype,
            masks=masks,
        )  # fmt: skip
        if return_mask and p == 0.0:
            masks = [dropout_mask(x, None, p, 0)] * (1 if second is None else 2)
    if not prenorm and not return_mask:
        return out
    return (out, *((residual_out,) if prenorm else ()), *(masks if return_mask else ()))


def _by_torch(
    x: Any, residual: Any, weight: Any, bias: Any, x_bias: Any, p: float, eps: float, norm: str, out_dtype: Any
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The same by PyTorch's own ops, where they do it sooner: a small, plain call with the host in the way; else None.

    Up to some 4 million elements the device idles most of the time, and what counts is the host. There, three ops
    whose backward is C++ take less of it than one whose backward is Python. A compiler or a captured graph takes the
    host out of the way, so under those the kernel runs at every size; so it does with dropout, whose mask must not
    depend on who draws it. This runs before the arguments are checked, and is as short as it can be: it looks at what
    PyTorch would take and we would not, and leaves the rest to PyTorch.
    """
    if torch.compiler.is_dynamo_compiling() or type(x) not in dispatch.PLAIN or not x.is_cuda or x.numel() > HOST_BOUND:
        return None
    try:
        shape, dtype = x.shape, x.dtype
        if (
            residual.dtype is not dtype
            or residual.shape != shape
            or not (x_bias is None or (x_bias.shape == shape[-1:] and x_bias.dtype is dtype))
            or not (p == 0.0 and eps >= 0.0)
            or (bias is not None and (weight is None or norm != "layer"))
            or not (out_dtype is None or out_dtype is dtype)
            or torch.is_autocast_enabled()
            or dispatch.kernels_are_forced()
            or (torch._C._len_torch_dispatch_stack() and dispatch.has_mode())
            or torch._C._cuda_isCurrentStreamCapturing()
        ):
            return None
        if x_bias is not None:
            x = x + x_bias
        total = x + residual  # in place it takes autograd longer
        width = (shape[-1],)  # a slice of a shape takes three times as long
        if norm == "layer":
            return torch.layer_norm(total, width, weight, bias, eps), total
        return (torch.rms_norm(total, width, weight, eps), total) if norm == "rms" else None
    except (AttributeError, IndexError, RuntimeError, TypeError):
        return None  # the checks will say why


def _check(
    x: Any, residual: Any, weight: Any, bias: Any, second: Any, rowscale: Any, layerscale: Any, x_bias: Any,
    p: Any, eps: Any, norm: Any, zero_centered: bool, residual_dtype: Any,
) -> None:  # fmt: skip
    dispatch.check_tensor(_NAME, "x", x)
    shape = x.shape
    width = shape[-1] if shape else 0
    if not 1 <= width <= _WIDEST:
        raise ValueError(f"{_NAME}: x has shape {tuple(shape)}; its last dimension must be 1 to {_WIDEST} wide.")
    dispatch.check_probability(_NAME, p)
    dispatch.check_eps(_NAME, eps)
    if norm not in ("layer", "rms"):
        raise ValueError(f"{_NAME}: norm is {norm!r}; choose 'layer' or 'rms'.")
    dispatch.check_tensor(_NAME, "residual", residual, shape, x)
    dispatch.check_tensor(_NAME, "second", second, shape, x)
    dispatch.check_tensor(_NAME, "weight", weight, shape[-1:], x)
    dispatch.check_tensor(_NAME, "bias", bias, shape[-1:], x)
    dispatch.check_tensor(_NAME, "layerscale", layerscale, shape[-1:], x)
    dispatch.check_tensor(_NAME, "x_bias", x_bias, shape[-1:], x)
    dispatch.check_tensor(_NAME, "rowscale", rowscale, shape[:-1], x)
    if second is not None and second.dtype != x.dtype:
        raise TypeError(f"{_NAME}: second is {second.dtype}, but x is {x.dtype}; convert one of them.")
    if bias is not None and (weight is None or weight.dtype != bias.dtype):
        raise TypeError(f"{_NAME}: a bias needs a weight of the same dtype, {bias.dtype}.")
    if zero_centered and (norm != "rms" or weight is None):
        raise ValueError(f"{_NAME}: zero_centered needs norm='rms' and a weight.")
    _check_dtype("residual_dtype", residual_dtype, x)
    if residual is not None and residual_dtype not in (None, residual.dtype):
        raise TypeError(f"{_NAME}: residual_dtype is {residual_dtype}, but residual is {residual.dtype}; leave it out.")


def _check_dtype(name: str, dtype: Any, x: torch.Tensor) -> None:
    """Refuse a dtype of an output that the kernel does not write; None passes."""
    if dtype is None or (dtype in dispatch.FLOATS and (dtype == torch.float64) == (x.dtype == torch.float64)):
        return
    raise TypeError(f"{_NAME}: {name} is {dtype}; choose a floating-point dtype, float64 for x of float64 alone.")
