"""`tilewright tune`: run the experiments, choose the best, prove it, show it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tilewright.cli import output
from tilewright.cli.output import ProgressConsole, gigabytes
from tilewright.errors import UserError
from tilewright.measure.results import SCHEMA
from tilewright.plan.hf_folder import check_folder
from tilewright.tune.api import DEFAULT_BUDGET, REHEARSAL_BUDGET, amount, seconds
from tilewright.tune.search.choose import UNKNOWN, at_least, is_known, latest
from tilewright.tune.search.space import label

if TYPE_CHECKING:
    from tilewright.tune.report.answer import Answer
    from tilewright.tune.store.record import Prediction, Record, RuleGains

HF_FACTORY = "tilewright.optimize.huggingface:build"
_NUMERICS = "rounding"
_ROWS = 12  # of the table
_WIDE = 110  # columns of a terminal that has room for all of its columns
_REHEARSAL = "its speeds are this CPU's, where fused ops run as plain PyTorch, and say nothing of a GPU."
_SHOWN = {"done": "green", "stopped early": "yellow"}


def tune(
    arguments: list[str] = typer.Argument(
        None, metavar="[CONFIG.yaml] [FIELD=VALUE]...", help="A run as `train` takes it: what you set stays as it is."
    ),
    budget: str = typer.Option(
        None, help=f"Time for all of it: 90s, 20m, 2h. Default: {DEFAULT_BUDGET}, or {REHEARSAL_BUDGET} without a GPU."
    ),
    model: str = typer.Option("", metavar="PACKAGE.MODULE:FACTORY", help="Your own model: returns a module, a batch."),
    model_arg: list[str] = typer.Option([], metavar="NAME=VALUE", help="An argument of that factory."),
    hf: str = typer.Option("", metavar="FOLDER", help="A local Hugging Face folder: config.json, safetensors or not."),
    search: list[str] = typer.Option([], metavar="LEVER", help="Try this lever although it is set; `all` for all."),
    purpose: str = typer.Option("train", "--for", help="train; decode, prefill: generate with the model of a folder."),
    aim: str = typer.Option("latency", help="Of --for: latency of one text, or throughput of batches."),
    quality: str = typer.Option("1%", help="Of --for: how far the perplexity may rise. docs/tune.md has more words."),
    nproc: int = typer.Option(1, "--nproc", help="Every run is on so many ranks, whose layout is a lever, too."),
    numerics: str = typer.Option(_NUMERICS, help="How far numbers may move: same, rounding, state or rule."),
    precision_floor: str = typer.Option(None, help="No precision below this: fp32, tf32, bf16 ..."),
    first: list[str] = typer.Option([], "--try", metavar="FIELD=VALUE,...", help="A run to try before any other."),
    memory: str = typer.Option(None, help="The most a run may take, such as 80GB."),
    study: str = typer.Option(None, help="Its name. Default: the time it began."),
    resume: bool = typer.Option(False, "--resume", help="Go on with a study: the one named, or the newest."),
    storage: str = typer.Option(None, metavar="URL", help="A database that several machines share a study through."),
    fresh: bool = typer.Option(False, "--fresh", help="Measure again what was measured before."),
    gpu: str = typer.Option(
        None, help="Predict the same run for this accelerator. Default, without a GPU here: H100-SXM5."
    ),
    out: Path = typer.Option(Path("runs/tune"), help="Folder of studies."),
    as_json: bool = typer.Option(False, "--json", help="Print the answer as JSON."),
) -> None:
    """Find the fastest way to train a model on this machine, and prove that it is the same model.

    Alone, it tunes an embedded default. Without a GPU it is a rehearsal: it shows what the plan predicts for a GPU, and
    how a study goes. Ctrl-C ends it with the best so far; --resume goes on. The study's folder gets
    best.yaml, which `tilewright train` takes as it is, and report.html.

    Examples:

        tilewright tune

        tilewright tune model.preset=1b global_batch=16 --budget 8m

        tilewright tune run.yaml --memory 80GB --numerics same

        tilewright tune --model my_package.model:build

        tilewright tune --hf path/to/llama --model-arg batch=8 --model-arg sequence=2048

        tilewright tune model.preset=1b global_batch=64 --nproc 8

        tilewright tune --for decode path/to/llama prompt=512 --quality 1%
    """
    from tilewright.tune.api import tune as run
    from tilewright.tune.generating import tune_generating
    from tilewright.tune.report.page import write_report
    from tilewright.tune.settings import Shown
    from tilewright.tune.store.storage import StorageLost

    if purpose not in ("train", "decode", "prefill"):
        raise UserError(f"--for is {purpose!r}; choose train, decode or prefill.")
    if nproc != 1 and (purpose != "train" or model or hf):
        what = f"--for {purpose}" if purpose != "train" else "--model and --hf"
        raise UserError(
            f"--nproc tunes Tilewright's own GPT over several ranks, and {what} run in one process; leave --nproc out."
        )
    if purpose != "train" and hf and not arguments:
        raise UserError(f"--for {purpose} takes the folder without --hf: tilewright tune --for {purpose} {hf}")
    if purpose != "train" and (not arguments or "=" in arguments[0] or model or hf):
        raise UserError(f"--for {purpose} needs the folder of a model: tilewright tune --for {purpose} path/to/llama")
    if purpose != "train":
        _refuse_training_only(purpose, search, numerics, precision_floor, gpu)
    model = _model(model, model_arg, hf)
    if budget is not None:
        seconds(budget)  # a mistake in a word shows before torch is loaded
    if memory is not None:
        amount(memory)
    lost: StorageLost | None = None
    try:
        with _Progress() as progress:
            shown = Shown(
                progress.begin, progress.trial, progress.event, progress.record, progress.say, progress.rehearse
            )
            common: dict[str, Any] = {
                "budget": budget, "study": study, "storage": storage, "resume": resume, "first": first,
                "memory": memory, "fresh": fresh, "out": out, "shown": shown,
            }  # fmt: skip
            if purpose == "train":
                answer = run(
                    *(arguments or []), model=model, search=search, numerics=numerics,
                    precision_floor=precision_floor, gpu=gpu, nproc=nproc, **common,
                )  # fmt: skip
            else:
                answer = tune_generating(*arguments, aim=purpose, unit=aim, quality=quality, **common)
    except StorageLost as caught:
        if caught.answer is None:
            raise
        answer, lost = caught.answer, caught
    folder = out / answer.name
    write_report(answer, folder / "report.html")
    if as_json:
        print(json.dumps({"schema": SCHEMA, "command": "tune", **answer.as_dict()}, allow_nan=False))
    else:
        show(answer, folder)
    if lost is not None:
        raise lost
    if answer.interrupted:
        raise typer.Exit(130)
    if answer.best is None:
        raise UserError(f"No run was measured to its end; {folder / 'report.html'} has what each of them said.")


def _refuse_training_only(
    purpose: str, search: list[str], numerics: str, precision_floor: str | None, gpu: str | None
) -> None:  # fmt: skip
    """Refuse what a study of generating would not read."""
    given = {"search": search, "numerics": numerics != _NUMERICS, "precision-floor": precision_floor, "gpu": gpu}
    for name, is_given in given.items():
        if is_given:
            raise UserError(f"--{name} is of --for train; leave it out. Fix a lever of --for {purpose} as NAME=VALUE.")


def _model(model: str, arguments: list[str], folder: str) -> str:
    """A user's model in one text: the factory and its arguments; of a Hugging Face folder, our factory for those."""
    if model and folder:
        raise UserError("--model and --hf both name a model; leave one of them out.")
    for each in arguments:
        if "=" not in each:
            raise UserError(f"--model-arg is {each!r}; write NAME=VALUE.")
    if folder:
        check_folder(Path(folder))
        model, arguments = HF_FACTORY, [f"folder={Path(folder).resolve()}", *arguments]
    if arguments and not model:
        raise UserError("--model-arg is for the factory of --model or --hf; name one.")
    if not arguments:
        return model
    from tilewright.tune.model_name import with_arguments

    return with_arguments(model, arguments)


def show(answer: Answer, folder: Path, page: Path | None = None) -> None:
    """The answer for a terminal: a table of runs, what each lever gave, three sentences, where the files are.

    Args:
        answer: of the study.
        folder: of the study.
        page: the report, where it is not in that folder.
    """
    console = output.console(soft_wrap=True)
    console.print(_table(answer, console.width))
    if (others := len(latest(answer.records)) - _ROWS) > 0:
        console.print(f"and {others} more, in the report.", highlight=False)
    if answer.ablations:
        table = Table("lever", "without it", title="What each lever of the best run gives", title_justify="left")
        table.columns[1].justify = "right"
        for each in answer.ablations:
            rate, best = each.tokens_per_second, answer.best and answer.best.tokens_per_second
            gives = f"{rate / best - 1:+.1%}" if rate and best else each.error or "n/a"
            table.add_row(label({each.lever: each.value}), Text(gives))
        console.print(table)
    if answer.rules is not None and answer.rules.gains:
        console.print(_rules(answer.rules, answer.rule_names))
    if answer.on_gpu.get("rows"):
        console.print(_predicted(answer.on_gpu))
    for sentence in answer.sentences:
        console.print(sentence, highlight=False, markup=False, style="bold")
    for note in (*_notes(answer), *_files(answer, folder, page or folder / "report.html")):
        console.print(note, highlight=False, markup=False)


def _rules(found: RuleGains, kept: Collection[str]) -> Table:
    table = Table("rule", "without it", "", title="What each rule gives in a step", title_justify="left")
    table.columns[1].justify = "right"
    for each in found.gains:
        table.add_row(Text(each.rule), f"{each.seconds * 1e3:+.2f} ms", "kept" if each.rule in kept else "undone")
    for name in found.not_measured:
        table.add_row(Text(name), "not measured", "kept")
    return table


def _notes(answer: Answer) -> list[str]:
    notes = [] if answer.generates else [answer.about_losses]
    if not answer.generates and any(record.measurement and record.measurement.mfu is None for record in answer.records):
        notes.append("MFU is n/a: the peak of this machine is not known; give it with log.peak_tflops=TFLOPS.")
    if answer.phases:
        words = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in answer.phases.items() if seconds >= 0.5)
        notes.append(f"Where the time went: {words or 'less than a second'}.")
    if answer.discarded:
        words = ", ".join(f"{count} that {why}" for why, count in answer.discarded.items())
        notes.append(f"Left out by the plan: {words}.")
    references = [record for record in answer.records if record.purpose == "reference"]
    if answer.drift is not None:
        drifted = f"the machine drifted by {answer.drift:.1%}, for which the table is corrected"
        notes.append(f"The baseline ran {len(references)} times; {drifted}.")
    if not all(map(is_known, latest(answer.records).values())):
        notes.append(UNKNOWN)
    if answer.is_rehearsal:
        notes.append(f"This was a rehearsal: {_REHEARSAL}")
        notes += _recorded(answer.on_gpu)
    return notes


def _recorded(on_gpu: Mapping[str, Any]) -> list[str]:
    from tilewright.tune.rehearsal import recorded_path

    path = recorded_path(on_gpu.get("recorded", ""))
    return [f"Measured on an H200, a recorded study: tilewright report {path}"] if path else []


def _predicted(on_gpu: Mapping[str, Any]) -> Table:
    """What the plan predicts for a GPU that is not here, called so."""
    from tilewright.tune.report.answer import gpus_of

    title, source = f"Predicted by the plan for {gpus_of(on_gpu)}; not measured", f"By {on_gpu['rates']}."
    table = Table("model", "run", title=Text(title), caption=Text(source), title_justify="left", caption_justify="left")
    for heading in ("tokens/s", "ratio", "step", "memory"):
        table.add_column(heading, justify="right", no_wrap=True)
    model = ""
    for row in on_gpu["rows"]:
        speed, ratio = row["tokens_per_second"], row["ratio"]
        table.add_row(
            Text(row["model"] if row["model"] != model else ""), Text(row["run"]),
            f"{speed:,.0f}" if speed else "does not fit", f"{ratio:.2f}x" if ratio else "",
            f"{row['seconds'] * 1e3:,.1f} ms", gigabytes(row["bytes"]),
        )  # fmt: skip
        model = row["model"]
    return table


def _files(answer: Answer, folder: Path, page: Path) -> list[str]:
    files = [f"Report: {page}"]
    if answer.generates:
        return [*files, f"Generate: {answer.ready}"] if answer.recommended and answer.ready else files
    if answer.recommended and (folder / "best.yaml").is_file():
        ranks = f" --nproc {answer.ranks}" if answer.ranks > 1 else ""
        train = f"Train: tilewright train {folder / 'best.yaml'}{ranks}"
        files.append(f"Levers for your own training: {folder / 'best.yaml'}" if answer.own_model else train)
    if answer.own_model and answer.recommended and answer.best is not None:
        if answer.own_lines:
            files += ["In your own script:", *(f"    {line}" for line in answer.own_lines)]
        if (folder / "best.py").is_file():
            files.append(f"Run it as it was measured: python {folder / 'best.py'}")
    return files


def _table(answer: Answer, width: int) -> Table:
    first = answer.reference.tokens_per_second if answer.reference else None
    return _ranked(
        answer.records,
        answer.levers,
        first,
        answer.best,
        width,
        answer.unit,
        None if answer.generates else answer.loss_difference,
    )


def _ranked(
    records: list[Record], levers: dict[str, list[Any]], first: float | None, best: Record | None, width: int,
    unit: str, loss_difference: Callable[[Record], float | None] | None = None,
) -> Table:  # fmt: skip
    """The fastest runs; in a narrow terminal without the times of a step, and the outcome is beside the run."""
    wide = width >= _WIDE
    table = Table("run")
    more = (*(("loss diff",) if loss_difference else ()), *(("predicted", "measured", "outcome") if wide else ()))
    for heading in (f"{unit}/s", "ratio", "memory", "MFU", *more):
        table.add_column(heading, justify="left" if heading == "outcome" else "right", no_wrap=True)
    for record in sorted(latest(records).values(), key=at_least, reverse=True)[:_ROWS]:
        sure = "" if is_known(record) else "?"
        rate, found, predicted = record.tokens_per_second, record.measurement, record.prediction
        outcome = Text(record.outcome + (", kept" if record.cached else ""), style=_SHOWN.get(record.outcome, "red"))
        run = Text(label({name: value for name, value in record.point.items() if value != levers[name][0]}))
        if not wide and outcome.plain != "done":
            run = Text.assemble(run, ": ", outcome)
        cells: list[str | Text] = [
            run,
            f"{rate:,.0f}{sure}" if rate else "",
            f"{rate / first:.2f}x{sure}" if rate and first else "",
            gigabytes(found.bytes) if found else "",
            (f"{found.mfu:.1%}" if found.mfu is not None else "n/a") if found else "",
        ]
        if loss_difference:
            far = loss_difference(record)
            cells.append((f"{far:.1e}" if far is not None else "n/a") if found else "")
        if wide:
            cells.append(f"{predicted.seconds * 1e3:,.1f} ms" if predicted else "")
            cells += [f"{found.seconds * 1e3:,.1f} ms" if found else "", outcome]
        chosen = best is not None and record.point == best.point
        table.add_row(*cells, style="bold" if chosen else None)
    return table


class _Progress:
    """A table that grows, with the time that is left; in a log a line a trial. On standard error."""

    def __init__(self) -> None:
        self.console = ProgressConsole(stderr=True)
        self.end, self.began = 0.0, time.monotonic()  # 0: not known yet
        self.records: list[Record] = []
        self.best: Record | None = None
        self.levers: dict[str, list[Any]] = {}
        self.unit = "tokens"
        self.now, self.steps = "starting", 0
        self.live = Live(get_renderable=self._picture, console=self.console, refresh_per_second=4, transient=True)

    def __enter__(self) -> _Progress:
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.live.stop()

    def begin(self, facts: dict[str, Any]) -> None:
        self.levers = facts["levers"]
        self.end = time.monotonic() + facts["budget"]
        self.unit = facts.get("ceilings", {}).get("own_model", {}).get("unit", "tokens")
        self.say(
            f"study {facts['name']}: open levers: {len(self.levers)}; trials already finished: {facts['finished']}"
        )

    def rehearse(self, on_gpu: dict[str, Any], is_rehearsal: bool) -> None:
        """Say at once that a study without a GPU is a rehearsal, and what the plan predicts for a GPU."""
        if is_rehearsal:
            self.say(f"This study runs without a GPU, so it is a rehearsal: {_REHEARSAL}")
        if on_gpu.get("rows"):
            self.console.print(_predicted(on_gpu))
        elif on_gpu:
            self.say("Of a model of your own the plan knows nothing, so nothing is predicted for a GPU.")
        for line in _recorded(on_gpu) if is_rehearsal else ():
            self.say(line)

    def trial(self, what: str, point: dict[str, Any], prediction: Prediction | None) -> None:
        name = self._label(point) if what != "reference" else "baseline, again"
        self.now, self.steps = f"{what}: {name}" if what in ("proof", "kernels", "rules") else name, 0

    def event(self, event: dict[str, Any]) -> None:
        if event.get("event") == "step":
            self.steps += 1

    def record(self, record: Record, best: Record | None) -> None:
        self.records.append(record)
        self.best = best
        if not self.console.is_terminal:
            measured = record.measurement  # not yet corrected for drift, as the table in the end is
            found = f"{measured.tokens_per_second:,.0f} {self.unit}/s" if measured else record.error or ""
            name = self._label(record.point)
            self.console.print(
                f"{self._clock()}  {name}: {record.outcome}, {found}", highlight=False, markup=False
            )  # fmt: skip

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False)

    def _label(self, point: dict[str, Any]) -> str:
        return label({name: value for name, value in point.items() if value != self.levers[name][0]})

    def _clock(self) -> str:
        now = time.monotonic()
        left = f", {_minutes(max(0.0, self.end - now))} left" if self.end else ""
        return f"{_minutes(now - self.began)} gone{left}"

    def _picture(self) -> Group:
        first = next((r.tokens_per_second for r in self.records if r.purpose == "reference" and r.measurement), None)
        table = _ranked(self.records, self.levers, first, self.best, self.console.width, self.unit)
        ratio = ""
        if self.best is not None and self.best.tokens_per_second and first:
            ratio = f"   best so far {self.best.tokens_per_second / first:.2f}x"
        steps = f", step {self.steps}" if self.steps else ""
        line = Text(
            f"{self._clock()}   {len(self.records)} trials{ratio}   now: {self.now}{steps}", overflow="ellipsis"
        )
        return Group(table, line) if self.records else Group(line)


def _minutes(value: float) -> str:
    return f"{int(value) // 60}:{int(value) % 60:02d}"
