"""Token embeddings whose backward sorts the tokens: each row of the gradient is written once, always in one order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.ops import embedding
from tilewright.optimize import graph as g
from tilewright.optimize.rule import Candidate, Choice, Declined, Rule, View

_NAMES = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
_SMALL = 4096  # rows of a table from which on the gradient is worth a kernel


def _find(view: View) -> Iterator[Candidate | Declined]:
    for node in view.graph.nodes:
        if not g.calls(node, F.embedding) or not node.users or not view.has_gradients:
            continue
        given: dict[str, Any] = {**dict(zip(_NAMES, node.args, strict=False)), **node.kwargs}
        weight, tokens = g.tensor_of(given["weight"]), g.tensor_of(given["input"])
        if weight is None or tokens is None or not weight.requires_grad:
            continue
        if given.get("padding_idx") is not None:
            yield Declined(node, "the row of its padding_idx gets no gradient, which the op does not know")
        elif given.get("max_norm") is not None or given.get("scale_grad_by_freq") or given.get("sparse"):
            yield Declined(node, "it uses max_norm, scale_grad_by_freq or sparse gradients")
        elif not isinstance(weight.shape[0], int) or weight.shape[0] < _SMALL:
            yield Declined(node, f"a table of fewer than {_SMALL:,} rows is not worth a kernel")
        else:
            rows, width = int(weight.shape[0]), int(weight.shape[1])

            def sample(generator: torch.Generator, width: int = width) -> list[Tensor | None]:
                tokens = torch.randint(0, 97, (2, 5), generator=generator)
                return [tokens, torch.randn((97, width), generator=generator, dtype=torch.float64)]

            choice = Choice(rows_of, (given["input"], given["weight"]), {}, f"{rows:,} rows", constants=(0,))
            yield Candidate(node, (node,), (choice,), sample=sample)


def rows_of(tokens: Tensor, weight: Tensor) -> Tensor:
    """The rows of a table."""
    return embedding(tokens, weight)


RULE = Rule("embedding", "token embeddings with a sorted backward", _find)
