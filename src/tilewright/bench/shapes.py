"""Every op at shapes drawn from a seed, against eager PyTorch, torch.compile and itself at the next round shape.

`drawing.py` draws them. torch.compile takes row counts as dynamic. Many processes compile, and one at a time measures:
forward and backward together. `OPS` declares each op once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright import ops
from tilewright.bench import drawing
from tilewright.bench.compare import compare
from tilewright.bench.drawing import BENCH, Make, Op, draw
from tilewright.bench.protocol import Ask, Case
from tilewright.errors import UserError
from tilewright.ops.attention.backends import by_pytorch
from tilewright.plan import cost
from tilewright.plan.cost import Cost


def _element(case: Case) -> int:
    return drawing.DTYPES[case["dtype"]].itemsize


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
        drawing.draw_inner,
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
        drawing.draw_norm, _norm_inputs, _norm_ours, _norm_eager, _norm_cost, ((0,), (0,)), {"width": 128}, row_counts=5
    ),
    "cross_entropy": Op(
        drawing.draw_vocabulary,
        lambda case, make: [make(case["rows"], case["vocabulary"]), make.integers(case["vocabulary"], case["rows"])],
        lambda shape, logits, targets: ops.cross_entropy(logits, targets),
        lambda shape, logits, targets: F.cross_entropy(logits.float(), targets),
        lambda case: cost.cross_entropy(case["rows"], case["vocabulary"], element_bytes=_element(case)),
        ((0,), (0,)),
        {"vocabulary": 128},
        always=tuple({"dtype": "bf16", "vocabulary": size} for size in (50257, 100277, 262208)),
    ),
    "linear_cross_entropy": Op(
        drawing.draw_classifier,
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
        drawing.draw_inner,
        lambda case, make: [make(case["rows"], case["width"]), make(case["width"])],
        lambda shape, x, bias: ops.bias_gelu(x, bias),
        lambda shape, x, bias: _gelu(x + bias),
        lambda case: _activation_cost(case, False),
        ((0,),),
        {"width": 128},
    ),
    "gelu_mlp": Op(
        drawing.draw_mlp,
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
        drawing.draw_rope, _rope_inputs, _rope_ours, _rope_eager, _rope_cost, ((1,), (1,), (0,), (0,), (0,), (0,)),
        {"head_dim": 16},
    ),
    "linear": Op(
        drawing.draw_linear,
        _linear_inputs,
        lambda shape, *inputs: ops.linear(*inputs),
        lambda shape, *inputs: F.linear(*inputs),
        _linear_cost,
        ((0,),),
        {"width": 128, "out": 128},
        drawn_by=_linear_drawn_by,
    ),
    "embedding": Op(
        drawing.draw_embedding,
        _embedding_inputs,
        lambda shape, *inputs: ops.embedding(*inputs),
        _embedding_eager,
        _embedding_cost,
        ((1,), (), (0,)),
        {"width": 128},
    ),
    "attention": Op(
        drawing.draw_attention,
        _attention_inputs,
        lambda shape, *inputs: ops.attention(*inputs),
        lambda shape, *inputs: by_pytorch(*inputs),
        _attention_cost,
        ((1,), (1,), (1,)),
        {"rows": 128, "head_dim": 16},
    ),
}  # fmt: skip


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
