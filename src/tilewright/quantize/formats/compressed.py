"""compressed-tensors of 4 bits, in its format "pack-quantized", as llm-compressor stores a layer.

weight_packed      (out, in / 8)      int32   bits 4 i to 4 i + 3 of word [n, c]: the code of input 8 c + i
weight_scale       (out, groups)      float   W[n, k] = scale[n, g] * (code[n, k] - zero[n, g]), g = g_idx[k]
weight_zero_point  (out / 8, groups)  int32   bits 4 i to 4 i + 3 of word [r, g]: the zero point of output 8 r + i;
                   (out, groups)      int8    or, of older files, the zero point less 8; left out, 8 everywhere
weight_g_idx       (in,)              int32   the group of each input; left out, or -1 everywhere: k // group
weight_shape       (2,)               int64   (out, in): rows are filled up to whole words
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tilewright.errors import UserError
from tilewright.ops.quantized_linear.reference import MIDDLE
from tilewright.quantize.formats.gptq import FLOATS, order_of
from tilewright.quantize.formats.words import Read, part, to_int4, unpack_words


def read_compressed(tensors: Mapping[str, Tensor], *, name: str = "the layer") -> Read:
    """Read a layer's weight_packed, weight_scale, weight_shape and, if they are there, zero points and group index.

    >>> words = torch.tensor([[0x76543210] * 8], dtype=torch.int32)
    >>> layer = {"weight_packed": words, "weight_scale": torch.ones(1, 1), "weight_shape": torch.tensor([1, 64])}
    >>> read = read_compressed(layer)
    >>> read.format.dequantize(read.packed)[0, :8].tolist()
    [-8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0]
    """
    outputs, inputs = shape_of(tensors, name)
    codes = unpack_words(part(tensors, "weight_packed", (torch.int32,), 2, name)).flatten(1)
    if len(codes) != outputs or not 0 <= codes.shape[1] - inputs < 8:
        raise UserError(f"weight_packed of {name} is not of {outputs} x {inputs} weights; download it again.")
    scale = part(tensors, "weight_scale", FLOATS, 2, name)
    zero = _zero(tensors, outputs, name)
    codes, scale = codes[:, :inputs].t(), scale.t()
    index = tensors.get("weight_g_idx")
    has_order = index is not None and bool((index >= 0).any())
    order = order_of(tensors, "weight_g_idx", inputs, len(scale), name) if has_order else None
    zero = torch.full_like(scale, MIDDLE, dtype=torch.uint8) if zero is None else zero.t()
    known, packed = to_int4(codes if order is None else codes[order], scale.contiguous(), zero.contiguous(), name)
    return Read(known, packed, order)


def shape_of(tensors: Mapping[str, Tensor], name: str) -> tuple[int, int]:
    """What weight_shape says."""
    shape = part(tensors, "weight_shape", (torch.int64, torch.int32), 1, name).tolist()
    if len(shape) != 2 or min(shape) < 1:
        raise UserError(f"weight_shape of {name} is {shape}; it has the numbers of outputs and inputs.")
    return shape[0], shape[1]


def _zero(tensors: Mapping[str, Tensor], outputs: int, name: str) -> Tensor | None:
    """The zero points ``(out, groups)``, 0 to 15, if there are any."""
    if tensors.get("weight_zero_point") is None:
        return None
    zero = part(tensors, "weight_zero_point", (torch.int32, torch.int8), 2, name)
    if zero.dtype == torch.int8:
        return (zero + MIDDLE).to(torch.uint8)
    return unpack_words(zero).transpose(1, 2).flatten(0, 1)[:outputs]
