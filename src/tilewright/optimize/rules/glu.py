"""SwiGLU and GEGLU: the activation of one matmul's result times another's, in one pass; split or packed."""

from __future__ import annotations

import operator
from collections.abc import Iterator

from torch import Tensor
from torch.fx import Node

from tilewright.ops import geglu, swiglu
from tilewright.optimize import graph as g
from tilewright.optimize.rule import Candidate, Choice, Declined, Rule, View
from tilewright.optimize.rules.gelu import KINDS, activations


def _find(view: View) -> Iterator[Candidate | Declined]:
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


RULE = Rule("glu", "SwiGLU and GEGLU in one pass", _find)
