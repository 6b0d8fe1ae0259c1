"""attention against PyTorch's backends, in one run with the GPU's own ceilings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilewright.bench.protocol import Ask, Case, Prepared, build, forward_backward, run_cases
from tilewright.ops.attention.op import attention, cost, reference
from tilewright.plan.cost import Cost

HEAD_DIM = 64
SIZES = ((32, 2048, 12), (32, 1024, 12), (16, 2048, 16), (8, 4096, 16), (2, 16384, 16))  # batch, sequence, heads
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


def cases(quick: bool) -> Iterator[Case]:
    """Every case measured."""
    for batch, sequence, heads in SIZES[:1] if quick else SIZES:
        yield {"dtype": "bf16", "batch": batch, "sequence": sequence, "heads": heads, "head_dim": HEAD_DIM}


def prepare(case: Case) -> Prepared:
    """Forward and backward of each implementation, on the same inputs, which lie as one matmul leaves them."""
    batch, sequence, heads, head_dim = (case[name] for name in ("batch", "sequence", "heads", "head_dim"))
    packed = torch.randn(batch, sequence, 3, heads, head_dim, device="cuda", dtype=torch.bfloat16)
    inputs = [part.requires_grad_() for part in packed.unbind(2)]

    def only(backend: SDPBackend, *tensors: Any) -> Any:
        with sdpa_kernel(backend):
            return reference(*tensors)

    functions: dict[str, Callable[..., Any]] = {"tilewright": attention}
    functions |= {name: partial(only, backend) for name, backend in BACKENDS.items()}
    return build({name: partial(forward_backward, function, inputs) for name, function in functions.items()})


def _limits(case: Case) -> dict[str, Cost]:
    sizes = case["batch"], case["sequence"], case["heads"], case["heads"], case["head_dim"]
    return {step: cost(*sizes, backward=step == "backward") for step in ("forward", "backward")}


def _label(case: Case) -> str:
    return f"{case['batch']} x {case['sequence']} tokens, {case['heads']} heads of {case['head_dim']}"


def run(ask: Ask) -> Case:
    """Measure every case."""
    return run_cases("attention", cases(ask.quick), prepare, _limits, _label, peers=("torch",), ask=ask)
