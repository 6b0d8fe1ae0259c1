"""The answer of a study that has just run, written to its folder."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tilewright.measure.results import SCHEMA, write_json
from tilewright.tune.report.answer import Answer, answered, write_best
from tilewright.tune.report.code import command_of
from tilewright.tune.search.known import Known
from tilewright.tune.search.search import Search
from tilewright.tune.settings import Settings
from tilewright.tune.store.record import key


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
