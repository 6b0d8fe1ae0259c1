"""How a run goes on with a checkpoint, and whether it may: of the same model, and on the same data."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tilewright.errors import UserError
from tilewright.plan.gpt import ADDED, LEVERS
from tilewright.train.checkpoint import WEIGHTS_ALONE, Checkpoints
from tilewright.train.checkpoint_format import FACTS
from tilewright.train.schema import Model, Train


def load_checkpoint(
    config: Train, checkpoints: Checkpoints, tensors: Callable[[], Mapping[str, Any]], data_facts: dict[str, Any]
) -> dict[str, Any] | None:
    """Fill a run's tensors from the checkpoint that it goes on with; its facts, or None where the run begins.

    Args:
        config: the run's.
        checkpoints: of the run's own folder; what is worth a word is added to its warnings.
        tensors: returns the tensors to fill, as `Checkpoints.save` takes them.
        data_facts: which samples the run draws; a checkpoint of its own has to have the same.
    """
    how, folder = config.checkpoint.resume, Path(config.out)
    own = checkpoints.newest()
    if how == "never":
        if own is not None:
            raise UserError(f"{folder} has checkpoints; choose another `out`, or checkpoint.resume=auto.")
        return None
    if how == "auto" or own is not None:
        if own is not None and Path(how).resolve() in set(own.resolve().parent.iterdir()) - {own.resolve()}:
            raise UserError(f"{folder} has gone on to {own.name}; to branch off at {how}, choose another out.")
        facts = checkpoints.load_newest(tensors())
        if facts is None and checkpoints.warnings:  # to begin anew would be to throw away what can be saved
            raise UserError(
                f"No checkpoint of {folder} is whole: {checkpoints.warnings[0].rstrip('.')}; put it back from a copy, "
                "or choose another out."
            )
    else:
        facts = checkpoints.load(Path(how), tensors())
    if facts is None:
        return None
    check_facts(facts, folder)
    begins = facts.get(WEIGHTS_ALONE) is True
    compare_model(config.model, facts["configuration"]["model"], begins)
    if begins:
        checkpoints.warnings.append("It begins with weights that were imported.")
        return None
    other = other_data(data_facts, facts["data"])
    if other and own is not None:
        raise UserError(f"{other}; give what it had, or another out.")
    if other:  # a branch
        checkpoints.warnings.append(f"{other}; it goes on with this.")
    return facts


def check_facts(facts: dict[str, Any], folder: Path) -> None:
    """Refuse facts that no run has written."""
    try:
        recent = facts["recent_losses"]
        counts = [facts["step"], facts["samples"], facts["skipped_in_a_row"], *(step for step, _ in recent)]
        sound = (
            all(type(count) is int and 0 <= count < 2**48 for count in counts)
            and all(type(loss) is float and math.isfinite(loss) for _, loss in recent)
            and isinstance(facts["configuration"]["model"], dict) and isinstance(facts["data"], dict)
        )  # fmt: skip
    except (KeyError, TypeError, ValueError):
        sound = False
    if not sound:
        raise UserError(f"{FACTS} of the checkpoint for {folder} is not of a run; choose another checkpoint or out.")


def compare_model(model: Model, saved: dict[str, Any], begins: bool = False) -> None:
    """Refuse to go on with another model than the one that was saved; levers may change.

    One that `begins` may take shorter sequences where its positions are rotary: no weight depends on them.
    """
    for name, value in dataclasses.asdict(model).items():
        before = {**ADDED, **saved}.get(name, value)
        shorter = name == "sequence" and type(before) is int and value <= before
        if begins and shorter and model.position == "rope":
            continue
        if before != value and name not in (*LEVERS, "preset", "dropout", "balance_rate"):
            raise UserError(
                f"model.{name} is {value!r} and the checkpoint's model has {before!r:.100}; give that, or another out."
            )


def other_data(here: dict[str, Any], saved: dict[str, Any]) -> str:
    """What of its data a checkpoint's run had otherwise; nothing where it had the same."""
    for name in here:
        if "." in name and saved.get(name) != here[name]:
            return f"{name} is {here[name]!r} and the checkpoint's run had {saved.get(name)!r:.100}"
    if all(saved.get(name) == here[name] for name in here):
        return ""
    there = saved.get("tokens")
    counts = f"{here['tokens']:,} tokens here, {there:,} there" if type(there) is int else "another number of tokens"
    return f"This is not the data that the checkpoint's run was trained on ({counts})"
