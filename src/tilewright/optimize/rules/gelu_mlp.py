"""The MLP of a GELU: two matmuls whose GELU makes no pass of its own over memory."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from torch import Tensor

from tilewright import ops
from tilewright.optimize.rule import Candidate, Choice, Declined, Rule, View, draw
from tilewright.optimize.rules.gelu import KINDS, activations
from tilewright.optimize.rules.linear import Layer, read


def _find(view: View) -> Iterator[Candidate | Declined]:
    if not view.has_gradients:
        return  # the kernels pay where there is a backward
    for x, result in activations(view):
        up, down = read(x), read(next(iter(result.users)))
        if up is None or down is None or len(result.users) > 1 or down.inputs[0] is not result:
            continue
        inputs = (*up.inputs, *down.inputs[1:])
        detail = f"{(up.flops + down.flops) / 1e9:.0f} GFLOP"
        kinds = [kind for kind in KINDS if kind != "silu"]
        choices = tuple(Choice(gelu_mlp, inputs, {"kind": kind}, f"{kind}, {detail}") for kind in kinds)
        sample = functools.partial(draw, shapes=_shapes(up, down))
        yield Candidate(down.node, (down.node,), choices, sample=sample, is_writable=True, is_guess=True)


def _shapes(up: Layer, down: Layer) -> list[tuple[int, ...] | None]:
    """The probe's: few features between the layers, and out."""
    inner, out = 7, 5
    biases = [(size,) if layer.inputs[2] is not None else None for layer, size in ((up, inner), (down, out))]
    return [(2, 3, up.width), (inner, up.width), biases[0], (out, inner), biases[1]]


def gelu_mlp(
    x: Tensor, up: Tensor, up_bias: Tensor | None, down: Tensor, down_bias: Tensor | None, *, kind: str
) -> Tensor:
    """A linear layer, a GELU and a linear layer."""
    return ops.gelu_mlp(x, up, up_bias, down, down_bias, approximate=KINDS[kind])


RULE = Rule("gelu_mlp", "GELU inside of the matmuls around it", _find)
