"""Why a measurement is not the prediction, part by part. The parts add up to the whole difference.

Time. A profile says how long the device worked on what, and how long on nothing. The profiler costs the host some
microseconds an op, so steps under it take longer than those that were measured: on a GPU only the gaps between kernels
grow by that, on a CPU everything does. It is taken out again before anything is compared.

Memory. Weights, gradients and optimizer states are known to the byte; what else was allocated at the peak is the
activations'. On a GPU, what the allocator lost between blocks and what the driver holds come on top.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilewright.plan.step import CATEGORIES
from tilewright.tune.search.predict import BEYOND, COMMUNICATION
from tilewright.tune.store.record import Difference, Measurement, Prediction

_LITTLE = 0.02  # of the predicted: no difference worth a reason
_HELD = ("weights", "gradients", "optimizer", "temporary buffers")
_WHY_MEMORY = {
    "weights": "parameters as the model has them",
    "gradients": "as many bytes as the parameters that are trained",
    "optimizer": "its states as they are kept",
    "temporary buffers": "workspaces of libraries, and the batch",
    "activations": "all else at the peak: kept for backward, 16-bit copies of weights, logits and loss",
    "process": "all else the process has: activations, the interpreter, libraries, what its allocator keeps",
    "fragmentation": "held by torch's allocator for other sizes than are asked for",
    "CUDA context": "what the driver counts beyond torch, other processes with it",
}


def explain(prediction: Prediction, measurement: Measurement, device: str) -> list[Difference]:
    """Every reason there is: differences in seconds add up to that of the step, those in bytes to that of the peak.

    Args:
        prediction: what was expected.
        measurement: what came of it.
        device: "cuda" or "cpu".

    >>> expected = Prediction(1.0, 0.5, {"matmul": 1.0}, 10.0, {"weights": 10.0})
    >>> found = explain(expected, Measurement(1, [1.5, 1.5, 1.5], 2.0, 0.0, [], 12), "cpu")
    >>> [(each.part, each.more, each.unit, each.why) for each in found]
    [('unexplained', 0.5, 's', 'not profiled'), ('process', 2.0, 'B', 'not taken apart')]
    """
    return [*_time(prediction, measurement, device), *_memory(prediction, measurement, device)]


def _time(prediction: Prediction, measurement: Measurement, device: str) -> list[Difference]:
    profile = measurement.profile
    if profile is None:
        return [Difference("unexplained", prediction.seconds, measurement.seconds, "s", "not profiled")]
    spent, idle, stretched = _without_profiler(profile, measurement.seconds, device)
    waited = min(measurement.data_wait, idle)
    rows = []
    for name in dict.fromkeys((*CATEGORIES, COMMUNICATION, *spent)):
        expected, actual = prediction.parts.get(name, 0.0), spent.get(name, 0.0)
        if expected or actual:
            rows.append(_kernels(name, expected, actual))
    if waited:
        rows.append(Difference("data wait", 0.0, waited, "s", "the next batch was not there in time"))
    expected, gaps = prediction.parts.get("idle", 0.0), idle - waited
    rows.append(Difference("launch gaps", expected, gaps, "s", _why_gaps(expected, gaps, stretched, device)))
    known = [sum(getattr(row, side) for row in rows) for side in ("predicted", "measured")]
    why = "work that overlapped, and steps under the profiler that were not like the others"
    rest = Difference("unexplained", prediction.seconds - known[0], measurement.seconds - known[1], "s", why)
    return [*rows, rest]


def _without_profiler(profile: Mapping[str, Any], seconds: float, device: str) -> tuple[dict[str, float], float, float]:
    """Seconds by category, and idle, as in a step of `seconds`; and how much longer it was under the profiler."""
    spent = {one["name"]: one["seconds"] for one in profile["categories"]}
    idle, stretched = profile["idle_seconds"], max(0.0, profile["seconds"] - seconds)
    if device == "cpu":
        scale = min(1.0, seconds / profile["seconds"])
        return {name: scale * value for name, value in spent.items()}, scale * idle, stretched
    return spent, max(0.0, idle - stretched), stretched


def _kernels(name: str, expected: float, actual: float) -> Difference:
    if name == "communication":
        return Difference(name, expected, actual, "s", "collectives, and waiting in them for other ranks")
    if name == "other" or not expected:
        why = "work that the plan knows nothing of"
    elif not actual:
        why = "none of it ran: other kernels have done this work"
    elif abs(actual - expected) <= _LITTLE * expected:
        why = "as expected"
    else:
        below = "below" if actual > expected else "above"
        why = f"kernels {below} what their kind reaches of its roofline, by {abs(actual / expected - 1):.0%}"
    return Difference(f"{name} kernels", expected, actual, "s", why)


def _why_gaps(expected: float, actual: float, stretched: float, device: str) -> str:
    if device == "cpu":
        return "between ops: Python, and torch on the way to an op"
    why = "the host launches ops more slowly than the device runs them" if actual > expected else (
        "the host keeps ahead of the device"
    )  # fmt: skip
    return why + (f"; {1e3 * stretched:.1f} ms more under the profiler, its own, are left out" if stretched else "")


def _memory(prediction: Prediction, measurement: Measurement, device: str) -> list[Difference]:
    found, plan = measurement.memory, prediction.memory
    rest = "activations" if device == "cuda" else "process"
    if not found:
        return [Difference(rest, prediction.bytes, measurement.bytes, "B", "not taken apart")]
    # The plan is of one moment: what it does not have there, gradients in most runs, was not there at the peak.
    rows = [_bytes(name, plan[name], found[name]) for name in _HELD if name in plan and name in found]
    known = [sum(getattr(row, side) for row in rows) for side in ("predicted", "measured")]
    rows.append(_bytes(rest, prediction.bytes - known[0], measurement.bytes - known[1]))
    if device == "cuda" and "total" in found:
        # From the total: the peak of a recorded step is its recording's, which the parts saw nothing of.
        context = found["CUDA context"]
        beyond = {"fragmentation": found["total"] - context - measurement.bytes, "CUDA context": context}
        rows += [_bytes(name, plan.get(name, 0.0), beyond[name]) for name in BEYOND]
    return rows


def _bytes(name: str, expected: float, actual: float) -> Difference:
    return Difference(name, expected, actual, "B", _WHY_MEMORY[name])
