"""`tilewright report`: the page of a study, made again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tilewright.errors import UserError
from tilewright.measure.results import SCHEMA

if TYPE_CHECKING:
    from tilewright.tune.answer import Answer


def report(
    study: str = typer.Argument(metavar="STUDY", help="Its name, its folder, or a file: answer.json, a recorded one."),
    storage: str = typer.Option(None, metavar="URL", help="Where the study is, if not in its folder."),
    out: Path = typer.Option(Path("runs/tune"), help="Folder of studies."),
    page: Path = typer.Option(None, "--html", help="Where to write. Default: report.html in the study's folder."),
    as_json: bool = typer.Option(False, "--json", help="Print the answer as JSON instead of a table."),
) -> None:
    """Make a study's report again, also of one that was killed or is still running.

    Examples:

        tilewright report runs/tune/2026-11-15-120000

        tilewright report results/h200/tune_1b.json

        tilewright report nightly --storage postgresql://host/tilewright --html nightly.html
    """
    from tilewright.tune.report import write_report
    from tilewright.tune.reread import read_answer, reread

    if study.endswith(".json"):
        answer, folder, page = read_answer(Path(study)), Path(study).parent, page or out / f"{Path(study).stem}.html"
        write_report(answer, page)
        return _print(answer, folder, page, as_json)
    folder = Path(study) if "/" in study or Path(study).is_dir() else out / study
    if storage is None and not folder.is_dir():
        raise UserError(f"There is no study in {folder}; give its folder, or its name and --storage.")
    answer = reread(folder, folder.name, storage)
    page = page or folder / "report.html"
    write_report(answer, page)
    _print(answer, folder, page, as_json)


def _print(answer: Answer, folder: Path, page: Path, as_json: bool) -> None:
    from tilewright.cli.tune import show

    if as_json:
        print(json.dumps({"schema": SCHEMA, "command": "tune", **answer.as_dict()}, allow_nan=False))
    else:
        show(answer, folder, page)
