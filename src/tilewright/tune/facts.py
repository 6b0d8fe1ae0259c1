"""What a study is begun with: noted in its storage, compared with it when the study is gone on with, and reported."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

import tilewright
from tilewright.measure.results import SCHEMA
from tilewright.tune.search.space import Space
from tilewright.tune.settings import Settings


def digest_of(space: Space, own_model: str) -> str:
    """Return a digest of what is searched: studies with the same digest can continue each other."""
    what = {"start": dataclasses.asdict(space.start), "levers": space.levers, "own_model": own_model}
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def facts_of(settings: Settings) -> dict[str, Any]:
    """The machine, the baseline and the levers of a study, as its answer has them."""
    measured = {name: value for name, value in settings.machine.items() if name != "machine"}
    start = dataclasses.asdict(settings.space.start)
    if settings.own_model:  # which has nothing to do with Tilewright's model and data
        del start["model"], start["data"]
    return {
        "machine": settings.machine["machine"],
        "ceilings": {**measured, "memory_cap": settings.memory_cap},
        "start": start,
        "levers": {name: list(values) for name, values in settings.space.levers.items()},
        "own_model": settings.own_model,
        "ranks": settings.space.ranks,
        "on_gpu": settings.on_gpu,
    }


def head_of(settings: Settings) -> dict[str, Any]:
    """What has to be the same for two trials to be compared."""
    digest = digest_of(settings.space, settings.own_model)
    versions = {name: settings.machine["machine"].get(name) for name in ("torch", "triton")}
    return {"schema": SCHEMA, "tilewright": tilewright.__version__, "space": digest, **versions}
