"""What a step of a user's own model will take, from what its first step asked for and what this machine can do.

A probe has counted the FLOPs of matmuls and attention and the bytes that all other ops move, in the precision of the
baseline. A lever changes what these cost: a precision the rate of matmuls, fused kernels and `torch.compile` the bytes
and the number of launches, a recording the launches alone. How much of the bytes is left is a guess by the kind of
change, corrected by what the search sees; the floor, the matmuls at their ceiling, is none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilewright.train.schema import RECORDING, Train
from tilewright.tune.store.record import Prediction

_FUSED = {
    (False, False): 1.0,
    (False, True): 0.55,
    (True, False): 0.5,
    (True, True): 0.4,
}  # of the bytes: compile, rules
_LAUNCHED = {(False, False): 1.0, (False, True): 0.7, (True, False): 0.25, (True, True): 0.2}  # of the launches
_MATMULS = 0.85  # of the ceiling, what the matmuls of a model reach
_HOST = 2.0  # launches of a bare op that an op of a model takes the host
_STATES = {"adamw": 8.0, "adamw_8bit": 2.0, "adamw_bf16": 4.0, "lion": 4.0, "sgd": 4.0, "adafactor": 0.1}
_WEIGHTS = {"fp32": 4.0, "tf32": 4.0, "bf16": 4.0, "bf16_kahan": 4.0, "bf16_stochastic": 2.0}  # bytes a parameter


def predict_own(run: Train, baseline: Train, machine: Mapping[str, Any]) -> Prediction | None:
    """What to expect of a step, or None where nothing could be counted.

    Args:
        run: the run, whose device is the probe's.
        baseline: the run whose step was counted.
        machine: what a probe found.

    >>> counted = {"matmul": 1e12, "attention": 0.0, "bytes": 1e9, "ops": 100.0, "peak": 2e9}
    >>> machine = {"device": "cpu", "flops": {"fp32": 1e11, "bf16": 2e11}, "copy_bytes_per_second": 1e10,
    ...            "launch_seconds": 5e-6, "own_model": {"counted": counted, "parameters": 10, "global_batch": 4}}
    >>> given = Train(precision="fp32")
    >>> fast = Train(precision="fp32", compile="default", rules="all")
    >>> predict_own(fast, given, machine).seconds < predict_own(given, given, machine).seconds
    True
    """
    own = machine.get("own_model", {})
    counted = own.get("counted")
    if not counted:
        return None
    rates, device = machine["flops"], machine["device"]
    rate = rates["fp32" if run.precision == "fp32" else "tf32" if run.precision == "tf32" else "bf16"]
    kind = run.compile != "none", run.rules != "none"
    wider = _width(run.precision) / _width(baseline.precision)
    parts = {
        "matmul": counted["matmul"] / rate / _MATMULS, "attention": counted["attention"] / rate / _MATMULS,
        "pointwise": counted["bytes"] * wider * _FUSED[kind] / machine["copy_bytes_per_second"],
    }  # fmt: skip
    busy = sum(parts.values())
    micro_batches = max(1, own["global_batch"] // max(1, run.micro_batch or own["global_batch"]))
    recorded = run.cuda_graphs or run.compile in RECORDING
    host = 0.0 if recorded or device == "cpu" else counted["ops"] * _LAUNCHED[kind] * micro_batches * _HOST
    parts["idle"] = max(0.0, host * machine["launch_seconds"] - busy)
    floor = (counted["matmul"] + counted["attention"]) / rate
    memory = _memory(run, baseline, own, micro_batches)
    return Prediction(sum(parts.values()), floor, parts, sum(memory.values()), memory)


def _width(precision: str) -> float:
    """How many bytes most activations take, relative to those of 16 bits."""
    return 2.0 if precision in ("fp32", "tf32") else 1.0


def _states(run: Train, parameters: int) -> dict[str, float]:
    weights = _WEIGHTS[run.precision]
    return {
        "weights": weights * parameters, "gradients": min(weights, 4.0) * parameters,
        "optimizer": _STATES[run.optimizer.name] * parameters,
    }  # fmt: skip


def _memory(run: Train, baseline: Train, own: Mapping[str, Any], micro_batches: int) -> dict[str, float]:
    """Weights, gradients and states are known; the rest of the first step's peak shrinks with the micro batch."""
    states = _states(run, own["parameters"])
    rest = max(0.0, own["counted"]["peak"] - sum(_states(baseline, own["parameters"]).values()))
    rest *= _width(run.precision) / _width(baseline.precision) / micro_batches
    if run.rules != "none" or run.compile != "none":
        rest *= 0.7
    return {**states, "activations": rest}
