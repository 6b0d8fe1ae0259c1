"""Attention masks that are causal in every call, as `is_causal`, and windows by our own kernels.

Half of the scores are computed then, or those of the window, and no mask is read. Models make their mask of positions,
and a captured graph makes it even where the model itself, run op by op, would leave it out. Keys and values that are
repeated for groups of queries are taken as they are before (`enable_gqa`).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from tilewright.ops.attention.op import attention
from tilewright.optimize import graph as g
from tilewright.optimize import masks
from tilewright.optimize.masks import Kind
from tilewright.optimize.rule import Candidate, Choice, Declined, Rule, View

NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
HEAD_DIMS = range(16, 257, 8)  # of our own kernels
_SMALL, _SMALL_WINDOW = 7, 2  # stand for the length of a sequence and for a window in the probe
_REPEATS: tuple[Any, ...] = (*g.VIEWS, operator.getitem, torch.repeat_interleave, "repeat_interleave", "repeat")


def given_to(node: Node) -> dict[str, Any]:
    """The arguments of a `scaled_dot_product_attention` by name."""
    return {**dict(zip(NAMES, node.args, strict=False)), **node.kwargs}


def _find(view: View) -> Iterator[Candidate | Declined]:
    known = dict[Node, Kind | str]()
    for node in list(view.graph.nodes):
        if not g.calls(node, F.scaled_dot_product_attention) or not node.users:
            continue
        given = given_to(node)
        mask = given.get("attn_mask")
        if not isinstance(mask, Node):
            continue
        if mask not in known:
            known[mask] = _kind(mask)
        yield _candidate(node, given, mask, known[mask])


def _kind(mask: Node) -> Kind | str:
    """The kind of a mask; or, in a sentence, why it has none."""
    value = masks.evaluate(mask)
    if isinstance(value, str):
        return value
    if value.requires_grad:
        return "its mask has a gradient"
    return masks.kind_of(value) or "its mask is neither causal nor a window, nor does it let everything be seen"


def _candidate(node: Node, given: dict[str, Any], mask: Node, kind: Kind | str) -> Candidate | Declined:
    if isinstance(kind, str):
        return Declined(node, kind)
    q, k, v = (given[name] for name in NAMES[:3])
    shapes = [g.shape_of(each) for each in (q, k, v)]
    if any(shape is None or len(shape) != 4 or not all(isinstance(size, int) for size in shape) for shape in shapes):
        return Declined(node, "its queries, keys and values are no tensors of four known sizes")
    (*_, rows, width), (*_, columns, _), _ = shapes  # type: ignore[misc]
    others = {size for shape in shapes for size in (shape[0], shape[1], shape[3])}  # type: ignore[index]
    literals = {size: _SMALL for size in (rows, columns) if size > _SMALL}
    if literals.keys() & others:
        return Declined(node, f"a sequence of {rows} is as long as another of its sizes")
    if kind.before is not None and (why := _why_no_window(given, rows, columns, width, kind.before)):
        return Declined(node, why)
    exact = frozenset((*others, rows, columns)) - literals.keys()
    choices = tuple(_choices(given, shapes[0][1], kind))  # type: ignore[index]
    return Candidate(node, (node,), choices, literals=literals, exact=exact, known={mask: _stand_in(mask, kind)})


def _why_no_window(given: dict[str, Any], rows: int, columns: int, width: int, before: int) -> str:
    """Say why our kernels do not take a window; nothing where they do."""
    if given.get("dropout_p"):
        return "it has a window and a dropout"
    if rows != columns or 2 * (before + 1) > columns:
        return "its window has more than half of the keys"
    return "" if width in HEAD_DIMS else f"it has a window and heads of {width}"


def _stand_in(mask: Node, kind: Kind) -> Tensor:
    """What stands for a mask in the probe, where at most `_SMALL` queries and keys are."""
    tensor = g.tensor_of(mask)
    assert tensor is not None
    rows, columns = (min(int(size), _SMALL) for size in tensor.shape[-2:])
    before = None if kind.before is None else min(kind.before, _SMALL_WINDOW)
    seen = Kind(kind.causal, before).draw(rows, columns)
    return seen if tensor.dtype == torch.bool else torch.zeros(seen.shape).double().masked_fill(~seen, -torch.inf)


def _choices(given: dict[str, Any], heads: int, kind: Kind) -> Iterator[Choice]:
    """The calls that a site could be: with keys and values as they are before they are repeated, and as they are."""
    q, k, v = (given[name] for name in NAMES[:3])
    before = [_before_repeat(each) for each in (k, v)]
    detail = (
        f"window of {kind.before + 1}" if kind.before is not None else "causal" if kind.causal else "nothing hidden"
    )
    if before[0] is not None and before[1] is not None and not given.get("enable_gqa"):
        groups = heads // g.tensor_of(before[0]).shape[1]  # type: ignore[union-attr]
        yield _choice((q, *before), {**given, "enable_gqa": True}, kind, f"{detail}, {groups} queries a key")
    yield _choice((q, k, v), given, kind, detail)


def _choice(inputs: tuple[Node | None, ...], given: dict[str, Any], kind: Kind, detail: str) -> Choice:
    if kind.before is not None:
        options = {"before": kind.before, "scale": given.get("scale")}
        return Choice(attend_window, inputs, options, detail, {"before": min(kind.before, _SMALL_WINDOW)})
    options = {"is_causal": True} if kind.causal else {}
    for name in ("dropout_p", "scale", "enable_gqa"):
        if given.get(name) not in (None, False, 0.0):
            options[name] = given[name]
    probed = {"dropout_p": 0.0} if options.get("dropout_p") else {}
    return Choice(F.scaled_dot_product_attention, inputs, options, detail, probed)


def attend_window(q: Tensor, k: Tensor, v: Tensor, before: int, scale: float | None) -> Tensor:
    """Attention of tensors that are heads first, where a query sees its own key and `before` ahead of it."""
    parts = (x.transpose(1, 2) for x in (q, k, v))
    return attention(*parts, window=before, scale=scale).transpose(1, 2)  # type: ignore[no-any-return]


def _before_repeat(node: Node) -> Node | None:
    """What keys or values were before each head of theirs was repeated for several of the queries'."""
    shape = g.shape_of(node)
    while g.calls(node, *_REPEATS):
        if not node.args or not isinstance(node.args[0], Node):
            return None
        node = node.args[0]
        own = g.shape_of(node)
        if own is None or shape is None:
            return None
        if len(own) == 4 and own[0] == shape[0] and own[2:] == shape[2:] and own[1] < shape[1]:
            return node
    return None


RULE = Rule("mask", "a causal mask as `is_causal`, a window by our kernels, repeated key heads as they are", _find)
