"""Attention without a mask by `ops.attention`, where a Hopper has kernels for it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.ops.attention.hopper import HOST_BOUND
from tilewright.ops.attention.hopper_forward import HEADS
from tilewright.ops.attention.op import attention
from tilewright.optimize import graph as g
from tilewright.optimize.rule import Candidate, Choice, Declined, Rule, View
from tilewright.optimize.rules.mask import NAMES, given_to

_DTYPES = (torch.bfloat16, torch.float16)


def _find(view: View) -> Iterator[Candidate | Declined]:
    for node in view.graph.nodes:
        if not g.calls(node, F.scaled_dot_product_attention) or not node.users:
            continue
        given = given_to(node)
        inputs = tuple(given[name] for name in NAMES[:3])
        q, k, v = (g.tensor_of(each) for each in inputs)
        assert q is not None and k is not None and v is not None
        sizes = (*q.shape, *k.shape)
        if given.get("attn_mask") is not None or given.get("dropout_p", 0.0):
            yield Declined(node, "the kernels take attention without a mask and dropout")
        elif not all(isinstance(size, int) for size in sizes):
            yield Declined(node, "a size is known at run time only")
        elif q.dim() != 4 or q.shape[-1] not in HEADS or q.dtype not in _DTYPES or k.shape != v.shape:
            yield Declined(node, f"the kernels take bfloat16 or float16, and heads of {' or '.join(map(str, HEADS))}")
        elif q.shape[2] != k.shape[2]:
            yield Declined(node, "queries and keys differ in number, and the mask begins at the first of both")
        elif q.numel() // q.shape[3] * k.shape[2] <= HOST_BOUND:
            yield Declined(node, f"up to {HOST_BOUND:,} scores are not worth a kernel")
        else:
            causal = bool(given.get("is_causal"))
            options = {"causal": causal, "scale": given.get("scale")}
            detail = f"{'causal' if causal else 'full'}, heads of {q.shape[-1]}"
            if q.shape[1] != k.shape[1]:
                detail += f", {q.shape[1] // k.shape[1]} queries a key"
            exact = frozenset((q.shape[1], k.shape[1]))
            yield Candidate(node, (node,), (Choice(attend, inputs, options, detail),), exact=exact)


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Tensor:
    """Attention of tensors that are heads first."""
    parts = (x.transpose(1, 2) for x in (q, k, v))
    return attention(*parts, causal=causal, scale=scale).transpose(1, 2)  # type: ignore[no-any-return]


RULE = Rule("attention", "attention by the kernels of a Hopper", _find)
