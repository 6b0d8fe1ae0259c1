"""Weights of 4 bits as others store them, eight to a word of int32, and their way into `Int4`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.errors import UserError
from tilewright.ops.quantized_linear.op import GROUPS
from tilewright.ops.quantized_linear.reference import MIDDLE, pack_nibbles, span_of
from tilewright.quantize.formats.base import Format, Packed
from tilewright.quantize.formats.int4 import Int4


class Read(NamedTuple):
    """A quantized layer of a folder: its format, its tensors, and the order that its inputs have there.

    With an `order`, feature j of the packed weight is feature ``order[j]`` of x: give the op ``x[..., order]``.
    """

    format: Format
    packed: Packed
    order: Tensor | None = None


def unpack_words(words: Tensor) -> Tensor:
    """The codes of each word as a last dimension of 8, of uint8: the lowest bits come first.

    >>> unpack_words(torch.tensor([0x76543210], dtype=torch.int32)).tolist()
    [[0, 1, 2, 3, 4, 5, 6, 7]]
    """
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shifts) & 15).to(torch.uint8)


def part(tensors: Mapping[str, Tensor], key: str, dtypes: tuple[torch.dtype, ...], ndim: int, name: str) -> Tensor:
    """A tensor that a layer must have."""
    tensor = tensors.get(key)
    if tensor is None or tensor.dtype not in dtypes or tensor.ndim != ndim or not tensor.numel():
        found = "missing" if tensor is None else f"{tensor.dtype} of shape {tuple(tensor.shape)}"
        raise UserError(f"{key} of {name} is {found}, but {dtypes[0]} of {ndim} dimensions is needed.")
    return tensor


def to_int4(codes: Tensor, scale: Tensor, zero: Tensor, name: str) -> tuple[Int4, Packed]:
    """The format and tensors of codes of ``(in, out)``, and scales and zero points of ``(groups, out)``.

    A group that is a multiple of 128, or all of a row, becomes groups of 128 with equal scales.
    """
    (inputs, outputs), groups = codes.shape, len(scale)
    if tuple(scale.shape) != (groups, outputs) or zero.shape != scale.shape or inputs % groups:
        raise UserError(
            f"{name} has weights of {(outputs, inputs)}, scales of {tuple(scale.shape)} and zero points of "
            f"{tuple(zero.shape)}, which do not go together; download it again."
        )
    given = inputs // groups
    fitting = [group for group in reversed(GROUPS) if given % group == 0 and inputs % span_of(group) == 0]
    if not fitting:
        raise UserError(
            f"{name} has {inputs} inputs in groups of {given}; groups of 32, 64 or a multiple of 128 can be read."
        )
    group = fitting[0]
    known = Int4(group=group, zeros=bool((zero != MIDDLE).any()))
    packed = {
        "weight": pack_nibbles(codes.t().contiguous(), group),
        "scale": scale.repeat_interleave(given // group, 0),
    }
    if known.zeros:
        packed["zero"] = zero.repeat_interleave(given // group, 0)
    known.check(packed, outputs, inputs, name)
    return known, packed
