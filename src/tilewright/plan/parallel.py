"""How to spread a training run over many GPUs: every split that fits, with an estimate of its step, best first.

An estimate is `plan.step` of the fullest rank: its computing, the traffic that nothing hides and the pipeline's bubble.
It orders plans; docs/plan.md says how near it is to published runs. Where stages do not divide the layers, every stage
is counted as large as the largest.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tilewright.errors import UserError
from tilewright.hardware import Accelerator, Rate
from tilewright.plan import calibration
from tilewright.plan.decoder import Decoder
from tilewright.plan.flops import DEFAULT, conventions
from tilewright.plan.memory import train
from tilewright.plan.step import How, Rates, Step, step
from tilewright.plan.traffic import Links
from tilewright.plan.training import MATMUL_DTYPES, Training, split_problem

_MOST_GPUS = 1_000_000
_MOST_PADDED = 1.1  # layers as the largest stage has them, over those there are
_MOST_MICRO = 64  # sequences that are tried at once; more can be asked for
_LONG = 65536  # tokens of a sequence from which on ranks that share it are tried, and how many
_MOST_CONTEXT = 8
_MULTIPROCESSORS = 132  # where the table has no number


@dataclass(frozen=True)
class Cluster:
    """GPUs of a kind, in nodes."""

    accelerator: Accelerator
    gpus: int
    node: int = 8
    link: float | None = None  # bytes a second a GPU to its neighbours, one direction; None: the table's
    network: float = 50e9  # bytes a second a GPU between nodes: 400 Gb/s
    memory: float | None = None  # bytes of a GPU; None: the table's largest

    @property
    def capacity(self) -> float:
        return self.memory or self.accelerator.usable_bytes

    @property
    def link_rate(self) -> float:
        """By the table, where nobody has said; one GPU has no link."""
        rate = self.link or self.accelerator.link_bytes_per_second
        if rate is None:
            if self.gpus == 1:
                return math.inf
            raise UserError(f"The table has no link of {self.accelerator.name}; give its GB/s with --link.")
        return rate

    def check(self) -> None:
        """Refuse what no cluster has."""
        if not 1 <= self.gpus <= _MOST_GPUS:
            raise UserError(f"{self.gpus:,} GPUs cannot be planned; give 1 to {_MOST_GPUS:,}.")
        for name, value in (("link", self.link_rate), ("network", self.network), ("memory", self.capacity)):
            if not 0 < value < math.inf and not (name == "link" and self.gpus == 1):
                raise UserError(f"{name} is {value}; it must be a number above 0.")
        if self.gpus > self.node and self.gpus % self.node:
            raise UserError(f"{self.gpus} GPUs are not whole nodes of {self.node}; give --node.")

    @property
    def links(self) -> Links:
        return Links(self.node, self.link_rate, self.network)

    def matmul(self, precision: str) -> Rate:
        """The best matmul to expect in this precision."""
        return self.accelerator.matmul(self.accelerator.first_on_record(MATMUL_DTYPES[precision]))


@dataclass(frozen=True)
class Plan:
    """One split, with where its step's time goes in seconds."""

    training: Training
    seconds: float
    compute: float  # kernels, and what the host adds
    tensor_traffic: float
    pipeline_traffic: float
    bubble: float
    data_traffic: float  # what forward and backward do not hide
    context_traffic: float
    expert_traffic: float
    memory: float
    mfu: float
    tokens_per_second: float
    fits: bool = True
    parts: dict[str, float] = field(default_factory=dict)  # of the computing, by category


def timed(
    decoder: Decoder, training: Training, cluster: Cluster, rates: tuple[How, Rates] | None = None
) -> Step:  # fmt: skip
    """The step of one split, in parts, by the rates of this kind of GPU.

    >>> from tilewright import hardware
    >>> from tilewright.plan.decoder import load
    >>> found = timed(load("1b"), Training(micro_batch=16), Cluster(hardware.find("H200-SXM"), 1))
    >>> round(found.seconds, 2), found.traffic
    (0.55, {})
    """
    return step(decoder, training, *(rates or machine(cluster, training.precision)), cluster.links)


def machine(cluster: Cluster, precision: str) -> tuple[How, Rates]:
    """How steps in this precision run on this kind of GPU, and its rates."""
    chip, rate = cluster.accelerator, cluster.matmul(precision)
    found = calibration.of(chip)
    how = How(rate.dtype, attention=found.attention, multiprocessors=chip.multiprocessors or _MULTIPROCESSORS)
    rates = Rates(
        calibration.flops(chip, rate.dtype), calibration.bytes_per_second(chip), calibration.LAUNCH_SECONDS,
        calibration.KERNEL_SECONDS, found.reached,
    )  # fmt: skip
    return how, rates


def estimate(
    decoder: Decoder, training: Training, cluster: Cluster, memory: float = 0.0,
    rates: tuple[How, Rates] | None = None,
) -> Plan:  # fmt: skip
    """The step of one split; `rates` are those of `machine`, where somebody has them."""
    found = timed(decoder, training, cluster, rates)
    tokens = training.micro_batch * decoder.sequence * (training.accumulation or 1) * training.data
    peak = cluster.accelerator.peak_flops[cluster.matmul(training.precision).dtype]
    model_flops, traffic = conventions(decoder)[DEFAULT].model, found.traffic
    model_flops *= 2 / 3 if training.lora else 1  # no gradients of weights
    return Plan(
        training=training, seconds=found.seconds, compute=sum(found.parts.values()),
        tensor_traffic=traffic.get("tensor", 0.0), pipeline_traffic=traffic.get("pipeline", 0.0),
        bubble=traffic.get("bubble", 0.0), data_traffic=traffic.get("data", 0.0),
        context_traffic=traffic.get("context", 0.0), expert_traffic=traffic.get("expert", 0.0), memory=memory,
        mfu=tokens * model_flops / found.seconds / (training.ranks * peak), tokens_per_second=tokens / found.seconds,
        fits=memory <= cluster.capacity, parts=found.parts,
    )  # fmt: skip


def _powers(limit: int) -> Iterator[int]:
    value = 1
    while value <= limit:
        yield value
        value *= 2


def splits(
    decoder: Decoder, cluster: Cluster, global_batch: int, base: Training, given: Mapping[str, int | str]
) -> Iterator[Training]:
    """Every way to cut the model and the batch that has what is `given`; not yet asked whether it fits."""

    def choices(name: str, *tried: int | str) -> tuple[int | str, ...]:
        return (given[name],) if name in given else tried

    # Stages that waste no more than a tenth: the largest has one layer more than others.
    stages = [
        p
        for p in range(1, min(decoder.layers, cluster.gpus) + 1)
        if -(-decoder.layers // p) * p <= _MOST_PADDED * decoder.layers
    ]
    tensors = choices("tensor", *_powers(min(cluster.node, decoder.heads, cluster.gpus)))
    longest = _MOST_CONTEXT if decoder.sequence >= _LONG else 1
    contexts = list(map(int, choices("context", *_powers(min(longest, cluster.node)))))
    stages_given = list(map(int, choices("pipeline", *stages)))
    for tensor, pipeline, context in itertools.product(map(int, tensors), stages_given, contexts):
        data, rest = divmod(cluster.gpus, tensor * pipeline * context)
        if rest or data not in choices("data", data) or global_batch % data or decoder.tensor_problem(tensor):
            continue
        share = global_batch // data
        micros = [int(micro) for micro in choices("micro_batch", *_powers(min(share, _MOST_MICRO)))]
        # Under ZeRO 2 and 3 gradients or weights would travel for every micro batch of a pipeline.
        stages_of_zero = choices("zero", *((0, 1) if pipeline > 1 else (0, 1, 2, 3)) if data * context > 1 else (0,))
        recomputes, pieces = choices("recompute", "none", "selective", "full"), choices("interleave", 1, 2, 4)
        shared = list(_powers(min(max(1, decoder.experts // tensor), data * context)))
        experts = choices(
            "expert", *dict.fromkeys((1, shared[min(len(shared), cluster.node.bit_length()) - 1], shared[-1]))
        )
        for micro, zero, recompute, interleave, expert in itertools.product(
            micros, stages_of_zero, recomputes, pieces, experts
        ):
            if share % micro:
                continue
            split = dataclasses.replace(
                base, micro_batch=micro, accumulation=share // micro, recompute=str(recompute), data=data,
                zero=int(zero), tensor=tensor, sequence_parallel=tensor > 1, pipeline=pipeline,
                interleave=int(interleave), context=context, expert=int(expert),
            )  # fmt: skip
            if not split_problem(decoder, split):
                yield split


def search(
    decoder: Decoder,
    cluster: Cluster,
    global_batch: int,
    keep: int = 20,
    base: Training | None = None,
    given: Mapping[str, int | str] | None = None,
) -> list[Plan]:
    """The best plans that fit, fastest first, one of each split with the ZeRO stage that is fastest.

    Args:
        decoder, cluster, global_batch: what is trained, on what, and sequences a step.
        keep: how many plans to return.
        base: what is not searched: precision, optimizer, loss.
        given: fields of `Training` that are not searched either. Where nothing with them fits, the plan that is nearest
            to it is returned, whose `fits` is False.
    """
    base, given = base or Training(precision="fsdp", loss="fused"), given or {}
    if global_batch < 1:
        raise UserError(f"The global batch is {global_batch}; it must be at least 1.")
    cluster.check()
    rates = machine(cluster, base.precision)
    fits: dict[Training, Plan] = {}  # by split, with the ZeRO stage that is fastest, or the least of those
    smallest: tuple[float, Training] | None = None
    for training in splits(decoder, cluster, global_batch, base, given):
        memory = train(decoder, training).total
        if smallest is None or memory < smallest[0]:
            smallest = memory, training
        if memory <= cluster.capacity:
            split, plan = dataclasses.replace(training, zero=0), estimate(decoder, training, cluster, memory, rates)
            if split not in fits or plan.seconds < 0.999 * fits[split].seconds:
                fits[split] = plan
    if smallest is None:
        _refuse(decoder, cluster, global_batch, base, given)
    assert smallest is not None
    if not fits and given:
        return [estimate(decoder, smallest[1], cluster, smallest[0])]
    if not fits:
        raise UserError(
            f"Nothing fits: the smallest split takes {smallest[0] / 1e9:.1f} GB and a GPU has "
            f"{cluster.capacity / 1e9:.0f} GB; take more GPUs, or GPUs with more memory."
        )

    # Of plans that are equally fast, the one with the larger micro batch, then with less tensor and pipeline parallel.
    def order(plan: Plan) -> tuple[float, ...]:
        how = plan.training
        return round(plan.seconds, 9), -how.micro_batch, how.tensor, how.pipeline

    return sorted(fits.values(), key=order)[:keep]


def _refuse(
    decoder: Decoder, cluster: Cluster, global_batch: int, base: Training, given: Mapping[str, int | str]
) -> None:
    """Say why no split is possible: what is given alone, or all numbers together."""
    sizes: dict[str, Any] = {name: int(given[name]) for name in ("tensor", "pipeline", "interleave") if name in given}
    problem = split_problem(decoder, dataclasses.replace(base, **sizes)) if sizes else ""
    if problem:
        raise UserError(problem)
    layout = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in given.items())
    raise UserError(
        f"No split of {cluster.gpus} GPUs{f' with {layout}' if layout else ''} divides {decoder.heads} heads, "
        f"{decoder.layers} layers and a global batch of {global_batch}; choose a global batch that more ranks divide."
    )
