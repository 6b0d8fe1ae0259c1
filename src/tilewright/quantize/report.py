"""What quantizing a model has changed, layer by layer."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Layer:
    """One linear layer.

    Attributes:
        weight_error: ``||W - W'|| / ||W||``.
        output_error: the same of the layer's outputs for the inputs that were given, or None.
        left_out: why it stays as it was; empty where it was quantized.
    """

    name: str
    outputs: int
    inputs: int
    bytes_before: int
    bytes_after: int
    weight_error: float | None = None
    output_error: float | None = None
    left_out: str = ""


@dataclass
class Report:
    """All linear layers of a model; `bytes_before` and `bytes_after` are of the whole model.

    >>> report = Report("int8", 100, 60, [Layer("head", 8, 4, 64, 36, 0.005)], ["head had a twin"])
    >>> print(report)
    int8: 1 layer quantized, 0 left out; 100 B to 60 B (0.60x)
    layer   size     bytes  weight error  output error
    head   8 x 4  64 to 36         0.50%
    head had a twin
    """

    format: str
    bytes_before: int
    bytes_after: int
    layers: list[Layer] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def quantized(self) -> list[Layer]:
        return [layer for layer in self.layers if not layer.left_out]

    @property
    def left_out(self) -> list[Layer]:
        return [layer for layer in self.layers if layer.left_out]

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        count = len(self.quantized)
        lines = [
            f"{self.format}: {count} layer{'s' * (count != 1)} quantized, {len(self.left_out)} left out; "
            f"{size(self.bytes_before)} to {size(self.bytes_after)} "
            f"({self.bytes_after / max(1, self.bytes_before):.2f}x)"
        ]
        if self.quantized:
            head = ("layer", "size", "bytes", "weight error", "output error")
            rows = [head, *(_row(layer) for layer in self.quantized)]
            widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
            lines += [
                "  ".join(
                    [row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))]
                ).rstrip()
                for row in rows
            ]
        lines += [f"left out: {layer.name}: {layer.left_out}" for layer in self.left_out]
        return "\n".join(lines + self.notes)


def _row(layer: Layer) -> tuple[str, ...]:
    return (
        layer.name, f"{layer.outputs} x {layer.inputs}", f"{layer.bytes_before} to {layer.bytes_after}",
        *("" if error is None else f"{error:.2%}" for error in (layer.weight_error, layer.output_error)),
    )  # fmt: skip


def size(count: float) -> str:
    """Bytes as people say them.

    >>> size(2_500_000), size(64)
    ('2.50 MB', '64 B')
    """
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.2f} {unit}"
    return f"{count:.0f} B"
