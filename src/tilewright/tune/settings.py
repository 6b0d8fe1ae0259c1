"""What a study is to do, and how it reports its progress."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tilewright.tune.search.space import Point, Space
from tilewright.tune.store.record import Prediction, Record

TRIAL = (sys.executable, "-m", "tilewright.tune.worker.trial")  # the command of a trial's process


@dataclass(frozen=True)
class Settings:
    """What a study is to do."""

    space: Space
    machine: dict[str, Any]  # as `probe` measured it
    folder: Path  # of best.yaml, answer.json, the journal
    name: str
    storage: str  # an SQLAlchemy URL
    budget: float  # seconds
    resume: bool = False
    memory_cap: float | None = None  # bytes
    own_model: str = ""  # package.module:factory
    path: tuple[str, ...] = ()  # where that package is
    fresh: bool = False  # measure although the cache has it
    first: tuple[Point, ...] = ()  # points to try before any other
    on_gpu: dict[str, Any] = field(default_factory=dict)  # what the plan predicts for a GPU that is not here
    command: Sequence[str] = TRIAL
    floor: dict[str, float] = field(default_factory=dict)  # of the quality of a run that generates


@dataclass(frozen=True)
class Shown:
    """How a study reports its progress."""

    begin: Callable[[dict[str, Any]], None] = lambda facts: None
    trial: Callable[[str, Point, Prediction | None], None] = lambda what, point, prediction: None
    event: Callable[[dict[str, Any]], None] = lambda event: None
    record: Callable[[Record, Record | None], None] = lambda record, best: None
    say: Callable[[str], None] = lambda text: None
    rehearse: Callable[[dict[str, Any], bool], None] = lambda on_gpu, is_rehearsal: None
