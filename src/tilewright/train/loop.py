"""The training loop.

    batches -> gradients of the micro batches -> one update -> figures; a checkpoint now and then

The loop does not wait for the device. What a step found (loss, norm of the gradient, whether it was skipped) is read a
step later, while the device works on the next one. So a run that stops for a bad loss stops a step after it, with the
bad step undone on the device itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilewright import hardware
from tilewright.errors import UserError
from tilewright.measure.machine import describe
from tilewright.measure.results import SCHEMA
from tilewright.plan.batches import Batches as BatchSizes
from tilewright.plan.batches import solve
from tilewright.plan.decoder import from_gpt
from tilewright.train.checkpoint import Checkpoints
from tilewright.train.config import Train
from tilewright.train.configuration import write_yaml
from tilewright.train.data import open_batches
from tilewright.train.engine import Engine, device_of, precision_of, restored_modes
from tilewright.train.figures import Figures, Journal, Rates, memory
from tilewright.train.guard import Watch
from tilewright.train.recompute import planned, policies
from tilewright.train.schedule import learning_rate
from tilewright.train.world import World

STALL = 0.05  # of a step's time spent waiting for data is worth a word


@dataclass(frozen=True)
class Outcome:
    """Where a run ended."""

    step: int
    loss: float | None
    tokens_per_second: float | None  # the median of the steps after the first
    stopped: bool  # before its last step, by a signal
    warnings: list[str]


@dataclass(frozen=True)
class Shown:
    """How a run tells whoever watches: the facts it begins with, every step's figures, and what is worth a line."""

    begin: Callable[[dict[str, Any]], None] = lambda facts: None
    step: Callable[[Figures, int], None] = lambda figures, steps: None
    say: Callable[[str], None] = lambda text: None


@dataclass
class _Pending:
    """A step that the device may still be at work on."""

    step: int
    samples: int
    began: float
    rate: float
    waited: float
    found: Tensor  # loss, norm, skipped; on the host as soon as `ready` has happened
    ready: torch.cuda.Event | None
    ended: float  # of its work on the host
    batches: list[Tensor]

    def seconds(self, before: _Pending | None) -> float:
        """From the end of the step before to its own, on the device where there is one."""
        if self.ready is None:
            return self.ended - (self.began if before is None else before.ended)
        if before is None or before.ready is None:
            return time.perf_counter() - self.began
        return before.ready.elapsed_time(self.ready) / 1e3


def train(config: Train, shown: Shown | None = None) -> Outcome:
    """Train a model as configured; goes on from the newest checkpoint of the run's folder.

    >>> import tempfile
    >>> from tilewright.train.config import Data, Model
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     train(Train(out=folder, steps=2, model=Model(width=16, layers=1), data=Data(workers=0))).step
    2
    """
    with restored_modes(), _Signals() as signals:
        run = _Run(config, shown or Shown())
        try:
            return run.go(signals)
        finally:
            run.close()


class _Run:
    def __init__(self, config: Train, shown: Shown) -> None:
        self.config, self.shown, self.world = config, shown, World.current()
        self.device = device_of(config)
        self.sizes = batch_sizes(config, self.world.ranks)
        self.precision = precision_of(config, self.device)
        self.plan = planned(config, self.precision, self.sizes.micro, self.sizes.accumulation, self.world.ranks)
        self.policies = policies(config, self.plan)
        peak, source = hardware.peak(
            torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else None,
            {"fp32": "fp32", "tf32": "tf32"}.get(self.precision, "bf16"),
            config.log.peak_tflops or None,
            "log.peak_tflops",
        )
        decoder = from_gpt(config.model)
        self.rates = Rates(decoder, self.policies, peak, self.world.ranks)
        self.folder = Path(config.out)
        if self.world.speaks:
            write_yaml(config, self.folder / "config.yaml")
        self.engine = Engine(config, self.device, self.world, self.policies)
        self.watch = Watch(config.guard, self.folder)
        self.closing = contextlib.ExitStack()
        settings = config.checkpoint
        self.checkpoints = Checkpoints(
            self.folder / "checkpoints", keep=settings.keep, asynchronous=settings.asynchronous
        )
        self.closing.callback(self.checkpoints.close)
        self.warnings: list[str] = []
        self.samples = 0  # consumed: the whole state of the data
        self.step = self._resume()
        self.limit = torch.tensor(math.inf, device=self.device)
        self.journal = Journal(self.folder, self.step, config.log.tensorboard) if self.world.speaks else None
        if self.journal is not None:
            self.closing.callback(self.journal.close)
        self.before: _Pending | None = None  # the last step that was read
        self.speeds: list[float] = []
        self.last_loss: float | None = None
        facts = {
            "schema": SCHEMA, "command": "train", "machine": describe(), "configuration": dataclasses.asdict(config),
            "parameters": config.model.parameters, "device": str(self.device), "precision": self.precision,
            "batch": self.sizes.as_dict(), "recompute": self.policies, "peak_source": source,
            "convention": self.rates.formula, "resumed_from": self.step,
        }  # fmt: skip
        self.shown.begin(facts)

    def _resume(self) -> int:
        how = self.config.checkpoint.resume
        if how == "never":
            if self.checkpoints.newest() is not None:
                raise UserError(f"{self.folder} has checkpoints; choose another `out`, or checkpoint.resume=auto.")
            return 0
        tensors = self.engine.tensors()
        if how == "auto":
            facts = self.checkpoints.load_newest(tensors)
            self.warnings += self.checkpoints.warnings
        else:
            facts = self.checkpoints.load(Path(how), tensors)
        if facts is None:
            return 0
        self.engine.adopt_random_state()
        self.watch.recent.extend(facts["recent_losses"])
        self.watch.in_a_row = facts["skipped_in_a_row"]
        self.samples = int(facts["samples"])
        return int(facts["step"])

    def go(self, signals: _Signals) -> Outcome:
        config, steps = self.config, self.config.steps
        for warning in self.warnings:
            self.shown.say(warning)
        if self.step >= steps:
            self.shown.say(f"{self.folder} is at step {self.step} already; raise steps to go on.")
            return self._outcome(False)
        batches = open_batches(
            config.data, sequence=config.model.sequence, vocabulary=config.model.vocabulary,
            micro_batch=self.sizes.micro, accumulation=self.sizes.accumulation, rank=self.world.rank,
            ranks=self.world.ranks, start=self.samples, stop=self.samples + (steps - self.step) * self.sizes.global_,
            device=self.device,
        )  # fmt: skip
        self.closing.callback(batches.close)
        pending: _Pending | None = None
        saved = self.step
        while self.step < steps and not signals.came:
            self.step += 1
            self.samples += self.sizes.global_
            current = self._one(batches)
            if pending is not None:
                self._read(pending)
            pending = current
            due = config.checkpoint.every and self.step % config.checkpoint.every == 0
            if due or self.step == steps or signals.came:
                self._read(pending)
                pending = None
                self._save()
                saved = self.step
        if pending is not None:
            self._read(pending)
        if saved < self.step:
            self._save()
        self.checkpoints.wait()
        return self._outcome(self.step < steps)

    def _one(self, batches: Any) -> _Pending:
        """Put a step's work on the device."""
        config, accumulation = self.config, self.sizes.accumulation
        began, waited, losses, taken = time.perf_counter(), 0.0, [], []
        for number in range(accumulation):
            tokens = batches.next()
            waited += batches.waited
            taken.append(tokens)
            losses.append(self.engine.accumulate(tokens, first=number == 0))
        loss = torch.stack(losses).float().mean()
        if self.world.ranks > 1:
            loss /= self.world.ranks
            self.world.sum_([loss])
        rate = learning_rate(self.step, config.steps, config.optimizer.learning_rate, config.schedule)
        self.limit.fill_(self.watch.limit)
        found = torch.cat((loss[None], self.engine.update(loss, self.limit, rate, accumulation)))
        ready = None
        if self.device.type == "cuda":
            host = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
            found = host.copy_(found, non_blocking=True)
            ready = torch.cuda.Event(enable_timing=True)
            ready.record()
        return _Pending(self.step, self.samples, began, rate, waited, found, ready, time.perf_counter(), taken)

    def _read(self, step: _Pending) -> None:
        """What a step has found, told to everybody who wants to know."""
        if step.ready is not None:
            step.ready.synchronize()
        loss, norm, skipped = step.found.tolist()
        seconds, self.before = step.seconds(self.before), step
        speed = self.sizes.global_ * self.config.model.sequence / seconds
        self.speeds.append(speed)
        self.last_loss = loss if math.isfinite(loss) else None
        figures = Figures(  # type: ignore[arg-type]  # what `of` and `memory` return has the names of fields
            step=step.step, loss=self.last_loss, gradient_norm=norm if math.isfinite(norm) else None,
            skipped=bool(skipped), learning_rate=step.rate, samples=step.samples, seconds=seconds,
            data_wait=step.waited, **self.rates.of(speed), **memory(self.device),
        )  # fmt: skip
        if self.journal is not None:
            self.journal.write(figures)
            if step.step % self.config.log.every == 0 or step.step == self.config.steps:
                self.shown.step(figures, self.config.steps)
            if len(self.speeds) > 2 and step.waited > STALL * seconds:
                self.shown.say(
                    f"step {step.step} waited {step.waited * 1e3:.0f} ms for data, {step.waited / seconds:.0%} of its "
                    "time; raise data.workers, or pack the text into a token file with `tilewright data pack`."
                )
        said = self.watch.take(step.step, loss, bool(skipped), step.batches)
        if said:
            self.shown.say(said)

    def _save(self) -> None:
        facts = {
            "step": self.step, "samples": self.samples,
            "configuration": dataclasses.asdict(self.config), "recent_losses": list(self.watch.recent),
            "skipped_in_a_row": self.watch.in_a_row, "machine": describe(),
        }  # fmt: skip
        self.checkpoints.save(self.step, self.engine.tensors(), facts)

    def _outcome(self, stopped: bool) -> Outcome:
        steady = sorted(self.speeds[1:])
        return Outcome(self.step, self.last_loss, steady[len(steady) // 2] if steady else None, stopped, self.warnings)

    def close(self) -> None:
        self.closing.close()


def batch_sizes(config: Train, ranks: int) -> BatchSizes:
    """Micro batch, global batch and accumulation, each given or derived; a micro batch of 8 where none is given."""
    given = {"micro": config.micro_batch, "global_": config.global_batch, "accumulation": config.accumulation}
    if not config.micro_batch and not (config.global_batch and config.accumulation):
        share = config.global_batch // (ranks * (config.accumulation or 1))
        given["micro"] = min(8, share) if config.global_batch else 8
        if config.global_batch and given["micro"]:
            while share % given["micro"]:
                given["micro"] -= 1
    return solve(data=ranks, tensor=1, pipeline=1, **{name: value or None for name, value in given.items()})


class _Signals:
    """Ctrl-C and a polite kill end the run after its step, with a checkpoint; a second one at once."""

    def __init__(self) -> None:
        self.came = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        with contextlib.suppress(ValueError):  # not in the main thread: whoever started it decides
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: Any) -> None:
        if self.came:
            raise KeyboardInterrupt
        self.came = True

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
