"""linear against eager PyTorch and torch.compile, in one run with the GPU's own ceilings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from tilewright.bench.protocol import Ask, Case, Pass, Prepared, build, forward_backward, run_cases
from tilewright.ops.linear.op import cost, linear, reference
from tilewright.plan.cost import Cost

# Tokens, features in and out: queries, keys and values of GPTs from 125m to 7b, then the way back from their MLPs, then
# sizes that are no multiples of 8.
SIZES = (
    (65536, 768, 2304), (32768, 1024, 3072), (32768, 2048, 6144), (16384, 4096, 12288), (65536, 3072, 768),
    (16384, 16384, 4096), (32768, 1023, 3069),
)  # fmt: skip


def cases(quick: bool) -> Iterator[Case]:
    """Every case measured."""
    for tokens, width, out in SIZES[:1] if quick else SIZES:
        yield {"dtype": "bf16", "tokens": tokens, "width": width, "out": out}


def prepare(case: Case) -> Prepared:
    """Forward and backward of each implementation, on the same inputs."""
    tokens, width, out = case["tokens"], case["width"], case["out"]
    inputs = [
        (torch.randn(shape, device="cuda") * scale).bfloat16().requires_grad_()
        for shape, scale in (((tokens, width), 1.0), ((out, width), width**-0.5), ((out,), 1.0))
    ]
    functions: dict[str, Callable[..., Any]] = {"tilewright": linear, "eager": reference}
    functions["compile"] = torch.compile(reference, dynamic=False)
    functions["compile-max"] = torch.compile(reference, dynamic=False, mode="max-autotune-no-cudagraphs")

    def make(function: Callable[..., Any]) -> dict[str, Pass]:
        for _ in range(4):  # matmuls that come again choose their algorithm
            torch.autograd.grad(function(*inputs).sum(), inputs)
        return forward_backward(function, list(inputs))

    return build({name: partial(make, function) for name, function in functions.items()})


def _limits(case: Case) -> dict[str, Cost]:
    return {
        step: cost(case["tokens"], case["width"], case["out"], backward=step == "backward")
        for step in ("forward", "backward")
    }


def _label(case: Case) -> str:
    return f"{case['tokens']} tokens, {case['width']} to {case['out']}"


def run(ask: Ask) -> Case:
    """Measure every case."""
    return run_cases("linear", cases(ask.quick), prepare, _limits, _label, peers=("torch",), ask=ask)
