"""Whether workers that run a program's tasks can always go on: queues of their own, blocks on the places of a GPU."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.tilesync.check import Program, start
from tilewright.tilesync.graph import GraphError

MOST_STREAMS = 16  # each with a kernel that may wait, of the 128 that a GPU has at a time


def check_queues(program: Program, queues: Sequence[Sequence[int]]) -> list[int]:
    """Prove that workers which run these tasks, each in its queue's order, cannot deadlock; return an order of all.

    That order is a linear extension of the waits and of every queue: while it lasts, its next task can go on.
    """
    given = [task for queue in queues for task in queue]
    if sorted(given) != list(range(len(program.tasks))):
        missing = next((each for each in range(len(program.tasks)) if each not in set(given)), None)
        what = "a task is in two queues" if missing is None else f"{program.label(missing)} is in no queue"
        raise GraphError(f"{what[0].upper()}{what[1:]}; every tile runs once.")
    needs, heads, done = program.needs(), [0] * len(queues), [False] * len(program.tasks)
    order: list[int] = []
    moved = True
    while moved:
        moved = False
        for worker, queue in enumerate(queues):
            while heads[worker] < len(queue) and all(done[other] for other in needs[queue[heads[worker]]]):
                done[queue[heads[worker]]] = moved = True
                order.append(queue[heads[worker]])
                heads[worker] += 1
    if len(order) < len(given):
        worker = next(worker for worker, queue in enumerate(queues) if heads[worker] < len(queue))
        stuck = queues[worker][heads[worker]]
        other = next(each for each in needs[stuck] if not done[each])
        raise GraphError(
            f"{start(program, stuck)} is next in the queue of worker {worker} and waits for "
            f"{program.label(other)}, which is behind a tile that waits, too: no linear extension has these queues."
        )
    return order


def check_residency(blocks: int, resident: int) -> None:
    """Refuse more blocks than a GPU runs at the same time, where they wait for each other."""
    if blocks > resident:
        raise GraphError(
            f"{blocks} blocks wait for each other, but only {resident} are resident at the same time; use fewer."
        )


def blocks_of_streams(program: Program, resident: int) -> list[int]:
    """Prove that stages on streams of their own cannot take each other's places; return the blocks of each.

    A stage's blocks begin when all blocks of the stages before it have: a one-thread kernel in front of its launch
    waits for that, one at a time, and is launched when the stage that it waits for has started. Blocks take tiles in
    the stage's order, and each tile waits for tiles of earlier stages. So blocks of the first stage that has not ended
    wait for nothing, and get places from those that have. It takes one place beside that of the kernel that waits.
    """
    tasks = [task.stage for task in program.tasks]
    if tasks != sorted(tasks):
        raise GraphError("Stages whose tiles are interleaved cannot run on streams of their own; leave out `order`.")
    if len(program.stages) > MOST_STREAMS:
        raise GraphError(f"{len(program.stages)} stages are more than {MOST_STREAMS} streams; run them as persistent.")
    check_residency(2, resident)
    stage_of = [{tasks[number] for number in posters} for posters in program.posters()]
    for number, task in enumerate(program.tasks):
        if any(max(stage_of[wait.semaphore]) >= task.stage for wait in task.waits):
            raise GraphError(f"{start(program, number)} waits for a tile of its own stage or of a later one.")
    return [min(resident, tasks.count(stage)) for stage in range(len(program.stages))]
