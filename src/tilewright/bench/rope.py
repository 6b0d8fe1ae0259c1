"""rope against eager PyTorch, torch.compile and Liger, in one run with the GPU's own ceilings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from tilewright.bench.protocol import Ask, Case, Pass, Prepared, build, forward_backward, run_cases
from tilewright.measure.machine import package_version
from tilewright.ops.rope.op import cost, rope, rope_tables
from tilewright.plan.cost import Cost

BATCH, SEQUENCE = 4, 4096
HEADS = ((64, 8, 128), (32, 32, 128), (32, 32, 64))  # of queries, of keys, and the size of each

Tensors = tuple[torch.Tensor, torch.Tensor]
Implementation = Callable[[torch.Tensor, torch.Tensor], Tensors]


def _swapped(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """The other member of each pair, with its sign."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def _implementations(case: Case) -> dict[str, Implementation]:
    """Ours and what a user would pick instead, by name; all take (batch, sequence, heads, head_dim)."""
    interleaved = case["interleaved"]
    cos, sin = rope_tables(SEQUENCE, case["head_dim"], device="cuda")
    # Tables as the peers want them: as wide as a head and in its dtype.
    wide_cos, wide_sin = (
        (table.repeat_interleave(2, -1) if interleaved else torch.cat((table, table), -1)).to(torch.bfloat16)
        for table in (cos, sin)
    )

    def ours(q: torch.Tensor, k: torch.Tensor) -> Tensors:
        return rope(q, k, cos, sin, interleaved=interleaved)

    def inplace(q: torch.Tensor, k: torch.Tensor) -> Tensors:
        return rope(q, k, cos, sin, interleaved=interleaved, inplace=True)

    def plain(q: torch.Tensor, k: torch.Tensor) -> Tensors:
        by_cos, by_sin = wide_cos[:, None], wide_sin[:, None]
        return q * by_cos + _swapped(q, interleaved) * by_sin, k * by_cos + _swapped(k, interleaved) * by_sin

    def liger(q: torch.Tensor, k: torch.Tensor) -> Tensors:
        """Rotate in place, as Liger does in forward and backward."""
        from liger_kernel.ops.rope import LigerRopeFunction

        return LigerRopeFunction.apply(q.transpose(1, 2), k.transpose(1, 2), wide_cos[None], wide_sin[None])

    functions: dict[str, Implementation] = {"tilewright": ours, "tilewright-inplace": inplace, "eager": plain}
    functions["compile"] = torch.compile(plain, dynamic=False)
    if package_version("liger-kernel") is not None and not interleaved:  # Liger has no interleaved pairs
        functions["liger"] = liger
    return functions


def cases(quick: bool) -> Iterator[Case]:
    """Every case measured."""
    for heads, kv_heads, head_dim in HEADS[:1] if quick else HEADS:
        for interleaved in (False, True):
            yield {
                "dtype": "bf16", "batch": BATCH, "sequence": SEQUENCE, "heads": heads, "kv_heads": kv_heads,
                "head_dim": head_dim, "interleaved": interleaved,
            }  # fmt: skip


def prepare(case: Case) -> Prepared:
    """Forward and backward of each implementation, on tensors of its own: some overwrite them."""
    functions = _implementations(case)
    return build({name: partial(_passes, f, case, name.endswith("inplace")) for name, f in functions.items()})


def _passes(function: Implementation, case: Case, inplace: bool) -> dict[str, Pass]:
    # Leaves that require a gradient cannot be overwritten; backward is the same kernel, in place or not.
    inputs = [
        torch.randn(BATCH, SEQUENCE, heads, case["head_dim"], device="cuda", dtype=torch.bfloat16)
        for heads in (case["heads"], case["kv_heads"])
    ]
    if inplace:
        return {"forward": lambda: function(*inputs)}
    return forward_backward(function, [x.requires_grad_() for x in inputs])


def _limits(case: Case) -> dict[str, Cost]:
    limit = cost(case["batch"] * case["sequence"], case["heads"] + case["kv_heads"], case["head_dim"])
    return {"forward": limit, "backward": limit}


def _label(case: Case) -> str:
    layout = "interleaved" if case["interleaved"] else "half-rotated"
    return f"{case['heads']} + {case['kv_heads']} heads of {case['head_dim']} {layout}"


def run(ask: Ask) -> Case:
    """Measure every case."""
    return run_cases("rope", cases(ask.quick), prepare, _limits, _label, peers=("liger-kernel",), ask=ask)
