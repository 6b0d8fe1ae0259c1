"""All the trials of a study, one after the other, and what they say together."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tilewright.plan.gpt import mfu
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
    """The float32 standard run that all are compared with, and a row a setting."""

    reference: Result
    rows: list[Row]

    def as_dict(self) -> dict[str, Any]:
        rows = []
        for row in self.rows:
            flat = dataclasses.asdict(row)
            flat["result"]["tokens_per_second"] = row.result.tokens_per_second
            rows.append(flat)
        return {"reference_losses": self.reference.losses, "rows": rows}


Progress = Callable[[str, int, int], None]  # label of the trial, steps done, steps in all


def run_study(space: list[Setting], trial: Trial, peak_flops: float | None, progress: Progress) -> Study:
    """Run `trial` in float32 for the reference curve, then once under each setting of `space`."""
    reference_trial = dataclasses.replace(
        trial, model=dataclasses.replace(trial.model, gpt_block="standard"), compile=False, precision="fp32", steps=0
    )
    reference = run_trial(reference_trial, "reference, float32", progress)
    rows: list[Row] = []
    for setting in space:
        model = dataclasses.replace(trial.model, gpt_block=setting.gpt_block)
        result = run_trial(dataclasses.replace(trial, model=model, compile=setting.compile), str(setting), progress)
        rows.append(_row(setting, result, reference, rows[0].result if rows else result, trial, peak_flops))
    return Study(reference, rows)


def _row(
    setting: Setting, result: Result, reference: Result, first: Result, trial: Trial, peak_flops: float | None
) -> Row:
    difference = speedup = utilisation = None
    if result.losses and reference.losses:
        difference = max(abs(a - b) for a, b in zip(result.losses, reference.losses, strict=True))
    rate = result.tokens_per_second
    if rate is not None:
        speedup = rate / first.tokens_per_second if first.tokens_per_second else None
        utilisation = mfu(rate, trial.model.flops_per_token, peak_flops) if peak_flops else None
    return Row(setting, result, difference, speedup, utilisation)


def run_trial(trial: Trial, label: str, progress: Progress) -> Result:
    """Run a trial in its own process; a crash of that process is a result too."""
    progress(label, 0, trial.total_steps)
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tilewright.tune.trial"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        assert process.stdin is not None and process.stdout is not None
        result = None
        try:
            with contextlib.suppress(BrokenPipeError):  # it died before it read: its exit code says so below
                process.stdin.write(json.dumps(dataclasses.asdict(trial)))
                process.stdin.close()
            done = 0
            for line in process.stdout:
                event = json.loads(line)
                if event.pop("event") == "result":
                    result = Result(**event)
                else:
                    done += 1
                    progress(label, done, trial.total_steps)
            process.wait()
        finally:  # Ctrl-C: take the trial along
            if process.poll() is None:
                process.kill()
                process.wait()
        if result is not None:
            return result
        log.seek(0)
        last = log.read().decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
    return Result(error=f"the trial's process ended with code {process.returncode}: {last[0][:200]}")
