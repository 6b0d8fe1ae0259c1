"""Large matmuls by the quickest of cuBLASLt's algorithms, those of one input as a group.

The gradients of an input that several layers read are then summed within their matmuls.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from tilewright.ops import linear, linear_group
from tilewright.ops.linear.group import MOST
from tilewright.optimize import graph as g
from tilewright.optimize.rule import Candidate, Choice, Declined, Rule, View, draw

_LEAST = 20e9  # FLOPs from which on `ops.linear` searches for an algorithm


class Layer(NamedTuple):
    """A matmul that is large enough."""

    node: Node
    inputs: tuple[Node, Node, Node | None]  # x, weight, bias
    width: int
    flops: float


def _find(view: View) -> Iterator[Candidate | Declined]:
    layers = [layer for node in view.graph.nodes if (layer := read(node)) is not None]
    readers: dict[Node, list[Layer]] = {}
    for layer in layers:
        readers.setdefault(layer.inputs[0], []).append(layer)
    for together in readers.values():
        if view.has_gradients and len(together) > 1:
            for start in range(0, len(together), MOST):
                if len(group := together[start : start + MOST]) > 1:
                    yield _nominate(group, is_guess=True)
    for layer in layers:
        yield _nominate([layer])


def read(node: Node) -> Layer | None:
    """Return the layer that a node is; None where it is none, or too small."""
    if not g.calls(node, F.linear, torch._C._nn.linear) or not node.users:
        return None
    given: dict[str, Any] = {**dict(zip(("input", "weight", "bias"), node.args, strict=False)), **node.kwargs}
    x, weight, result = (g.tensor_of(each) for each in (given["input"], given["weight"], node))
    if x is None or weight is None or result is None or result.dtype not in (torch.bfloat16, torch.float16):
        return None
    sizes = [*x.shape[:-1], *weight.shape]
    if not all(isinstance(size, int) for size in sizes) or weight.dim() != 2:
        return None
    flops = 2.0
    for size in sizes:
        flops *= size
    if flops < _LEAST:
        return None
    return Layer(node, (given["input"], given["weight"], given.get("bias")), int(weight.shape[1]), flops)


def _nominate(layers: list[Layer], is_guess: bool = False) -> Candidate:
    """A layer, or the layers of one input."""
    x = layers[0].inputs[0]
    parameters = [each for layer in layers for each in layer.inputs[1:]]
    outputs = tuple(layer.node for layer in layers)
    total = sum(layer.flops for layer in layers) / 1e9
    detail = f"{total:.0f} GFLOP" + (f", {len(layers)} of one input" if len(layers) > 1 else "")
    choice = Choice(multiply if len(layers) == 1 else multiply_group, (x, *parameters), {}, detail)

    def sample(generator: torch.Generator) -> list[Tensor | None]:
        width, shapes = layers[0].width, list[tuple[int, ...] | None]([(2, 3, layers[0].width)])
        for features, layer in enumerate(layers, 5):
            shapes += [(features, width), None if layer.inputs[2] is None else (features,)]
        return draw(generator, shapes)

    return Candidate(outputs[0], outputs, (choice,), sample=sample, is_writable=True, is_guess=is_guess)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer."""
    return linear(x, weight, bias)


def multiply_group(x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, ...]:
    """Linear layers of one input; weight and bias of each."""
    layers = [(weight, bias) for weight, bias in zip(parameters[::2], parameters[1::2], strict=True)]
    return linear_group(x, layers)  # type: ignore[arg-type]


RULE = Rule(
    "linear", "large matmuls by the quickest of cuBLASLt's algorithms; those of one input sum its gradient", _find
)
