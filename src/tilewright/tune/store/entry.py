"""A trial as the storage has it: what its attributes mean, and what its state says of an outcome."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from tilewright.measure.checked import Point
from tilewright.tune.store import journal
from tilewright.tune.store import lease as leases
from tilewright.tune.store.record import PURPOSES, Record

LEASE = "lease "


@dataclass(frozen=True)
class Entry:
    """A trial as the storage has it."""

    number: int
    state: TrialState
    id: str
    slot: str
    point: Point
    purpose: str
    withdrawn: bool
    record: Record | None
    leases: list[leases.Lease]

    @property
    def open(self) -> bool:
        return not self.state.is_finished()

    @property
    def lost(self) -> bool:
        return not self.open and self.record is None and not self.withdrawn


def records_of(entries: Iterable[Entry]) -> list[Record]:
    """The record of each slot, in the order in which they began."""
    found: dict[str, Record] = {}
    for entry in entries:
        if entry.record is not None and (entry.slot not in found or found[entry.slot].outcome == "lost"):
            found[entry.slot] = entry.record
    return sorted(found.values(), key=lambda record: record.began)


def entry_of(trial: FrozenTrial) -> Entry | None:
    """A trial, or None where it is not one of ours; a storage that others write to may hold anything."""
    attributes: dict[str, Any] = trial.user_attrs
    id, slot, point, purpose = (attributes.get(name, "") for name in ("id", "slot", "point", "purpose"))
    sound = isinstance(id, str) and isinstance(slot, str) and isinstance(point, dict) and purpose in PURPOSES
    record = journal.parse(attributes["record"]) if "record" in attributes else None
    if not sound or ("record" in attributes and record is None):
        warnings.warn(f"Trial {trial.number} of the study cannot be read and is left out.", stacklevel=2)
        if not sound:
            return None
    held = [value for name, value in attributes.items() if name.startswith(LEASE) and leases.sound(value)]
    withdrawn = attributes.get("outcome") == "duplicate"
    return Entry(trial.number, trial.state, id, slot, point, purpose, withdrawn, record, held)


def comes_before(other: Entry, entry: Entry) -> bool:
    """Whether another trial makes this one superfluous."""
    if other.slot != entry.slot or other.number == entry.number:
        return False
    return other.record is not None or (other.open and other.number < entry.number)


def ending_of(record: Record) -> tuple[TrialState, float | None]:
    """The state of Optuna's that says most about an outcome, and the value to go with it."""
    speed = record.tokens_per_second
    if record.outcome in ("done", "stopped early") and speed is not None and math.isfinite(speed):
        return TrialState.COMPLETE, speed
    return TrialState.PRUNED if record.outcome in ("does not fit", "refused") else TrialState.FAIL, None
