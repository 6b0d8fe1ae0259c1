"""One worker of a study at work: takes trials from the ledger and runs them, with the baseline now and then."""

from __future__ import annotations

import time
from collections.abc import Callable

from tilewright.train.signals import Signals
from tilewright.tune.search.choose import NOISE
from tilewright.tune.search.drift import first_reference
from tilewright.tune.search.known import Known
from tilewright.tune.search.reserve import Reserve
from tilewright.tune.search.search import Search
from tilewright.tune.search.space import Point
from tilewright.tune.settings import Shown
from tilewright.tune.store.ledger import Claim
from tilewright.tune.store.record import CONFIRMATION, key
from tilewright.tune.worker.jobs import Jobs

REFERENCE_EVERY = 5  # the baseline is every fifth of the trials
_POLL = 0.5  # seconds between two looks at what other workers do


class Runner:
    """Runs trials of a study, one after the other.

    Args:
        known: what is known so far; read anew after each trial.
        search: has the predictions.
        reserve: how long a trial may take.
        jobs: the processes of trials.
        shown: is told of each trial.
        signals: those that ask to stop.
    """

    def __init__(
        self, known: Known, search: Search, reserve: Reserve, jobs: Jobs, shown: Shown, signals: Signals
    ) -> None:
        self._known, self._search, self._reserve, self._jobs = known, search, reserve, jobs
        self._shown, self._signals, self._ledger = shown, signals, known.ledger
        self._since = REFERENCE_EVERY  # trials since the baseline ran

    @property
    def baseline_is_due(self) -> bool:
        """Whether the next trial is the baseline."""
        return self._since >= REFERENCE_EVERY

    def heed(self) -> None:
        """Stop if an interrupt was asked for, even where the signal itself was lost."""
        if self._signals.came:
            raise KeyboardInterrupt

    def wait(self) -> None:
        """Wait a moment for other workers."""
        time.sleep(_POLL)

    def take(self, purpose: str = "", fits: Callable[[Point], bool] = lambda point: True) -> Claim | None:
        """The next that waits and fits, one of a purpose first; before it the baseline, where it is time for it."""
        failed = [r for r in self._known.records if r.purpose == "reference" and r.outcome != "done"]
        if self.baseline_is_due and (self._jobs.reference or len(failed) < 2):
            self._ledger.propose([(self._known.space.baseline, "reference")])
            return self._ledger.take("reference")
        return self._ledger.take(purpose, fits)

    def run(self, claim: Claim) -> None:
        """Run a trial that was taken, and put its record into the ledger."""
        self._since = 1 if claim.purpose == "reference" else self._since + 1
        try:
            stops = claim.purpose not in ("reference", CONFIRMATION)
            prediction = self._search.prediction(claim.point)
            best = self._best_step() if stops else 0.0
            limit = self._reserve.limit(claim.point, claim.purpose)
            record = self._jobs.measure(claim, prediction, self._ledger.worker, best, limit)
        except BaseException:  # Ctrl-C: somebody may take it later
            self._ledger.release(claim)
            raise
        self._ledger.finish(claim, record)
        records = self._known.read()
        if claim.purpose == "reference":
            self._jobs.keep(records)
        self._shown.record(next((r for r in records if r.began == record.began), record), self._known.best())

    def run_baseline(self) -> bool:
        """Run the baseline, unless it was the last that ran here or need not run so often; whether anything ran."""
        if self._since <= 1 or (not self.baseline_is_due and self._is_steady() and not self._is_new()):
            return False
        self._since = REFERENCE_EVERY
        claim = self.take()
        if claim is not None:
            self.run(claim)
        return claim is not None

    def run_wanted(self, wanted: Callable[[], list[Point]], purpose: str, until: Callable[[], float]) -> bool:
        """Run what is wanted, the first of it next, as far as time allows, and wait for what others run of it.

        Little decides here: the baseline comes before them, and after. Returns whether anything ran.

        Args:
            wanted: the points, asked for before each trial.
            purpose: of the trials.
            until: seconds to leave for what follows.
        """
        ran, reserve, baseline = False, self._reserve, self._known.space.baseline
        while True:
            self.heed()
            self._ledger.recover()
            self._known.read()
            spare = reserve.pace.left - until()
            due = [point for point in wanted() if reserve.expected(point) < spare]
            running = {key(each["point"]) for each in self._ledger.running()}
            free = [point for point in due if key(point) not in running]
            if not due:
                break
            if not free:
                self.wait()
            elif not ran and reserve.has_time_for_both(free[0], spare) and self.run_baseline():
                ran = True
            else:
                self._ledger.propose([(free[0], purpose)])
                tight = reserve.expected(baseline) + reserve.expected(free[0]) >= spare
                if (claim := self._ledger.take(purpose) if tight else self.take(purpose)) is not None:
                    self.run(claim)
                    ran = True
        if ran and reserve.pace.left - reserve.expected(baseline) > until():
            self.run_baseline()
        return ran

    def _is_steady(self) -> bool:
        """Whether the baseline was as fast three times in a row here: then every fifth trial is often enough."""
        runs = self._known.own_baselines()[-3:]
        speeds = [r.measurement.tokens_per_second for r in runs if r.measurement is not None]
        return len(speeds) == 3 and max(speeds) <= (1 + NOISE) * min(speeds)

    def _is_new(self) -> bool:
        """Whether the best ran for the first time after the baseline's last run: where the machine became faster in
        between, its second run would be as fast."""
        best, given = self._known.best(), self._known.own_baselines()
        ran = (r.began for r in self._known.records if best is not None and r.point == best.point)
        return bool(given) and min(ran, default=0.0) > given[-1].began

    def _best_step(self) -> float:
        """Seconds of a step of the best, as fast as this machine is now; 0: nobody knows."""
        best, first = self._known.best(), first_reference(self._known.records)
        if best is None or best.measurement is None or not best.tokens_per_second:
            return 0.0
        if not first or not self._jobs.reference:
            return 0.0
        now = best.tokens_per_second * self._jobs.reference / first
        return best.measurement.tokens_per_step / now
