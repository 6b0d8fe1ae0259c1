"""`tilewright config`: every field of a training run, its value and where it was set; and the schema for an editor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from tilewright.cli.output import Grid, Report
from tilewright.measure.results import write_json
from tilewright.train.fields import fields, json_schema
from tilewright.train.load_config import read, split_arguments

app = typer.Typer(
    rich_markup_mode=None,
    no_args_is_help=True,
    help="What a training run would be made of, before it starts.",
)


@app.command("show")
def show(
    arguments: list[str] = typer.Argument(
        None, metavar="[CONFIG] [FIELD=VALUE]...", help="A YAML file, and fields to change: model.preset=125m steps=1k"
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead of a table."),
) -> None:
    """Every field, its value, and where it was set: by default, by a preset, in a file, or here.

    Examples:

        tilewright config show

        tilewright config show run.yaml model.gpt_block=optimized 'data.paths=[books, code]'
    """
    found = read(*split_arguments(arguments or []))
    values = found.as_dict()
    header, rows = ["field", "value", "set by"], []
    for name in fields():
        section, _, last = name.rpartition(".")
        rows.append([name, _plain((values[section] if section else values)[last]), found.origins[name]])
    if as_json or Console().is_terminal:
        data = {"config": values, "origins": found.origins}
        Report("A training run", data, [Grid("Fields", header, rows)]).show(as_json=as_json, explain=False, page=None)
        return
    # In a file or a pipe nothing is folded: a line a field.
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(2)]
    for row in (header, *rows):
        print(f"{row[0]:{widths[0]}}  {row[1]:{widths[1]}}  {row[2]}")


@app.command("schema")
def schema_(
    out: Path = typer.Option(None, "--out", help="Write to this file instead of the terminal."),
) -> None:
    """The JSON Schema of a configuration file, so that an editor completes and checks it.

    Example:

        tilewright config schema --out tilewright.schema.json
    """
    if out is None:
        print(json.dumps(json_schema(), indent=1))
    else:
        write_json(out, json_schema())
        print(f"Written to {out}.")


def _plain(value: Any) -> str:
    """A value as it would stand in a file."""
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)
