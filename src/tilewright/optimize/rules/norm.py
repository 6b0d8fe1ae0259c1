"""LayerNorm and RMSNorm, however they are spelled, in one pass over memory.

A norm is found by what every one of them has: a reciprocal root, or PyTorch's own function. Around it lies the region
between the one tensor that it takes and the last elementwise result that depends on nothing but that tensor and
vectors of its width. Which norm it is, with which eps, and whether its weight is stored as its distance from one, the
probe decides.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from tilewright.ops import dropout_add_norm
from tilewright.optimize import graph as g
from tilewright.optimize.rule import Candidate, Choice, Declined, Rule, View

_ROOTS = (torch.rsqrt, "rsqrt", torch.sqrt, "sqrt", *g.POWS)
_NORMS = (F.layer_norm, F.rms_norm, torch.layer_norm, torch.rms_norm)
_BACK = (*g.POWS, *g.MULS, *g.ADDS, *g.SUBS, *g.CASTS, torch.mean, "mean", torch.var, "var", "sum", torch.sum, *g.DIVS)
_FORTH = (*g.MULS, *g.ADDS, *g.DIVS, *g.CASTS)
WIDEST = 65536


@dataclass(frozen=True)
class Found:
    """A norm: what it takes, what it gives, its vectors, and what its numbers may mean."""

    anchor: Node
    x: Node
    out: Node
    vectors: tuple[Node, ...]
    epsilons: tuple[float, ...]
    is_guess: bool = False  # there is another one around the same root, which begins later

    def formulas(self) -> Iterator[tuple[dict[str, Any], tuple[Node | None, Node | None], str]]:
        """What it may be: options of `dropout_add_norm`, weight and bias, and words for it; the likeliest first."""
        roles: list[tuple[Node | None, Node | None]] = [(None, None)]
        if len(self.vectors) == 1:
            roles = [(self.vectors[0], None)]
        elif len(self.vectors) == 2:
            roles = [(self.vectors[0], self.vectors[1]), (self.vectors[1], self.vectors[0])]
        for kind, eps, (weight, bias) in itertools.product(("rms", "layer"), self.epsilons, roles):
            if bias is None or kind == "layer":
                yield {"norm": kind, "eps": eps, "zero_centered": False}, (weight, bias), f"{kind}, eps {eps:g}"
            if kind == "rms" and weight is not None and bias is None:
                options = {"norm": kind, "eps": eps, "zero_centered": True}
                yield options, (weight, None), f"rms of 1 + weight, eps {eps:g}"


def norms(view: View) -> Iterator[Found | Declined]:
    """Every norm of a graph that somebody reads; where what it takes is not clear, each that may be, widest first."""
    for node in view.graph.nodes:
        if g.calls(node, *_NORMS):
            found: Iterator[Found | Declined] = _of_function(node)
        elif g.calls(node, *_ROOTS) and _is_root(node):
            found = _of_root(node)
        else:
            continue
        for each in found:
            if isinstance(each, Declined) or each.out.users:
                yield each


def _is_root(node: Node) -> bool:
    """Whether a node is a root of one number a row."""
    shape = g.shape_of(node)
    if not shape or not g.is_float(node) or shape[-1] != 1:
        return False
    return not g.calls(node, *g.POWS) or (len(node.args) > 1 and node.args[1] in (0.5, -0.5))


def _of_function(node: Node) -> Iterator[Found | Declined]:
    if not node.users:
        return
    names: tuple[str, ...] = ("input", "normalized_shape", "weight", "bias", "eps")
    if g.calls(node, F.rms_norm, torch.rms_norm):
        names = ("input", "normalized_shape", "weight", "eps")
    given: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    x, shape = given["input"], g.shape_of(given["input"])
    if shape is None or len(given["normalized_shape"]) != 1 or not g.is_float(x):
        yield Declined(node, "it norms more than the last dimension")
        return
    eps = given.get("eps")
    if eps is None:
        eps = torch.finfo(g.tensor_of(x).dtype).eps if "bias" not in names else 1e-5  # type: ignore[union-attr]
    if not isinstance(eps, (int, float)):
        yield Declined(node, "its eps is known at run time only")
        return
    vectors = tuple(each for each in (given.get("weight"), given.get("bias")) if isinstance(each, Node))
    yield Found(node, g.before_casts(x), node, vectors, (float(eps),))


def _of_root(node: Node) -> Iterator[Found | Declined]:
    """The norms that may be around a root: the longest, by each tensor that it may begin with."""
    sources = [
        each for each in g.ancestors(node, 24, lambda step: g.calls(step, *_BACK))
        if g.is_float(each) and (g.shape_of(each) or (1,))[-1] != 1 and each.op != "get_attr"
    ]  # fmt: skip
    ends = _ends(node)
    for out in reversed(ends):
        found = dict[Node, Found]()
        for x in sources:
            x = g.before_casts(x)
            if x in found or not g.is_same_shape(x, out):
                continue
            site = g.region([out], [x])
            if site is None or not all(_is_vector(each, x) for each in site.others) or len(site.others) > 2:
                continue
            found[x] = Found(node, x, out, site.others, _epsilons(site.nodes), is_guess=bool(found))
        if found:
            yield from reversed(found.values())
            return
    if ends and sources:
        yield Declined(node, "no region around it depends on one tensor and vectors alone")


def _ends(node: Node) -> list[Node]:
    """The results behind a root that may be the norm's, nearest first."""
    found, step = list[Node](), node
    while len(step.users) == 1 and g.calls(user := next(iter(step.users)), *_FORTH, torch.reciprocal, "reciprocal"):
        if (
            found
            and not g.is_cast(user)
            and any(each is not step and not _is_one_row(each) for each in user.all_input_nodes)
        ):
            break  # it adds, or multiplies by, more than a vector
        if (g.shape_of(user) or (1,))[-1] != 1:
            found.append(user)
        step = user
        if len(found) > 6:
            break
    return found


def _is_one_row(node: Node) -> bool:
    return all(isinstance(size, int) and size == 1 for size in (g.shape_of(node) or ())[:-1])


def _is_vector(node: Node, x: Node) -> bool:
    shape, of = g.shape_of(node), g.shape_of(x)
    return shape is not None and of is not None and len(shape) == 1 and str(shape[0]) == str(of[-1])


def _epsilons(nodes: Sequence[Node]) -> tuple[float, ...]:
    found = dict[float, None]()
    for node in nodes:
        for each in (*node.args, *node.kwargs.values()):
            if isinstance(each, float) and 0.0 < each <= 0.1:
                found[each] = None
    return (*found, 0.0)


def norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, *, out_dtype: torch.dtype | None, **options: Any
) -> Tensor:
    """The norm alone, in the dtype that the site has."""
    if weight is not None and bias is not None and weight.dtype != bias.dtype:
        bias = bias.to(weight.dtype)
    return dropout_add_norm(x, None, weight, bias, out_dtype=out_dtype, **options)


def out_dtype(out: Node, view: View) -> torch.dtype:
    """The dtype of a norm's result: its own, or autocast's where all who read it would cast it to that."""
    own, autocast = g.tensor_of(out), view.state[out].autocast
    assert own is not None
    if autocast is not None and own.dtype == torch.float32 and g.becomes(out, autocast, dict(view.state)):
        return autocast
    return own.dtype


def is_of_width(node: Node) -> bool:
    """Whether the kernels take rows of this width."""
    shape = g.shape_of(node) or (0,)
    return isinstance(shape[-1], int) and 1 <= shape[-1] <= WIDEST


def _find(view: View) -> Iterator[Candidate | Declined]:
    for found in norms(view):
        if isinstance(found, Declined):
            yield found
            continue
        if not is_of_width(found.x):
            yield Declined(found.anchor, f"its rows are not 1 to {WIDEST:,} wide")
            continue
        dtype = out_dtype(found.out, view)
        choices = tuple(
            Choice(
                norm, (found.x, *vectors), {"out_dtype": dtype, **options}, words,
                {"out_dtype": torch.float64},
            )
            for options, vectors, words in found.formulas()
        )  # fmt: skip
        yield Candidate(found.anchor, (found.out,), choices, is_guess=found.is_guess)


RULE = Rule("norm", "LayerNorm and RMSNorm in one pass", _find)
