"""What a proof has found: whether a run trains the same model as the standard one in float32, and by what it was told.

Plain data, as records of trials are: from the process that proves, into the storage of its study, into a report.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tilewright.errors import UserError
from tilewright.measure import checked
from tilewright.measure.checked import Amount

VERDICTS = ("bit-identical", "same within rounding", "different by design", "wrong", "not proven")


@dataclass(frozen=True)
class Layer:
    """How far a layer of the best run is from float32, and how far the standard block is in the same precision.

    Errors are root mean squares over that of the float32 values, at most a million.
    """

    name: str
    output: Amount
    output_standard: Amount
    gradient: Amount
    gradient_standard: Amount


@dataclass(frozen=True)
class Proof:
    """The best run beside the standard float32 model: a batch through both layer by layer, and a short training."""

    verdict: str  # of VERDICTS
    why: str  # one sentence
    layers: list[Layer] = field(default_factory=list)
    losses: dict[str, list[float]] = field(default_factory=dict)  # "float32", "standard", "best"; as far as they go
    curve: list[float] = field(default_factory=list)  # of the standard model in float32, on the batches of trials
    no_curve: str = ""  # why there is none
    at_fault: str = ""  # of a run that is wrong, the lever whose value makes it so, where that is known
    phases: dict[str, Amount] = field(default_factory=dict)  # where its seconds went, by names of `record.PHASES`

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any] | None, error: str | None = None) -> Proof:
        """Read a worker's proof, whose numbers may not be finite; None makes a proof that failed by `error`."""
        if tree is None:
            return cls("not proven", f"the proof did not run to its end: {error}")
        if not isinstance(tree, Mapping):
            raise UserError("proof is no object of JSON.")
        found: Proof = checked.read(cls, {**tree, **_finite(tree)}, "proof")
        return found


def _finite(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The errors and losses of a proof: an error that is no number counts as the largest, a loss ends its curve."""
    found: dict[str, Any] = {}
    with contextlib.suppress(TypeError, AttributeError, KeyError, OverflowError):  # `read` says what is wrong
        found["layers"] = [
            {key: min(value, 1e6) if math.isfinite(value) else 1e6 for key, value in layer.items() if key != "name"}
            | {"name": layer["name"]}
            for layer in tree["layers"]
        ]
        curves = tree["losses"].items()
        found["losses"] = {name: list(itertools.takewhile(math.isfinite, curve)) for name, curve in curves}
        found["curve"] = [loss for loss in tree.get("curve", ()) if math.isfinite(loss)]
    return found
