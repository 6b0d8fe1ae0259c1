"""Linear layers of one input, such as those of queries, keys and values, or of a gate and what it multiplies.

    y_i = x @ weight_i^T + bias_i
    dx  = dy_1 @ weight_1 + dy_2 @ weight_2 + ...      each matmul adds to the one before as it writes

Autograd computes a gradient of x for each layer, and adds them in passes of their own: three tensors of the size of x
a pass. Here the matmuls read the sum so far, while they wait for the tensor cores, and write it once each.

Saved for backward: x once, and each weight in the dtype of the matmuls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tilewright.ops.linear.launch import Gradient, Inputs, add_matmul, backward, forward
from tilewright.ops.linear.op import linear, prepare
from tilewright.runtime import dispatch, paths, register

Tensor = torch.Tensor
Layer = tuple[Tensor, Tensor | None]  # a weight and a bias
MOST = 3  # layers of a group


class Group(NamedTuple):
    """Up to three layers; of each the parameters, and the weight in the matmuls' dtype."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    cast: Tensor
    second_weight: Tensor
    second_bias: Tensor | None
    second_cast: Tensor
    third_weight: Tensor | None
    third_bias: Tensor | None
    third_cast: Tensor | None


def _layers(group: Group) -> list[Inputs]:
    x, *rest = group
    parts = [rest[at : at + 3] for at in range(0, 3 * MOST, 3)]
    return [Inputs(x, weight, bias, cast) for weight, bias, cast in parts if weight is not None and cast is not None]


def _launch(group: Group) -> tuple[Tensor, ...]:
    return tuple(forward(layer) for layer in _layers(group))


def _save(ctx: Any, group: Group, output: tuple[Tensor, ...]) -> None:
    layers = _layers(group)
    ctx.save_for_backward(group.x, *(layer.cast for layer in layers))
    ctx.full = [
        [each is not None and each.dtype == torch.float32 for each in (layer.weight, layer.bias)] for layer in layers
    ]
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, _: Any, *upstream: Tensor | None) -> Sequence[Tensor | None]:
    register.refuse_second_derivative("linear", "torch.nn.functional.linear")
    x, *casts = ctx.saved_tensors
    dx: Tensor | None = None
    found: list[Tensor | None] = []
    for index, (dy, cast) in enumerate(zip(upstream, casts, strict=True)):
        if dy is None:
            found += [None, None, None]
            continue
        needs_weight, needs_bias = ctx.needs_input_grad[1 + 3 * index : 3 + 3 * index]
        is_first = ctx.needs_input_grad[0] and dx is None
        first, dweight, dbias = backward(Gradient(dy, x, cast, ctx.full[index], [is_first, needs_weight, needs_bias]))
        if is_first:
            dx = first
        elif dx is not None:
            add_matmul(dx, dy, cast)
        found += [dweight, dbias, None]
    return dx, *found


_eager = register.make_eager(_launch, _save, _differentiate)


def linear_group(x: Tensor, layers: Sequence[Layer]) -> tuple[Tensor, ...]:
    """Compute ``linear(x, weight, bias)`` for each (weight, bias) of two or three layers.

    Where all of them are matmuls that `linear` gives to cuBLASLt, backward sums their gradients of x within the
    matmuls. Elsewhere, and where a compiler sees the calls, it is `linear` for each.

    >>> import torch
    >>> x, gate, up = torch.randn(2, 3, 8), torch.randn(16, 8), torch.randn(16, 8)
    >>> first, second = linear_group(x, [(gate, None), (up, None)])
    >>> torch.equal(first, torch.nn.functional.linear(x, gate)), second.shape
    (True, torch.Size([2, 3, 16]))
    """
    if not 1 < len(layers) <= MOST:
        raise ValueError(f"linear: a group has 2 or 3 layers, not {len(layers)}; call linear for each.")
    prepared: list[Inputs] = []
    if not dispatch.is_compiling() and torch.is_grad_enabled() and x.requires_grad:
        for weight, bias in layers:
            inputs = prepare(x, weight, bias)
            if isinstance(inputs, str):
                break
            x = inputs.x  # cast once for all
            prepared.append(inputs)
    if len(prepared) < len(layers):
        return tuple(linear(x, weight, bias) for weight, bias in layers)
    paths.note("linear", paths.KERNEL)
    flat = [each for layer in prepared for each in layer[1:]]
    outputs: tuple[Tensor, ...] = _eager(x, *flat, *[None] * (3 * MOST - len(flat)))
    return outputs
