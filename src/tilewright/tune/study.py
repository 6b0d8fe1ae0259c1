"""A study from beginning to end: search, see what each lever gave, prove the winner, answer.

    search     reference, then what `Search` finds most promising, the reference again now and then
    refine     the best run with each of its levers put back; one that gave nothing is put back for good
    prove      the best run beside the standard float32 model; what turns out wrong is struck, and the next is proved

Every trial is a process of its own, and every finished one is in the ledger at once: whoever is killed loses the trial
at hand and nothing else. Several workers may run the same study through one storage; each compares its trials with its
own runs of the reference, so that a slower machine, or one that drifts, does no harm to the comparison.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tilewright
from tilewright.errors import UserError
from tilewright.measure.results import SCHEMA, write_json
from tilewright.train.configuration import from_dict, write_yaml
from tilewright.tune import cache
from tilewright.tune.answer import VERDICTS, Ablation, Answer, Layer, Proof, sentences
from tilewright.tune.ledger import Claim, Ledger
from tilewright.tune.predict import misfit, predict
from tilewright.tune.process import TRIAL, Limits, run_child
from tilewright.tune.record import Measurement, Prediction, Record
from tilewright.tune.search import Search, fastest
from tilewright.tune.space import Point, Space, key
from tilewright.tune.storage import in_folder

SEARCH, REFINE = 0.7, 0.85  # of the budget are over when searching, and refining, end
REFERENCE_EVERY = 5  # trials between two runs of the reference
HOPELESS = 1.25  # a trial that takes this much longer than the best is ended early
SILENCE = 300.0  # seconds; compiling a large model says nothing for minutes
NOISE = 0.005  # two speeds this near are the same, however narrow their spreads
_PROOFS = 3  # runs that may turn out wrong before the study gives up
_POLL = 0.5  # seconds between two looks at what other workers do


@dataclass(frozen=True)
class Settings:
    """What a study is to do."""

    space: Space
    machine: dict[str, Any]  # as `probe` measured it
    folder: Path  # of best.yaml, answer.json, the journal
    name: str
    storage: str  # an SQLAlchemy URL
    budget: float  # seconds
    resume: bool = False
    memory_cap: float | None = None  # bytes
    own_model: str = ""  # package.module:factory
    path: tuple[str, ...] = ()  # where that package is
    fresh: bool = False  # measure although the cache has it
    first: tuple[Point, ...] = ()  # points to try before any other
    command: Sequence[str] = TRIAL


@dataclass(frozen=True)
class Shown:
    """How a study tells whoever watches."""

    begin: Callable[[dict[str, Any]], None] = lambda facts: None
    trial: Callable[[str, Point, Prediction | None], None] = lambda what, point, prediction: None
    event: Callable[[dict[str, Any]], None] = lambda event: None
    record: Callable[[Record, Record | None], None] = lambda record, best: None
    say: Callable[[str], None] = lambda text: None


def probe(
    device: str, *, own_model: str = "", path: Sequence[str] = (), command: Sequence[str] = TRIAL
) -> dict[str, Any]:
    """What this machine can do, and of a model of somebody's own how large its batch is; from a process of its own."""
    job = {"kind": "probe", "device": device, "seconds": 2.0, "own_model": own_model, "path": list(path)}
    ended = run_child(job, Limits(120.0, 120.0), command=command)
    if ended.value is None:
        raise UserError(ended.error if ended.outcome == "refused" else f"The machine was not measured: {ended.error}")
    return ended.value


def run(settings: Settings, shown: Shown | None = None) -> Answer:
    """Run a study, or go on with one, and write its answer; on Ctrl-C what is known so far is the answer."""
    return _Study(settings, shown or Shown()).run()


class _Study:
    def __init__(self, settings: Settings, shown: Shown) -> None:
        if settings.budget <= 0:
            raise UserError(f"The budget is {settings.budget:g} s; give some time, such as --budget 5m.")
        self.settings, self.shown, self.space = settings, shown, settings.space
        self.began = time.monotonic()
        self.machine = settings.machine
        self.proof: Proof | None = None
        self.wrong: set[str] = set()
        self.preferred: str | None = None  # the key of a simpler run that is as fast as the fastest
        self.reference = 0.0  # tokens a second of the run as given, when it last ran here
        self.durations: dict[str, list[float]] = {}  # seconds a trial took, by compile mode

    def run(self) -> Answer:
        settings = self.settings
        self.search = Search(self.space, self._predict, lambda found: misfit(found, self.machine, settings.memory_cap))
        facts = {
            "machine": self.machine["machine"],
            "ceilings": {
                **{name: value for name, value in self.machine.items() if name != "machine"},
                "memory_cap": settings.memory_cap,
            },
            "start": dataclasses.asdict(self.space.start),
            "levers": {name: list(values) for name, values in self.space.levers.items()},
        }
        place = settings.storage, settings.name, self._head(), settings.folder
        self.ledger = Ledger.open(*place, resume=settings.resume, levers=self.space.levers)
        with contextlib.closing(self.ledger):
            self.ledger.note("facts", facts)
            self.shown.begin({**facts, "name": settings.name, "finished": len(self.ledger.records())})
            try:
                self._search()
                self._refine()
                self._prove()
                interrupted = False
            except KeyboardInterrupt:
                interrupted = True
                self.shown.say("stopping: what is known so far is the answer; go on with --resume.")
            return self._answer(facts, interrupted)

    def _head(self) -> dict[str, Any]:
        start, levers = dataclasses.asdict(self.space.start), self.space.levers
        what = {"start": start, "levers": levers, "own_model": self.settings.own_model}
        digest = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()
        return {"schema": SCHEMA, "tilewright": tilewright.__version__, "space": digest}

    @property
    def left(self) -> float:
        return self.settings.budget - (time.monotonic() - self.began)

    # The parts of a study

    def _search(self) -> None:
        since = REFERENCE_EVERY
        self.ledger.propose([(point, "search") for point in self.settings.first])
        while self.left > (1 - SEARCH) * self.settings.budget:
            self.ledger.recover()
            if since >= REFERENCE_EVERY:
                self.ledger.propose([(self.space.origin, "reference")])
                since = 0
            claim = self.ledger.take()
            if claim is None:
                records, running = self._records(), [each["point"] for each in self.ledger.running()]
                point = self.search.next(records, running)
                if point is not None and self._expected(point) < self.left:
                    self.ledger.propose([(point, "search")])
                elif running:
                    time.sleep(_POLL)  # what they find may open a way on
                else:
                    return
                continue
            since += 1
            self._run(claim)

    def _refine(self) -> None:
        """Put each lever of the best run back; where nothing is lost by it, for good, the most useless first."""
        while (best := self._best()) is not None:
            without = {name: {**best.point, name: self.space.origin[name]} for name in self.space.changes(best.point)}
            without = {name: point for name, point in without.items() if self.space.refusal(point) is None}
            # What is in the ledger already is not queued again; the run as given is there as the reference.
            self.ledger.propose([(p, "ablation") for p in without.values() if p != self.space.origin])
            # What a proof takes is left, as long as that is not most of all there is.
            proof = min(0.4 * self.settings.budget, 40.0 + 2 * _first_step(best))
            while self.left > max((1 - REFINE) * self.settings.budget, proof) and (claim := self.ledger.take()):
                self._run(claim)
            wanted = {key(point) for point in without.values()}
            found = [record for record in self._records() if key(record.point) in wanted]
            simpler = fastest([record for record in found if _as_fast(record, best)], self._cap, self.wrong)
            if simpler is None:
                return
            self.preferred = key(simpler.point)

    def _prove(self) -> None:
        for _ in range(_PROOFS):
            best = self._best()
            if best is None:
                return
            job = {
                "kind": "prove", "best": dataclasses.asdict(self.space.at(best.point)), "steps": 8,
                "seed": self.space.start.seed, "own_model": self.settings.own_model, "path": list(self.settings.path),
            }  # fmt: skip
            self.shown.trial("proof", best.point, None)
            limit = max(120.0, self.left) + 3 * _first_step(best)
            ended = run_child(job, Limits(limit, limit), self.shown.event, self.settings.command)
            proof = _proof(ended.value, ended.error)
            self.proof = self._at_its_own_size(best, proof)
            if self.proof.verdict != "wrong":
                return
            self.shown.say(f"{self.space.label(best.point)} is wrong and not recommended: {self.proof.why}")
            self.wrong.add(key(best.point))
            # Others that show the same need no proof of their own.
            self.wrong |= {key(r.point) for r in self._records() if self._at_its_own_size(r, proof) is not proof}
            self.preferred = None
        self.proof = Proof("not proven", "the runs that were faster were wrong, and this one was not looked at.")

    def _at_its_own_size(self, best: Record, proof: Proof) -> Proof:
        """A proof is of a small batch; the losses of a run and of the reference on the same large ones must agree too.

        Their losses may differ by what the proof found rounding to do, and by a thousandth, which is what rounding in
        float32 has grown to after a few steps. With dropout they cannot be compared.
        """
        reference = next((r for r in self._records() if r.purpose == "reference" and r.outcome == "done"), None)
        known = proof.verdict in VERDICTS[:3] and self.space.start.model.dropout == 0
        if not known or reference is None or not reference.measurement or not best.measurement:
            return proof
        pairs = list(zip(reference.measurement.losses, best.measurement.losses, strict=False))
        steps = 1 if proof.verdict == "different by design" else 8  # before the first update all rules are the same
        rounding = [abs(a - b) for a, b in zip(proof.losses["standard"], proof.losses["float32"], strict=False)]
        share = 1e-3 + 2 * (proof.layers[-1].output_standard if proof.layers else 0.0)
        for step, (given, found) in enumerate(pairs[:steps], 1):
            if abs(found - given) > 2 * max(rounding, default=0.0) + share * abs(given):
                why = f"at its own batch the loss of step {step} is {found:.4g}, and {given:.4g} in the run as given."
                return dataclasses.replace(proof, verdict="wrong", why=why)
        return proof

    def _answer(self, facts: dict[str, Any], interrupted: bool) -> Answer:
        folder, best = self.settings.folder, self._best()
        reasons = list(self.search.discarded.values())
        answer = answered(
            self.space, self._records(), best, name=self.settings.name, proof=self.proof, budget=self.settings.budget,
            discarded={reason: reasons.count(reason) for reason in dict.fromkeys(reasons)},
            elapsed=time.monotonic() - self.began, interrupted=interrupted, **facts,
        )  # fmt: skip
        write_json(folder / "answer.json", {"schema": SCHEMA, "command": "tune", **answer.as_dict()})
        if answer.recommended and best is not None:
            write_yaml(self.space.at(best.point), folder / "best.yaml")
        else:
            (folder / "best.yaml").unlink(missing_ok=True)  # of an earlier answer
        return answer

    # One trial

    def _run(self, claim: Claim) -> None:
        try:
            record = self._measure(claim)
        except BaseException:  # Ctrl-C: somebody may take it later
            self.ledger.release(claim)
            raise
        self.ledger.finish(claim, record)
        self.shown.record(next((r for r in self._records() if r.began == record.began), record), self._best())

    def _measure(self, claim: Claim) -> Record:
        run, prediction = self.space.at(claim.point), self.search.prediction(claim.point)
        self.shown.trial(claim.purpose, claim.point, prediction)
        # What is kept is compared by the reference it had: so it counts beside the same one only.
        what = {"run": dataclasses.asdict(run), "reference": dataclasses.asdict(self.space.start)}
        name = cache.key(what, self.machine)
        keeps = claim.purpose != "reference" and not self.settings.own_model  # whose code may have changed
        kept = cache.get(name) if keeps and not self.settings.fresh else None
        if kept is not None:
            return dataclasses.replace(kept, point=claim.point, purpose=claim.purpose, prediction=prediction)
        from tilewright.tune.explain import explain

        best, began = self._best(), time.time()
        slowest = HOPELESS * best.measurement.seconds if best is not None and best.measurement else 0.0
        job = {
            "kind": "measure", "configuration": dataclasses.asdict(run), "own_model": self.settings.own_model,
            "path": list(self.settings.path), "warm": 3, "fewest": 5, "most": 200,
            "seconds": min(20.0, max(1.0, self.settings.budget / 80)), "spread": NOISE, "profile": True,
            "stop_above": 0.0 if claim.purpose == "reference" else slowest,
            "memory_cap": int(self.settings.memory_cap or 0),
        }  # fmt: skip
        limit = max(30.0, self.left)
        ended = run_child(job, Limits(limit, min(SILENCE, limit)), self.shown.event, self.settings.command)
        measured = Measurement(**ended.value) if ended.value is not None else None
        differences = explain(prediction, measured, self.space.device) if prediction and measured else []
        if claim.purpose == "reference" and measured is not None:
            self.reference = measured.tokens_per_second
        record = Record(
            claim.point, claim.purpose, ended.outcome, ended.error, ended.log, prediction, measured, differences,
            began, time.time(), self.ledger.worker, reference=self.reference,
        )  # fmt: skip
        self.durations.setdefault(run.compile, []).append(record.ended - record.began)
        if keeps:
            cache.put(name, record)
        return record

    def _predict(self, point: Point) -> Prediction | None:
        return predict(self.space.at(point), self.machine) if not self.settings.own_model else None

    def _expected(self, point: Point) -> float:
        """Seconds that a trial will take: what those of its compile mode took; before there are any, what is usual."""
        mode = self.space.at(point).compile
        if self.durations.get(mode):
            return statistics.median(self.durations[mode])
        return {"none": 0.0, "max-autotune": 300.0}.get(mode, 60.0 if self.space.device == "cuda" else 20.0)

    # What is known so far

    @property
    def _cap(self) -> float:
        return self.settings.memory_cap or math.inf

    def _records(self) -> list[Record]:
        return corrected(self.ledger.records())

    def _best(self) -> Record | None:
        records = self._records()
        if self.preferred is not None:
            preferred = [record for record in records if key(record.point) == self.preferred]
            return fastest(preferred, self._cap, self.wrong)
        return fastest(records, self._cap, self.wrong)


def answered(space: Space, records: Sequence[Record], best: Record | None, **facts: Any) -> Answer:
    """The answer that follows from what was measured."""
    reference = next((record for record in records if record.purpose == "reference" and record.measurement), None)
    answer = Answer(
        records=list(records), reference=reference, best=best, ablations=_ablations(space, records, best), **facts
    )
    return dataclasses.replace(answer, sentences=sentences(answer))


def reread(folder: Path, name: str, storage: str | None = None) -> Answer:
    """The answer of a study, as it was given or, where more has been measured since, as it is now."""
    facts, found = Ledger.read(storage or in_folder(folder), name)
    if not facts:
        raise UserError(f"The study {name} ended before its first trial; there is nothing to report.")
    records = corrected(found)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        answer = Answer.from_dict(json.loads((folder / "answer.json").read_text(encoding="utf-8")))
        if len(answer.records) == len(records):
            return answer
    levers = {lever: tuple(values) for lever, values in facts["levers"].items()}
    space = Space(from_dict(facts["start"]), levers, facts["ceilings"]["device"])
    return answered(space, records, fastest(records), name=name, **facts)


def _ablations(space: Space, records: Sequence[Record], best: Record | None) -> list[Ablation]:
    if best is None:
        return []
    by_key = {key(record.point): record for record in reversed(records) if record.outcome != "lost"}
    found = []
    for name, value in space.changes(best.point).items():
        before = space.origin[name]
        without = {**best.point, name: before}
        record, refusal = by_key.get(key(without)), space.refusal(without)
        measured = record.measurement if record is not None else None
        found.append(
            Ablation(
                name, value, before, record.tokens_per_second if record is not None else None,
                measured.bytes if measured else None,
                refusal or (record.error if record is not None else "there was no time to run it"),
            )
        )  # fmt: skip
    return found


def corrected(records: Sequence[Record]) -> list[Record]:
    """Each record with its drift: how fast the reference ran there and then, over how fast it ran first of all.

    A worker's reference between two of its runs is taken to lie on the line between them.
    """
    references: dict[str, list[tuple[float, float]]] = {}
    for record in records:
        if record.purpose == "reference" and record.outcome == "done" and record.measurement:
            references.setdefault(record.worker, []).append((record.began, record.measurement.tokens_per_second))
    everyone = sorted(point for points in references.values() for point in points)
    if not everyone:
        return list(records)
    first = everyone[0][1]

    def drift(record: Record) -> float:
        points = sorted(references.get(record.worker, []))
        if record.cached or not points:
            return record.reference / first if record.reference else 1.0
        return _between(points, record.began) / first

    return [dataclasses.replace(record, drift=drift(record)) for record in records]


def _between(points: Sequence[tuple[float, float]], at: float) -> float:
    """The value at a time, on the line through the points around it.

    >>> _between([(0.0, 1.0), (10.0, 2.0)], 5.0), _between([(0.0, 1.0), (10.0, 2.0)], 99.0)
    (1.5, 2.0)
    """
    for (before, low), (after, high) in itertools.pairwise(points):
        if before <= at <= after:
            return low + (high - low) * (at - before) / (after - before) if after > before else low
    return points[0][1] if at < points[0][0] else points[-1][1]


def _as_fast(record: Record, best: Record) -> bool:
    """Whether a run is as fast as the best, as far as the two could be told apart."""
    if record.measurement is None or best.measurement is None or record.outcome != "done":
        return False
    noise = max(NOISE, record.measurement.spread, best.measurement.spread)
    return (record.tokens_per_second or 0.0) >= (1 - noise) * (best.tokens_per_second or 0.0)


def _first_step(record: Record) -> float:
    """Seconds that a run takes to begin: mostly to compile."""
    return record.measurement.first_step_seconds if record.measurement else 0.0


def _proof(value: dict[str, Any] | None, error: str | None) -> Proof:
    if value is None:
        return Proof("not proven", f"the proof did not run to its end: {error}")
    # A wrong model may well give what is no number.
    layers = [
        Layer(name, *(min(error, 1e6) if math.isfinite(error) else 1e6 for error in errors))
        for name, *errors in (layer.values() for layer in value["layers"])
    ]
    losses = {name: list(itertools.takewhile(math.isfinite, curve)) for name, curve in value["losses"].items()}
    return Proof(value["verdict"], value["why"], layers, losses)
