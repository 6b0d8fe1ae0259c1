"""Stages that no matmul dominates: functions of numbers, norms, rotations, stages of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch.nn.functional as F
from torch import Tensor

from tilewright.tilesync.graph import DATA, Order, Region, Spec, Stage, Tile, span
from tilewright.tilesync.stages.common import ACTIVATIONS, Sync, check_activation, tiles, widen
from tilewright.tilesync.stages.fused import Rotation


class Elementwise(Stage):
    """A function of matrices of one shape, number by number. `function` takes and returns tensors.

    A name of an activation is that function of the first input, times the second where there are two.
    """

    def __init__(
        self, output: str, inputs: Sequence[str], sizes: tuple[int, int], *, tile: tuple[int, int],
        function: str | Callable[..., Tensor], order: Order = "rows", sync: Sync = None,
    ) -> None:  # fmt: skip
        self.sizes, self.tile, self.function = sizes, tile, function
        if isinstance(function, str):
            check_activation(output, function)
        super().__init__({output: Spec(sizes)}, inputs, tiles(sizes, tile), order, sync)

    def _box(self, tile: Tile) -> tuple[tuple[int, int], ...]:
        return tuple(span(*each) for each in zip(tile, self.tile, self.sizes, strict=True))

    def reads(self, tile: Tile) -> Iterable[Region]:
        return (Region(name, self._box(tile)) for name in self.inputs)

    def writes(self, tile: Tile) -> Iterable[Region]:
        yield Region(self.name, self._box(tile))

    def compute(self, *inputs: Tensor) -> Tensor:
        wide = [widen(x) for x in inputs]
        if not isinstance(self.function, str):
            return self.function(*wide).to(inputs[0].dtype)
        y = ACTIVATIONS[self.function](wide[0])
        return (y * wide[1] if len(wide) > 1 else y).to(inputs[0].dtype)


class Norm(Stage):
    """RMSNorm of rows, or LayerNorm where there is a bias."""

    def __init__(
        self, output: str, x: str, weight: str, sizes: tuple[int, int], *, bias: str | None = None, eps: float = 1e-5,
        tile: int = 1, order: Order = "rows", sync: Sync = None,
    ) -> None:  # fmt: skip
        self.sizes, self.tile, self.x, self.weight, self.bias, self.eps = sizes, tile, x, weight, bias, eps
        inputs = [x, weight, *filter(None, (bias,))]
        super().__init__({output: Spec(sizes)}, inputs, (-(-sizes[0] // tile),), order, sync)

    def _rows(self, tile: Tile) -> tuple[tuple[int, int], ...]:
        return span(tile[0], self.tile, self.sizes[0]), (0, self.sizes[1])

    def reads(self, tile: Tile) -> Iterable[Region]:
        yield Region(self.x, self._rows(tile))

    def writes(self, tile: Tile) -> Iterable[Region]:
        yield Region(self.name, self._rows(tile))

    def compute(self, *inputs: Tensor) -> Tensor:
        wide = [widen(each) for each in inputs]
        width = (self.sizes[1],)
        y = F.layer_norm(wide[0], width, wide[1], wide[2], self.eps) if self.bias else F.rms_norm(
            wide[0], width, wide[1], self.eps)  # fmt: skip
        return y.to(inputs[0].dtype)


class Custom(Stage):
    """A stage of your own.

    Args:
        output: its tensor, a matrix.
        inputs: names of the tensors that it reads.
        sizes: of the output.
        tile: how many rows and columns a tile has.
        reads: a function of a tile that returns its regions.
        compute: the whole stage in PyTorch.
        source: CUDA C++ for the GPU: the body of a function that all 256 threads of a block call with a `UserTile`, in
            16-bit numbers (docs/tilesync.md). It reads by `read_number` what another stage has written.
        shared_bytes: what it needs of shared memory.
    """

    def __init__(
        self, output: str, inputs: Sequence[str], sizes: tuple[int, int], *, tile: tuple[int, int],
        reads: Callable[[Tile], Iterable[Region]], compute: Callable[..., Tensor], source: str = "",
        shared_bytes: int = 0, dtype: str = DATA, order: Order = "rows", sync: Sync = None,
    ) -> None:  # fmt: skip
        self.sizes, self.tile, self.source, self.shared_bytes = sizes, tile, source, shared_bytes
        self._reads, self._compute = reads, compute
        super().__init__({output: Spec(sizes, dtype)}, inputs, tiles(sizes, tile), order, sync)

    def reads(self, tile: Tile) -> Iterable[Region]:
        return self._reads(tile)

    def writes(self, tile: Tile) -> Iterable[Region]:
        yield Region(self.name, tuple(span(*each) for each in zip(tile, self.tile, self.sizes, strict=True)))

    def compute(self, *inputs: Tensor) -> Tensor:
        return self._compute(*inputs)


class Rope(Custom):
    """Rotates the first `rotated` columns, heads of one size, by angles of which cosine and sine are inputs.

    These are tables of float32, ``(positions, head_dim / 2)``; row r has the position `length` + r, a number on the
    device. A head's halves are a pair, as in Hugging Face's models; the other columns are taken as they are. A tile is
    some rows of one head.
    """

    def __init__(
        self, output: str, x: str, cos: str, sin: str, length: str, sizes: tuple[int, int], *, head_dim: int,
        rotated: int, tile: int = 64, order: Order = "rows", sync: Sync = None,
    ) -> None:  # fmt: skip
        self.rotation = Rotation(cos, sin, length, head_dim, rotated)
        self.integers, self.floats = (length,), (cos, sin)
        source = _ROPE.replace("HEAD_DIM", str(head_dim)).replace("ROTATED", str(rotated))
        super().__init__(output, [x, cos, sin, length], sizes, tile=(tile, head_dim), reads=self._read,
                         compute=self._rotate, source=source, order=order, sync=sync)  # fmt: skip

    def _read(self, tile: Tile) -> Iterable[Region]:
        return (region._replace(tensor=self.inputs[0]) for region in self.writes(tile))

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor, length: Tensor) -> Tensor:
        return self.rotation.rotate(x, cos, sin, length).to(x.dtype)


_ROPE = """
  for (int i = threadIdx.x; i < tile.rows * HEAD_DIM; i += THREADS) {
    const int row = tile.row + i / HEAD_DIM, at = i % HEAD_DIM;
    const u16* x = (const u16*)tile.inputs[0] + (long long)row * tile.width + tile.column;
    float y = widen(read_number(x + at));
    if (tile.column < ROTATED) {
      const float other = widen(read_number(x + (at + HEAD_DIM / 2) % HEAD_DIM));
      const int angle = (*(const int*)tile.inputs[3] + row) * (HEAD_DIM / 2) + at % (HEAD_DIM / 2);
      const float cosine = ((const float*)tile.inputs[1])[angle], sine = ((const float*)tile.inputs[2])[angle];
      y = y * cosine + (at < HEAD_DIM / 2 ? -other : other) * sine;
    }
    write_number((u16*)tile.output + (long long)row * tile.width + tile.column + at, narrow(y));
  }
"""
