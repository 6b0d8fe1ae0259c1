"""GPTQ of 4 bits, as GPTQModel and AutoGPTQ store a layer.

    qweight  (in / 8, out)      int32    bits 4 i to 4 i + 3 of word [r, n]: the code of input 8 r + i
    qzeros   (groups, out / 8)  int32    bits 4 i to 4 i + 3 of word [g, c]: the zero point of output 8 c + i, less 1
    scales   (groups, out)      float16  W[n, k] = scales[g_idx[k], n] * (code[k, n] - zero[g_idx[k], n])
    g_idx    (in,)              int32    the group of each input; left out, or k // group, but for act-order

Less 1 in the checkpoint format "gptq"; in "gptq_v2" zero points are stored as they are. With act-order a group's inputs
lie anywhere: here they are brought together, and the order that x must have is returned.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tilewright.errors import UserError
from tilewright.quantize.formats.words import Read, part, to_int4, unpack_words

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def read_gptq(tensors: Mapping[str, Tensor], *, v2: bool = False, name: str = "the layer") -> Read:
    """Read a layer's qweight, qzeros, scales and, if there is one, g_idx.

    >>> words = torch.full((8, 8), 0x77777777, dtype=torch.int32)
    >>> layer = {"qweight": words, "qzeros": words[:1, :1] * 0 + 0x66666666, "scales": torch.ones(1, 8).half()}
    >>> layer["qzeros"].shape, read_gptq(layer).format  # codes 7, zero points 6 + 1
    (torch.Size([1, 1]), Int4(search=False, group=64, zeros=True))
    """
    codes = unpack_words(part(tensors, "qweight", (torch.int32,), 2, name)).transpose(1, 2).flatten(0, 1)
    zero = unpack_words(part(tensors, "qzeros", (torch.int32,), 2, name)).flatten(1)
    scale = part(tensors, "scales", FLOATS, 2, name)
    if not v2:
        zero = (zero + 1) & 15  # 15 stands for 0, which less 1 does not fit
    order = order_of(tensors, "g_idx", len(codes), len(scale), name)
    known, packed = to_int4(codes if order is None else codes[order], scale, zero, name)
    return Read(known, packed, order)


def order_of(tensors: Mapping[str, Tensor], key: str, inputs: int, groups: int, name: str) -> Tensor | None:
    """Inputs by their group, as the tensor `key` has them; None where they are so already."""
    if tensors.get(key) is None:
        return None
    index = part(tensors, key, (torch.int32, torch.int64), 1, name).long()
    whole = len(index) == inputs and inputs % groups == 0 and int(index.min()) >= 0 and int(index.max()) < groups
    if not whole or bool((index.bincount(minlength=groups) != inputs // groups).any()):
        raise UserError(f"{key} of {name} does not give each of {groups} groups as many of {inputs} inputs.")
    order = index.argsort(stable=True)
    return None if bool((order == torch.arange(inputs, device=order.device)).all()) else order.int()
