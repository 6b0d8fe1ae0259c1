"""Drawn cases: ours beside eager PyTorch, torch.compile and ours at a round shape.

Many processes compile, each the cases of one shape. What is timed, by them or by Inductor and cuBLASLt's search on
their behalf, is timed by one process at a time, which has the GPU to itself but for the first calls of others.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import importlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo
import torch._inductor.config

from tilewright.bench import workers
from tilewright.bench.protocol import OURS, Ask, Case, configure, head, sentence
from tilewright.bench.verdict import (
    CLOCKS,
    NEIGHBOUR,
    PEERS,
    add_shares,
    describe_case,
    find_behind,
    summarise,
    summary_lines,
)
from tilewright.errors import UserError
from tilewright.measure.ceilings import Ceilings, measure_ceilings
from tilewright.measure.clock import SEATS, Timing, interleaved_event_time, interleaved_wall_time, turns
from tilewright.runtime import cublaslt

if TYPE_CHECKING:
    from tilewright.bench.drawing import Op

# From this ratio on, a first and short measurement is followed by a longer one: of ours to the best peer by device and
# by wall time, and of the throughput of the neighbour to ours.
_DOUBTFUL = {"device": 1.02, "wall": 1.05, NEIGHBOUR: 1.12}
_SHORT, _LONG = (0.003, 3), (0.01, 10)  # seconds for each implementation, and rounds at least
_SHORT_WALL, _LONG_WALL = (3, 4), (8, 8)  # rounds, and calls in each
_LONGEST_HOST = 0.003  # seconds that no host takes to launch a call
_SAVE_SECONDS = 10.0
AGAIN = ("", "device", "behind", "all")  # which cases of a result that is resumed are measured again

_timing: list[str] = []  # not empty while this process has the GPU to itself

Passes = dict[str, Callable[[], object]]
Figures = dict[str, dict[str, float]]
Message = tuple[str, Any]  # what is done to the next case and None, or "done" and its figures


def _shape_of(case: Case) -> Case:
    return {name: value for name, value in case.items() if name != "rows"}


def _find_table(name: str) -> dict[str, Op]:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


class _Shape:
    """The implementations of one shape. What torch.compile has learnt of other shapes is forgotten."""

    def __init__(self, op: Op, shape: Case, device: str, peers: list[str]) -> None:
        configure(backward_alone=False)
        torch._inductor.config.compile_threads = 1  # each of many processes compiles its own
        torch.compiler.reset()
        self.op, self.device = op, device
        functions: dict[str, Callable[..., Any]] = {OURS: partial(op.ours, shape), "eager": partial(op.eager, shape)}
        functions["compile"] = torch.compile(partial(op.eager, shape))
        self.functions = {name: function for name, function in functions.items() if name in (OURS, *peers)}

    def implementations(self, case: Case) -> dict[str, tuple[Case, Callable[..., Any]]]:
        """Return the case and the function of each implementation, by name."""
        calls = {name: (case, function) for name, function in self.functions.items()}
        beside = self.op.neighbour(case)
        if beside is not None:
            calls[NEIGHBOUR] = (beside, partial(self.op.ours, _shape_of(beside)))
        return calls

    def inputs(self, case: Case) -> list[torch.Tensor]:
        inputs = self.op.make(case, self.device)
        for tensor, dimensions in zip(inputs, self.op.rows, strict=False):
            for dimension in dimensions:
                torch._dynamo.maybe_mark_dynamic(tensor, dimension)
        return inputs


def _one_pass(function: Callable[..., Any], inputs: list[torch.Tensor]) -> Callable[[], object]:
    """Forward and backward, which has run once."""
    leaves = [t for t in inputs if t.requires_grad]
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    upstream = [torch.randn_like(o) if o.ndim else torch.ones_like(o) for o in outputs]
    torch.autograd.grad(outputs, leaves, upstream)
    return lambda: torch.autograd.grad(function(*inputs), leaves, upstream)


def _synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _is_lost(device: str) -> bool:
    """Whether the device answers nothing any more, as after an access to memory that is not there."""
    try:
        _synchronise(device)
    except Exception:
        return True
    return False


@contextlib.contextmanager
def _alone(path: str) -> Iterator[None]:
    """Wait until no other process times anything; within itself it is done at once."""
    if _timing:
        yield
        return
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        _timing.append(path)
        try:
            yield
        finally:
            _timing.pop()


@functools.cache
def _tune_alone(path: str) -> None:
    """Let Inductor and our search for cuBLASLt's algorithms time theirs alone, too."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    for owner, name in ((CachingAutotuner, "benchmark_all_configs"), (cublaslt.Plan, "_choose")):
        setattr(owner, name, _locked(getattr(owner, name), path))


def _locked(function: Callable[..., Any], path: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*inputs: Any, **options: Any) -> Any:
        with _alone(path):
            return function(*inputs, **options)

    return call


def time_cases(shared: dict[str, Any], cases: list[Case]) -> Iterator[Message]:
    """Compile every implementation at every case of one shape, and time it."""
    device, lock, shape = shared["device"], shared["lock"], None
    if device == "cuda":
        torch.set_num_threads(1)
        _tune_alone(lock)
    cublaslt.Plan.choices = 0  # a user's process sees a few shapes, and searches for each
    for index, case in enumerate(cases):
        yield "the inputs", None
        op = _find_table(shared["table"])[case["op"]]
        shape = shape or _Shape(op, _shape_of(case), device, shared["peers"])
        passes: Passes = {}
        errors: dict[str, str] = {}
        compiled: list[str] = []
        inputs: dict[str, list[torch.Tensor]] = {}  # one set for all that get the same case
        for name, (its_case, function) in shape.implementations(case).items():
            yield name, None
            try:
                made = inputs.setdefault(_identity(its_case), [])
                made.extend([] if made else shape.inputs(its_case))
                with _listening(compiled if name == OURS else []):
                    passes[name] = _one_pass(function, made)
                    _synchronise(device)
            except Exception as error:
                errors[name] = sentence(error)
        yield "timing", None
        gc.freeze()  # compilers leave millions of objects, which every collection before a loop of calls would visit
        if device == "cuda":
            torch.cuda.empty_cache()  # others need it
        try:
            with _alone(lock):
                figures = _measure(passes, device, errors)
        except Exception as error:
            figures = {}
            errors.setdefault(OURS, sentence(error))
        if index and case["rows"] > 1 and compiled:  # a row count alone is no reason
            figures["recompiled"] = sorted(compiled)
        if errors:
            figures["errors"] = errors
        yield "done", figures
        passes.clear()
        inputs.clear()
        if _is_lost(device):
            os._exit(1)  # between two cases: the next gets a process with a context of its own
        if device == "cuda":
            torch.cuda.empty_cache()


@contextlib.contextmanager
def _listening(names: list[str]) -> Iterator[None]:
    """Notes the Triton kernels that are compiled, or loaded from the cache on disk."""
    from triton import knobs

    def note(*, src: Any, **rest: Any) -> None:
        names.append(str(getattr(src, "name", src)))

    before = knobs.compilation.listener
    knobs.compilation.listener = note
    try:
        yield
    finally:
        knobs.compilation.listener = before


def _measure(passes: Passes, device: str, errors: dict[str, str]) -> dict[str, Any]:
    """Figures by clock and implementation: shortly, and for longer where ours looks behind."""
    figures: dict[str, Any] = {}
    measure = interleaved_event_time if device == "cuda" else _cpu_time
    for seconds, least_rounds in (_SHORT, _LONG):
        timings, failed = measure(passes, seconds=seconds, least_rounds=least_rounds)
        errors.update({name: sentence(error) for name, error in failed.items()})
        figures["device"] = {name: _figure(timing.seats) for name, timing in timings.items()}
        if "long" in figures or not (is_doubtful(figures, "device") or is_doubtful(figures, NEIGHBOUR)):
            break
        figures["long"] = True
    beside = {name: passes[name] for name in figures["device"] if name != NEIGHBOUR}
    if device == "cuda" and _is_host_bound(beside, figures["device"]):
        figures["wall"] = _wall_time(beside, *_SHORT_WALL)
        if is_doubtful(figures, "wall"):
            figures["wall"] = _wall_time(beside, *_LONG_WALL)
            figures["long_wall"] = True
    return figures


def is_doubtful(figures: dict[str, Any], clock: str) -> bool:
    """Whether ours looks behind, by a clock, or beside its neighbour."""
    times = {name: each["median"] for name, each in figures.get("wall" if clock == "wall" else "device", {}).items()}
    ours = times.get(OURS)
    if clock == NEIGHBOUR:  # a larger shape: it should take longer
        return ours is not None and NEIGHBOUR in times and ours * _DOUBTFUL[clock] > times[NEIGHBOUR]
    peers = [times[name] for name in PEERS if name in times]
    return ours is not None and bool(peers) and ours > _DOUBTFUL[clock] * min(peers)


def _figure(seats: tuple[float, ...]) -> dict[str, float]:
    """The median, in seconds, and by how much the two seats of the same code differ."""
    middle = sum(seats) / len(seats)
    return {"median": float(f"{middle:.4g}"), "spread": round(max(seats) / min(seats) - 1, 4)}


def _is_host_bound(passes: Passes, device: Figures) -> bool:
    """Whether the host takes nearly as long to launch any of them as the device takes to run it."""
    for name, run in passes.items():
        if device[name]["median"] > _LONGEST_HOST:
            continue
        host = float("inf")
        for _ in range(3):
            torch.cuda.synchronize()
            began = time.perf_counter()
            run()
            host = min(host, time.perf_counter() - began)
        torch.cuda.synchronize()
        if host > 0.8 * device[name]["median"]:
            return True
    return False


def _wall_time(passes: Passes, rounds: int, calls: int) -> Figures:
    seats = {f"{name} {seat}": run for name, run in passes.items() for seat in range(SEATS)}
    timings = interleaved_wall_time(seats, rounds=rounds, calls=calls)
    return {name: _figure(tuple(timings[f"{name} {seat}"].median for seat in range(SEATS))) for name in passes}


def _cpu_time(passes: Passes, *, seconds: float, least_rounds: int) -> tuple[dict[str, Timing], dict[str, Exception]]:
    """`interleaved_event_time` for a machine without a GPU."""
    seats = [(name, seat) for name in passes for seat in range(SEATS)]
    times: dict[tuple[str, int], list[float]] = {seat: [] for seat in seats}
    for order in turns(seats, least_rounds):
        for seat in order:
            began = time.perf_counter()
            passes[seat[0]]()
            times[seat].append(time.perf_counter() - began)
    return {name: Timing.summarise(*(times[name, seat] for seat in range(SEATS))) for name in passes}, {}


def compare(
    name: str, table: str, groups: list[list[Case]], ask: Ask, *, device: str = "cuda", peers: tuple[str, ...] = PEERS
) -> dict[str, Any]:
    """Compile and time all groups, as far as the budget reaches; what there is, is saved as it comes."""
    began = time.monotonic()
    result: dict[str, Any] = head(name, ask) if device == "cuda" else {"benchmark": name, "machine": {"gpu": None}}
    result |= {"seed": ask.seed, "budget_seconds": ask.budget, "seconds": 0, "cases": []}
    groups = _left_to_do(groups, ask, result)
    ceilings = Ceilings(1e11, 1e12)
    measured: list[Case] = result["cases"]
    deadline = began + (ask.budget or float("inf"))
    cases = [case for group in groups for case in group]
    left = {_identity(case): case for case in cases}

    with _own_caches() as folder:
        shared = {"table": table, "device": device, "peers": list(peers), "lock": os.path.join(folder, "lock")}
        tasks: list[workers.Group] = [(shared, group) for group in groups]
        if device == "cuda":
            ceilings = measure_ceilings()
            torch.cuda.empty_cache()
            ask.progress(
                f"copy {ceilings.copy_bytes_per_second / 1e9:.0f} GB/s, matmul {ceilings.bf16_flops / 1e12:.0f} TFLOPS"
            )
        result["ceilings"] = {
            "copy_bytes_per_second": ceilings.copy_bytes_per_second, "bf16_flops": ceilings.bf16_flops
        }  # fmt: skip
        l2_bytes = (result["machine"]["gpu"] or {}).get("l2_bytes", 0)
        ops, saved = _find_table(table), time.monotonic()
        places = {_identity(each["case"]): place for place, each in enumerate(measured)}  # of those that are replaced

        def keep(case: Case, figures: dict[str, Any]) -> None:
            nonlocal saved
            add_shares(case, figures, ops[case["op"]], ceilings, l2_bytes)
            row = {"case": case, "commit": _fact(result, "commit"), **figures}
            place = places.get(_identity(case))
            if place is None:
                measured.append(row)
            else:
                measured[place] = row
            left.pop(_identity(case), None)
            if (len(cases) - len(left)) % 50 == 0:
                ask.progress(f"measured {len(cases) - len(left)} cases, {time.monotonic() - began:.0f} s")
            if time.monotonic() > saved + _SAVE_SECONDS:
                _conclude(result, left, began)
                ask.save(result)
                saved = time.monotonic()

        def lose(case: Case, why: str) -> None:
            ask.progress(f"{describe_case(case)}: {why}")
            keep(case, {"errors": {OURS: why}})

        workers.run_groups(
            f"{__name__}:time_cases", tasks, ask.jobs, report=keep, fail=lose, limit_seconds=240.0, deadline=deadline
        )
    _conclude(result, left, began)
    ask.save(result)
    for line in summary_lines(result):
        ask.progress(line)
    return result


def _identity(case: Case) -> str:
    return json.dumps(case, sort_keys=True)


def _conclude(result: dict[str, Any], left: dict[str, Case], began: float) -> None:
    """Write the summary of all that is measured, and what has not been reached."""
    result["not_reached"] = [describe_case(case) for case in left.values()]
    result["seconds"] = round(time.monotonic() - began)
    result["summary"] = summarise(result["cases"])


def _left_to_do(groups: list[list[Case]], ask: Ask, result: dict[str, Any]) -> list[list[Case]]:
    """The cases that are asked for, less those of the result that is resumed, which are kept but for `ask.again`.

    With `--ops`, cases of any commit are kept, and each op names the commits of its own. What is measured again stays
    until it has been.
    """
    wanted = set(map(_identity, ask.chosen((case for group in groups for case in group), describe_case)))
    if ask.previous is not None:
        facts = ("gpu", "torch", "triton", *(() if ask.ops else ("commit",)))
        for name, here, there in (
            ("seed", result["seed"], ask.previous.get("seed")),
            *((fact, _fact(result, fact), _fact(ask.previous, fact)) for fact in facts),
        ):
            if here != there:
                hint = "name the --ops to measure, " if name == "commit" else ""
                raise UserError(
                    f"The result to resume has {name} {there!r}, and this run {here!r}; {hint}leave out --resume, "
                    "or give another --out."
                )
        asked = {case["op"] for group in groups for case in group}
        for each in ask.previous["cases"]:
            each.setdefault("commit", _fact(ask.previous, "commit"))
            if _identity(each["case"]) in wanted or (ask.ops and each["case"]["op"] not in asked):
                result["cases"].append(each)
    wanted -= {_identity(each["case"]) for each in result["cases"]} - _again(result["cases"], ask.again)
    groups = [[case for case in group if _identity(case) in wanted] for group in groups]
    return [group for group in groups if group]


def _again(cases: list[dict[str, Any]], which: str) -> set[str]:
    """Which of the measured cases are measured again: none, all, or those behind, by device time or by either clock."""
    if which not in AGAIN:
        raise UserError(f"--again is {which!r}; choose one of {', '.join(filter(None, AGAIN))}.")
    if which in ("", "all"):
        return {_identity(each["case"]) for each in cases if which}
    clocks = ("device",) if which == "device" else tuple(CLOCKS)
    return {_identity(each["case"]) for clock in clocks for each in find_behind(cases, clock)}


def _fact(result: dict[str, Any], name: str) -> Any:
    fact = result["machine"].get(name)
    return fact.get("name") if isinstance(fact, dict) else fact


@contextlib.contextmanager
def _own_caches() -> Iterator[str]:
    """Empty caches on disk for what this run compiles, which its processes share, in a folder that goes with it."""
    names = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
    before = {name: os.environ.get(name) for name in names}
    with tempfile.TemporaryDirectory(prefix="tilewright-shapes-", ignore_cleanup_errors=True) as folder:
        os.environ.update({name: os.path.join(folder, part) for name, part in names.items()})
        try:
            yield folder
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name)
                else:
                    os.environ[name] = value
