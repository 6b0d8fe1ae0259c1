"""Policies: which semaphore a producer's tile posts, and what a consumer's tile waits for.

An `Edge` is one producer, one tensor and one consumer. A policy is asked about its tiles: `semaphore` names the one
that a tile of the producer posts, `producers` says which of the producer's tiles a tile of the consumer reads, and from
the two follows what is waited for. A policy of your own replaces any of the four methods; `check` refuses one that is
wrong and names the tile.

    class DiagonalSync(Policy):
        def semaphore(self, edge, tile):
            return tile[0] + tile[1]
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from tilewright.tilesync.graph import Box, GraphError, Stage, Tile, overlaps


@dataclass(frozen=True, eq=False)
class Edge:
    """A tensor, a stage that writes it, and one that reads it."""

    tensor: str
    producer: Stage
    consumer: Stage

    def read_by(self, tile: Tile) -> tuple[Tile, ...]:
        """Return the producer's tiles that write something which a tile of the consumer reads."""
        return self._sets[self._set_of[tile]]

    @functools.cached_property
    def _reads(self) -> tuple[dict[Tile, int], list[tuple[Tile, ...]]]:
        """The number of the set of tiles that each tile of the consumer reads, and these sets."""
        boxes, owners = self.producer.boxes(self.tensor)
        set_of: dict[Tile, int] = {}
        known: dict[tuple[Box, ...], int] = {}
        sets: list[tuple[Tile, ...]] = []
        for tile in self.consumer.tiles:
            read = tuple(region.box for region in self.consumer.reads(tile) if region.tensor == self.tensor)
            if read not in known:
                found = {int(owner) for box in read for owner in owners[overlaps(boxes, box)[0]]}
                known[read] = len(sets)
                sets.append(tuple(self.producer.tiles[number] for number in sorted(found)))
            set_of[tile] = known[read]
        return set_of, sets

    @property
    def _set_of(self) -> dict[Tile, int]:
        return self._reads[0]

    @property
    def _sets(self) -> list[tuple[Tile, ...]]:
        return self._reads[1]

    def names_read(self, policy: Policy, tile: Tile) -> tuple[Hashable, ...]:
        """Return the semaphores of a policy that stand for what a tile of the consumer reads."""
        key = id(policy), self._set_of[tile]
        if key not in self._names:
            names = dict.fromkeys(policy.semaphore(self, other) for other in self._sets[key[1]])
            self._names[key] = policy, tuple(names)
        return self._names[key][1]

    @functools.cached_property
    def _names(self) -> dict[tuple[int, int], tuple[Policy, tuple[Hashable, ...]]]:
        return {}

    def totals(self, policy: Policy) -> dict[Hashable, int]:
        """Return what all tiles of the producer together add to each semaphore of a policy."""
        if id(policy) not in self._totals:
            totals: dict[Hashable, int] = {}
            for tile in self.producer.tiles:
                name = policy.semaphore(self, tile)
                totals[name] = totals.get(name, 0) + policy.posts(self, tile)
            self._totals[id(policy)] = policy, totals
        return self._totals[id(policy)][1]

    @functools.cached_property
    def _totals(self) -> dict[int, tuple[Policy, dict[Hashable, int]]]:
        return {}

    def readers(self) -> dict[Tile, frozenset[int]]:
        """Return for each tile of the producer which sets of tiles that are read together have it."""
        readers: dict[Tile, set[int]] = {tile: set() for tile in self.producer.tiles}
        for number, tiles in enumerate(self._sets):
            for tile in tiles:
                readers[tile].add(number)
        return {tile: frozenset(sets) for tile, sets in readers.items()}


class Policy:
    """What is waited for between two stages. A subclass says at least which semaphore a tile posts."""

    def producers(self, edge: Edge, tile: Tile) -> Iterable[Tile]:
        """Return the producer's tiles that a tile of the consumer reads: those of its declared regions."""
        return edge.read_by(tile)

    def semaphore(self, edge: Edge, tile: Tile) -> Hashable:
        """Name the semaphore that a tile of the producer posts."""
        raise NotImplementedError

    def posts(self, edge: Edge, tile: Tile) -> int:
        """Return what a tile of the producer adds to its semaphore; 0 for nothing."""
        return 1

    def waits(self, edge: Edge, tile: Tile) -> Iterable[tuple[Hashable, int]]:
        """Return the semaphores that a tile of the consumer waits for, and the value of each."""
        if type(self).producers is Policy.producers:
            needed: Iterable[Hashable] = edge.names_read(self, tile)
        else:
            needed = dict.fromkeys(self.semaphore(edge, other) for other in self.producers(edge, tile))
        return [(name, self.posted(edge, name)) for name in needed]

    def posted(self, edge: Edge, name: Hashable) -> int:
        """Return what all tiles of the producer together add to a semaphore."""
        return edge.totals(self).get(name, 0)


@dataclass(frozen=True)
class StageSync(Policy):
    """One semaphore: a reader waits for the whole producer, as a kernel does for the one before it."""

    def semaphore(self, edge: Edge, tile: Tile) -> Hashable:
        return 0


@dataclass(frozen=True)
class RowSync(Policy):
    """A semaphore a row of tiles: a reader of a row waits for all its columns."""

    def semaphore(self, edge: Edge, tile: Tile) -> Hashable:
        return tile[0]


@dataclass(frozen=True)
class TileSync(Policy):
    """A semaphore a tile: a reader waits for each tile that it reads, and no other."""

    def semaphore(self, edge: Edge, tile: Tile) -> Hashable:
        return tile


@dataclass(frozen=True)
class StridedSync(Policy):
    """Tiles of a row that are `stride` columns apart share a semaphore: gate and up, or query, key and value."""

    stride: int

    def semaphore(self, edge: Edge, tile: Tile) -> Hashable:
        return *tile[:-1], tile[-1] % self.stride


@dataclass(frozen=True)
class GroupSync(Policy):
    """So many tiles of a row, one after the other, share a semaphore: the columns of a head, or of several."""

    size: int

    def semaphore(self, edge: Edge, tile: Tile) -> Hashable:
        return *tile[:-1], tile[-1] // self.size


@dataclass(frozen=True)
class Conv2DSync(Policy):
    """A semaphore a tile of pixels, of all its channels: a reader waits for its pixels and for those of its halo."""

    def semaphore(self, edge: Edge, tile: Tile) -> Hashable:
        return tile[0]


@dataclass(frozen=True)
class SplitKSync(Policy):
    """The splits of a tile, which are the grid's first axis, share a semaphore: a reader waits for all of them."""

    def semaphore(self, edge: Edge, tile: Tile) -> Hashable:
        return tile[1:]


@dataclass(frozen=True)
class NoSync(Policy):
    """No semaphore: what is waited for elsewhere has to imply that the tiles read are finished."""

    def posts(self, edge: Edge, tile: Tile) -> int:
        return 0

    def waits(self, edge: Edge, tile: Tile) -> Iterable[tuple[Hashable, int]]:
        return ()


@dataclass(frozen=True, eq=False)
class DerivedSync(Policy):
    """A semaphore for each set of tiles that the same tiles read."""

    groups: dict[Tile, int]

    def semaphore(self, edge: Edge, tile: Tile) -> Hashable:
        return self.groups[tile]


def derive_policy(edge: Edge) -> Policy:
    """Return the finest right policy of an edge, and of these the one with the fewest semaphores.

    Finest means that no tile waits for one that it does not read. Two tiles can then share a semaphore only if the same
    tiles read both, and must, if there are to be few. Where that is a policy with a name, it is returned.

    >>> from tilewright.tilesync import Gemm, Graph
    >>> up = Gemm("h", "x", "w", (128, 512, 256), tile=(64, 128))
    >>> down = Gemm("y", "h", "v", (128, 256, 512), tile=(64, 128))
    >>> derive_policy(Edge("h", up, down))
    RowSync()
    """
    readers = edge.readers()
    numbers: dict[frozenset[int], int] = {}
    groups = {tile: numbers.setdefault(readers[tile], len(numbers)) for tile in edge.producer.tiles}
    columns = edge.producer.grid[-1]
    named: list[Policy] = [
        StageSync(),
        RowSync(),
        SplitKSync() if len(edge.producer.grid) == 3 else TileSync(),
        TileSync(),
    ]
    named += [GroupSync(size) for size in range(2, columns) if columns % size == 0]
    named += [StridedSync(stride) for stride in range(2, columns) if columns % stride == 0]
    for policy in named:
        pairs = {(groups[tile], policy.semaphore(edge, tile)) for tile in groups}
        if len(pairs) == len(numbers) == len({name for _, name in pairs}):
            return policy
    return DerivedSync(groups)


def policy_of(edge: Edge) -> Policy:
    """Return the policy that the consumer declares, or the one derived."""
    policy = edge.consumer.sync.get(edge.tensor)
    if policy is None:
        return derive_policy(edge)
    if not isinstance(policy, Policy):
        raise GraphError(
            f"Stage {edge.consumer.name}: sync[{edge.tensor!r}] is {policy!r}; give a Policy, such as RowSync()."
        )
    return policy
