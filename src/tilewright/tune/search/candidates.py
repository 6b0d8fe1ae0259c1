"""The points that a study has a reason to run next."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tilewright.tune.search.choose import doubted
from tilewright.tune.search.known import Known
from tilewright.tune.search.reserve import Reserve
from tilewright.tune.search.search import Search
from tilewright.tune.search.space import Point
from tilewright.tune.store.record import CONFIRMATION


def predicted_best(search: Search) -> list[Point]:
    """Return the run that the plan predicts to be fastest, the first to try; empty without predictions."""
    baseline = search.space.baseline
    if search.prediction(baseline) is None:
        return []
    guess = search.descend(baseline)
    return [guess] if guess != baseline else []


def most_promising(
    known: Known, search: Search, reserve: Reserve, running: Sequence[Point]
) -> tuple[Point | None, str]:
    """Return the most promising run that there is time for; runs spoilt by a change of the machine's speed come first.

    Returns:
        The point, or None where there is none, and the purpose of running it.
    """
    records, dear = known.read(), list(running)
    best = known.best()
    spoilt = doubted(records, best, known.cap, known.wrong, shaken=True) if best is not None else None
    spare = reserve.to_search()
    if spoilt is not None and spoilt.point not in running and reserve.expected(spoilt.point) < spare:
        return spoilt.point, CONFIRMATION
    while (point := search.next(records, dear)) is not None:
        if reserve.expected(point) < spare:
            break
        dear.append(point)
    return point, "search"


def unconfirmed(known: Known, running: Collection[Point] = ()) -> list[Point]:
    """Return the run that must run again to confirm the best, unless it is running."""
    best = known.best()
    record = doubted(known.records, best, known.cap, known.wrong) if best is not None else None
    return [record.point] if record is not None and record.point not in running else []


def worth_the_rest(known: Known, search: Search, reserve: Reserve) -> list[Point]:
    """Return a run that may still beat a confirmed best, where there is time for it and for what follows."""
    return [point for point in search.worth_the_rest(known.records) if reserve.can_win_at_the_end(point)][:1]
