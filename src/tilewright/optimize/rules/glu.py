"""SwiGLU and GEGLU: the activation of one matmul's result times another's, in one pass; split or packed.

Behind a fused loss the memory of a step is fullest in the backward of the last one, where all that was saved is still
there, and the gradients of gate and up beside it. So the first two keep nothing for the matmul behind them: backward
computes them again, in less than two thousandths of a step, and those gradients have the room that this leaves.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from tilewright.nn.recompute import forgetting, if_unchanged, is_memory_of
from tilewright.ops import geglu, linear, swiglu
from tilewright.optimize import graph as g
from tilewright.optimize.rule import Candidate, Choice, Declined, Rule, View, draw
from tilewright.optimize.rules.gelu import KINDS, activations
from tilewright.optimize.rules.linear_cross_entropy import loss_of_head
from tilewright.runtime import dispatch

AGAIN = 2  # of them are computed again
LARGE = 32 << 20  # bytes from which on that is worth it


def _find(view: View) -> Iterator[Candidate | Declined]:
    found = list(_nominate(view))
    if view.has_gradients and any(g.calls(node, loss_of_head) for node in view.graph.nodes):
        candidates = [each for each in found if isinstance(each, Candidate)]
        for each in candidates[:-1][:AGAIN]:
            if (whole := _with_projection(each)) is not None:
                yield whole
                if not whole.anchor.users:  # it is replaced; else the site alone may be
                    found.remove(each)
    yield from found


def _nominate(view: View) -> Iterator[Candidate | Declined]:
    for x, result in activations(view):
        product = next(iter(result.users))
        if len(result.users) != 1 or not g.calls(product, *g.MULS) or len(product.args) != 2:
            continue
        up = next((each for each in product.args if each is not result), None)
        if not isinstance(up, Node) or not g.is_same_shape(up, product) or not g.is_same_shape(x, product):
            continue
        tensors = [g.tensor_of(each) for each in (x, up, product)]
        if len({each.dtype for each in tensors if each is not None}) != 1:
            yield Declined(product, "gate, up and their product are not of one dtype")
            continue
        packed = _packed(x, up)
        words = ", packed" if packed is not None else ""
        inputs = (packed,) if packed is not None else (x, up)
        choices = tuple(Choice(glu, inputs, {"kind": kind}, f"{kind}{words}") for kind in KINDS)
        yield Candidate(product, (product,), choices)


def _with_projection(found: Candidate) -> Candidate | None:
    """A site together with the matmul that alone reads it; None where there is none, or little to save."""
    result, (user, *others) = g.tensor_of(found.anchor), [*found.anchor.users, None]
    if result is None or user is None or others != [None] or not g.calls(user, F.linear, torch._C._nn.linear):
        return None
    if not all(isinstance(size, int) for size in result.shape) or result.nbytes < LARGE:
        return None
    given: dict[str, Any] = {**dict(zip(("input", "weight", "bias"), user.args, strict=False)), **user.kwargs}
    if given["input"] is not found.anchor:
        return None

    def extend(choice: Choice) -> Choice:
        inputs = (*choice.inputs, None)[:2]
        detail = f"{choice.detail}, computed again for the matmul behind it"
        return Choice(project, (*inputs, given["weight"], given.get("bias")), choice.options, detail)

    inner, is_packed, has_bias = int(result.shape[-1]), len(found.choices[0].inputs) == 1, given.get("bias") is not None

    def sample(generator: torch.Generator) -> list[Tensor | None]:
        inputs = [(2, 3, 2 * inner), None] if is_packed else [(2, 3, inner), (2, 3, inner)]
        return draw(generator, [*inputs, (5, inner), (5,) if has_bias else None])

    return Candidate(user, (user,), tuple(map(extend, found.choices)), sample=sample, is_guess=True)


def _packed(gate: Node, up: Node) -> Node | None:
    """The tensor whose first half is the gate and whose second is up; None where they are not that."""
    if not (g.calls(gate, operator.getitem) and g.calls(up, operator.getitem)):
        return None
    both, other = gate.args[0], up.args[0]
    if both is not other or (gate.args[1], up.args[1]) != (0, 1) or not isinstance(both, Node):
        return None
    if not g.calls(both, "chunk", "split") and getattr(both.target, "__name__", "") not in ("chunk", "split"):
        return None
    source = both.args[0]
    whole, half = g.shape_of(source), g.shape_of(gate)
    if whole is None or half is None or not isinstance(source, Node) or whole[-1] != 2 * half[-1]:
        return None
    is_last = list(map(str, whole[:-1])) == list(map(str, half[:-1]))
    return source if is_last and g.is_only_used_by(gate, gate.users) else None


def glu(gate: Tensor, up: Tensor | None = None, *, kind: str) -> Tensor:
    """The activation of `gate`, times `up`."""
    if kind == "silu":
        return swiglu(gate, up)
    return geglu(gate, up, approximate=KINDS[kind])


def project(gate: Tensor, up: Tensor | None, weight: Tensor, bias: Tensor | None, *, kind: str) -> Tensor:
    """A linear layer of `glu`, whose result backward computes again instead of keeping it."""
    activated = glu(gate, up, kind=kind)
    if not torch.is_grad_enabled() or dispatch.is_traced(gate, up, weight, bias):
        return linear(activated, weight, bias)
    again = if_unchanged(functools.partial(glu, gate, up, kind=kind), gate, up)
    with forgetting(is_memory_of(activated), again):
        return linear(activated, weight, bias)


RULE = Rule("glu", "SwiGLU and GEGLU in one pass", _find)
