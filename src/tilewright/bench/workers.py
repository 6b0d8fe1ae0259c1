"""Processes that work through groups of items, and may die: a dead one is replaced, and its item is reported."""

from __future__ import annotations

import importlib
import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

Group = tuple[Any, list[Any]]  # what the items share, and the items; all of it plain numbers, strings, lists, dicts
Report = Callable[[Any, Any], None]  # takes an item and its value
_POLL_SECONDS = 1.0


@dataclass
class _Worker:
    process: Any
    pipe: Connection
    group: Group | None = None
    done: int = 0  # items of the group that are
    at: str = ""  # what it said last of the item that it is at
    began: float = 0.0  # when it said so
    is_ready: bool = False

    def assign(self, group: Group | None) -> None:
        self.group, self.done, self.at, self.began = group, 0, "the start", time.monotonic()
        self.pipe.send(group)


def run_groups(
    function: str, groups: Iterable[Group], jobs: int, *, report: Report, fail: Report,
    limit_seconds: float = 120.0, deadline: float = float("inf"),
) -> None:  # fmt: skip
    """Call `function`, "module:name", with every group, in `jobs` processes, until the deadline (`time.monotonic`).

    It is a generator of (step, value): what it does to the next item and None, and "done" and the item's value, in the
    order of the items. An item is passed to `report` with its value, or to `fail` with a sentence, if its process ends
    or says nothing for `limit_seconds`; the items behind it then go to a new process.
    """
    waiting, workers = deque(groups), []
    try:
        for _ in range(min(jobs, len(waiting))):
            workers.append(_start(function))
        while (busy := [w for w in workers if w.group is not None or not w.is_ready]) and time.monotonic() < deadline:
            heard = wait([w.pipe for w in busy], max(0.0, min(_POLL_SECONDS, deadline - time.monotonic())))
            for worker in busy:
                if worker.pipe in heard:
                    alive, why = _hear(worker, waiting, report), ""
                else:
                    alive = worker.group is None or time.monotonic() - worker.began <= limit_seconds
                    why = f"took more than {limit_seconds:.0f} s"
                if not alive:
                    workers.remove(worker)
                    _bury(worker, why, waiting, fail)
                    if waiting:
                        workers.append(_start(function))
    finally:
        for worker in workers:
            worker.process.kill()
            worker.process.join()


def _start(function: str) -> _Worker:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, function), daemon=True)
    process.start()
    theirs.close()
    return _Worker(process, ours)


def _hear(worker: _Worker, waiting: deque[Group], report: Report) -> bool:
    """Take in one message, and give the next group to who is through; False where the process has ended."""
    try:
        step, value = worker.pipe.recv()
        worker.began = time.monotonic()
        if step == "idle":
            worker.is_ready = True
            worker.assign(waiting.popleft() if waiting else None)
        elif step == "done":
            assert worker.group is not None
            item = worker.group[1][worker.done]
            worker.done, worker.at = worker.done + 1, ""
            report(item, value)
        else:
            worker.at = step
    except (EOFError, ConnectionError):
        return False
    return True


def _bury(worker: _Worker, why: str, waiting: deque[Group], fail: Report) -> None:
    """Name the item that a process has ended at, and put those behind it in front of what waits."""
    if why:
        worker.process.kill()
    worker.process.join()
    if worker.group is None:
        if not worker.is_ready:
            raise RuntimeError(f"A worker ended with exit code {worker.process.exitcode} before it began to work.")
        return
    shared, items = worker.group
    rest = items[worker.done :]
    if worker.at and rest:  # a process may also end between two items, to give the next a fresh one
        why = why or f"the process ended with exit code {worker.process.exitcode}"
        fail(rest[0], f"{why} at {worker.at}")
        rest = rest[1:]
    if rest:
        waiting.appendleft((shared, rest))


def _work(pipe: Connection, function: str) -> None:
    module, _, name = function.partition(":")
    work = getattr(importlib.import_module(module), name)
    try:
        pipe.send(("idle", None))
        while (group := pipe.recv()) is not None:
            for message in work(*group):
                pipe.send(message)
            pipe.send(("idle", None))
    except (EOFError, ConnectionError, KeyboardInterrupt):  # nobody listens any more
        return
