"""The ranks of a trial: its process forks the others before it has touched a GPU, and is the first of them.

They are in the trial's session and process group, so what ends a trial ends them all; one whose first rank is gone ends
by itself. What they find goes to the first rank by a pipe each, in the protocol of `tune.worker.trial`:

    {"event": "memory", "bytes": 1000000}       the most that the rank has had
    {"event": "result", ..., "lost": false}     how it ended; "lost" where it ended because another one had

The trial's result is the first rank's, with the largest memory of all. Where a rank fails, it is the failure that the
others come from; a rank that waits in vain for one that failed does not keep the trial waiting.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any, NoReturn, TextIO

_PATIENCE = 3.0  # seconds in which a rank notices by itself that another one has failed
_HINTS = {-signal.SIGKILL: " (the kernel does that when the host is out of memory)"}


class Rank:
    """One of a trial's processes.

    Args:
        number: its rank.
        source: a file descriptor that ends when `parent` does.
        events: where its events go.
    """

    def __init__(self, number: int, source: int, parent: int, events: TextIO) -> None:
        self.number, self.source, self.parent, self._events = number, source, parent, events
        self._lock = threading.Lock()

    def say(self, event: dict[str, Any]) -> None:
        """Tell an event."""
        with self._lock:
            self._events.write(json.dumps(event) + "\n")
            self._events.flush()

    def conclude(self, result: dict[str, Any]) -> None:
        """Tell the result."""
        self.say(result)


class FirstRank(Rank):
    """The rank that tells the results of all.

    Args:
        others: the process and the pipe of each other rank, in order.
    """

    def __init__(self, source: int, parent: int, events: TextIO, others: list[tuple[int, int]]) -> None:
        super().__init__(0, source, parent, events)
        self._bytes = 0
        self._cause: dict[str, Any] | None = None
        self._failed, self._concluded = threading.Event(), threading.Event()
        for number, (process, pipe) in enumerate(others, 1):
            threading.Thread(target=self._hear, args=(number, process, pipe), daemon=True).start()

    def conclude(self, result: dict[str, Any]) -> None:
        """Tell the result of all ranks, where this one has come to an end."""
        self._concluded.set()
        if result["lost"]:
            self._failed.wait(_PATIENCE)
            result = self._cause or result
        value = result["value"]
        if isinstance(value, dict) and "bytes" in value:
            result = {**result, "value": {**value, "bytes": max(value["bytes"], self._bytes)}}
        self.say(result)

    def _hear(self, number: int, process: int, pipe: int) -> None:
        result: dict[str, Any] | None = None
        with os.fdopen(pipe, errors="replace") as events, contextlib.suppress(ValueError):  # half a line at its end
            for line in events:
                event = json.loads(line)
                if event["event"] == "memory":
                    self._bytes = max(self._bytes, event["bytes"])
                elif event["event"] == "result":
                    result = event
        if result is None:
            code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
            result = {"event": "result", "outcome": "crashed", "error": _death(number, code), "value": None}
        elif result["error"] is None or result["lost"]:
            return
        else:
            result["error"] = f"Rank {number}: {result['error']}"
        self._cause = self._cause or result
        self._failed.set()
        if not self._concluded.wait(_PATIENCE):  # this rank has not noticed
            self.say(self._cause)
            end_group()


def fork_ranks(count: int, source: int, events: TextIO, parent: int) -> Rank:
    """Fork the other ranks; returns in each of them, and in this one.

    Args:
        count: of all ranks.
        source, events, parent: of this process, as `Rank` has them.
    """
    if count == 1:
        return Rank(0, source, parent, events)
    life, held = os.pipe()  # ends, for the others, when this process does
    others: list[tuple[int, int]] = []
    here = os.getpid()
    for number in range(1, count):
        pipe, own = os.pipe()
        process = os.fork()
        if process == 0:
            events.close()
            for end in (held, source, pipe, *(earlier for _, earlier in others)):
                os.close(end)
            return Rank(number, life, here, os.fdopen(own, "w"))
        os.close(own)
        others.append((process, pipe))
    os.close(life)
    return FirstRank(source, parent, events, others)


@contextlib.contextmanager
def joined(job: dict[str, Any]) -> Iterator[None]:
    """Join the other ranks of a job, each on a GPU of its own or with its share of the cores.

    Nobody leaves: the process ends instead, for some ranks wait for others by then.
    """
    ranks, rank = job.get("ranks", 1), job["rank"]
    if ranks == 1:
        yield
        return
    import torch
    import torch.distributed as dist

    on_gpu = torch.cuda.is_available() and job["configuration"]["device"] != "cpu"
    if on_gpu:
        torch.cuda.set_device(rank)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    # They meet in the trial's folder: nobody else can join, and no port has to be free.
    place = f"file://{os.path.join(job['folder'], 'ranks')}"
    dist.init_process_group("nccl" if on_gpu else "gloo", init_method=place, rank=rank, world_size=ranks)
    yield


def has_lost_another(error: BaseException) -> bool:
    """Whether a rank failed because another one had."""
    if "torch" not in sys.modules:  # then it has not met another
        return False
    from tilewright.parallel.agree import is_lost

    return is_lost(error)


def end_group() -> NoReturn:
    """End this process and, where it leads a process group, everything in it."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def _death(number: int, code: int) -> str:
    if code < 0:
        return f"Rank {number} was killed by {signal.Signals(-code).name}{_HINTS.get(code, '')}."
    return f"Rank {number} ended with exit code {code}, without a result."
