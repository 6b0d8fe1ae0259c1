"""The protocol of every benchmark: ceilings first, all peers in turn, nothing hidden, JSON at the end."""

from __future__ import annotations

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
