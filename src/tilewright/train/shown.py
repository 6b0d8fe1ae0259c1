"""What a run shows while it trains, and where it ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tilewright.train.metrics import Metrics


@dataclass(frozen=True)
class Outcome:
    """Where a run ended."""

    step: int
    loss: float | None
    tokens_per_second: float | None  # the median of the steps after the first
    stopped: bool  # before its last step, by a signal
    warnings: list[str]
    validation_loss: float | None = None  # the last


@dataclass(frozen=True)
class Shown:
    """The callbacks by which a run reports: its start, every step's metrics, notes, its end."""

    begin: Callable[[dict[str, Any]], None] = lambda facts: None
    step: Callable[[Metrics, int], None] = lambda metrics, steps: None
    say: Callable[[str], None] = lambda text: None
    profile: Callable[[dict[str, Any]], None] = lambda found: None
    end: Callable[[Outcome], None] = lambda outcome: None
    trace: bool = True  # whether a profile is to leave its trace
    on_every_rank: bool = False  # not on rank zero alone
