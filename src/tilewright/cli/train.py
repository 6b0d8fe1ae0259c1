"""`tilewright train`: one YAML, one loop, figures while it runs."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tilewright.train.configuration import read, split_arguments


def train(
    arguments: list[str] = typer.Argument(
        None, metavar="[CONFIG.yaml] [FIELD=VALUE]...", help="A configuration, and fields that differ from it."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print every step's figures, and the end, as JSON lines."),
) -> None:
    """Train a GPT. Alone, a small one on the sources of Python's standard library, on whatever the machine has.

    It goes on from the newest checkpoint of its folder. `tilewright config show` lists every field.

    Examples:

        tilewright train

        tilewright train run.yaml model.gpt_block=optimized steps=1k

        tilewright train model.preset=125m global_batch=32 data.kind=synthetic out=runs/125m
    """
    configuration = read(*split_arguments(arguments or []))

    from tilewright.train.loop import Shown
    from tilewright.train.loop import train as run

    if as_json:
        shown = Shown(
            begin=lambda facts: _print({"event": "begin", **facts}),
            step=lambda figures, steps: _print({"event": "step", **dataclasses.asdict(figures)}),
            say=lambda text: _print({"event": "note", "text": text}),
        )
        outcome = run(configuration.train, shown)
        _print({"event": "end", **dataclasses.asdict(outcome)})
        return
    with _Live() as live:
        outcome = run(configuration.train, Shown(live.begin, live.step, live.say))
    if outcome.stopped:
        live.say(f"Stopped at step {outcome.step}; the same command goes on from there.")
        raise typer.Exit(130)
    if outcome.tokens_per_second is not None:
        live.say(f"{outcome.tokens_per_second:,.0f} tokens/s, the median; everything is in {configuration.train.out}.")


def _print(record: dict[str, Any]) -> None:
    print(json.dumps(record), flush=True)


class _Live:
    """A line a step, and on a terminal a bar below them."""

    def __init__(self) -> None:
        self.console = Console(soft_wrap=True)
        columns = (
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self.progress = Progress(*columns, console=self.console, disable=not self.console.is_terminal, transient=True)
        self.task: Any = None

    def __enter__(self) -> _Live:
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def begin(self, facts: dict[str, Any]) -> None:
        batch = facts["batch"]
        self.say(
            f"{facts['parameters'] / 1e6:,.1f}M parameters on {facts['device']}, {facts['precision']}; global batch "
            f"{batch['global_batch']} = micro batch {batch['micro_batch']} x accumulation {batch['accumulation']} x "
            f"{batch['data']} ranks"
        )
        self.say(f"MFU and HFU by {facts['convention']}; peak {facts['peak_source']}")
        if facts["resumed_from"]:
            self.say(f"goes on from step {facts['resumed_from']}")

    def step(self, figures: Any, steps: int) -> None:
        if self.task is None:
            self.task = self.progress.add_task("", total=steps)
        self.progress.update(self.task, completed=figures.step)
        self.say(figures.line(steps))

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False)
