"""The answer of a study as it is kept: the best run, what each lever gave, the proof, and all that a report shows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from tilewright.errors import UserError
from tilewright.measure import checked
from tilewright.measure.checked import Amount, Between, Count, Like, Scalar
from tilewright.measure.markup import clean
from tilewright.tune.report.code import lines
from tilewright.tune.search.choose import latest
from tilewright.tune.search.generating import AIMS
from tilewright.tune.search.layouts import LAYOUT, sizes_of
from tilewright.tune.store.proof import VERDICTS, Proof
from tilewright.tune.store.record import PHASES, Record, RuleGains


@dataclass(frozen=True)
class Ablation:
    """The best run with one lever put back: what that lever is worth beside the others."""

    lever: str
    value: Scalar  # in the best run
    before: Scalar  # in the baseline
    tokens_per_second: Amount | None  # without it; None where that did not run
    bytes: Count | None
    error: str | None = None


NOT_TRIED = "it was not tried"
UNSTEADY = 0.1  # a baseline that drifts further than this is no measure of others


@dataclass(frozen=True)
class Ceilings:
    """The probe's measurements that a report computes with; an answer keeps them as a dictionary."""

    device: str = ""
    memory_bytes: Amount | None = None
    memory_cap: Amount | None = None
    copy_bytes_per_second: Amount | None = None
    flops: dict[str, Amount | None] | None = None
    host: dict[str, Any] | None = None


@dataclass(frozen=True)
class Machine:
    """The facts of a machine that a report reads."""

    gpu: dict[str, Any] | None = None


@dataclass(frozen=True)
class Answer:
    """Everything that a table, a page or a program wants to know of a study."""

    name: str
    machine: Annotated[
        dict[str, Any], Like("tilewright.tune.report.answer:Machine")
    ]  # measure.machine.describe(), of the trials' own machine
    ceilings: Annotated[dict[str, Any], Like("tilewright.tune.report.answer:Ceilings")]
    start: dict[str, Any]  # the configuration of the baseline, every field
    levers: dict[str, list[Scalar]]  # what each open lever could be, the baseline's first
    records: list[Record]  # of all trials, in the order they began
    reference: Record | None  # the baseline, the first time it ran
    best: Record | None
    ablations: list[Ablation] = field(default_factory=list)
    proof: Proof | None = None
    rules: RuleGains | None = None  # what single rules give, of a user's own model
    work: list[Annotated[dict[str, Any], Like("tilewright.measure.work:Work")]] = field(default_factory=list)
    discarded: dict[str, Count] = field(default_factory=dict)  # why the plan left points out, and how many
    budget: Amount = 0.0  # seconds
    elapsed: Amount = 0.0
    interrupted: bool = False
    own_model: str = ""  # package.module:factory, where it is not Tilewright's
    ranks: Annotated[int, Between(1, 1e6)] = 1  # that every run was on
    on_gpu: dict[str, Any] = field(default_factory=dict)  # predicted for a GPU that is not here, by `tune.rehearsal`
    float32_losses: list[float] = field(default_factory=list)  # of the standard model in float32, the first few steps
    no_float32: str = ""  # why there are none
    ready: str = ""  # of a study of generating, or on several ranks: the command that runs the best
    sentences: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any]) -> Answer:
        """The inverse of `as_dict`, checked: what does not fit is a sentence that names the field."""
        if not isinstance(tree, Mapping):
            raise UserError("it is no object of JSON.")
        found: Answer = checked.read(cls, {name: value for name, value in tree.items() if name != "proof"})
        if tree.get("proof") is not None:
            found = dataclasses.replace(found, proof=Proof.from_dict(tree["proof"]))
        found = dataclasses.replace(found, on_gpu=read_prediction(tree.get("on_gpu")))
        check_start(found.start, found.levers)
        named = [("reference", found.reference), ("best", found.best)]
        for where, record in (*((f"records[{i}]", each) for i, each in enumerate(found.records)), *named):
            if record is not None:
                check_point(record.point, found.levers, where)
                record.check(where)
        return found

    @property
    def is_rehearsal(self) -> bool:
        """Whether the study ran without a GPU, so that its speeds say nothing of one."""
        return self.ceilings.get("device") == "cpu"

    @property
    def generates(self) -> bool:
        """Whether the study is of generating, and not of training."""
        return self.start.get("aim") in AIMS

    @property
    def unit(self) -> str:
        """What a speed is counted in: "tokens", or "samples" of a user's own batch."""
        own = self.ceilings.get("own_model")
        return "samples" if isinstance(own, Mapping) and own.get("unit") == "samples" else "tokens"

    @property
    def changes(self) -> dict[str, Any]:
        """The levers of the best run that are not the baseline's."""
        if self.best is None:
            return {}
        return {name: value for name, value in self.best.point.items() if value != self.levers[name][0]}

    @property
    def recommended(self) -> bool:
        """Whether there is a best run that the proof has not refuted."""
        return self.best is not None and (self.proof is None or self.proof.verdict in VERDICTS[:3])

    @property
    def ratio(self) -> float | None:
        """Speed of the best run over that of the baseline."""
        ran = self.best is not None and self.reference is not None
        return _over(self.best.tokens_per_second, self.reference.tokens_per_second) if ran else None  # type: ignore[union-attr]

    @property
    def compiled(self) -> Record | None:
        """The baseline under torch.compile: the fastest of its modes that were measured; None where none was."""
        if self.start.get("compile", "none") != "none" and "compile" not in self.levers:
            return self.reference
        plain = {name: values[0] for name, values in self.levers.items() if name != "compile"}
        ran = [
            record for record in latest(self.records).values()
            if record.outcome == "done" and record.point.get("compile", "none") != "none"
            and {name: value for name, value in record.point.items() if name != "compile"} == plain
        ]  # fmt: skip
        return max(ran, key=lambda record: record.tokens_per_second or 0.0, default=None)

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
    def own_lines(self) -> list[str]:
        """What to write into the user's own script; nothing where the baseline is the answer."""
        if self.best is None or not self.changes:
            return []
        whole = self.best.point.get("micro_batch") == self.start.get("global_batch")
        levers = {name: value for name, value in self.best.point.items() if not (whole and name == "micro_batch")}
        return lines(levers, self.ceilings.get("device", "cuda"), self.rule_names)

    @property
    def rule_names(self) -> list[str]:
        """The rules of `tilewright.optimize` that the best run has; empty where it has none, or nobody measured which.

        >>> Answer("", {}, {}, {}, {}, [], None, Record({"rules": "glu+norm"}, "search", "done")).rule_names
        ['glu', 'norm']
        """
        given = str(self.best.point.get("rules", "none")) if self.best is not None else "none"
        if given != "all":
            return given.split("+") if given != "none" else []
        return self.rules.found if self.rules is not None else []

    @property
    def drift(self) -> float | None:
        """How far the speed of the baseline has been from its first, at most; None where it ran once."""
        ran = [record.drift for record in self.records if record.purpose == "reference" and record.measurement]
        return max(abs(each - 1.0) for each in ran) if len(ran) > 1 else None


def check_point(point: Mapping[str, Any], levers: Mapping[str, Any], where: str) -> None:
    """Refuse a point with a lever that the study does not have, or with a layout that is none."""
    for name in point:
        if name not in levers:
            raise UserError(f"{where} sets {clean(name, 40)!r}, which is no lever of the study.")
    if LAYOUT in point:
        sizes_of(str(point[LAYOUT]))


def check_start(start: Mapping[str, Any], levers: Mapping[str, Sequence[Any]]) -> None:
    """Refuse levers without values, and a configuration that has no place for one of them."""
    for name, values in levers.items():
        section = name.rpartition(".")[0]
        if not values:
            raise UserError(f"levers.{clean(name, 40)} has no value.")
        if section and not isinstance(start.get(section, {}), Mapping):
            raise UserError(f"start.{clean(section, 40)} is no section of a configuration.")


def read_prediction(tree: Mapping[str, Any] | None) -> dict[str, Any]:
    """A prediction for a GPU as a file has it, its types checked."""
    if not tree:
        return {}
    try:
        rows = [
            {name: str(row[name]) for name in ("model", "run")}
            | {name: None if row[name] is None else float(row[name]) for name in ("tokens_per_second", "ratio")}
            | {name: float(row[name]) for name in ("seconds", "bytes")}
            for row in tree["rows"]
        ]
        found = {name: str(tree[name]) for name in ("gpu", "rates", "recorded")}
        return {**found, "ranks": int(tree.get("ranks", 1)), "rows": rows}
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError("on_gpu is no prediction.") from error


def gpus_of(on_gpu: Mapping[str, Any]) -> str:
    """The GPUs that a prediction is for, in words.

    >>> gpus_of({"gpu": "H100-SXM5"}), gpus_of({"gpu": "H100-SXM5", "ranks": 8})
    ('one H100-SXM5', '8 x H100-SXM5')
    """
    ranks = on_gpu.get("ranks", 1)
    return f"{ranks} x {on_gpu['gpu']}" if ranks > 1 else f"one {on_gpu['gpu']}"


def _over(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None
