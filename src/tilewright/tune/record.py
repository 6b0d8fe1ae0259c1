"""What is known of a trial: what was predicted, what came of it, what was measured, and why the two differ.

Plain data that goes through JSON and back: between the processes of a study, into its storage, into a report.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
    "lost": "whoever ran it is gone",
    "duplicate": "somebody else runs the same",
}
# Where the seconds of a child go, in order; of a proof the next to last are those of its runs.
PHASES = (
    "start", "imports", "device", "build", "first step", "profile", "warm up", "measure", "observe", "proof: float32",
    "proof: standard", "proof: best", "losses in float32", "exit",
)  # fmt: skip
PURPOSES = ("search", "reference", "ablation", "confirmation")


@dataclass(frozen=True)
class Prediction:
    """What the plan says of a step: `parts` in seconds and `memory` in bytes, by what takes them.

    `seconds` is what is expected, `floor` the time below which no implementation of this configuration can go.
    """

    seconds: float
    floor: float
    parts: dict[str, float]
    bytes: float
    memory: dict[str, float]


@dataclass(frozen=True)
class Measurement:
    """What a trial measured. Bytes are the peak's; `memory` and `profile` tell where they and the time went."""

    tokens_per_step: int
    step_seconds: list[float]
    first_step_seconds: float
    data_wait: float  # seconds a step
    losses: list[float]
    bytes: int  # the most that was allocated at once; on a CPU, that the process had
    memory: dict[str, int] = field(default_factory=dict)  # parts as `measure.profile.MemoryWatch` has them
    profile: dict[str, Any] | None = None  # a `measure.profile.StepProfile`
    mfu: float | None = None
    hfu: float | None = None

    @property
    def seconds(self) -> float:
        """Of a step, the median."""
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

    point: dict[str, Any]
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
    reference: float = 0.0  # tokens a second of the run as given, when its worker last ran it
    drift: float = 1.0  # the reference's speed at that time over its first; speeds are divided by it
    doubt: float = 0.0  # how much the reference changed between its runs before and after
    phases: dict[str, float] = field(default_factory=dict)  # where its seconds went, by names of PHASES

    @property
    def tokens_per_second(self) -> float | None:
        """Corrected for the machine's drift."""
        return self.measurement.tokens_per_second / self.drift if self.measurement else None

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any]) -> Record:
        """The inverse of `as_dict`, of this version or an older one: fields it does not know are left out.

        >>> record = Record({"compile": "none"}, "search", "hung", error="said nothing", log="...")
        >>> Record.from_dict(record.as_dict()) == record
        True
        """
        found = _known(cls, tree)
        for name, kind in (("prediction", Prediction), ("measurement", Measurement)):
            if found.get(name) is not None:
                found[name] = kind(**_known(kind, found[name]))
        found["differences"] = [Difference(**_known(Difference, each)) for each in found.get("differences", [])]
        return cls(**found)


def _known(kind: Any, tree: Mapping[str, Any]) -> dict[str, Any]:
    names = {item.name for item in dataclasses.fields(kind)}
    return {name: value for name, value in tree.items() if name in names}
