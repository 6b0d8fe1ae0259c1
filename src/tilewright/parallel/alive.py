"""Signs of life of ranks: one that hangs, or that the network has cut off, ends the run and not its patience.

A rank that this machine's launcher has started touches a file, and the launcher kills one that does not. Otherwise the
ranks tell each other by the store that they have met at: each watches rank zero, and rank zero watches all. One that
notices a silence ends its process, whatever it waits for; torchrun's agent does the rest.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch.distributed.distributed_c10d import _get_default_store

FOLDER = "TILEWRIGHT_ALIVE"  # of the files by which ranks say that they are
_BEAT = 1.0  # seconds between two signs of life
_SILENT = 20.0  # seconds without one after which ranks that tell each other give up
_ENDED = "ended"


def _folder() -> Path | None:
    """Where a launcher that has started this process looks."""
    name = os.environ.get(FOLDER)
    return Path(name) if name and Path(name).is_dir() else None


def is_watched() -> bool:
    """Whether a launcher of ours has started this process, and looks after it."""
    return _folder() is not None


@contextlib.contextmanager
def alive(rank: int) -> Iterator[None]:
    """Give signs of life to a launcher that has started this process, and stop, saved, where that is gone."""
    folder = _folder()
    if folder is None:
        yield
        return
    path, parent = folder / f"rank-{rank}-{os.getpid()}", os.getppid()
    path.touch()

    def beat() -> None:
        with contextlib.suppress(OSError):
            os.utime(path)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        with repeated(beat):
            yield
    finally:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def watched(rank: int, ranks: int) -> Iterator[None]:
    """Let the ranks of a run that no launcher of ours watches look after each other."""
    if is_watched():
        yield
        return
    # A store of its own: another call of the run's may wait, and hold it, for minutes.
    beats = _Beats(_get_default_store().clone(), rank, ranks)  # type: ignore[attr-defined]  # not in its stub
    # Two threads: the store does not answer where the network is cut.
    with repeated(beats.tell), repeated(beats.check):
        yield
    beats.leave()


class _Beats:
    def __init__(self, store: Any, rank: int, ranks: int) -> None:
        self.store, self.rank = store, rank
        self.answered = self.checked = now = time.monotonic()
        # Of those that this rank watches: the last sign, and when it was new.
        self.seen = dict.fromkeys(range(1, ranks) if rank == 0 else (0,), ("", now))

    def tell(self) -> None:
        with contextlib.suppress(RuntimeError):  # a store that is gone, which `check` notices
            self._set(str(time.time_ns()))
            for other, sign in self._signs().items():
                if sign != self.seen[other][0]:
                    self.seen[other] = (sign, time.monotonic())
            self.answered = time.monotonic()

    def check(self) -> None:
        now = time.monotonic()
        if now - self.checked > _SILENT / 2:  # this very process was stopped, and the others seem silent for it
            self.answered, self.seen = now, {other: (sign, now) for other, (sign, _) in self.seen.items()}
        self.checked = now
        # By the store's last answer: without one nothing is known of the others.
        old = self.answered - _SILENT
        silent = [other for other, (sign, new) in self.seen.items() if sign != _ENDED and new < old]
        if now - self.answered > _SILENT:
            address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            _end(f"The store of the run, {address}, has not answered for {_SILENT:.0f} s: its machine or the network "
                 "is lost")  # fmt: skip
        elif silent:
            who = f"Rank {silent[0]} has" if len(silent) == 1 else f"Ranks {', '.join(map(str, silent))} have"
            _end(f"{who} given no sign of life for {_SILENT:.0f} s: hung, or its machine or the network is lost")

    def leave(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._set(_ENDED)

    def _set(self, sign: str) -> None:
        self.store.set(_key(self.rank), sign)

    def _signs(self) -> dict[int, str]:
        keys = {other: _key(other) for other in self.seen}
        if not self.store.check(list(keys.values())):  # in the beginning, where to read one would be to wait for it
            keys = {other: key for other, key in keys.items() if self.store.check([key])}
        signs = self.store.multi_get(list(keys.values())) if keys else []
        return {other: sign.decode() for other, sign in zip(keys, signs, strict=True)}


def _key(rank: int) -> str:
    return f"tilewright/alive/{rank}"


def _end(why: str) -> None:
    """End this process, whose main thread may wait for ever; of the ranks of a machine the first says why."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        said = f"error: {why}; start again: the run goes on from its newest checkpoint."
        print(said, file=sys.stderr, flush=True)
    os._exit(1)


@contextlib.contextmanager
def repeated(act: Callable[[], None]) -> Iterator[None]:
    """Call a function once a beat, in a thread."""
    done = threading.Event()

    def run() -> None:
        while not done.wait(_BEAT):
            act()

    thread = threading.Thread(target=run, daemon=True, name=f"tilewright {act.__name__}")
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(_BEAT)  # one may wait for a network that is cut
