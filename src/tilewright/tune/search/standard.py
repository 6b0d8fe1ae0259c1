"""The standard model that a run is compared with, and the losses it has in float32."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tilewright.train import optimizers
from tilewright.train.fields import fields
from tilewright.train.schema import Parallel, Train
from tilewright.tune.search.generating import GeneratingSpace
from tilewright.tune.search.space import Space, value_of, with_values
from tilewright.tune.store.record import Record


def float32(best: Train) -> Train:
    """The standard model in float32 in one process, with the same rule of learning.

    >>> from tilewright.train.schema import Model, Optimizer
    >>> best = Train(precision="bf16", optimizer=Optimizer(name="adamw_8bit"), model=Model(gpt_block="optimized"))
    >>> plain = float32(best)
    >>> plain.precision, plain.optimizer.name, plain.model.gpt_block
    ('fp32', 'adamw', 'standard')
    """
    rule, _ = optimizers.KINDS[best.optimizer.name]
    return with_values(alone(best), _as_they_come() | {"precision": "fp32", "optimizer.name": rule})


def alone(run: Train) -> Train:
    """The run of one process.

    >>> from tilewright.train.schema import Parallel
    >>> alone(Train(parallel=Parallel(dp=2, zero=3))) == Train()
    True
    """
    return dataclasses.replace(run, parallel=Parallel())


def standard(best: Train) -> Train:
    """The standard model in one process, with the levers that are meant to change numbers as the best run has them.

    >>> from tilewright.train.schema import Model
    >>> plain = standard(Train(precision="bf16", compile="default", model=Model(residual="bf16", loss="fused")))
    >>> plain.precision, plain.model.residual, plain.compile, plain.model.loss
    ('bf16', 'bf16', 'none', 'plain')
    """
    # Precision stays whatever it is: as it comes it is one thing on a CPU and another on a GPU.
    plain = {n: v for n, v in _as_they_come().items() if n != "precision" and moves(best, n) == "same"}
    return with_values(alone(best), plain)


def _as_they_come() -> dict[str, Any]:
    return {name: each.default for name, each in fields().items() if each.lever is not None}


def moves(run: Train, name: str) -> str:
    """How far a lever, at the value that a run has, moves the numbers: a word of NUMERICS."""
    lever = fields()[name].lever
    assert lever is not None
    return lever.moves(value_of(run, name))


def float32_losses(
    space: Space, records: Sequence[Record], own_model: str, noted: Any, draws: bool | None = None
) -> dict[str, Any]:
    """The losses of the standard model in float32, or why there are none, as an answer has them; nothing: not yet.

    They are those of the baseline, where it is that model, and else what a proof has brought. Whether a user's own
    model `draws` random numbers, its first step has shown.
    """
    if isinstance(space, GeneratingSpace):
        return {"no_float32": "nothing was trained"}
    if own_model and draws is None:
        return {"no_float32": "whether a model of your own draws random numbers is not known"}
    if own_model and draws:
        return {"no_float32": "your model draws other random numbers in every run"}
    if own_model and space.start.precision != "fp32":
        return {"no_float32": "the baseline is not in float32"}
    if space.start.model.dropout > 0:
        return {"no_float32": "dropout drops something else in every run"}
    reference = next((each.measurement for each in records if each.purpose == "reference" and each.measurement), None)
    names = ("micro_batch", "threads") if own_model else ("micro_batch",)
    same = {name: value_of(space.start, name) for name in names}
    plain = with_values(float32(space.start), same)
    if plain == space.start and space.ranks == 1 and reference is not None:
        return {"float32_losses": reference.losses}
    return noted if isinstance(noted, dict) else {}
