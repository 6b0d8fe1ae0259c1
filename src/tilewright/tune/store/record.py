"""What is known of a trial: what was predicted, what came of it, what was measured, and why the two differ.

Plain data that goes through JSON and back: between the processes of a study, into its storage, into a report.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from tilewright.errors import UserError
from tilewright.measure import checked
from tilewright.measure.checked import Amount, Between, Count, Like, Point, Seconds

# What can come of a trial. Only "done" and "stopped early" have a speed; only "done" can be recommended.
OUTCOMES = {
    "done": "ran, and was measured",
    "stopped early": "ran, and was far too slow to win",
    "does not fit": "was predicted to need more memory than there is, and did not run",
    "out of memory": "ran out of memory",
    "not finite": "had a loss that is no number",
    "refused": "cannot run here",
    "error": "raised an error",
    "crashed": "its process died",
    "hung": "said nothing for too long",
    "timed out": "was not done in time",
    "lost": "its worker is gone",
    "duplicate": "somebody else runs the same",
}
# Where the seconds of a child go, in order; of a proof those before the last are of its runs.
PHASES = (
    "start", "imports", "device", "build", "first step", "profile", "warm up", "measure", "observe", "proof: float32",
    "proof: standard", "proof: best", "losses in float32", "proof: layout", "exit",
)  # fmt: skip
CONFIRMATION = "confirmation"
PURPOSES = ("search", "reference", "ablation", CONFIRMATION)


@dataclass(frozen=True)
class Prediction:
    """What the plan says of a step: `parts` in seconds and `memory` in bytes, by what takes them.

    `seconds` is what is expected, `floor` the time below which no implementation of this configuration can go.
    """

    seconds: Amount
    floor: Amount
    parts: dict[str, Amount]
    bytes: Amount
    memory: dict[str, Amount]


@dataclass(frozen=True)
class Measurement:
    """What a trial measured. Bytes are the peak's; `memory` and `profile` tell where they and the time went."""

    tokens_per_step: Annotated[int, Between(1, 1e15)]
    step_seconds: list[Seconds]
    first_step_seconds: Amount
    data_wait: Amount  # seconds a step
    losses: list[float]
    bytes: Count  # the most that was allocated at once; on a CPU, that the process had
    memory: dict[str, Annotated[int, Between(-1e18, 1e18)]] = field(
        default_factory=dict
    )  # parts as `measure.memory.MemoryWatch` has them
    profile: Annotated[dict[str, Any], Like("tilewright.measure.profile:StepProfile")] | None = None
    mfu: float | None = None
    hfu: float | None = None

    @property
    def seconds(self) -> float:
        """The median step time."""
        return statistics.median(self.step_seconds)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / self.seconds

    @property
    def spread(self) -> float:
        """Half of the 95 % confidence interval of the median, over the median.

        >>> Measurement(1, [1.0, 1.1, 0.9, 1.0], 1.0, 0.0, [], 0).spread < 0.2
        True
        """
        return spread(self.step_seconds)


def spread(seconds: list[float]) -> float:
    """Half of the 95 % confidence interval of a median, over the median; infinite where nothing can be said."""
    if len(seconds) < 3:
        return math.inf
    middle = statistics.median(seconds)
    # Robust against the odd slow step; 1.4826 makes it a standard deviation, 1.2533 that of a median.
    deviation = 1.4826 * statistics.median(abs(value - middle) for value in seconds)
    return 1.96 * 1.2533 * deviation / math.sqrt(len(seconds)) / middle


@dataclass(frozen=True)
class Difference:
    """One reason why a measurement is not the prediction; `unit` is "s" or "B"."""

    part: str
    predicted: float
    measured: float
    unit: str
    why: str

    @property
    def more(self) -> float:
        return self.measured - self.predicted


@dataclass(frozen=True)
class Record:
    """A trial from beginning to end."""

    point: Point
    purpose: str
    outcome: str
    error: str | None = None  # one sentence
    log: str = ""  # the last lines that its process wrote
    prediction: Prediction | None = None
    measurement: Measurement | None = None
    differences: list[Difference] = field(default_factory=list)
    began: float = 0.0  # seconds since 1970
    ended: float = 0.0
    worker: str = ""
    cached: bool = False
    reference: float = 0.0  # tokens a second of the baseline, when its worker last ran it
    drift: Annotated[float, Between(1e-9, 1e9)] = (
        1.0  # the reference's speed at that time over its first; speeds are divided by it
    )
    doubt: Amount = 0.0  # how much the reference changed between its runs before and after
    phases: dict[str, Amount] = field(default_factory=dict)  # where its seconds went, by names of PHASES

    @property
    def tokens_per_second(self) -> float | None:
        """Corrected for the machine's drift; None where no step was timed."""
        found = self.measurement
        return found.tokens_per_second / self.drift if found is not None and found.step_seconds else None

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any], where: str = "") -> Record:
        """The inverse of `as_dict`, checked; fields that a newer version added are left out.

        >>> record = Record({"compile": "none"}, "search", "hung", error="said nothing", log="...")
        >>> Record.from_dict(record.as_dict()) == record
        True
        """
        found: Record = checked.read(cls, tree, where)
        found.check(where or "The trial")
        return found

    def check(self, where: str) -> None:
        """Refuse a trial that claims a speed and has none."""
        if self.outcome in ("done", "stopped early") and self.tokens_per_second is None:
            raise UserError(f"{where} is {self.outcome!r} and has no time of a step.")


@dataclass(frozen=True)
class RuleGain:
    """What a rule of `tilewright.optimize` gives in a run: a step with all rules, and one without this."""

    rule: str
    seconds: Annotated[float, Between(-1e9, 1e9)]  # that the step takes longer without it
    spread: Amount  # of that difference, in seconds
    bytes: Annotated[int, Between(-1e18, 1e18)] | None  # of memory that the step takes more without it
    kept: bool


@dataclass(frozen=True)
class RuleGains:
    """What the rules of a run give, as far as there was time to measure it."""

    gains: list[RuleGain] = field(default_factory=list)
    not_measured: list[str] = field(default_factory=list)  # rules that changed something, and stay

    @property
    def found(self) -> list[str]:
        """The rules that changed something in the model."""
        return [each.rule for each in self.gains] + self.not_measured

    def narrowed(self, point: Point) -> Point | None:
        """A run with all rules with those alone that stay; None where all do.

        >>> found = RuleGains([RuleGain("glu", 1e-3, 1e-5, None, True), RuleGain("norm", 0.0, 1e-5, None, False)])
        >>> found.narrowed({"rules": "all"}), RuleGains([], ["glu"]).narrowed({"rules": "all"})
        ({'rules': 'glu'}, None)
        """
        if all(each.kept for each in self.gains):
            return None
        staying = [each.rule for each in self.gains if each.kept] + self.not_measured
        return {**point, "rules": "+".join(staying) or "none"}


def read_gains(noted: Any) -> RuleGains | None:
    """What rules give, as a study has noted it, checked: its storage may be anybody's; None where nothing is noted."""
    found: RuleGains | None = None if noted is None else checked.read(RuleGains, noted, "What rules give")
    return found


def key(point: Mapping[str, Any]) -> str:
    """The same text for the same point, whatever its order.

    >>> key({"b": 1, "a": True}) == key({"a": True, "b": 1})
    True
    """
    return json.dumps(point, sort_keys=True, separators=(",", ":"))


def note_of(what: str, run: Record) -> str:
    """The name of a note of a run: each has its own, also while another is proved."""
    return f"{what} {hashlib.sha256(key(run.point).encode()).hexdigest()[:16]}"


def with_all_rules(run: Record) -> Record:
    """The run that a run with some rules was narrowed from, for the names of its notes."""
    return dataclasses.replace(run, point={**run.point, "rules": "all"})


def first_step(records: Sequence[Record], record: Record) -> float:
    """Seconds of the first step, the first time: later a compiler remembers."""
    runs = [each.measurement for each in (*records, record) if each.point == record.point and each.measurement]
    return max((each.first_step_seconds for each in runs), default=0.0)
