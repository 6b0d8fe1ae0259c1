"""What DDP and FSDP2 cost by themselves: training steps of one rank, which shares with nobody, against the plain loop.

Every case is a run of the real loop: on a GPU of the preset 1b over NCCL, on a CPU of a small model over gloo with one
thread. The plain loop runs first and last, so that what the machine drifts by is seen.
"""

from __future__ import annotations

import gc
import math
import statistics
import tempfile
from collections.abc import Sequence
from typing import Any

import torch

from tilewright.bench.protocol import Ask, head, sentence
from tilewright.errors import UserError
from tilewright.train.load_config import read
from tilewright.train.loop import train
from tilewright.train.shown import Shown

CASES: dict[str, tuple[str, ...]] = {
    "plain": (),
    "DDP": ("parallel.wrap=true",),
    "FSDP2, zero 2": ("parallel.wrap=true", "parallel.zero=2"),
    "FSDP2, zero 3": ("parallel.wrap=true", "parallel.zero=3"),
    "plain, again": (),
}
_SHARED = (
    "data.kind=synthetic", "data.workers=0", "checkpoint.final=false", "schedule.warmup=0", "eval.every=0",
    "model.gpt_block=optimized", "model.loss=linear_fused",
)  # fmt: skip
_MODEL = {
    "cuda": ("model.preset=1b", "micro_batch=16", "global_batch=16", "device=cuda"),
    "cpu": ("model.width=256", "model.layers=4", "model.heads=4", "model.sequence=128", "model.vocabulary=4096",
            "micro_batch=4", "global_batch=4", "device=cpu", "threads=1"),
}  # fmt: skip
_STEPS = {"cuda": (6, 12), "cpu": (3, 24)}  # before those that are measured, and those
_QUICK = (2, 5)


def run(ask: Ask) -> dict[str, Any]:
    """Train by each for a few steps; `results/<gpu>/wrappers.json` holds the whole."""
    if ask.only:
        raise UserError("wrappers compares all of its runs with the plain loop: leave out --only.")
    result = head("wrappers", ask, needs_gpu=False)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    warm, steps = _QUICK if ask.quick else _STEPS[device]
    result |= {"device": device, "overrides": [*_MODEL[device], *_SHARED], "warm": warm, "cases": []}
    for name, overrides in CASES.items():
        case: dict[str, Any] = {"case": name, "overrides": list(overrides)}
        try:
            case["step_seconds"] = _measure([*result["overrides"], *overrides], warm, steps)
            line = f"{statistics.median(case['step_seconds']) * 1e3:,.1f} ms a step"
        except Exception as error:
            case |= {"error": sentence(error)}
            line = case["error"]
        result["cases"].append(case)
        ask.progress(f"{name}: {line}")
        ask.save(result)
        gc.collect()
        torch.cuda.empty_cache()
    result["overheads"] = overheads({each["case"]: each.get("step_seconds", []) for each in result["cases"]})
    for name, found in result["overheads"].items():
        tie = ", a tie" if abs(found["percent"]) <= found["spread"] else ""
        ask.progress(f"{name}: {found['percent']:+.2f} % of the plain loop's step, spread {found['spread']:.2f} %{tie}")
    ask.save(result)
    return result


def overheads(seconds: dict[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """By how many percent the median step of each is longer than the plain loop's, and the spread of that.

    The spread is the larger of two: what the medians' standard errors allow, and how far both plain runs are apart.

    >>> overheads({"plain": [1.0, 1.0], "DDP": [1.03, 1.03], "plain, again": [1.02, 1.02]})
    {'DDP': {'percent': 1.98, 'spread': 1.98}}
    """
    first, again = (seconds.get(name, ()) for name in ("plain", "plain, again"))
    plain = [*first, *again]
    if not first or not again:
        return {}
    drift = abs(statistics.median(first) - statistics.median(again)) / statistics.median(plain)
    found = {}
    for name, steps in seconds.items():
        if steps and not name.startswith("plain"):
            more = statistics.median(steps) / statistics.median(plain) - 1
            spread = max(drift, math.hypot(_error(steps), max(_error(first), _error(again))))
            found[name] = {"percent": round(100 * more, 2), "spread": round(100 * spread, 2)}
    return found


def _error(steps: Sequence[float]) -> float:
    """The standard error of a median, as a share of it."""
    return 1.25 * statistics.pstdev(steps) / math.sqrt(len(steps)) / statistics.median(steps)


def _measure(overrides: list[str], warm: int, steps: int) -> list[float]:
    """The seconds of each step after the first ones."""
    seconds: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        configuration = read(None, [*overrides, f"steps={warm + steps}", f"out={folder}"])
        ended = train(configuration.train, Shown(step=lambda metrics, _: seconds.append(metrics.seconds)))
    if ended.stopped:  # a run takes a signal for its own end; it was meant for all of them
        raise KeyboardInterrupt
    return seconds[warm:]
