"""How much of a study's time is kept for what comes after the search, and what there is time for beside it.

Time for the proof and for the ablation of the main lever is always kept; time for the rest up to half of the budget.
"""

from __future__ import annotations

import math
from typing import Any

from tilewright.tune.search.ablations import untried, without_main_lever
from tilewright.tune.search.choose import confirmed
from tilewright.tune.search.known import Known
from tilewright.tune.search.pace import OPTIMIZED, Pace, kind_of
from tilewright.tune.search.predict import predict
from tilewright.tune.search.search import Search
from tilewright.tune.search.space import Point
from tilewright.tune.search.standard import float32
from tilewright.tune.store.record import first_step, key

_SEARCH = 0.5  # of the time, at least, is for searching, whatever comes after it would take
_CURVE = 0.04  # of the time, at most, for a few steps of the standard model in float32
_CURVE_STEPS = 4  # that it takes as long as: three, and what is before them
_RULES, _RULES_MOST = 3.0, 0.3  # trials that it takes to choose among rules, up to this share of the time
_FIRST = 30.0  # seconds that the first run may take, whatever the budget: without it there is no answer


class Reserve:
    """The seconds that the parts of a study will take, by what is known so far.

    Args:
        known: the trials and proofs so far.
        search: orders the ablations.
        pace: the clock.
        machine: as `probe` measured it.
    """

    def __init__(self, known: Known, search: Search, pace: Pace, machine: dict[str, Any]) -> None:
        self._known, self._search, self.pace, self._machine = known, search, pace, machine
        self._space = known.space

    def expected(self, point: Point) -> float:
        """Seconds of a trial: what it took the last time, out of caches perhaps; of one that is new, what is usual."""
        records = self._known.records
        took = [record.ended - record.began for record in records if record.point == point and record.measurement]
        return took[-1] if took else self.pace.expected(kind_of(self._space.at(point)))

    def limit(self, point: Point, purpose: str) -> float:
        """Seconds that a trial may take; a new one leaves enough to prove what is the best by then.

        The proof of one that is compiled compiles it again, which takes about as long as the trial.
        """
        kind = kind_of(self._space.at(point))
        limit = self.pace.limit(kind)
        if not self._known.records:
            return max(_FIRST, limit)
        if purpose != "search":
            return limit
        left = self.pace.left - self.must_take()
        if kind not in ("none", OPTIMIZED):
            left = (self.pace.left - self.pace.proof()) / 2
        return min(limit, max(left, 1.5 * self.expected(point)))

    # What there is time for

    def to_search(self) -> float:
        """Seconds that a search may still take."""
        return self.pace.left - self.end_takes(searching=True)

    def has_time_to_search(self, baseline_is_due: bool) -> bool:
        """Whether a trial, and the baseline where it is time for that, leaves enough for what follows."""
        given = self.expected(self._space.baseline)
        rest = self.end_takes(searching=True) + (given if baseline_is_due else 0.0)
        return self.pace.left > max(rest, given)

    def has_time_for_the_baseline(self) -> bool:
        """Whether the baseline takes no time from what follows."""
        rest = self.end_takes(searching=True, all_of_it=True)
        return self.pace.left - self.expected(self._space.baseline) > rest

    def has_time_for_both(self, point: Point, spare: float) -> bool:
        """Whether the baseline before a run takes no time from what else is to be done."""
        both = self.expected(self._space.baseline) + self.expected(point)
        return both < min(spare, self.pace.left - self.end_takes())

    def fits(self, point: Point) -> bool:
        """Whether a run that waits can end before the rest has to begin; it may not take more than a trial may."""
        takes = min(self.expected(point), self.pace.limit(kind_of(self._space.at(point))))
        return takes < self.to_search()

    def fits_at_the_end(self, point: Point) -> bool:
        """Whether a run that was asked for can end in what is left, when all that the best run has is shown."""
        return min(self.expected(point), self.pace.limit(kind_of(self._space.at(point)))) < self.pace.left

    def can_win_at_the_end(self, point: Point) -> bool:
        """Whether there is then time for a run, and for all that follows if it wins."""
        return self.expected(point) < self.pace.left - self.winner_takes(point)

    # What is kept

    def winner_takes(self, point: Point) -> float:
        """Seconds to leave for a run that wins at the end: once more, a proof, and a run without its main lever."""
        records, best = self._known.records, self._known.best()
        compiling = first_step(records, best) if best is not None else 0.0
        return 2 * self.expected(point) + self.pace.proof(first_step=compiling)

    def must_take(self) -> float:
        """Seconds that are kept whatever else is of interest: to prove the best, and to put its main lever back."""
        return self.proof_takes() + sum(map(self.expected, without_main_lever(self._known, self._search)))

    def rules_take(self) -> float:
        """Seconds to find out which rules give something beside the best, and to run it with those; none where it has
        no choice of rules, or that is known."""
        run = self._known.with_all_rules()
        if run is None or self._known.rules_of(run) is not None:
            return 0.0
        return min(_RULES * self.expected(run.point), _RULES_MOST * self.pace.budget)

    def observing_takes(self) -> float:
        """Seconds to leave for observing the best, beside what that may overrun the budget by."""
        best = self._known.best()
        return max(0.0, self.expected(best.point) - self.pace.most + self.pace.left) if best is not None else 0.0

    def proof_takes(self) -> float:
        """Seconds of the proof of the best, and of the losses beside it; none where it is proved."""
        best = self._known.best()
        if best is None or key(best.point) in self._known.proofs:
            return 0.0
        takes = self.pace.proof(first_step(self._known.records, best))
        if most := self.curve():
            plain = predict(float32(self._space.start), self._machine)
            takes += min(most, _CURVE_STEPS * plain.seconds)
        return takes

    def curve(self) -> float:
        """Seconds that a few steps of the standard model in float32 may take; none where nobody needs them."""
        return 0.0 if self._known.float32() else _CURVE * self.pace.budget

    def end_takes(self, searching: bool = False, all_of_it: bool = False) -> float:
        """Seconds to leave for putting levers of the best back, for confirming, for proving and for observing it.

        What must be is left time for, and the rest as long as half of the budget is for the search.

        Args:
            searching: what is found may have to be confirmed, and proved although the best is; as may one of fewer
                levers than the best.
            all_of_it: whatever it leaves for the search.
        """
        records, best = self._known.records, self._known.best()
        if best is None:
            return 0.0
        must = self.must_take()
        if searching and self._known.has_baseline_only():
            return must  # the first that is tried is worth more than all the rest
        again = self.expected(self._space.baseline) + self.expected(best.point)
        more = self.expected(best.point) + self.rules_take()
        if searching:
            left = untried(self._known, self._search)
            more += again + sum(map(self.expected, left)) + (again if left else 0.0)
            if key(best.point) in self._known.proofs:
                must += self.pace.proof(first_step(records, best)) + self.expected(best.point)
        elif not confirmed(records, best):
            more += again
        most = math.inf if all_of_it else max(0.0, (1 - _SEARCH) * self.pace.budget - must)
        return must + min(more, most)
