"""fp8: a float of 8 bits (e4m3) a weight, one float32 scale an output.

    weight  (out, in)  float8_e4m3fn    | s e e e e m m m |  one byte: sign, exponent with bias 7, mantissa
    scale   (out,)     float32          W[n, k] = s[n] * w[n, k]

The largest magnitude is 448; 0x7f and 0xff, NaN, do not occur.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tilewright.errors import UserError
from tilewright.quantize.formats.base import Format, Packed, best_scale

_MOST = 448.0


def _codes(values: Tensor, scale: Tensor) -> Tensor:
    return (values / scale).clamp(-_MOST, _MOST).to(torch.float8_e4m3fn)


@dataclass(frozen=True)
class Fp8(Format):
    """A float of 8 bits a weight, e4m3, with a scale for each output.

    >>> import torch
    >>> packed = Fp8().quantize(torch.tensor([[1.0, -2.0], [0.0, 0.0]]))
    >>> packed["weight"].float().tolist(), Fp8().dequantize(packed)[0].tolist()
    ([[224.0, -448.0], [0.0, 0.0]], [1.0, -2.0])
    """

    name: ClassVar[str] = "fp8"
    weight_dtype: ClassVar[torch.dtype] = torch.float8_e4m3fn

    def grid(self, groups: Tensor, moments: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """A scale for each output."""

        def rounded(part: Tensor, scale: Tensor) -> Tensor:
            return _codes(part, scale).float() * scale

        return best_scale(groups, groups.abs().amax(-1) / _MOST, rounded, self.search, moments), None

    def encode(self, values: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        """The nearest floats of 8 bits."""
        return _codes(values, scale)

    def pack(self, codes: Tensor, scale: Tensor, zero: Tensor | None) -> Packed:
        """The tensors that are stored."""
        return {"weight": codes.contiguous(), "scale": scale.flatten()}

    def shapes(self, outputs: int, inputs: int) -> dict[str, tuple[tuple[int, ...], tuple[torch.dtype, ...]]]:
        """Shape and possible dtypes of each tensor."""
        return {"weight": ((outputs, inputs), (torch.float8_e4m3fn,)), "scale": ((outputs,), (torch.float32,))}

    def check(self, packed: Mapping[str, Tensor], outputs: int, inputs: int, name: str = "the layer") -> None:
        """Raise where tensors, of a file say, are not this format's."""
        super().check(packed, outputs, inputs, name)
        weight = packed["weight"]
        if not weight.is_meta and bool((weight.view(torch.uint8) & 0x7F == 0x7F).any()):
            raise UserError(f"A weight of {name} is NaN; the file is damaged: write it again.")
