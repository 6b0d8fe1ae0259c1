"""Shapes drawn from a seed: sizes that models have, and awkward ones.

A shape is what a kernel is compiled for; each has several row counts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewright.bench.protocol import Case
from tilewright.plan.cost import Cost

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# What published models have.
WIDTHS = (512, 768, 896, 1024, 1152, 1280, 1536, 1600, 2048, 2304, 2560, 3072, 3584, 4096, 4544, 5120, 6656, 7168, 8192)
INNER = (1408, 2048, 2816, 3072, 4864, 5504, 6144, 8192, 8960, 10240, 11008, 13824, 14336, 18432)
VOCABULARIES = (
    30522, 32000, 32001, 32003, 49152, 50257, 50272, 50280, 50304, 51200, 64000, 65024, 92544, 100277, 100352, 102400,
    128256, 151643, 151936, 152064, 200064, 250002, 250880, 256000, 256206, 262144, 262208,
)  # fmt: skip
HEAD_SIZES = (32, 40, 48, 64, 72, 80, 88, 96, 100, 112, 120, 128, 160, 192, 256)


@dataclass(frozen=True)
class Scale:
    """How large the drawn cases are."""

    most: int  # of any dimension of a shape
    bytes: tuple[float, float]  # that a call moves, at least and at most
    flops: float  # of a call at most
    rows: int = 2**30  # at most


BENCH = Scale(2**20, (1e6, 1e9), 3e12)
TINY = Scale(300, (0.0, 2e5), 3e7, 80)  # for Triton's interpreter


@dataclass(frozen=True)
class Op:
    """What to call, how to draw it, and the plain PyTorch that a user would write instead."""

    draw: Callable[[random.Random, Scale], Case]  # a shape: all but "rows"
    inputs: Callable[[Case, Make], list[Tensor]]
    ours: Callable[..., Any]  # of the shape and the inputs
    eager: Callable[..., Any]
    cost: Callable[[Case], Cost]  # of forward and backward
    rows: tuple[tuple[int, ...], ...]  # for each input, the dimensions that follow "rows"
    round: dict[str, int]  # dimensions, and the multiples that make them round
    size: float = 1.0  # how many times the bytes and FLOPs of the scale a call may take
    row_counts: int = 10  # of each shape
    always: tuple[Case, ...] = ()  # shapes that every draw begins with
    drawn_by: Callable[[Case], Cost] | None = None  # where `cost` has changed since a draw was recorded: what it was

    def make(self, case: Case, device: str) -> list[Tensor]:
        """Random inputs."""
        return self.inputs(case, Make(case, device))

    def neighbour(self, case: Case) -> Case | None:
        """The case with its odd dimensions rounded up; None where all are round.

        >>> from tilewright.bench.shapes import OPS
        >>> OPS["cross_entropy"].neighbour({"vocabulary": 50257, "rows": 7})
        {'vocabulary': 50304, 'rows': 7}
        """
        rounded = {**case, **{name: -(-case[name] // multiple) * multiple for name, multiple in self.round.items()}}
        return None if rounded == case else rounded


class Make:
    """Makes random tensors."""

    def __init__(self, case: Case, device: str) -> None:
        self.dtype, self.device = DTYPES[case["dtype"]], device

    def __call__(self, *shape: int, scale: float = 1.0) -> Tensor:
        return self.leaf(torch.randn(shape, device=self.device, dtype=self.dtype).mul_(scale))

    def leaf(self, x: Tensor) -> Tensor:
        return x.detach().requires_grad_()

    def integers(self, below: int, *shape: int) -> Tensor:
        return torch.randint(below, shape, device=self.device)


def draw_size(rng: random.Random, scale: Scale, known: Sequence[int], least: int, most: int) -> int:
    """A size that models have, or any between `least` and `most`, some of them awkward."""
    known, most = [size for size in known if size <= scale.most], min(most, scale.most)
    least = min(least, max(1, most // 16))
    kind = rng.random()
    if known and kind < 0.35:
        return rng.choice(known)
    size = round(least * (most / least) ** rng.random())
    if kind < 0.55:
        return min(most, max(1, 8 * round(size / 8)))
    if kind < 0.7:
        return min(most, 2 ** (size.bit_length() - 1) + rng.choice((-1, 1)))
    if kind < 0.85:
        return _prime_from(size)
    return size


def _prime_from(number: int) -> int:
    while any(number % divisor == 0 for divisor in range(2, int(number**0.5) + 1)):
        number += 1
    return number


def _dtype(rng: random.Random) -> str:
    return rng.choices(("bf16", "fp16", "fp32"), (7, 2, 1))[0]


def draw_width(rng: random.Random, scale: Scale) -> Case:
    """A row's width."""
    return {"dtype": _dtype(rng), "width": draw_size(rng, scale, WIDTHS, 64, 16384)}


def draw_inner(rng: random.Random, scale: Scale) -> Case:
    """The width inside of an MLP."""
    return {"dtype": _dtype(rng), "width": draw_size(rng, scale, INNER, 64, 20000)}


def draw_norm(rng: random.Random, scale: Scale) -> Case:
    """A norm, with dropout or without."""
    return {**draw_width(rng, scale), "norm": rng.choice(("layer", "rms")), "p": rng.choice((0.0, 0.1))}


def draw_vocabulary(rng: random.Random, scale: Scale) -> Case:
    """A number of classes."""
    return {"dtype": _dtype(rng), "vocabulary": draw_size(rng, scale, VOCABULARIES, 1000, 300_000)}


def draw_classifier(rng: random.Random, scale: Scale) -> Case:
    """A vocabulary, and the width of its classifier."""
    return {**draw_vocabulary(rng, scale), "width": draw_size(rng, scale, WIDTHS, 256, 5120)}


def draw_mlp(rng: random.Random, scale: Scale) -> Case:
    """An MLP: most are four times as wide inside."""
    width = draw_size(rng, scale, WIDTHS, 128, 5120)
    return {
        "dtype": _dtype(rng),
        "width": width,
        "inner": rng.choice((4 * width, draw_size(rng, scale, INNER, 256, 14336))),
    }


def draw_linear(rng: random.Random, scale: Scale) -> Case:
    """A matrix, with bias or without."""
    sizes = [draw_size(rng, scale, WIDTHS + INNER, 64, 16384) for _ in range(2)]
    return {"dtype": _dtype(rng), "width": sizes[0], "out": sizes[1], "bias": rng.random() < 0.5}


def draw_heads(rng: random.Random, scale: Scale) -> Case:
    """A batch and its heads, some of which share keys and values."""
    tiny = scale.most < 1000
    heads, shared = rng.choice((1, 2, 4) if tiny else (4, 8, 12, 16, 20, 25, 32, 40)), rng.choice((1, 1, 2, 4))
    return {
        "dtype": _dtype(rng), "batch": rng.choice((1, 2, 3) if tiny else (1, 2, 3, 4, 8, 16)), "heads": heads,
        "kv_heads": heads // shared if heads % shared == 0 else heads,
        "head_dim": rng.choice(HEAD_SIZES) if rng.random() < 0.7 else 2 * rng.randint(8, 128),
    }  # fmt: skip


def draw_rope(rng: random.Random, scale: Scale) -> Case:
    """Heads, and the layout of their pairs."""
    return {**draw_heads(rng, scale), "interleaved": rng.random() < 0.3}


def draw_attention(rng: random.Random, scale: Scale) -> Case:
    """Heads of the sizes that attention takes."""
    shape = draw_heads(rng, scale)
    return {**shape, "head_dim": 64 if rng.random() < 0.4 else min(256, -(-shape["head_dim"] // 8) * 8)}


def draw_embedding(rng: random.Random, scale: Scale) -> Case:
    """A table, with positions or without."""
    batch = rng.choice((1, 2, 8, 32))
    return {**draw_classifier(rng, scale), "batch": batch, "position": rng.random() < 0.5}


def draw_row_counts(rng: random.Random, op: Op, shape: Case, scale: Scale, count: int) -> list[int]:
    """Row counts of a shape, all different, the largest first; none where the shape is too large for the scale."""

    def cost_of(rows: int) -> Cost:
        return (op.drawn_by or op.cost)({**shape, "rows": rows})

    precision = 12.0 if shape["dtype"] == "fp32" else 1.0  # times as long takes a FLOP of float32

    def fits(rows: int) -> bool:
        each = cost_of(rows)
        return each.bytes <= op.size * scale.bytes[1] and precision * each.flops <= op.size * scale.flops

    most = min(_last(fits), scale.rows)
    if not most:
        return []
    least = min(most, 1 + _last(lambda rows: cost_of(rows).bytes < scale.bytes[0]))
    counts = {1} if rng.random() < 0.25 else set()
    for _ in range(20 * count):
        if len(counts) == count:
            break
        rows = round(least * (most / least) ** rng.random() ** 0.5)  # more of the larger ones
        counts.add(2 ** (rows.bit_length() - 1) if rng.random() < 0.3 and rows >= 2 * least else rows)
    return sorted(counts, reverse=True)


def _last(holds: Callable[[int], bool]) -> int:
    """The last number up to which all of 1, 2, ... have it, if what holds for one holds for all before it."""
    high = 1
    while holds(high) and high < 2**30:
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def draw(table: dict[str, Op], names: Sequence[str], seed: int, count: int, scale: Scale) -> list[list[Case]]:
    """`count` cases of each op, in lists of one shape; the ops take turns, so that an early end leaves some of each.

    >>> from tilewright.bench.shapes import OPS
    >>> [[len(group), group[0]["op"]] for group in draw(OPS, ["swiglu", "rope"], 0, 12, BENCH)]
    [[10, 'swiglu'], [10, 'rope'], [2, 'swiglu'], [2, 'rope']]
    """
    turns: list[list[list[Case]]] = []
    for name in names:
        rng, op, left, groups = random.Random(f"{seed} {name}"), table[name], count, []
        always = [shape for shape in op.always if scale == BENCH]
        seen: list[Case] = []
        while left > 0:
            shape = always.pop(0) if always else op.draw(rng, scale)
            rows = draw_row_counts(rng, op, shape, scale, min(left, op.row_counts))
            cases = [case for each in rows if (case := {"op": name, **shape, "rows": each}) not in seen]
            if cases:
                groups.append(cases)
                seen += cases
                left -= len(cases)
        turns.append(groups)
    longest = max(map(len, turns), default=0)
    return [groups[turn] for turn in range(longest) for groups in turns if turn < len(groups)]
