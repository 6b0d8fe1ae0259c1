"""What is proved about a graph before anything is launched, on the CPU alone; and the program that comes out of it.

A `Program` is the graph as a list of tiles with numbered semaphores: what a tile waits for, and what it posts. `check`
makes one and proves that

- every tensor read is an input or written by a stage, and the stages have no cycle;
- what tiles write lies within its tensor, does not overlap, and covers it;
- every wait can end: so much is posted, and by tiles that begin earlier;
- every region that a tile reads was finished by tiles that it waits for, or that those waited for.

Tiles begin in the program's order, and each waits for earlier ones only. So the first tile that is not finished can
always go on: the program cannot deadlock, whatever runs its tiles, if each runner takes them in that order.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tilewright.tilesync.graph import Graph, GraphError, Region, Stage, Tile, overlaps, volume
from tilewright.tilesync.policies import Edge, Policy, policy_of

SHARED_BYTES = 227 * 1024  # that a block may have on a Hopper


class Wait(NamedTuple):
    """A semaphore, by its number, and the value that it must have reached."""

    semaphore: int
    value: int


class Post(NamedTuple):
    """A semaphore, by its number, and what is added to it."""

    semaphore: int
    amount: int


@dataclass(frozen=True)
class Task:
    """A tile of a stage, what it waits for and what it posts."""

    stage: int  # its number among the program's
    tile: Tile
    waits: tuple[Wait, ...]
    posts: tuple[Post, ...]


@dataclass(frozen=True, eq=False)
class Program:
    """Tiles in the order in which they begin."""

    graph: Graph
    stages: tuple[Stage, ...]
    tasks: tuple[Task, ...]
    semaphores: tuple[str, ...]  # what each is called
    policies: dict[tuple[str, str, str], Policy]  # by tensor, producer and consumer

    def label(self, task: int) -> str:
        """Name a task as messages do.

        >>> from tilewright.tilesync import Gemm, Graph
        >>> stage = Gemm("y", "x", "w", (128, 256, 512), tile=(64, 128))
        >>> check(Graph({"x": (128, 512), "w": (256, 512)}, [stage], ["y"])).label(3)
        'tile (1, 1) of stage y'
        """
        return f"tile {self.tasks[task].tile} of stage {self.stages[self.tasks[task].stage].name}"

    def posters(self) -> list[list[int]]:
        """Return the tasks that post each semaphore."""
        found: list[list[int]] = [[] for _ in self.semaphores]
        for number, task in enumerate(self.tasks):
            for post in task.posts:
                found[post.semaphore].append(number)
        return found

    def needs(self) -> list[list[int]]:
        """Return the tasks that each task waits for."""
        posters = self.posters()
        return [[other for wait in task.waits for other in posters[wait.semaphore]] for task in self.tasks]


def check(
    graph: Graph, *, order: Sequence[tuple[str, Tile]] | None = None, shared_bytes: int = SHARED_BYTES
) -> Program:
    """Prove that a graph runs and computes what it says; return its program.

    Args:
        graph: the stages with their policies.
        order: the stage's name and the tile, for every tile, in the order in which they begin. Left out, one stage
            follows the other.
        shared_bytes: what a block may have of shared memory.

    Raises:
        GraphError: a sentence that names the first wrong tile.
    """
    program = lower(graph, order=order, shared_bytes=shared_bytes)
    _check_waits(program)
    _check_reads(program)
    return program


def lower(
    graph: Graph, *, order: Sequence[tuple[str, Tile]] | None = None, shared_bytes: int = SHARED_BYTES
) -> Program:
    """Make the program of a graph whose tensors and stages are right, whatever its policies are."""
    _check_names(graph)
    stages = graph.ordered
    for stage in stages:
        if stage.shared_bytes > shared_bytes:
            raise GraphError(
                f"Stage {stage.name}: a tile takes {stage.shared_bytes:,} bytes of shared memory, but a block has "
                f"{shared_bytes:,}; make the tile smaller."
            )
    for tensor, producers in graph.producers.items():
        _check_writes(graph, tensor, [stage for stage in stages if stage in producers])
    waits, posts, names, policies = _number_semaphores(graph, stages)
    at = {(stage.name, tile): number for number, stage in enumerate(stages) for tile in stage.tiles}
    begin = list(at) if order is None else [(name, tuple(tile)) for name, tile in order]
    if sorted(begin) != sorted(at):
        missing = next((f"tile {tile} of stage {name}" for name, tile in at if (name, tile) not in set(begin)), None)
        raise GraphError(
            f"The order {f'leaves out {missing}' if missing else 'has a tile twice'}; list each tile once."
        )
    tasks = tuple(
        Task(at[each], each[1], tuple(waits.get(each, ())), tuple(posts.get(each, ()))) for each in begin
    )  # fmt: skip
    return Program(graph, stages, tasks, tuple(names), policies)


def edges(graph: Graph) -> Iterator[Edge]:
    """Yield every edge of a graph, in the order of its stages."""
    for consumer in graph.ordered:
        for tensor in dict.fromkeys(consumer.inputs):
            for producer in graph.ordered:
                if tensor in producer.outputs and producer is not consumer:
                    yield Edge(tensor, producer, consumer)


_Key = tuple[str, Tile]


def _number_semaphores(
    graph: Graph, stages: Sequence[Stage]
) -> tuple[dict[_Key, list[Wait]], dict[_Key, list[Post]], list[str], dict[tuple[str, str, str], Policy]]:
    """Ask each policy; two edges of one producer that have equal policies share semaphores."""
    waits: dict[_Key, list[Wait]] = {}
    posts: dict[_Key, list[Post]] = {}
    numbers: dict[tuple[str, str, Policy], dict[Hashable, int]] = {}
    names: list[str] = []
    policies: dict[tuple[str, str, str], Policy] = {}
    for edge in edges(graph):
        policy = policies[edge.tensor, edge.producer.name, edge.consumer.name] = policy_of(edge)
        key = edge.tensor, edge.producer.name, policy
        if key not in numbers:
            mine = numbers[key] = {}
            for tile in edge.producer.tiles:
                if (amount := policy.posts(edge, tile)) != 0:
                    name = policy.semaphore(edge, tile)
                    if name not in mine:
                        mine[name] = len(names)
                        names.append(f"{name} of {type(policy).__name__} on {edge.tensor}")
                    posts.setdefault((edge.producer.name, tile), []).append(Post(mine[name], amount))
        for tile in edge.consumer.tiles:
            for name, value in policy.waits(edge, tile):
                if name not in numbers[key]:
                    raise GraphError(
                        f"Tile {tile} of stage {edge.consumer.name} waits for semaphore {name} of {edge.tensor}, which "
                        f"no tile of stage {edge.producer.name} posts; {type(policy).__name__} is wrong there."
                    )
                waits.setdefault((edge.consumer.name, tile), []).append(Wait(numbers[key][name], value))
    return waits, posts, names, policies


def _check_names(graph: Graph) -> None:
    names = [stage.name for stage in graph.stages]
    if len(set(names)) < len(names):
        raise GraphError(f"Two stages are called {max(names, key=names.count)}; give each a name of its own.")
    for stage in graph.stages:
        for tensor in stage.inputs:
            if tensor not in graph.inputs and tensor not in graph.producers:
                raise GraphError(
                    f"Stage {stage.name} reads {tensor}, which nobody feeds: no stage writes it, and it is no input."
                )
            if tensor in stage.outputs and tensor not in graph.inputs:
                raise GraphError(f"Stages {stage.name} -> {stage.name} wait for each other in a cycle; break it.")
        for tensor in stage.sync:
            if tensor not in stage.inputs or tensor not in graph.producers:
                raise GraphError(f"Stage {stage.name}: sync names {tensor}, which is none of its inputs from a stage.")
        for tensor, shape in stage.whole.items():
            if graph.shape(tensor) != shape:
                raise GraphError(
                    f"Stage {stage.name} reads {tensor} as {shape}, but it is {graph.shape(tensor)}; give both stages "
                    "the same heads and splits."
                )
        for tensor, spec in stage.outputs.items():
            if tuple(graph.shape(tensor)) != tuple(spec.shape):
                raise GraphError(
                    f"Stage {stage.name} writes {tensor} as {tuple(spec.shape)}, but it is {graph.shape(tensor)}."
                )
    for tensor in graph.outputs:
        if tensor not in graph.producers:
            raise GraphError(f"The output {tensor} is written by no stage.")
    read = {tensor for stage in graph.stages for tensor in stage.inputs} | set(graph.outputs)
    for stage in graph.stages:
        if not read & set(stage.outputs) and not any(tensor in graph.inputs for tensor in stage.outputs):
            raise GraphError(f"Nobody reads what stage {stage.name} writes; make it an output, or leave it out.")


def _check_writes(graph: Graph, tensor: str, producers: Sequence[Stage]) -> None:
    """Every number of a tensor is written once; of one that is also an input, at most once."""
    shape = np.array(graph.shape(tensor))
    every, owners = [], []
    for stage in producers:
        boxes, tiles = stage.boxes(tensor)
        for box, tile in zip(boxes, tiles, strict=True):
            if (
                len(box) != len(shape)
                or (box[:, 0] < 0).any()
                or (box[:, 1] > shape).any()
                or (box[:, 0] >= box[:, 1]).any()
            ):
                raise GraphError(
                    f"Tile {stage.tiles[tile]} of stage {stage.name} writes {_say(box)} of {tensor}, which has the "
                    f"shape {tuple(map(int, shape))}."
                )
        every.append(boxes)
        owners += [(stage, stage.tiles[tile]) for tile in tiles]
    boxes = np.concatenate(every)
    if pair := _overlapping(boxes):
        (other, before), (stage, tile) = (owners[number] for number in pair)
        raise GraphError(
            f"Tile {tile} of stage {stage.name} writes part of {tensor} that tile {before} of stage {other.name} "
            "writes, too; every number has one writer."
        )
    if tensor not in graph.inputs and sum(volume(box) for box in boxes.tolist()) < shape.prod():
        raise GraphError(f"Stage {producers[-1].name}: some of {tensor} is written by no tile.")


def _overlapping(boxes: np.ndarray) -> list[int]:
    """Find two boxes that overlap, the first one first; empty where there are none.

    A box is compared with those alone that begin near it, along the dimension that has the most beginnings.
    """
    across = max(range(boxes.shape[1]), key=lambda dimension: len(np.unique(boxes[:, dimension, 0])), default=0)
    order = np.argsort(boxes[:, across, 0], kind="stable")
    starts, longest = boxes[order, across, 0], (boxes[:, across, 1] - boxes[:, across, 0]).max()
    near = np.searchsorted(starts, starts - longest, side="right")
    for number in range(1, len(boxes)):
        found, _ = overlaps(boxes[order[near[number] : number]], boxes[order[number]])
        if len(found):
            return sorted((int(order[near[number] + found[0]]), int(order[number])))
    return []


def _say(box: np.ndarray) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box.tolist()) + "]"


def _check_waits(program: Program) -> None:
    """Every wait ends: so much is posted, by tasks that begin earlier."""
    totals, last = [0] * len(program.semaphores), [-1] * len(program.semaphores)
    for number, task in enumerate(program.tasks):
        for post in task.posts:
            if post.amount < 1:
                raise GraphError(
                    f"{start(program, number)} adds {post.amount} to a semaphore, which can only grow; add 1."
                )
            totals[post.semaphore] += post.amount
            last[post.semaphore] = number
    for number, task in enumerate(program.tasks):
        for wait in task.waits:
            called = f"semaphore {program.semaphores[wait.semaphore]}"
            if wait.value > totals[wait.semaphore]:
                raise GraphError(
                    f"{start(program, number)} waits for {wait.value} at {called}, but all posts add up to "
                    f"{totals[wait.semaphore]}: it would never begin."
                )
            if wait.value < 1:
                raise GraphError(
                    f"{start(program, number)} waits for {wait.value} at {called}, which is no wait; use NoSync."
                )
            if last[wait.semaphore] >= number:
                raise GraphError(
                    f"{start(program, number)} waits for {program.label(last[wait.semaphore])}, which begins no "
                    "earlier: the order is not topological."
                )


def _check_reads(program: Program) -> None:
    """What a task reads is finished when it begins: by the tasks it waits for, and by those that they waited for."""
    totals = [0] * len(program.semaphores)
    done_by = [0] * len(program.semaphores)  # as bits: tasks that are finished where a semaphore has its full value
    writers = _Writers(program)
    for task in program.tasks:
        for post in task.posts:
            totals[post.semaphore] += post.amount
    for number, task in enumerate(program.tasks):
        before = 0
        for wait in task.waits:
            if wait.value == totals[wait.semaphore]:
                before |= done_by[wait.semaphore]
        for post in task.posts:
            done_by[post.semaphore] |= before | 1 << number
        _check_reads_of(program, number, before, writers)


class _Writers:
    """Which tasks write into a region, as bits, and how many of its numbers they write."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.numbers = {(task.stage, task.tile): number for number, task in enumerate(program.tasks)}
        self.known: dict[Region, tuple[int, int]] = {}

    def of(self, region: Region) -> tuple[int, int]:
        if region not in self.known:
            tasks = covered = 0
            for at, producer in enumerate(self.program.stages):
                if region.tensor in producer.outputs:
                    boxes, owners = producer.boxes(region.tensor)
                    found, sizes = overlaps(boxes, region.box)
                    covered += int(sizes.sum())
                    for owner in set(owners[found].tolist()):
                        tasks |= 1 << self.numbers[at, producer.tiles[owner]]
            self.known[region] = tasks, covered
        return self.known[region]


def _check_reads_of(program: Program, number: int, before: int, writers: _Writers) -> None:
    graph, task = program.graph, program.tasks[number]
    for region in program.stages[task.stage].reads(task.tile):
        if region.tensor not in graph.producers:
            continue
        shape = graph.shape(region.tensor)
        if len(shape) != len(region.box) or any(
            start < 0 or stop > size for (start, stop), size in zip(region.box, shape, strict=True)
        ):
            raise GraphError(
                f"{start(program, number)} reads {_say(np.array(region.box))} of {region.tensor}, which has the shape "
                f"{tuple(shape)}."
            )
        tasks, covered = writers.of(region)
        missing = tasks & ~before & ~(1 << number)
        unwritten = region.tensor not in graph.inputs and covered < volume(region.box)
        if not missing and not unwritten:
            continue
        part = f"{start(program, number)} reads {_say(np.array(region.box))} of {region.tensor},"
        if unwritten:
            raise GraphError(f"{part} some of which nobody writes.")
        if missing:
            other = (missing & -missing).bit_length() - 1
            producer, consumer = (program.stages[program.tasks[each].stage].name for each in (other, number))
            policy = program.policies.get((region.tensor, producer, consumer))
            why = "no policy orders the two" if policy is None else f"{type(policy).__name__} does not wait for that"
            raise GraphError(f"{part} part of which {program.label(other)} writes, but {why}.")


def start(program: Program, number: int) -> str:
    """Name a task at the beginning of a sentence."""
    label = program.label(number)
    return label[0].upper() + label[1:]
