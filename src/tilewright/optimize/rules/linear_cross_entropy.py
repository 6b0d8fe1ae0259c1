"""The head and the loss in one call that never holds all logits.

Between the two lie casts, the shift of a language model, a view as a matrix and a soft cap, in any order. A model that
returns its logits beside the loss returns them deferred: they are computed when somebody reads them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from tilewright.ops import linear_cross_entropy
from tilewright.optimize import graph as g
from tilewright.optimize.rule import Candidate, Choice, Declined, Rule, View
from tilewright.optimize.rules.cross_entropy import SMALL, Loss, class_weights, losses, targets_like

_FLAT = ("view", "reshape", "flatten", torch.flatten, torch.reshape)


@dataclass
class _Head:
    """The way back from a loss to its head."""

    hidden: Node
    weight: Node
    bias: Node | None
    slices: list[Any] = field(default_factory=list)  # of hidden states, first to last
    caps: list[float] = field(default_factory=list)
    between: list[Node] = field(default_factory=list)  # the head's result and what follows, up to the loss


def _find(view: View) -> Iterator[Candidate | Declined]:
    for loss in losses(view):
        if isinstance(loss, Declined):
            yield loss
            continue
        head = _head(loss)
        if isinstance(head, str):
            yield Declined(loss.node, head)
            continue
        wanted, why = _wanted(head, loss)
        if not why and wanted and not view.has_gradients:
            why = "its logits are returned, and there is no gradient to save memory for"
        if why:
            yield Declined(loss.node, why)
        else:
            yield _candidate(loss, head, tuple(wanted))


def _candidate(loss: Loss, head: _Head, wanted: tuple[Node, ...]) -> Candidate:
    cap = head.caps[0] if head.caps else 0.0
    options = {
        **loss.options, "slices": tuple(head.slices), "softcap": cap, "out_dtype": loss.dtype,
    }  # fmt: skip
    words = f"{loss.classes:,} classes, {loss.options['reduction']}"
    words += f", soft cap {cap:g}" if cap else ""
    words += ", logits deferred" if wanted else ""
    classes = SMALL if loss.classes > 4 * SMALL else loss.classes
    hidden = g.tensor_of(head.hidden)
    assert hidden is not None

    def sample(generator: torch.Generator) -> list[Tensor | None]:
        width = int(hidden.shape[-1])
        lead = (2, 4, 3)[: hidden.dim() - 1] if hidden.dim() > 2 else (7,)
        x = torch.randn((*lead, width), generator=generator, dtype=torch.float64)
        weight = torch.randn((classes, width), generator=generator, dtype=torch.float64)
        bias = None if head.bias is None else torch.randn(classes, generator=generator, dtype=torch.float64)
        rows = x
        for index in head.slices:
            rows = rows[index]
        targets = targets_like(rows.numel() // width, loss, classes, generator)
        return [x, weight, bias, targets, class_weights(loss, classes, generator)]

    constants = (3, 4) if loss.class_weight is not None else (3,)
    choice = Choice(
        loss_of_head, (head.hidden, head.weight, head.bias, loss.targets, loss.class_weight), options, words,
        {"out_dtype": torch.float64}, constants=constants,
    )  # fmt: skip
    return Candidate(
        loss.node, (loss.node,), (choice,), deferred=wanted, literals={loss.classes: classes}, sample=sample
    )  # fmt: skip


def _head(loss: Loss) -> _Head | str:
    """The head in front of a loss, or why there is none."""
    node, slices, caps, between = loss.logits, list[Any](), list[float](), list[Node]()
    for _ in range(16):
        between.append(node)
        if g.calls(node, F.linear, torch._C._nn.linear):
            given: dict[str, Any] = {**dict(zip(("input", "weight", "bias"), node.args, strict=False)), **node.kwargs}
            hidden, weight, bias = given["input"], given["weight"], given.get("bias")
            if len(g.shape_of(hidden) or ()) not in (2, 3, 4):
                return "the head's input has too many dimensions"
            return _Head(hidden, weight, bias, slices[::-1], caps, between)
        cap = _cap(node)
        source = node.args[0] if node.args and isinstance(node.args[0], Node) else None
        if cap is not None:
            caps.append(cap[1])
            node = cap[0]
        elif source is None:
            break
        elif (
            g.is_cast(node) or g.calls(node, *g.CONTIGUOUS) or (g.calls(node, *_FLAT) and _keeps_classes(node, source))
        ):
            node = source
        elif g.calls(node, operator.getitem) and _keeps_all_classes(node.args[1], source):
            if len(g.shape_of(node) or ()) != len(g.shape_of(source) or ()):
                return "it takes one position of the logits alone"
            slices.append(node.args[1])
            node = source
        else:
            break
        if len(caps) > 1:
            return "its logits have two soft caps"
    name = getattr(node.target, "__name__", node.target)
    return f"its logits come from {name}, not from a linear layer"


def _keeps_classes(node: Node, source: Node) -> bool:
    one, other = g.shape_of(node), g.shape_of(source)
    return bool(one) and bool(other) and str(one[-1]) == str(other[-1])  # type: ignore[index]


def _keeps_all_classes(index: Any, source: Node) -> bool:
    """Whether an index of logits leaves the classes alone."""
    parts, rank = index if isinstance(index, tuple) else (index,), len(g.shape_of(source) or ())
    if any(isinstance(part, Node) or part is None or isinstance(part, (list, int)) for part in parts):
        return False
    if Ellipsis not in parts:
        return len(parts) < rank or parts[-1] == slice(None)
    return parts[-1] is Ellipsis or parts[-1] == slice(None)


def _cap(node: Node) -> tuple[Node, float] | None:
    """The logits in front of `cap * tanh(logits / cap)`, and the cap."""
    if not g.calls(node, *g.MULS) or len(node.args) != 2:
        return None
    tanh, cap = node.args if isinstance(node.args[0], Node) else node.args[::-1]
    if not isinstance(cap, (int, float)) or cap <= 0 or not g.calls(tanh, torch.tanh, "tanh", F.tanh):
        return None
    divided = tanh.args[0]  # type: ignore[union-attr]
    if g.calls(divided, *g.DIVS) and isinstance(divided.args[0], Node):  # type: ignore[union-attr]
        return divided.args[0], float(cap)  # type: ignore[union-attr]
    return None


def _wanted(head: _Head, loss: Loss) -> tuple[list[Node], str]:
    """The logits that the model returns, and why the head cannot be fused, if somebody else reads them."""
    inner, wanted = {*head.between, loss.node}, dict[Node, None]()
    tanhs = {each for node in head.between for each in _inside_of_cap(node)}
    for node in (*head.between, *tanhs):
        for user in node.users:
            if user in inner or user in tanhs:
                continue
            returned = node if user.op == "output" else _returned(user)
            if returned is None:
                return [], "its logits are read by something other than the loss"
            wanted[returned] = None
    return (list(wanted), "") if len(wanted) < 2 else ([], "two forms of its logits are returned")


def _returned(node: Node) -> Node | None:
    """What is returned of logits that are cast for the caller: mixed precision returns float32."""
    while g.is_cast(node) and len(node.users) == 1:
        (user,) = node.users
        if user.op == "output":
            return node
        node = user
    return None


def _inside_of_cap(node: Node) -> list[Node]:
    found = _cap(node)
    if found is None:
        return []
    tanh = next(each for each in node.args if isinstance(each, Node))
    return [tanh, tanh.args[0]]  # type: ignore[list-item]


def loss_of_head(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, class_weight: Tensor | None = None,
    *, slices: tuple[Any, ...], out_dtype: torch.dtype, **options: Any,
) -> Tensor:  # fmt: skip
    """The loss of a head's logits, which are not all held, in the dtype that the site has."""
    for index in slices:
        hidden = hidden[index]
    rows = hidden.reshape(-1, hidden.shape[-1])
    loss = linear_cross_entropy(rows, weight, targets.reshape(-1), bias, class_weight=class_weight, **options)
    return loss.to(out_dtype)


RULE = Rule("linear_cross_entropy", "the head and its loss without holding all logits", _find)
