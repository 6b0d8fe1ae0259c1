"""All the trials of a study, one after the other, and what they say together."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tilewright.errors import UserError
from tilewright.plan.decoder import from_gpt
from tilewright.plan.flops import DEFAULT, check_possible, utilisation
from tilewright.tune.space import Setting
from tilewright.tune.trial import Result, Trial


@dataclass(frozen=True)
class Row:
    """A setting, what it gave, and how far its loss curve is from the float32 standard run's."""

    setting: Setting
    result: Result
    loss_difference: float | None
    speedup: float | None
    mfu: float | None


@dataclass(frozen=True)
class Study:
    """The float32 standard run that all are compared with, a row a setting, and how far the machine itself drifted.

    `drift` is the change of speed of the first setting, run once more at the end: what a ratio can be wrong by.
    """

    reference: Result
    rows: list[Row]
    drift: float | None = None

    def as_dict(self) -> dict[str, Any]:
        rows = []
        for row in self.rows:
            flat = dataclasses.asdict(row)
            flat["result"]["tokens_per_second"] = row.result.tokens_per_second
            rows.append(flat)
        return {"reference_losses": self.reference.losses, "rows": rows, "drift": self.drift}


SILENCE = 1800.0  # seconds; compiling a large model says nothing for minutes
Progress = Callable[[str, int, int], None]  # label of the trial, steps done, steps in all


def run_study(
    space: list[Setting],
    trial: Trial,
    peak_flops: float | None,
    progress: Progress,
    save: Callable[[Study], None] = lambda study: None,
) -> Study:
    """Run `trial` in float32 for the reference curve, then once under each setting of `space`; save after each."""
    save(Study(Result(error="has not run yet"), []))  # a place that cannot be written to shows before the work
    reference_trial = dataclasses.replace(
        trial, model=dataclasses.replace(trial.model, gpt_block="standard"), compile=False, precision="fp32", steps=0
    )
    study = Study(run_trial(reference_trial, "reference, float32", progress), [])
    save(study)
    for setting in space:
        result = run_trial(_under(setting, trial), str(setting), progress)
        study.rows.append(_row(setting, result, study, trial, peak_flops))
        save(study)
    before = study.rows[0].result.tokens_per_second
    if before is not None:
        again = dataclasses.replace(_under(space[0], trial), check_steps=0)
        after = run_trial(again, f"{space[0]}, again", progress).tokens_per_second
        study = dataclasses.replace(study, drift=after / before - 1.0 if after else None)
        save(study)
    return study


def _under(setting: Setting, trial: Trial) -> Trial:
    model = dataclasses.replace(trial.model, gpt_block=setting.gpt_block)
    return dataclasses.replace(trial, model=model, compile=setting.compile)


def _row(setting: Setting, result: Result, study: Study, trial: Trial, peak_flops: float | None) -> Row:
    difference = speedup = mfu = None
    if result.losses and study.reference.losses:
        difference = max(abs(a - b) for a, b in zip(result.losses, study.reference.losses, strict=True))
    rate = result.tokens_per_second
    if rate is not None:
        first = (study.rows[0].result if study.rows else result).tokens_per_second
        speedup = rate / first if first else None
        if peak_flops:
            found = utilisation(from_gpt(trial.model), rate, 1, peak_flops)
            mfu = found[DEFAULT].mfu
            try:
                check_possible(found, from_gpt(trial.model), 1, "bf16", None)
            except UserError as error:
                result, mfu = dataclasses.replace(result, error=str(error)), None
    return Row(setting, result, difference, speedup, mfu)


def run_trial(trial: Trial, label: str, progress: Progress, silence: float = SILENCE) -> Result:
    """Run a trial in its own process; a process that dies, or falls silent for too long, is a result too."""
    progress(label, 0, trial.total_steps)
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tilewright.tune.trial"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,  # so that its own children can be ended with it
        )
        assert process.stdin is not None and process.stdout is not None
        result = None
        watchdog = _Watchdog(process, silence)
        try:
            with contextlib.suppress(BrokenPipeError):  # it died before it read: its exit code says so below
                process.stdin.write(json.dumps(dataclasses.asdict(trial)))
                process.stdin.close()
            done = 0
            for line in process.stdout:
                watchdog.heard()
                event = json.loads(line)
                if event.pop("event") == "result":
                    result = Result(**event)
                else:
                    done += 1
                    progress(label, done, trial.total_steps)
            process.wait()
        finally:  # Ctrl-C: take the trial along
            watchdog.stop()
            _end(process)
        if result is not None:
            return result
        if watchdog.barked:
            return Result(error=f"the trial said nothing for {silence:g} s and was ended.")
        log.seek(0)
        last = log.read().decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
    return Result(error=f"the trial's process ended with code {process.returncode}: {last[0][:200]}")


def _end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class _Watchdog:
    """Ends a process that has not been heard of for `silence` seconds."""

    def __init__(self, process: subprocess.Popen[str], silence: float) -> None:
        self.process, self.silence, self.barked = process, silence, False
        self._stopped = threading.Event()
        self._heard = time.monotonic()
        threading.Thread(target=self._watch, daemon=True).start()

    def heard(self) -> None:
        self._heard = time.monotonic()

    def stop(self) -> None:
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(min(1.0, self.silence / 4)):
            if time.monotonic() - self._heard > self.silence:
                self.barked = True
                _end(self.process)
                return
