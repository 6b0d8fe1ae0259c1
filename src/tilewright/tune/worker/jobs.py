"""What a study has its children do, each in a process of its own: probe the machine, measure, prove, observe a run."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from tilewright import hardware
from tilewright.errors import UserError
from tilewright.train.schema import Train
from tilewright.tune.proof.layout import STEPS, judge_layout, steps_of, together_and_alone, without_layout
from tilewright.tune.search.choose import MOST_NOISE, NOISE, SHAKEN
from tilewright.tune.search.explain import explain
from tilewright.tune.search.generating import Generating, GeneratingSpace
from tilewright.tune.search.pace import Pace, kind_of
from tilewright.tune.search.space import Point
from tilewright.tune.settings import TRIAL, Settings, Shown
from tilewright.tune.store import cache
from tilewright.tune.store.ledger import Claim
from tilewright.tune.store.proof import Proof
from tilewright.tune.store.record import CONFIRMATION, Measurement, Prediction, Record, RuleGains, key, read_gains
from tilewright.tune.worker.process import Ended, Limits, run_child

HOPELESS = 1.25  # a trial that takes this much longer than the best is ended early
_RULES_SHARE = 0.75  # of a limit: what measures rules begins none that it may not end
_LEAST_PROOF = 5.0  # seconds for each part of it
_LOADING = 900.0  # seconds, at most, to load a model once for each format
SILENCE = 300.0  # seconds; compiling a large model says nothing for minutes


def probe(
    device: str,
    *,
    own_model: str = "",
    path: Sequence[str] = (),
    run: Train | None = None,
    command: Sequence[str] = TRIAL,
) -> dict[str, Any]:
    """Measure what this machine can do, in a process of its own.

    Args:
        device: to measure.
        own_model: a user's own model: its batch is described, and it takes one training step.
        path: where that is imported from.
        run: of that step.
        command: of the process.
    """
    job = {"kind": "probe", "device": device, "seconds": 2.0, "own_model": own_model, "path": list(path)}
    job["configuration"] = dataclasses.asdict(run or Train(device=device))
    ended = run_child(job, Limits(120.0, 120.0), command=command)
    if ended.value is None:
        what = f"{own_model} and the machine were" if own_model else "The machine was"
        raise UserError(ended.error if ended.outcome == "refused" else f"{what} not measured: {ended.error}")
    return ended.value


def probe_links(ranks: int, run: Train, command: Sequence[str] = TRIAL) -> dict[str, float]:
    """What joins so many ranks on this machine, as `worker.links` measures it."""
    job = {"kind": "links", "ranks": ranks, "configuration": dataclasses.asdict(run)}
    ended = run_child(job, Limits(120.0, 120.0), command=command)
    if ended.value is None:
        raise UserError(f"{ranks} ranks did not meet on this machine: {ended.error}")
    return ended.value


def probe_generating(
    run: Generating, formats: dict[str, list[str]], floor: dict[str, float], command: Sequence[str] = TRIAL
) -> dict[str, Any]:
    """What this machine and a model can do, and the quality of formats of weights and of the cache."""
    job = {
        "kind": "probe generating", "device": run.device, "seconds": 1.0, "configuration": dataclasses.asdict(run),
        "formats": formats, "floor": floor,
    }  # fmt: skip
    ended = run_child(job, Limits(_LOADING, SILENCE), command=command)
    if ended.value is None:
        what = f"{run.model} was not measured: {ended.error}"
        raise UserError(ended.error if ended.outcome == "refused" else what)
    return ended.value


class Jobs:
    """The children of one worker of a study."""

    def __init__(self, settings: Settings, shown: Shown, pace: Pace) -> None:
        self.settings, self.shown, self.pace, self.space = settings, shown, pace, settings.space
        self.reference = 0.0  # tokens a second of the baseline, when it last ran here
        self._epoch = time.time() - time.monotonic()
        self._profiled: dict[str, Measurement] = {}  # by the key of a point: what was measured of it with a profile
        self._to_keep: list[tuple[str, Record]] = []  # for the cache, when it is known how steady the machine was

    def measure(self, claim: Claim, prediction: Prediction | None, worker: str, best: float, limit: float) -> Record:
        """Run a trial, or take it from the cache.

        Args:
            claim: the trial.
            prediction: of it.
            worker: who runs it.
            best: seconds of a step of the best so far: what is slower beyond doubt ends as soon as that is known. 0 for
                a run whose speed has to be known well, whatever it is.
            limit: seconds that it may take.
        """
        run = self.space.at(claim.point)
        self.shown.trial(claim.purpose, claim.point, prediction)
        # What is kept is compared by the reference it had: so it counts beside the same one only.
        what = {"run": dataclasses.asdict(run), "reference": dataclasses.asdict(self.space.start)}
        name = cache.key(what, self.settings.machine)
        keeps = claim.purpose != "reference" and not self.settings.own_model  # whose code may have changed
        fresh = self.settings.fresh or claim.purpose == CONFIRMATION
        kept = cache.get(name) if keeps and not fresh else None
        if kept is not None:
            found = self._explained(prediction, kept.measurement)
            changes: dict[str, Any] = {"prediction": prediction, "differences": found, "worker": worker}
            return dataclasses.replace(kept, point=claim.point, purpose=claim.purpose, **changes)
        began = self._now()
        seconds = min(20.0, max(1.0, self.settings.budget / 80))
        # A GPU slows down in its first seconds, until it is as warm as it gets: five steps that agree say little there.
        least = seconds / 2 if self.space.device == "cuda" else 0.0
        seen = self._profiled.get(key(claim.point))  # one profile of a configuration is enough
        job = {
            **self._job("measure", claim.point), "warm": 3, "fewest": 5, "most": 200,
            "least": least, "seconds": seconds, "spread": NOISE, "profile": seen is None,
            "stop_above": HOPELESS * best, "best": (1 + MOST_NOISE) * best, "widest": MOST_NOISE,
            "memory_cap": int(self.settings.memory_cap or 0),
        }  # fmt: skip
        ended = self._run(job, limit, min(SILENCE, limit))
        measured = Measurement(**ended.value) if ended.value is not None else None
        if measured is not None:
            measured = self._with_mfu(measured)
        if measured is not None and seen is not None:
            measured = dataclasses.replace(measured, profile=seen.profile, memory=seen.memory)
        elif measured is not None and measured.profile is not None:
            self._profiled[key(claim.point)] = measured
        if claim.purpose == "reference" and measured is not None:
            self.reference = measured.tokens_per_second
        record = Record(
            claim.point, claim.purpose, ended.outcome, ended.error, ended.log, prediction, measured,
            self._explained(prediction, measured), began, self._now(), worker, reference=self.reference,
            phases=ended.phases,
        )  # fmt: skip
        self.pace.note(kind_of(run), record.ended - record.began)
        if keeps and self.reference and measured is not None and measured.spread < MOST_NOISE:
            self._to_keep.append((name, record))
        return record

    def keep(self, records: Sequence[Record]) -> None:
        """Into the cache with what ran while the machine was steady, as a run of the reference after it shows."""
        doubts = {record.began: record.doubt for record in records}
        for name, record in self._to_keep:
            if doubts.get(record.began, 0.0) <= SHAKEN:
                cache.put(name, record)
        self._to_keep.clear()

    def prove(self, point: Point, limit: float, curve: float, told: Callable[[Proof], None]) -> Proof:
        """The run beside the standard float32 model; then that one alone, on the batches of trials.

        Args:
            point: the run.
            limit: seconds for all of it.
            curve: seconds for the latter, where there are any.
            told: is told of the proof before that.
        """
        self.shown.trial("proof", point, None)
        began, start, proofs = self.pace.elapsed, self.space.start, list[dict[str, Any]]()

        def hear(event: dict[str, Any]) -> None:
            if event["event"] != "proof":
                return self.shown.event(event)
            self.pace.note_proof(self.pace.elapsed - began)
            proofs.append(event["value"])
            told(Proof.from_dict(event["value"]))

        more: dict[str, Any] = {"floor": self.settings.floor, "save": str(self.settings.folder)}
        more |= {"steps": 8, "seed": start.seed, "curve": curve, "start": dataclasses.asdict(start)}
        ended = self._run({**self._job("prove", point), "ranks": 1, **more}, limit, limit, hear)
        if not proofs:
            self.pace.note_proof(self.pace.elapsed - began)
        if proofs and ended.value is None:
            why = f"the standard model in float32 did not run: {ended.error}"
            proof = Proof.from_dict({**proofs[0], "no_curve": why})
        else:
            proof = Proof.from_dict(ended.value, ended.error)
        proof = dataclasses.replace(proof, phases=ended.phases)
        if self.space.ranks == 1:
            return proof
        found = self._prove_layout(point, proof, limit - (self.pace.elapsed - began))
        self.pace.note_proof(sum(found.phases.values()))
        return found

    def _prove_layout(self, point: Point, proof: Proof, limit: float) -> Proof:
        """The proof, and whether the ranks of the run train what one process does."""
        run, until = self.space.at(point), self.pace.elapsed + limit
        found, phases = [], Counter(proof.phases)
        for ranks, each in zip((self.space.ranks, 1), together_and_alone(run), strict=True):
            job = {"kind": "first steps", "configuration": dataclasses.asdict(each), "ranks": ranks, "steps": STEPS}
            seconds = max(_LEAST_PROOF, until - self.pace.elapsed)
            ended = self._run({**job, "own_model": ""}, seconds, seconds)
            phases.update(ended.phases)  # which adds
            proof = dataclasses.replace(proof, phases=dict(phases))
            if ended.value is None or not steps_of(ended.value):
                return without_layout(proof, ended.error or "its steps make no sense.")
            found.append(ended.value)
        return judge_layout(proof, run, *found)

    def measure_rules(self, point: Point, limit: float) -> RuleGains | None:
        """What each rule of a run gives; None where that did not come to an end."""
        self.shown.trial("rules", point, None)
        ended = self._run({**self._job("rules", point), "within": _RULES_SHARE * limit}, limit, limit)
        if ended.value is None:
            self.shown.say(f"What single rules give was not measured: {ended.error}")
            return None
        return read_gains(ended.value)

    def observe(self, point: Point, limit: float) -> list[dict[str, Any]]:
        """The work of a step of the run; nothing where that did not come to an end."""
        self.shown.trial("kernels", point, None)
        ended = self._run({**self._job("observe", point), "warm": 3, "memory_cap": 0}, limit, limit)
        if ended.value is None:
            self.shown.say(f"The kernels of the best run were not observed: {ended.error}")
        return (ended.value or {}).get("work", [])

    def _now(self) -> float:
        """Seconds since 1970. What a trial took is a difference of two: so the clock may be set in between."""
        return self._epoch + time.monotonic()

    def _job(self, kind: str, point: Point) -> dict[str, Any]:
        settings = self.settings
        return {
            "kind": f"{kind} generating" if isinstance(self.space, GeneratingSpace) else kind,
            "configuration": dataclasses.asdict(self.space.at(point)),
            "own_model": settings.own_model, "path": list(settings.path), "ranks": self.space.ranks,
        }  # fmt: skip

    def _run(
        self, job: dict[str, Any], seconds: float, silence: float, hear: Callable[[dict[str, Any]], None] | None = None
    ) -> Ended:
        return run_child(job, Limits(seconds, silence), hear or self.shown.event, self.settings.command)

    def _with_mfu(self, measured: Measurement) -> Measurement:
        """Add the MFU of a user's model, whose FLOPs a probe has counted."""
        counted = self.settings.machine.get("own_model", {}).get("counted")
        if not counted:
            return measured
        gpu = self.settings.machine["machine"].get("gpu") if self.space.device == "cuda" else None
        given = self.space.start.log.peak_tflops or None
        peak, _ = hardware.peak(gpu["name"] if gpu else None, "bf16", given, "log.peak_tflops")
        if peak is None:
            return measured
        return dataclasses.replace(measured, mfu=(counted["matmul"] + counted["attention"]) / measured.seconds / peak)

    def _explained(self, prediction: Prediction | None, measured: Measurement | None) -> list[Any]:
        return explain(prediction, measured, self.space.device) if prediction and measured else []
