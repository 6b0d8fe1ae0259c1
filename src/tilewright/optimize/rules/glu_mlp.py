"""The MLP of SwiGLU and GEGLU: three matmuls whose activation makes no pass of its own over memory.

As in `glu`, the first two before a fused loss do not keep what goes into their last matmul.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

from torch import Tensor
from torch.fx import Node

from tilewright import ops
from tilewright.ops.glu_mlp import op
from tilewright.optimize import graph as g
from tilewright.optimize.rule import Candidate, Choice, Declined, Rule, View, draw
from tilewright.optimize.rules.gelu import KINDS, activations
from tilewright.optimize.rules.glu import AGAIN
from tilewright.optimize.rules.linear import read
from tilewright.optimize.rules.linear_cross_entropy import loss_of_head


def _find(view: View) -> Iterator[Candidate | Declined]:
    if not op.IS_ON or not view.has_gradients:
        return
    found = [site for x, result in activations(view) if (site := _nominate(x, result)) is not None]
    has_loss = any(g.calls(node, loss_of_head) for node in view.graph.nodes)
    for number, site in enumerate(found):
        yield _forgetting(site) if has_loss and number < min(AGAIN, len(found) - 1) else site


def _nominate(x: Node, result: Node) -> Candidate | None:
    """The site around an activation; None where it is no such MLP."""
    product = next(iter(result.users))
    if len(result.users) != 1 or not g.calls(product, *g.MULS) or len(product.args) != 2 or len(product.users) != 1:
        return None
    other = next((each for each in product.args if each is not result), None)
    gate, down = read(x), read(next(iter(product.users)))
    up = read(other) if isinstance(other, Node) else None
    if gate is None or up is None or down is None or down.inputs[0] is not product:
        return None
    if gate.inputs[0] is not up.inputs[0] or gate.inputs[2] is not None or up.inputs[2] is not None:
        return None
    inputs = (gate.inputs[0], gate.inputs[1], up.inputs[1], *down.inputs[1:])
    detail = f"{(gate.flops + up.flops + down.flops) / 1e9:.0f} GFLOP"
    choices = tuple(Choice(glu_mlp, inputs, {"kind": kind, "keep": True}, f"{kind}, {detail}") for kind in KINDS)
    inner, out = 7, 5
    shapes = [(2, 3, gate.width), (inner, gate.width), (inner, gate.width), (out, inner)]
    sample = functools.partial(draw, shapes=[*shapes, None if down.inputs[2] is None else (out,)])
    return Candidate(down.node, (down.node,), choices, sample=sample, is_writable=True, is_guess=True)


def _forgetting(site: Candidate) -> Candidate:
    """The site with what goes into its last matmul computed again."""
    choices = [
        dataclasses.replace(each, options={**each.options, "keep": False}, detail=f"{each.detail}, computed again")
        for each in site.choices
    ]
    return dataclasses.replace(site, choices=tuple(choices))


def glu_mlp(
    x: Tensor, gate: Tensor, up: Tensor, down: Tensor, down_bias: Tensor | None, *, kind: str, keep: bool
) -> Tensor:
    """Two linear layers of one input, the activation of one times the other, and a linear layer of that."""
    return ops.glu_mlp(x, gate, up, down, down_bias, activation=kind, keep=keep)


RULE = Rule("glu_mlp", "SwiGLU and GEGLU inside of the matmuls around them", _find)
