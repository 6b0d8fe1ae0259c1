"""int4: four bits a weight, a bfloat16 scale, and with `zeros` a zero point, for each output and group of inputs.

    span    of a row: one group of 64 or 128 weights, or two groups of 32; h is half a span

    weight  (out, in / 2)      uint8     byte j of a span   | hi: code[j + h] | lo: code[j] |
                                                              7 6 5 4           3 2 1 0
            e.g. group 128     byte 0 has the codes 0 and 64, byte 63 those of 63 and 127, byte 64 begins the next group
    scale   (in / group, out)  bfloat16  W[n, k] = s[k / group, n] * (code[n, k] - z[k / group, n])
    zero    (in / group, out)  uint8     0 to 15; left out, 8 everywhere

Halves of a span, and not neighbours, share a byte: all low nibbles of a tile are then one tile of weights, and all high
ones another, and a kernel unpacks both without moving a weight between lanes. Scales lie output by output: those of
a tile of outputs are one piece of memory. They are rounded to bfloat16 before weights are, which loses nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from tilewright.errors import UserError
from tilewright.ops.quantized_linear.op import GROUPS
from tilewright.ops.quantized_linear.reference import MIDDLE, pack_nibbles, span_of
from tilewright.quantize.formats.base import Format, Packed, best_scale

_MOST = 15


@dataclass(frozen=True)
class Int4(Format):
    """Four bits a weight, with a scale for each output and group of inputs.

    Attributes:
        group: how many inputs share a scale: 32, 64 or 128.
        zeros: store the code that stands for 0, too; of use where a group's weights lie to one side of it.

    >>> import torch
    >>> packed = Int4(group=64).quantize(torch.linspace(-7, 7, 64)[None])
    >>> packed["weight"].shape, Int4(group=64).dequantize(packed)[0, 0].item()
    (torch.Size([1, 32]), -7.0)
    """

    name: ClassVar[str] = "int4"
    weight_dtype: ClassVar[torch.dtype] = torch.uint8

    group: int = 128
    zeros: bool = False

    def __post_init__(self) -> None:
        if self.group not in GROUPS or type(self.group) is not int:
            raise UserError(f"The group of int4 is {self.group!r}; choose 32, 64 or 128.")
        if not isinstance(self.zeros, bool):
            raise UserError(f"zeros of int4 is {self.zeros!r}; choose True or False.")

    def refuse_shape(self, outputs: int, inputs: int, name: str = "weight") -> None:
        """Raise where a group does not divide the inputs."""
        if inputs % span_of(self.group):
            fitting = [group for group in reversed(GROUPS) if inputs % span_of(group) == 0]
            advice = f"choose group={fitting[0]}" if fitting else "leave this layer out, or take int8"
            raise UserError(
                f"{name} has {inputs} inputs, no multiple of {span_of(self.group)}, which int4 with group="
                f"{self.group} needs; {advice}."
            )

    def group_of(self, inputs: int) -> int:
        """How many inputs of a row share a scale."""
        return self.group

    def grid(self, groups: Tensor, moments: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Scales that are numbers of bfloat16, and zero points: whole numbers, 8 everywhere without `zeros`."""

        def rounded(part: Tensor, scale: Tensor) -> Tensor:
            scale = _as_stored(scale)
            if not self.zeros:
                return (part / scale).round().clamp(1 - MIDDLE, MIDDLE - 1) * scale
            zero = self._zero(part, scale[..., 0])[..., None]
            return ((part / scale + zero).round().clamp(0, _MOST) - zero) * scale

        low, high = _ends(groups)
        most = (high - low) / _MOST if self.zeros else torch.maximum(high, -low) / (MIDDLE - 1)
        scale = _as_stored(best_scale(groups, most, rounded, self.search, moments))
        return scale, self._zero(groups, scale)

    def _zero(self, groups: Tensor, scale: Tensor) -> Tensor:
        """The codes that stand for 0: the middle of what is stored is that of a group."""
        if not self.zeros:
            return torch.full_like(scale, MIDDLE)
        low, high = _ends(groups)
        return (_MOST / 2 - (low + high) / 2 / scale).round().clamp(0, _MOST)

    def encode(self, values: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        """The nearest codes, 0 to 15."""
        return (values / scale + (MIDDLE if zero is None else zero)).round().clamp(0, _MOST).to(torch.uint8)

    def pack(self, codes: Tensor, scale: Tensor, zero: Tensor | None) -> Packed:
        """The tensors that are stored."""
        packed = {"weight": pack_nibbles(codes, self.group), "scale": scale.t().contiguous().bfloat16()}
        if self.zeros and zero is not None:
            packed["zero"] = zero.t().contiguous().to(torch.uint8)
        return packed

    def shapes(self, outputs: int, inputs: int) -> dict[str, tuple[tuple[int, ...], tuple[torch.dtype, ...]]]:
        """Shape and possible dtypes of each tensor."""
        self.refuse_shape(outputs, inputs, "The layer")
        of_groups = (inputs // self.group, outputs)
        floats = (torch.bfloat16, torch.float16, torch.float32)  # the latter of files that others wrote
        shapes: dict[str, tuple[tuple[int, ...], tuple[torch.dtype, ...]]]
        shapes = {"weight": ((outputs, inputs // 2), (torch.uint8,)), "scale": (of_groups, floats)}
        return {**shapes, "zero": (of_groups, (torch.uint8,))} if self.zeros else shapes

    def check(self, packed: Mapping[str, Tensor], outputs: int, inputs: int, name: str = "the layer") -> None:
        """Raise where tensors, of a file say, are not this format's."""
        super().check(packed, outputs, inputs, name)
        zero = packed.get("zero")
        if zero is not None and not zero.is_meta and bool((zero > _MOST).any()):
            raise UserError(f"A zero point of {name} is above {_MOST}; the file is damaged: write it again.")

    def options(self) -> dict[str, Any]:
        """What a file says of it."""
        return {**super().options(), "group": self.group, "zeros": self.zeros}


def _ends(groups: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the largest weight of each group, 0 between them."""
    return groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)


def _as_stored(scale: Tensor) -> Tensor:
    """The nearest bfloat16 that is above 0."""
    return scale.bfloat16().float()
