"""How to spread a training run over many GPUs: every split that fits, with an estimate of its step, best first.

A step is what one pipeline stage computes for all its micro batches, its tensor-parallel traffic (nothing hides it),
the pipeline's bubble, and what of the data-parallel traffic backward cannot hide. It is an estimate to order plans by,
not a promise: `efficiency` is the share of the best matmul that the computing reaches. Where stages do not divide the
layers, every stage is counted as large as the largest.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from tilewright.errors import UserError
from tilewright.hardware import Accelerator, Rate
from tilewright.plan.decoder import Decoder
from tilewright.plan.flops import DEFAULT, conventions
from tilewright.plan.memory import MATMUL_DTYPES, Training, split_problem, stage_layers, train

_MOST_GPUS = 1_000_000
_MOST_PADDED = 1.1  # layers as the largest stage has them, over those there are
_BACKWARD_SHARE = 2 / 3  # of a step's computing, behind which gradients can travel


@dataclass(frozen=True)
class Cluster:
    """GPUs of a kind, in nodes."""

    accelerator: Accelerator
    gpus: int
    node: int = 8
    link: float | None = None  # bytes a second a GPU to its neighbours, one direction; None: the table's
    network: float = 50e9  # bytes a second a GPU between nodes: 400 Gb/s
    memory: float | None = None  # bytes of a GPU; None: the table's largest
    efficiency: float = 0.75

    @property
    def capacity(self) -> float:
        return self.memory or self.accelerator.usable_bytes

    @property
    def link_rate(self) -> float:
        rate = self.link or self.accelerator.link_bytes_per_second
        if rate is None:
            raise UserError(f"The table has no link of {self.accelerator.name}; give its GB/s with --link.")
        return rate

    def matmul(self, precision: str) -> Rate:
        """The best matmul to expect in this precision; computing reaches `efficiency` of it."""
        return self.accelerator.matmul(self.accelerator.first_on_record(MATMUL_DTYPES[precision]))


@dataclass(frozen=True)
class Plan:
    """One split, with where its step's time goes in seconds."""

    training: Training
    seconds: float
    compute: float
    tensor_traffic: float
    pipeline_traffic: float
    bubble: float
    data_traffic: float  # what backward does not hide
    memory: float
    mfu: float
    tokens_per_second: float


def _powers(limit: int) -> Iterator[int]:
    value = 1
    while value <= limit:
        yield value
        value *= 2


def splits(decoder: Decoder, cluster: Cluster, global_batch: int, base: Training) -> Iterator[Training]:
    """Every way to cut the model and the batch; not yet asked whether it fits."""
    # Stages that waste no more than a tenth: the largest has one layer more than others.
    stages = [
        p
        for p in range(1, min(decoder.layers, cluster.gpus) + 1)
        if -(-decoder.layers // p) * p <= _MOST_PADDED * decoder.layers
    ]
    for tensor in _powers(min(cluster.node, decoder.heads, cluster.gpus)):
        if decoder.tensor_problem(tensor):
            continue
        for pipeline in stages:
            if cluster.gpus % (tensor * pipeline):
                continue
            data = cluster.gpus // (tensor * pipeline)
            if global_batch % data:
                continue
            share = global_batch // data
            for micro in _powers(min(share, 64)):
                if share % micro:
                    continue
                for zero in (0, 1, 2, 3) if data > 1 else (0,):
                    if zero >= 2 and pipeline > 1:  # gradients or weights would travel for every micro batch
                        continue
                    for recompute, interleave in itertools.product(("none", "selective", "full"), (1, 2, 4)):
                        split = dataclasses.replace(
                            base, micro_batch=micro, recompute=recompute, data=data, zero=zero, tensor=tensor,
                            sequence_parallel=tensor > 1, pipeline=pipeline, interleave=interleave,
                            accumulation=share // micro,
                        )  # fmt: skip
                        if not split_problem(decoder, split):
                            yield split


def estimate(decoder: Decoder, training: Training, cluster: Cluster, memory: float = 0.0) -> Plan:
    """The step of one split."""
    accumulation = training.accumulation or 1
    tokens = training.micro_batch * decoder.sequence
    model_flops = conventions(decoder)[DEFAULT].model
    layers = stage_layers(decoder, training)
    rate = cluster.matmul(training.precision)
    c = training.compute_bytes
    # Every stage as large as the largest.
    decoder = dataclasses.replace(decoder, layers=layers * training.pipeline)
    # With flash attention selective recompute runs norms and activations again: next to no FLOPs.
    free = training.recompute == "selective" and training.attention == "flash"
    hardware = conventions(decoder)[DEFAULT].hardware["none" if free else training.recompute]
    shards = training.tensor * training.pipeline
    micro_compute = tokens * hardware / shards / (rate.flops * cluster.efficiency)
    # Two reductions a layer forward and two backward (a reduce-scatter and an all-gather each with sequence parallel).
    t = training.tensor
    reductions = 6 if training.recompute == "full" else 4
    micro_tensor = (
        layers * reductions * 2 * (t - 1) / t * tokens * decoder.width * c / cluster.link_rate if t > 1 else 0.0
    )
    p = training.pipeline
    across = cluster.network if t * p > cluster.node else cluster.link_rate
    micro_pipe = training.interleave * 2 * tokens * decoder.width * c / t / across if p > 1 else 0.0
    steady = accumulation * (micro_compute + micro_tensor)
    bubble = (p - 1) * (micro_compute + micro_tensor) / training.interleave
    d = training.data
    traffic = 0.0
    if d > 1:
        # Ranks of a group that share a node share its cards' bandwidth to the network: a ring crosses nodes once.
        link = cluster.link_rate
        if d * t * p > cluster.node:
            link = min(link, cluster.network * max(1, cluster.node // (t * p)))
        bytes_here = decoder.parameters / shards * (d - 1) / d
        g = training.stored_bytes
        if training.zero == 3:  # for every micro batch weights gathered twice as matmuls take them, gradients scattered
            traffic = accumulation * (2 * c + g) * bytes_here / link
        elif training.zero == 2:  # gradients scattered for every micro batch, weights gathered once
            traffic = (accumulation * g + g) * bytes_here / link
        else:
            traffic = 2 * g * bytes_here / link  # gradients scattered and gathered, or weights gathered
    hidden = _BACKWARD_SHARE * (steady if training.zero >= 2 else micro_compute + micro_tensor)
    exposed = max(0.0, traffic - hidden)
    pipe = accumulation * micro_pipe
    seconds = steady + bubble + exposed + pipe
    batch_tokens = tokens * accumulation * d
    peak = cluster.accelerator.peak_flops[rate.dtype]
    return Plan(
        training=training, seconds=seconds, compute=accumulation * micro_compute,
        tensor_traffic=accumulation * micro_tensor, pipeline_traffic=pipe, bubble=bubble, data_traffic=exposed,
        memory=memory, mfu=batch_tokens * model_flops / seconds / (cluster.gpus * peak),
        tokens_per_second=batch_tokens / seconds,
    )  # fmt: skip


def search(
    decoder: Decoder, cluster: Cluster, global_batch: int, keep: int = 20, base: Training | None = None
) -> list[Plan]:
    """The best plans that fit, fastest first; `base` has what is not searched: precision, optimizer, loss."""
    base = base or Training(precision="mixed", loss="fused")
    if not 1 <= cluster.gpus <= _MOST_GPUS or global_batch < 1:
        raise UserError(f"GPUs must be 1 to {_MOST_GPUS:,}, and the global batch at least 1.")
    for name, value in (("link", cluster.link_rate), ("network", cluster.network), ("memory", cluster.capacity)):
        if not 0 < value < math.inf:
            raise UserError(f"{name} is {value}; it must be a number above 0.")
    if cluster.gpus > cluster.node and cluster.gpus % cluster.node:
        raise UserError(f"{cluster.gpus} GPUs are not whole nodes of {cluster.node}; give --node.")
    fits: dict[Training, Plan] = {}  # by split, with the least ZeRO that fits: more of it is never faster
    smallest, seen = math.inf, False
    for training in splits(decoder, cluster, global_batch, base):
        seen = True
        memory = train(decoder, training).total
        smallest = min(smallest, memory)
        split = dataclasses.replace(training, zero=0)
        if memory <= cluster.capacity and split not in fits:
            fits[split] = estimate(decoder, training, cluster, memory)
    if not seen:
        raise UserError(
            f"No split of {cluster.gpus} GPUs divides {decoder.heads} heads, {decoder.layers} layers and a global "
            f"batch of {global_batch}; choose a global batch that more ranks divide."
        )
    if not fits:
        raise UserError(
            f"Nothing fits: the smallest split takes {smallest / 1e9:.1f} GB and a GPU has "
            f"{cluster.capacity / 1e9:.0f} GB; take more GPUs, or GPUs with more memory."
        )

    # Of plans that are equally fast, the one with the larger micro batch, then with less tensor and pipeline parallel.
    def order(plan: Plan) -> tuple[float, ...]:
        how = plan.training
        return round(plan.seconds, 9), -how.micro_batch, how.tensor, how.pipeline

    return sorted(fits.values(), key=order)[:keep]
