"""The protocol of every benchmark: ceilings first, all peers in turn, nothing hidden, JSON at the end."""

from __future__ import annotations

import contextlib
import functools
import importlib
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.bench.bars import Bar, summary
from tilewright.errors import UserError
from tilewright.measure.ceilings import Ceilings, measure_ceilings
from tilewright.measure.clock import interleaved_event_time, interleaved_graph_time
from tilewright.measure.machine import describe, package_version
from tilewright.measure.results import SCHEMA
from tilewright.plan.cost import Cost


@dataclass(frozen=True)
class Ask:
    """What is to be measured, and who hears of it."""

    progress: Callable[[str], None]  # takes a line
    save: Callable[[dict[str, Any]], None]  # takes what there is, after every case
    quick: bool = False  # a few cases only
    only: str = ""  # those with this in their label
    jobs: int = 1  # processes that compile ahead
    seed: int = 0  # what cases are drawn from, in `shapes`, as all that follows
    cases: int = 200  # of each op
    ops: str = ""  # their names, with commas; all if empty
    budget: float = 0.0  # seconds after which it stops; 0: none
    previous: dict[str, Any] | None = None  # a result to resume
    again: str = ""  # which of its cases are measured again: device, behind, all
    learn: bool = False  # let `attention` pick its backends by what is measured

    def chosen(self, cases: Iterable[Any], label: Callable[[Any], str]) -> list[Any]:
        """The cases to measure, out of those there are."""
        there = list(cases)
        found = [case for case in there if self.only in label(case)]
        if not found:
            labels = "; ".join(label(case) for case in there[:3])
            raise UserError(f"No case is called {self.only!r}; give a part of a label, such as those of: {labels}.")
        return found


def head(name: str, ask: Ask, *, needs_gpu: bool = True) -> dict[str, Any]:
    """What stands at the top of a result; refuses to measure where there is nothing to measure on."""
    if needs_gpu and not torch.cuda.is_available():
        raise UserError("A benchmark needs a CUDA GPU and PyTorch sees none; `tilewright doctor` says why.")
    part = {"only": ask.only} if ask.only else {}
    return {"schema": SCHEMA, "benchmark": name, **part, "machine": describe()}


def configure(backward_alone: bool) -> None:
    """Settings that let compiled peers be measured, in every process that compiles them."""
    import torch._functorch.config
    import torch._inductor.config

    # Where backward is timed alone, it runs many times on one graph, which compiled code refuses if it donates buffers.
    torch._functorch.config.donated_buffer = not backward_alone
    # What a peer's own tuning finds while other processes share the GPU is not its best: tune it where it is measured.
    torch._inductor.config.autotune_local_cache = False


def compile_ahead(
    name: str, cases: list[dict[str, Any]], jobs: int, backward_alone: bool, progress: Callable[[str], None]
) -> None:
    """Run every case of a benchmark once, in `jobs` processes, for the compiled kernels that this leaves on disk.

    Nearly all of a benchmark's time is one processor compiling what its peers run.
    """
    if jobs < 2 or _leaves_peers_out:
        return
    workers = min(jobs, len(cases))
    with multiprocessing.get_context("spawn").Pool(workers, _begin_worker, (backward_alone,)) as pool:
        for done, _ in enumerate(pool.imap_unordered(functools.partial(_run_once, name), cases), 1):
            if done % 10 == 0 or done == len(cases):
                progress(f"compiled {done} of {len(cases)} cases")


def _begin_worker(backward_alone: bool) -> None:
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    torch.set_num_threads(1)
    configure(backward_alone)


def _run_once(name: str, case: dict[str, Any]) -> None:
    # What fails here fails again, and is reported, where the case is measured.
    importlib.import_module(f"tilewright.bench.{name}").prepare(case)
    torch.compiler.reset()
    torch.cuda.empty_cache()


OURS = "tilewright"

Pass = Callable[[], object]


@dataclass(frozen=True)
class Checked:
    """A pass whose result was compared with float64's, and how far it is from it."""

    run: Pass
    distance: float

    def __call__(self) -> object:
        return self.run()


Case = dict[str, Any]
Errors = dict[str, dict[str, str]]
Prepared = tuple[dict[str, dict[str, Pass]], Errors]  # step -> implementation -> what to time; and what failed


_leaves_peers_out = False


@contextlib.contextmanager
def only_ours() -> Iterator[None]:
    """Leave peers out of every benchmark: `build` makes our own implementations, and nothing is compiled ahead."""
    global _leaves_peers_out
    _leaves_peers_out = True
    try:
        yield
    finally:
        _leaves_peers_out = False


def build(makers: dict[str, Callable[[], dict[str, Pass]]]) -> Prepared:
    """The steps of each implementation, all run once, and the errors of those that failed."""
    steps: dict[str, dict[str, Pass]] = {}
    failed: Errors = {}
    for name, make in makers.items():
        if _leaves_peers_out and not name.startswith(OURS):
            continue
        try:
            made = make()
            for run in made.values():
                run()
        except Exception as error:
            failed[name] = {"error": sentence(error)}
            continue
        for step, run in made.items():
            steps.setdefault(step, {})[name] = run
    return steps, failed


def forward_backward(function: Callable[..., Any], inputs: list[Any]) -> dict[str, Pass]:
    """Forward, and backward by autograd on one forward's graph again and again."""
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    gradients = [torch.randn_like(output) for output in outputs]
    leaves = [t for t in inputs if t is not None]
    return {
        "forward": lambda: function(*inputs),
        "backward": lambda: torch.autograd.grad(outputs, leaves, gradients, retain_graph=True),
    }


def run_cases(
    name: str,
    cases: Iterable[Case],
    prepare: Callable[[Case], Prepared],
    limits: Callable[[Case], dict[str, Cost]],
    label: Callable[[Case], str],
    *,
    peers: tuple[str, ...],
    ask: Ask,
    from_graph: Callable[[Case, str], bool] = lambda case, step: True,
    with_memory: bool = False,
    bars: Callable[[Case], list[Bar]] = lambda case: [],
) -> Case:
    """Measure every case, saving what there is after each; `results/<gpu>/<name>.json` holds the whole.

    `limits` are those of each step; `peers` are packages whose versions are noted. Where a step is not timed from
    graphs, it is from events around single calls. `bars` are what a case's only step is to reach; each is a line.
    """
    cases = ask.chosen(cases, label)
    result = head(name, ask)
    backward_alone = any("backward" in limits(case) for case in cases)
    configure(backward_alone)
    compile_ahead(name, cases, ask.jobs, backward_alone, ask.progress)
    ceilings = measure_ceilings()
    result["ceilings"] = {"copy_bytes_per_second": ceilings.copy_bytes_per_second, "bf16_flops": ceilings.bf16_flops}
    result["peers"] = {peer: package_version(peer) or "missing" for peer in peers}
    result["cases"] = []
    ask.progress(
        f"copy {ceilings.copy_bytes_per_second / 1e9:.0f} GB/s, matmul {ceilings.bf16_flops / 1e12:.0f} TFLOPS"
    )
    with torch.cuda.stream(torch.cuda.Stream()):
        for case in cases:
            torch.compiler.reset()
            measured = _measure_steps(case, prepare(case), limits(case), ceilings, from_graph, with_memory)
            result["cases"].append(measured)
            ask.progress(_line(label(case), measured, list(limits(case))))
            if not _leaves_peers_out and (wanted := bars(case)):
                (step,) = limits(case)
                measured["bars"] = [bar.judge(measured[step]["implementations"]) for bar in wanted]
                for found in measured["bars"]:
                    ask.progress(f"  {found['sentence']}")
            ask.save(result)
            torch.cuda.empty_cache()
    if said := summary(result["cases"]):
        ask.progress(said)
    return result


def _measure_steps(
    case: Case, prepared: Prepared, limits: dict[str, Cost], ceilings: Ceilings,
    from_graph: Callable[[Case, str], bool], with_memory: bool,
) -> Case:  # fmt: skip
    """Measure the steps of a case. Nothing keeps what they use when it returns: the next case may need its memory."""
    (steps, failed), measured = prepared, dict(case)
    for step, limit in limits.items():
        functions = steps.get(step, {})
        measured[step] = measure_case(functions, limit, ceilings, from_graph=from_graph(case, step))
        measured[step]["implementations"].update(failed)
        for name, run in functions.items():
            if isinstance(run, Checked) and name not in failed:
                measured[step]["implementations"][name]["distance"] = run.distance
        if with_memory:
            for peer, run in functions.items():
                measured[step]["implementations"][peer]["peak_bytes"] = _peak(run)
    return measured


def measure_case(functions: dict[str, Pass], cost: Cost, ceilings: Ceilings, *, from_graph: bool) -> dict[str, Any]:
    """Device time of each implementation, in turns, and how far each is from the GPU's limit.

    An implementation that raises is reported with its error, not left out. `from_graph`: for work whose host time
    would show, such as a backward through autograd; the functions are then to be made, and this to be called, under a
    `torch.cuda.stream` other than the default.
    """
    floor = cost.floor_seconds(ceilings.copy_bytes_per_second, ceilings.bf16_flops)
    timings, errors = (interleaved_graph_time if from_graph else interleaved_event_time)(functions)
    rows: dict[str, Any] = {name: {"error": sentence(error)} for name, error in errors.items()}
    for name, timing in timings.items():
        share = floor / timing.median
        rows[name] = {**timing.as_dict(), "limit_share": share}
        if share > 1.05:  # an error, not a record
            rows[name] = {"error": f"{share:.0%} of the GPU's limit cannot be: the measurement is wrong"}
    return {"bytes": cost.bytes, "flops": cost.flops, "floor_seconds": floor, "implementations": rows}


def _peak(run: Pass) -> int:
    """Bytes that a call takes at most beyond what was there before it, its results included."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _line(label: str, case: Case, steps: list[str]) -> str:
    parts = [label]
    for step in steps:
        timed = {n: r for n, r in case[step]["implementations"].items() if "median" in r}
        ours = timed.get(OURS)
        if ours is None:
            parts.append(f"{step} failed")
            continue
        peers = " ".join(f"{n} {r['median'] / ours['median']:.2f}x" for n, r in timed.items() if n != OURS)
        parts.append(f"{step} {ours['median'] * 1e6:.0f} us {ours['limit_share']:.1%} of limit ({peers})")
        if "peak_bytes" in ours:
            parts.append("peak MiB " + " ".join(f"{n} {r['peak_bytes'] / 2**20:.0f}" for n, r in timed.items()))
    return " | ".join(parts)


def sentence(error: Exception) -> str:
    """An exception in one line, for a result."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
