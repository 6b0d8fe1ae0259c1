"""A step that the host has launched and not read yet."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tilewright.parallel.own_time import Span


@dataclass
class Pending:
    """A step that the device may still be running."""

    step: int
    began: float
    rate: float
    found: Tensor  # loss, norm, skipped and so on; on the host as soon as `ready` has happened
    ready: torch.cuda.Event | None
    ended: float  # of its work on the host
    memory: dict[str, Any]  # the host allocates: what the step takes is known before the device gets there
    # Seconds between the step before and this one that are not its own.
    paused: float = field(default=0.0, kw_only=True)

    def seconds(self, before: Pending | None) -> float:
        """Return the time from the end of the step before to this one's, by the device's clock where there is one."""
        if self.ready is None:
            return self.ended - (self.began if before is None else before.ended + self.paused)
        if before is None or before.ready is None:
            return time.perf_counter() - self.began
        return before.ready.elapsed_time(self.ready) / 1e3 - self.paused


@dataclass
class PendingStep(Pending):
    """A step of the training loop: with what it took of the data, and for how long it waited for it."""

    samples: int
    waited: float
    batches: list[Tensor]
    own: list[Span] = field(default_factory=list)  # of this rank's own work
    validation_loss: float | None = None
