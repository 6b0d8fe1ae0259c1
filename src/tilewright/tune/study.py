"""A study from beginning to end: search, see what each lever gave, prove the winner, answer.

    search     reference, then what the plan predicts to be best, what was asked for, and what `Search` finds most
               promising; the reference again now and then
    confirm    the best run once more, between two of the reference, and whatever may still be faster than it
    refine     the best run with each of its levers put back; one that gave nothing is put back for good
    prove      the best run beside the standard float32 model; what turns out wrong is struck, and the next is proved

Time for the proof and for the ablation of the main lever is always kept; time for the rest up to half of the budget.
The search ends when they need what is left. With what they leave it begins again, until nothing is left to try. Then
one step of the best is observed, kernel by kernel. Nothing may take more than the budget and a tenth of it.

Every trial is a process of its own, and every finished one is in the ledger at once: whoever is killed loses the trial
at hand and nothing else. Several workers may run the same study through one storage; each compares its trials with its
own runs of the reference, so that a slower machine, or one that drifts, does no harm to the comparison.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Callable
from typing import Any

import tilewright
from tilewright.errors import UserError
from tilewright.measure.results import SCHEMA, write_json
from tilewright.plan.decoder import from_gpt
from tilewright.train.signals import Signals
from tilewright.tune.proof.verdict import at_its_own_size
from tilewright.tune.report.answer import Answer, answered, write_best
from tilewright.tune.search.choose import NOISE, best_of, confirmed, doubted, proved
from tilewright.tune.search.drift import corrected, first_reference
from tilewright.tune.search.pace import OPTIMIZED, Pace, kind_of
from tilewright.tune.search.predict import misfit, predict
from tilewright.tune.search.search import Search
from tilewright.tune.search.space import Point, Space
from tilewright.tune.search.standard import float32, float32_losses
from tilewright.tune.settings import Settings, Shown
from tilewright.tune.store.ledger import Claim, Ledger, StorageLost
from tilewright.tune.store.proof import VERDICTS, Proof
from tilewright.tune.store.record import CONFIRMATION, Prediction, Record, first_step, key, note_of
from tilewright.tune.worker import forkserver
from tilewright.tune.worker.jobs import Jobs

_SEARCH = 0.5  # of the time, at least, is for searching, whatever comes after it would take
REFERENCE_EVERY = 5  # the baseline is every fifth of the trials
_CONFIRMATIONS = 4  # runs that are repeated before the study leaves it at that
_PROOFS = 3  # runs that may turn out wrong before the study gives up
_CURVE = 0.04  # of the time, at most, for a few steps of the standard model in float32
_CURVE_STEPS = 4  # that it takes as long as: three, and what is before them
_FIRST = 30.0  # seconds that the first run may take, whatever the budget: without it there is no answer
_LEAST_PROOF = 5.0  # seconds: with less nothing would come of it
_POLL = 0.5  # seconds between two looks at what other workers do


def run(settings: Settings, shown: Shown | None = None) -> Answer:
    """Run a study, or go on with one, and write its answer; on Ctrl-C what is known so far is the answer."""
    try:
        return _Study(settings, shown or Shown()).run()
    finally:
        forkserver.stop()


def digest_of(space: Space, own_model: str) -> str:
    """What is searched, as a digest: two studies with the same one can be gone on with as one."""
    what = {"start": dataclasses.asdict(space.start), "levers": space.levers, "own_model": own_model}
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


class _Study:
    def __init__(self, settings: Settings, shown: Shown) -> None:
        if settings.budget <= 0:
            raise UserError(f"The budget is {settings.budget:g} s; give some time, such as --budget 5m.")
        self.settings, self.shown, self.space = settings, shown, settings.space
        self.pace = self._pace()
        self.jobs = Jobs(settings, shown, self.pace)
        self.machine = settings.machine
        self.cap = settings.memory_cap or math.inf
        self.search = Search(
            self.space, self._predict, lambda found: misfit(found, self.machine, settings.memory_cap), self.cap
        )
        self.records: list[Record] = []  # as they were last read
        self.proofs: dict[str, Proof] = {}  # by the key of the run's point
        self.work: dict[str, list[dict[str, Any]]] = {}  # likewise: of a step, as `measure.work` has it
        self.wrong: set[str] = set()
        self.noted: Any = None  # of the losses of the standard model in float32
        self.signals = Signals(at_once=True)
        self.since = REFERENCE_EVERY  # trials since then

    def _pace(self) -> Pace:
        settings = self.settings
        own = settings.machine.get("own_model", {})
        if settings.own_model:
            return Pace(settings.budget, self.space.device, own.get("parameters", 0), own.get("tensors", 0))
        return Pace(settings.budget, self.space.device, from_gpt(self.space.start.model).parameters)

    def run(self) -> Answer:
        settings, interrupted = self.settings, False
        facts = self._facts()
        place = settings.storage, settings.name, self._head(), settings.folder
        self.ledger = Ledger.open(*place, resume=settings.resume, levers=self.space.levers)
        with contextlib.closing(self.ledger):
            self.ledger.note("facts", facts)
            self.wrong.update(self.ledger.noted("wrong") or ())
            self.shown.begin({**facts, "name": settings.name, "finished": len(self._read()), "budget": self.pace.left})
            try:
                with self.signals:
                    self._work()
            except KeyboardInterrupt:
                interrupted = True
                self.shown.say("stopping: what is known so far is the answer; --resume goes on.")
            except StorageLost as lost:
                lost.answer = self._answer(facts, interrupted)
                raise
            with Signals():  # who asks twice loses no answer
                return self._answer(facts, interrupted)

    def _facts(self) -> dict[str, Any]:
        measured = {name: value for name, value in self.machine.items() if name != "machine"}
        start = dataclasses.asdict(self.space.start)
        if self.settings.own_model:  # which has nothing to do with Tilewright's model and data
            del start["model"], start["data"]
        return {
            "machine": self.machine["machine"],
            "ceilings": {**measured, "memory_cap": self.settings.memory_cap},
            "start": start,
            "levers": {name: list(values) for name, values in self.space.levers.items()},
            "own_model": self.settings.own_model,
            "on_gpu": self.settings.on_gpu,
        }

    def _head(self) -> dict[str, Any]:
        """What has to be the same for two trials to be compared."""
        digest = digest_of(self.space, self.settings.own_model)
        versions = {name: self.machine["machine"].get(name) for name in ("torch", "triton")}
        return {"schema": SCHEMA, "tilewright": tilewright.__version__, "space": digest, **versions}

    # The parts of a study

    def _work(self) -> None:
        asked = sorted(self.settings.first, key=self._expected)
        self.ledger.propose([(point, "search") for point in (*self._predicted_best(), *asked)])
        while True:
            known, proofs = len(self._read()), len(self.proofs)
            self._search()
            self._confirm(wait=False)  # first: what its levers give is of interest for the best alone
            self._refine()
            self._confirm()
            if len(self._read()) > known:  # less is left to be done at the end: there may be time for more
                continue
            self._prove()
            self._confirm()  # where the proof had to come first
            # Whatever else is found has to be run and proved as well.
            nothing_new = len(self._read()) == known and len(self.proofs) == proofs
            if nothing_new or self.pace.left < self.pace.another:
                # The rest needs no proof. What observes the best may overrun.
                self._see(self._untried, "ablation", self._observing_takes)
                return self._observe()

    def _predicted_best(self) -> list[Point]:
        """What the plan expects most of, and nothing where it has nothing to say: the first run to try."""
        if self.search.prediction(self.space.origin) is None:
            return []
        guess = self.search.descend(self.space.origin)
        return [guess] if guess != self.space.origin else []

    def _search(self) -> None:
        """What is most promising, as long as there is time; the baseline even where there is none."""
        while not self.records or self._has_time_to_search():
            self._heed()
            self.ledger.recover()
            claim = self._take(fits=self._fits)
            if claim is not None:
                self._run(claim)
                continue
            running = self.ledger.running()
            point, purpose = self._next([each["point"] for each in running])
            if point is not None:
                self.ledger.propose([(point, purpose)])
            elif any(each["purpose"] == "search" for each in running):
                time.sleep(_POLL)  # what they find may open a way on
            elif not self._has_time_for_the_reference() or not self._run_baseline():
                return

    def _has_time_for_the_reference(self) -> bool:
        """Whether the baseline takes no time from what follows."""
        rest = self._end_takes(searching=True, all_of_it=True)
        return self.pace.left - self._expected(self.space.origin) > rest

    def _has_time_to_search(self) -> bool:
        """Whether a trial, and the baseline where it is time for that, leaves enough for what follows."""
        given = self._expected(self.space.origin)
        rest = self._end_takes(searching=True) + (given if self.since >= REFERENCE_EVERY else 0.0)
        return self.pace.left > max(rest, given)

    def _fits(self, point: Point) -> bool:
        """Whether a run that waits can end before the rest has to begin; it may not take more than a trial may."""
        takes = min(self._expected(point), self.pace.limit(kind_of(self.space.at(point))))
        return takes < self.pace.left - self._end_takes(searching=True)

    def _next(self, running: list[Point]) -> tuple[Point | None, str]:
        """What is most promising of what there is still time for; before that, what a change of speed has spoilt."""
        records, dear = self._read(), list(running)
        best = self._best()
        spoilt = doubted(records, best, self.cap, self.wrong, shaken=True) if best is not None else None
        spare = self.pace.left - self._end_takes(searching=True)
        if spoilt is not None and spoilt.point not in running and self._expected(spoilt.point) < spare:
            return spoilt.point, CONFIRMATION
        while (point := self.search.next(records, dear)) is not None:
            if self._expected(point) < spare:
                break
            dear.append(point)
        return point, "search"

    def _confirm(self, wait: bool = True) -> None:
        """Run the best once more, and what may be faster than that: to be the quickest of many takes luck as well.

        Args:
            wait: for another worker who is at it; or there is something else to do meanwhile.
        """

        def confirmations() -> int:
            return sum(record.purpose == CONFIRMATION for record in self.records)

        def again() -> list[Point]:
            best = self._best()
            if best is None or confirmations() >= most:
                return []
            record = doubted(self.records, best, self.cap, self.wrong)
            if record is None or (not wait and record.point in [each["point"] for each in self.ledger.running()]):
                return []
            return [record.point]

        most = confirmations() + _CONFIRMATIONS
        while self._see(again, CONFIRMATION, self._must_take):
            pass  # what the baseline at the end says may raise other doubts

    def _refine(self) -> None:
        """Put each lever of the best run back; without one that gave nothing, see what the others give."""
        self._see(self._without_main_lever, "ablation", self._proof_takes)
        self._see(self._untried, "ablation", self._end_takes)

    def _untried(self) -> list[Point]:
        """The best run less each of its levers, where nobody has run that; first what is expected to lose least."""
        return self._not_yet_run(self._ablations())

    def _without_main_lever(self) -> list[Point]:
        """The best run less the lever without which it is expected to be slowest; nothing where that has run."""
        return self._not_yet_run(self._ablations()[-1:])

    def _ablations(self) -> list[Point]:
        best = self._best()
        names = self.space.changes(best.point) if best is not None else ()
        found = [{**best.point, name: self.space.origin[name]} for name in names] if best is not None else []
        return sorted((p for p in found if self.space.refusal(p) is None), key=self.search.expected_seconds)

    def _not_yet_run(self, points: list[Point]) -> list[Point]:
        ran = {key(record.point) for record in self.records}
        return [point for point in points if key(point) not in ran]

    def _see(self, wanted: Callable[[], list[Point]], purpose: str, until: Callable[[], float]) -> bool:
        """Run what is wanted, the first of it next, as far as time allows, and wait for what others run of it.

        Little decides here: the baseline comes before them, and after. Returns whether anything ran.
        """
        ran = False
        while True:
            self._heed()
            self.ledger.recover()
            self._read()
            spare = self.pace.left - until()
            due = [point for point in wanted() if self._expected(point) < spare]
            running = {key(each["point"]) for each in self.ledger.running()}
            free = [point for point in due if key(point) not in running]
            if not due:
                break
            if not free:
                time.sleep(_POLL)
            elif not ran and self._has_time_for_both(free[0], spare) and self._run_baseline():
                ran = True
            else:
                self.ledger.propose([(free[0], purpose)])
                tight = self._expected(self.space.origin) + self._expected(free[0]) >= spare
                if (claim := self.ledger.take(purpose) if tight else self._take(purpose)) is not None:
                    self._run(claim)
                    ran = True
        if ran and self.pace.left - self._expected(self.space.origin) > until():
            self._run_baseline()
        return ran

    def _has_time_for_both(self, point: Point, spare: float) -> bool:
        """Whether the baseline before a run takes no time from what else is to be done."""
        both = self._expected(self.space.origin) + self._expected(point)
        return both < min(spare, self.pace.left - self._end_takes())

    def _prove(self) -> None:
        """Prove the best; one that was found later, with no time to confirm and prove it, leaves the proof as it is."""
        if any(_is_sound(proof) for proof in self.proofs.values()) and self.pace.left < self._end_takes():
            return
        if all(record.point == self.space.origin for record in self.records):
            return  # there is nothing but the baseline, which is proved only where something was compared with it
        for attempt in range(_PROOFS - sum(proof.verdict == "wrong" for proof in self.proofs.values())):
            self._heed()
            self._read()
            best = self._best()
            if best is None or key(best.point) in self.proofs:
                return
            noted = self.ledger.noted(note_of("proof", best))
            if noted is not None and _is_sound(known := Proof.from_dict(noted)):  # another worker's, or of another day
                self.proofs[key(best.point)] = known
                return
            limit = self.pace.most
            if limit < _LEAST_PROOF and not attempt:
                why = "no time was left to prove it; --resume with more --budget does."
                self.proofs[key(best.point)] = Proof("not proven", why)
            if limit < _LEAST_PROOF:
                return
            # In the same process, and only now: there is nothing better to be done with the time.
            curve = self._curve()

            def told(proof: Proof, best: Record = best) -> None:
                self.proofs[key(best.point)] = self._at_its_own_size(best, proof)

            proof = self.jobs.prove(best.point, limit, curve, told)
            told(proof)
            own = self.proofs[key(best.point)]
            self._note_proof(best, own)
            if proof.curve or proof.no_curve:
                found: dict[str, Any] = {"float32_losses": proof.curve}
                self.ledger.note("float32", found if proof.curve else {"no_float32": proof.no_curve})
            if own.verdict != "wrong":
                return
            self.shown.say(f"{self.space.label(best.point)} is wrong and not recommended: {own.why}")
            self.wrong.add(key(best.point))
            # Others that show the same need no proof of their own.
            self.wrong |= {key(r.point) for r in self.records if self._at_its_own_size(r, proof) is not proof}
            self.wrong.update(self.ledger.noted("wrong") or ())  # of other workers
            self.ledger.note("wrong", sorted(self.wrong))

    def _note_proof(self, best: Record, proof: Proof) -> None:
        name = note_of("proof", best)
        if proof.verdict != "not proven" or self.ledger.noted(name) is None:  # another worker may have had more time
            self.ledger.note(name, dataclasses.asdict(proof))

    def _float32(self) -> dict[str, Any]:
        with contextlib.suppress(StorageLost):
            self.noted = self.ledger.noted("float32") or self.noted
        return float32_losses(self.space, self.records, self.settings.own_model, self.noted)

    def _observe(self) -> None:
        """See what each kernel of the best run has to do, for the report; it may overrun the budget by a little."""
        self._heed()
        best, _ = self._proved()
        if best is None or key(best.point) not in self.proofs:
            return
        work = self.ledger.noted(note_of("work", best))
        limit = self.pace.limit(kind_of(self.space.at(best.point)))
        if work is None and limit < self._expected(best.point):
            return self.shown.say("No time is left to observe the kernels of the best run.")
        self.work[key(best.point)] = work or self.jobs.observe(best.point, limit)
        if work is None and self.work[key(best.point)]:
            self.ledger.note(note_of("work", best), self.work[key(best.point)])

    def _must_take(self) -> float:
        """Seconds that are kept whatever else is of interest: to prove the best, and to put its main lever back."""
        return self._proof_takes() + sum(map(self._expected, self._without_main_lever()))

    def _observing_takes(self) -> float:
        """Seconds to leave for observing the best, beside what that may overrun the budget by."""
        best = self._best()
        return max(0.0, self._expected(best.point) - self.pace.most + self.pace.left) if best is not None else 0.0

    def _proof_takes(self) -> float:
        best = self._best()
        if best is None or key(best.point) in self.proofs:
            return 0.0
        takes = self.pace.proof(first_step(self.records, best))
        if most := self._curve():
            plain = predict(float32(self.space.start), self.machine)
            takes += min(most, _CURVE_STEPS * plain.seconds)
        return takes

    def _curve(self) -> float:
        """Seconds that a few steps of the standard model in float32 may take; none where nobody needs them."""
        return 0.0 if self._float32() else _CURVE * self.pace.budget

    def _end_takes(self, searching: bool = False, all_of_it: bool = False) -> float:
        """Seconds to leave for putting levers of the best back, for confirming, for proving and for observing it.

        What must be is left time for, and the rest as long as half of the budget is for the search.

        Args:
            searching: what is found may have to be confirmed, and proved although the best is; as may one of fewer
                levers than the best.
            all_of_it: whatever it leaves for the search.
        """
        best = self._best()
        if best is None:
            return 0.0
        must = self._must_take()
        if searching and all(record.point == self.space.origin for record in self.records):
            return must  # the first that is tried is worth more than all the rest
        again = self._expected(self.space.origin) + self._expected(best.point)
        more = self._expected(best.point)
        if searching:
            untried = self._untried()
            more += again + sum(map(self._expected, untried)) + (again if untried else 0.0)
            if key(best.point) in self.proofs:
                must += self.pace.proof(first_step(self.records, best)) + self._expected(best.point)
        elif not confirmed(self.records, best):
            more += again
        most = math.inf if all_of_it else max(0.0, (1 - _SEARCH) * self.settings.budget - must)
        return must + min(more, most)

    def _at_its_own_size(self, record: Record, proof: Proof) -> Proof:
        """The proof, or that a run is wrong at its own batch; where something is drawn by chance, nobody can tell."""
        reference = next((r for r in self.records if r.purpose == "reference" and r.outcome == "done"), None)
        drawn = self.settings.own_model or self.space.start.model.dropout > 0
        if drawn or reference is None or not reference.measurement:
            return proof
        for run in self.records:  # a second one of the same run may have had fewer steps
            if run.point == record.point and run.measurement is not None:
                found = at_its_own_size(proof, reference.measurement.losses, run.measurement.losses)
                if found is not proof:
                    return found
        return proof

    def _answer(self, facts: dict[str, Any], interrupted: bool) -> Answer:
        with contextlib.suppress(StorageLost):
            self._read()
        self.jobs.keep(self.records)
        reasons = list(self.search.discarded.values())
        best, proof = self._proved()
        answer = answered(
            self.space, self.records, best, name=self.settings.name, proof=proof,
            budget=self.settings.budget, elapsed=self.pace.elapsed, interrupted=interrupted,
            discarded={reason: reasons.count(reason) for reason in dict.fromkeys(reasons)},
            work=self.work.get(key(best.point), []) if best is not None else [],
            **self._float32(), **facts,
        )  # fmt: skip
        folder = self.settings.folder
        write_json(folder / "answer.json", {"schema": SCHEMA, "command": "tune", **answer.as_dict()})
        write_best(answer, self.space, folder)
        if best is not None and proof is not None:
            with contextlib.suppress(UserError):  # the answer is written
                self._note_proof(best, proof)
        return answer

    def _proved(self) -> tuple[Record | None, Proof | None]:
        return proved(self.space, self.records, self.proofs, self.cap, self.wrong)

    def _heed(self) -> None:
        """Stop where somebody has asked for it, though the interrupt itself was lost."""
        if self.signals.came:
            raise KeyboardInterrupt

    # One trial

    def _take(self, purpose: str = "", fits: Callable[[Point], bool] = lambda point: True) -> Claim | None:
        """The next that waits and fits, one of a purpose first; before it the baseline, where it is time for it."""
        failed = [r for r in self.records if r.purpose == "reference" and r.outcome != "done"]
        if self.since >= REFERENCE_EVERY and (self.jobs.reference or len(failed) < 2):
            self.ledger.propose([(self.space.origin, "reference")])
            return self.ledger.take("reference")
        return self.ledger.take(purpose, fits)

    def _run_baseline(self) -> bool:
        """Run the baseline, unless it was the last that ran here or need not run so often; whether anything ran."""
        if self.since <= 1 or (self.since < REFERENCE_EVERY and self._is_steady() and not self._is_new()):
            return False
        self.since = REFERENCE_EVERY
        claim = self._take()
        if claim is not None:
            self._run(claim)
        return claim is not None

    def _is_steady(self) -> bool:
        """Whether the baseline was as fast three times in a row here: then every fifth trial is often enough."""
        speeds = [r.measurement.tokens_per_second for r in self._references()[-3:] if r.measurement is not None]
        return len(speeds) == 3 and max(speeds) <= (1 + NOISE) * min(speeds)

    def _is_new(self) -> bool:
        """Whether the best ran for the first time after the baseline's last run: where the machine became faster in
        between, its second run would be as fast."""
        best, given = self._best(), self._references()
        first = min((r.began for r in self.records if best is not None and r.point == best.point), default=0.0)
        return bool(given) and first > given[-1].began

    def _references(self) -> list[Record]:
        return [r for r in self.records if r.purpose == "reference" and r.worker == self.ledger.worker]

    def _run(self, claim: Claim) -> None:
        self.since = 1 if claim.purpose == "reference" else self.since + 1
        try:
            stops = claim.purpose not in ("reference", CONFIRMATION)
            prediction = self.search.prediction(claim.point)
            best = self._best_step() if stops else 0.0
            record = self.jobs.measure(claim, prediction, self.ledger.worker, best, self._limit(claim))
        except BaseException:  # Ctrl-C: somebody may take it later
            self.ledger.release(claim)
            raise
        self.ledger.finish(claim, record)
        self._read()
        if claim.purpose == "reference":
            self.jobs.keep(self.records)
        self.shown.record(next((r for r in self.records if r.began == record.began), record), self._best())

    def _limit(self, claim: Claim) -> float:
        """Seconds that a trial may take; a new one leaves enough to prove what is the best by then.

        The proof of one that is compiled compiles it again, which takes about as long as the trial.
        """
        kind = kind_of(self.space.at(claim.point))
        limit = self.pace.limit(kind)
        if not self.records:
            return max(_FIRST, limit)
        if claim.purpose != "search":
            return limit
        left = self.pace.left - self._must_take()
        if kind not in ("none", OPTIMIZED):
            left = (self.pace.left - self.pace.proof()) / 2
        return min(limit, max(left, 1.5 * self._expected(claim.point)))

    def _best_step(self) -> float:
        """Seconds of a step of the best, as fast as this machine is now; 0: nobody knows."""
        best, first = self._best(), first_reference(self.records)
        if (
            best is None
            or best.measurement is None
            or not best.tokens_per_second
            or not first
            or not self.jobs.reference
        ):
            return 0.0
        now = best.tokens_per_second * self.jobs.reference / first
        return best.measurement.tokens_per_step / now

    def _predict(self, point: Point) -> Prediction | None:
        return predict(self.space.at(point), self.machine) if not self.settings.own_model else None

    def _expected(self, point: Point) -> float:
        """Seconds of a trial: what it took the last time, out of caches perhaps; of one that is new, what is usual."""
        took = [record.ended - record.began for record in self.records if record.point == point and record.measurement]
        return took[-1] if took else self.pace.expected(kind_of(self.space.at(point)))

    # What is known so far

    def _read(self) -> list[Record]:
        self.records = corrected(self.ledger.records())
        return self.records

    def _best(self) -> Record | None:
        return best_of(self.space, self.records, self.cap, self.wrong)


def _is_sound(proof: Proof) -> bool:
    return proof.verdict in VERDICTS[:3]
