"""The answer of a study, derived from what was measured and written to its folder."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tilewright.measure.results import SCHEMA, write_json
from tilewright.tune.report.answer import NOT_TRIED, Ablation, Answer
from tilewright.tune.report.best import write_best
from tilewright.tune.report.code import command_of
from tilewright.tune.report.sentences import sentences
from tilewright.tune.search.choose import latest
from tilewright.tune.search.known import Known
from tilewright.tune.search.search import Search
from tilewright.tune.search.space import Space
from tilewright.tune.settings import Settings
from tilewright.tune.store.record import Record, key


def conclude(
    settings: Settings, facts: dict[str, Any], known: Known, search: Search, *, elapsed: float, interrupted: bool
) -> Answer:
    """Write answer.json and best.yaml from what is known.

    Args:
        settings: of the study.
        facts: that it was begun with.
        known: its trials and proofs.
        search: has the points that were left out.
        elapsed: seconds that the study took.
        interrupted: whether it was stopped before its end.
    """
    best, proof = known.proved()
    answer = answered(
        known.space, known.records, best, name=settings.name, proof=proof,
        budget=settings.budget, elapsed=elapsed, interrupted=interrupted,
        discarded=dict(Counter(search.discarded.values())),
        ready=command_of(known.space, best, settings.folder), rules=known.rules_of(best),
        work=known.work.get(key(best.point), []) if best is not None else [],
        **known.float32(), **facts,
    )  # fmt: skip
    write_json(settings.folder / "answer.json", {"schema": SCHEMA, "command": "tune", **answer.as_dict()})
    write_best(answer, known.space, settings.folder, code=True)
    return answer


def answered(space: Space, records: Sequence[Record], best: Record | None, **facts: Any) -> Answer:
    """Derive the answer from what was measured."""
    reference = next((record for record in records if record.purpose == "reference" and record.measurement), None)
    answer = Answer(
        records=list(records), reference=reference, best=best, ablations=_ablations(space, records, best), **facts
    )
    return dataclasses.replace(answer, sentences=sentences(answer))


def _ablations(space: Space, records: Sequence[Record], best: Record | None) -> list[Ablation]:
    if best is None:
        return []
    by_key = latest(record for record in records if record.outcome != "lost")
    found = []
    for name, value in space.changes(best.point).items():
        without = {**best.point, name: space.baseline[name]}
        record, refusal = by_key.get(key(without)), space.refusal(without)
        measured = record.measurement if record is not None else None
        found.append(
            Ablation(
                name, value, space.baseline[name], record.tokens_per_second if record is not None else None,
                measured.bytes if measured else None,
                refusal or (record.error if record is not None else NOT_TRIED),
            )
        )  # fmt: skip
    return found
