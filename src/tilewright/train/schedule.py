"""The learning rate of a step."""

from __future__ import annotations

import math

from tilewright.train.schema import Schedule


def learning_rate(step: int, steps: int, highest: float, schedule: Schedule) -> float:
    """Return the learning rate of a step: linear warm-up, then the schedule's decay to `final`.

    >>> [round(learning_rate(s, 6, 1.0, Schedule(name="linear", warmup=2, final=0.0)), 2) for s in range(1, 7)]
    [0.5, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    warmup = min(schedule.warmup, steps)
    if step <= warmup:
        return highest * step / warmup
    share = (step - warmup) / max(1, steps - warmup)  # of the way down
    if schedule.name == "constant":
        return highest
    if schedule.name == "wsd":  # warm-up, stable, decay
        share = max(0.0, 1.0 - (1.0 - share) / min(1.0, schedule.decay)) if schedule.decay > 0 else 0.0
    if schedule.name == "cosine":
        share = (1.0 - math.cos(math.pi * share)) / 2.0
    return highest * (1.0 - (1.0 - schedule.final) * share)
