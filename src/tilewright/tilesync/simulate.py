"""A program's schedule on so many SMs, from what its tiles cost: one stage after the other, and tile by tile.

Serial, a stage's tiles begin when the stage before has finished, after a launch gap. Synchronised, each worker takes
the next tile in the program's order as soon as it is free, fetches what it can of the weights, and waits for its
semaphores. A tile takes the longer of its share of memory's time and of the tensor cores' time on one SM. What a
neighbour leaves of either is not modelled: figures are for choosing, and `auto` measures.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from tilewright import hardware
from tilewright.tilesync.check import Program
from tilewright.tilesync.graph import Work


@dataclass(frozen=True)
class Machine:
    """What tiles share, in seconds, bytes and FLOPs."""

    sms: int = 132
    bytes_per_second: float = 4.2e12  # of all SMs together
    flops: float = 7.0e14
    launch_gap: float = 4e-6  # from a kernel's last tile to the first of the next
    hop: float = 1.2e-6  # from a post to the end of a wait for it
    prefetch_bytes: float = 65536.0  # of weights that an SM holds while it waits
    tile_overhead: float = 0.5e-6
    group_overhead: float = 0.1e-6  # of each further group of a tile's columns: a barrier and the sums of all warps

    @classmethod
    def of(cls, name: str) -> Machine:
        """Return a GPU of the hardware table.

        >>> Machine.of("H200").sms
        132
        """
        gpu = hardware.find(name)
        flops = gpu.best_flops or 0.75 * gpu.peak_flops["bf16"]
        return cls(gpu.multiprocessors or 132, 0.87 * gpu.bytes_per_second, flops)

    def seconds(self, work: Work) -> float:
        """Return what a tile takes on one SM, of which all are busy."""
        return self.tile_overhead + (work.groups - 1) * self.group_overhead + self._own_seconds(work)

    def _own_seconds(self, work: Work) -> float:
        return max(work.bytes / self.bytes_per_second, work.flops / self.flops) * self.sms

    def prefetch_seconds(self, work: Work) -> float:
        """Return how much of that a worker does before it waits."""
        return min(work.weight_bytes, self.prefetch_bytes) / max(work.bytes, 1.0) * self._own_seconds(work)


@dataclass(frozen=True)
class Event:
    """A tile on a worker. Between `start` and `ready` it fetches weights and waits."""

    task: int
    worker: int
    start: float
    ready: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """What ran where and when; in seconds from the first tile's start."""

    events: tuple[Event, ...]
    workers: int

    @property
    def seconds(self) -> float:
        """How long it takes from the first tile to the last."""
        return max((event.end for event in self.events), default=0.0)

    @property
    def busy(self) -> float:
        """Return the share of the workers' time in which they do not wait."""
        worked = sum(event.end - event.ready for event in self.events)
        return worked / (self.workers * self.seconds) if self.events else 0.0

    def queues(self) -> list[list[int]]:
        """Return each worker's tasks in their order."""
        queues: list[list[int]] = [[] for _ in range(self.workers)]
        for event in sorted(self.events, key=lambda event: (event.start, event.end, event.task)):
            queues[event.worker].append(event.task)
        return queues


Cost = Callable[[int], Work]


def cost_of(program: Program) -> list[Work]:
    """Return what each task of a program costs, as its stage says; what a stage has written nobody fetches early."""
    waits = [any(name in program.graph.producers for name in stage.early) for stage in program.stages]
    works = [program.stages[task.stage].work(task.tile) for task in program.tasks]
    return [
        work._replace(weight_bytes=0.0) if waits[task.stage] else work
        for work, task in zip(works, program.tasks, strict=True)
    ]


def simulate_serial(program: Program, machine: Machine, works: list[Work] | None = None) -> Timeline:
    """Run one stage after the other, each tile on the first worker that is free."""
    works, events, begin = works or cost_of(program), list[Event](), 0.0
    for stage in range(len(program.stages)):
        free = [(begin, worker) for worker in range(machine.sms)]
        mine = [number for number, task in enumerate(program.tasks) if task.stage == stage]
        for number in mine:
            start, worker = heapq.heappop(free)
            events.append(Event(number, worker, start, start, start + machine.seconds(works[number])))
            heapq.heappush(free, (events[-1].end, worker))
        begin = max(event.end for event in events) + machine.launch_gap
    return Timeline(tuple(events), machine.sms)


def simulate(program: Program, machine: Machine, works: list[Work] | None = None) -> Timeline:
    """Run the program's tasks in its order, each on the worker that is free first, when its waits are over."""
    works, events = works or cost_of(program), list[Event]()
    reached = [0.0] * len(program.semaphores)  # when the last post so far of each has arrived
    free = [(0.0, worker) for worker in range(machine.sms)]
    for number, task in enumerate(program.tasks):
        start, worker = heapq.heappop(free)
        over = max((reached[wait.semaphore] for wait in task.waits), default=0.0)
        early = machine.prefetch_seconds(works[number]) if task.waits else 0.0
        ready = max(start + early, over)
        # What was fetched early is done; `ready` is drawn where the rest begins.
        end = ready + machine.seconds(works[number]) - early
        events.append(Event(number, worker, start, ready if over > start + early else start, end))
        heapq.heappush(free, (end, worker))
        for post in task.posts:
            reached[post.semaphore] = max(reached[post.semaphore], end + machine.hop)
    return Timeline(tuple(events), machine.sms)


@dataclass(frozen=True)
class Prediction:
    """Seconds of both schedules, and of one without any wait."""

    serial: float
    synchronised: float
    ideal: float

    @property
    def saving(self) -> float:
        """Return the share of the serial time that waiting tile by tile saves."""
        return 1 - self.synchronised / self.serial

    @property
    def tail(self) -> float:
        """Return the share of the serial time in which SMs stand idle: the most that can be saved."""
        return 1 - self.ideal / self.serial


def predict(program: Program, machine: Machine | None = None) -> Prediction:
    """Return what a program is predicted to take.

    >>> from tilewright.tilesync import Gemm, Graph, check
    >>> up = Gemm("h", "x", "w", (512, 6144, 12288), tile=(128, 128))
    >>> down = Gemm("y", "h", "v", (512, 12288, 6144), tile=(128, 128))
    >>> graph = Graph({"x": (512, 12288), "w": (6144, 12288), "v": (12288, 6144)}, [up, down], ["y"])
    >>> 0.1 < predict(check(graph)).saving < predict(check(graph)).tail < 0.2
    True
    """
    machine, works = machine or Machine(), cost_of(program)
    ideal = sum(machine.seconds(work) for work in works) / machine.sms
    return Prediction(
        simulate_serial(program, machine, works).seconds, simulate(program, machine, works).seconds, ideal
    )
