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

A job with `ranks` above 1 has this process fork the others (`tune.worker.ranks`), and be the first of them.

It ends when its standard input does: its parent is gone then.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import faulthandler
import functools
import json
import math
import os
import resource
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TextIO

from tilewright.measure.compile_cache import own_compile_cache
from tilewright.tune.outcome import NotFinite, outcome_of
from tilewright.tune.worker.meter import Enough, Job, Meter, Say, begin_phase, peak_of
from tilewright.tune.worker.ranks import end_group, fork_ranks, has_lost_another, joined

if TYPE_CHECKING:  # torch takes seconds to import: a process without a parent is to be gone before
    from tilewright.train.metrics import Metrics
    from tilewright.train.schema import Train
    from tilewright.tune.search.generating import Generating

_FLOAT32_STEPS = 3  # of the standard model in float32, which may be slow ones
_LONG = 10_000  # steps, before which whatever is to be known is known


def main() -> None:
    """Do the job that standard input has, and write events to what was standard output."""
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, most))  # to write a large one takes minutes, in which nothing ends it
    source, events = _take_pipes()
    parent = os.getppid()
    line = b""
    while not line.endswith(b"\n") and (piece := os.read(source, 1 << 16)):
        line += piece
    text = line.decode(errors="replace")
    rank = fork_ranks(_ranks_of(text), source, events, parent)  # before there is a thread, or torch
    _end_with_parent(rank.source, rank.parent)
    begin_phase(rank.say, "imports")
    rank.conclude(attempt(text, rank.say, rank.number))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # at once: to shut down a compiler's workers takes seconds, and nobody needs them any more


def _ranks_of(line: str) -> int:
    """The ranks that a job asks for; what is wrong with a job is an outcome of its attempt."""
    try:
        return max(1, int(json.loads(line)["ranks"]))
    except (ValueError, TypeError, KeyError, RecursionError):
        return 1


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
        end_group()

    threading.Thread(target=watch, daemon=True).start()
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
        if os.getppid() != parent:  # it died before that
            end_group()


def attempt(line: str, say: Say, rank: int = 0) -> dict[str, Any]:
    """Do a job, or one rank's part of it, and return the event of its result; a traceback goes to standard error."""
    kinds = {
        "measure": measure, "probe": _probe, "prove": _prove, "observe": observe, "rules": _rules,
        "links": _links, "first steps": _first_steps,
        "probe generating": _generating, "measure generating": _generating, "prove generating": _generating,
    }  # fmt: skip
    lost = False
    try:
        job = {**json.loads(line), "rank": rank}
        with own_compile_cache(), joined(job):
            outcome, value = kinds[job["kind"]](job, say)
        error = None
    except Exception as caught:
        traceback.print_exc()
        outcome, error = outcome_of(caught)
        value, lost = None, has_lost_another(caught)
    return {"event": "result", "outcome": outcome, "error": error, "value": value, "lost": lost}


def measure(job: Job, say: Say) -> tuple[str, dict[str, Any]]:
    """Train by the real loop until its speed is known; the outcome, and a `Measurement`."""
    from tilewright.train.profile import TAKES

    if job["rank"]:  # the first is to know how much memory this one takes
        _train(
            job, say, on_every_rank=True, step=lambda metrics, _: say({"event": "memory", "bytes": peak_of(metrics)})
        )
        return "done", {}
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


def _train(job: Job, say: Say, on_every_rank: bool = False, **told: Callable[..., None]) -> None:
    """The run of a job; the one who is `told` of its steps ends it."""
    say({"event": "alive", "what": "starting"})
    from tilewright.train.load_config import from_dict
    from tilewright.train.loop import train
    from tilewright.train.shown import Shown

    def begin(facts: dict[str, Any]) -> None:
        say({"event": "alive", "what": "the first step, which compiles"})
        begin_phase(say, "first step")

    with _run_folder(job) as folder:
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
            on_every_rank=on_every_rank,
            **told,
        )
        run(config, shown)


@contextlib.contextmanager
def _run_folder(job: Job) -> Iterator[str]:
    """A folder for what a run writes, the same for all ranks of a trial; then its parent removes it."""
    if job.get("ranks", 1) > 1:
        yield os.path.join(job["folder"], "run")
        return
    with tempfile.TemporaryDirectory(dir=job.get("folder"), ignore_cleanup_errors=True) as folder:
        yield folder


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


def _probe(job: Job, say: Say) -> tuple[str, dict[str, Any]]:
    say({"event": "alive", "what": "starting"})
    from tilewright.tune.worker.probe import probe

    begin_phase(say, "measure")
    return "done", probe(job, say)


def _links(job: Job, say: Say) -> tuple[str, dict[str, Any]]:
    from tilewright.train.engine import device_of
    from tilewright.train.load_config import from_dict
    from tilewright.tune.worker.links import measure_links

    begin_phase(say, "measure")
    return "done", measure_links(device_of(from_dict(job["configuration"])))


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
    whole = {**job, "configuration": dataclasses.asdict(run), "steps": _FLOAT32_STEPS}
    return _losses_and_norms(whole, say, job["curve"])[0]


def _first_steps(job: Job, say: Say) -> tuple[str, dict[str, Any]]:
    """The losses and the gradient's norms of the first `steps` of a run."""
    begin_phase(say, "proof: layout")
    losses, norms = _losses_and_norms(job, say)
    return "done", {"losses": losses, "norms": norms}


def _losses_and_norms(job: Job, say: Say, seconds: float = math.inf) -> tuple[list[float], list[float]]:
    losses: list[float] = []
    norms: list[float] = []
    began = time.monotonic()

    def step(metrics: Metrics, steps: int) -> None:
        if metrics.loss is None or metrics.gradient_norm is None:
            raise NotFinite(f"the loss or the gradient's norm of step {metrics.step} is not a finite number.")
        losses.append(metrics.loss)
        norms.append(metrics.gradient_norm)
        if len(losses) == job["steps"] or time.monotonic() - began > seconds:
            raise Enough("done")

    try:
        quiet = {**job, "profile": False, "memory_cap": 0}
        _train(quiet, lambda event: say(event) if event["event"] != "phase" else None, step=step)
    except Enough:
        return losses, norms
    raise RuntimeError("the run ended before its losses were known.")


if __name__ == "__main__":
    main()
