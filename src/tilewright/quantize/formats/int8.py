"""int8: one signed byte a weight, one float32 scale an output.

weight  (out, in)  int8     | w[n, 0] | w[n, 1] | ... | w[n, in - 1] |      -127 to 127, two's complement
scale   (out,)     float32  | s[n] |                                        W[n, k] = s[n] * w[n, k]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tilewright.quantize.formats.base import Format, Packed, best_scale


def _codes(values: Tensor, scale: Tensor) -> Tensor:
    return (values / scale).round().clamp(-127, 127)


@dataclass(frozen=True)
class Int8(Format):
    """One byte a weight, symmetric, with a scale for each output.

    >>> import torch
    >>> packed = Int8().quantize(torch.tensor([[1.0, -2.0], [0.0, 0.0]]))
    >>> packed["weight"].tolist(), Int8().dequantize(packed)[0, 1].item()
    ([[64, -127], [0, 0]], -2.0)
    """

    name: ClassVar[str] = "int8"
    weight_dtype: ClassVar[torch.dtype] = torch.int8

    def grid(self, groups: Tensor, moments: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """A scale for each output."""

        def rounded(part: Tensor, scale: Tensor) -> Tensor:
            return _codes(part, scale) * scale

        return best_scale(groups, groups.abs().amax(-1) / 127.0, rounded, self.search, moments), None

    def encode(self, values: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        """The nearest codes, -127 to 127."""
        return _codes(values, scale).to(torch.int8)

    def pack(self, codes: Tensor, scale: Tensor, zero: Tensor | None) -> Packed:
        """The tensors that are stored."""
        return {"weight": codes.contiguous(), "scale": scale.flatten()}

    def shapes(self, outputs: int, inputs: int) -> dict[str, tuple[tuple[int, ...], tuple[torch.dtype, ...]]]:
        """Shape and possible dtypes of each tensor."""
        return {"weight": ((outputs, inputs), (torch.int8,)), "scale": ((outputs,), (torch.float32,))}
