"""How long something takes, on the device and for the caller."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import quantiles
from typing import Any

import torch

# Larger than any L2: writing it between two runs evicts what the first left there.
_FLUSH_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Timing:
    """Median and quartiles, in seconds, of `runs` runs."""

    median: float
    low: float
    high: float
    runs: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        """The summary of these measurements.

        >>> Timing.of([1.0, 2.0, 3.0, 4.0, 5.0]).median
        3.0
        """
        low, median, high = quantiles(seconds, n=4, method="inclusive")
        return cls(median, low, high, len(seconds))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def interleaved_device_time(
    functions: dict[str, Callable[[], object]], *, seconds: float = 0.1, warmup: int = 3
) -> dict[str, Timing]:
    """Device time of each function, from events around single calls, the cache flushed before each.

    The calls take turns, so that a change of clock or temperature meets all of them alike. The host runs ahead of
    the device behind the flush, so launch gaps do not count unless a call's host time exceeds the flush's.
    """
    flush = torch.empty(_FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
    for function in functions.values():
        for _ in range(warmup):
            function()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for function in functions.values():
        flush.zero_()
        function()
    torch.cuda.synchronize()
    rounds = min(200, max(10, round(seconds * len(functions) / (time.perf_counter() - began))))
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flush.zero_()
            start.record()
            function()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    return {name: Timing.of([a.elapsed_time(b) / 1e3 for a, b in pairs]) for name, pairs in events.items()}


def interleaved_graph_time(
    functions: dict[str, Callable[[], object]], *, calls: int = 5, rounds: int = 15
) -> tuple[dict[str, Timing], dict[str, Exception]]:
    """Device time of a call, from CUDA graphs of several calls that take turns: no host in it at all.

    Captures on the current stream, which must not be the default one: backward runs on the stream of its forward, so
    both belong under the same `torch.cuda.stream`. The cache is not flushed between calls; give it work that is
    larger than the cache. Functions that raise come back with their exceptions instead.
    """
    stream = torch.cuda.current_stream()
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    errors: dict[str, Exception] = {}
    for name, function in functions.items():
        graph = torch.cuda.CUDAGraph()
        try:
            function()
            with torch.cuda.graph(graph, stream=stream):
                for _ in range(calls):
                    function()
            graphs[name] = graph
        except Exception as error:
            errors[name] = error
    seconds: dict[str, list[float]] = {name: [] for name in graphs}
    for round_number in range(rounds + 1):
        for name, graph in graphs.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if round_number:  # the first round warms up
                seconds[name].append(start.elapsed_time(end) / 1e3 / calls)
    return {name: Timing.of(values) for name, values in seconds.items()}, errors


def interleaved_wall_time(
    functions: dict[str, Callable[[], object]], *, rounds: int = 15, calls: int = 100
) -> dict[str, Timing]:
    """What a caller waits for one call, in a loop of calls that ends with the device idle. The loops take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for round_number in range(rounds + 1):
        for name, function in functions.items():
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(calls):
                function()
            torch.cuda.synchronize()
            if round_number:  # the first round warms up
                seconds[name].append((time.perf_counter() - began) / calls)
    return {name: Timing.of(values) for name, values in seconds.items()}
