"""The memory of a run by the plan: what each block computes again, and whether the run can fit at all."""

from __future__ import annotations

import dataclasses

import torch

from tilewright.errors import UserError
from tilewright.measure.machine import host_memory_bytes
from tilewright.parallel.layout import Layout, split
from tilewright.plan.decoder import Decoder, from_gpt
from tilewright.plan.memory import WORKSPACE_BYTES, kept_activations, largest_micro_batch, levers, train
from tilewright.plan.training import Training
from tilewright.train.schema import Train

_DOUBT = 0.1  # of the bytes that the plan predicts; what is over by less is tried
# The fields of a run that are levers of the plan.
_FIELDS = {"recompute": "model.recompute", "loss": "model.loss", "gpt_block": "model.gpt_block"}


def planned(
    config: Train, precision: str, micro_batch: int, accumulation: int, layout: Layout | None = None
) -> Training:  # fmt: skip
    """Return the run in the terms of `tilewright plan`."""
    recompute = "none" if config.model.recompute == "budget" else config.model.recompute
    training = Training(
        micro_batch=micro_batch, precision=precision, optimizer=config.optimizer.name, recompute=recompute,
        residual=config.model.residual, loss=config.model.loss, accumulation=accumulation,
        attention="softmax" if config.model.attention == "math" else "flash", compiled=config.compile != "none",
        mlp_recompute=config.model.mlp == "recompute", mlp_tiles=config.model.mlp == "tilesync",
        reshard=config.parallel.reshard,
    )  # fmt: skip
    return training if layout is None else split(training, layout)


def policies(config: Train, training: Training) -> list[str]:
    """A policy a block. Within a budget: as many as fit keep all, then as many as fit run only the cheap part again.

    >>> from tilewright.train.schema import Model
    >>> run = Train(model=Model(layers=4, recompute="budget", recompute_budget=1.0))
    >>> policies(run, planned(run, "bf16", 8, 1))
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


def refuse_misfit(decoder: Decoder, training: Training, chosen: list[str], device: torch.device) -> None:
    """Refuse a run that needs more memory than the device has, by the plan and beyond its doubt.

    Blocks of several policies count as those that keep the least.
    """
    if device.type == "cuda":
        there, whose = float(torch.cuda.get_device_properties(device).total_memory), "the GPU"
    else:
        there, whose = float(host_memory_bytes()), "this machine"
    least = next(policy for policy in ("full", "selective", "none") if policy in chosen)
    training = dataclasses.replace(training, recompute=least, device=device.type)
    beside = 0.0 if device.type == "cuda" else float(WORKSPACE_BYTES)  # of cuBLAS, which a CPU has not
    needed = train(decoder, training).allocated - beside
    if (1 - _DOUBT) * needed <= there:
        return
    fits = largest_micro_batch(decoder, training, there)
    if 0 < fits < training.micro_batch:
        advice = f"micro_batch={fits} fits"
    else:
        saves = [
            (f"{_FIELDS[lever]}={value}", saved)
            for name, saved in levers(decoder, training)
            for lever, value in [name.split(": ")]
            if lever in _FIELDS
        ]
        most = f"; {saves[0][0]} saves {saves[0][1] / 1e9:,.1f} GB" if saves else ""
        advice = f"no micro_batch fits{most}"
    raise UserError(
        f"By the plan this run needs {needed / 1e9:,.1f} GB and {whose} has {there / 1e9:,.1f} GB: {advice}; see "
        "`tilewright plan train` for what needs how much."
    )


def _most(layers: int, more: float, less: float, budget: float) -> int:
    """Return how many layers can take `more` bytes each, if the others take `less`."""
    return layers if more <= less else max(0, min(layers, int((budget - layers * less) // (more - less))))
