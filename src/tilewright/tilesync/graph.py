"""A graph of stages: which tensors there are, which tiles compute them, and which regions each tile reads and writes.

    graph = Graph(
        inputs={"x": (m, k), "up": (n, k), "down": (k, n)},
        stages=[
            Gemm("h", "x", "up", (m, n, k), tile=(64, 128), activation="gelu"),
            Gemm("y", "h", "down", (m, k, n), tile=(64, 128), sync={"h": RowSync()}),
        ],
        outputs=["y"],
    )

Tensors are known by name. A stage is a grid of tiles, and says what each tile reads and writes as boxes of tensors:
from these follow the edges between stages, what a policy has to wait for, and all that `check` proves.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tilewright.errors import UserError

if TYPE_CHECKING:
    from tilewright.tilesync.policies import Policy

Tile = tuple[int, ...]
Box = tuple[tuple[int, int], ...]  # of each dimension: the first index, and the one behind the last
Order = str | Sequence[Tile] | Callable[[Tile], Sequence[Tile]]

DATA, WIDE = "data", "float32"  # dtypes: that of the graph's data, and that of sums which are not rounded yet


class GraphError(UserError):
    """A graph that cannot run, or a policy that is wrong; the message names the first wrong tile."""


class Region(NamedTuple):
    """A box of a tensor."""

    tensor: str
    box: Box


class Spec(NamedTuple):
    """A tensor that a stage writes."""

    shape: tuple[int, ...]
    dtype: str = DATA


class Work(NamedTuple):
    """What a tile costs. Weights depend on no other stage: they can be fetched before the tile waits.

    A tile may have several groups of columns, after each of which the block's warps meet while they read on.
    """

    flops: float
    bytes: float  # through memory, weights among them
    weight_bytes: float = 0.0
    groups: int = 1


class Stage:
    """Tiles of one kind. A subclass sets the attributes in its `__init__` and says what each tile reads and writes.

    Args:
        outputs: the tensors that it writes; the first gives the stage its name.
        inputs: names of the tensors that it reads.
        grid: how many tiles there are along each axis.
        order: in which order its tiles begin: ``"rows"`` (the last axis fastest), ``"columns"`` (the first axis
            fastest), a list of tiles, or a function of the grid that returns one.
        sync: the policy of each input that another stage produces; one that is left out is derived.
    """

    shared_bytes = 0  # of shared memory that a tile takes
    integers: tuple[str, ...] = ()  # inputs of int32
    floats: tuple[str, ...] = ()  # inputs of float32, whatever dtype the data has
    packed: Mapping[str, torch.dtype] = MappingProxyType({})  # inputs that are parts of a packed weight
    whole: Mapping[str, tuple[int, ...]] = MappingProxyType({})  # shapes of inputs of which no part would do
    early: tuple[str, ...] = ()  # inputs that a tile fetches before it waits, if no stage writes them

    def __init__(
        self, outputs: Mapping[str, Spec], inputs: Sequence[str], grid: Tile, order: Order = "rows",
        sync: Mapping[str, Policy] | None = None,
    ) -> None:  # fmt: skip
        self.outputs, self.inputs, self.grid = dict(outputs), tuple(inputs), tuple(grid)
        self.order, self.sync = order, dict(sync or {})
        self.name = next(iter(self.outputs))
        if any(size < 1 for size in self.grid):
            raise GraphError(
                f"Stage {self.name}: the grid {self.grid} has no tiles; give sizes and tiles of at least 1."
            )

    def reads(self, tile: Tile) -> Iterable[Region]:
        """Return what a tile reads of its inputs; of those that no stage produces it may be left out."""
        raise NotImplementedError

    def writes(self, tile: Tile) -> Iterable[Region]:
        """Return what a tile writes."""
        raise NotImplementedError

    def compute(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Compute the whole stage in plain PyTorch: the definition."""
        raise NotImplementedError

    def work(self, tile: Tile) -> Work:
        """Return what a tile costs."""
        written = sum(volume(region.box) for region in self.writes(tile))
        return Work(written, 2 * (written + sum(volume(region.box) for region in self.reads(tile))))

    @functools.cached_property
    def tiles(self) -> tuple[Tile, ...]:
        """All tiles, in the stage's order."""
        rows = list(itertools.product(*map(range, self.grid)))
        if self.order == "rows":
            return tuple(rows)
        if self.order == "columns":
            return tuple(sorted(rows, key=lambda tile: tile[::-1]))
        if isinstance(self.order, str):
            raise GraphError(f'Stage {self.name}: order {self.order!r} is unknown; write "rows" or "columns".')
        given = tuple(map(tuple, self.order(self.grid) if callable(self.order) else self.order))
        if sorted(given) != rows:
            wrong = next((tile for tile in given if tile not in set(rows) or given.count(tile) > 1), None)
            missing = next((tile for tile in rows if tile not in set(given)), None)
            why = f"has tile {wrong} twice or outside" if wrong is not None else f"leaves out tile {missing}"
            raise GraphError(f"Stage {self.name}: its order {why} of the grid {self.grid}; list each tile once.")
        return given

    def boxes(self, tensor: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the boxes written of a tensor, ``(boxes, dimensions, 2)``, and the number of each one's tile."""
        if tensor not in self._boxes:
            found = [
                (number, region.box)
                for number, tile in enumerate(self.tiles)
                for region in self.writes(tile)
                if region.tensor == tensor
            ]
            boxes = np.array([box for _, box in found], dtype=np.int64)
            self._boxes[tensor] = boxes, np.array([number for number, _ in found], dtype=np.int64)
        return self._boxes[tensor]

    @functools.cached_property
    def _boxes(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        return {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, grid={self.grid})"


@dataclass(frozen=True, eq=False)
class Graph:
    """Stages, the tensors they are given, and those they are to return.

    A tensor that is an input and that a stage writes, too, is changed in place, as a KV cache is.
    """

    inputs: Mapping[str, tuple[int, ...]]
    stages: Sequence[Stage]
    outputs: Sequence[str]
    name: str = "graph"

    @functools.cached_property
    def producers(self) -> dict[str, list[Stage]]:
        """The stages that write each tensor."""
        found: dict[str, list[Stage]] = {}
        for stage in self.stages:
            for tensor in stage.outputs:
                found.setdefault(tensor, []).append(stage)
        return found

    @functools.cached_property
    def specs(self) -> dict[str, Spec]:
        """Shape and dtype of every tensor that a stage writes."""
        return {name: spec for stage in self.stages for name, spec in stage.outputs.items()}

    @functools.cached_property
    def integers(self) -> frozenset[str]:
        """The inputs of int32."""
        return frozenset(name for stage in self.stages for name in stage.integers)

    @functools.cached_property
    def floats(self) -> frozenset[str]:
        """The inputs of float32, whatever dtype the data has."""
        return frozenset(name for stage in self.stages for name in stage.floats)

    @functools.cached_property
    def packed(self) -> dict[str, torch.dtype]:
        """The inputs that are parts of packed weights, and their dtypes."""
        return {name: dtype for stage in self.stages for name, dtype in stage.packed.items()}

    def shape(self, tensor: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self.inputs[tensor]) if tensor in self.inputs else self.specs[tensor].shape

    @functools.cached_property
    def ordered(self) -> tuple[Stage, ...]:
        """The stages, each behind those that it reads from; as they were given where that leaves a choice."""
        left, done = list(self.stages), set[int]()
        ordered: list[Stage] = []
        while left:
            for stage in left:
                if all(id(other) in done for other in self.feeders(stage)):
                    break
            else:
                raise GraphError(f"Stages {self._cycle(left)} wait for each other in a cycle; break it.")
            left.remove(stage)
            done.add(id(stage))
            ordered.append(stage)
        return tuple(ordered)

    def feeders(self, stage: Stage) -> Iterator[Stage]:
        """Yield the stages that a stage reads from."""
        for tensor in stage.inputs:
            yield from (other for other in self.producers.get(tensor, ()) if other is not stage)

    def _cycle(self, left: list[Stage]) -> str:
        path = [left[0]]
        while True:
            waiting = next(other for other in self.feeders(path[-1]) if other in left)
            if waiting in path:
                return " -> ".join(stage.name for stage in reversed([*path[path.index(waiting) :], waiting]))
            path.append(waiting)


def volume(box: Box) -> int:
    """Return how many numbers a box has.

    >>> volume(((0, 2), (3, 6)))
    6
    """
    return math.prod(stop - start for start, stop in box)


def overlaps(boxes: np.ndarray, box: Box) -> tuple[np.ndarray, np.ndarray]:
    """Return which of the boxes share something with a box, and how many numbers each of these shares."""
    wanted = np.asarray(box)
    sizes = np.minimum(boxes[:, :, 1], wanted[:, 1]) - np.maximum(boxes[:, :, 0], wanted[:, 0])
    found = np.flatnonzero((sizes > 0).all(1))
    return found, sizes[found].prod(1)


def span(index: int, size: int, most: int) -> tuple[int, int]:
    """Return where a tile of a size begins and ends along an axis.

    >>> span(2, 64, 150)
    (128, 150)
    """
    return index * size, min((index + 1) * size, most)
