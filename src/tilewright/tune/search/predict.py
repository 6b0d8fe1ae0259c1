"""What the plan says of a run before it runs: seconds of a step and bytes at its peak, each in parts.

Time is by `plan.step` from the rates that a probe has measured on this machine, memory by `plan.memory`. On a GPU
`bytes` is what torch will have allocated at its peak, as a trial measures it; what lies `BEYOND` that, lost between
blocks or held by the driver, is among the parts all the same. On a CPU it is all that the process has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tilewright.plan import memory, step
from tilewright.plan.decoder import from_gpt
from tilewright.plan.traffic import LINK_SHARE, Links
from tilewright.train.memory_plan import planned, policies
from tilewright.train.schema import RECORDING, Train
from tilewright.tune.store.record import Prediction

COMMUNICATION = "communication"  # what ranks wait for each other, as profiles call it
BEYOND = ("fragmentation", "CUDA context")
PROCESS_BYTES = 410 * 2**20  # of the interpreter with torch and a small model at work, on Linux
_LOOSE = 0.1  # of all tensors, what a CPU's allocator holds beside them
_DOUBT = 0.05  # of the bytes: what is predicted to be over by less is tried

Parts = dict[str, float]


def predict(run: Train, machine: Mapping[str, Any], ranks: int = 1) -> Prediction:
    """Return what to expect of a run on a machine that was probed.

    Args:
        run: the run, whose device is the probe's.
        machine: what a probe found.
        ranks: that share the run; memory is that of one of them.

    >>> from tilewright.train.schema import Model
    >>> machine = {"device": "cpu", "flops": {"fp32": 1e11, "bf16": 2e11}, "copy_bytes_per_second": 1e10,
    ...            "launch_seconds": 5e-6, "kernel_seconds": 2e-6, "host": {"cores": 4}, "memory_bytes": 2**34}
    >>> found = predict(Train(model=Model(width=64)), machine)
    >>> found.floor < found.seconds, found.memory["process"] > found.memory["weights"]
    (True, True)
    """

    device, layout = machine["device"], run.layout(ranks) if ranks > 1 else None
    sizes = run.batch_sizes(layout.dp if layout is not None else 1)
    precision = run.precision if run.precision != "auto" else "bf16" if device == "cuda" else "fp32"
    decoder, training = from_gpt(run.model), planned(run, precision, sizes.micro, sizes.accumulation, layout)
    how = step.How(
        matmuls=precision if precision in ("fp32", "tf32") else "bf16",
        recorded=run.cuda_graphs or run.compile in RECORDING,
        attention=run.model.attention,
        device=device,
    )
    rates, links = _rates(run, machine, ranks), _links(machine, ranks)
    chosen = policies(run, training)
    seconds: Parts = {}
    held: Parts = {}
    floor = 0.0
    for policy in dict.fromkeys(chosen):  # within a budget, blocks of two kinds: each kind counts by its share of them
        share = chosen.count(policy) / len(chosen)
        alike = dataclasses.replace(training, recompute=policy, device=device)
        timed = step.step(decoder, alike, how, rates, links)
        floor += share * timed.floor
        _add(seconds, timed.parts, share)
        if ranks > 1:
            _add(seconds, {COMMUNICATION: sum(timed.traffic.values())}, share)
        _add(held, _memory(memory.train(decoder, alike), device), share)
    allocated = sum(value for name, value in held.items() if name not in BEYOND)
    return Prediction(sum(seconds.values()), floor, seconds, allocated, held)


def misfit(
    prediction: Prediction, machine: Mapping[str, Any], cap: float | None = None, ranks: int = 1
) -> str | None:  # fmt: skip
    """Why a run cannot have the memory it needs, in a sentence; None where it can, or nearly.

    Args:
        prediction: of the run.
        machine: what a probe found.
        cap: bytes that the user allows a rank; None or 0: all there are.
        ranks: that share the run, each with a GPU of its own or a part of the host's memory.

    >>> found = Prediction(1.0, 1.0, {}, 3e9, {"weights": 3e9})
    >>> misfit(found, {"memory_bytes": 2e9, "device": "cuda"})
    'It needs about 3.0 GB, and the GPU has 2.0.'
    """
    least = (1 - _DOUBT) * prediction.bytes  # and not what is lost between blocks: torch takes that back when it must
    if cap and least > cap:
        return f"It needs about {_gb(prediction.bytes)} GB, and the cap is {_gb(cap)}."
    on_gpu = machine["device"] == "cuda"
    context, there = prediction.memory.get("CUDA context", 0.0), machine["memory_bytes"] / (1 if on_gpu else ranks)
    if least + context > there:
        whose = "the GPU" if on_gpu else "this machine" if ranks == 1 else "a rank"
        return f"It needs about {_gb(prediction.bytes + context)} GB, and {whose} has {_gb(there)}."
    return None


def _rates(run: Train, machine: Mapping[str, Any], ranks: int) -> step.Rates:
    """What the machine does for a rank, on a CPU by its share of the cores and by as many threads as the run has."""
    cores, part = machine["host"]["cores"], 1.0
    if machine["device"] == "cpu":
        part = min(1 / ranks, run.threads / cores if run.threads else 1.0)
    return step.Rates(
        flops={dtype: part * rate for dtype, rate in machine["flops"].items()},
        bytes_per_second=part * machine["copy_bytes_per_second"],
        launch_seconds=machine["launch_seconds"],
        kernel_seconds=machine["kernel_seconds"],
    )


def _links(machine: Mapping[str, Any], ranks: int) -> Links | None:
    """What joins the ranks, as it was measured; all are in one node."""
    found = machine.get("links")
    if ranks == 1 or found is None:
        return None
    rate = found["bytes_per_second"] / LINK_SHARE
    return Links(ranks, rate, rate, 3 * found["round_seconds"])


def _memory(anatomy: memory.Anatomy, device: str) -> Parts:
    parts = {part.name: part.bytes for part in anatomy.parts}
    if device == "cuda":
        return parts
    for name in (*BEYOND, "temporary buffers"):  # which are a GPU's
        parts.pop(name, None)
    return {**parts, "process": PROCESS_BYTES + _LOOSE * sum(parts.values())}


def _add(total: Parts, parts: Mapping[str, float], share: float) -> None:
    for name, value in parts.items():
        total[name] = total.get(name, 0.0) + share * value


def _gb(count: float) -> str:
    return f"{count / 1e9:.1f}"
