"""Keys and values of the tokens so far, in memory of fixed size and place.

How many tokens a row has is an int32 on the device: a captured graph reads it anew at each replay, and nothing that a
step launches depends on a number of the host. Keys are (batch, kv_heads, context, head_dim), one tensor a layer, so
that a head's keys follow each other in memory.

With 8 bits an element they are codes, with one scale for each token and head (`ops/decode_attention/eight_bits.py`
draws the format): little more than half the bytes of 16 bits. A prompt attends to what its codes stand for, as every
later token does: so a text is the same however it is cut into forwards.

What lies behind a row's length is never read: a shorter prompt of a batch leaves the keys of its padding there, and a
draft that was refused its own, until tokens that count are written over them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewright.errors import UserError
from tilewright.ops.decode_attention import eight_bits
from tilewright.plan.decoder import Decoder as Shape

FORMATS = {
    "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}  # fmt: skip


def dtype_of(name: str | None, model: torch.dtype) -> torch.dtype:
    """The dtype of a cache by its name, for a model of another dtype; the model's own where there is no name.

    >>> dtype_of("int8", torch.bfloat16), dtype_of(None, torch.float16)
    (torch.int8, torch.float16)
    """
    if name is None:
        return model
    if name not in FORMATS:
        raise UserError(f"kv_cache is {name!r}; choose {', '.join(FORMATS)}, or leave it out.")
    found = FORMATS[name]
    if found != model and found not in eight_bits.LARGEST:
        own = next((each for each, dtype in FORMATS.items() if dtype == model), str(model))
        raise UserError(f"kv_cache is {name} and the model is in {own}; choose {own}, int8 or fp8, or leave it out.")
    return found


def bytes_of_token(shape: Shape, dtype: torch.dtype) -> int:
    """Bytes of the keys and values of one token, with their scales.

    >>> shape = Shape(width=8, layers=2, heads=2, kv_heads=1, head_dim=4, ffn=16, vocabulary=9, sequence=16)
    >>> bytes_of_token(shape, torch.bfloat16), bytes_of_token(shape, torch.int8)
    (32, 32)
    """
    head = shape.head_dim * dtype.itemsize + (4 if dtype in eight_bits.LARGEST else 0)
    return 2 * shape.layers * shape.kv_heads * head


class KVCache:
    """Room for `context` tokens in each of `batch` rows, in the model's dtype, int8 or fp8.

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
            # Of all layers in one tensor, (layers, batch, kv_heads, context, head_dim), and layer by layer.
            self.all_keys = torch.zeros((shape.layers, *size), device=device, dtype=dtype)
            self.all_values = torch.zeros_like(self.all_keys)
            self.keys, self.values = list(self.all_keys), list(self.all_values)
            scales = 2 * shape.layers if dtype in eight_bits.LARGEST else 0
            self.scales = [torch.ones(size[:3], device=device) for _ in range(scales)]  # of keys, then of values
        except torch.OutOfMemoryError:
            raise UserError(
                f"There is no memory for the keys and values of {batch} x {context:,} tokens; give a shorter context."
            ) from None
        self.before = torch.zeros(batch, device=device, dtype=torch.int32)  # tokens a row had before a forward
        self.lengths = torch.zeros(batch, device=device, dtype=torch.int32)  # and with those of the forward
        self.is_prompt = False

    @property
    def bytes(self) -> int:
        """Of all keys and values, with their scales."""
        return sum(each.nbytes for each in (*self.keys, *self.values, *self.scales))

    def scales_of(self, layer: int) -> tuple[Tensor | None, Tensor | None]:
        """The scales of a layer's keys and values, where they are codes."""
        return (self.scales[layer], self.scales[len(self.keys) + layer]) if self.scales else (None, None)

    def read(self, layer: int, tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The first keys and values of every row, as numbers of `dtype`."""
        keys, values = self.keys[layer][:, :, :tokens], self.values[layer][:, :, :tokens]
        k_scale, v_scale = self.scales_of(layer)
        if k_scale is None or v_scale is None:
            return keys, values
        k_scale, v_scale = k_scale[:, :, :tokens], v_scale[:, :, :tokens]
        return eight_bits.dequantize(keys, k_scale, dtype), eight_bits.dequantize(values, v_scale, dtype)

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
