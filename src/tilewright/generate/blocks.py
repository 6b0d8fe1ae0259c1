"""A decoder's folder, one part at a time: its blocks and its head, each a module that takes the state of a text.

Only the embeddings stay in memory: every text begins with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from tilewright.generate.cache import KVCache
from tilewright.generate.decoder import Block, Decoder, Norm, matmul
from tilewright.generate.load import Opened, Parts

State = tuple[Tensor, Tensor | None]  # of a text: x, and the residual that it is not yet added to
_Module = TypeVar("_Module", bound=nn.Module)


class Step(Block):
    """A block over whole texts."""

    def __init__(self, model: Decoder) -> None:
        super().__init__(model.config)
        self._shape = replace(model.config.shape, layers=1)
        self._model = [model]  # in a list, since it is no part of the block

    def forward(self, x: Tensor, residual: Tensor | None) -> State:  # type: ignore[override]
        (model,), (batch, tokens) = self._model, x.shape[:2]
        cache = KVCache(self._shape, batch=batch, context=tokens, device=x.device, dtype=x.dtype)
        cache.begin(torch.full((batch,), tokens, device=x.device))
        cache.place(tokens)
        model.prepare(tokens)
        return super().forward(x, residual, model.tables or (), cache, 0)


class Head(nn.Module):
    """The last norm, and the matmul that makes logits."""

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        shape = model.config.shape
        self.norm, self.head = Norm(shape.width, model.config), nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, x: Tensor, residual: Tensor | None) -> Tensor:
        return matmul(self.head, self.norm(x, residual)[0])


class Blocks:
    """The parts of an open folder; each is read when it is asked for.

    Args:
        found: the folder.
        model: its decoder without values, which gets the embeddings.
        device, dtype: where and in what parts compute.
    """

    def __init__(self, found: Opened, model: Decoder, device: torch.device | str, dtype: torch.dtype) -> None:
        self.found, self._model, self._device, self._dtype = found, model, torch.device(device), dtype
        self.count = model.config.shape.layers
        self.is_tied = model.config.shape.tied
        self._fill(model.token, "token.")
        if model.position is not None:
            self._fill(model.position, "position.")

    def embed(self, tokens: Tensor) -> State:
        """The state of tokens (batch, length) before the first block."""
        tokens = tokens.to(self._device)
        x: Tensor = self._model.token(tokens)
        if self._model.position is not None:
            x = x + self._model.position(torch.arange(tokens.shape[1], device=self._device))
        return x, None

    def block(self, place: int) -> Step:
        """A block with its values."""
        with torch.device("meta"):
            block = Step(self._model)
        return self._fill(block, f"blocks.{place}.").requires_grad_(False).eval()

    def head(self) -> Head:
        """The end of the model; a tied head shares the embedding's weight."""
        with torch.device("meta"):
            head = Head(self._model)
        if self.is_tied:
            head.head.weight = self._model.token.weight
        return self._fill(head, "").requires_grad_(False).eval()

    def parts_of_block(self, place: int) -> Parts:
        """The tensors of theirs that lie behind each other in each tensor of a block."""
        prefix = f"blocks.{place}."
        names = self.found.names.items()
        return {name.removeprefix(prefix): parts for name, parts in names if name.startswith(prefix)}

    def parts_of_head(self) -> Parts:
        """The same of the head, a tied one too."""
        norms = {name: parts for name, parts in self.found.names.items() if name.startswith("norm.")}
        return {**norms, "head.weight": ["lm_head.weight"]}

    def other_tensors(self) -> Iterator[str]:
        """The tensors of theirs in no block and not in the head."""
        for name, parts in self.found.names.items():
            if name.startswith(("token.", "position.")):
                yield from parts

    def _fill(self, module: _Module, prefix: str) -> _Module:
        for name, empty in list(module.state_dict().items()):
            if empty.is_meta:
                owner, _, last = name.rpartition(".")
                tensor = self.found.load(f"{prefix}{name}")
                tensor = tensor.to(device=self._device, dtype=self._dtype, copy=True).contiguous()
                setattr(module.get_submodule(owner), last, nn.Parameter(tensor, requires_grad=False))
        return module
