"""How long something takes, on the device and for the caller."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median, quantiles
from typing import Any, TypeVar

import torch

# Larger than any L2: writing it between two runs evicts what the first left there.
_FLUSH_BYTES = 256 * 2**20
_WARM_SECONDS = 0.005  # after which another call warms nothing up
_CYCLES_PER_SECOND = 2e9  # of a GPU, at the most


@dataclass(frozen=True)
class Timing:
    """Median and quartiles, in seconds, of `runs` runs, and the median of each seat that they were measured from."""

    median: float
    low: float
    high: float
    runs: int
    seats: tuple[float, ...]

    @classmethod
    def summarise(cls, *seats: Sequence[float]) -> Timing:
        """The summary of these measurements.

        >>> Timing.summarise([1.0, 2.0, 3.0], [4.0, 5.0])
        Timing(median=3.0, low=2.0, high=4.0, runs=5, seats=(2.0, 4.5))
        """
        together = [second for seat in seats for second in seat]
        low, middle, high = quantiles(together, n=4, method="inclusive")
        return cls(middle, low, high, len(together), tuple(map(median, seats)))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


# Everybody takes two turns in a round. What these differ by is what a difference between two of them has to exceed to
# mean anything: memory lies elsewhere, clocks change.
SEATS = 2

T = TypeVar("T")
Functions = dict[str, Callable[[], object]]
Times = tuple[dict[str, Timing], dict[str, Exception]]  # of what ran, and why the rest did not


def turns(things: Iterable[T], rounds: int) -> Iterator[list[T]]:
    """The things in each round, in an order of its own; the same orders in every run.

    At its power limit a GPU is slower behind what has run hot, and quicker behind what has let it cool: the very same
    code by several percent, were its neighbour always the same.

    >>> [len(set(order)) for order in turns("abc", 4)]
    [3, 3, 3, 3]
    """
    order, chance = list(things), random.Random(0)
    for _ in range(rounds):
        chance.shuffle(order)
        yield list(order)


def interleaved_event_time(functions: Functions, *, seconds: float = 0.1, least_rounds: int = 10) -> Times:
    """Device time of each function, from events around single calls, the cache flushed before each.

    The calls take `turns`, so that a change of clock or temperature meets all of them alike. The device is kept busy
    while the host prepares a call, so that the host's time does not show.
    """
    flush = torch.empty(_FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
    sound, errors = _try_each(functions)
    if not sound:
        return {}, errors
    torch.cuda.synchronize()
    began, host = time.perf_counter(), 0.0
    for function in sound.values():
        flush.zero_()
        called = time.perf_counter()
        function()
        host = max(host, time.perf_counter() - called)
    torch.cuda.synchronize()
    rounds = min(100, max(least_rounds, round(seconds * len(sound) / (time.perf_counter() - began) / SEATS)))
    head_start = int(_CYCLES_PER_SECOND * min(2e-3, 2e-4 + 2 * host))
    seats = [(name, seat) for name in sound for seat in range(SEATS)]
    events: dict[tuple[str, int], list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {seat: [] for seat in seats}
    for order in turns(seats, rounds):
        for seat in order:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flush.zero_()
            torch.cuda._sleep(head_start)  # type: ignore[no-untyped-call]
            start.record()
            sound[seat[0]]()
            end.record()
            events[seat].append((start, end))
    torch.cuda.synchronize()
    return _summaries({s: [a.elapsed_time(b) / 1e3 for a, b in pairs] for s, pairs in events.items()}), errors


def _summaries(seconds: dict[tuple[str, int], list[float]]) -> dict[str, Timing]:
    names = dict.fromkeys(name for name, _ in seconds)
    return {name: Timing.summarise(*(of for (owner, _), of in seconds.items() if owner == name)) for name in names}


def _try_each(functions: Functions) -> tuple[Functions, dict[str, Exception]]:
    """Those that run, warmed up, and the exceptions of the others."""
    sound: Functions = {}
    errors: dict[str, Exception] = {}
    for name, function in functions.items():
        try:
            began = time.perf_counter()
            for _ in range(3):
                function()
                torch.cuda.synchronize()
                if time.perf_counter() - began > _WARM_SECONDS:
                    break
            sound[name] = function
        except Exception as error:
            errors[name] = error
    return sound, errors


def interleaved_graph_time(functions: Functions, *, calls: int = 5, rounds: int = 8) -> Times:
    """Device time of a call, from CUDA graphs of several calls that take `turns`: no host in it at all.

    Captures on the current stream, which must not be the default one: backward runs on the stream of its forward, so
    both belong under the same `torch.cuda.stream`. The cache is not flushed between calls; give it work that is
    larger than the cache.
    """
    stream = torch.cuda.current_stream()
    sound, errors = _try_each(functions)
    graphs: dict[tuple[str, int], torch.cuda.CUDAGraph] = {}
    for name, function in sound.items():
        captured = [torch.cuda.CUDAGraph() for _ in range(SEATS)]
        try:
            for graph in captured:
                with torch.cuda.graph(graph, stream=stream):
                    for _ in range(calls):
                        function()
            graphs |= {(name, seat): graph for seat, graph in enumerate(captured)}
        except Exception as error:
            errors[name] = error
    seconds: dict[tuple[str, int], list[float]] = {seat: [] for seat in graphs}
    for round_number, order in enumerate(turns(graphs.items(), rounds + 1)):
        for seat, graph in order:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if round_number:  # the first round warms up
                seconds[seat].append(start.elapsed_time(end) / 1e3 / calls)
    return _summaries(seconds), errors


def interleaved_wall_time(functions: Functions, *, rounds: int = 15, calls: int = 100) -> dict[str, Timing]:
    """What a caller waits for one call, in a loop of calls that ends with the device idle, if there is one. The loops
    take turns.

    The collector of garbage rests meanwhile, as in `timeit`: what it takes depends on all that the process holds.
    """
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    wait: Callable[[], object] = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    collects = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for round_number, order in enumerate(turns(functions.items(), rounds + 1)):
            for name, function in order:
                wait()
                began = time.perf_counter()
                for _ in range(calls):
                    function()
                wait()
                if round_number:  # the first round warms up
                    seconds[name].append((time.perf_counter() - began) / calls)
    finally:
        if collects:
            gc.enable()
    return {name: Timing.summarise(values) for name, values in seconds.items()}
