"""What to try next: the plan's best guess first, then from the best run so far one lever at a time.

A prediction is wrong by some factor, but by nearly the same one for points that are nearly the same. So what a
neighbour of the best would take is estimated as what the best took, times the ratio of the two predictions, times what
that same move has been seen to do beyond its prediction elsewhere. The most promising one is next. What the plan says
cannot fit is left out, and so is what cannot win: whose floor, which no implementation of it can beat, is above the
best run's measured time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tilewright.tune.search.choose import NOISE, SHAKEN, at_least, fastest, latest
from tilewright.tune.search.space import Point, Space
from tilewright.tune.store.record import Prediction, Record, key

HOPELESS = 1.1  # a move expected to take this much longer than the best is not worth a trial
UNTRIED = 1.5  # the same for a move that was never tried: there the plan alone speaks
_WORTH = 0.99  # two moves at once must promise at least this
# What a lever's value usually does to the time of a step, for a model of which the plan knows nothing. On a GPU more
# bits cost more; what a CPU makes of bfloat16 nobody knows beforehand. Half of a micro batch costs a little.
_COMPILED = dict.fromkeys(("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"), 0.8)
_USUAL: dict[str, dict[str, dict[Any, float]]] = {
    "cuda": {
        "compile": _COMPILED,
        "rules": {"all": 0.8},
        "cuda_graphs": {True: 0.95},
        "precision": {"fp32": 4.0, "tf32": 2.0},
    },
    "cpu": {"compile": _COMPILED},
}
_HALVED = 1.02
_FAILURES = 2  # points at which a lever's value has failed, none at which it ran: it does not work here


class Search:
    """Choose points to try; processes and storage are elsewhere.

    Args:
        space: where to look.
        predict: what the plan says of a point; None where it has nothing to say.
        misfit: why a prediction cannot run on this machine, or None.
        cap: bytes that a run may take.
    """

    def __init__(
        self,
        space: Space,
        predict: Callable[[Point], Prediction | None],
        misfit: Callable[[Prediction], str | None] = lambda prediction: None,
        cap: float = math.inf,
    ) -> None:
        self.space, self._predict, self._misfit, self._cap = space, predict, misfit, cap
        self._predictions: dict[str, Prediction | None] = {}
        self._refusals: dict[str, str | None] = {}
        self.discarded: dict[str, str] = {}  # a point's key, and why it is left out
        self._trust = 1.0  # what a floor is multiplied by

    def prediction(self, point: Point) -> Prediction | None:
        if key(point) not in self._predictions:
            self._predictions[key(point)] = self._predict(point)
        return self._predictions[key(point)]

    def expected_seconds(self, point: Point) -> float:
        """Return the step time that the plan predicts; without a prediction, a usual ratio to a step without levers."""
        prediction = self.prediction(point)
        if prediction is not None:
            return prediction.seconds
        usual = _USUAL[self.space.device]
        halvings = math.log2(max(1.0, self.space.start.global_batch / max(1, self.space.at(point).micro_batch)))
        return math.prod(usual.get(name, {}).get(value, 1.0) for name, value in point.items()) * _HALVED**halvings

    def next(self, records: Sequence[Record], taken: Iterable[Point] = ()) -> Point | None:
        """The point to try next, or None where nothing is left that is worth it.

        Args:
            records: of all trials so far.
            taken: points that somebody runs right now, or that wait.
        """
        tried = {key(record.point) for record in records} | {key(point) for point in taken}
        best = fastest(records, self._cap)
        if best is None:
            return self._by_prediction(tried, records)
        self._trust = self._trusted(records)
        guess = self.descend(best.point)
        if key(guess) not in tried and not self._broken(guess, records) and not self._cannot_win(guess, best):
            return guess
        moves = self._moves(records)
        near = [point for _, point in self.space.neighbours(best.point)]
        pairs = (
            both
            for name, point in self.space.neighbours(best.point)
            for other, both in self.space.neighbours(point)
            if other > name  # each pair of levers once, of which one may have a hundred values
        )
        known = {(name, value) for record in records for name, value in record.point.items()}
        new = [point for name, point in self.space.neighbours(best.point) if (name, point[name]) not in known]
        for points, limit in ((near, HOPELESS), (pairs, _WORTH), (new, UNTRIED)):
            found = self._most_promising(points, best, records, tried, moves, limit)
            if found is not None:
                return found
        return None

    def worth_the_rest(self, records: Sequence[Record]) -> list[Point]:
        """What is expected to be faster than the best by more than the noise, one move from any run; the fastest first.

        `next` goes on from the best alone. One that is a little slower may have cheaper neighbours, or better ones.
        """
        best = fastest(records, self._cap)
        if best is None:
            return []
        moves, tried = self._moves(records), {key(record.point) for record in records}
        ran = [record for record in latest(records).values() if record.outcome == "done" and record.tokens_per_second]
        found: dict[str, tuple[float, int, Point]] = {}
        for run in sorted(ran, key=at_least, reverse=True):
            behind = at_least(best) / at_least(run)
            for _, point in self.space.neighbours(run.point):
                if key(point) in tried or not self._runs(point) or self._broken(point, records):
                    continue
                if not self._cannot_win(point, best):
                    estimate = behind * self._estimate(point, run, moves)
                    found.setdefault(key(point), (estimate, len(found), point))
        return [point for estimate, _, point in sorted(found.values()) if estimate < 1 - NOISE]

    def descend(self, point: Point) -> Point:
        """Move one lever at a time to the quickest neighbour, until the plan expects no quicker one."""
        while True:
            here = self.prediction(point)
            better = [
                (found.seconds, index, neighbour)
                for index, (_, neighbour) in enumerate(self.space.neighbours(point))
                if self._runs(neighbour) and (found := self.prediction(neighbour)) is not None
                if here is None or found.seconds < 0.999 * here.seconds or not self._runs(point)
            ]
            if here is None or not better or (min(better)[0] >= here.seconds and self._runs(point)):
                return point
            point = min(better)[2]

    def _by_prediction(self, tried: set[str], records: Sequence[Record]) -> Point | None:
        """Nothing has run yet: what fits, as the plan has it the quickest first, then whatever is near."""
        guess = self.descend(self.space.baseline)
        near = [guess, *(point for _, point in self.space.neighbours(guess))]
        near += [point for _, point in self.space.neighbours(self.space.baseline)]
        free = [p for p in near if key(p) not in tried and self._runs(p) and not self._broken(p, records)]
        return min(free, key=self.expected_seconds, default=None)

    def _most_promising(
        self,
        points: Iterable[Point],
        best: Record,
        records: Sequence[Record],
        tried: set[str],
        moves: dict[tuple[str, str, str], float],
        limit: float,
    ) -> Point | None:
        estimates = []
        for index, point in enumerate(points):
            if key(point) in tried or not self._runs(point) or self._broken(point, records):
                continue
            if not self._cannot_win(point, best):
                estimates.append((self._estimate(point, best, moves), index, point))
        if not estimates or (chosen := min(estimates))[0] > limit:
            return None
        return chosen[2]

    def _estimate(self, point: Point, best: Record, moves: dict[tuple[str, str, str], float]) -> float:
        """Estimate a point's step time relative to the best's."""
        ratio = self.expected_seconds(point) / self.expected_seconds(best.point)
        for name, value in point.items():
            if value != best.point[name]:
                ratio *= math.exp(moves.get((name, str(best.point[name]), str(value)), 0.0))
        return ratio

    def _moves(self, records: Sequence[Record]) -> dict[tuple[str, str, str], float]:
        """Map each move (lever, from, to) to the log ratio of measured to predicted change of the step time."""
        seen: dict[tuple[str, str, str], list[float]] = {}
        steady = [record for record in latest(records).values() if record.measurement and record.doubt <= SHAKEN]
        for one, other in itertools.permutations(steady, 2):
            names = [name for name, value in one.point.items() if other.point.get(name) != value]
            if len(names) != 1 or one.tokens_per_second is None or other.tokens_per_second is None:
                continue
            expected = math.log(self.expected_seconds(other.point) / self.expected_seconds(one.point))
            move = (names[0], str(one.point[names[0]]), str(other.point[names[0]]))
            seen.setdefault(move, []).append(math.log(one.tokens_per_second / other.tokens_per_second) - expected)
        return {move: sum(found) / len(found) for move, found in seen.items()}

    def _runs(self, point: Point) -> bool:
        """Whether a point's levers go together and, by the plan, fit."""
        name = key(point)
        if name not in self._refusals:
            why = self.space.refusal(point)
            if why is None:
                prediction = self.prediction(point)
                why = self._misfit(prediction) if prediction is not None else None
                if why is not None:
                    self.discarded[name] = "does not fit"
            self._refusals[name] = why
        return self._refusals[name] is None

    def _cannot_win(self, point: Point, best: Record) -> bool:
        prediction = self.prediction(point)
        if prediction is None or best.measurement is None:
            return False
        if self._trust * prediction.floor <= best.measurement.seconds * best.drift:
            return False
        self.discarded[key(point)] = "cannot win"
        return True

    def _trusted(self, records: Sequence[Record]) -> float:
        """1, unless a run was quicker than its floor: then the machine was busy when its limits were measured."""
        shares = [
            record.measurement.seconds * record.drift / prediction.floor
            for record in records
            if record.measurement and (prediction := self.prediction(record.point)) is not None
        ]
        return min([1.0, *shares])

    def _broken(self, point: Point, records: Sequence[Record]) -> bool:
        """Whether one of a point's moves has failed wherever it was tried."""
        for name, value in self.space.changes(point).items():
            there = [record for record in records if record.point[name] == value]
            failed = [record for record in there if record.outcome in ("error", "crashed", "hung", "refused")]
            failed = [record for record in failed if "No space left" not in (record.error or "")]  # not its fault
            if len(failed) >= _FAILURES and len(failed) == len(there):
                self.discarded[key(point)] = "fails here"
                return True
        return False
