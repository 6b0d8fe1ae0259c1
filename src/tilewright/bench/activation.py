"""SwiGLU, GEGLU and GELU with a bias against eager PyTorch, torch.compile and Liger, with the GPU's own ceilings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F

from tilewright.bench.protocol import Ask, Case, Pass, Prepared, build, forward_backward, run_cases
from tilewright.measure.machine import package_version
from tilewright.ops.activation.op import bias_gelu, cost, geglu, swiglu
from tilewright.plan.cost import Cost

SIZES = ((16384, 8192), (8192, 14336), (16384, 11008))
# Function, form and approximation of the GELU.
VARIANTS = (
    ("swiglu", "separate", None),
    ("swiglu", "packed", None),
    ("geglu", "separate", "tanh"),
    ("geglu", "separate", "none"),
    ("bias_gelu", "plain", "tanh"),
    ("bias_gelu", "plain", "none"),
)

Implementation = Callable[..., torch.Tensor]


def cases(quick: bool) -> Iterator[Case]:
    """Every case measured."""
    for rows, width in SIZES[:1] if quick else SIZES:
        for function, form, approximate in VARIANTS:
            yield {
                "dtype": "bf16", "function": function, "form": form, "approximate": approximate, "rows": rows,
                "width": width,
            }  # fmt: skip


def _inputs(case: Case) -> list[torch.Tensor]:
    """(gate, up), a packed (gate,) or (x, bias)."""
    rows, width = case["rows"], case["width"]
    shapes: dict[str, tuple[tuple[int, ...], ...]] = {
        "separate": ((rows, width), (rows, width)),
        "packed": ((rows, 2 * width),),
        "plain": ((rows, width), (width,)),
    }
    return [torch.randn(s, device="cuda", dtype=torch.bfloat16).requires_grad_() for s in shapes[case["form"]]]


def _ours(case: Case) -> Implementation:
    if case["function"] == "swiglu":
        return swiglu
    function = geglu if case["function"] == "geglu" else bias_gelu
    return lambda *inputs: function(*inputs, approximate=case["approximate"])


def _plain(case: Case) -> Implementation:
    approximate = case["approximate"]
    if case["function"] == "bias_gelu":
        return lambda x, bias: F.gelu(x + bias, approximate=approximate)
    if case["function"] == "geglu":
        return lambda gate, up: F.gelu(gate, approximate=approximate) * up
    if case["form"] == "separate":
        return lambda gate, up: F.silu(gate) * up

    def packed(both: torch.Tensor) -> torch.Tensor:
        gate, up = both.chunk(2, -1)
        return F.silu(gate) * up

    return packed


def _liger(case: Case) -> Implementation:
    from liger_kernel.ops.geglu import LigerGELUMulFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return (LigerSiLUMulFunction if case["function"] == "swiglu" else LigerGELUMulFunction).apply


def prepare(case: Case) -> Prepared:
    """Forward and backward of each implementation, each on inputs of its own: Liger's backward overwrites them."""
    functions: dict[str, Callable[[Case], Implementation]] = {"tilewright": _ours, "eager": _plain}
    functions["compile"] = lambda case: torch.compile(_plain(case), dynamic=False)
    # Liger has the separate forms, and of the GELU that by tanh.
    if package_version("liger-kernel") is not None and case["form"] == "separate" and case["approximate"] != "none":
        functions["liger"] = _liger

    def make(function: Callable[[Case], Implementation]) -> dict[str, Pass]:
        return forward_backward(function(case), list(_inputs(case)))

    return build({name: partial(make, function) for name, function in functions.items()})


def _limits(case: Case) -> dict[str, Cost]:
    return {
        step: cost(case["rows"], case["width"], gated=case["form"] != "plain", backward=step == "backward")
        for step in ("forward", "backward")
    }


def _label(case: Case) -> str:
    name = " ".join(filter(None, (case["function"], case["form"], case["approximate"])))
    return f"{name:22} {case['rows']} x {case['width']}"


def run(ask: Ask) -> Case:
    """Measure every case."""
    return run_cases("activation", cases(ask.quick), prepare, _limits, _label, peers=("liger-kernel",), ask=ask)
