"""How a run is asked to end."""

from __future__ import annotations

import contextlib
import signal
from typing import Any


class Signals:
    """Ctrl-C and a polite kill end the run after its step, with a checkpoint; a second one at once."""

    def __init__(self) -> None:
        self.came = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        with contextlib.suppress(ValueError):  # not in the main thread: whoever started it decides
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: Any) -> None:
        if self.came:
            raise KeyboardInterrupt
        self.came = True

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
