"""How a run is asked to end."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

_held = {"by": 0, "due": False}  # how many calls of the main thread an interrupt waits for, and whether one does


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """What is inside ends before an interrupt by `Signals` comes, unless somebody insists. In the main thread: no other
    gets one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _held["by"] += 1
    try:
        yield
    finally:
        _held["by"] -= 1
        if _held["due"] and not _held["by"]:
            _held["due"] = False
            raise KeyboardInterrupt


class Signals:
    """Ctrl-C and a polite kill, noted; a second one interrupts at once, and so does the first where it may.

    Under torchrun a second one does not insist: a scheduler sends one to all processes, and the agent passes its own
    on. It kills those that do not end.

    To be noted matters in both cases: Python drops an interrupt that comes while it collects garbage.
    """

    def __init__(self, at_once: bool = False) -> None:
        self.came, self._at_once = False, at_once
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        with contextlib.suppress(ValueError):  # not in the main thread: the caller decides
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    @contextlib.contextmanager
    def immediate(self) -> Iterator[None]:
        """Let the first signal interrupt at once, inside of this context."""
        before, self._at_once = self._at_once, True
        try:
            yield
        finally:
            self._at_once = before

    def _note(self, number: int, frame: Any) -> None:
        again, self.came = self.came, True
        insists = again and "TORCHELASTIC_RUN_ID" not in os.environ
        if insists or (self._at_once and not _held["by"]):
            _held["due"] = False
            raise KeyboardInterrupt
        _held["due"] = self._at_once

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
