"""`tilewright tune`: try every setting, measure it, show that it is the same model."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from tilewright import hardware
from tilewright.errors import UserError
from tilewright.measure.results import SCHEMA, write_json
from tilewright.plan.gpt import GPTConfig, preset
from tilewright.tune.space import settings
from tilewright.tune.study import Study, run_study
from tilewright.tune.trial import Trial

# What a machine without a GPU trains in a minute or two.
CPU_MODEL = GPTConfig(width=128, layers=2, heads=4, vocabulary=512, sequence=128)


def tune(
    preset_name: str = typer.Option(
        None, "--preset", help="Model: 125m ... 70b. Default: 125m on a GPU, a small one on a CPU."
    ),
    batch: int = typer.Option(None, min=1, help="Sequences a step. Default: 8."),
    sequence: int = typer.Option(None, min=2, help="Tokens a sequence. Default: the model's."),
    dropout: float = typer.Option(0.0, help="Dropout of the timed steps; the loss curves are compared without."),
    steps: int = typer.Option(None, min=1, help="Timed steps. Default: 10."),
    mode: str = typer.Option("all", help="Only `eager` or only `compile`, or `all`."),
    peak_tflops: float = typer.Option(None, help="Dense peak of the accelerator, where the table does not know it."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead of a table."),
    out: Path = typer.Option(None, help="Also write the JSON to this file, after every setting."),
) -> None:
    """Train a GPT for a few steps under every setting and print what each gives.

    Examples:

        tilewright tune

        tilewright tune --preset 1b --batch 16 --dropout 0.1

        tilewright tune --preset 125m --json > result.json
    """
    import torch

    from tilewright.measure.machine import describe

    space = settings(mode)
    on_gpu = torch.cuda.is_available()
    model = preset(preset_name) if preset_name else preset("125m") if on_gpu else CPU_MODEL
    model = dataclasses.replace(model, dropout=dropout, sequence=sequence or model.sequence)
    batch = batch or 8
    trial = Trial(
        model=model,
        compile=False,
        device="cuda" if on_gpu else "cpu",
        precision="bf16" if on_gpu else "fp32",
        batch=batch,
        check_batch=min(batch, 2 if on_gpu else 8),
        check_steps=10,
        warmup_steps=3,
        steps=steps or 10,
    )
    peak, peak_source = hardware.peak(
        torch.cuda.get_device_name() if on_gpu else None, "bf16", peak_tflops, "--peak-tflops"
    )
    head = {
        "schema": SCHEMA,
        "command": "tune",
        "machine": describe(),
        "trial": dataclasses.asdict(trial),
        "peak_flops": peak,
        "peak_source": peak_source,
        "flops_convention": "6N + 12Lhs a token",
    }

    def save(study: Study) -> None:
        if out is not None:
            write_json(out, {**head, **study.as_dict()})

    from tilewright.cli.progress import Stages

    with Stages() as stages:
        study = run_study(space, trial, peak, stages, save)
    if as_json:
        print(json.dumps({**head, **study.as_dict()}))
    else:
        _show(study, trial, peak_source)
    if all(row.result.error for row in study.rows):
        raise UserError(f"No setting ran: {study.rows[0].result.error}")


def _show(study: Study, trial: Trial, peak_source: str) -> None:
    model = trial.model
    console = Console()
    table = Table(
        title=f"GPT {model.width} x {model.layers}, {model.parameters / 1e6:.1f}M parameters, batch {trial.batch} x "
        f"{model.sequence}, dropout {model.dropout:g}, {trial.precision} on {trial.device}",
        title_justify="left",
    )
    table.add_column("gpt_block")
    for heading in ("mode", "tokens/s", "ratio", "peak memory", "MFU", "loss difference"):
        table.add_column(heading, justify="left" if heading == "mode" else "right")
    for row in study.rows:
        mode = "compile" if row.setting.compile else "eager"
        if row.result.error:
            table.add_row(row.setting.gpt_block, mode, "failed")
            continue
        table.add_row(
            row.setting.gpt_block,
            mode,
            _number(row.result.tokens_per_second, ",.0f"),
            _number(row.speedup, ".2f", "x"),
            f"{row.result.peak_memory_bytes / 2**30:.2f} GiB",
            _number(row.mfu, ".1%"),
            _number(row.loss_difference, ".1e"),
        )
    console.print(table)
    for row in study.rows:
        if row.result.error:
            console.print(f"{row.setting} failed: {row.result.error}", highlight=False, soft_wrap=True, markup=False)
    console.print(f"MFU by 6N + 12Lhs; peak {peak_source}.", highlight=False, soft_wrap=True, markup=False)
    console.print(_difference_note(study, trial), highlight=False, soft_wrap=True, markup=False)
    if study.drift is not None:
        note = f"Drift: the speed of the first setting, run again at the end, had changed by {study.drift:+.1%}."
        if abs(study.drift) > 0.05:
            note += " The machine was not steady: do not rely on the ratios."
        console.print(note, highlight=False, soft_wrap=True)
    if trial.device == "cpu":
        console.print(
            "On a CPU `optimized` runs its plain PyTorch reference: the ratio says nothing about a GPU.",
            highlight=False,
            soft_wrap=True,
        )


def _difference_note(study: Study, trial: Trial) -> str:
    if study.reference.error:
        return f"No loss difference: the float32 reference failed: {study.reference.error}"
    return (
        f"Loss difference: the largest over {trial.check_steps} steps to the float32 standard run, same weights and "
        f"data, without dropout (loss {study.reference.losses[0]:.3f} to {study.reference.losses[-1]:.3f})."
    )


def _number(value: Any, form: str, unit: str = "") -> str:
    return "n/a" if value is None else f"{value:{form}}{unit}"
