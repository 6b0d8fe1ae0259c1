"""Attention masks that are causal in every call, as `is_causal`: PyTorch then computes half, and reads no mask.

Models make their mask of positions, and a captured graph makes it even where the model itself, run op by op, would
leave it out. Keys and values that are repeated for groups of queries are taken as they are before (`enable_gqa`).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from tilewright.optimize import graph as g
from tilewright.optimize import masks
from tilewright.optimize.rule import Candidate, Choice, Declined, Rule, View

NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_SMALL = 7  # stands for the length of a sequence in the probe
_REPEATS: tuple[Any, ...] = (*g.VIEWS, operator.getitem, torch.repeat_interleave, "repeat_interleave", "repeat")


def given_to(node: Node) -> dict[str, Any]:
    """The arguments of a `scaled_dot_product_attention` by name."""
    return {**dict(zip(NAMES, node.args, strict=False)), **node.kwargs}


def _find(view: View) -> Iterator[Candidate | Declined]:
    known = dict[Node, Tensor | str]()
    for node in list(view.graph.nodes):
        if not g.calls(node, F.scaled_dot_product_attention) or not node.users:
            continue
        given = given_to(node)
        mask = given.get("attn_mask")
        if not isinstance(mask, Node):
            continue
        if mask not in known:
            known[mask] = _small(masks.evaluate(mask))
        yield _candidate(node, given, mask, known[mask])


def _small(mask: Tensor | str) -> Tensor | str:
    """What stands for a mask in the probe; or, in a sentence, why nothing does."""
    if isinstance(mask, str):
        return mask
    kind = masks.kind_of(mask)
    if not kind:
        return "its mask is neither causal nor open"
    rows, columns = (min(size, _SMALL) for size in mask.shape[-2:])
    seen = torch.ones(rows, columns, dtype=torch.bool)
    seen = seen.tril() if kind == "causal" else seen
    if mask.dtype == torch.bool:
        return seen
    return torch.zeros(rows, columns, dtype=torch.float64).masked_fill(~seen, -torch.inf)


def _candidate(node: Node, given: dict[str, Any], mask: Node, small: Tensor | str) -> Candidate | Declined:
    if isinstance(small, str):
        return Declined(node, small)
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
    options: dict[str, Any] = {"is_causal": True} if small.numel() and not _is_open(small) else {}
    for name in ("dropout_p", "scale", "enable_gqa"):
        if given.get(name) not in (None, False, 0.0):
            options[name] = given[name]
    choices = []
    detail = "causal" if "is_causal" in options else "nothing hidden"
    before = [_before_repeat(each) for each in (k, v)]
    if before[0] is not None and before[1] is not None and not options.get("enable_gqa") and _groups_heads(q):
        groups = shapes[0][1] // g.tensor_of(before[0]).shape[1]  # type: ignore[index, union-attr]
        grouped = {**options, "enable_gqa": True}
        choices.append(_choice((q, *before), grouped, f"{detail}, {groups} queries a key"))
    choices.append(_choice((q, k, v), options, detail))
    exact = frozenset((*others, rows, columns)) - literals.keys()
    return Candidate(node, (node,), tuple(choices), literals=literals, exact=exact, known={mask: small})


def _is_open(mask: Tensor) -> bool:
    return bool((mask if mask.dtype == torch.bool else mask == 0.0).all())


def _choice(inputs: tuple[Node | None, ...], options: dict[str, Any], detail: str) -> Choice:
    probed = {"dropout_p": 0.0} if options.get("dropout_p") else {}
    return Choice(F.scaled_dot_product_attention, inputs, options, detail, probed)


def _groups_heads(q: Node) -> bool:
    """Whether PyTorch has kernels for shared heads of keys, and need not compute all scores in memory."""
    tensor = g.tensor_of(q)
    assert tensor is not None
    if tensor.device.type != "cuda":
        return True
    return tensor.dtype in (torch.bfloat16, torch.float16) and torch.cuda.get_device_capability(tensor.device) >= (8, 0)


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


RULE = Rule("mask", "a causal mask as `is_causal`, and repeated key heads as they are", _find)
