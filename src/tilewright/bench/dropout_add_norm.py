"""dropout_add_norm against eager PyTorch, torch.compile and Liger, in one run with the GPU's own ceilings."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from tilewright.bench.protocol import Ask, Pass, Prepared, build, forward_backward, run_cases, sentence
from tilewright.measure.clock import interleaved_graph_time, interleaved_wall_time
from tilewright.measure.machine import package_version
from tilewright.ops import dropout_add_norm
from tilewright.ops.dropout_add_norm.op import cost
from tilewright.plan.cost import Cost

ROWS = 16384
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CASES = (
    ("bf16", ("layer", "rms"), (768, 1024, 2048, 2560, 4096, 5120, 8192, 12288, 16384)),
    ("fp16", ("layer",), (2048, 8192, 16384)),
    ("fp32", ("layer", "rms"), (768, 4096, 16384)),
    ("bf16", ("layer",), (65536,)),
)

Implementation = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def _plain(x, residual, weight, bias, p, norm):  # type: ignore[no-untyped-def]
    residual = F.dropout(x, p) + residual
    if norm == "rms":
        return F.rms_norm(residual, (x.shape[-1],), weight, 1e-5), residual
    return F.layer_norm(residual, (x.shape[-1],), weight, bias, 1e-5), residual


def _ours(x, residual, weight, bias, p, norm):  # type: ignore[no-untyped-def]
    return dropout_add_norm(x, residual, weight, bias, p=p, norm=norm, prenorm=True)


def _liger(x, residual, weight, bias, p, norm):  # type: ignore[no-untyped-def]
    """Liger's fused add + RMSNorm, or its LayerNorm behind torch's add; dropout is torch's."""
    from liger_kernel.transformers.functional import liger_fused_add_rms_norm, liger_layer_norm

    x = F.dropout(x, p) if p else x
    if norm == "rms":
        return liger_fused_add_rms_norm(x, residual, weight, 1e-5)
    residual = x + residual
    return liger_layer_norm(residual, weight, bias, 1e-5), residual


def _inputs(rows: int, width: int, dtype: torch.dtype, norm: str) -> list[torch.Tensor | None]:
    x, residual = (torch.randn(rows, width, device="cuda", dtype=dtype).requires_grad_() for _ in range(2))
    weight = torch.randn(width, device="cuda", dtype=dtype).requires_grad_()
    bias = torch.randn(width, device="cuda", dtype=dtype).requires_grad_() if norm == "layer" else None
    return [x, residual, weight, bias]


def cases(quick: bool) -> Iterator[dict[str, Any]]:
    """Every case measured."""
    for dtype, norms, widths in (("bf16", ("layer",), (2048, 8192)),) if quick else CASES:
        for norm in norms:
            for p in (0.1, 0.0):
                for width in widths:
                    yield {"dtype": dtype, "norm": norm, "p": p, "rows": ROWS, "width": width}


def run(ask: Ask) -> dict[str, Any]:
    """Measure every case, then the small one."""
    result = run_cases(
        "dropout_add_norm", cases(ask.quick), prepare, _limits, _label, peers=("liger-kernel",), ask=ask,
        from_graph=lambda case, step: step == "backward" or case["p"] == 0.0,
    )  # fmt: skip
    # In a process of its own, as a user's: where hundreds of kernels were compiled, a host takes half as long again.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        result["small"] = process.submit(_small).result()
    ask.progress(_small_line(result["small"]))
    ask.save(result)
    return result


def _implementations(case: dict[str, Any]) -> dict[str, Implementation]:
    """Ours and what a user would pick instead, by name."""
    functions: dict[str, Implementation] = {"tilewright": _ours, "eager": _plain}
    functions["compile"] = torch.compile(_plain, dynamic=False)
    if case["dtype"] == "bf16" and case["norm"] == "layer" and 4096 <= case["width"] <= 12288:
        functions["compile-max"] = torch.compile(_plain, dynamic=False, mode="max-autotune-no-cudagraphs")
    if package_version("liger-kernel") is not None:
        functions["liger"] = _liger
    return functions


def prepare(case: dict[str, Any]) -> Prepared:
    """Forward and backward of each implementation, on the same inputs."""
    inputs = _inputs(case["rows"], case["width"], DTYPES[case["dtype"]], case["norm"])

    def make(function: Implementation) -> dict[str, Pass]:
        return forward_backward(lambda *tensors: function(*tensors, case["p"], case["norm"]), inputs)

    return build({name: partial(make, function) for name, function in _implementations(case).items()})


def _limits(case: dict[str, Any]) -> dict[str, Cost]:
    size = DTYPES[case["dtype"]].itemsize
    return {
        step: cost(
            case["rows"], case["width"], x_bytes=size, residual_bytes=size, backward=step == "backward",
            dropout=case["p"] > 0.0,
        )
        for step in ("forward", "backward")
    }  # fmt: skip


def _label(case: dict[str, Any]) -> str:
    return f"{case['dtype']} {case['norm']:5} p={case['p']} {case['width']:>5}"


def _small() -> dict[str, Any]:
    """64 x 768: where the host rules. Wall time of forward + backward, and device time replayed from a graph."""
    with torch.cuda.stream(torch.cuda.Stream()):
        return _small_case(64, 768)


def _small_case(rows: int, width: int) -> dict[str, Any]:
    inputs = _inputs(rows, width, torch.bfloat16, "layer")
    leaves = [t for t in inputs if t is not None]
    gradients = [torch.randn(rows, width, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    small: dict[str, Any] = {"dtype": "bf16", "norm": "layer", "rows": rows, "width": width}
    for p in (0.1, 0.0):

        def both(function: Implementation, p: float = p) -> Callable[[], object]:
            return lambda: torch.autograd.grad(function(*inputs, p, "layer"), leaves, gradients)

        def forward(function: Implementation, p: float = p) -> Callable[[], object]:
            return lambda: function(*inputs, p, "layer")

        functions = {"tilewright": _ours, "eager": _plain}
        wall_time = partial(interleaved_wall_time, rounds=2000, calls=5)  # a host's speed drifts: many short turns
        small[f"p={p}"] = {
            "wall_forward": _times(wall_time({n: forward(f) for n, f in functions.items()})),
            "wall_forward_backward": _times(wall_time({n: both(f) for n, f in functions.items()})),
            "device_forward_backward": _graph_times({n: both(f) for n, f in functions.items()}),
        }
    return small


def _graph_times(functions: dict[str, Callable[[], object]]) -> dict[str, Any]:
    timings, errors = interleaved_graph_time(functions)
    return {**_times(timings), **{name: {"error": sentence(error)} for name, error in errors.items()}}


def _times(timings: dict[str, Any]) -> dict[str, Any]:
    return {name: timing.as_dict() for name, timing in timings.items()}


def _small_line(small: dict[str, Any]) -> str:
    wall = small["p=0.1"]["wall_forward_backward"]
    times = ", ".join(f"{name} {timing['median'] * 1e6:.0f} us" for name, timing in wall.items())
    return f"64 x 768 p=0.1, forward + backward, wall time: {times}"
