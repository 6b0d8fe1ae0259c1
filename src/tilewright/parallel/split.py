"""A GPT of which each rank computes a part: some heads and columns, some tokens of every sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewright.models import GPT
from tilewright.models.block import add_norm
from tilewright.models.recompute import run_block
from tilewright.parallel import tensor
from tilewright.parallel.collectives import enter
from tilewright.parallel.context import rows_of
from tilewright.parallel.mesh import Mesh


def own_rows(mesh: Mesh, length: int) -> Tensor | None:
    """The tokens of a sequence whose stream this rank has; None for all of them."""
    if mesh.layout.cp == 1 and not mesh.layout.sp:
        return None
    rows = rows_of(mesh.place("cp"), mesh.layout.cp, length)
    return rows.chunk(mesh.layout.tp)[mesh.place("tp")] if mesh.layout.sp else rows


class SplitGPT(GPT):
    """As `GPT`, on whole batches of whole sequences, of which it takes its part; its loss is the mean over that."""

    mesh: Any

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x, residual = self.run(self.begin(tokens), None)
        return self.finish(x, residual, targets)

    def begin(self, tokens: Tensor) -> Tensor:
        """The stream of this rank's tokens."""
        length = tokens.shape[1]
        x = tensor.embed(self._part(tokens), self.token.weight, self.mesh)
        if self.position is not None:
            rows = own_rows(self.mesh, length)
            x = x + self.position(torch.arange(length, device=x.device) if rows is None else rows.to(x.device))
        return x.to(torch.bfloat16) if self.config.residual == "bf16" else x

    def run(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The blocks of this rank."""
        for block, how in zip(self.blocks.children(), self.recompute, strict=True):
            x, residual = run_block(block, how if torch.is_grad_enabled() else "none", x, residual, self.rope)
        return x, residual

    def finish(self, x: Tensor, residual: Tensor | None, targets: Tensor | None) -> Tensor:
        """The loss of this rank's tokens or, without targets, their logits for this rank's part of the vocabulary."""
        x, _ = add_norm(self.norm, x, residual)
        weight = self._head_weight()
        if targets is None or self.mesh.layout.tp == 1:
            x = x if self.mesh.layout.tp == 1 else enter(x, self.mesh.group("tp"), self.mesh.layout.sp)
            return self._score(x, tensor.local(weight), None if targets is None else self._part(targets))
        return tensor.loss(x, weight, self._part(targets), self.mesh, in_chunks=self.config.loss == "linear_fused")

    def _part(self, tokens: Tensor) -> Tensor:
        """The tokens that context parallel leaves to this rank."""
        if self.mesh.layout.cp == 1:
            return tokens
        return tokens[:, rows_of(self.mesh.place("cp"), self.mesh.layout.cp, tokens.shape[1]).to(tokens.device)]
