"""Large matmuls by the quickest of cuBLASLt's algorithms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.ops import linear
from tilewright.optimize import graph as g
from tilewright.optimize.rule import Candidate, Choice, Declined, Rule, View

_LEAST = 20e9  # FLOPs from which on `ops.linear` searches for an algorithm


def _find(view: View) -> Iterator[Candidate | Declined]:
    for node in view.graph.nodes:
        if not g.calls(node, F.linear, torch._C._nn.linear) or not node.users:
            continue
        given: dict[str, Any] = {**dict(zip(("input", "weight", "bias"), node.args, strict=False)), **node.kwargs}
        x, weight, result = (g.tensor_of(each) for each in (given["input"], given["weight"], node))
        if x is None or weight is None or result is None or result.dtype not in (torch.bfloat16, torch.float16):
            continue
        sizes = [*x.shape[:-1], *weight.shape]
        if not all(isinstance(size, int) for size in sizes) or weight.dim() != 2:
            continue
        flops = 2.0
        for size in sizes:
            flops *= size
        if flops >= _LEAST:
            inputs = (given["input"], given["weight"], given.get("bias"))
            width, has_bias = int(weight.shape[1]), inputs[2] is not None

            def sample(generator: torch.Generator, width: int = width, bias: bool = has_bias) -> list[Tensor | None]:
                shapes = ((2, 3, width), (5, width), (5,) if bias else None)
                drawn = (None if each is None else torch.randn(each, generator=generator) for each in shapes)
                return [None if each is None else each.double() for each in drawn]

            choice = Choice(multiply, inputs, {}, f"{flops / 1e9:.0f} GFLOP")
            yield Candidate(node, (node,), (choice,), sample=sample)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer."""
    return linear(x, weight, bias)


RULE = Rule("linear", "large matmuls by the quickest of cuBLASLt's algorithms", _find)
