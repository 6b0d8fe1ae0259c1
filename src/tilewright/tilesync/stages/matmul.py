"""Matmuls and convolutions, and the sum of a matmul's splits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.tilesync.graph import WIDE, GraphError, Order, Region, Spec, Stage, Tile, Work, span
from tilewright.tilesync.stages.common import (
    ACTIVATIONS,
    FEW_COLUMNS,
    L2_SHARE,
    MOST_FEW_ROWS,
    Sync,
    check_activation,
    tiles,
    widen,
)
from tilewright.tilesync.stages.fused import Combined, Prologue, Rotation


class Gemm(Stage):
    """``activation(x @ weight^T + bias) * up + residual`` by tiles of rows and columns.

    Gated, the weight is two, the gate's and the other's, or one with twice as many rows, those of the gate first:
    ``activation(x @ gate^T) * (x @ up^T)``. With
    splits, tiles along a first axis sum a part of the inner dimension each, and the output is ``(splits, rows,
    columns)`` in float32, for a `Reduction` to add up.

    A `prologue` makes x of what another stage has written, in each tile: `Normed`, or `Combined` from an attention's
    splits. A `rotation` turns heads of columns by their rows' positions, behind the bias; a tile then has both halves
    of so many pairs of columns.
    """

    unit = 64  # inputs that no split divides

    def __init__(
        self, output: str, x: str, weight: str | tuple[str, str], sizes: tuple[int, int, int], *, tile: tuple[int, int],
        activation: str = "none", gated: bool = False, bias: str | None = None, residual: str | None = None,
        splits: int = 1, prologue: Prologue | None = None, rotation: Rotation | None = None, order: Order = "rows",
        sync: Sync = None,
    ) -> None:  # fmt: skip
        rows, columns, _ = self.sizes = sizes
        self.tile, self.splits, self.gated = tile, splits, gated
        self.activation = check_activation(output, activation)
        self.bias, self.residual = bias, residual
        self.prologue, self.rotation = prologue, rotation
        if splits > 1 and (gated or bias or residual or rotation or activation != "none"):
            raise GraphError(f"Stage {output}: what follows a split sum is for the Reduction that adds it up.")
        if gated and bias:
            raise GraphError(f"Stage {output}: a gated matmul takes no bias.")
        if rotation:
            rotation.check(output, columns)
            if gated or residual or activation != "none" or tile[1] % 2:
                raise GraphError(
                    f"Stage {output}: columns that are rotated come in pairs, and have nothing but a bias."
                )
            self.integers, self.floats = (rotation.length,), (rotation.cos, rotation.sin)
        if isinstance(prologue, Combined):  # of fewer splits the sum would be another
            self.whole = {x: (prologue.splits, rows, sizes[2] + prologue.heads)}
        grid = tiles((rows, columns), tile)
        spec = Spec((rows, columns)) if splits == 1 else Spec((splits, rows, columns), WIDE)
        self.x, self.second = x, weight[1] if isinstance(weight, tuple) else None
        self.weight = weight[0] if isinstance(weight, tuple) else weight
        if self.second and not gated:
            raise GraphError(f"Stage {output}: two weights are those of a gated matmul.")
        inputs = [x, *filter(None, (self.weight, self.second, bias, residual))]
        inputs += [*(prologue.inputs if prologue else ()), *self.integers, *self.floats]
        super().__init__({output: spec}, inputs, grid if splits == 1 else (splits, *grid), order, sync)

    def part(self, split: int) -> tuple[int, int]:
        """Return where a split begins and ends along the inner dimension, in whole units."""
        units, inner = -(-self.sizes[2] // self.unit), self.sizes[2]
        first, last = (min(inner, units * each // self.splits * self.unit) for each in (split, split + 1))
        return first, last

    def _place(self, tile: Tile) -> tuple[int, tuple[int, int], tuple[int, int]]:
        split, row, column = (0, *tile) if self.splits == 1 else tile
        return split, span(row, self.tile[0], self.sizes[0]), span(column, self.tile[1], self.sizes[1])

    def reads(self, tile: Tile) -> Iterable[Region]:
        split, rows, columns = self._place(tile)
        if self.prologue:
            yield from self.prologue.reads(self.x, rows, self.part(split), self.sizes[2])
        else:
            yield Region(self.x, (rows, self.part(split)))
        for each in self._columns(columns):
            yield Region(self.weight, (each, self.part(split)))
        if self.gated:
            count = 0 if self.second else self.sizes[1]
            yield Region(self.second or self.weight, ((columns[0] + count, columns[1] + count), self.part(split)))
        if self.bias:
            for each in self._columns(columns):
                yield Region(self.bias, (each,))
        if self.residual:
            yield Region(self.residual, (rows, columns))

    def _columns(self, columns: tuple[int, int]) -> list[tuple[int, int]]:
        """Return where a tile's columns are: side by side, or, rotated, in halves of heads."""
        start, stop = columns
        return self.rotation.columns((start // 2, stop // 2)) if self.rotation else [columns]

    def writes(self, tile: Tile) -> Iterable[Region]:
        split, rows, columns = self._place(tile)
        for each in self._columns(columns):
            yield Region(self.name, (rows, each) if self.splits == 1 else ((split, split + 1), rows, each))

    def compute(self, *inputs: Tensor) -> Tensor:
        given = dict(zip(self.inputs, inputs, strict=True))
        x = given[self.x]
        if self.prologue:
            x = self.prologue.compute(x, given[self.like].dtype, *(given[name] for name in self.prologue.inputs))
        weight = self.matrix(given, torch.float64 if x.dtype == torch.float64 else torch.float32)
        if self.splits > 1:
            parts = [slice(*self.part(split)) for split in range(self.splits)]
            return torch.stack([_multiply(x[:, part], weight[:, part]) for part in parts])
        y = _finish(self, _multiply(x, weight), given)
        if self.rotation:
            y = self.rotation.rotate(y, *(given[name] for name in (*self.floats, *self.integers)))
        return y.to(x.dtype)

    @property
    def like(self) -> str:
        """The input that has the dtype of the data."""
        return self.weight if isinstance(self.prologue, Combined) else self.x

    def matrix(self, given: Mapping[str, Tensor], wide: torch.dtype) -> Tensor:
        """Return the whole weight; gated, the gate's rows first. One that is packed becomes numbers of a wide dtype."""
        weight = given[self.weight]
        return torch.cat((weight, given[self.second])) if self.second else weight

    def work(self, tile: Tile) -> Work:
        split, rows, columns = self._place(tile)
        inner = self.part(split)[1] - self.part(split)[0]
        height, width = rows[1] - rows[0], (columns[1] - columns[0]) * (1 + self.gated)
        weight_bytes = self.weight_bytes(width * inner)
        written = height * (columns[1] - columns[0]) * (2 if self.splits == 1 else 4)
        x_bytes = self.prologue.bytes(height, inner, self.sizes[2]) if self.prologue else 2.0 * height * inner
        groups = -(-width // FEW_COLUMNS) if self.tile[0] <= MOST_FEW_ROWS else 1
        flops, moved = 2.0 * self.tile[0] * width * inner, weight_bytes + L2_SHARE * x_bytes + written
        return Work(flops, moved, weight_bytes, groups)

    def weight_bytes(self, numbers: int) -> float:
        """Return the bytes of so many of the weight's numbers."""
        return 2.0 * numbers

    @property
    def shared_bytes(self) -> int:  # type: ignore[override]
        """Three stages of 64 of the inner dimension, for both operands; of few rows for a group of columns."""
        width = self.tile[1] * (1 + self.gated)
        return 3 * 64 * 2 * (self.tile[0] + (min(width, FEW_COLUMNS) if self.tile[0] <= MOST_FEW_ROWS else width))


class Reduction(Stage):
    """The sum over the splits of a `Gemm`, then what a Gemm's epilogue has: bias, activation or gate, residual.

    Gated, the sums have twice as many columns, those of the gate first. `dtype` is that of the first tensor named in
    `like`, which is otherwise not read.
    """

    def __init__(
        self, output: str, sums: str, sizes: tuple[int, int], *, splits: int, tile: tuple[int, int], like: str,
        activation: str = "none", gated: bool = False, bias: str | None = None, residual: str | None = None,
        order: Order = "rows", sync: Sync = None,
    ) -> None:  # fmt: skip
        self.sizes, self.tile, self.splits, self.gated, self.sums = sizes, tile, splits, gated, sums
        self.activation = check_activation(output, activation)
        self.bias, self.residual, self.like = bias, residual, like
        inputs = dict.fromkeys([sums, *filter(None, (bias, residual)), like])
        super().__init__({output: Spec(sizes)}, tuple(inputs), tiles(sizes, tile), order, sync)

    def reads(self, tile: Tile) -> Iterable[Region]:
        rows, columns = (span(*each) for each in zip(tile, self.tile, self.sizes, strict=True))
        yield Region(self.sums, ((0, self.splits), rows, columns))
        if self.gated:
            yield Region(self.sums, ((0, self.splits), rows, (columns[0] + self.sizes[1], columns[1] + self.sizes[1])))
        if self.bias:
            yield Region(self.bias, (columns,))
        if self.residual:
            yield Region(self.residual, (rows, columns))

    def writes(self, tile: Tile) -> Iterable[Region]:
        yield Region(self.name, tuple(span(*each) for each in zip(tile, self.tile, self.sizes, strict=True)))

    def compute(self, *inputs: Tensor) -> Tensor:
        given = dict(zip(self.inputs, inputs, strict=True))
        return _finish(self, given[self.sums].sum(0), given).to(given[self.like].dtype)


def _multiply(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight^T, wide. For a gradient in the operands' dtype, as PyTorch has it: matmuls of float32 are slow."""
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return widen(x @ weight.to(x.dtype).t())
    return widen(x) @ widen(weight).t()


def _finish(stage: Gemm | Reduction, y: Tensor, given: Mapping[str, Tensor]) -> Tensor:
    """The epilogue of a matmul: its bias, its activation, gated or not, and the residual."""
    if stage.bias:
        y = y + widen(given[stage.bias])
    if stage.gated:
        gate, up = y.chunk(2, -1)
        y = ACTIVATIONS[stage.activation](gate) * up
    else:
        y = ACTIVATIONS[stage.activation](y)
    return y + widen(given[stage.residual]) if stage.residual else y


class Conv2d(Stage):
    """A convolution of stride 1 that keeps the image's size, as an implicit GEMM.

    Images are matrices of ``(images * height * width, channels)``; the weight is ``(out, kernel, kernel, in)``. A tile
    is some pixels, in memory's order, of some channels: it reads its pixels and a halo of half a kernel around them.
    """

    def __init__(
        self, output: str, x: str, weight: str, *, images: int, height: int, width: int, channels: tuple[int, int],
        kernel: int = 3, activation: str = "none", tile: tuple[int, int] = (128, 64), order: Order = "rows",
        sync: Sync = None,
    ) -> None:  # fmt: skip
        if kernel % 2 == 0:
            raise GraphError(f"Stage {output}: a kernel of {kernel} has no middle; take an odd one.")
        self.images, self.height, self.width, self.channels = images, height, width, channels
        self.kernel, self.tile, self.x, self.weight = kernel, tile, x, weight
        self.activation = check_activation(output, activation)
        self.pixels = images * height * width
        grid = tiles((self.pixels, channels[1]), tile)
        super().__init__({output: Spec((self.pixels, channels[1]))}, (x, weight), grid, order, sync)

    def reads(self, tile: Tile) -> Iterable[Region]:
        start, stop = span(tile[0], self.tile[0], self.pixels)
        image, halo = self.height * self.width, self.kernel // 2 * (self.width + 1)
        first, last = start // image * image, -(-stop // image) * image  # of the images that the tile is in
        yield Region(self.x, ((max(first, start - halo), min(last, stop + halo)), (0, self.channels[0])))

    def writes(self, tile: Tile) -> Iterable[Region]:
        yield Region(
            self.name, (span(tile[0], self.tile[0], self.pixels), span(tile[1], self.tile[1], self.channels[1]))
        )

    def compute(self, *inputs: Tensor) -> Tensor:
        x = widen(inputs[0]).view(self.images, self.height, self.width, -1).permute(0, 3, 1, 2)
        y = F.conv2d(x, widen(inputs[1]).permute(0, 3, 1, 2), padding=self.kernel // 2)
        return ACTIVATIONS[self.activation](y).permute(0, 2, 3, 1).flatten(0, 2).to(inputs[0].dtype)

    def work(self, tile: Tile) -> Work:
        inner = self.kernel**2 * self.channels[0]
        weight_bytes = 2.0 * self.tile[1] * inner
        x_bytes = L2_SHARE * 2.0 * self.tile[0] * inner  # each pixel for every tap
        written = 2.0 * self.tile[0] * self.tile[1]
        return Work(2.0 * self.tile[0] * self.tile[1] * inner, weight_bytes + x_bytes + written, weight_bytes)
