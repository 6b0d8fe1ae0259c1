"""gelu_mlp against eager PyTorch and torch.compile, in one run with the GPU's own ceilings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from tilewright.bench.protocol import Ask, Case, Pass, Prepared, build, forward_backward, run_cases
from tilewright.ops.gelu_mlp.op import cost, fused_gelu_mlp, gelu_mlp, reference
from tilewright.plan.cost import Cost

# Tokens and width of GPTs from 125m to 7b; the dimension between is four times as wide.
SIZES = ((65536, 768), (32768, 1024), (32768, 2048), (16384, 4096))


def cases(quick: bool) -> Iterator[Case]:
    """Every case measured."""
    for tokens, width in SIZES[:1] if quick else SIZES:
        yield {"dtype": "bf16", "tokens": tokens, "width": width, "inner": 4 * width}
    if not quick:
        tokens, width = SIZES[0]
        yield {"dtype": "bf16", "approximate": "none", "tokens": tokens, "width": width, "inner": 4 * width}


def prepare(case: Case) -> Prepared:
    """Forward and backward of each implementation, on the same inputs."""
    tokens, width, inner = case["tokens"], case["width"], case["inner"]
    shapes = ((tokens, width), (inner, width), (inner,), (width, inner), (width,))
    inputs = [
        (torch.randn(shape, device="cuda") * (shape[-1] ** -0.5 if i % 2 else 1.0)).bfloat16().requires_grad_()
        for i, shape in enumerate(shapes)
    ]
    approximate = case.get("approximate", "tanh")
    plain = partial(reference, approximate=approximate)
    functions: dict[str, Callable[..., Any]] = {
        "tilewright": partial(gelu_mlp, approximate=approximate), "eager": plain,
        "tilewright-lean": partial(fused_gelu_mlp, approximate=approximate, lean=True),
        "compile": torch.compile(plain, dynamic=False),
    }  # fmt: skip

    def make(function: Callable[..., Any]) -> dict[str, Pass]:
        for _ in range(4):  # matmuls that come again choose their algorithm
            torch.autograd.grad(function(*inputs).sum(), inputs)
        return forward_backward(function, list(inputs))

    return build({name: partial(make, function) for name, function in functions.items()})


def _limits(case: Case) -> dict[str, Cost]:
    return {
        step: cost(case["tokens"], case["width"], case["inner"], backward=step == "backward")
        for step in ("forward", "backward")
    }


def _label(case: Case) -> str:
    return f"{case['tokens']} tokens, {case['width']} wide, {'erf' if 'approximate' in case else 'tanh'}"


def run(ask: Ask) -> Case:
    """Measure every case."""
    return run_cases("gelu_mlp", cases(ask.quick), prepare, _limits, _label, peers=("torch",), ask=ask)
