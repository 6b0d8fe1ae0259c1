"""What all formats share: their fields, what is refused, and the search for a scale."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from tilewright.errors import UserError
from tilewright.ops.quantized_linear.reference import dequantize

Packed = dict[str, Tensor]  # weight, scale and, of some, zero
# Parts of the largest magnitude that are tried as the largest number to be represented.
_PARTS = [1.0 - step / 40 for step in range(1, 21)]
_ROWS = 1 << 24  # weights searched at once
_LARGEST_BLOCK = 128  # inputs of a group whose pairs are looked at


@dataclass(frozen=True)
class Format:
    """How the weight of a linear layer is stored.

    Attributes:
        search: try smaller scales, which clip the largest weights, and keep the one with the least squared error.
    """

    name: ClassVar[str]
    version: ClassVar[int] = 1
    weight_dtype: ClassVar[torch.dtype]

    search: bool = dataclasses.field(default=False, kw_only=True)

    def refuse_shape(self, outputs: int, inputs: int, name: str = "weight") -> None:
        """Raise where a weight of this shape cannot be quantized."""

    def refuse(self, weight: Tensor, name: str = "weight") -> None:
        """Raise where `weight` cannot be quantized; all that `quantize` could stumble over."""
        if weight.ndim != 2 or not weight.numel():
            raise UserError(f"{name} has shape {tuple(weight.shape)}; {self.name} needs a matrix, outputs first.")
        self.refuse_shape(weight.shape[0], weight.shape[1], name)
        if not weight.is_floating_point() or weight.element_size() < 2:
            raise UserError(f"{name} is {weight.dtype}; {self.name} needs bfloat16, float16, float32 or float64.")
        if weight.is_meta:
            raise UserError(f"{name} has no values (it is on the meta device); load the model before it is quantized.")
        single = weight.float() if weight.dtype == torch.float64 else weight
        if not bool(single.isfinite().all()):
            raise UserError(f"{name} has NaN or Inf in it; mend the checkpoint, or leave this layer out.")

    def group_of(self, inputs: int) -> int:
        """How many inputs of a row share a scale: all of them, but in formats that say otherwise."""
        return inputs

    def grid(self, groups: Tensor, moments: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Scales and, of some formats, zero points ``(out, groups)`` for float32 weights ``(out, groups, group)``.

        With `moments`, the means of x^2 ``(groups, group)`` or of x x^T ``(groups, group, group)`` of each group's
        inputs, scales are searched for the least squared error of the outputs.
        """
        raise NotImplementedError

    def encode(self, values: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        """The codes nearest to `values`; scale and zero point broadcast."""
        raise NotImplementedError

    def decode(self, codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        """What codes stand for, in float32."""
        return codes.float() * scale if zero is None else (codes.float() - zero) * scale

    def pack(self, codes: Tensor, scale: Tensor, zero: Tensor | None) -> Packed:
        """The tensors that are stored for codes ``(out, in)`` and a grid."""
        raise NotImplementedError

    def quantize(self, weight: Tensor, moments: Tensor | None = None) -> Packed:
        """The tensors that stand for a ``(out, in)`` matrix, rounded to nearest.

        Args:
            weight: the matrix.
            moments: ``(in,)``, the mean of the square of each input, or ``(in, in)``, of each pair's product: scales
                are then searched for the least squared error of the outputs.
        """
        self.refuse(weight)
        group = self.group_of(weight.shape[1])
        groups = weight.detach().float().unflatten(1, (-1, group))
        scale, zero = self.grid(groups, None if moments is None else blocks(moments, group))
        codes = self.encode(groups, scale[..., None], None if zero is None else zero[..., None])
        return self.pack(codes.flatten(1), scale, zero)

    def dequantize(self, packed: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix that they stand for."""
        return dequantize(packed["weight"], packed["scale"], packed.get("zero"), dtype)

    def shapes(self, outputs: int, inputs: int) -> dict[str, tuple[tuple[int, ...], tuple[torch.dtype, ...]]]:
        """Shape and possible dtypes of each tensor."""
        raise NotImplementedError

    def check(self, packed: Mapping[str, Tensor], outputs: int, inputs: int, name: str = "the layer") -> None:
        """Raise where tensors, of a file say, are not this format's."""
        for part, (shape, dtypes) in self.shapes(outputs, inputs).items():
            tensor = packed.get(part)
            if tensor is None or tuple(tensor.shape) != shape or tensor.dtype not in dtypes:
                found = "missing" if tensor is None else f"{tensor.dtype} of shape {tuple(tensor.shape)}"
                raise UserError(f"{part} of {name} is {found}, but {self.name} needs {dtypes[0]} of shape {shape}.")
        scale = packed["scale"]
        if not scale.is_meta and not bool((scale.isfinite() & (scale != 0)).all()):  # others write some below 0
            raise UserError(f"A scale of {name} is 0, NaN or Inf; the file is damaged: write it again.")

    def options(self) -> dict[str, Any]:
        """What a file says of it, which `format_of` reads."""
        return {"format": self.name, "version": self.version}


def blocks(moments: Tensor, group: int) -> Tensor:
    """The moments of each group's inputs, of their pairs where there are those and a group has no more than 128.

    >>> blocks(torch.eye(4), 2).shape, blocks(torch.ones(4), 2).shape
    (torch.Size([2, 2, 2]), torch.Size([2, 2]))
    """
    if moments.ndim == 2 and group <= _LARGEST_BLOCK:
        parts = moments.unflatten(0, (-1, group)).unflatten(2, (-1, group))
        return parts.diagonal(dim1=0, dim2=2).permute(2, 0, 1).contiguous()
    return (moments.diagonal() if moments.ndim == 2 else moments).reshape(-1, group)


def best_scale(
    values: Tensor, scale: Tensor, rounded: Callable[[Tensor, Tensor], Tensor], search: bool, moments: Tensor | None
) -> Tensor:
    """A float32 scale for each last dimension of `values`: `scale`, or a smaller one that errs less.

    A scale of 0 becomes 1. `rounded(values, scale)` is what the format makes of values. Smaller scales are tried where
    `search` is true or there are `moments`, those of `Format.grid`, which weigh the squared errors.
    """
    scale = _above_zero(scale)
    if not search and moments is None:
        return scale
    chunk = max(1, _ROWS // max(1, values[0].numel()))
    for first in range(0, len(values), chunk):
        part, mine = values[first : first + chunk], scale[first : first + chunk]
        whole, least = mine.clone(), _error(part, mine, rounded, moments)
        for share in _PARTS:
            tried = _above_zero(whole * share)
            error = _error(part, tried, rounded, moments)
            better = error < least
            mine.copy_(torch.where(better, tried, mine))
            least = torch.where(better, error, least)
    return scale


def _error(
    values: Tensor, scale: Tensor, rounded: Callable[[Tensor, Tensor], Tensor], moments: Tensor | None
) -> Tensor:
    difference = rounded(values, scale[..., None]) - values
    if moments is None or moments.ndim == 2:
        return (difference.square() if moments is None else difference.square() * moments).sum(-1)
    return (torch.einsum("ngk,gkl->ngl", difference, moments) * difference).sum(-1)


def _above_zero(scale: Tensor) -> Tensor:
    """1 where a scale is 0 or too small for a quotient by it to be exact."""
    return torch.where(scale >= torch.finfo(torch.float32).tiny, scale, 1.0)
