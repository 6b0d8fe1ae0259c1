"""GELU in one pass, by PyTorch's function or spelled out; also what `glu` knows of activations."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from tilewright.ops import bias_gelu
from tilewright.optimize import graph as g
from tilewright.optimize.rule import Candidate, Choice, Declined, Rule, View

KINDS = {"silu": "", "gelu_tanh": "tanh", "gelu": "none"}  # and what `approximate` is of a GELU
_FUNCTIONS = (F.silu, F.gelu, torch._C._nn.gelu, torch._C._nn.silu)
_CORES = (torch.tanh, "tanh", F.tanh, torch.erf, "erf", torch.sigmoid, "sigmoid", F.sigmoid)
_PARTS = (*g.MULS, *g.ADDS, *g.DIVS, *g.POWS, *g.CASTS)


def activations(view: View) -> Iterator[tuple[Node, Node]]:
    """Every place that may be an activation: what it takes, and what it gives."""
    for node in view.graph.nodes:
        if not g.is_float(node) or not node.users:
            continue
        if g.calls(node, *_FUNCTIONS):
            source = node.args[0] if node.args else node.kwargs.get("input")
            if isinstance(source, Node):
                yield source, node
        elif g.calls(node, *_CORES):
            found = _spelled_out(node)
            if found is not None:
                yield found


def _spelled_out(core: Node) -> tuple[Node, Node] | None:
    """The widest region around a core that takes one tensor and gives one of its shape."""
    sources = [each for each in g.ancestors(core, 12, lambda step: g.calls(step, *_PARTS)) if g.is_float(each)]
    ends = [each for each in g.chain(core, lambda step: g.calls(step, *_PARTS)) if g.is_same_shape(each, core)]
    for end in reversed(ends):
        for source in sources:
            site = g.region([end], [source])
            if site is not None and not site.others and core in site.nodes and g.is_same_shape(source, end):
                return source, end
    return None


def _find(view: View) -> Iterator[Candidate | Declined]:
    for x, result in activations(view):
        own, other = g.tensor_of(x), g.tensor_of(result)
        if own is None or other is None or own.dtype != other.dtype:
            continue
        kinds = [kind for kind in KINDS if kind != "silu"]
        if g.calls(result, F.silu, torch._C._nn.silu):
            continue  # a silu alone has no kernel
        choices = tuple(Choice(gelu, (x,), {"kind": kind}, kind) for kind in kinds)
        yield Candidate(result, (result,), choices, is_guess=not g.calls(result, *_FUNCTIONS))


def gelu(x: Tensor, *, kind: str) -> Tensor:
    """GELU by tanh or by erf."""
    return bias_gelu(x, approximate=KINDS[kind])


RULE = Rule("gelu", "GELU in one pass", _find)
