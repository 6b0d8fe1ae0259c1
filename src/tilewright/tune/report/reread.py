"""A study read again: by who wants its report, or goes on with it.

What a study knows beside its trials is in notes of its storage: the `facts` it was begun with, runs that are `wrong`,
the losses of the standard model in `float32`, and of each run that was looked at its `proof`, its
`work` and what its `rules` give.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tilewright.errors import UserError
from tilewright.measure import checked
from tilewright.train.load_config import from_dict
from tilewright.tune.report.answer import Answer, read_prediction
from tilewright.tune.report.best import write_best
from tilewright.tune.report.code import command_of
from tilewright.tune.report.conclude import answered
from tilewright.tune.search.choose import proved
from tilewright.tune.search.drift import corrected
from tilewright.tune.search.generating import AIMS, Generating, GeneratingSpace
from tilewright.tune.search.space import Space
from tilewright.tune.search.standard import float32_losses
from tilewright.tune.store.ledger import Ledger
from tilewright.tune.store.proof import Proof
from tilewright.tune.store.record import Record, key, note_of, read_gains, with_all_rules
from tilewright.tune.store.storage import in_folder

_LARGEST = 64 * 10**6  # bytes of an answer; the largest on record has 0.7 MB


def reread(folder: Path, name: str, storage: str | None = None) -> Answer:
    """The answer of a study as it was or, where more has been measured since, as it is now."""
    given = folder / "answer.json"
    if storage is None and given.is_file() and not (folder / "study.db").is_file():  # it was in a database elsewhere
        return read_answer(given)
    notes, found = Ledger.read(storage, name) if storage is not None else _read_folder(folder, name)
    facts = notes.get("facts")
    if facts is None:
        raise UserError(f"The study {name} ended before its first trial; there is nothing to report.")
    check_facts(facts, name)
    records = corrected(found)
    with contextlib.suppress(OSError, UserError):
        answer = read_answer(given)
        if len(answer.records) == len(records):
            return answer
    space, draws = space_of(facts), _draws(facts)
    facts = {**facts, "on_gpu": prediction_in(facts)}
    cap, wrong = facts["ceilings"].get("memory_cap") or math.inf, notes.get("wrong", ())
    records = [record for record in records if record.point.keys() == facts["levers"].keys()]
    noted = {key(r.point): notes.get(note_of("proof", r)) for r in records}
    proofs = {name: Proof.from_dict(proof) for name, proof in noted.items() if proof is not None}
    best, proof = proved(space, records, proofs, cap, wrong)
    rules = read_gains(notes.get(note_of("rules", with_all_rules(best)))) if best is not None else None
    seen = notes.get(note_of("work", best)) if best is not None else None
    answer = answered(
        space, records, best, name=name, ready=command_of(space, best, folder), proof=proof,
        work=seen or [], rules=rules,
        **facts, **float32_losses(space, records, facts["own_model"], notes.get("float32"), draws),
    )  # fmt: skip
    with contextlib.suppress(UserError, OSError):  # a study that one may only read keeps the best.yaml it has
        write_best(answer, space, folder)
    return answer


def _draws(facts: Mapping[str, Any]) -> bool | None:
    own = facts["ceilings"].get("own_model")
    found = own.get("draws") if isinstance(own, Mapping) else None
    return found if isinstance(found, bool) else None


def _read_folder(folder: Path, name: str) -> tuple[dict[str, Any], list[Record]]:
    """The notes and records of a study's own database; of one that may not be written to, by a copy."""
    if os.access(folder, os.W_OK, effective_ids=True):
        return Ledger.read(in_folder(folder), name)
    with tempfile.TemporaryDirectory(prefix="tilewright-") as copied:
        for file in folder.glob("study.db*"):  # and what SQLite keeps beside it
            try:
                shutil.copyfile(file, Path(copied) / file.name)
            except OSError as error:
                raise UserError(
                    f"Cannot read {file}: {error.strerror}; copy the study to a folder of your own."
                ) from error
        return Ledger.read(in_folder(Path(copied)), name)


def check_facts(facts: Any, name: str) -> None:
    """Refuse what a study was begun with where it is damaged: its database may be anybody's."""
    try:
        if not isinstance(facts, Mapping) or not isinstance(facts.get("own_model"), str):
            raise UserError("it names no model.")
        Answer.from_dict({**facts, "name": name, "records": [], "reference": None, "best": None})
        space_of(dict(facts))
    except (UserError, KeyError, TypeError, ValueError, AttributeError) as error:
        why = str(error).rstrip(".") if isinstance(error, UserError) else f"{type(error).__name__} in its configuration"
        raise UserError(f"The facts of the study {name} are damaged: {why}; there is nothing to report.") from error


def read_answer(path: Path) -> Answer:
    """The answer of a study, from the file it was written to; anybody may have sent it, so it is checked."""
    try:
        with open(path, "rb") as file:
            content = file.read(_LARGEST + 1)
        if len(content) > _LARGEST:
            raise UserError(f"it is larger than {_LARGEST // 10**6} MB.")
        return Answer.from_dict(json.loads(content))
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror}; give the answer.json of a study.") from error
    except UserError as error:
        raise UserError(f"{path} is no answer of a study: {str(error).rstrip('.')}; give another.") from error
    except (ValueError, RecursionError) as error:  # no JSON, or too deep
        raise UserError(f"{path} is no answer of a study: it is not JSON; give another.") from error


def prediction_in(facts: Mapping[str, Any]) -> dict[str, Any]:
    """What was predicted for a GPU, as a study has noted it; its storage may be somebody else's."""
    try:
        return read_prediction(facts.get("on_gpu"))
    except UserError as error:
        raise UserError("The facts of this study are damaged; begin it again under another name.") from error


def space_of(facts: dict[str, Any]) -> Space:
    """The space that a study was begun with."""
    levers = {lever: tuple(values) for lever, values in facts["levers"].items()}
    if facts["start"].get("aim") in AIMS:
        start: Generating = checked.read(Generating, facts["start"], "start")
        return GeneratingSpace(start, levers, facts["ceilings"]["device"])
    return Space(from_dict(facts["start"]), levers, facts["ceilings"]["device"], facts.get("ranks", 1))
