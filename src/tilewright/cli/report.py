"""`tilewright report`: the page of a study, made again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tilewright.errors import UserError
from tilewright.measure.results import write_text

if TYPE_CHECKING:  # which loads optuna
    from tilewright.tune.report.answer import Answer


def report(
    studies: list[str] = typer.Argument(
        metavar="STUDY [STUDY]", help="Its name, its folder, or its answer as a .json file; two are compared."
    ),
    storage: str = typer.Option(None, metavar="URL", help="Where the study is, if not in its folder."),
    out: Path = typer.Option(Path("runs/tune"), help="Folder of studies."),
    page: Path = typer.Option(None, "--html", help="Where to write. Default: report.html in the study's folder."),
    as_json: bool = typer.Option(False, "--json", help="Print the answer as JSON instead of a table."),
) -> None:
    """Make a study's report again, also of one that was killed or is still running; or set two side by side.

    Examples:

        tilewright report runs/tune/2026-11-15-120000

        tilewright report results/h200/tune_1b.json results/h200/tune_760m.json

        tilewright report nightly --storage postgresql://host/tilewright --html nightly.html
    """
    if len(studies) > 2:
        raise UserError(f"{len(studies)} studies are too many for one page; give one or two.")
    from tilewright.measure.results import SCHEMA

    found = [_read(study, storage, out) for study in studies]
    answers = [answer for answer, _ in found]
    if as_json:
        trees = [{"schema": SCHEMA, "command": "tune", **answer.as_dict()} for answer in answers]
    if len(found) == 1:
        from tilewright.cli.tune import show
        from tilewright.tune.report.page import page as page_of

        answer, folder = found[0]
        written = _write(page_of(answer), page, folder, "report.html", f"{Path(studies[0]).stem}.html")
        if as_json:
            print(json.dumps(trees[0], allow_nan=False))
        else:
            show(answer, folder or Path(), written)
        return
    from tilewright.tune.report.compare import comparison

    names = "-beside-".join(Path(study).stem for study in studies)
    written = _write(comparison(*answers), page, None, "", f"{names}.html")
    if as_json:
        print(json.dumps({"schema": SCHEMA, "command": "report", "studies": trees}, allow_nan=False))
    else:
        _show_both(answers, written)


def _read(study: str, storage: str | None, out: Path) -> tuple[Answer, Path | None]:
    """A study's answer, and its folder where it has one."""
    from tilewright.tune.report.reread import read_answer, reread

    if storage is None and Path(study).is_file():
        return read_answer(Path(study)), None
    if storage is None and study.endswith(".json"):
        raise UserError(f"There is no file {study}; give a study's folder, or its answer.json.")
    folder = Path(study) if "/" in study or Path(study).is_dir() else out / study
    if storage is None and not folder.is_dir():
        raise UserError(f"There is no study in {folder}; give its folder, or its name and --storage.")
    return reread(folder, folder.name, storage), folder


def _write(text: str, asked: Path | None, folder: Path | None, name: str, elsewhere: str) -> Path:
    """Write a page where it was asked for, else to the study's folder, or where that cannot be written to, here."""
    if asked is not None or folder is None:
        path = asked or Path(elsewhere)
        write_text(path, text)
        return path
    try:
        write_text(folder / name, text)
        return folder / name
    except UserError as error:
        try:
            write_text(Path(elsewhere), text)
        except UserError:
            raise UserError(f"Cannot write to {folder} or to this folder; choose a file with --html.") from error
        return Path(elsewhere)


def _show_both(answers: list[Answer], written: Path) -> None:
    from tilewright.cli.output import Grid, console, tables
    from tilewright.tune.report.compare import lever_rows, rows

    screen, (first, second) = console(soft_wrap=True), answers
    both, levers = rows(first, second), lever_rows(first, second)
    grids = [Grid("Two studies", ["", *both[0][1:]], both[1:])]
    grids += [Grid("Levers of the best runs", ["lever", "A", "B"], levers)] if levers else []
    for grid in grids:
        for table in tables(grid, True, screen.width):
            screen.print(table)
    screen.print(f"Report: {written}", highlight=False, markup=False)
