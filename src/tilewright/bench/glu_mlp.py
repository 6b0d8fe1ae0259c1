"""glu_mlp against its parts, eager PyTorch and torch.compile, in one run with the GPU's own ceilings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from tilewright.bench.protocol import Ask, Case, Pass, Prepared, build, forward_backward, run_cases
from tilewright.ops.glu_mlp import op
from tilewright.ops.glu_mlp.op import cost, fused_glu_mlp, glu_mlp, reference
from tilewright.plan.cost import Cost

# Tokens, width and inner width of Llama-3.2-1B, Qwen3-0.6B, Gemma3-1B and Llama-3.1-8B.
SIZES = (
    (16384, 2048, 8192, "silu"), (16384, 1024, 3072, "silu"), (16384, 1152, 6912, "gelu_tanh"),
    (8192, 4096, 14336, "silu"),
)  # fmt: skip


def cases(quick: bool) -> Iterator[Case]:
    """Every case measured."""
    for tokens, width, inner, activation in SIZES[:1] if quick else SIZES:
        yield {"dtype": "bf16", "tokens": tokens, "width": width, "inner": inner, "activation": activation}


def prepare(case: Case) -> Prepared:
    """Forward and backward of each implementation, on the same inputs."""
    tokens, width, inner, activation = case["tokens"], case["width"], case["inner"], case["activation"]
    shapes = ((tokens, width), (inner, width), (inner, width), (width, inner))
    inputs = [
        (torch.randn(shape, device="cuda") * (shape[-1] ** -0.5 if i else 1.0)).bfloat16().requires_grad_()
        for i, shape in enumerate(shapes)
    ]
    plain = partial(reference, activation=activation)
    functions: dict[str, Callable[..., Any]] = {
        "tilewright": partial(_fused, activation=activation),
        "tilewright-parts": partial(_parts, activation=activation),
        "eager": plain, "compile": torch.compile(plain, dynamic=False),
    }  # fmt: skip

    def make(function: Callable[..., Any]) -> dict[str, Pass]:
        for _ in range(4):  # matmuls that come again choose their algorithm
            torch.autograd.grad(function(*inputs).sum(), inputs)
        return forward_backward(function, list(inputs))

    return build({name: partial(make, function) for name, function in functions.items()})


def _fused(*inputs: torch.Tensor, activation: str) -> torch.Tensor:
    """Run the kernels, whether or not they are on."""
    was, op.IS_ON = op.IS_ON, True
    try:
        y = fused_glu_mlp(*inputs, activation=activation)
    finally:
        op.IS_ON = was
    if y is None:
        raise RuntimeError("glu_mlp: the kernels do not take this case; see tilewright.ops.explain().")
    return y


def _parts(*inputs: torch.Tensor, activation: str) -> torch.Tensor:
    """Run the separate ops that the fused MLP replaces."""
    was, op.IS_ON = op.IS_ON, False
    try:
        return glu_mlp(*inputs, activation=activation)
    finally:
        op.IS_ON = was


def _limits(case: Case) -> dict[str, Cost]:
    sizes = case["tokens"], case["width"], case["inner"]
    return {step: cost(*sizes, backward=step == "backward") for step in ("forward", "backward")}


def _label(case: Case) -> str:
    return f"{case['tokens']} tokens, {case['width']} x {case['inner']}, {case['activation']}"


def run(ask: Ask) -> Case:
    """Measure every case."""
    return run_cases("glu_mlp", cases(ask.quick), prepare, _limits, _label, peers=("torch",), ask=ask)
