"""Keys and values of the tokens so far, in memory of fixed size and place.

How many tokens a row has is an int32 on the device: a captured graph reads it anew at each replay, and nothing that a
step launches depends on a number of the host. Keys are (batch, kv_heads, context, head_dim), one tensor a layer, so
that a head's keys follow each other in memory.

What lies behind a row's length is never read: a shorter prompt of a batch leaves the keys of its padding there, and a
draft that was refused its own, until tokens that count are written over them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewright.errors import UserError
from tilewright.plan.decoder import Decoder as Shape


class KVCache:
    """Room for `context` tokens in each of `batch` rows.

    >>> shape = Shape(width=8, layers=2, heads=2, kv_heads=1, head_dim=4, ffn=16, vocabulary=9, sequence=16)
    >>> cache = KVCache(shape, batch=3, context=16)
    >>> cache.keys[0].shape, cache.bytes
    (torch.Size([3, 1, 16, 4]), 3072)
    """

    def __init__(
        self, shape: Shape, *, batch: int, context: int, device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        self.batch, self.context = batch, context
        size = (batch, shape.kv_heads, context, shape.head_dim)
        try:
            self.keys = [torch.zeros(size, device=device, dtype=dtype) for _ in range(shape.layers)]
            self.values = [torch.zeros(size, device=device, dtype=dtype) for _ in range(shape.layers)]
        except torch.OutOfMemoryError:
            raise UserError(
                f"There is no memory for the keys and values of {batch} x {context:,} tokens; give a shorter context."
            ) from None
        self.before = torch.zeros(batch, device=device, dtype=torch.int32)  # tokens a row had before a forward
        self.lengths = torch.zeros(batch, device=device, dtype=torch.int32)  # and with those of the forward
        self.is_prompt = False

    @property
    def bytes(self) -> int:
        """Of all keys and values."""
        return sum(each.nbytes for each in (*self.keys, *self.values))

    def begin(self, lengths: Tensor) -> None:
        """Begin anew: the next forward is of prompts that have these lengths."""
        self.before.zero_()
        self._counted = lengths.to(self.lengths)
        self.is_prompt = True

    def advance(self, accepted: Tensor | int) -> None:
        """Count tokens of the last forward as there: all later ones see them."""
        self.before.add_(accepted)

    def end_prompt(self) -> None:
        """Count each row's prompt, without its padding."""
        self.before.copy_(self._counted)
        self.is_prompt = False

    def place(self, tokens: int) -> None:
        """Make `lengths` those with the tokens of a forward."""
        torch.add(self.before, tokens, out=self.lengths)

    def positions(self, tokens: int) -> Tensor:
        """The positions (batch, tokens), int64, that the tokens of a forward get."""
        return self.before[:, None].long() + torch.arange(tokens, device=self.before.device)
