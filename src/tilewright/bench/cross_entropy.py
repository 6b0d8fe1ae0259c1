"""cross_entropy against eager PyTorch, torch.compile and Liger: loss and gradient, time and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F

from tilewright.bench.protocol import Ask, Case, Pass, Prepared, build, run_cases
from tilewright.measure.machine import package_version
from tilewright.ops import cross_entropy
from tilewright.ops.cross_entropy.op import cost
from tilewright.plan.cost import Cost

TOKENS = 8192
VOCABULARIES = (32000, 50304, 128256)

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def cases(quick: bool) -> Iterator[Case]:
    """Every case measured."""
    for vocabulary in VOCABULARIES[:1] if quick else VOCABULARIES:
        yield {"dtype": "bf16", "tokens": TOKENS, "vocabulary": vocabulary}


def _plain(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float(), targets)


def _liger(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    from liger_kernel.transformers.functional import liger_cross_entropy

    return liger_cross_entropy(logits, targets)


class _Producer(torch.autograd.Function):
    """Stands for the matmul that made the logits: they are no parameter, and their memory may be taken."""

    @staticmethod
    def forward(ctx: object, logits: torch.Tensor) -> torch.Tensor:
        return logits.new_empty(0).set_(logits)  # type: ignore[call-overload]

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient


def prepare(case: Case) -> Prepared:
    """Loss and gradient by each implementation. Each has logits of its own, which those in place leave as gradients."""
    losses: dict[str, Loss] = {"tilewright": cross_entropy}
    losses["tilewright-inplace"] = lambda logits, targets: cross_entropy(logits, targets, inplace=True)
    losses["eager"] = _plain
    losses["compile"] = torch.compile(_plain, dynamic=False)
    if package_version("liger-kernel") is not None:
        losses["liger"] = _liger

    def make(loss: Loss, inplace: bool) -> dict[str, Pass]:
        logits = torch.randn(case["tokens"], case["vocabulary"], device="cuda", dtype=torch.bfloat16)
        targets = torch.randint(case["vocabulary"], (case["tokens"],), device="cuda")

        def both() -> object:
            leaf = logits.detach().requires_grad_()
            made = _Producer.apply(leaf) if inplace else leaf
            return torch.autograd.grad(loss(made, targets), leaf)

        return {"forward_backward": both}

    return build({name: partial(make, loss, name in ("tilewright-inplace", "liger")) for name, loss in losses.items()})


def _limits(case: Case) -> dict[str, Cost]:
    return {"forward_backward": cost(case["tokens"], case["vocabulary"])}


def run(ask: Ask) -> Case:
    """Measure every case."""
    return run_cases(
        "cross_entropy", cases(ask.quick), prepare, _limits, lambda case: f"V={case['vocabulary']}",
        peers=("liger-kernel",), ask=ask, from_graph=lambda case, step: False, with_memory=True,
    )  # fmt: skip
