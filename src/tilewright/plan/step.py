"""How long a training step takes: the work of each kind over what the machine does a second, what ranks wait for each
other, and what the host adds.

    device   every op's bytes over the copy bandwidth or its FLOPs over the matmuls' rate, whichever is longer, divided
             by the share of that rate which such kernels reach; and no kernel is shorter than the shortest there is
    traffic  what other ranks send and nothing hides (`plan.traffic`)
    idle     what the host needs to launch all ops beyond what the device needs to run them: it runs ahead of a GPU, by
             so many launches at most, so of gradients, and of the update, about the longer of the two counts. A CPU is
             its own host and does the one after the other.

The rates are the machine's own, measured, or those of its kind (`plan.calibration`). At the full rates, with nothing
idle and all that a cache might hold for free, the same sum is the floor, below which this configuration cannot go.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tilewright.plan.decoder import Decoder
from tilewright.plan.traffic import Links, Phases, exposed
from tilewright.plan.training import Training, parameters_here, stage_layers
from tilewright.plan.work import (
    CACHED,
    CATEGORIES,
    How,
    Work,
    block_of,
    has_own_optimizer,
    micro_batch_work,
    update_work,
)

__all__ = ["CATEGORIES", "How", "Rates", "Step", "launches", "step"]

# What a layer's forward and backward cost their host, in eager ops of `Rates.launch_seconds` each. Where one such op
# took 13 us, a layer of 350m took 3.0 ms at micro batch 4, and the modules of a standard one 2.8 ms. Those of compiled
# ones are not measured: a launch for each kernel, and several for each op of Tilewright's.
LAUNCHES = {"standard": 215, "optimized": 230, "compiled standard": 40, "compiled optimized": 110}
FORWARD = 0.25  # of these
WATCHED = 680  # more, where torch's selective checkpoint watches every op: 350m, when that was how `selective` worked
ENDS = 60  # embedding, last norm, loss
# For which the device waits, where `linear_fused` asks it something: "cuda graphs" of train_350m.json, when it waited
# longer than it does now.
ASKED = 50
AHEAD = 1024  # launches that CUDA takes before the device has begun with the first of them
UPDATE = 40  # norm of the gradients, guard, torch's fused optimizer
# A tensor that Tilewright's own optimizer updates, by a kernel or by torch's ops. On a GPU one launch takes all of them
# now, which has not been measured.
TENSOR = {"cuda": 2, "cpu": 20}
ADAFACTOR = 33  # a tensor: its ops counted, the mean of a matrix and a vector


@dataclass(frozen=True, eq=False)  # as a key of a cache it is itself
class Rates:
    """What a machine does: matmuls by dtype ("fp32", "tf32", "bf16"), a copy, an eager op, the shortest kernel.

    `reached` has, by style or category, what its kernels reach of the shares in `plan.work`, which are an H200's.
    """

    flops: Mapping[str, float]
    bytes_per_second: float
    launch_seconds: float
    kernel_seconds: float
    reached: Mapping[str, float] = field(default_factory=dict)

    def seconds(self, work: Work, dtype: str) -> float:
        """Of one op, as expected."""
        rate = self.flops[(work.dtype or dtype) if work.is_matmul else "fp32"]
        one = max(work.cost.bytes / self.bytes_per_second, work.cost.flops / rate)
        return max(one / (work.share * self.reached.get(work.style or work.category, 1.0)), self.kernel_seconds)

    def floor(self, work: Work, dtype: str) -> float:
        """Of one op at the machine's full rates; what a cache may hold is free."""
        moved = work.cost.bytes if work.cost.bytes > CACHED else 0
        rate = self.flops[(work.dtype or dtype) if work.is_matmul else "fp32"]
        return max(moved / self.bytes_per_second, work.cost.flops / max(rate, self.flops.get(work.may_use, 0.0)))


@dataclass(frozen=True)
class Step:
    """Seconds of a step by part, CATEGORIES and "idle", those of traffic by kind, and the floor of the computing."""

    parts: dict[str, float]
    floor: float
    traffic: dict[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return sum(self.parts.values()) + sum(self.traffic.values())


@functools.lru_cache(maxsize=4096)
def _micro_batch(decoder: Decoder, training: Training, how: How) -> tuple[Work, ...]:
    return tuple(micro_batch_work(decoder, training, how))


@dataclass(frozen=True)
class _Sums:
    """Seconds of a micro batch's layers or ends, by category and by phase, and their floor."""

    parts: dict[str, float]
    phases: dict[str, float]
    floor: float


@functools.lru_cache(maxsize=4096)
def _sums(decoder: Decoder, training: Training, how: How, rates: Rates, at_ends: bool) -> _Sums:
    parts, phases, floor = dict.fromkeys(CATEGORIES, 0.0), {"forward": 0.0, "backward": 0.0}, 0.0
    for work in _micro_batch(decoder, training, how):
        if work.at_ends == at_ends:
            seconds = work.calls * rates.seconds(work, how.matmuls)
            parts[work.category] += seconds
            phases[work.phase] += seconds
            floor += work.calls * rates.floor(work, how.matmuls)
    return _Sums(parts, phases, floor)


def step(decoder: Decoder, training: Training, how: How, rates: Rates, links: Links | None = None) -> Step:
    """The time of one optimizer step on the fullest rank, with all of its micro batches.

    >>> from tilewright.plan.decoder import load
    >>> h200 = Rates({"bf16": 787e12, "tf32": 400e12, "fp32": 50e12}, 4.27e12, 13e-6, 2e-6)
    >>> found = step(load("1b"), Training(micro_batch=16), How(), h200)
    >>> round(found.seconds, 2), found.floor < found.seconds, max(found.parts, key=found.parts.get)
    (0.55, True, 'matmul')
    """
    parts, floor, phases = dict.fromkeys(CATEGORIES, 0.0), 0.0, {"forward": 0.0, "backward": 0.0}
    micro_batches, p = training.accumulation or 1, training.pipeline
    # The first and the last stage have fewer layers, as those who balance stages give them.
    here = {False: stage_layers(decoder, training) / decoder.layers, True: 1 / p}
    alone: dict[str, Any] = {"accumulation": None, "zero": 0, "pipeline": 1, "interleave": 1, "replicate": 1}
    one = dataclasses.replace(training, data=training.expert, **alone)
    for at_ends, share in here.items():
        found = _sums(decoder, one, how, rates, at_ends)
        for name, seconds in found.parts.items():
            parts[name] += micro_batches * share * seconds
        for name, seconds in found.phases.items():
            phases[name] += share * seconds
        floor += micro_batches * share * found.floor
    whole, shard = (
        held / p for held in parameters_here(decoder, training, decoder.layers, decoder.embedding_parameters)
    )
    if training.lora:
        whole = decoder.adapter_parameters(training.lora) / training.tensor / p
        shard = whole / training.shards
    kept = shard if training.zero else whole
    for work in update_work(decoder, training, how, kept):
        parts[work.category] += work.calls * rates.seconds(work, how.matmuls)
        floor += work.calls * rates.floor(work, how.matmuls)
    traffic = exposed(decoder, training, links or Links(), Phases(**phases)) if training.ranks > 1 else {}
    parts["idle"] = _idle(decoder, training, how, rates, parts, sum(traffic.values()))
    return Step(parts, floor, traffic)


def forward_seconds(decoder: Decoder, training: Training, how: How, rates: Rates) -> float:
    """Of the layers' forward alone, on one of the tensor-parallel ranks: no head, no loss, no host, no traffic."""
    return _sums(decoder, training, how, rates, False).phases["forward"]


def _idle(
    decoder: Decoder, training: Training, how: How, rates: Rates, parts: Mapping[str, float], traffic: float
) -> float:
    """Seconds in which the device waits for its host."""
    gradients, update = (rates.launch_seconds * ops for ops in launches(decoder, training, how))
    if how.device == "cpu":
        return gradients + update
    asks = training.loss == "linear_fused" and not how.recorded
    waits = rates.launch_seconds * ASKED * (training.accumulation or 1) if asks else 0.0
    # How far the host is ahead as a step's gradients begin, and as its update does: in a few steps that settles.
    updating = parts["optimizer"]
    busy, most, before = sum(parts.values()) - updating + traffic, AHEAD * rates.launch_seconds, 0.0
    for _ in range(4):
        ahead = min(most, max(0.0, before + busy - gradients))
        before = min(most, max(0.0, ahead + updating - update))
    return waits + max(0.0, gradients - busy - before) + max(0.0, update - updating - ahead)


def launches(decoder: Decoder, training: Training, how: How) -> tuple[float, float]:
    """What the gradients of a step and its update cost the host, in eager ops."""
    micro_batches, block = training.accumulation or 1, block_of(decoder, how)
    layers = stage_layers(decoder, training)
    tensors = layers * (12 if decoder.mlp_bias else 7)
    each = ADAFACTOR if training.optimizer == "adafactor" else TENSOR[how.device]
    update = UPDATE + (each * tensors if has_own_optimizer(training) else 0)
    if how.recorded:
        return 2 * micro_batches, update
    layer: float = LAUNCHES[f"compiled {block}" if training.compiled else block]
    if training.recompute != "none":
        layer *= 1 + FORWARD
    if training.recompute == "selective" and block == "standard" and not training.compiled:
        layer += WATCHED
    return micro_batches * (layers * layer + ENDS), update
