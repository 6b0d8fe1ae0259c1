"""The training loop.

    batches -> gradients of the micro batches -> one update -> metrics; a checkpoint now and then

The loop does not wait for the device. What a step found (loss, norm of the gradient, whether it was skipped) is read a
step later, while the device works on the next one. So a run that stops for a bad loss stops a step after it, with the
bad step undone on the device itself.

Nothing but a lock is written to the run's folder before everything that can be wrong has been looked at: the
configuration, who else writes there, the checkpoint, the data.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from pathlib import Path

import torch
from torch import Tensor

from tilewright import __version__, hardware
from tilewright.errors import UserError
from tilewright.measure.compile_cache import own_compile_cache
from tilewright.measure.machine import describe
from tilewright.measure.results import SCHEMA
from tilewright.parallel.agree import require_same
from tilewright.parallel.mesh import limit_waiting
from tilewright.parallel.own_time import Slowest, seconds
from tilewright.plan.decoder import from_gpt
from tilewright.plan.memory import train as plan_memory
from tilewright.tilesync import raise_if_failed
from tilewright.train.check_ranks import check_ranks
from tilewright.train.checkpoint import Checkpoints
from tilewright.train.data import Batches, first_samples, open_dataset
from tilewright.train.engine import Engine, check_levers, device_of, precision_of, restored_modes
from tilewright.train.guard import Watch
from tilewright.train.load_config import write_yaml
from tilewright.train.memory_plan import planned, policies, refuse_misfit
from tilewright.train.metrics import Journal, Metrics, Rates, memory
from tilewright.train.pending import PendingStep
from tilewright.train.profile import TAKES, profile_run
from tilewright.train.resume import load_checkpoint
from tilewright.train.schedule import learning_rate
from tilewright.train.schema import RECORDING, Train
from tilewright.train.sentences import as_sentences
from tilewright.train.shown import Outcome, Shown
from tilewright.train.signals import Signals
from tilewright.train.world import World

STALL = 0.05  # of the time spent waiting for data is worth a word
_PATIENCE = 5.0  # seconds between two words about the same thing
_FEWEST = 20  # steps before anything is said of it, or of a slow rank


def train(config: Train, shown: Shown | None = None) -> Outcome:
    """Train a model as configured; goes on from the newest checkpoint of the run's folder.

    >>> import tempfile
    >>> from tilewright.train.schema import Data, Model
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     train(Train(out=folder, steps=2, model=Model(width=16, layers=1), data=Data(workers=0))).step
    2
    """
    with (
        as_sentences(), own_compile_cache(), restored_modes(), Signals() as signals, contextlib.ExitStack() as closing
    ):  # fmt: skip
        run = _Run(config, shown or Shown(), signals, closing)
        outcome = run.go()
        run.shown.end(outcome)
        return outcome


class _Run:
    def __init__(self, config: Train, shown: Shown, signals: Signals, closing: contextlib.ExitStack) -> None:
        self.config, self.signals, self.closing = config, signals, closing
        require_same({"tilewright": __version__, "torch": torch.__version__}, "version")
        require_same(dataclasses.asdict(config), "configuration")  # before anything that depends on it
        self.device = device_of(config)
        if self.device.type == "cuda":
            closing.enter_context(torch.cuda.device(self.device))
        layout, self.sizes = check_ranks(config, World.size())
        self.records = config.cuda_graphs or config.compile in RECORDING
        check_levers(config, self.device, self.sizes.accumulation)
        self.precision = precision_of(config, self.device)
        self.plan = planned(config, self.precision, self.sizes.micro, self.sizes.accumulation, layout)
        if layout.wrap:
            closing.enter_context(World.of_one(self.device))
        self.world = World.current(layout, self.device.type)
        self.shown = shown if self.world.is_rank_zero or shown.on_every_rank else Shown()
        self.policies = policies(config, self.plan)
        peak, self.peak_source = hardware.peak(
            torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else None,
            {"fp32": "fp32", "tf32": "tf32"}.get(self.precision, "bf16"),
            config.log.peak_tflops or None,
            "log.peak_tflops",
        )
        self.decoder = from_gpt(config.model)
        refuse_misfit(self.decoder, self.plan, self.policies, self.device)
        self.rates = Rates(self.decoder, self.policies, peak, self.world.ranks)
        self.folder = Path(config.out)
        self.dataset = open_dataset(
            config.data, sequence=config.model.sequence, vocabulary=config.model.vocabulary,
            micro_batch=self.sizes.micro, held_out=config.eval.share, progress=self._tokenising,
        )  # fmt: skip
        # Which samples this run draws, in which order: two runs with the same facts draw the same.
        self.data_facts = {
            "data.kind": config.data.kind, "data.seed": config.data.seed, "data.shuffle": config.data.shuffle,
            "eval.held_out": config.eval.share, **self.dataset.fingerprint(),
        }  # fmt: skip
        require_same(self.data_facts, "data set")
        self.engine = Engine(config, self.device, self.world, self.policies)
        self.watch = Watch(config.guard, self.folder, self.world.rank)
        settings = config.checkpoint
        self.checkpoints = Checkpoints(
            self.folder / "checkpoints", keep=settings.keep, asynchronous=settings.asynchronous
        )
        closing.callback(self.checkpoints.close)
        limit_waiting(config.parallel.timeout)
        self.samples = 0  # consumed: the whole state of the data
        self.step = self.saved = self.resumed = self._resume()
        self.peak = 0  # bytes allocated at once while recording
        self.limit = torch.tensor(math.inf, device=self.device)
        self.asked = torch.zeros((), device=self.device)
        self.heard = False  # that some rank was asked to stop
        self.pending: PendingStep | None = None
        self.before: PendingStep | None = None  # the last step that was read
        self.speeds: list[float] = []
        self.waited = self.worked = 0.0  # seconds, of all steps but the first
        self.last_loss: float | None = None
        self.validation_loss: float | None = None
        self.paused = 0.0  # seconds of the evaluation since the last step
        self.own = 0.0  # seconds of this rank's own work that the others have not heard of
        self.slowest = Slowest()

    def _resume(self) -> int:
        """The step that the run goes on from; 0 where it begins."""
        facts = load_checkpoint(self.config, self.checkpoints, self.engine.tensors, self.data_facts)
        if facts is None:
            return 0
        self.watch.recent.extend((step, loss) for step, loss in facts["recent_losses"])
        self.watch.in_a_row = facts["skipped_in_a_row"]
        self.samples = facts["samples"]
        return facts["step"]

    def go(self) -> Outcome:
        config, steps = self.config, self.config.steps
        if self.step >= steps:
            self.shown.say(f"{self.folder} is at step {self.step} already; raise steps to go on.")
            return self._outcome()
        self._open()
        if config.profile:
            self._profile()
        while self.step < steps and not self._stops():
            self._advance()
        self._read_pending()
        if self.saved < self.step and (config.checkpoint.final or self.step < steps):
            self._save()
        self.checkpoints.wait()
        return self._outcome()

    def _open(self) -> None:
        """The data's workers, and after them what this run writes."""
        config = self.config
        firsts = first_samples(
            self.sizes.micro, self.sizes.accumulation, self.world.mesh.place("dp"), self.sizes.data, self.samples,
            self.samples + (config.steps - self.step) * self.sizes.global_,
        )  # fmt: skip
        self.batches = Batches(self.dataset, firsts, config.data.workers, self.device)
        self.closing.callback(self.batches.close)
        self.journal: Journal | None = None
        if self.world.is_rank_zero:
            write_yaml(config, self.folder / "config.yaml")
            self.journal = Journal(self.folder, self.step, config.log.tensorboard)
            self.closing.callback(self.journal.close)
        self.shown.begin({
            "schema": SCHEMA, "command": "train", "machine": describe(), "configuration": dataclasses.asdict(config),
            "parameters": config.model.parameters, "device": str(self.device), "precision": self.precision,
            "batch": self.sizes.as_dict(), "recompute": self.policies, "peak_source": self.peak_source,
            "convention": self.rates.formula, "resumed_from": self.step,
        })  # fmt: skip
        for warning in self.checkpoints.warnings:
            self.shown.say(warning)

    def _tokenising(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now > getattr(self, "_told", 0.0) + _PATIENCE:
            self._told = now
            self.shown.say(f"tokenising: {done / max(1, total):.0%}")

    def _profile(self) -> None:
        if self.config.steps - self.step < TAKES:
            self.shown.say(f"A profile takes {TAKES} steps, and fewer are left; raise steps for one.")
        elif self.world.is_rank_zero:
            predicted = plan_memory(self.decoder, self.plan)
            folder = self.folder / "profile"
            self.shown.profile(profile_run(self.engine, self._advance, predicted, folder, self.shown.trace))
        else:
            for _ in range(TAKES):
                self._advance()

    def _stops(self) -> bool:
        """Whether a signal came; of several processes each may get it, and all have to stop at the same step."""
        return self.signals.came if self.world.ranks == 1 else self.heard

    def _advance(self) -> None:
        """One step: put it on the device, read the one before, save where it is time to."""
        self.step += 1
        self.samples += self.sizes.global_
        # To compile can take minutes in which there is nothing to save, and is waited for in vain where a polite kill
        # went to the compiler's processes too. Of several ranks one that stops would leave the others waiting.
        compiling = self.config.compile != "none" and self.step == self.resumed + 1 and self.world.ranks == 1
        with self.signals.immediate() if compiling else contextlib.nullcontext():
            current = self._launch_step()
        self._read_pending(current)
        self.pending = current
        evaluates = self.config.eval.every
        if evaluates and (self.step % evaluates == 0 or self.step == self.config.steps):
            current.validation_loss = self._evaluate()
            self._read_pending()
        every = self.config.checkpoint.every
        if every and self.step % every == 0:
            self._read_pending()
            self._save()

    def _launch_step(self) -> PendingStep:
        """Put a step's work on the device."""
        config, accumulation = self.config, self.sizes.accumulation
        began, waited, losses, taken = time.perf_counter(), 0.0, [], []
        self.engine.own.running = True
        self.engine.seed(self.step)
        for number in range(accumulation):
            tokens = self.batches.next()
            waited += self.batches.waited
            taken.append(tokens)
            if self.world.mesh.layout.pp == 1:
                losses.append(self.engine.accumulate(tokens, number == 0, number == accumulation - 1, number))
        if self.world.mesh.layout.pp > 1:
            losses = self.engine.pipeline_step(taken)
        self.engine.own.running = False
        self.asked.fill_(float(self.signals.came))
        mesh = self.world.mesh
        told = torch.stack((torch.stack(losses).float().mean() * mesh.share, self.asked))
        summed = mesh.sum_(torch.cat((told, self._own_work())))
        rate = learning_rate(self.step, config.steps, config.optimizer.learning_rate, config.schedule)
        self.limit.fill_(self.watch.limit(self.step))
        updated = self.engine.update(summed[0], self.limit, rate, accumulation)
        found = torch.cat((summed[:2], updated, summed[2:]))
        ready = None
        if self.device.type == "cuda":
            host = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
            found = host.copy_(found, non_blocking=True)
            ready = torch.cuda.Event(enable_timing=True)
            ready.record()
        ended, held = time.perf_counter(), memory(self.device)
        # A replay allocates nothing: its recording did. What a compiler tries out in the first step is not the run's.
        recorded = self.records and (config.cuda_graphs or self.step > 1)
        if recorded and held["memory_allocated"] is not None:
            held["memory_allocated"] = self.peak = max(self.peak, held["memory_allocated"])
        paused, self.paused = self.paused, 0.0
        return PendingStep(self.step, began, rate, found, ready, ended, held, self.samples, waited, taken,
                        self.engine.own.take(), paused=paused)  # fmt: skip

    def _own_work(self) -> Tensor:
        """Now and then, a number for each rank: the seconds of its own work, as far as the steps were read."""
        ranks = self.world.ranks
        if ranks == 1 or self.step % max(_FEWEST, self.config.log.every):
            return torch.zeros(0, device=self.device)
        works = torch.zeros(ranks, device=self.device)
        works[self.world.rank] = self.own
        self.own = 0.0
        return works

    def _evaluate(self) -> float:
        """The mean loss of held-out sequences, of which each rank takes its share."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()  # the step's own time is not counted here
        began, micro = time.perf_counter(), self.sizes.micro
        count = min(self.config.eval.samples, self.dataset.held)
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        ranks, rank = self.sizes.data, self.world.mesh.place("dp")
        for start in range(0, count, ranks * micro):  # as often on every rank: weights are gathered for it
            first = start + rank * micro
            rows = min(micro, count - first)
            tokens = self.dataset.held_out(first if rows > 0 else 0, max(1, rows)).to(self.device).long()
            loss = self.engine.evaluate(tokens)
            total[0] += loss * max(0, rows)
            total[1] += max(0, rows)
        self.world.mesh.sum_(total.mul_(self.world.mesh.share))
        summed, seen = total.tolist()
        self.paused = time.perf_counter() - began
        return summed / seen

    def _read_pending(self, behind: PendingStep | None = None) -> None:
        """Read the step that is pending, if one is. A bad one ends the run, saved: the device has undone the step."""
        if self.pending is None:
            return
        pending, self.pending = self.pending, None
        try:
            self._read(pending)
        except UserError:
            if behind is not None:
                with contextlib.suppress(UserError):
                    self._read(behind)
            self._save()
            self.checkpoints.wait()
            raise

    def _read(self, step: PendingStep) -> None:
        """Read a step's metrics and pass them to every listener."""
        if step.ready is not None:
            step.ready.synchronize()
        raise_if_failed()  # a recording that is replayed does not
        loss, asked, norm, skipped, *works = step.found.tolist()
        share = works.pop(0) if self.engine.mixtures else None
        if step.step > self.resumed + 1:  # the first one compiles, and each rank for itself
            self.own += step.waited + seconds(step.own)
        self.heard |= asked > 0
        compared, slow = self.slowest.take(works) if works else ({}, "")
        took, self.before = step.seconds(self.before), step
        speed = self.sizes.global_ * self.config.model.sequence / took
        self.speeds.append(speed)
        self.last_loss = loss if math.isfinite(loss) else None
        metrics = Metrics(  # type: ignore[arg-type]  # what `at_speed` and `memory` return has the names of fields
            step=step.step, loss=self.last_loss, gradient_norm=norm if math.isfinite(norm) else None,
            skipped=bool(skipped), learning_rate=step.rate, samples=step.samples, seconds=took,
            data_wait=step.waited, **self.rates.at_speed(speed), **step.memory, validation_loss=step.validation_loss,
            largest_share=share, **compared,
        )  # fmt: skip
        if self.journal is not None:
            self.journal.write(metrics)
        if step.validation_loss is not None:
            self.validation_loss = step.validation_loss
            count = min(self.config.eval.samples, self.dataset.held)
            self.shown.say(
                f"step {step.step}: validation loss {step.validation_loss:.4f} of {count} sequences held out"
            )
        if step.step % self.config.log.every == 0 or step.step == self.config.steps:
            self.shown.step(metrics, self.config.steps)
        self._watch_data(step.waited, took)
        if slow:
            self.shown.say(slow)
        said = self.watch.take(step.step, loss, norm, bool(skipped), step.batches)
        if said:
            self.shown.say(said)

    def _watch_data(self, waited: float, seconds: float) -> None:
        """Say once that the run waits for its data, where it does so all the time."""
        steps = len(self.speeds)
        if steps == 1:  # the workers start, kernels are compiled
            return
        self.waited, self.worked = self.waited + waited, self.worked + seconds
        if steps == _FEWEST and self.waited > STALL * self.worked:
            self.shown.say(
                f"{self.waited / self.worked:.0%} of the time goes into waiting for data; raise data.workers, or pack "
                "the text into a token file with `tilewright data pack`."
            )

    def _save(self) -> None:
        facts = {
            "step": self.step, "samples": self.samples, "data": self.data_facts,
            "configuration": dataclasses.asdict(self.config), "recent_losses": list(self.watch.recent),
            "skipped_in_a_row": self.watch.in_a_row, "machine": describe(),
        }  # fmt: skip
        if self.journal is not None:
            self.journal.sync()  # a checkpoint is never ahead of the metrics
        self.checkpoints.save(self.step, self.engine.tensors(), facts)
        self.saved = self.step

    def _outcome(self) -> Outcome:
        steady = sorted(self.speeds[1:])
        speed = steady[len(steady) // 2] if steady else None
        stopped = self.step < self.config.steps
        return Outcome(self.step, self.last_loss, speed, stopped, self.checkpoints.warnings, self.validation_loss)
