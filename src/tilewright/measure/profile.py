"""Where the time of a training step went.

`profile_steps` runs a few steps under torch's profiler and reads the trace that it wrote, so that every figure
can be looked up in the file. All of them are of one window, which begins and ends with the device idle:

    work      what the device ran: kernels, copies, fills. Without a device, the host's ops, each with the time that it
              did not spend in another op.
    busy      the union of all work over all streams; idle is the rest of the window, and each piece of it a gap.
    category  what kind of work it is, told by the name of the kernel or op.
    phase     which `record_function` of PHASES the host was in when it launched the work. Backward launches from a
              thread of autograd's, and the device runs behind the host: so the clock of the launch decides, neither the
              thread nor the time of the kernel. A CUDA graph has one launch for all of its kernels: they are "graph".

The profiler costs the host some microseconds an op: a step that waits for its host takes longer here than on its own.
A collective that waits for another rank counts as busy.
"""

from __future__ import annotations

import bisect
import errno
import gzip
import itertools
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile, record_function, schedule

from tilewright.errors import UserError
from tilewright.measure.checked import Amount

PHASES = ("tilewright.forward", "tilewright.backward", "tilewright.optimizer")
CATEGORIES = ("matmul", "attention", "fused", "pointwise", "optimizer", "communication", "copy", "other")
_WINDOW = "tilewright.steps"
_SHORT_GAP = 10_000  # nanoseconds; between two kernels that were both waiting there are one or two thousand
_KERNELS = 40
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of the trace's events
_LAUNCH = ("cuda_runtime", "cuda_driver")

# The first that is found in a name decides. Inductor's come first: it names a kernel by all ops it grew from, and a
# pointwise one may well be called `triton_poi_fused__scaled_dot_product_flash_attention_mm_3`.
_RULES = tuple(
    (name, re.compile(pattern))
    for name, pattern in (
        ("attention", r"^triton_tem_.*attention|^triton_flex_attention"),
        # Tilewright's own kernels are called tilewright_<op>_<what>, and <what> begins with matmul where it is one.
        ("attention", r"^tilewright_attention_"),
        ("optimizer", r"^tilewright_optimizer_"),
        ("matmul", r"^triton_tem_|^triton_mm|^tilewright_[a-z_]+_matmul"),
        # On a CPU a compiled graph is one piece of work: what it does not spend in ops is in its own loops.
        ("pointwise", r"^triton_[a-z]+_fused|cpp_fused_|^## Call CompiledFxGraph"),
        ("fused", r"^tilewright_|^tilewright::"),
        ("communication", r"nccl|c10d::|gloo:|^record_param_comms$"),
        ("copy", r"^Mem(cpy|set)|^aten::(copy_|_to_copy|to|clone|contiguous|fill_|zero_|zeros|zeros_like)$"),
        ("optimizer", r"multi_tensor_apply|_fused_(adam|sgd|adagrad)|_foreach_"),
        ("attention", r"scaled_dot_product|flash|fmha|sdpa|[aA]ttention|cudnn::fusion"),
        ("matmul", r"nvjet|gemm|gemv|cublas|cutlass|^aten::(addmm|mm|baddbmm|bmm|matmul|linear)$|^mkldnn::_linear"),
        (
            "other",  # ops that move no data
            r"^aten::(view|_unsafe_view|reshape|_reshape_alias|as_strided|t|transpose|permute|expand|slice|select|split"
            r"|chunk|squeeze|unsqueeze|unflatten|flatten|detach|empty|empty_like|empty_strided|resize_|result_type"
            r"|resolve_conj|resolve_neg|item|_local_scalar_dense)$",
        ),
        ("pointwise", r"^aten::|at::native|at_cuda_detail|cub::|softmax|elementwise"),
    )
)


def category(name: str) -> str:
    """What kind of work a kernel, or an op of the host, does: one of CATEGORIES.

    >>> category("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT"), category("triton_poi_fused_gelu_view_9")
    ('matmul', 'pointwise')
    """
    return next((found for found, pattern in _RULES if pattern.search(name)), "other")


@dataclass(frozen=True)
class Spent:
    """The work of one name in one step; `share` is of all work's seconds."""

    name: str
    seconds: Amount
    calls: Amount
    share: Amount


@dataclass(frozen=True)
class Kernel(Spent):
    """A kernel, or an op of the host, and its category."""

    category: str


@dataclass(frozen=True)
class Gap:
    """A time in which nothing ran, and the work before and after it."""

    seconds: Amount
    before: str
    after: str


@dataclass(frozen=True)
class Piece:
    """A part of a step in which one kind of work, or none, took most of the time."""

    seconds: Amount
    category: str  # or "idle"


Row = tuple[str, str, float, float, float]  # table, name, seconds, calls, share


@dataclass(frozen=True)
class StepProfile:
    """One step, as the mean of `steps`; the lists have the most seconds first."""

    device: str  # "cuda", or "cpu" where no device worked
    steps: int
    seconds: Amount
    busy_seconds: Amount
    idle_seconds: float
    launches: float  # calls that gave the device work; on a CPU, ops
    gaps: float  # over ten microseconds
    longest_gaps: list[Gap]
    categories: list[Spent]
    phases: list[Spent]
    kernels: list[Kernel]
    timeline: list[Piece]  # of the last step

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def rows(self) -> list[Row]:
        """The whole as one list; shares of "step" and "gap" are of the step's seconds, all others of the work's."""
        rows: list[Row] = [
            ("step", "whole", self.seconds, 1.0, 1.0),
            ("step", "busy", self.busy_seconds, self.launches, self.busy_seconds / self.seconds),
            ("step", "idle", self.idle_seconds, self.gaps, self.idle_seconds / self.seconds),
        ]
        for table, spent in (("category", self.categories), ("phase", self.phases), ("kernel", self.kernels)):
            rows += [(table, one.name, one.seconds, one.calls, one.share) for one in spent]
        rows += [
            ("gap", f"{gap.before} -> {gap.after}", gap.seconds, 1.0, gap.seconds / self.seconds)
            for gap in self.longest_gaps
        ]
        return rows


def profile_steps(step: Callable[[], object], *, steps: int = 3, trace: Path | None) -> StepProfile:
    """Run `step` once while the profiler warms up, then `steps` times under it; write the trace to `trace`, by gzip.

    Args:
        step: one whole step, warmed up, its parts under `torch.profiler.record_function` with the names of PHASES.
        steps: how many of them are recorded.
        trace: a file that chrome://tracing and Perfetto open, `....json.gz`; None writes none.
    """
    if steps < 1:
        raise UserError(f"steps is {steps}; profile at least 1.")
    with _scratch_beside(trace) as folder:  # before the work, so that a place that cannot be written to shows at once
        plain = Path(folder) / "trace.json"
        when = schedule(wait=0, warmup=1, active=1, repeat=1)
        with profile(schedule=when) as profiler:
            step()
            synchronize()
            profiler.step()
            with record_function(_WINDOW):
                for _ in range(steps):
                    step()
                synchronize()
        profiler.export_chrome_trace(str(plain))
        if not plain.exists() or not plain.stat().st_size:  # the profiler does not say so
            raise OSError(errno.ENOSPC, "No space left for a trace", folder)
        text = plain.read_bytes()
        if trace is not None:
            packed = plain.with_suffix(".json.gz")
            packed.write_bytes(gzip.compress(text, 6))
            os.replace(packed, trace)
    return read_trace(json.loads(text.decode(errors="replace"), strict=False)["traceEvents"], steps)


def _scratch_beside(trace: Path | None) -> tempfile.TemporaryDirectory[str]:
    """A folder on the same disk: a file can move from there to its place whole or not at all."""
    if trace is None:
        return tempfile.TemporaryDirectory()
    try:
        trace.parent.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(dir=trace.parent, prefix=trace.name, suffix=".tmp")
    except OSError as error:
        raise UserError(f"Cannot write {trace}: {error.strerror}; choose another file.") from error


def synchronize() -> None:
    """Wait for the device, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@dataclass(frozen=True)
class Work:
    """Something that ran from `start` to `end`, in nanoseconds, of which `own` in itself."""

    name: str
    start: int
    end: int
    own: int
    phase: str
    launch: int


def read_trace(events: Sequence[dict[str, Any]], steps: int) -> StepProfile:
    """The profile from the events of a trace, of which one is the window around `steps` steps."""
    begin, end = next(interval(event) for event in events if _is_annotation(event) and event["name"] == _WINDOW)
    phase_at = _phases(events)
    work = device_work(events, phase_at)
    device = "cuda" if work else "cpu"
    work = [item for item in work or _host_work(events, phase_at) if item.end > begin and item.start < end]
    gaps = sorted(idle_gaps(work, begin, end), key=lambda gap: -gap[0])
    idle = sum(nanoseconds for nanoseconds, _, _ in gaps)
    names = _by(lambda item: item.name, work, steps)
    kernels = [Kernel(**vars(spent), category=category(spent.name)) for spent in names]
    return StepProfile(
        device=device,
        steps=steps,
        seconds=(end - begin) / 1e9 / steps,
        busy_seconds=(end - begin - idle) / 1e9 / steps,
        idle_seconds=idle / 1e9 / steps,
        launches=len({item.launch for item in work}) / steps,
        gaps=sum(nanoseconds > _SHORT_GAP for nanoseconds, _, _ in gaps) / steps,
        longest_gaps=[Gap(nanoseconds / 1e9, before, after) for nanoseconds, before, after in gaps[:5]],
        categories=_by(lambda item: category(item.name), work, steps),
        phases=_by(lambda item: item.phase, work, steps),
        kernels=kernels[:_KERNELS] + _summed(kernels[_KERNELS:]),
        timeline=timeline(work, end - (end - begin) // steps, end),
    )


def interval(event: dict[str, Any]) -> tuple[int, int]:
    """Return (start, end) in whole nanoseconds, so that sums come out even; the trace has decimal microseconds."""
    start = round(event["ts"] * 1000)
    return start, start + round(event["dur"] * 1000)


def _is_annotation(event: dict[str, Any]) -> bool:
    return event.get("cat") == "user_annotation"


def _phases(events: Iterable[dict[str, Any]]) -> Callable[[int], str]:
    """The phase that the host was in at a time."""
    windows = sorted(
        (*interval(event), event["name"].removeprefix("tilewright."))
        for event in events
        if _is_annotation(event) and event["name"] in PHASES
    )
    starts = [start for start, _, _ in windows]

    def phase_at(time: int) -> str:
        index = bisect.bisect_right(starts, time) - 1
        return windows[index][2] if index >= 0 and time < windows[index][1] else "other"

    return phase_at


def device_work(events: Iterable[dict[str, Any]], phase_at: Callable[[int], str]) -> list[Work]:
    """Kernels, copies and fills, each tied by its correlation id to the call of the host that launched it.

    What `phase_at` says of the time of that call is a piece of work's phase.
    """
    calls = {_correlation(event): event for event in events if event.get("cat") in _LAUNCH}
    work = []
    for event in events:
        if event.get("cat") in _DEVICE:
            start, end = interval(event)
            call = calls.get(_correlation(event))
            if call is None:
                phase = "other"
            else:
                phase = "graph" if "GraphLaunch" in call["name"] else phase_at(interval(call)[0])
            work.append(Work(event["name"], start, end, end - start, phase, _correlation(event)))
    return work


def _correlation(event: dict[str, Any]) -> int:
    return event.get("args", {}).get("correlation", -1)


def _host_work(events: Iterable[dict[str, Any]], phase_at: Callable[[int], str]) -> list[Work]:
    """The host's ops. On one thread they are nested: what an inner one takes is not the outer one's own.

    Only collectives end on another thread than they began on, and may then overlap: nobody's own time is below 0.
    """
    ops = [(event["tid"], *interval(event), event["name"]) for event in events if event.get("cat") == "cpu_op"]
    ops.sort(key=lambda op: (str(op[0]), op[1], -op[2]))
    own = [end - start for _, start, end, _ in ops]
    around: list[int] = []  # the ops that the present one is in, the innermost last
    for index, (thread, start, end, _) in enumerate(ops):
        while around and (ops[around[-1]][0] != thread or ops[around[-1]][2] < max(end, start + 1)):
            around.pop()
        if around:
            own[around[-1]] -= end - start
        around.append(index)
    return [
        Work(name, start, end, max(0, own[index]), phase_at(start), index)
        for index, (_, start, end, name) in enumerate(ops)
    ]


def idle_gaps(work: Iterable[Work], begin: int, end: int) -> list[tuple[int, str, str]]:
    """The parts of a window in which none of the work that overlaps it ran: nanoseconds, what was before, and after.

    >>> idle_gaps([Work("a", 0, 5, 5, "", 0), Work("b", 3, 4, 1, "", 1), Work("c", 8, 10, 2, "", 2)], 0, 10)
    [(3, 'a', 'c')]
    """
    gaps, reached, last = [], begin, "the window's begin"
    for item in sorted(work, key=lambda item: (item.start, -item.end)):
        if item.start > reached:
            gaps.append((item.start - reached, last, item.name))
        if item.end > reached:
            reached, last = item.end, item.name
    if reached < end:
        gaps.append((end - reached, last, "the window's end"))
    return gaps


def timeline(work: Iterable[Work], begin: int, end: int, slots: int = 400) -> list[Piece]:
    """A window in the order of time: what took most of each of its equal slots, neighbours of a kind joined.

    >>> found = timeline([Work("aten::mm", 0, 50, 50, "", 0), Work("aten::add", 75, 100, 25, "", 1)], 0, 100, 4)
    >>> [(piece.seconds, piece.category) for piece in found]
    [(5e-08, 'matmul'), (2.5e-08, 'idle'), (2.5e-08, 'pointwise')]
    """
    width = (end - begin) / slots
    spent: list[dict[str, float]] = [{} for _ in range(slots)]
    for item in work:
        start, stop = max(item.start, begin), min(item.end, end)
        if stop <= start:
            continue
        kind, share = category(item.name), item.own / (item.end - item.start)  # an op's own time is all over it
        for slot in range(int((start - begin) / width), min(slots, int((stop - begin) / width) + 1)):
            left = begin + slot * width
            took = max(0.0, min(stop, left + width) - max(start, left)) * share
            spent[slot][kind] = spent[slot].get(kind, 0.0) + took
    kinds = [max({"idle": width - sum(each.values()), **each}.items(), key=lambda pair: pair[1])[0] for each in spent]
    return [Piece(len(list(run)) * width / 1e9, kind) for kind, run in itertools.groupby(kinds)]


def _by(key: Callable[[Work], str], work: Sequence[Work], steps: int) -> list[Spent]:
    groups: dict[str, list[int]] = {}
    for item in work:
        groups.setdefault(key(item), []).append(item.own)
    total = sum(item.own for item in work) or 1
    spent = [Spent(name, sum(own) / 1e9 / steps, len(own) / steps, sum(own) / total) for name, own in groups.items()]
    return sorted(spent, key=lambda one: -one.seconds)


def _summed(rest: Sequence[Kernel]) -> list[Kernel]:
    if not rest:
        return []
    seconds, calls, share = (sum(getattr(one, name) for one in rest) for name in ("seconds", "calls", "share"))
    return [Kernel(f"{len(rest)} others", seconds, calls, share, "various")]
