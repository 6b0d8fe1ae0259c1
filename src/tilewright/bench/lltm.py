"""The cell of docs/write_your_own_kernel.md: a Triton and a CUDA kernel against eager PyTorch and torch.compile."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tilewright.bench.protocol import OURS, Ask, Case, Pass, Prepared, build, forward_backward, run_cases
from tilewright.errors import UserError
from tilewright.measure.clock import interleaved_wall_time
from tilewright.plan.cost import Cost

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# Batch, features, state. The first is the size of PyTorch's tutorial: all of its time is launches.
CELLS = (
    ("fp32", 16, 32, 128), ("bf16", 64, 512, 512), ("bf16", 4096, 256, 256), ("bf16", 16384, 512, 512),
    ("bf16", 16384, 1024, 1024),
)  # fmt: skip
POINTWISE = (("bf16", 65536, 0, 512), ("bf16", 16384, 0, 2048), ("fp32", 16384, 0, 1024))  # larger than the cache
STEPS = ("forward", "backward")


@functools.cache
def _example() -> Any:
    """The guide's file, which is beside the package in the source tree and not a part of it."""
    path = Path(__file__).parents[3] / "examples" / "write_your_own_kernel.py"
    if not path.exists():
        raise UserError(f"{path} is missing: run `tilewright bench lltm` from a clone of the source tree.")
    specification = importlib.util.spec_from_file_location("write_your_own_kernel", path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    return module


def cases(quick: bool) -> Iterator[Case]:
    """Every case measured: the whole cell, and what surrounds its matmul alone."""
    for part, sizes in (("cell", CELLS), ("pointwise", POINTWISE)):
        for dtype, batch, features, state in sizes[:1] if quick else sizes:
            yield {"part": part, "dtype": dtype, "batch": batch, "features": features, "state": state}


def prepare(case: Case) -> Prepared:
    """Forward and backward of each implementation."""
    dtype, batch, features, state = (case[name] for name in ("dtype", "batch", "features", "state"))
    example = _example()
    if case["part"] == "cell":
        cells = example.cells(features, state, DTYPES[dtype])
        makers = {name: partial(example.passes, cell, batch, features) for name, cell in cells.items()}
    else:
        functions = example.pointwise_functions()
        functions["compile"] = torch.compile(example.pointwise_eager, dynamic=False)
        makers = {name: partial(_pointwise, each, batch, state, DTYPES[dtype]) for name, each in functions.items()}
    return build({OURS if name == "triton" else name: make for name, make in makers.items()})


def _pointwise(function: Callable[..., Any], batch: int, state: int, dtype: torch.dtype) -> dict[str, Pass]:
    return forward_backward(function, _example().example_inputs(batch, state, dtype))


def cost(batch: int, features: int, state: int, element_bytes: int, *, part: str, backward: bool) -> Cost:
    """The fewest bytes and FLOPs.

    Of the pointwise part: 3 gates, old_cell and 2 results an element; backward 3 gates, new_cell, 2 gradients that come
    in and 4 that go out. Of the cell: its inputs, parameters and results, and for backward the gates, which it keeps.

    >>> cost(2, 0, 3, 1, part="pointwise", backward=False).bytes / 6
    6.0
    >>> cost(2, 0, 3, 1, part="pointwise", backward=True).bytes / 6
    10.0
    >>> cost(2, 4, 3, 1, part="cell", backward=False).flops == 2 * 2 * (4 + 3) * 9
    True
    """
    elements, inner = batch * state, features + state
    if part == "pointwise":
        counts = (6, 4) if backward else (4, 2)
        read, written = (element_bytes * elements * count for count in counts)
        return Cost(20 * elements, read, written)
    parameters, inputs = 3 * state * (inner + 1), batch * inner
    flops = 2 * batch * inner * 3 * state
    if not backward:
        return Cost(flops, element_bytes * (inputs + elements + parameters), element_bytes * 2 * elements)
    read = inputs + parameters + 6 * elements
    return Cost(2 * flops, element_bytes * read, element_bytes * (inputs + elements + parameters))


def _limits(case: Case) -> dict[str, Cost]:
    sizes = case["batch"], case["features"], case["state"], DTYPES[case["dtype"]].itemsize
    return {step: cost(*sizes, part=case["part"], backward=step == "backward") for step in STEPS}


def _label(case: Case) -> str:
    size = f"{case['features']} + {case['state']}" if case["part"] == "cell" else case["state"]
    return f"{case['part']} {case['dtype']} {case['batch']} x {size}"


def count_launches(run: Pass) -> int:
    """How many kernels, copies and fills one call starts."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    return sum(event.device_type.name == "CUDA" and not event.is_user_annotation for event in profile.events() or ())


def _add_wall(case: Case) -> None:
    """Wall time and launches of each implementation that was timed on the device."""
    torch.compiler.reset()
    with torch.cuda.stream(torch.cuda.Stream()):
        functions, _ = prepare(case)
        for step in STEPS:
            cells = case[step]["implementations"]
            timed = {name: run for name, run in functions[step].items() if "median" in cells[name]}
            for name, timing in interleaved_wall_time(timed).items():
                cells[name]["wall"] = timing.as_dict()
                launches = count_launches(timed[name])
                if launches:  # a profiler that sees no kernels has counted none
                    cells[name]["launches"] = launches


def run(ask: Ask) -> Case:
    """Measure every case by device time, then the cells by wall time."""
    why = _example().why_no_cuda()
    if why:
        ask.progress(f"without the CUDA op: {why}")
    result = run_cases("lltm", cases(ask.quick), prepare, _limits, _label, peers=(), ask=ask)
    result["without_cuda"] = why
    for case in result["cases"]:
        if case["part"] == "cell":
            _add_wall(case)
            walls = {s: {n: c["wall"] for n, c in case[s]["implementations"].items() if "wall" in c} for s in STEPS}
            line = (f"{s} " + " ".join(f"{n} {t['median'] * 1e6:.0f}" for n, t in walls[s].items()) for s in STEPS)
            ask.progress(f"{_label(case)} | wall time, us: {' | '.join(line)}")
            ask.save(result)
    return result
