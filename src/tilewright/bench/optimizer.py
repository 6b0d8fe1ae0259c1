"""A step of the fused AdamW against torch's, torch.compile's, torchao's and bitsandbytes', over a GPT's tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from tilewright.bench.drawing import DTYPES
from tilewright.bench.protocol import Ask, Case, Pass, Prepared, build, run_cases
from tilewright.measure.machine import package_version
from tilewright.optim import FusedOptimizer
from tilewright.optim.update import cost
from tilewright.plan.cost import Cost

SIZES = {"125m": (768, 12), "1b": (2048, 24)}  # width and layers of GPTs
VOCABULARY, POSITIONS = 50304, 2048
# Parameters, and states. bfloat16 parameters are rounded by chance; those of torch's own to nearest.
KINDS = (("fp32", "fp32"), ("bf16", "bf16"), ("bf16", "int8"))
NUMBERS: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.1}


def cases(quick: bool) -> Iterator[Case]:
    """Every case measured."""
    for size in list(SIZES)[:1] if quick else SIZES:
        for parameters, states in KINDS:
            yield {"size": size, "parameters": parameters, "states": states}


def _shapes(width: int, layers: int) -> list[tuple[int, ...]]:
    """Return the shapes of all tensors of a GPT."""
    matrices = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    biases = [(rows,) for rows, _ in matrices]
    return [(VOCABULARY, width), (POSITIONS, width), *(matrices + biases + [(width,)] * 4) * layers, (width,), (width,)]


def prepare(case: Case) -> Prepared:
    """A step of each implementation, on tensors of its own."""
    shapes, dtype = _shapes(*SIZES[case["size"]]), DTYPES[case["parameters"]]
    states = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}[case["states"]]
    rounding = "stochastic" if dtype == torch.bfloat16 else "nearest"

    def ours(parameters: list[torch.Tensor]) -> Any:
        return FusedOptimizer(parameters, rule="adamw", dtype=states, rounding=rounding, **NUMBERS)

    def torchao(parameters: list[torch.Tensor]) -> Any:
        from torchao.optim import AdamW8bit

        return AdamW8bit(parameters, bf16_stochastic_round=True, **NUMBERS)

    def bitsandbytes(parameters: list[torch.Tensor]) -> Any:
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit(parameters, **NUMBERS)

    makers: dict[str, Callable[[list[torch.Tensor]], Any]] = {"tilewright": ours}
    if case["states"] != "int8":
        makers["eager"] = partial(torch.optim.AdamW, foreach=True, capturable=True, **NUMBERS)
        makers["fused"] = partial(torch.optim.AdamW, fused=True, capturable=True, **NUMBERS)
        makers["compile"] = makers["eager"]
    else:
        for name, peer in (("torchao", torchao), ("bitsandbytes", bitsandbytes)):
            if package_version(name) is not None:
                makers[name] = peer

    def make(name: str) -> dict[str, Pass]:
        parameters = [torch.randn(shape, device="cuda", dtype=dtype).requires_grad_() for shape in shapes]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        step = makers[name](parameters).step
        return {"step": torch.compile(step) if name == "compile" else step}

    return build({name: partial(make, name) for name in makers})


def _limits(case: Case) -> dict[str, Cost]:
    sizes = [torch.Size(shape).numel() for shape in _shapes(*SIZES[case["size"]])]
    parameter_bytes, state_bytes = (4 if kind == "fp32" else 2 if kind == "bf16" else 1
                                    for kind in (case["parameters"], case["states"]))  # fmt: skip
    return {"step": cost(sum(sizes), "adamw", parameter_bytes=parameter_bytes, state_bytes=state_bytes)}


def _label(case: Case) -> str:
    return f"{case['size']}, {case['parameters']} parameters, {case['states']} states"


def run(ask: Ask) -> Case:
    """Measure every case."""
    peers = ("torch", "torchao", "bitsandbytes")
    return run_cases("optimizer", cases(ask.quick), prepare, _limits, _label, peers=peers, ask=ask)
