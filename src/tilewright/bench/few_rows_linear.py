"""few_rows_linear against cuBLAS and torch.compile, in one run with the GPU's own ceilings.

"tilewright-pdl" has each call begin while the one before it in the graph ends (`runtime/pdl.py`), as decoding has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from typing import Any

import torch

from tilewright.bench.protocol import Ask, Case, Pass, Prepared, build, run_cases
from tilewright.ops.few_rows_linear.op import cost, few_rows_linear, reference
from tilewright.plan.cost import Cost
from tilewright.runtime import pdl

# Features in and out: the layers of Llamas of 1 and 8 billion parameters.
SIZES = (
    (2048, 3072), (2048, 2048), (2048, 16384), (8192, 2048), (2048, 128256), (4096, 6144), (4096, 4096), (4096, 28672),
    (14336, 4096),
)  # fmt: skip
ROWS = (1, 2, 4)
_FAR = 4 * 10**8  # bytes after which a weight has left L2

Implementation = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def cases(quick: bool) -> Iterator[Case]:
    """Every case measured."""
    for width, out in SIZES[:1] if quick else SIZES:
        for rows in ROWS[:1] if quick else ROWS:
            yield {"dtype": "bf16", "rows": rows, "width": width, "out": out}


def prepare(case: Case) -> Prepared:
    """Each implementation on weights that take turns, so that none of them is in L2."""
    shape = case["out"], case["width"]
    count = max(2, min(64, _FAR // (2 * torch.Size(shape).numel())))
    weights = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    x = torch.randn(case["rows"], case["width"], device="cuda", dtype=torch.bfloat16)
    functions: dict[str, Any] = {
        "tilewright": few_rows_linear, "eager": reference, "compile": torch.compile(reference, dynamic=False)
    }  # fmt: skip
    if not pdl.why_not(x.device):
        functions["tilewright-pdl"] = partial(_in_chain, pdl.Chain())
    return build({name: partial(_pass, function, x, weights) for name, function in functions.items()})


def _pass(function: Implementation, x: torch.Tensor, weights: list[torch.Tensor]) -> dict[str, Pass]:
    turns = cycle(weights)
    return {"forward": lambda: function(x, next(turns))}


def _in_chain(chain: pdl.Chain, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    with pdl.chaining(chain):
        return few_rows_linear(x, weight)


def _limits(case: Case) -> dict[str, Cost]:
    return {"forward": cost(case["rows"], case["width"], case["out"])}


def _label(case: Case) -> str:
    return f"{case['rows']} rows, {case['width']} to {case['out']}"


def run(ask: Ask) -> Case:
    """Measure every case."""
    return run_cases("few_rows_linear", cases(ask.quick), prepare, _limits, _label, peers=(), ask=ask)
