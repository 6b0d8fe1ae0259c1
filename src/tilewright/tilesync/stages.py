"""Stages that exist: what their tiles read and write, and their definition in plain PyTorch.

Matrices lie as PyTorch has them: x is ``(rows, inner)`` and a weight ``(columns, inner)``. A stage computes in float32
(float64 for float64) and rounds once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.tilesync.graph import DATA, WIDE, GraphError, Order, Region, Spec, Stage, Tile, Work, span
from tilewright.tilesync.policies import Policy

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
}
L2_SHARE = 0.3  # of memory's time for a byte that is read again and again, and so lies in L2
Sync = Mapping[str, Policy] | None


def widen(x: Tensor) -> Tensor:
    """Convert to what stages compute in."""
    return x if x.dtype == torch.float64 else x.float()


def _tiles(sizes: Sequence[int], tile: Sequence[int]) -> Tile:
    return tuple(-(-size // step) for size, step in zip(sizes, tile, strict=True))


def _check_activation(stage: str, name: str) -> str:
    if name not in ACTIVATIONS:
        raise GraphError(f"Stage {stage}: activation {name!r} is unknown; take one of {', '.join(ACTIVATIONS)}.")
    return name


class Gemm(Stage):
    """``activation(x @ weight^T + bias) * up + residual`` by tiles of rows and columns.

    Gated, the weight is two, the gate's and the other's, or one with twice as many rows, those of the gate first:
    ``activation(x @ gate^T) * (x @ up^T)``. With
    splits, tiles along a first axis sum a part of the inner dimension each, and the output is ``(splits, rows,
    columns)`` in float32, for a `Reduction` to add up.
    """

    def __init__(
        self, output: str, x: str, weight: str | tuple[str, str], sizes: tuple[int, int, int], *, tile: tuple[int, int],
        activation: str = "none", gated: bool = False, bias: str | None = None, residual: str | None = None,
        splits: int = 1, order: Order = "rows", sync: Sync = None,
    ) -> None:  # fmt: skip
        rows, columns, _ = self.sizes = sizes
        self.tile, self.splits, self.gated = tile, splits, gated
        self.activation = _check_activation(output, activation)
        self.bias, self.residual = bias, residual
        if splits > 1 and (gated or bias or residual or activation != "none"):
            raise GraphError(f"Stage {output}: what follows a split sum is for the Reduction that adds it up.")
        if gated and bias:
            raise GraphError(f"Stage {output}: a gated matmul takes no bias.")
        grid = _tiles((rows, columns), tile)
        spec = Spec((rows, columns)) if splits == 1 else Spec((splits, rows, columns), WIDE)
        self.x, self.second = x, weight[1] if isinstance(weight, tuple) else None
        self.weight = weight[0] if isinstance(weight, tuple) else weight
        if self.second and not gated:
            raise GraphError(f"Stage {output}: two weights are those of a gated matmul.")
        inputs = [x, *filter(None, (self.weight, self.second, bias, residual))]
        super().__init__({output: spec}, inputs, grid if splits == 1 else (splits, *grid), order, sync)

    def part(self, split: int) -> tuple[int, int]:
        """Return where a split begins and ends along the inner dimension, in steps of 64."""
        steps, inner = -(-self.sizes[2] // 64), self.sizes[2]
        return min(inner, steps * split // self.splits * 64), min(inner, steps * (split + 1) // self.splits * 64)

    def _place(self, tile: Tile) -> tuple[int, tuple[int, int], tuple[int, int]]:
        split, row, column = (0, *tile) if self.splits == 1 else tile
        return split, span(row, self.tile[0], self.sizes[0]), span(column, self.tile[1], self.sizes[1])

    def reads(self, tile: Tile) -> Iterable[Region]:
        split, rows, columns = self._place(tile)
        yield Region(self.x, (rows, self.part(split)))
        yield Region(self.weight, (columns, self.part(split)))
        if self.gated:
            count = 0 if self.second else self.sizes[1]
            yield Region(self.second or self.weight, ((columns[0] + count, columns[1] + count), self.part(split)))
        if self.bias:
            yield Region(self.bias, (columns,))
        if self.residual:
            yield Region(self.residual, (rows, columns))

    def writes(self, tile: Tile) -> Iterable[Region]:
        split, rows, columns = self._place(tile)
        yield Region(self.name, (rows, columns) if self.splits == 1 else ((split, split + 1), rows, columns))

    def compute(self, *inputs: Tensor) -> Tensor:
        given = dict(zip(self.inputs, inputs, strict=True))
        x, weight = widen(given[self.x]), widen(given[self.weight])
        if self.second:
            weight = torch.cat((weight, widen(given[self.second])))
        if self.splits > 1:
            parts = [slice(*self.part(split)) for split in range(self.splits)]
            return torch.stack([x[:, part] @ weight[:, part].t() for part in parts])
        return _finish(self, x @ weight.t(), given).to(given[self.x].dtype)

    def work(self, tile: Tile) -> Work:
        split, rows, columns = self._place(tile)
        inner = self.part(split)[1] - self.part(split)[0]
        height, width = rows[1] - rows[0], (columns[1] - columns[0]) * (1 + self.gated)
        weight_bytes = self.weight_bytes(width * inner)
        written = height * (columns[1] - columns[0]) * (2 if self.splits == 1 else 4)
        x_bytes = L2_SHARE * 2.0 * height * inner
        return Work(2.0 * self.tile[0] * width * inner, weight_bytes + x_bytes + written, weight_bytes)

    def weight_bytes(self, numbers: int) -> float:
        """Return the bytes of so many of the weight's numbers."""
        return 2.0 * numbers

    @property
    def shared_bytes(self) -> int:  # type: ignore[override]
        """Three stages of 64 of the inner dimension, for both operands."""
        return 3 * 64 * 2 * (self.tile[0] + self.tile[1] * (1 + self.gated))


class QuantizedGemm(Gemm):
    """A `Gemm` whose weight is packed, as `ops.int8_linear`, `fp8_linear` and `int4_linear` take it."""

    def __init__(
        self, output: str, x: str, weight: str, sizes: tuple[int, int, int], *, scale: str, zero: str | None = None,
        bits: int = 8, **options: object,
    ) -> None:  # fmt: skip
        super().__init__(output, x, weight, sizes, **options)  # type: ignore[arg-type]
        self.scale, self.zero, self.bits = scale, zero, bits
        self.inputs = (*self.inputs, *filter(None, (scale, zero)))

    def reads(self, tile: Tile) -> Iterable[Region]:
        return (region for region in super().reads(tile) if region.tensor != self.weight)

    def compute(self, *inputs: Tensor) -> Tensor:
        from tilewright.ops.quantized_linear.reference import dequantize

        given = dict(zip(self.inputs, inputs, strict=True))
        compute = torch.float64 if given[self.x].dtype == torch.float64 else torch.float32
        scale, zero = given.pop(self.scale), given.pop(self.zero) if self.zero else None
        given[self.weight] = dequantize(given[self.weight], scale, zero, compute)
        names, self.inputs = self.inputs, tuple(given)
        try:
            return super().compute(*given.values())
        finally:
            self.inputs = names

    def weight_bytes(self, numbers: int) -> float:
        return numbers * self.bits / 8


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
            _check_activation(output, function)
        super().__init__({output: Spec(sizes)}, inputs, _tiles(sizes, tile), order, sync)

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
        self.activation = _check_activation(output, activation)
        self.bias, self.residual, self.like = bias, residual, like
        inputs = dict.fromkeys([sums, *filter(None, (bias, residual)), like])
        super().__init__({output: Spec(sizes)}, tuple(inputs), _tiles(sizes, tile), order, sync)

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


class Attention(Stage):
    """Softmax attention of ``(rows, heads * head_dim)`` queries over the keys and values of a context.

    A tile is some rows of one head. Where queries, keys and values are columns of one tensor, name it three times and
    give the `offsets` of their first columns. Causal, the last row sees the whole context.

    While decoding, k and v are a cache of which the first `length` rows are filled, a number on the device, and the
    keys and values of the rows themselves are columns of q's tensor, from `new` on: a row sees the cache, and the rows
    up to itself.
    """

    def __init__(
        self, output: str, q: str, k: str, v: str, *, rows: int, context: int, heads: int, head_dim: int,
        key_heads: int | None = None, offsets: tuple[int, int, int] = (0, 0, 0), causal: bool = False,
        length: str | None = None, new: tuple[int, int] = (0, 0), scale: float | None = None, tile: int = 64,
        order: Order = "rows", sync: Sync = None,
    ) -> None:  # fmt: skip
        self.names, self.offsets, self.causal, self.tile = (q, k, v), offsets, causal, tile
        self.rows, self.context, self.heads, self.head_dim = rows, context, heads, head_dim
        self.key_heads, self.scale = key_heads or heads, scale or head_dim**-0.5
        self.length, self.new, self.integers = length, new, (length,) if length else ()
        if heads % self.key_heads:
            raise GraphError(f"Stage {output}: {heads} heads cannot share {self.key_heads} key heads; take a divisor.")
        grid = -(-rows // tile), heads
        super().__init__(
            {output: Spec((rows, heads * head_dim))},
            tuple(dict.fromkeys(filter(None, (q, k, v, length)))),
            grid,
            order,
            sync,
        )

    def _columns(self, which: int, head: int) -> tuple[int, int]:
        start = self.offsets[which] + head * self.head_dim
        return start, start + self.head_dim

    def reads(self, tile: Tile) -> Iterable[Region]:
        rows, shared = span(tile[0], self.tile, self.rows), tile[1] // (self.heads // self.key_heads)
        seen = min(self.context, rows[1] + self.context - self.rows) if self.causal else self.context
        yield Region(self.names[0], (rows, self._columns(0, tile[1])))
        for first in self.new if self.length else ():
            start = first + shared * self.head_dim
            yield Region(self.names[0], ((0, rows[1]), (start, start + self.head_dim)))
        for which in (1, 2):
            yield Region(self.names[which], ((0, seen), self._columns(which, shared)))

    def writes(self, tile: Tile) -> Iterable[Region]:
        head = tile[1] * self.head_dim
        yield Region(self.name, (span(tile[0], self.tile, self.rows), (head, head + self.head_dim)))

    def compute(self, *inputs: Tensor) -> Tensor:
        given = dict(zip(self.inputs, inputs, strict=True))
        q, k, v = (
            self._heads(given[name], start, count)
            for name, start, count in zip(
                self.names, self.offsets, (self.heads, self.key_heads, self.key_heads), strict=True
            )
        )
        at, row = torch.arange(self.context, device=q.device), torch.arange(self.rows, device=q.device)
        hidden = at > row[:, None] + self.context - self.rows if self.causal else at < row[:, None] * 0
        if self.length:
            fresh = [self._heads(given[self.names[0]], start, self.key_heads) for start in self.new]
            k, v = (torch.cat(pair, 1) for pair in zip((k, v), fresh, strict=True))
            hidden = torch.cat(((at >= given[self.length]).expand(self.rows, -1), row > row[:, None]), 1)
            v = v.masked_fill(hidden.all(0)[:, None], 0.0)  # what the cache holds there may be no number
        share = self.heads // self.key_heads
        scores = q @ k.repeat_interleave(share, 0).transpose(1, 2) * self.scale
        y = scores.masked_fill(hidden, -math.inf).softmax(-1) @ v.repeat_interleave(share, 0)
        return y.transpose(0, 1).flatten(1).to(inputs[0].dtype)

    def _heads(self, x: Tensor, start: int, count: int) -> Tensor:
        columns = widen(x)[:, start : start + count * self.head_dim]
        return columns.unflatten(1, (count, self.head_dim)).transpose(0, 1)

    def work(self, tile: Tile) -> Work:
        rows = span(tile[0], self.tile, self.rows)
        flops = 4.0 * (rows[1] - rows[0]) * self.context * self.head_dim
        return Work(flops, 2.0 * (2 * (rows[1] - rows[0]) + 2 * self.context) * self.head_dim)


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
        self.activation = _check_activation(output, activation)
        self.pixels = images * height * width
        grid = _tiles((self.pixels, channels[1]), tile)
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
        return Work(
            2.0 * self.tile[0] * self.tile[1] * inner,
            weight_bytes + 2.0 * self.tile[0] * self.channels[0],
            weight_bytes,
        )


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
        super().__init__({output: Spec(sizes, dtype)}, inputs, _tiles(sizes, tile), order, sync)

    def reads(self, tile: Tile) -> Iterable[Region]:
        return self._reads(tile)

    def writes(self, tile: Tile) -> Iterable[Region]:
        yield Region(self.name, tuple(span(*each) for each in zip(tile, self.tile, self.sizes, strict=True)))

    def compute(self, *inputs: Tensor) -> Tensor:
        return self._compute(*inputs)


class Rope(Custom):
    """Rotates the first `rotated` columns, heads of one size, by angles of which cosine and sine are inputs.

    A head's halves are a pair, as in Hugging Face's models; the other columns are taken as they are. A tile is some
    rows of one head.
    """

    def __init__(
        self, output: str, x: str, cos: str, sin: str, sizes: tuple[int, int], *, head_dim: int, rotated: int,
        tile: int = 64, order: Order = "rows", sync: Sync = None,
    ) -> None:  # fmt: skip
        self.head_dim, self.rotated = head_dim, rotated
        source = _ROPE.replace("HEAD_DIM", str(head_dim)).replace("ROTATED", str(rotated))
        super().__init__(output, [x, cos, sin], sizes, tile=(tile, head_dim), reads=self._read, compute=self._rotate,
                         source=source, order=order, sync=sync)  # fmt: skip

    def _read(self, tile: Tile) -> Iterable[Region]:
        return (region._replace(tensor=self.inputs[0]) for region in self.writes(tile))

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = widen(x)[:, : self.rotated].unflatten(1, (-1, self.head_dim))
        first, second = heads.chunk(2, -1)
        turned = heads * widen(cos)[:, None] + torch.cat((-second, first), -1) * widen(sin)[:, None]
        return torch.cat((turned.flatten(1).to(x.dtype), x[:, self.rotated :]), 1)


_ROPE = """
  for (int i = threadIdx.x; i < tile.rows * HEAD_DIM; i += THREADS) {
    const int row = tile.row + i / HEAD_DIM, at = i % HEAD_DIM;
    const u16* x = (const u16*)tile.inputs[0] + (long long)row * tile.width + tile.column;
    float y = widen(read_number(x + at));
    if (tile.column < ROTATED) {
      const float other = widen(read_number(x + (at + HEAD_DIM / 2) % HEAD_DIM));
      const float cosine = widen(((const u16*)tile.inputs[1])[row * HEAD_DIM + at]);
      const float sine = widen(((const u16*)tile.inputs[2])[row * HEAD_DIM + at]);
      y = y * cosine + (at < HEAD_DIM / 2 ? -other : other) * sine;
    }
    write_number((u16*)tile.output + (long long)row * tile.width + tile.column + at, narrow(y));
  }
"""
