"""linear_cross_entropy against eager PyTorch, torch.compile, Liger and cut-cross-entropy: loss and all gradients, time
and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F

from tilewright.bench.protocol import Ask, Case, Pass, Prepared, build, run_cases
from tilewright.measure.machine import package_version
from tilewright.ops import linear_cross_entropy
from tilewright.ops.linear_cross_entropy.op import cost
from tilewright.plan.cost import Cost

TOKENS = 8192
SIZES = ((2048, 50304), (4096, 128256))

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def cases(quick: bool) -> Iterator[Case]:
    """Every case measured."""
    for width, vocabulary in SIZES[:1] if quick else SIZES:
        yield {"dtype": "bf16", "tokens": TOKENS, "width": width, "vocabulary": vocabulary}


def _plain(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(x, weight).float(), targets)


def _liger(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return liger_fused_linear_cross_entropy(x, weight, targets)


def _cut(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    from cut_cross_entropy import linear_cross_entropy as cut_cross_entropy

    return cut_cross_entropy(x, weight, targets)


def _ours(memory: int | None, sum_dtype: torch.dtype | None = None) -> Loss:
    return lambda x, weight, targets: linear_cross_entropy(x, weight, targets, memory=memory, sum_dtype=sum_dtype)


def prepare(case: Case) -> Prepared:
    """Loss and gradients by each implementation, on the same inputs."""
    tokens, width, vocabulary = case["tokens"], case["width"], case["vocabulary"]
    x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(vocabulary, width, device="cuda", dtype=torch.bfloat16).mul_(width**-0.5).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), device="cuda")
    quarter = tokens * vocabulary * 2 // 4 - 2**21  # of the logits; what the allocator rounds up by is inside
    losses: dict[str, Loss] = {
        "tilewright": _ours(None), "tilewright-quarter": _ours(quarter),
        "tilewright-64MB": _ours(64 * 10**6), "tilewright-float32": _ours(None, torch.float32), "eager": _plain,
        "compile": torch.compile(_plain, dynamic=False),
    }  # fmt: skip
    for name, package, loss in (("liger", "liger-kernel", _liger), ("cut", "cut-cross-entropy", _cut)):
        if package_version(package) is not None:
            losses[name] = loss

    def make(loss: Loss) -> dict[str, Pass]:
        return {"forward_backward": lambda: torch.autograd.grad(loss(x, weight, targets), (x, weight))}

    return build({name: partial(make, loss) for name, loss in losses.items()})


def _limits(case: Case) -> dict[str, Cost]:
    return {"forward_backward": cost(case["tokens"], case["vocabulary"], case["width"])}


def _label(case: Case) -> str:
    return f"H={case['width']} V={case['vocabulary']}"


def run(ask: Ask) -> Case:
    """Measure every case."""
    return run_cases(
        "linear_cross_entropy", cases(ask.quick), prepare, _limits, _label,
        peers=("liger-kernel", "cut-cross-entropy"), ask=ask, from_graph=lambda case, step: False, with_memory=True,
    )  # fmt: skip
