"""Progress that knows whether it talks to a terminal: a bar there, one plain line a stage in a log."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Stages:
    """Called with (label, done, total) as work goes on; writes to standard error, so that output stays clean."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._terminal = self._console.is_terminal
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bars = Progress(*columns, console=self._console, disable=not self._terminal)
        self._tasks: dict[str, object] = {}

    def __enter__(self) -> Stages:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def __call__(self, label: str, done: int, total: int) -> None:
        if not self._terminal:
            if done in (0, total):
                self._console.print(f"{label}: {'started' if done == 0 else f'{total} steps done'}", highlight=False)
        elif label not in self._tasks:
            self._tasks[label] = self._bars.add_task(label, total=total, completed=done)
        else:
            self._bars.update(self._tasks[label], completed=done)  # type: ignore[arg-type]

    def line(self, text: str) -> None:
        """Say something that is worth a line of its own."""
        self._console.print(text, highlight=False, soft_wrap=True, markup=False)
