"""Attention masks that are causal in every call, as `is_causal`; windows and padded batches by our own kernels.

Half of the scores are computed then, or those of the window, and no mask is read. Models make their mask of positions,
and a captured graph makes it even where the model itself, run op by op, would leave it out. Keys and values that are
repeated for groups of queries are taken as they are before.

Of a padded batch the kernels read which keys are padding, a byte for each, whichever side they are on. No query sees
them, and what a padded query gets is what it got: a loss may see it.
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
from tilewright.runtime import dispatch

NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
HEAD_DIMS = range(16, 257, 8)  # of our own kernels
_HALVES = (torch.bfloat16, torch.float16)
_SMALL = 7  # stands for the length of a sequence in the probe
_REPEATS: tuple[Any, ...] = (*g.VIEWS, operator.getitem, torch.repeat_interleave, "repeat_interleave", "repeat")


def given_to(node: Node) -> dict[str, Any]:
    """The arguments of a `scaled_dot_product_attention` by name."""
    return {**dict(zip(NAMES, node.args, strict=False)), **node.kwargs}


def _find(view: View) -> Iterator[Candidate | Declined]:
    known = dict[Node, tuple[Kind, Node | None] | str]()
    for node in list(view.graph.nodes):
        if not g.calls(node, F.scaled_dot_product_attention) or not node.users:
            continue
        given = given_to(node)
        mask = given.get("attn_mask")
        if not isinstance(mask, Node):
            continue
        if mask not in known:
            known[mask] = _read(mask, view)
        yield _candidate(node, given, mask, known[mask], view.state[node].autocast)


def _read(mask: Node, view: View) -> tuple[Kind, Node | None] | str:
    """What a mask is; one that a checkpointed region is given hides the keys itself."""
    source = view.sources.get(mask, mask)
    found = masks.read(source)
    if source is mask or isinstance(found, str):
        return found
    kind, keys = found
    return "its mask is written to in place" if masks.is_written(mask) else (kind, None if keys is None else mask)


def _candidate(
    node: Node, given: dict[str, Any], mask: Node, found: tuple[Kind, Node | None] | str, autocast: torch.dtype | None
) -> Candidate | Declined:
    if isinstance(found, str):
        return Declined(node, found)
    kind, keys = found
    q, k, v = (given[name] for name in NAMES[:3])
    shapes = [g.shape_of(each) for each in (q, k, v)]
    if any(shape is None or len(shape) != 4 or not all(isinstance(size, int) for size in shape) for shape in shapes):
        return Declined(node, "its queries, keys and values are no tensors of four known sizes")
    if mask.meta.get("example_value") is not None and mask.meta["example_value"].requires_grad:
        return Declined(node, "its mask has a gradient")
    (*_, rows, _), (*_, columns, _), _ = shapes  # type: ignore[misc]
    others = {size for shape in shapes for size in (shape[0], shape[1], shape[3])}  # type: ignore[index]
    literals = {size: _SMALL for size in (rows, columns) if size > _SMALL}
    if literals.keys() & others:
        return Declined(node, f"a sequence of {rows} is as long as another of its sizes")
    if kind.is_window or keys is not None:
        why = _why_no_kernel(g.tensor_of(q), g.tensor_of(k), g.tensor_of(v), kind, autocast)
        if why:
            return Declined(node, why)
    choices = tuple(_choices(given, kind, keys))
    heads = {g.tensor_of(each).shape[1] for choice in choices for each in choice.inputs[:3]}  # type: ignore[union-attr]
    exact = frozenset((*others, *heads, rows, columns)) - literals.keys()
    return Candidate(node, (node,), choices, literals=literals, exact=exact, known=_stand_ins(mask, kind, keys))


def _why_no_kernel(q: Any, k: Any, v: Any, kind: Kind, autocast: torch.dtype | None) -> str:
    """Say why our kernels do not take the window, or the padding, of these; nothing where they do."""
    what = "a window" if kind.is_window else "padding"
    if not dispatch.runs_kernel(q):
        return f"{what} has kernels on a GPU alone"
    if q.shape[2] != k.shape[2] and kind != Kind():
        return f"it has {what}, and another number of keys than of queries"
    if (autocast or q.dtype) not in _HALVES:
        return f"{what} has kernels in 16 bits"
    if q.shape[3] not in HEAD_DIMS or q.shape[3] != v.shape[3]:
        return f"{what} has kernels for heads of {HEAD_DIMS[0]} to {HEAD_DIMS[-1]} in steps of {HEAD_DIMS.step}"
    return ""


def _small(kind: Kind) -> Kind:
    """What stands for a kind in the probe, where at most `_SMALL` queries and keys are."""
    before, behind = (
        None if side is None else min(side, most)
        for side, most in ((kind.before, _SMALL // 2), (kind.behind, _SMALL // 3))
    )
    return Kind(before, behind)


def _stand_ins(mask: Node, kind: Kind, keys: Node | None) -> dict[Node, Tensor]:
    """The mask of the probe, and what it hides of the keys."""
    tensor = g.tensor_of(mask)
    assert tensor is not None
    seen = _small(kind).draw(*(min(int(size), _SMALL) for size in tensor.shape[-2:]))
    if tensor.dtype != torch.bool:
        return {mask: torch.zeros(seen.shape).double().masked_fill(~seen, -torch.inf)}
    if keys is None:
        return {mask: seen}
    # Every third key is hidden, and in some sequence the first: its first query sees none.
    places = torch.arange(len(g.tensor_of(keys)))[:, None] + torch.arange(seen.shape[1])  # type: ignore[arg-type]
    hidden = (places % 3 > 0)[:, None, None]
    return {keys: hidden, mask: seen & hidden}  # which may be one


def _choices(given: dict[str, Any], kind: Kind, keys: Node | None) -> Iterator[Choice]:
    """The calls that a site could be: with keys and values as they are before they are repeated, and as they are."""
    q, k, v = (given[name] for name in NAMES[:3])
    before = [before_repeat(each) for each in (k, v)]
    is_ours = kind.is_window or keys is not None
    detail = str(kind) if keys is None else f"{kind}, padding"
    if None not in before and not given.get("enable_gqa") and (is_ours or _groups_heads(q)):
        heads, fewer = (g.tensor_of(each).shape[1] for each in (q, before[0]))  # type: ignore[union-attr]
        shared = f"{detail}, {heads // fewer} queries a key"
        yield _choice((q, *before), {**given, "enable_gqa": True}, kind, keys, shared)
    yield _choice((q, k, v), given, kind, keys, detail)


def _choice(
    inputs: tuple[Node | None, ...], given: dict[str, Any], kind: Kind, keys: Node | None, detail: str
) -> Choice:
    if kind.is_window or keys is not None:
        small = _small(kind)
        options: dict[str, Any] = {"before": kind.before, "behind": kind.behind, "scale": given.get("scale")}
        probed: dict[str, Any] = {"before": small.before, "behind": small.behind}
        if given.get("dropout_p"):
            options["dropout_p"], probed["dropout_p"] = given["dropout_p"], 0.0
        return Choice(attend, (*inputs, keys), options, detail, probed)
    options = {"is_causal": True} if kind.behind == 0 else {}
    for name in ("dropout_p", "scale", "enable_gqa"):
        if given.get(name) not in (None, False, 0.0):
            options[name] = given[name]
    probed = {"dropout_p": 0.0} if options.get("dropout_p") else {}
    return Choice(F.scaled_dot_product_attention, inputs, options, detail, probed)


def attend(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor | None, before: int | None, behind: int | None, scale: float | None,
    dropout_p: float = 0.0,
) -> Tensor:  # fmt: skip
    """Attention of tensors that are heads first, where a query sees so many keys before its own and behind it.

    `keys` are True, `(batch, 1, 1, keys)`, for those that are not hidden; or it is the mask with a row for each query.
    """
    if keys is not None and keys.shape[2] > 1:  # a query without its own key has it hidden
        keys = keys[:, :, :1] if before is behind is None else keys.diagonal(dim1=2, dim2=3)[:, :, None]
    parts = (x.transpose(1, 2) for x in (q, k, v))
    out: Tensor = attention(*parts, causal=False, window=(before, behind), bias=keys, scale=scale, p=dropout_p)
    return out.transpose(1, 2)


def _groups_heads(q: Node) -> bool:
    """Whether PyTorch has kernels for shared heads of keys, and need not compute all scores in memory."""
    tensor = g.tensor_of(q)
    assert tensor is not None
    if tensor.device.type != "cuda":
        return True
    return tensor.dtype in (torch.bfloat16, torch.float16) and torch.cuda.get_device_capability(tensor.device) >= (8, 0)


def before_repeat(node: Node) -> Node | None:
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


RULE = Rule(
    "mask", "a causal mask as `is_causal`, windows and padding by our kernels, repeated key heads as they are", _find
)
