"""A machine that grows slower or faster, and machines of different speed, compared all the same.

Every worker measures the baseline again and again. A trial's speed is divided by how fast that worker's baseline was at
the time, over how fast the first one was.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from tilewright.tune.store.record import Record


def corrected(records: Sequence[Record]) -> list[Record]:
    """Each record with its drift, and the doubt that is left.

    A reference between two of its runs is taken to lie on the line between them. It may have changed at once instead,
    so what ran there can be wrong by as much as the two differ; and what ran after the last two as well, for what has
    come may have gone.
    """
    references: dict[str, list[tuple[float, float]]] = {}
    for record in records:
        if record.purpose == "reference" and record.outcome == "done" and record.measurement:
            references.setdefault(record.worker, []).append((record.began, record.measurement.tokens_per_second))
    first = first_reference(records)
    if not first:
        return list(records)

    def seen(record: Record) -> Record:
        points = sorted(references.get(record.worker, []))
        if record.cached or not points:
            return dataclasses.replace(record, drift=record.reference / first if record.reference else 1.0, doubt=0.0)
        here, change = _between(points, record.began)
        return dataclasses.replace(record, drift=here / first, doubt=change if record.purpose != "reference" else 0.0)

    return [seen(record) for record in records]


def first_reference(records: Sequence[Record]) -> float:
    """Tokens a second of the baseline when it first ran, or 0."""
    ran = [r for r in records if r.purpose == "reference" and r.outcome == "done" and r.measurement]
    first = min(ran, key=lambda record: record.began, default=None)
    return first.measurement.tokens_per_second if first is not None and first.measurement else 0.0


def _between(points: Sequence[tuple[float, float]], at: float) -> tuple[float, float]:
    """The value at a time on the line through the points around it, and by how much these differ, or the last two.

    >>> _between([(0.0, 1.0), (10.0, 2.0)], 5.0), _between([(0.0, 1.0), (10.0, 2.0)], 99.0)
    ((1.5, 1.0), (2.0, 1.0))
    """
    change = 0.0
    for (before, low), (after, high) in itertools.pairwise(points):
        change = max(low, high) / min(low, high) - 1
        if before <= at <= after:
            here = low + (high - low) * (at - before) / (after - before) if after > before else low
            return here, change
    return (points[0][1], 0.0) if at < points[0][0] else (points[-1][1], change)
