"""A study from beginning to end: search, see what each lever gave, prove the winner, answer.

    search     baseline, then what the plan predicts to be best, what was asked for, and what `Search` finds most
               promising; the baseline again now and then
    confirm    the best run once more, between two of the baseline, and whatever may still be faster than it
    refine     the best run with each of its levers put back; one that gave nothing is put back for good. Of a user's
               own model, what each rule gives, and the best run with those alone that give something
    prove      the best run beside the standard float32 model; what turns out wrong is struck, and the next is proved

The search ends when `search.reserve` needs what is left. With what the others leave it begins again, until nothing is
left to try, from the best or from any other run. Then one step of the best is observed, kernel by kernel. Nothing may
take more than the budget and a tenth.

Every trial is a process of its own, and every finished one is in the ledger at once: a worker that is killed loses the
trial at hand and nothing else. Several workers may run the same study through one storage; each compares its trials
with its own runs of the baseline, so that a slower machine, or one that drifts, does no harm to the comparison.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from functools import partial
from typing import Any

from tilewright.errors import UserError
from tilewright.plan.decoder import from_gpt
from tilewright.train.signals import Signals
from tilewright.tune.facts import facts_of, head_of
from tilewright.tune.proof.prove_best import BestProver
from tilewright.tune.report.answer import Answer
from tilewright.tune.report.conclude import conclude
from tilewright.tune.search.ablations import untried, with_gaining_rules, without_main_lever
from tilewright.tune.search.candidates import most_promising, predicted_best, unconfirmed, worth_the_rest
from tilewright.tune.search.generating import Generating, GeneratingSpace, predict_generating
from tilewright.tune.search.known import Known
from tilewright.tune.search.pace import Pace, kind_of
from tilewright.tune.search.predict import misfit, predict
from tilewright.tune.search.predict_own import predict_own
from tilewright.tune.search.reserve import Reserve
from tilewright.tune.search.search import Search
from tilewright.tune.search.space import Point
from tilewright.tune.settings import Settings, Shown
from tilewright.tune.store.ledger import Ledger
from tilewright.tune.store.record import CONFIRMATION, Prediction, RuleGains, key, note_of, read_gains, with_all_rules
from tilewright.tune.store.storage import StorageLost
from tilewright.tune.worker import forkserver
from tilewright.tune.worker.jobs import Jobs
from tilewright.tune.worker.runner import Runner

_CONFIRMATIONS = 4  # runs that are repeated before the study leaves it at that


def run(settings: Settings, shown: Shown | None = None) -> Answer:
    """Run a study, or go on with one, and write its answer; on Ctrl-C what is known so far is the answer."""
    try:
        if settings.budget <= 0:
            raise UserError(f"The budget is {settings.budget:g} s; give some time, such as --budget 5m.")
        pace, facts = _pace(settings), facts_of(settings)
        place = settings.storage, settings.name, head_of(settings), settings.folder
        ledger = Ledger.open(*place, resume=settings.resume, levers=settings.space.levers)
        with contextlib.closing(ledger):
            return _Study(settings, shown or Shown(), pace, ledger, facts).run()
    finally:
        forkserver.stop()


def _pace(settings: Settings) -> Pace:
    space, own = settings.space, settings.machine.get("own_model", {})
    if isinstance(space, GeneratingSpace):
        return Pace(settings.budget, space.device, settings.machine["model"]["parameters"])
    if settings.own_model:
        return Pace(settings.budget, space.device, own.get("parameters", 0), own.get("tensors", 0))
    return Pace(settings.budget, space.device, from_gpt(space.start.model).parameters, ranks=space.ranks)


class _Study:
    """Conducts one worker: what is next is for `search`, to run it for `worker`, to prove it for `proof`."""

    def __init__(self, settings: Settings, shown: Shown, pace: Pace, ledger: Ledger, facts: dict[str, Any]) -> None:
        self.settings, self.shown, self.pace, self.ledger, self.facts = settings, shown, pace, ledger, facts
        self.space, machine, cap = settings.space, settings.machine, settings.memory_cap
        self.signals = Signals(at_once=True)
        draws = machine.get("own_model", {}).get("draws")
        self.known = Known(self.space, ledger, cap or math.inf, settings.own_model, draws)
        ranks = self.space.ranks
        self.search = Search(
            self.space, self._predict, lambda found: misfit(found, machine, cap, ranks), cap or math.inf
        )
        self.untried = partial(untried, self.known, self.search)
        self.without_main_lever = partial(without_main_lever, self.known, self.search)
        self.reserve = Reserve(self.known, self.search, pace, machine)
        self.jobs = Jobs(settings, shown, pace)
        self.runner = Runner(self.known, self.search, self.reserve, self.jobs, shown, self.signals)
        self.prover = BestProver(
            settings, self.known, self.reserve, prove=self.jobs.prove, heed=self.runner.heed, say=shown.say
        )

    def _predict(self, point: Point) -> Prediction | None:
        run, machine = self.space.at(point), self.settings.machine
        if isinstance(run, Generating):
            return predict_generating(run, machine)
        if self.settings.own_model:
            return predict_own(run, self.space.start, machine)
        return predict(run, machine, self.space.ranks)

    def _least(self) -> float:
        """Seconds that the baseline, one other trial and the proof will take, by what is usual."""
        points = [self.space.baseline, *predicted_best(self.search)]
        trials = sum(self.reserve.expected(point) for point in points) * 2 / len(points)
        return trials + self.pace.proof()

    def run(self) -> Answer:
        """Run the whole study and return its answer."""
        interrupted = False
        self.ledger.note("facts", self.facts)
        self.known.read_wrong()
        finished = len(self.known.read())
        self.shown.begin({**self.facts, "name": self.settings.name, "finished": finished, "budget": self.pace.left})
        if self.pace.left < (least := self._least()):
            self.shown.say(
                f"The budget is short: the baseline, one other run and its proof take about {least:.0f} s here; give "
                f"--budget {math.ceil(least / 30) * 30}s."
            )
        try:
            with self.signals:
                self._work()
        except KeyboardInterrupt:
            interrupted = True
            self.shown.say("stopping: what is known so far is the answer; --resume goes on.")
        except StorageLost as lost:
            lost.answer = self._answer(interrupted)
            raise
        with Signals():  # who asks twice loses no answer
            return self._answer(interrupted)

    def _work(self) -> None:
        asked = sorted(self.settings.first, key=self.reserve.expected)
        self.ledger.propose([(point, "search") for point in (*predicted_best(self.search), *asked)])
        while True:
            known, proofs = len(self.known.read()), len(self.known.proofs)
            self._search()
            self._confirm(wait=False)  # first: what its levers give is of interest for the best alone
            self._refine()
            self._confirm()
            if len(self.known.read()) > known:  # less is left to be done at the end: there may be time for more
                continue
            self.prover.prove()
            self._confirm()  # where the proof had to come first
            # Whatever else is found has to be run and proved as well.
            nothing_new = len(self.known.read()) == known and len(self.known.proofs) == proofs
            if nothing_new and self._use_the_rest():
                continue
            if nothing_new or self.pace.left < self.pace.another:
                # The rest needs no proof. What observes the best may overrun.
                self.runner.run_wanted(self.untried, "ablation", self.reserve.observing_takes)
                return self._observe()

    def _search(self) -> None:
        """Run the most promising points as long as there is time, and the baseline in any case."""
        while not self.known.records or self.reserve.has_time_to_search(self.runner.baseline_is_due):
            self.runner.heed()
            self.ledger.recover()
            claim = self.runner.take(fits=self.reserve.fits)
            if claim is not None:
                self.runner.run(claim)
                continue
            running = self.ledger.running()
            points = [each["point"] for each in running]
            point, purpose = most_promising(self.known, self.search, self.reserve, points)
            if point is not None:
                self.ledger.propose([(point, purpose)])
            elif any(each["purpose"] == "search" for each in running):
                self.runner.wait()  # what they find may open a way on
            elif not self.reserve.has_time_for_the_baseline() or not self.runner.run_baseline():
                return

    def _confirm(self, wait: bool = True) -> None:
        """Run the best again, and whatever may be faster: the quickest of many was also lucky.

        Args:
            wait: for another worker who is at it; or there is something else to do meanwhile.
        """

        def confirmations() -> int:
            return sum(record.purpose == CONFIRMATION for record in self.known.records)

        def again() -> list[Point]:
            if confirmations() >= most:
                return []
            return unconfirmed(self.known, () if wait else [each["point"] for each in self.ledger.running()])

        most = confirmations() + _CONFIRMATIONS
        while self.runner.run_wanted(again, CONFIRMATION, self.reserve.must_take):
            pass  # what the baseline at the end says may raise other doubts

    def _refine(self) -> None:
        """Run the best without each of its levers, and drop levers that give nothing."""
        self.runner.run_wanted(self.without_main_lever, "ablation", self.reserve.proof_takes)
        self._measure_rules()
        self.runner.run_wanted(partial(with_gaining_rules, self.known), "ablation", self.reserve.proof_takes)
        self.runner.run_wanted(self.untried, "ablation", self.reserve.end_takes)

    def _measure_rules(self) -> None:
        """See what each rule gives beside the best, where there is time to run it without those that give nothing."""
        best = self.known.best()
        if best is None or self.known.rules_of(best) is not None:
            return
        self.runner.heed()
        whole, run, takes = with_all_rules(best), self.known.with_all_rules(), self.reserve.rules_take()
        found = read_gains(self.ledger.noted(name := note_of("rules", whole)))
        if found is None and run is not None and takes < self.pace.left - self.reserve.must_take():
            found = self.jobs.measure_rules(run.point, takes - self.reserve.expected(run.point)) or RuleGains()
            self.ledger.note(name, dataclasses.asdict(found))  # what failed is not tried again
        if found is not None:
            self.known.rules[key(whole.point)] = found

    def _use_the_rest(self) -> bool:
        """Run what was asked for, then what may still beat the best; return whether anything ran."""

        def until() -> float:
            return max((self.reserve.winner_takes(point) for point in wanted()), default=0.0)

        self.ledger.recover()
        claim = self.runner.take("search", self.reserve.fits_at_the_end)
        if claim is not None:
            self.runner.run(claim)
            return True
        wanted = partial(worth_the_rest, self.known, self.search, self.reserve)
        return self.runner.run_wanted(wanted, "search", until)

    def _observe(self) -> None:
        """See what each kernel of the best run has to do, for the report; it may overrun the budget by a little."""
        self.runner.heed()
        if isinstance(self.space, GeneratingSpace):  # whose steps are graphs, and of a few kernels that read weights
            return
        best, _ = self.known.proved()
        if best is None or key(best.point) not in self.known.proofs:
            return
        work = self.ledger.noted(note_of("work", best))
        limit = self.pace.limit(kind_of(self.space.at(best.point)))
        if work is None and limit < self.reserve.expected(best.point):
            return self.shown.say("No time is left to observe the kernels of the best run.")
        found = self.known.work[key(best.point)] = work or self.jobs.observe(best.point, limit)
        if work is None and found:
            self.ledger.note(note_of("work", best), found)

    def _answer(self, interrupted: bool) -> Answer:
        with contextlib.suppress(StorageLost):
            self.known.read()
        self.jobs.keep(self.known.records)
        elapsed = self.pace.elapsed
        answer = conclude(self.settings, self.facts, self.known, self.search, elapsed=elapsed, interrupted=interrupted)
        best, proof = self.known.proved()
        if best is not None and proof is not None:
            with contextlib.suppress(UserError):  # the answer is written
                self.prover.note(best, proof)
        return answer
