"""What each block computes again in backward, so that what it keeps stays within a budget."""

from __future__ import annotations

import dataclasses

from tilewright.errors import UserError
from tilewright.plan.decoder import from_gpt
from tilewright.plan.memory import Training, kept_activations
from tilewright.train.config import Train

# The plan's names for how a run is kept in memory.
_PRECISIONS = {"fp32": "fp32", "tf32": "fp32", "bf16": "amp", "bf16_kahan": "bf16", "bf16_stochastic": "bf16"}


def planned(config: Train, precision: str, micro_batch: int, accumulation: int, ranks: int) -> Training:
    """The run as `tilewright plan` knows it."""
    recompute = "none" if config.model.recompute == "budget" else config.model.recompute
    return Training(
        micro_batch=micro_batch, precision=_PRECISIONS[precision], optimizer=config.optimizer.name, recompute=recompute,
        residual=config.model.residual, loss=config.model.loss, accumulation=accumulation, data=ranks,
        attention="softmax" if config.model.attention == "math" else "flash", compiled=config.compile != "none",
        mlp_recompute=config.model.mlp == "recompute", kahan=precision == "bf16_kahan",
    )  # fmt: skip


def policies(config: Train, training: Training) -> list[str]:
    """A policy a block. Within a budget: as many as fit keep all, then as many as fit run only the cheap part again.

    >>> from tilewright.train.config import Model
    >>> run = Train(model=Model(layers=4, recompute="budget", recompute_budget=1.0))
    >>> policies(run, planned(run, "bf16", 8, 1, 1))
    ['none', 'none', 'none', 'none']
    """
    model = config.model
    if model.recompute != "budget":
        return [model.recompute] * model.layers
    decoder = from_gpt(model)
    each = {
        how: kept_activations(decoder, dataclasses.replace(training, recompute=how), 1, first=False, last=False)
        for how in ("none", "selective", "full")
    }
    budget = model.recompute_budget * 2**30
    if model.layers * each["full"] > budget:
        least = model.layers * each["full"] / 2**30
        raise UserError(
            f"model.recompute_budget is {model.recompute_budget:g} GiB; with all blocks recomputed they still keep "
            f"{least:.3g} GiB: give that much, or take a smaller micro_batch."
        )
    cheap = _most(model.layers, each["selective"], each["full"], budget)
    if cheap < model.layers:
        return ["selective"] * cheap + ["full"] * (model.layers - cheap)
    whole = _most(model.layers, each["none"], each["selective"], budget)
    return ["none"] * whole + ["selective"] * (model.layers - whole)


def _most(layers: int, more: float, less: float, budget: float) -> int:
    """How many of the layers can have `more` bytes each, the others `less`."""
    return layers if more <= less else max(0, min(layers, int((budget - layers * less) // (more - less))))
