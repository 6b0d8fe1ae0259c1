"""torch.compile of a model whose ranks send between and inside of its blocks: each block by itself, and the loss.

FSDP2 gathers weights in hooks of a block, and a pipeline has some of the blocks: these stay outside. What a block sends
itself, for tp and cp, is in its graph. All blocks share what is compiled, so what differs between them (the place of a
dropout) is a tensor. A block that is no single graph is an error, and never runs eagerly in silence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tilewright.models import GPT
from tilewright.models.block import NORMS
from tilewright.models.recompute import run_region


def compile_blocks(model: GPT, device: torch.device, options: dict[str, Any]) -> None:
    """Compile the blocks and the loss of a model in place; evaluation stays eager.

    Args:
        model: has its hooks and its parts already.
        device: of the model, or to be.
        options: of Inductor.
    """
    for module in model.modules():
        if isinstance(module, NORMS) and module.site is not None:
            module.site = torch.tensor(module.site, device=device)
    for block, how in zip(model.blocks.children(), model.recompute, strict=True):
        block.forward = _compiled(block.forward, how, options)
    model.recompute = ["none"] * len(model.recompute)  # of a block from without
    model._score = _compiled(model._score, "none", options)  # type: ignore[method-assign]


def _compiled(eager: Callable[..., Any], how: str, options: dict[str, Any]) -> Callable[..., Any]:
    def run(*inputs: Any) -> Any:
        return run_region(how, eager, *inputs)

    compiled = torch.compile(run, fullgraph=True, dynamic=False, options=options)

    def forward(*inputs: Any) -> Any:
        return (compiled if torch.is_grad_enabled() else eager)(*inputs)

    return forward
