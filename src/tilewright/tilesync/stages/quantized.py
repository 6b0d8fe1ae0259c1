"""A matmul whose weight has 8 or 4 bits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.ops.quantized_linear.op import GROUPS
from tilewright.ops.quantized_linear.reference import dequantize, span_of
from tilewright.tilesync.graph import GraphError, Region, Tile
from tilewright.tilesync.stages.fused import Combined
from tilewright.tilesync.stages.matmul import Gemm

_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "int4": torch.uint8}
_SCALES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Packing:
    """How a weight is packed: as `ops.int8_linear`, `fp8_linear` and `int4_linear` take it.

    Attributes:
        format: int8, fp8 or int4.
        group: of int4, how many inputs share a scale: 32, 64 or 128.
        zeros: of int4, whether there are zero points.
        scale: the dtype of the scales.

    >>> Packing("int4", group=64, zeros=True, scale=torch.bfloat16).shapes(10, 128)
    {'weight': (10, 64), 'scale': (2, 10), 'zero': (2, 10)}
    """

    format: str
    group: int = 0
    zeros: bool = False
    scale: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.format not in _DTYPES:
            raise GraphError(f"A weight is packed as {self.format!r}; choose one of {', '.join(_DTYPES)}.")
        if (self.format == "int4") != (self.group in GROUPS) or (self.group == 0 and self.zeros):
            raise GraphError(
                f"A weight of {self.format} has groups of {self.group} and zero points: {self.zeros}; only int4 has "
                f"these, in groups of {', '.join(map(str, GROUPS))}."
            )
        if self.scale not in _SCALES:
            raise GraphError(f"The scales of a weight are {self.scale}; choose {', '.join(map(str, _SCALES))}.")

    @classmethod
    def of(cls, weight: Tensor, scale: Tensor, zero: Tensor | None) -> Packing:
        """Return how these tensors are packed.

        >>> Packing.of(torch.zeros(2, 64, dtype=torch.int8), torch.ones(2), None)
        Packing(format='int8', group=0, zeros=False, scale=torch.float32)
        """
        name = next(name for name, dtype in _DTYPES.items() if dtype == weight.dtype)
        group = 2 * weight.shape[1] // len(scale) if name == "int4" else 0
        return cls(name, group, zero is not None, scale.dtype)

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtype of each tensor: weight, scale and, where there are any, zero."""
        found = {"weight": _DTYPES[self.format], "scale": self.scale}
        return {**found, "zero": torch.uint8} if self.zeros else found

    def shapes(self, outputs: int, inputs: int) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor of a matrix."""
        if not self.group:
            return {"weight": (outputs, inputs), "scale": (outputs,)}
        groups = inputs // self.group, outputs
        found: dict[str, tuple[int, ...]] = {"weight": (outputs, inputs // 2), "scale": groups}
        return {**found, "zero": groups} if self.zeros else found

    @property
    def unit(self) -> int:
        """How many inputs lie together, which no split divides."""
        return span_of(self.group)

    @property
    def bits(self) -> float:
        """Bits of a weight, with its share of a group's scale and zero point."""
        return 4 + (8 * self.scale.itemsize + 8 * self.zeros) / self.group if self.group else 8.0


class QuantizedGemm(Gemm):
    """A `Gemm` whose weight is packed. Gated, the weight is one, the gate's rows first."""

    def __init__(
        self, output: str, x: str, weight: str, sizes: tuple[int, int, int], *, packing: Packing, scale: str,
        zero: str | None = None, **options: object,
    ) -> None:  # fmt: skip
        if not isinstance(weight, str):
            raise GraphError(f"Stage {output}: a packed weight is one tensor; put the gate's rows before the other's.")
        if packing.zeros != (zero is not None):
            raise GraphError(f"Stage {output}: zero is {zero}, but its packing has zero points: {packing.zeros}.")
        if packing.group and sizes[2] % packing.unit:
            raise GraphError(f"Stage {output}: {sizes[2]} inputs are no multiple of {packing.unit}, as int4 needs.")
        self.packing, self.scale, self.zero, self.unit = packing, scale, zero, packing.unit
        super().__init__(output, x, weight, sizes, **options)  # type: ignore[arg-type]
        if isinstance(self.prologue, Combined) and not (self.residual or self.bias):
            raise GraphError(f"Stage {output}: its inputs do not say the dtype of what is combined; give a residual.")
        names = dict(zip(("weight", "scale", "zero"), (weight, scale, zero), strict=True))
        self.packed = {str(names[part]): dtype for part, dtype in packing.dtypes.items()}
        self.inputs = (*self.inputs, *filter(None, (scale, zero)))

    def reads(self, tile: Tile) -> Iterable[Region]:
        return (region for region in super().reads(tile) if region.tensor != self.weight)

    @property
    def like(self) -> str:
        return (self.residual or self.bias or self.x) if isinstance(self.prologue, Combined) else self.x

    def matrix(self, given: Mapping[str, Tensor], wide: torch.dtype) -> Tensor:
        return dequantize(given[self.weight], given[self.scale], given[self.zero] if self.zero else None, wide)

    def weight_bytes(self, numbers: int) -> float:
        return numbers * self.packing.bits / 8
