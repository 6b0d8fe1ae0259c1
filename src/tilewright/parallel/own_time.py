"""What each rank takes for its own work: all wait for the slowest, so a step's time does not say which that is.

Forward is measured, where no rank waits for another: the whole model, of a pipeline the blocks, which each stage has as
many of, and with FSDP2 each block, behind the hook that gathers its weights. Ranks of tp and cp wait for each other
inside of that, and are slow together.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

SLOW = 1.5  # times as long as the median of the others
Span = tuple[Any, Any]


class OwnTime:
    """Spans of time of this rank's own work, on the device by events, which nobody waits for.

    >>> own = OwnTime(torch.device("cpu"))
    >>> own.running = True
    >>> own.timed(sum)([1, 2]), seconds(own.take()) < 1.0, own.take()
    (3, True, [])
    """

    def __init__(self, device: torch.device) -> None:
        self.running, self._on_gpu = False, device.type == "cuda"
        self._spans: list[Span] = []

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, its calls measured while this is running."""

        def call(*inputs: Any, **options: Any) -> Any:
            if not self.running:
                return function(*inputs, **options)
            start = self._now()
            found = function(*inputs, **options)
            self._spans.append((start, self._now()))
            return found

        return call

    def take(self) -> list[Span]:
        """The spans since the last call."""
        taken, self._spans = self._spans, []
        return taken

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def seconds(spans: Sequence[Span]) -> float:
    """The sum of spans; on a GPU all of them have ended."""
    return sum(
        start.elapsed_time(end) / 1e3 if isinstance(start, torch.cuda.Event) else end - start for start, end in spans
    )


class Slowest:
    """Which rank the others wait for, and a sentence when one begins to be slow.

    >>> Slowest().take([1.0, 1.0, 3.0, 1.5])[0]
    {'slowest_rank': 2, 'slowest_times': 3.0}
    """

    def __init__(self) -> None:
        self.named: int | None = None

    def take(self, works: Sequence[float]) -> tuple[dict[str, Any], str]:
        """What of it goes into metrics, and the sentence."""
        rank = max(range(len(works)), key=works.__getitem__)
        others = statistics.median([*works[:rank], *works[rank + 1 :]])
        times = works[rank] / others if others > 0 else 1.0
        before, self.named = self.named, rank if times > SLOW else None
        said = (
            f"Rank {rank} takes {times:.1f} times as long as the others for its own part of a step, and they wait for "
            "it; look at its host, and at its GPU's clocks and temperature."
        )
        return {"slowest_rank": rank, "slowest_times": times}, said if self.named not in (None, before) else ""
