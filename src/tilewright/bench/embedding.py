"""embedding against eager PyTorch, torch.compile and Liger, in one run with the GPU's own ceilings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from tilewright.bench.drawing import DTYPES
from tilewright.bench.protocol import Ask, Case, Pass, Prepared, build, forward_backward, run_cases
from tilewright.measure.machine import package_version
from tilewright.ops.embedding.op import cost, embedding, reference
from tilewright.plan.cost import Cost

# Batch, sequence, vocabulary and width: GPTs of 125m and 1b, then a model with a large vocabulary.
SIZES = ((32, 2048, 50304, 768), (16, 2048, 50304, 2048), (8, 4096, 128256, 4096))

Implementation = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def cases(quick: bool) -> Iterator[Case]:
    """Every case measured: a table of bfloat16, and one of float32 whose rows are rounded, as under autocast."""
    for batch, sequence, vocabulary, width in SIZES[:1] if quick else SIZES:
        for table in ("bf16", "fp32"):
            yield {
                "table": table, "batch": batch, "sequence": sequence, "vocabulary": vocabulary, "width": width,
            }  # fmt: skip


def prepare(case: Case) -> Prepared:
    """Forward and backward of each implementation, on the same tables and random tokens."""
    vocabulary, width, sequence = case["vocabulary"], case["width"], case["sequence"]
    tokens = torch.randint(vocabulary, (case["batch"], sequence), device="cuda")
    tables = [
        torch.randn(rows, width, device="cuda", dtype=DTYPES[case["table"]]).requires_grad_()
        for rows in (vocabulary, sequence)
    ]

    def ours(weight: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        return embedding(tokens, weight, position, dtype=torch.bfloat16)

    def plain(weight: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        return reference(tokens, weight, position, torch.bfloat16)

    def liger(weight: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        from liger_kernel.ops.experimental.embedding import LigerEmbeddingFunction

        return (LigerEmbeddingFunction.apply(weight, tokens) + position).to(torch.bfloat16)

    functions: dict[str, Implementation] = {"tilewright": ours, "eager": plain}
    functions["compile"] = torch.compile(plain, dynamic=False)
    if package_version("liger-kernel") is not None:
        functions["liger"] = liger

    def make(function: Implementation) -> dict[str, Pass]:
        return forward_backward(function, list(tables))

    return build({name: partial(make, function) for name, function in functions.items()})


def _limits(case: Case) -> dict[str, Cost]:
    tokens, vocabulary = case["batch"] * case["sequence"], case["vocabulary"]
    rows = round(vocabulary * (1 - (1 - 1 / vocabulary) ** tokens))  # that differ, of so many random ones
    return {
        step: cost(
            tokens, vocabulary, case["width"], rows=rows, table_bytes=DTYPES[case["table"]].itemsize, out_bytes=2,
            backward=step == "backward",
        )
        for step in ("forward", "backward")
    }  # fmt: skip


def _label(case: Case) -> str:
    return f"{case['table']} {case['vocabulary']} x {case['width']}, {case['batch']} x {case['sequence']} tokens"


def run(ask: Ask) -> Case:
    """Measure every case."""
    return run_cases("embedding", cases(ask.quick), prepare, _limits, _label, peers=("liger-kernel",), ask=ask)
