"""Causal attention with our backward, for the shapes that it is quicker at."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.ops.attention.hopper_backward import BLOCK, HEAD
from tilewright.ops.attention.op import attention
from tilewright.optimize import graph as g
from tilewright.optimize.rule import Candidate, Choice, Declined, Rule, View
from tilewright.optimize.rules.mask import NAMES, given_to


def _find(view: View) -> Iterator[Candidate | Declined]:
    for node in view.graph.nodes:
        if not g.calls(node, F.scaled_dot_product_attention) or not node.users or not view.has_gradients:
            continue
        given = given_to(node)
        q, k, v = (g.tensor_of(given[name]) for name in NAMES[:3])
        assert q is not None and k is not None and v is not None
        scale = given.get("scale")
        if not given.get("is_causal") or given.get("attn_mask") is not None or given.get("dropout_p", 0.0):
            yield Declined(node, "the kernel takes causal attention without a mask and dropout")
        elif (
            q.dim() != 4 or q.shape[-1] != HEAD or q.dtype != torch.bfloat16 or q.shape != k.shape or k.shape != v.shape
        ):
            yield Declined(node, f"the kernel takes bfloat16 and heads of {HEAD}, as many of keys as of queries")
        elif not isinstance(q.shape[2], int) or q.shape[2] % BLOCK:
            yield Declined(node, f"the kernel takes sequences of a multiple of {BLOCK}")
        elif scale is not None and not (
            isinstance(scale, (int, float)) and math.isclose(scale, HEAD**-0.5, rel_tol=1e-9)
        ):
            yield Declined(node, f"its scale is {scale}")
        else:
            inputs = tuple(given[name] for name in NAMES[:3])
            yield Candidate(node, (node,), (Choice(attend, inputs, {}, f"causal, heads of {HEAD}"),))


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of tensors that are heads first."""
    return attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)


RULE = Rule("attention", "causal attention with a backward of our own", _find)
