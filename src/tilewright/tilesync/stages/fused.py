"""What a matmul does to x before it, and to its columns behind it, without a stage of its own.

A `Normed` or `Combined` x is made by each tile of the matmul for itself: every tile of few rows reads all of x anyway.
So no stage stands between the one that writes x and the matmul, and no tile waits for one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.tilesync.graph import GraphError, Region
from tilewright.tilesync.stages.common import widen


@dataclass(frozen=True)
class Normed:
    """RMSNorm of x's rows, rounded to the dtype of the data as a stage's output is."""

    weight: str
    eps: float = 1e-5

    @property
    def inputs(self) -> tuple[str, ...]:
        """What it reads beside x."""
        return (self.weight,)

    def reads(self, x: str, rows: tuple[int, int], part: tuple[int, int], inner: int) -> Iterable[Region]:
        """Return what some rows and columns of the matmul's x need: whole rows."""
        yield Region(x, (rows, (0, inner)))

    def compute(self, x: Tensor, dtype: torch.dtype, weight: Tensor) -> Tensor:
        """Return the matmul's x."""
        return F.rms_norm(widen(x), x.shape[-1:], widen(weight), self.eps).to(dtype)

    def bytes(self, rows: int, part: int, inner: int) -> float:
        """Return what a tile reads for it: x twice, and the weight."""
        return 2.0 * (rows * (inner + part) + part)


@dataclass(frozen=True)
class Combined:
    """What an `Attention` with splits has written, added up, and rounded to the dtype of the data."""

    heads: int
    splits: int

    @property
    def inputs(self) -> tuple[str, ...]:
        """What it reads beside x."""
        return ()

    def reads(self, x: str, rows: tuple[int, int], part: tuple[int, int], inner: int) -> Iterable[Region]:
        """Return what some rows and columns of the matmul's x need: these of all splits, and their heads' sums."""
        size = inner // self.heads
        heads = inner + part[0] // size, inner - (-part[1] // size)
        for columns in (part, heads):
            yield Region(x, ((0, self.splits), rows, columns))

    def compute(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the matmul's x."""
        parts, sums = x.split((x.shape[-1] - self.heads, self.heads), -1)
        y = parts.unflatten(-1, (self.heads, -1)) * sums.softmax(0)[..., None]
        return y.sum(0).flatten(1).to(dtype)

    def bytes(self, rows: int, part: int, inner: int) -> float:
        """Return what a tile reads for it: the numbers of all splits in float32."""
        return 4.0 * self.splits * rows * part * (1 + self.heads / inner)


Prologue = Normed | Combined


@dataclass(frozen=True)
class Rotation:
    """Rotates heads by their rows' positions, as the stage `Rope` does: see there.

    Args:
        cos: a table of float32, ``(positions, head_dim / 2)``.
        sin: another.
        length: the first row's position, a number on the device.
        head_dim: numbers of a head, whose halves are pairs.
        rotated: so many columns are; the others are taken as they are.
    """

    cos: str
    sin: str
    length: str
    head_dim: int
    rotated: int

    def check(self, stage: str, columns: int) -> None:
        """Refuse columns that are no heads."""
        if self.head_dim % 2 or columns % self.head_dim or self.rotated % self.head_dim:
            raise GraphError(
                f"Stage {stage}: {columns} columns, {self.rotated} of them rotated, are no heads of {self.head_dim}."
            )

    def columns(self, pairs: tuple[int, int]) -> list[tuple[int, int]]:
        """Return the columns that so many pairs are, which are numbered head by head.

        >>> Rotation("cos", "sin", "length", 8, 16).columns((2, 5))
        [(2, 4), (6, 8), (8, 9), (12, 13)]
        """
        half, found = self.head_dim // 2, list[tuple[int, int]]()
        for head in range(pairs[0] // half, -(-pairs[1] // half)):
            start, stop = max(pairs[0], head * half) + head * half, min(pairs[1], (head + 1) * half) + head * half
            found += [(start, stop), (start + half, stop + half)]
        return found

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, length: Tensor) -> Tensor:
        """Return x rotated, in the dtype that stages compute in."""
        heads = widen(x)[:, : self.rotated].unflatten(1, (-1, self.head_dim))
        places = length.long() + torch.arange(len(x), device=x.device)
        cosine, sine = (widen(table)[places][:, None] for table in (cos, sin))
        first, second = heads.chunk(2, -1)
        turned = torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)
        return torch.cat((turned.flatten(1), widen(x)[:, self.rotated :]), 1)
