"""One piece of a study's work in a process of its own: measure a run, probe the machine, prove or observe the winner.

A kernel that fails can poison the whole CUDA context of its process, and peak memory is a property of a process: so
each trial is a process of its own, forked by `tune.worker.forkserver` or started as
`python -m tilewright.tune.worker.trial`. It reads one line of JSON, the job, from standard input, and writes one JSON
object a line to standard output:

    {"event": "alive", "what": "compiling"}                                     something that takes a while begins
    {"event": "phase", "name": "build"}                                         one of PHASES begins
    {"event": "step", "step": 3, "seconds": 0.1, "loss": 5.2}
    {"event": "proof", "value": {...}}                                          where there is more to come
    {"event": "result", "outcome": "done", "error": null, "value": {...}}       the last one

It ends when its standard input does: its parent is gone then.
"""

from __future__ import annotations

import ctypes
import dataclasses
import faulthandler
import functools
import json
import os
import resource
import signal
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from tilewright.measure.compile_cache import own_compile_cache
from tilewright.tune.outcome import NotFinite, outcome_of
from tilewright.tune.store.record import Measurement, spread

if TYPE_CHECKING:  # torch takes seconds to import: a process without a parent is to be gone before
    from tilewright.train.metrics import Metrics
    from tilewright.train.schema import Train
    from tilewright.tune.search.generating import Generating

Job = dict[str, Any]
Say = Callable[[dict[str, Any]], None]
LOSSES = 20  # of the first steps, for a comparison of curves
_FLOAT32_STEPS = 3  # of the standard model in float32, which may be slow ones
_LONG = 10_000  # steps, before which whatever is to be known is known


class Enough(Exception):
    """Raised inside of a run to end it: its speed is known."""


def main() -> None:
    """Do the job that standard input has, and write events to what was standard output."""
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, most))  # to write a large one takes minutes, in which nothing ends it
    source, events = _take_pipes()
    parent = os.getppid()
    line = b""
    while not line.endswith(b"\n") and (piece := os.read(source, 1 << 16)):
        line += piece
    _end_with_parent(source, parent)

    def say(event: dict[str, Any]) -> None:
        events.write(json.dumps(event) + "\n")
        events.flush()

    begin_phase(say, "imports")
    say(attempt(line.decode(errors="replace"), say))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # at once: to shut down a compiler's workers takes seconds, and nobody needs them any more


def _take_pipes() -> tuple[int, TextIO]:
    """Standard input and output for this protocol alone.

    Nothing that a library, a driver or a child process prints may pass for an event, nor may it wait for input: they
    get standard error and an empty file.
    """
    source, events = os.dup(0), os.fdopen(os.dup(1), "w")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # said before a crash, not lost in it
    faulthandler.enable()  # where a crash was
    return source, events


def _end_with_parent(source: int, parent: int) -> None:
    """End this process, and what it has started, when its standard input ends; on Linux also if it hangs by then."""

    def watch() -> None:
        while os.read(source, 1 << 16):
            pass
        _end()

    threading.Thread(target=watch, daemon=True).start()
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
        if os.getppid() != parent:  # it died before that
            _end()


def _end() -> NoReturn:
    if os.getpgrp() == os.getpid():  # its processes are in a group of their own
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def begin_phase(say: Say, name: str) -> None:
    """Tell the parent that the trial's seconds belong to another phase from now on."""
    say({"event": "phase", "name": name})


def attempt(line: str, say: Say) -> dict[str, Any]:
    """Do a job and return the event of its result; a traceback goes to standard error."""
    kinds = {
        "measure": measure, "probe": _probe, "prove": _prove, "observe": observe, "rules": _rules,
        "probe generating": _generating, "measure generating": _generating, "prove generating": _generating,
    }  # fmt: skip
    try:
        job = json.loads(line)
        with own_compile_cache():
            outcome, value = kinds[job["kind"]](job, say)
        error = None
    except Exception as caught:
        traceback.print_exc()
        outcome, error = outcome_of(caught)
        value = None
    return {"event": "result", "outcome": outcome, "error": error, "value": value}


inherited_file_bytes = 0  # that the process this one was forked from had mapped of files, libraries above all


def host_bytes(name: str) -> int:
    """A number of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024


def peak_host_bytes() -> int:
    """The most memory this process has had at once.

    What is mapped of files does not count in a child until it is touched there; a run that imports for itself has it.
    """
    if Path("/proc/self/status").exists():  # on Linux the number below is inherited from the parent where it had more
        return host_bytes("VmHWM") + max(0, inherited_file_bytes - host_bytes("RssFile"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


def measure(job: Job, say: Say) -> tuple[str, dict[str, Any]]:
    """Train by the real loop until its speed is known; the outcome, and a `Measurement`."""
    from tilewright.train.profile import TAKES

    meter = Meter(job, TAKES if job["profile"] else 0, say)
    try:
        _train(job, say, step=meter.step, profile=meter.profile)
    except Enough as enough:
        return str(enough), dataclasses.asdict(meter.measurement())
    raise RuntimeError(f"the run was asked to end after {meter.steps} steps, before its speed was known.")


def observe(job: Job, say: Say) -> tuple[str, dict[str, Any]]:
    """Train until one step has been observed; the outcome, and the step's `Work`."""
    from tilewright.measure.work import Observation

    # A replay shows no ops; without it the kernels are the same.
    mode = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}
    compile = job["configuration"]["compile"]
    run = {**job["configuration"], "cuda_graphs": False, "compile": mode.get(compile, compile)}
    observation: Observation | None = None
    found: list[dict[str, Any]] = []

    def step(metrics: Metrics, steps: int) -> None:
        nonlocal observation
        if metrics.step == job["warm"]:
            begin_phase(say, "observe")
            observation = Observation(_is_compiled())
            observation.begin()
        elif observation is not None:  # it is told of a step when the next is on its way: that one was observed
            found.extend(work.as_dict() for work in observation.end())
            raise Enough("done")

    try:
        _train({**job, "configuration": run, "profile": False}, say, step=step)
    except Enough as enough:
        return str(enough), {"work": found}
    finally:
        if observation is not None:
            observation.close()
    raise RuntimeError("the run ended before a step was observed.")


def _is_compiled() -> bool:
    """Whether anything has been compiled, by the lever or by the user's model."""
    import torch._dynamo.utils

    return bool(torch._dynamo.utils.counters["frames"]["ok"])


def _train(job: Job, say: Say, **told: Callable[..., None]) -> None:
    """The run of a job; the one who is `told` of its steps ends it."""
    say({"event": "alive", "what": "starting"})
    from tilewright.train.load_config import from_dict
    from tilewright.train.loop import Shown, train

    def begin(facts: dict[str, Any]) -> None:
        say({"event": "alive", "what": "the first step, which compiles"})
        begin_phase(say, "first step")

    with tempfile.TemporaryDirectory(dir=job.get("folder"), ignore_cleanup_errors=True) as folder:
        config = _short_run(from_dict(job["configuration"]), folder, job["profile"])
        begin_phase(say, "device")
        open_device(config, job["memory_cap"])
        begin_phase(say, "build")
        run: Callable[[Train, Shown], object] = train
        if job["own_model"]:
            from tilewright.tune import own_model

            say({"event": "alive", "what": f"calling {job['own_model']}"})
            own = own_model.load(job["own_model"], job["path"], seed=config.seed)
            run = functools.partial(own_model.train, own)
        shown = Shown(
            begin=begin,
            say=lambda text: say({"event": "alive", "what": text}),
            trace=False,
            **told,
        )
        run(config, shown)


def _short_run(config: Train, folder: str, profile: bool) -> Train:
    """Return the run without what it would leave behind, ended by the meter.

    The learning rate rises as in the run itself, and then stays: its fall is measured by the length of a run, and the
    losses of two trials, or of a trial and the run itself, would not be comparable. A step whose loss is no number is
    noticed by the meter before the guard sees it, which would save a checkpoint.
    """
    warmup = min(config.schedule.warmup, config.steps)
    return dataclasses.replace(
        config, out=folder, steps=max(config.steps, _LONG), profile=profile,
        schedule=dataclasses.replace(config.schedule, name="constant", warmup=warmup),
        checkpoint=dataclasses.replace(config.checkpoint, every=0, final=False, resume="never"),
        guard=dataclasses.replace(config.guard, nan="stop", spike=0.0),
        log=dataclasses.replace(config.log, every=1, tensorboard=False),
        eval=dataclasses.replace(config.eval, every=0),
    )  # fmt: skip


def open_device(config: Train | Generating, most: int = 0) -> None:
    """Initialise CUDA where the run is on a GPU, and cap this process's memory."""
    import torch

    from tilewright.train.engine import device_of

    device = device_of(config)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.empty(1, device=device)
            if most:
                total = torch.cuda.get_device_properties().total_memory
                torch.cuda.set_per_process_memory_fraction(min(1.0, most / total))


class Meter:
    """Meter the steps of a run, and end it by `Enough` as soon as its speed is known.

    Those that a profile takes, and the `warm` ones after them, do not count. What is known then is in `measurement`.
    """

    def __init__(self, job: Job, profiled: int, say: Say) -> None:
        self._job, self._say, self._profiled = job, say, profiled
        self._skipped = profiled + job["warm"]
        self._counted: list[Metrics] = []
        self._losses: list[float] = []
        self._first = self._began = 0.0
        self._profile: dict[str, Any] = {}
        self.steps = 0

    def step(self, metrics: Metrics, steps: int) -> None:
        """Take note of a step, and decide whether there must be more."""
        self.steps = metrics.step
        if metrics.loss is None or metrics.gradient_norm is None:
            what = "loss" if metrics.loss is None else "gradient's norm"
            raise NotFinite(f"the {what} of step {metrics.step} is not a finite number.")
        self._say({"event": "step", "step": metrics.step, "seconds": metrics.seconds, "loss": metrics.loss})
        if metrics.step == 1:
            self._first = metrics.seconds
            begin_phase(self._say, "profile" if self._profiled else "warm up")
        if metrics.step <= LOSSES:
            self._losses.append(metrics.loss)
        if metrics.step <= self._skipped:
            self._began = time.monotonic()
            if metrics.step == self._skipped:
                begin_phase(self._say, "measure")
            return
        self._counted.append(metrics)
        self._decide()

    def _decide(self) -> None:
        job, seconds = self._job, [metrics.seconds for metrics in self._counted]
        if len(seconds) >= job["fewest"]:
            if 0 < job["stop_above"] < statistics.median(seconds) * (1 - spread(seconds)):
                raise Enough("stopped early")
            if spread(seconds) <= job["spread"] and sum(seconds) >= job["least"]:
                raise Enough("done")
            if self._is_beaten(seconds):
                raise Enough("done")
        late = len(seconds) >= 3 and time.monotonic() - self._began >= job["seconds"]  # of two nobody knows the spread
        if (len(seconds) >= job["most"] and sum(seconds) >= job["least"]) or late:
            raise Enough("done")

    def _is_beaten(self, seconds: list[float]) -> bool:
        """Whether a run is slower than the best beyond doubt: how much slower decides nothing.

        A GPU grows slower as it warms up, so what is too slow in its first steps stays so. By four standard deviations
        of the median, and where that is known well enough to be shown.
        """
        wide = spread(seconds)
        return wide <= self._job["widest"] and 0 < self._job["best"] < statistics.median(seconds) * (1 - 2 * wide)

    def profile(self, found: dict[str, Any]) -> None:
        self._profile = found
        self._say({"event": "alive", "what": "profiled"})
        begin_phase(self._say, "warm up")

    def measurement(self) -> Measurement:
        """Return the measurement that the counted steps make."""
        last = self._counted[-1]
        allocated = [one.memory_allocated for one in self._counted if one.memory_allocated is not None]
        used = [(one.mfu, one.hfu) for one in self._counted if one.mfu is not None and one.hfu is not None]
        return Measurement(
            tokens_per_step=round(last.tokens_per_second * last.seconds),
            step_seconds=[one.seconds for one in self._counted],
            first_step_seconds=self._first,
            data_wait=statistics.median(one.data_wait for one in self._counted),
            losses=self._losses,
            bytes=max(allocated, default=0) or peak_host_bytes(),
            memory=self._profile.get("memory_measured", {}),
            profile=self._profile.get("time"),
            mfu=statistics.median(mfu for mfu, _ in used) if used else None,
            hfu=statistics.median(hfu for _, hfu in used) if used else None,
        )


def _probe(job: Job, say: Say) -> tuple[str, dict[str, Any]]:
    say({"event": "alive", "what": "starting"})
    from tilewright.tune.worker.probe import probe

    begin_phase(say, "measure")
    return "done", probe(job, say)


def _rules(job: Job, say: Say) -> tuple[str, dict[str, Any]]:
    say({"event": "alive", "what": "starting"})
    from tilewright.train.load_config import from_dict
    from tilewright.tune.worker.rules import measure_rules

    begin_phase(say, "device")
    open_device(from_dict(job["configuration"]))
    return "done", measure_rules(job, say)


def _prove(job: Job, say: Say) -> tuple[str, dict[str, Any]]:
    say({"event": "alive", "what": "starting"})
    from tilewright.train.load_config import from_dict
    from tilewright.tune.proof.prove import prove

    begin_phase(say, "device")
    open_device(from_dict(job["configuration"]))
    found = dataclasses.asdict(prove(job, say))
    if job.get("curve"):
        say({"event": "proof", "value": found})  # whatever comes of the rest, it is one without that
        try:
            found["curve"] = curve(job, say)
        except Exception as caught:
            traceback.print_exc()
            found["no_curve"] = f"the standard model in float32 did not run: {outcome_of(caught)[1]}"
    return "done", found


def _generating(job: Job, say: Say) -> tuple[str, dict[str, Any]]:
    from tilewright.tune.worker import generating

    kinds = {"probe": generating.probe, "measure": generating.measure, "prove": generating.check}
    return kinds[job["kind"].partition(" ")[0]](job, say)


def curve(job: Job, say: Say) -> list[float]:
    """The first losses of the standard model in float32, on the batches that trials have, as time allows."""
    from tilewright.train.load_config import from_dict
    from tilewright.tune.proof.prove import in_small_parts
    from tilewright.tune.search.standard import float32

    begin_phase(say, "losses in float32")
    run = from_dict(job["start"])
    run = in_small_parts(float32(run), run.batch_sizes(1).global_)
    losses: list[float] = []
    began = time.monotonic()

    def step(metrics: Metrics, steps: int) -> None:
        if metrics.loss is None:
            raise NotFinite(f"the loss of step {metrics.step} is not a finite number.")
        losses.append(metrics.loss)
        if len(losses) == _FLOAT32_STEPS or time.monotonic() - began > job["curve"]:
            raise Enough("done")

    try:
        whole = {**job, "configuration": dataclasses.asdict(run), "profile": False, "memory_cap": 0}
        _train(whole, lambda event: say(event) if event["event"] != "phase" else None, step=step)
    except Enough:
        return losses
    raise RuntimeError("the run ended before its losses were known.")


if __name__ == "__main__":
    main()
