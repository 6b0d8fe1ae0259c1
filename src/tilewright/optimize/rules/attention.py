"""Attention without a mask by `ops.attention`, where a Hopper has kernels for it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from tilewright.ops.attention.backends import FEWEST_KEYS
from tilewright.ops.attention.hopper import HOST_BOUND
from tilewright.ops.attention.hopper_forward import DTYPES, HEADS, is_there
from tilewright.ops.attention.op import attention
from tilewright.optimize import graph as g
from tilewright.optimize.rule import Candidate, Choice, Declined, Rule, View
from tilewright.optimize.rules.mask import NAMES, before_repeat, given_to


def _find(view: View) -> Iterator[Candidate | Declined]:
    for node in view.graph.nodes:
        if not g.calls(node, F.scaled_dot_product_attention) or not node.users:
            continue
        given = given_to(node)
        causal = bool(given.get("is_causal"))
        q, k, v = (given[name] for name in NAMES[:3])
        if given.get("attn_mask") is not None or given.get("dropout_p"):
            why = "the kernels take attention without a mask and dropout"
        else:
            why = _why_not(g.tensor_of(q), g.tensor_of(k), g.tensor_of(v), causal, view.state[node].autocast)
        if why:
            yield Declined(node, why)
            continue
        before = [before_repeat(each) for each in (k, v)]
        options = {"causal": causal, "scale": given.get("scale")}
        calls = ([(q, *before)] if None not in before else []) + [(q, k, v)]
        choices = tuple(Choice(attend, inputs, options, _detail(inputs, causal)) for inputs in calls)
        exact = frozenset(g.tensor_of(each).shape[1] for inputs in calls for each in inputs)  # type: ignore[union-attr]
        yield Candidate(node, (node,), choices, exact=exact)


def _why_not(q: Tensor | None, k: Tensor | None, v: Tensor | None, causal: bool, autocast: torch.dtype | None) -> str:
    """Say why the kernels do not take these, or give nothing; nothing where they do."""
    assert q is not None and k is not None and v is not None
    if not all(x.dim() == 4 and all(isinstance(size, int) for size in x.shape) for x in (q, k, v)):
        return "its queries, keys and values are no tensors of four known sizes"
    dtype = autocast or q.dtype
    if dtype not in DTYPES or q.shape[3] not in HEADS or k.shape != v.shape:
        return f"the kernels take bfloat16 or float16, and heads of {' or '.join(map(str, HEADS))}"
    if causal and q.shape[2] != k.shape[2]:
        return "queries and keys differ in number, and the mask begins at the first of both"
    if k.shape[2] < FEWEST_KEYS or q.numel() // q.shape[3] * k.shape[2] <= HOST_BOUND:
        return f"fewer than {FEWEST_KEYS:,} keys, or up to {HOST_BOUND:,} scores, are not worth a kernel"
    return "" if is_there(q.device, q.shape[3], causal, dtype) else "the kernels are for a Hopper, and need NVRTC 13"


def _detail(inputs: tuple[Node | None, ...], causal: bool) -> str:
    q, k, _ = (g.tensor_of(each) for each in inputs)
    assert q is not None and k is not None
    shared = "" if q.shape[1] == k.shape[1] else f", {q.shape[1] // k.shape[1]} queries a key"
    return f"{'causal' if causal else 'full'}, heads of {q.shape[3]}{shared}"


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Tensor:
    """Attention of tensors that are heads first."""
    parts = (x.transpose(1, 2) for x in (q, k, v))
    out: Tensor = attention(*parts, causal=causal, scale=scale)
    return out.transpose(1, 2)


RULE = Rule("attention", "attention by the kernels of a Hopper", _find)
