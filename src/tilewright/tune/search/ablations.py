"""The best run with one of its levers put back: what that lever is worth."""

from __future__ import annotations

from tilewright.tune.search.known import Known
from tilewright.tune.search.search import Search
from tilewright.tune.search.space import Point
from tilewright.tune.store.record import key


def untried(known: Known, search: Search) -> list[Point]:
    """Return the best run without each of its levers, where that has not run; the smallest expected loss first."""
    return _not_yet_run(known, _ablations(known, search))


def without_main_lever(known: Known, search: Search) -> list[Point]:
    """The best run less the lever without which it is expected to be slowest; nothing where that has run."""
    return _not_yet_run(known, _ablations(known, search)[-1:])


def with_gaining_rules(known: Known) -> list[Point]:
    """The best run with those rules alone that give it something; nothing where that has run, or is not known."""
    run = known.with_all_rules()
    gains = known.rules_of(run)
    narrowed = gains.narrowed(run.point) if run is not None and gains is not None else None
    return _not_yet_run(known, [narrowed] if narrowed is not None else [])


def _ablations(known: Known, search: Search) -> list[Point]:
    best, space = known.best(), known.space
    names = space.changes(best.point) if best is not None else ()
    found = [{**best.point, name: space.baseline[name]} for name in names] if best is not None else []
    return sorted((p for p in found if space.refusal(p) is None), key=search.expected_seconds)


def _not_yet_run(known: Known, points: list[Point]) -> list[Point]:
    ran = {key(record.point) for record in known.records}
    return [point for point in points if key(point) not in ran]
