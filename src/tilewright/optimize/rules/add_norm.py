"""Residual add, with dropout in front of it, and the norm behind it, in one pass: across the border of two modules.

    total = dropout(x) + residual          or dropout(x) + dropout(second) + residual, or dropout(x) alone
    out   = norm(total)

The sum stays there for the residual stream: the call returns both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from tilewright.ops import dropout_add_norm
from tilewright.optimize import graph as g
from tilewright.optimize.rule import Candidate, Choice, Declined, Rule, View
from tilewright.optimize.rules.norm import Found, is_of_width, norms, out_dtype


@dataclass(frozen=True)
class _Sum:
    """The summands of a residual stream; dropout of probability `p` in front of all but the residual."""

    x: Node
    second: Node | None
    residual: Node | None
    p: float


def _find(view: View) -> Iterator[Candidate | Declined]:
    for found in norms(view):
        if isinstance(found, Declined) or not is_of_width(found.x):
            continue  # the rule `norm` says so
        summed = _sum(found.x)
        if summed is None:
            continue
        yield Candidate(
            found.anchor, (found.out, found.x), tuple(_choices(found, summed, view)), is_guess=found.is_guess
        )


def _choices(found: Found, summed: _Sum, view: View) -> Iterator[Choice]:
    dtype = out_dtype(found.out, view)
    total = g.tensor_of(found.x)
    assert total is not None
    words = ", dropout" if summed.p else ""
    words += ", two branches" if summed.second is not None else ", residual" if summed.residual is not None else ""
    for options, vectors, kind in found.formulas():
        yield Choice(
            add_norm, (summed.x, summed.second, summed.residual, *vectors),
            {"p": summed.p, "total_dtype": total.dtype, "out_dtype": dtype, **options}, kind + words,
            {"p": 0.0, "total_dtype": torch.float64, "out_dtype": torch.float64},
        )  # fmt: skip


def _sum(node: Node) -> _Sum | None:
    """The summands of a node that is an addition or a dropout and can be fused; None for any other."""
    total = g.tensor_of(node)
    branch, p = _dropped(node)
    if branch is not node:
        return _Sum(branch, None, None, p) if total is not None and g.is_same_shape(branch, node) else None
    if total is None or not _is_addition(node):
        return None
    left, right = node.args[0], node.args[1]
    assert isinstance(left, Node) and isinstance(right, Node)
    (branch, p), residual = _dropped(right, node), left
    if branch is right:  # no dropout on the right: whichever has one is the branch
        (branch, p), residual = _dropped(left, node), right
        if branch is left and _dtype(right) != total.dtype:  # the residual has the dtype of the sum
            branch, residual = right, left
    if _dtype(residual) != total.dtype:
        return None
    if p == 0.0:
        inner, other = (branch, residual) if _is_inner_sum(branch, node) else (residual, branch)
        if _is_inner_sum(inner, node) and _dtype(other) == total.dtype:
            (one, p_one), (two, p_two) = (_dropped(each, inner) for each in inner.args)  # type: ignore[arg-type]
            if p_one == p_two and _dtype(one) == _dtype(two) == _dtype(inner):
                return _Sum(one, two, other, p_one)
    return _Sum(branch, None, residual, p)


def _is_inner_sum(node: Node, outer: Node) -> bool:
    return _is_addition(node) and g.is_only_used_by(node, [outer])


def _dtype(node: Any) -> torch.dtype | None:
    tensor = g.tensor_of(node)
    return None if tensor is None else tensor.dtype


def _is_addition(node: Node) -> bool:
    """Whether a node adds two floating-point tensors of its own shape."""
    if not g.calls(node, *g.ADDS) or node.kwargs or len(node.args) != 2:
        return False
    return all(isinstance(each, Node) and g.is_float(each) and g.is_same_shape(each, node) for each in node.args)


def _dropped(node: Node, reader: Node | None = None) -> tuple[Node, float]:
    """What dropout was applied to, and its probability; the node itself and 0 where there is none, or `reader` is not
    the only one to read it."""
    if not g.calls(node, *g.DROPOUTS) or (reader is not None and not g.is_only_used_by(node, [reader])):
        return node, 0.0
    given: dict[str, Any] = {**dict(zip(("input", "p", "training", "inplace"), node.args, strict=False)), **node.kwargs}
    if "train" in given:
        given["training"] = given["train"]
    p = given.get("p", 0.5) if given.get("training", True) else 0.0
    if isinstance(p, Node) or given.get("inplace") or not 0.0 <= p < 1.0:  # a node where it changes from call to call
        return node, 0.0
    return given["input"], float(p)


def add_norm(
    x: Tensor, second: Tensor | None, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    *, total_dtype: torch.dtype, out_dtype: torch.dtype | None, **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The norm and the sum, in the dtypes that the site has."""
    if weight is not None and bias is not None and weight.dtype != bias.dtype:
        bias = bias.to(weight.dtype)
    if second is not None and second.dtype != x.dtype:
        second = second.to(x.dtype)
    return dropout_add_norm(
        x, residual, weight, bias, second=second, prenorm=True, out_dtype=out_dtype,
        residual_dtype=total_dtype if residual is None else None, **options,
    )  # fmt: skip


RULE = Rule("add_norm", "dropout, residual add and the norm behind it in one pass", _find)
