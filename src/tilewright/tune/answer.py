"""What a study says in the end: the best run, what each lever gave, the proof, and three plain sentences."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tilewright.measure.results import write_text
from tilewright.train.configuration import write_yaml
from tilewright.tune.choose import confirmed, latest
from tilewright.tune.record import PHASES, Record
from tilewright.tune.space import Space, key


@dataclass(frozen=True)
class Ablation:
    """The best run with one lever put back as it was given: what that lever is worth beside the others."""

    lever: str
    value: Any  # in the best run
    before: Any  # as given
    tokens_per_second: float | None  # without it; None where that did not run
    bytes: int | None
    error: str | None = None


@dataclass(frozen=True)
class Layer:
    """How far a layer of the best run is from float32, and how far the standard block is in the same precision.

    Errors are root mean squares over that of the float32 values, at most a million.
    """

    name: str
    output: float
    output_standard: float
    gradient: float
    gradient_standard: float


@dataclass(frozen=True)
class Proof:
    """The best run beside the standard float32 model: a batch through both layer by layer, and a short training."""

    verdict: str  # of VERDICTS
    why: str  # one sentence
    layers: list[Layer] = field(default_factory=list)
    losses: dict[str, list[float]] = field(default_factory=dict)  # "float32", "standard", "best"; as far as they go
    curve: list[float] = field(default_factory=list)  # of the standard model in float32, on the batches of trials
    no_curve: str = ""  # why there is none
    phases: dict[str, float] = field(default_factory=dict)  # where its seconds went, by names of `record.PHASES`

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any] | None, error: str | None = None) -> Proof:
        """As a child gave it, who may have found what is no number; without it, why there is none."""
        if tree is None:
            return cls("not proven", f"the proof did not run to its end: {error}")
        layers = [
            Layer(name, *(min(value, 1e6) if math.isfinite(value) else 1e6 for value in errors))
            for name, *errors in (layer.values() for layer in tree["layers"])
        ]
        losses = {name: list(itertools.takewhile(math.isfinite, curve)) for name, curve in tree["losses"].items()}
        curve = [loss for loss in tree.get("curve", ()) if math.isfinite(loss)]
        phases = {name: float(seconds) for name, seconds in tree.get("phases", {}).items()}
        return cls(tree["verdict"], tree["why"], layers, losses, curve, tree.get("no_curve", ""), phases)


UNSTEADY = 0.1  # a reference that drifts further than this is no yardstick
VERDICTS = ("bit-identical", "same within rounding", "different by design", "wrong", "not proven")


@dataclass(frozen=True)
class Answer:
    """Everything that a table, a page or a program wants to know of a study."""

    name: str
    machine: dict[str, Any]  # measure.machine.describe(), of the trials' own machine
    ceilings: dict[str, Any]  # as the probe measured them: bytes and FLOPs a second, seconds a launch
    start: dict[str, Any]  # the configuration as given, every field
    levers: dict[str, list[Any]]  # what each open lever could be, as given first
    records: list[Record]  # of all trials, in the order they began
    reference: Record | None  # the run as given, the first time it ran
    best: Record | None
    ablations: list[Ablation] = field(default_factory=list)
    proof: Proof | None = None
    work: list[dict[str, Any]] = field(default_factory=list)  # of a step of the best run, each a `measure.work.Work`
    discarded: dict[str, int] = field(default_factory=dict)  # why the plan left points out, and how many
    budget: float = 0.0  # seconds
    elapsed: float = 0.0
    interrupted: bool = False
    own_model: str = ""  # package.module:factory, where it is not Tilewright's
    on_gpu: dict[str, Any] = field(default_factory=dict)  # predicted for a GPU that is not here, by `tune.rehearsal`
    float32_losses: list[float] = field(default_factory=list)  # of the standard model in float32, the first few steps
    no_float32: str = ""  # why there are none
    sentences: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any]) -> Answer:
        """The inverse of `as_dict`."""
        names = {item.name for item in dataclasses.fields(cls)}
        found = {name: value for name, value in tree.items() if name in names}
        found["records"] = [Record.from_dict(each) for each in tree["records"]]
        for name in ("reference", "best"):
            found[name] = Record.from_dict(tree[name]) if tree.get(name) else None
        found["ablations"] = [Ablation(**each) for each in tree.get("ablations", [])]
        found["proof"] = Proof.from_dict(tree["proof"]) if tree.get("proof") else None
        found["on_gpu"] = read_prediction(tree.get("on_gpu"))
        return cls(**found)

    @property
    def is_rehearsal(self) -> bool:
        """Whether the study ran without a GPU, so that its speeds say nothing of one."""
        return self.ceilings.get("device") == "cpu"

    @property
    def unit(self) -> str:
        """What a speed is counted in: "tokens", or "samples" of a user's own batch."""
        own = self.ceilings.get("own_model")
        return "samples" if isinstance(own, Mapping) and own.get("unit") == "samples" else "tokens"

    @property
    def changes(self) -> dict[str, Any]:
        """The levers of the best run that are not as given."""
        if self.best is None:
            return {}
        return {name: value for name, value in self.best.point.items() if value != self.levers[name][0]}

    @property
    def recommended(self) -> bool:
        """Whether there is a best run and nothing was found against it."""
        return self.best is not None and (self.proof is None or self.proof.verdict in VERDICTS[:3])

    @property
    def ratio(self) -> float | None:
        """Speed of the best run over that of the run as given."""
        ran = self.best is not None and self.reference is not None
        return _over(self.best.tokens_per_second, self.reference.tokens_per_second) if ran else None  # type: ignore[union-attr]

    def loss_difference(self, record: Record) -> float | None:
        """How far its losses are from those of the standard model in float32, at most; None where that is not known."""
        losses = record.measurement.losses if record.measurement else []
        return max((abs(a - b) for a, b in zip(losses, self.float32_losses, strict=False)), default=None)

    @property
    def about_losses(self) -> str:
        """What `loss_difference` is, or why there is none: one sentence."""
        losses = self.float32_losses
        if losses:
            steps = f"{len(losses)} steps" if len(losses) > 1 else "the first step"
            return (
                "Loss diff: the largest difference from the loss of the standard model in float32, "
                f"{losses[0]:.3f} to {losses[-1]:.3f} in {steps} from the same weights on the same data."
            )
        without = "the standard model in float32 was not trained on the batches of the trials"
        not_yet = "the proof, which trains the standard model in float32, did not run"
        return f"Loss diff is n/a: {(self.no_float32 or (without if self.proof else not_yet)).rstrip('.')}."

    @property
    def phases(self) -> dict[str, float]:
        """Where the seconds of all trials and of the proof went, by names of `record.PHASES`."""
        spent = [record.phases for record in self.records if not record.cached]
        spent += [self.proof.phases] if self.proof is not None else []
        totals = {name: sum(each.get(name, 0.0) for each in spent) for name in PHASES}
        return {name: seconds for name, seconds in totals.items() if seconds}

    @property
    def drift(self) -> float | None:
        """How far the speed of the run as given has been from its first, at most; None where it ran once."""
        ran = [record.drift for record in self.records if record.purpose == "reference" and record.measurement]
        return max(abs(each - 1.0) for each in ran) if len(ran) > 1 else None


def read_prediction(tree: Mapping[str, Any] | None) -> dict[str, Any]:
    """A prediction for a GPU as a file has it, its types checked: ValueError and the like where they are wrong."""
    if not tree:
        return {}
    rows = [
        {name: str(row[name]) for name in ("model", "run")}
        | {name: None if row[name] is None else float(row[name]) for name in ("tokens_per_second", "ratio")}
        | {name: float(row[name]) for name in ("seconds", "bytes")}
        for row in tree["rows"]
    ]
    return {**{name: str(tree[name]) for name in ("gpu", "rates", "recorded")}, "rows": rows}


def answered(space: Space, records: Sequence[Record], best: Record | None, **facts: Any) -> Answer:
    """The answer that follows from what was measured."""
    reference = next((record for record in records if record.purpose == "reference" and record.measurement), None)
    answer = Answer(
        records=list(records), reference=reference, best=best, ablations=_ablations(space, records, best), **facts
    )
    return dataclasses.replace(answer, sentences=sentences(answer))


def write_best(answer: Answer, space: Space, folder: Path) -> None:
    """Write best.yaml: a whole run for `tilewright train`; of somebody's own model, the levers alone."""
    path = folder / "best.yaml"
    if not answer.recommended or answer.best is None:
        path.unlink(missing_ok=True)  # of an earlier answer
    elif not answer.own_model:
        write_yaml(space.at(answer.best.point), path)
    else:
        write_text(path, yaml.safe_dump(own_levers(answer), sort_keys=False))


def own_levers(answer: Answer) -> dict[str, Any]:
    """The best.yaml of a user's own model: its name, which `tilewright train` refuses, and the best run's levers."""
    tree: dict[str, Any] = {"own_model": answer.own_model}
    for name, value in (answer.best.point if answer.best else {}).items():
        section, _, field = name.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[field] = value
    return tree


def _ablations(space: Space, records: Sequence[Record], best: Record | None) -> list[Ablation]:
    if best is None:
        return []
    by_key = latest(record for record in records if record.outcome != "lost")
    found = []
    for name, value in space.changes(best.point).items():
        without = {**best.point, name: space.origin[name]}
        record, refusal = by_key.get(key(without)), space.refusal(without)
        measured = record.measurement if record is not None else None
        found.append(
            Ablation(
                name, value, space.origin[name], record.tokens_per_second if record is not None else None,
                measured.bytes if measured else None,
                refusal or (record.error if record is not None else "it was not tried"),
            )
        )  # fmt: skip
    return found


def sentences(answer: Answer) -> list[str]:
    """What to change, what it gives, what it costs: three sentences in plain words."""
    if answer.best is None or answer.best.measurement is None:
        if any(record.measurement for record in answer.records):
            why = "Every run that was measured takes more memory than it may, or was found wrong."
            return [
                "There is nothing to recommend.",
                why,
                "Allow more with --memory, or open other levers with --search.",
            ]
        failed = [record for record in answer.records if record.error]
        first = f"The first that failed said: {failed[0].error}" if failed else "None was tried in the time there was."
        todo = "Put that right and run again."
        if not failed or failed[0].outcome in ("out of memory", "timed out", "hung"):
            todo = "Give more time with --budget, or a smaller model or batch, and run again."
        return ["No run was measured to its end, so there is nothing to recommend.", first, todo]
    return [_what(answer), _gives(answer), _costs(answer)]


def _what(answer: Answer) -> str:
    assert answer.best is not None
    if answer.proof is not None and not answer.recommended:
        why = answer.proof.why.rstrip(".")
        return f"Change nothing yet: the fastest run was not shown to be the same model ({why})."
    if not answer.changes:
        if why := alone(answer):
            return f"Change nothing yet: only the run as given was measured; {why}."
        return (
            "Change nothing: of all that ran and was not found wrong, no run is faster than the one as given by more "
            "than the noise of measuring."
        )
    what = listed(f"{name} to {_word(value)}" for name, value in answer.changes.items())
    return f"Set {what}, as best.yaml does." if not answer.own_model else f"Set {what} in your own training."


def alone(answer: Answer) -> str:
    """Why nothing but the best run was measured; nothing where something was."""
    others = [record for record in answer.records if answer.best is not None and record.point != answer.best.point]
    if any(record.measurement for record in others):
        return ""
    failed = next((record.error for record in others if record.error), None)
    if failed:
        return f"all others failed, the first of them so: {failed.rstrip('.')}"
    if answer.interrupted or answer.elapsed >= answer.budget or not answer.discarded:
        return "there was no time for others, and --resume goes on"
    return (
        "of the others none can fit or be faster by the plan, or none fitted into the time that was left, and --resume "
        "with more --budget goes on"
    )


def _gives(answer: Answer) -> str:
    assert answer.best is not None
    speed = f"{answer.best.tokens_per_second:,.0f} {answer.unit} a second"
    if answer.reference is None or answer.ratio is None:
        return f"It trains {speed}; the run as given did not run."
    drift = answer.drift or 0.0
    how = "measured on this machine" + (", and once more to be sure" if confirmed(answer.records, answer.best) else "")
    if drift > UNSTEADY:
        how = f"but do not rely on it: the machine was not steady, and the same run differed by {drift:.0%}"
    if not answer.changes:
        return f"It trains {speed}, {how}."
    return (
        f"That trains {answer.ratio:.2f} times as fast: {speed} instead of "
        f"{answer.reference.tokens_per_second:,.0f}, {how}."
    )


def _costs(answer: Answer) -> str:
    best, reference = answer.best, answer.reference
    assert best is not None and best.measurement is not None
    memory = f"{best.measurement.bytes / 2**30:.2f} GiB of memory"
    begin = f"its first step takes {first_step(answer.records, best):.0f} s"
    if answer.changes and reference is not None and reference.measurement is not None:
        memory += f" instead of {reference.measurement.bytes / 2**30:.2f}"
        begin += f" instead of {first_step(answer.records, reference):.0f}"
    if answer.proof is not None:
        numbers = f"beside the standard float32 model it is {answer.proof.verdict}: {answer.proof.why.rstrip('.')}"
    elif answer.changes:
        numbers = "whether the numbers are the same was not looked at"
    else:
        numbers = "its numbers are those it had"
    return f"It takes {memory}, {begin}, and {numbers}."


def first_step(records: Sequence[Record], record: Record) -> float:
    """Seconds of the first step, the first time: later a compiler remembers."""
    runs = [each.measurement for each in (*records, record) if each.point == record.point and each.measurement]
    return max((each.first_step_seconds for each in runs), default=0.0)


def listed(words: Any) -> str:
    """Words as a sentence has them.

    >>> listed(["a", "b", "c"])
    'a, b and c'
    """
    found: Sequence[str] = list(words)
    return found[0] if len(found) == 1 else f"{', '.join(found[:-1])} and {found[-1]}"


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _over(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None
