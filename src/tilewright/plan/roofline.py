"""Every op of a training step with its intensity, what bounds it, and the time below which no implementation can go."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from tilewright.hardware import COPY_SHARE, Accelerator, Rate
from tilewright.plan.cost import Cost
from tilewright.plan.decoder import Decoder
from tilewright.plan.training import MATMUL_DTYPES, Training, check_parallel
from tilewright.plan.work import How, micro_batch_work, update_work

LAUNCH_SECONDS = 2e-6  # below this a kernel's own start and end rule


@dataclass(frozen=True)
class Op:
    """One kind of op: what one call costs, how often a step calls it, and whether on the tensor cores."""

    name: str
    cost: Cost
    calls: int
    tensor_cores: bool = False

    @property
    def intensity(self) -> float:
        """FLOPs a byte."""
        return self.cost.flops / max(1, self.cost.bytes)


@dataclass(frozen=True)
class Floor:
    """An op on an accelerator."""

    op: Op
    seconds: float  # of all its calls
    bound: str  # memory, arithmetic or launch
    share: float  # of the step's floor


def step_ops(decoder: Decoder, training: Training, multiprocessors: int = 132) -> Iterator[Op]:
    """What a step of one micro batch does on one GPU, forward and backward apart: the work that `plan.step` times."""
    dtype = "fp32" if training.compute_bytes == 4 else "fp8" if training.precision == "fp8" else "bf16"
    how, one = How(matmuls=dtype, multiprocessors=multiprocessors), dataclasses.replace(training, accumulation=None)
    kept = decoder.parameters // training.tensor // training.pipeline // (training.data if training.zero else 1)
    found: dict[tuple[str, Cost, bool], int] = {}
    for work in (*micro_batch_work(decoder, one, how), *update_work(decoder, one, how, kept)):
        key = work.name, work.cost, work.is_matmul
        found[key] = found.get(key, 0) + int(work.calls)
    return (Op(name, cost, calls, is_matmul) for (name, cost, is_matmul), calls in found.items())


def rates(accelerator: Accelerator, training: Training, achievable: bool = False) -> tuple[Rate, float]:
    """Matmul rate and bytes a second: the datasheet's, or what to expect of the best matmul and copy."""
    dtype = accelerator.first_on_record(MATMUL_DTYPES[training.precision])
    if achievable:
        return accelerator.matmul(dtype), COPY_SHARE * accelerator.bytes_per_second
    peak = accelerator.peak_flops[dtype]
    return Rate(
        peak, dtype, False, f"the datasheet, {peak / 1e12:g} TFLOPS, dense {dtype}"
    ), accelerator.bytes_per_second


def roofline(
    decoder: Decoder, training: Training, accelerator: Accelerator, *, achievable: bool = False
) -> list[Floor]:
    """The floor of every op, the largest first."""
    check_parallel(decoder, training)
    rate, bandwidth = rates(accelerator, training, achievable)
    vector = accelerator.peak_flops.get("fp32", rate.flops)
    floors = []
    for op in step_ops(decoder, training):
        memory = op.cost.bytes / bandwidth
        arithmetic = op.cost.flops / (rate.flops if op.tensor_cores else vector)
        one = max(memory, arithmetic, LAUNCH_SECONDS)
        bound = "launch" if one == LAUNCH_SECONDS else "memory" if memory >= arithmetic else "arithmetic"
        floors.append((op, one * op.calls, bound))
    total = sum(seconds for _, seconds, _ in floors)
    return sorted([Floor(op, s, bound, s / total) for op, s, bound in floors], key=lambda floor: -floor.seconds)
