"""`tilewright train`: one YAML, one loop, metrics while it runs."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from tilewright.cli.output import ProgressConsole, gigabytes
from tilewright.errors import UserError
from tilewright.train.check_ranks import check_ranks, fewer_groups, keeps_its_ranks, with_fewer_ranks
from tilewright.train.load_config import Configuration, read, split_arguments

if TYPE_CHECKING:  # which loads torch
    from tilewright.train.shown import Outcome

_PAUSE = 5.0  # seconds between two lines of a log: a run of a million steps does not flood it
_PAGE = 25  # lines under one header


def train(
    arguments: list[str] = typer.Argument(
        None, metavar="[CONFIG.yaml] [FIELD=VALUE]...", help="A configuration, and fields that differ from it."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print every step's metrics, and the end, as JSON lines."),
    nproc: int = typer.Option(
        0, "--nproc", min=0, help="Start so many ranks on this machine, a GPU each where it has some."
    ),
    restarts: int = typer.Option(
        3, "--restarts", min=0, help="With --nproc: go on so many times without a rank that failed."
    ),
) -> None:
    """Train a GPT. Alone, a small one on the sources of Python's standard library, on whatever the machine has.

    It goes on from the newest checkpoint of its folder. Ctrl-C ends it after its step, with a checkpoint and exit code
    130. A terminal gets a line a step, a log one in five seconds unless log.every is given; metrics.jsonl has them all.
    `tilewright config show` lists every field.

    Examples:

        tilewright train

        tilewright train run.yaml model.gpt_block=optimized steps=1k

        tilewright train model.preset=125m global_batch=32 data.kind=synthetic out=runs/125m
    """
    configuration = read(*split_arguments(arguments or []))
    if nproc and "WORLD_SIZE" not in os.environ:
        raise typer.Exit(_launch(configuration, arguments or [], nproc, restarts, as_json))

    from tilewright.parallel.agree import Lost, Silent
    from tilewright.parallel.alive import is_watched
    from tilewright.train.world import World

    try:
        with World.joined(configuration.train.parallel.timeout, configuration.train.device):
            stopped = _run(configuration, as_json)
    except Silent:
        raise typer.Exit(2) from None
    except Lost as lost:
        if not is_watched():  # or the launcher says who it was
            print(f"error: {lost}", file=sys.stderr, flush=True)
        raise typer.Exit(1) from None
    if stopped:
        raise typer.Exit(130)


def _launch(configuration: Configuration, arguments: list[str], ranks: int, restarts: int, as_json: bool) -> int:
    """Start the ranks; the exit code of the run."""
    train = configuration.train
    same = with_fewer_ranks(train, ranks)
    needs_all = keeps_its_ranks(train, ranks)

    from tilewright.parallel import launch

    def smaller(most: int) -> launch.Start | None:
        """Find the largest smaller mesh that keeps the global batch, so that the run learns the same."""
        for number in range(most, 0, -1):
            if number < ranks and needs_all:
                continue
            with contextlib.suppress(UserError):
                added = (*same, *fewer_groups(train, ranks, number))
                check_ranks(read(*split_arguments([*arguments, *added])).train, number)
                return launch.Start(number, added)
        return None

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    if not train.checkpoint.every and restarts:
        say("checkpoint.every is 0: a run whose rank fails begins anew; set it to go on from there.")
    given = [*arguments, "--json"] if as_json else arguments
    return launch.run(given, ranks, restarts=restarts, smaller=smaller, say=say)


def _run(configuration: Configuration, as_json: bool) -> bool:
    """Train and show it; whether it was stopped."""
    from tilewright.train.loop import train as run
    from tilewright.train.shown import Shown

    if as_json:
        shown = Shown(
            begin=lambda facts: _print({"event": "begin", **facts}),
            step=lambda metrics, steps: _print({"event": "step", **dataclasses.asdict(metrics)}),
            say=lambda text: _print({"event": "note", "text": text}),
            profile=lambda found: _print({"event": "profile", **found}),
            end=lambda outcome: _print({"event": "end", **dataclasses.asdict(outcome)}),
        )
        return run(configuration.train, shown).stopped
    with _Live(configuration) as live:
        return run(configuration.train, Shown(live.begin, live.step, live.say, live.profile, live.end)).stopped


def _print(record: dict[str, Any]) -> None:
    try:
        print(json.dumps(record), flush=True)
    except OSError as error:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), sys.stdout.fileno())
        _stop(error.strerror or "")


def _stop(why: str) -> None:
    """Stop as by Ctrl-C, with a checkpoint: the reader of the output is gone, as with `| head`, or its disk is full."""
    with contextlib.suppress(OSError):
        if why != os.strerror(errno.EPIPE):
            print(f"The output cannot be written ({why}): stopping, with a checkpoint.", file=sys.stderr)
    signal.raise_signal(signal.SIGINT)


class _Live:
    """A line a step, and on a terminal a bar below them; in a log a line every few seconds, or as `log.every` says."""

    def __init__(self, configuration: Configuration) -> None:
        self.out, every_line = configuration.train.out, configuration.origins["log.every"] != "default"
        self.console = ProgressConsole(_stop)
        columns = (
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self.progress = Progress(*columns, console=self.console, disable=not self.console.is_terminal, transient=True)
        self.task: Any = None
        self.pause = 0.0 if every_line or self.console.is_terminal else _PAUSE
        self.last = -_PAUSE  # when a line was printed
        self.lines = 0

    def __enter__(self) -> _Live:
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def begin(self, facts: dict[str, Any]) -> None:
        batch = facts["batch"]
        self.say(
            f"{facts['parameters']:,} parameters on {facts['device']}, {facts['precision']}; global batch "
            f"{batch['global_batch']} = micro batch {batch['micro_batch']} x accumulation {batch['accumulation']} x "
            f"{batch['data']} ranks"
        )
        self.say(f"MFU and HFU by {facts['convention']}; peak {facts['peak_source']}")
        if facts["device"] != "cpu":
            self.say("memory: the peak allocated / reserved / in use on the device by anybody")
        if facts["resumed_from"]:
            self.say(f"goes on from step {facts['resumed_from']}")

    def step(self, metrics: Any, steps: int) -> None:
        if self.task is None:
            self.task = self.progress.add_task("", total=steps, completed=metrics.step - 1)  # as it resumed
        self.progress.update(self.task, completed=metrics.step)
        now = time.monotonic()
        if now - self.last < self.pause and metrics.step != steps and not metrics.skipped:
            return
        self.last = now
        if self.lines % _PAGE == 0:
            self.say(metrics.header())
        self.lines += 1
        self.say(metrics.line())

    def profile(self, found: dict[str, Any]) -> None:
        """Where the step went, and its memory against the plan's."""
        step = found["time"]
        whole, busy, idle = (step[name] * 1e3 for name in ("seconds", "busy_seconds", "idle_seconds"))
        self.say(
            f"a step of {whole:,.2f} ms under the profiler: {busy:,.2f} ms busy with {step['launches']:,.0f} launches, "
            f"{idle:,.2f} ms idle in {step['gaps']:,.0f} gaps of over 10 us"
        )
        spent = [("work", one) for one in step["categories"]] + [("phase", one) for one in step["phases"]]
        for gap in step["longest_gaps"]:
            before = gap["before"].removeprefix("void ").partition("<")[0][:30]
            spent.append(("gap", {**gap, "name": f"after {before}", "calls": 1}))
        self._table(
            ("where the step went", "", "ms", "share", "calls"),
            [(by, one["name"], f"{one['seconds'] * 1e3:,.3f}", f"{one['seconds'] / step['seconds']:.1%}",
              f"{one['calls']:,.0f}") for by, one in spent],
        )  # fmt: skip
        self._table(
            ("memory", "predicted", "measured", "difference"),
            [(row["part"], *(gigabytes(row[name]) for name in ("predicted", "measured", "difference")))
             for row in found["memory"]],
        )  # fmt: skip
        self.say(f"kernels, gaps and the rest are in {found['trace']} and profile.json beside it")
        self.lines = 0  # the metrics go on under a header

    def _table(self, header: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
        table = Table(box=None, pad_edge=False)
        for number, title in enumerate(header):
            table.add_column(title, justify="right" if number and title else "left")
        for row in rows:
            table.add_row(*row)
        self.console.print(table, soft_wrap=False)

    def end(self, outcome: Outcome) -> None:
        if outcome.stopped:
            self.say(f"Stopped at step {outcome.step}, with a checkpoint; checkpoint.resume=auto goes on from there.")
        elif outcome.tokens_per_second is not None:
            self.say(f"{outcome.tokens_per_second:,.0f} tokens/s, the median; everything is in {self.out}.")

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False)
