"""Every op at shapes drawn from a seed, against eager PyTorch, torch.compile and itself at the next round shape.

A shape is what a kernel is compiled for; each is called with several row counts, which torch.compile takes as dynamic.
Many processes compile, and one at a time measures: forward and backward together. `OPS` declares each op once.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright import ops
from tilewright.bench.compare import compare
from tilewright.bench.protocol import Ask, Case
from tilewright.errors import UserError
from tilewright.ops.attention.backends import by_pytorch
from tilewright.plan import cost
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


def _draw_width(rng: random.Random, scale: Scale) -> Case:
    return {"dtype": _dtype(rng), "width": draw_size(rng, scale, WIDTHS, 64, 16384)}


def _draw_inner(rng: random.Random, scale: Scale) -> Case:
    return {"dtype": _dtype(rng), "width": draw_size(rng, scale, INNER, 64, 20000)}


def _draw_norm(rng: random.Random, scale: Scale) -> Case:
    return {**_draw_width(rng, scale), "norm": rng.choice(("layer", "rms")), "p": rng.choice((0.0, 0.1))}


def _draw_vocabulary(rng: random.Random, scale: Scale) -> Case:
    return {"dtype": _dtype(rng), "vocabulary": draw_size(rng, scale, VOCABULARIES, 1000, 300_000)}


def _draw_classifier(rng: random.Random, scale: Scale) -> Case:
    return {**_draw_vocabulary(rng, scale), "width": draw_size(rng, scale, WIDTHS, 256, 5120)}


def _draw_mlp(rng: random.Random, scale: Scale) -> Case:
    width = draw_size(rng, scale, WIDTHS, 128, 5120)
    return {
        "dtype": _dtype(rng),
        "width": width,
        "inner": rng.choice((4 * width, draw_size(rng, scale, INNER, 256, 14336))),
    }


def _draw_linear(rng: random.Random, scale: Scale) -> Case:
    sizes = [draw_size(rng, scale, WIDTHS + INNER, 64, 16384) for _ in range(2)]
    return {"dtype": _dtype(rng), "width": sizes[0], "out": sizes[1], "bias": rng.random() < 0.5}


def _draw_heads(rng: random.Random, scale: Scale) -> Case:
    tiny = scale.most < 1000
    heads, shared = rng.choice((1, 2, 4) if tiny else (4, 8, 12, 16, 20, 25, 32, 40)), rng.choice((1, 1, 2, 4))
    return {
        "dtype": _dtype(rng), "batch": rng.choice((1, 2, 3) if tiny else (1, 2, 3, 4, 8, 16)), "heads": heads,
        "kv_heads": heads // shared if heads % shared == 0 else heads,
        "head_dim": rng.choice(HEAD_SIZES) if rng.random() < 0.7 else 2 * rng.randint(8, 128),
    }  # fmt: skip


def _draw_rope(rng: random.Random, scale: Scale) -> Case:
    return {**_draw_heads(rng, scale), "interleaved": rng.random() < 0.3}


def _draw_attention(rng: random.Random, scale: Scale) -> Case:
    shape = _draw_heads(rng, scale)
    return {**shape, "head_dim": 64 if rng.random() < 0.4 else min(256, -(-shape["head_dim"] // 8) * 8)}


def _draw_embedding(rng: random.Random, scale: Scale) -> Case:
    batch = rng.choice((1, 2, 8, 32))
    return {**_draw_classifier(rng, scale), "batch": batch, "position": rng.random() < 0.5}


def _element(case: Case) -> int:
    return DTYPES[case["dtype"]].itemsize


def _sum(*costs: Cost) -> Cost:
    return Cost(*(sum(getattr(each, part) for each in costs) for part in ("flops", "bytes_read", "bytes_written")))


def _norm_inputs(case: Case, make: Make) -> list[Tensor]:
    rows, width = case["rows"], case["width"]
    both = make(rows, width), make(rows, width), make(width)
    return [*both, make(width)] if case["norm"] == "layer" else list(both)


def _norm_ours(shape: Case, x: Tensor, residual: Tensor, *parameters: Tensor) -> Any:
    return ops.dropout_add_norm(x, residual, *parameters, p=shape["p"], norm=shape["norm"], prenorm=True)


def _norm_eager(shape: Case, x: Tensor, residual: Tensor, *parameters: Tensor) -> Any:
    residual = (F.dropout(x, shape["p"]) if shape["p"] else x) + residual
    norm: Any = F.rms_norm if shape["norm"] == "rms" else F.layer_norm
    return norm(residual, (x.shape[-1],), *parameters, eps=1e-5), residual


def _norm_cost(case: Case) -> Cost:
    size = _element(case)
    return _sum(*(
        cost.dropout_add_norm(
            case["rows"], case["width"], x_bytes=size, residual_bytes=size, backward=backward, dropout=case["p"] > 0
        )
        for backward in (False, True)
    ))  # fmt: skip


def _gated(ours: Callable[..., Any], activate: Callable[[Tensor], Tensor]) -> Op:
    return Op(
        _draw_inner,
        lambda case, make: [make(case["rows"], case["width"]) for _ in range(2)],
        lambda shape, gate, up: ours(gate, up),
        lambda shape, gate, up: activate(gate) * up,
        lambda case: _activation_cost(case, True),
        ((0,), (0,)),
        {"width": 128},
    )


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _activation_cost(case: Case, gated: bool) -> Cost:
    return _sum(*(
        cost.activation(case["rows"], case["width"], gated=gated, element_bytes=_element(case), backward=backward)
        for backward in (False, True)
    ))  # fmt: skip


def _mlp_inputs(case: Case, make: Make) -> list[Tensor]:
    width, inner = case["width"], case["inner"]
    return [
        make(case["rows"], width), make(inner, width, scale=width**-0.5), make(inner),
        make(width, inner, scale=inner**-0.5), make(width),
    ]  # fmt: skip


def _linear_inputs(case: Case, make: Make) -> list[Tensor]:
    inputs = [make(case["rows"], case["width"]), make(case["out"], case["width"], scale=case["width"] ** -0.5)]
    return [*inputs, make(case["out"])] if case["bias"] else inputs


def _linear_cost(case: Case) -> Cost:
    sizes = case["rows"], case["width"], case["out"]
    return _sum(*(cost.linear(*sizes, element_bytes=_element(case), backward=backward) for backward in (False, True)))


def _linear_drawn_by(case: Case) -> Cost:
    """Each matrix read and written once."""
    rows, width, out = case["rows"], case["width"], case["out"]
    once = _element(case) * (rows * width + rows * out + width * out)
    return Cost(6 * rows * width * out, once, once)


def _rope_inputs(case: Case, make: Make) -> list[Tensor]:
    """(q, k), the tables as ours wants them, and as plain PyTorch does: as wide as a head and in its dtype."""
    batch, rows, size = case["batch"], case["rows"], case["head_dim"]
    cos, sin = ops.rope_tables(rows, size, device=make.device)
    wide = [
        (table.repeat_interleave(2, -1) if case["interleaved"] else torch.cat((table, table), -1)).to(make.dtype)
        for table in (cos, sin)
    ]
    return [*(make(batch, rows, case[heads], size) for heads in ("heads", "kv_heads")), cos, sin, *wide]


def _rope_ours(shape: Case, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *_: Tensor) -> Any:
    return ops.rope(q, k, cos, sin, interleaved=shape["interleaved"])


def _rope_eager(shape: Case, q: Tensor, k: Tensor, _: Tensor, __: Tensor, cos: Tensor, sin: Tensor) -> Any:
    def turned(x: Tensor) -> Tensor:
        if shape["interleaved"]:
            swapped = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
        else:
            first, second = x.chunk(2, -1)
            swapped = torch.cat((-second, first), -1)
        return x * cos[:, None] + swapped * sin[:, None]

    return turned(q), turned(k)


def _rope_cost(case: Case) -> Cost:
    tokens, heads = case["batch"] * case["rows"], case["heads"] + case["kv_heads"]
    return _sum(*(cost.rope(tokens, heads, case["head_dim"], element_bytes=_element(case)) for _ in range(2)))


def _attention_inputs(case: Case, make: Make) -> list[Tensor]:
    """Queries, keys and values as one matmul leaves them."""
    sizes = [case[heads] * case["head_dim"] for heads in ("heads", "kv_heads", "kv_heads")]
    packed = make(case["batch"], case["rows"], sum(sizes)).detach()
    return [make.leaf(part.unflatten(-1, (-1, case["head_dim"]))) for part in packed.split(sizes, -1)]


def _attention_cost(case: Case) -> Cost:
    sizes = [case[name] for name in ("batch", "rows", "heads", "kv_heads", "head_dim")]
    return _sum(
        *(cost.attention(*sizes, element_bytes=_element(case), backward=backward) for backward in (False, True))
    )


def _embedding_inputs(case: Case, make: Make) -> list[Tensor]:
    inputs = [make.integers(case["vocabulary"], case["batch"], case["rows"]), make(case["vocabulary"], case["width"])]
    return [*inputs, make(case["rows"], case["width"])] if case["position"] else inputs


def _embedding_eager(shape: Case, tokens: Tensor, weight: Tensor, position: Tensor | None = None) -> Tensor:
    x = F.embedding(tokens, weight)
    return x if position is None else x + position


def _embedding_cost(case: Case) -> Cost:
    sizes, size = (case["batch"] * case["rows"], case["vocabulary"], case["width"]), _element(case)
    both = (cost.embedding(*sizes, table_bytes=size, out_bytes=size, backward=backward) for backward in (False, True))
    return _sum(*both)


OPS: dict[str, Op] = {
    "dropout_add_norm": Op(
        _draw_norm, _norm_inputs, _norm_ours, _norm_eager, _norm_cost, ((0,), (0,)), {"width": 128}, row_counts=5
    ),
    "cross_entropy": Op(
        _draw_vocabulary,
        lambda case, make: [make(case["rows"], case["vocabulary"]), make.integers(case["vocabulary"], case["rows"])],
        lambda shape, logits, targets: ops.cross_entropy(logits, targets),
        lambda shape, logits, targets: F.cross_entropy(logits.float(), targets),
        lambda case: cost.cross_entropy(case["rows"], case["vocabulary"], element_bytes=_element(case)),
        ((0,), (0,)),
        {"vocabulary": 128},
        always=tuple({"dtype": "bf16", "vocabulary": size} for size in (50257, 100277, 262208)),
    ),
    "linear_cross_entropy": Op(
        _draw_classifier,
        lambda case, make: [
            make(case["rows"], case["width"]),
            make(case["vocabulary"], case["width"], scale=case["width"] ** -0.5),
            make.integers(case["vocabulary"], case["rows"]),
        ],
        lambda shape, x, weight, targets: ops.linear_cross_entropy(x, weight, targets),
        lambda shape, x, weight, targets: F.cross_entropy(F.linear(x, weight).float(), targets),
        lambda case: cost.linear_cross_entropy(
            case["rows"], case["vocabulary"], case["width"], element_bytes=_element(case)
        ),
        ((0,), (), (0,)),
        {"vocabulary": 128, "width": 128},
        size=3.0,
        always=tuple(
            {"dtype": "bf16", "vocabulary": size, "width": width}
            for size, width in ((50257, 2048), (151936, 3072), (100277, 4096), (262208, 1152))
        ),
    ),
    "swiglu": _gated(ops.swiglu, F.silu),
    "geglu": _gated(ops.geglu, _gelu),
    "bias_gelu": Op(
        _draw_inner,
        lambda case, make: [make(case["rows"], case["width"]), make(case["width"])],
        lambda shape, x, bias: ops.bias_gelu(x, bias),
        lambda shape, x, bias: _gelu(x + bias),
        lambda case: _activation_cost(case, False),
        ((0,),),
        {"width": 128},
    ),
    "gelu_mlp": Op(
        _draw_mlp,
        _mlp_inputs,
        lambda shape, *inputs: ops.gelu_mlp(*inputs),
        lambda shape, x, up, up_bias, down, down_bias: F.linear(_gelu(F.linear(x, up, up_bias)), down, down_bias),
        lambda case: _sum(*(
            cost.gelu_mlp(
                case["rows"], case["width"], case["inner"], element_bytes=_element(case), backward=backward
            )
            for backward in (False, True)
        )),
        ((0,),),
        {"width": 128, "inner": 128},
    ),
    "rope": Op(
        _draw_rope, _rope_inputs, _rope_ours, _rope_eager, _rope_cost, ((1,), (1,), (0,), (0,), (0,), (0,)),
        {"head_dim": 16},
    ),
    "linear": Op(
        _draw_linear,
        _linear_inputs,
        lambda shape, *inputs: ops.linear(*inputs),
        lambda shape, *inputs: F.linear(*inputs),
        _linear_cost,
        ((0,),),
        {"width": 128, "out": 128},
        drawn_by=_linear_drawn_by,
    ),
    "embedding": Op(
        _draw_embedding,
        _embedding_inputs,
        lambda shape, *inputs: ops.embedding(*inputs),
        _embedding_eager,
        _embedding_cost,
        ((1,), (), (0,)),
        {"width": 128},
    ),
    "attention": Op(
        _draw_attention,
        _attention_inputs,
        lambda shape, *inputs: ops.attention(*inputs),
        lambda shape, *inputs: by_pytorch(*inputs),
        _attention_cost,
        ((1,), (1,), (1,)),
        {"rows": 128, "head_dim": 16},
    ),
}  # fmt: skip


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


def run(ask: Ask) -> dict[str, Any]:
    """Draw the cases, compile them, measure them."""
    names = [name for name in ask.ops.split(",") if name] or list(OPS)
    for name in names:
        if name not in OPS:
            raise UserError(f"There is no op {name!r} among the shapes; choose from {', '.join(OPS)}.")
    if ask.cases < 1:
        raise UserError(f"--cases is {ask.cases}; give at least 1.")
    groups = draw(OPS, names, ask.seed, 8 if ask.quick else ask.cases, BENCH)
    return compare("shapes", "tilewright.bench.shapes:OPS", groups, ask)
