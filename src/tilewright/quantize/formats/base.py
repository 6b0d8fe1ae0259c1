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

    def refuse(self, weight: Tensor, name: str = "weight") -> None:
        """Raise where `weight` cannot be quantized; all that `quantize` could stumble over."""
        if weight.ndim != 2 or not weight.numel():
            raise UserError(f"{name} has shape {tuple(weight.shape)}; {self.name} needs a matrix, outputs first.")
        if not weight.is_floating_point() or weight.element_size() < 2:
            raise UserError(f"{name} is {weight.dtype}; {self.name} needs bfloat16, float16, float32 or float64.")
        if weight.is_meta:
            raise UserError(f"{name} has no values (it is on the meta device); load the model before it is quantized.")
        single = weight.float() if weight.dtype == torch.float64 else weight
        if not bool(single.isfinite().all()):
            raise UserError(f"{name} has NaN or Inf in it; mend the checkpoint, or leave this layer out by filter_fn.")

    def quantize(self, weight: Tensor) -> Packed:
        """The tensors that stand for a ``(out, in)`` matrix."""
        raise NotImplementedError

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
        if not scale.is_meta and not bool((scale.isfinite() & (scale > 0)).all()):
            raise UserError(f"A scale of {name} is not above 0 and finite; the file is damaged: write it again.")

    def options(self) -> dict[str, Any]:
        """What a file says of it, which `format_of` reads."""
        return {"format": self.name, "version": self.version}


def best_scale(values: Tensor, largest: float, rounded: Callable[[Tensor, Tensor], Tensor], search: bool) -> Tensor:
    """A float32 scale for each row of `values`: the largest magnitude over `largest`, or a better one if `search`.

    A row of zeros gets 1. `rounded(values, scale)` is what the format makes of values.
    """
    most = values.abs().amax(-1)
    scale = _above_zero(most / largest)
    if not search:
        return scale
    chunk = max(1, _ROWS // values.shape[-1])
    for first in range(0, len(values), chunk):
        part, mine = values[first : first + chunk], scale[first : first + chunk]
        whole, least = mine.clone(), _error(part, mine, rounded)
        for share in _PARTS:
            tried = _above_zero(whole * share)
            error = _error(part, tried, rounded)
            better = error < least
            mine.copy_(torch.where(better, tried, mine))
            least = torch.where(better, error, least)
    return scale


def _error(values: Tensor, scale: Tensor, rounded: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    return (rounded(values, scale[..., None]) - values).square().sum(-1)


def _above_zero(scale: Tensor) -> Tensor:
    """1 where a scale is 0 or too small for a quotient by it to be exact."""
    return torch.where(scale >= torch.finfo(torch.float32).tiny, scale, 1.0)
