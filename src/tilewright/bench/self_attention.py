"""self_attention on small layers, against eager PyTorch and torch.compile: what a caller waits, on a GPU or on a CPU.

The grid is one on which a layer is bound by its host: batch 16, 8 heads, sequences of 10 to 30 tokens, widths of 64 to
1024, float32. `eager` is matmul and softmax as a tutorial has them, `sdpa` PyTorch's fused attention between two linear
layers, `compile` that under torch.compile, on a GPU with mode="reduce-overhead"; `capture` is `SelfAttention.capture`.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from tilewright.bench.protocol import Ask, Case, Pass, build
from tilewright.measure.clock import interleaved_wall_time
from tilewright.measure.machine import describe
from tilewright.measure.results import SCHEMA
from tilewright.nn.self_attention import SelfAttention
from tilewright.ops.self_attention.op import reference, self_attention

BATCH, HEADS = 16, 8
SEQUENCES, WIDTHS = (10, 20, 30), (64, 128, 256, 512, 1024)
_ROUND_SECONDS = 0.02  # of one implementation, at least

Tensor = torch.Tensor


def eager(
    x: Tensor, qkv_weight: Tensor, qkv_bias: Tensor, out_weight: Tensor, out_bias: Tensor, heads: int
) -> Tensor:  # fmt: skip
    """The layer as a tutorial writes it."""
    batch, sequence, width = x.shape
    packed = F.linear(x, qkv_weight, qkv_bias).view(batch, sequence, 3, heads, width // heads)
    q, k, v = packed.permute(2, 0, 3, 1, 4)
    weights = (q @ k.transpose(-1, -2) * (width // heads) ** -0.5).softmax(-1)
    return F.linear((weights @ v).transpose(1, 2).reshape(batch, sequence, width), out_weight, out_bias)


def cases(quick: bool) -> Iterator[Case]:
    """Every case measured."""
    for width in WIDTHS[:1] if quick else WIDTHS:
        for sequence in SEQUENCES:
            yield {"dtype": "fp32", "batch": BATCH, "heads": HEADS, "sequence": sequence, "width": width}


def prepare(case: Case, device: str) -> tuple[dict[str, dict[str, Pass]], dict[str, Any]]:
    """The steps of each implementation, and the errors of those that failed."""
    torch.manual_seed(0)
    layer = SelfAttention(case["width"], case["heads"], device=device)
    x = torch.randn(case["batch"], case["sequence"], case["width"], device=device, requires_grad=True)
    upstream = torch.randn_like(x)
    inputs = [x, layer.qkv.weight, layer.qkv.bias, layer.out.weight, layer.out.bias]
    functions: dict[str, Callable[..., Tensor]] = {"tilewright": self_attention, "eager": eager, "sdpa": reference}
    mode = "reduce-overhead" if device == "cuda" else "default"
    functions["compile"] = torch.compile(reference, dynamic=False, mode=mode)

    def passes(run: Callable[[], Tensor], forward: Callable[[], Tensor]) -> dict[str, Pass]:
        return {"forward": forward, "forward_backward": lambda: torch.autograd.grad(run(), inputs, upstream)}

    def make(function: Callable[..., Tensor]) -> dict[str, Pass]:
        run = partial(function, *inputs, case["heads"])
        return passes(run, torch.no_grad()(run))

    def capture() -> dict[str, Pass]:
        with torch.no_grad():
            forward = layer.capture(x)
        return passes(partial(layer.capture(x), x), torch.no_grad()(partial(forward, x)))

    makers = {name: partial(make, function) for name, function in functions.items()}
    return build(makers | ({"capture": capture} if device == "cuda" else {}))


def run(ask: Ask) -> Case:
    """Measure every case, on the GPU if there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    part = {"only": ask.only} if ask.only else {}
    result: Case = {"schema": SCHEMA, "benchmark": "self_attention", **part, "machine": describe(), "cases": []}
    if device == "cpu":
        result["machine"] |= {"cpu": _cpu_name(), "threads": torch.get_num_threads(), "load": os.getloadavg()[0]}
    for case in ask.chosen(cases(ask.quick), _label):
        torch.compiler.reset()
        steps, failed = prepare(case, device)
        measured = dict(case)
        for step, functions in steps.items():
            slowest = max(_seconds(function) for function in functions.values())
            calls = max(1, min(200, round(_ROUND_SECONDS / slowest)))
            timings = interleaved_wall_time(functions, calls=calls)
            measured[step] = {"implementations": {name: each.as_dict() for name, each in timings.items()} | failed}
        result["cases"].append(measured)
        ask.progress(_line(measured, list(steps)))
        ask.save(result)
    return result


def _seconds(function: Pass) -> float:
    function()
    began = time.perf_counter()
    function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _label(case: Case) -> str:
    return f"sequence {case['sequence']}, width {case['width']}"


def _line(case: Case, steps: list[str]) -> str:
    parts = [_label(case)]
    for step in steps:
        timed = {name: each for name, each in case[step]["implementations"].items() if "median" in each}
        if "tilewright" not in timed:
            parts.append(f"{step} failed")
            continue
        ours = timed.pop("tilewright")["median"]
        peers = " ".join(f"{name} {each['median'] / ours:.2f}x" for name, each in timed.items())
        parts.append(f"{step} {ours * 1e6:.0f} us ({peers})")
    return " | ".join(parts)
