"""`tilewright report`: the page of a study, made again."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from tilewright.errors import UserError


def report(
    study: str = typer.Argument(metavar="STUDY", help="Its name, or its folder."),
    storage: str = typer.Option(None, metavar="URL", help="Where the study is, if not in its folder."),
    out: Path = typer.Option(Path("runs/tune"), help="Folder of studies."),
    page: Path = typer.Option(None, "--html", help="Where to write. Default: report.html in the study's folder."),
    as_json: bool = typer.Option(False, "--json", help="Print the answer as JSON instead of a table."),
) -> None:
    """Make a study's report again, also of one that was killed or is still running.

    Examples:

        tilewright report runs/tune/2026-11-15-120000

        tilewright report nightly --storage postgresql://host/tilewright --html nightly.html
    """
    from tilewright.cli.tune import show
    from tilewright.measure.results import SCHEMA
    from tilewright.tune.report import write_report
    from tilewright.tune.reread import reread

    folder = Path(study) if "/" in study or Path(study).is_dir() else out / study
    if storage is None and not folder.is_dir():
        raise UserError(f"There is no study in {folder}; give its folder, or its name and --storage.")
    answer = reread(folder, folder.name, storage)
    write_report(answer, page or folder / "report.html")
    if as_json:
        print(json.dumps({"schema": SCHEMA, "command": "tune", **answer.as_dict()}, allow_nan=False))
    else:
        show(answer, folder)
