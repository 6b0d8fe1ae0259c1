"""The protocol of every benchmark: ceilings first, all peers in turn, nothing hidden, JSON at the end."""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
from collections.abc import Callable
from typing import Any

import torch

from tilewright.errors import UserError
from tilewright.measure.clock import interleaved_event_time, interleaved_graph_time
from tilewright.measure.machine import describe
from tilewright.measure.results import SCHEMA
from tilewright.plan.cost import Cost


def head(name: str) -> dict[str, Any]:
    """What stands at the top of a result; refuses to measure where there is nothing to measure on."""
    if not torch.cuda.is_available():
        raise UserError("A benchmark needs a CUDA GPU and PyTorch sees none; `tilewright doctor` says why.")
    return {"schema": SCHEMA, "benchmark": name, "machine": describe()}


def configure() -> None:
    """Settings that let compiled peers be measured, in every process that compiles them."""
    import torch._functorch.config
    import torch._inductor.config

    # Backward is timed by running it many times on one graph, which compiled code refuses where it donates buffers.
    torch._functorch.config.donated_buffer = False
    # What a peer's own tuning finds while other processes share the GPU is not its best: tune it where it is measured.
    torch._inductor.config.autotune_local_cache = False


def compile_ahead(name: str, cases: list[dict[str, Any]], jobs: int, progress: Callable[[str], None]) -> None:
    """Run every case of a benchmark once, in `jobs` processes, for the compiled kernels that this leaves on disk.

    Nearly all of a benchmark's time is one processor compiling what its peers run.
    """
    if jobs < 2:
        return
    with multiprocessing.get_context("spawn").Pool(min(jobs, len(cases)), _begin_worker) as pool:
        for done, _ in enumerate(pool.imap_unordered(functools.partial(_run_once, name), cases), 1):
            if done % 10 == 0 or done == len(cases):
                progress(f"compiled {done} of {len(cases)} cases")


def _begin_worker() -> None:
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    torch.set_num_threads(1)
    configure()


def _run_once(name: str, case: dict[str, Any]) -> None:
    # What fails here fails again, and is reported, where the case is measured.
    importlib.import_module(f"tilewright.bench.{name}").prepare(case)
    torch.compiler.reset()
    torch.cuda.empty_cache()


def measure_case(
    functions: dict[str, Callable[[], object]], cost: Cost, copy_bytes_per_second: float, *, from_graph: bool
) -> dict[str, Any]:
    """Device time of each implementation, in turns, and how far each is from the memory's limit.

    An implementation that raises is reported with its error, not left out. `from_graph`: for work whose host time
    would show, such as a backward through autograd; the functions are then to be made, and this to be called, under a
    `torch.cuda.stream` other than the default.
    """
    floor = cost.floor_seconds(copy_bytes_per_second)
    timings, errors = (interleaved_graph_time if from_graph else interleaved_event_time)(functions)
    rows: dict[str, Any] = {name: {"error": sentence(error)} for name, error in errors.items()}
    for name, timing in timings.items():
        share = floor / timing.median
        rows[name] = {**timing.as_dict(), "limit_share": share}
        if share > 1.05:  # an error, not a record
            rows[name] = {"error": f"{share:.0%} of the memory's limit cannot be: the measurement is wrong"}
    return {"bytes": cost.bytes, "floor_seconds": floor, "implementations": rows}


def sentence(error: Exception) -> str:
    """An exception in one line, for a result."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
