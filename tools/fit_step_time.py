"""Fit the step-time model of `tilewright plan` to published runs, and write results/published/step_time.json.

    python tools/fit_step_time.py          fit, cross-validate, write; then copy the parameters to plan/calibration.py
    python tools/fit_step_time.py --keep   no fit: estimate every run by the parameters that calibration.py has

The parameters are those of `plan.calibration.FITTED`. The sum of Huber's loss over the logarithms of estimated over
measured MFU is made least by Gauss-Newton steps in the logarithms of the parameters, each drawn a little towards where
it starts, so that one which no run tells anything of stays there. Cross-validation leaves out one model size after the
other.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tilewright import hardware
from tilewright.plan import calibration, step
from tilewright.plan.decoder import Decoder, from_gpt
from tilewright.plan.gpt import preset
from tilewright.plan.parallel import Cluster, estimate
from tilewright.plan.training import Training

FOLDER = Path(__file__).parent.parent / "results" / "published"
# Where a fit starts: what is known without these runs, or guessed.
START = {
    "A100 matmul": 0.95, "H100 matmul": 0.95, "A100 attention": 1.0, "H100 attention": 0.8, "eager": 0.9,
    "heads of 64": 1.2, "attention ends": 300.0, "contention": 0.2, "round seconds": 3e-6,
}  # fmt: skip
_CHIPS = {"h100_80gb": "H100-SXM5", "a100_80gb": "A100-SXM4-80GB", "a100_40gb": "A100-SXM4-40GB"}
_NETWORK = {"h100_80gb": 50e9, "a100_80gb": 25e9, "a100_40gb": 25e9}  # bytes a second a GPU: 3.2 and 1.6 Tb/s a node
_HUBER = 0.08
_DRAWN = 0.03  # to where a parameter starts
_STEP = 1e-3  # of a logarithm, for derivatives

Run = tuple[Decoder, Training, Cluster]


def read(name: str) -> list[dict[str, str]]:
    """The rows of a file of published runs."""
    with (FOLDER / f"{name}.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def run_of(row: dict[str, str]) -> Run:
    """The run that a row describes: MPT is a GPT with fused loss and FlashAttention-2, under FSDP."""
    model = from_gpt(preset(row["model"], sequence=int(row["seq_len"])))
    reduce = "bf16" if row["precision"] == "bf16" else "fp32"
    training = Training(
        micro_batch=int(row["mbs"]), accumulation=int(row["gas"]), data=int(row["gpus"]), loss="fused",
        precision="fp8" if "fp8" in row["precision"] else "fsdp", reduce=reduce,
        recompute="full" if row["act_ckpt"] == "True" else "none",
        zero=2 if row.get("sharding") == "SHARD_GRAD_OP" else 3,
    )  # fmt: skip
    chip = hardware.find(_CHIPS[row["gpu"]])
    return model, training, Cluster(chip, int(row["gpus"]), network=_NETWORK[row["gpu"]])


def mfu(run: Run) -> float:
    """As estimated, in percent."""
    return 100 * estimate(*run).mfu


def ranked(pairs: list[tuple[dict[str, str], float]]) -> tuple[int, int]:
    """Of pairs of one model and precision on one kind of GPU, 3 points apart: how many come in the right order."""
    right = total = 0
    for (a, of_a), (b, of_b) in itertools.combinations(pairs, 2):
        alike = all(a[name] == b[name] for name in ("model", "gpu")) and ("fp8" in a["precision"]) == (
            "fp8" in b["precision"]
        )
        apart = float(a["mfu"]) - float(b["mfu"])
        if alike and abs(apart) > 3:
            total, right = total + 1, right + ((of_a - of_b) * apart > 0)
    return right, total


def _use(logs: np.ndarray) -> None:
    calibration.FITTED.update(zip(START, map(float, np.exp(logs)), strict=True))
    step._micro_batch.cache_clear()
    step._sums.cache_clear()


def _residuals(logs: np.ndarray, runs: list[Run], measured: list[float]) -> np.ndarray:
    _use(logs)
    found = [math.log(mfu(run) / value) for run, value in zip(runs, measured, strict=True)]
    return np.array([*found, *(_DRAWN * (logs - np.log(list(START.values()))))])


def _huber(residuals: np.ndarray) -> float:
    size = np.abs(residuals)
    return float(np.sum(np.where(size < _HUBER, size**2 / 2, _HUBER * (size - _HUBER / 2))))


def fit(rows: list[dict[str, str]]) -> np.ndarray:
    """The logarithms of the parameters that suit these rows best."""
    runs, measured = [run_of(row) for row in rows], [float(row["mfu"]) for row in rows]
    logs, damping = np.log(list(START.values())), 1e-3
    before = _residuals(logs, runs, measured)
    while damping < 1e3:
        columns = [(_residuals(logs + _STEP * one, runs, measured) - before) / _STEP for one in np.eye(len(logs))]
        jacobian = np.stack(columns, axis=1)
        weighted = jacobian.T * np.minimum(1.0, _HUBER / np.maximum(np.abs(before), 1e-12))
        square = weighted @ jacobian
        while damping < 1e3:
            change = np.linalg.solve(square + damping * np.diag(np.diag(square)), -weighted @ before)
            after = _residuals(logs + np.clip(change, -0.5, 0.5), runs, measured)
            if _huber(after) < _huber(before):
                break
            damping *= 5
        else:
            break
        logs, damping, gain = logs + np.clip(change, -0.5, 0.5), damping / 5, _huber(before) - _huber(after)
        before = after
        if gain < 1e-7:
            break
    return logs


def cross_validate(rows: list[dict[str, str]]) -> dict[str, float]:
    """Of runs whose model size was left out of the fit: the median of estimated over measured, and the ends."""
    ratios = []
    for size in sorted({row["model"] for row in rows}):
        _use(fit([row for row in rows if row["model"] != size]))
        ratios += [mfu(run_of(row)) / float(row["mfu"]) for row in rows if row["model"] == size]
    near = sum(abs(ratio - 1) < 0.1 for ratio in ratios) / len(ratios)
    return {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios), "within a tenth": near}


def estimates(fitted: list[dict[str, str]], held_out: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Every run with what is estimated of it."""
    names = ("model", "gpu", "precision")
    return [
        {**{name: row[name] for name in names}, "sequence": int(row["seq_len"]), "gpus": int(row["gpus"]),
         "micro_batch": int(row["mbs"]), "measured": float(row["mfu"]), "estimated": round(mfu(run_of(row)), 2),
         "held_out": rows is held_out}
        for rows in (fitted, held_out) for row in rows
    ]  # fmt: skip


def main() -> None:
    """Fit, or only estimate, and write."""
    fitted, held_out = read("llm_foundry"), read("llm_foundry_held_out")
    path = FOLDER / "step_time.json"
    if "--keep" in sys.argv:
        checked = json.loads(path.read_text(encoding="utf-8"))["cross_validation"]
    else:
        checked = cross_validate(fitted)
        _use(fit(fitted))
        calibration.FITTED.update({name: float(f"{value:.3g}") for name, value in calibration.FITTED.items()})
        step._micro_batch.cache_clear()
        step._sums.cache_clear()
    found: dict[str, Any] = {"parameters": dict(calibration.FITTED), "cross_validation": checked}
    found["ranked"] = {
        name: ranked([(row, mfu(run_of(row))) for row in rows])
        for name, rows in (("fitted", fitted), ("held out", held_out))
    }
    path.write_text(json.dumps({**found, "runs": estimates(fitted, held_out)}, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
