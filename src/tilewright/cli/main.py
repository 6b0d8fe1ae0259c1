"""`tilewright`: the commands, and how an error is shown."""

from __future__ import annotations

import sys

import typer
from rich.console import Console
from rich.markup import escape

import tilewright
from tilewright.cli import bench, config, data, doctor, export, plan, report, train, tune
from tilewright.cli import plan_speed as plan_speed  # adds its commands to `plan`
from tilewright.errors import UserError

app = typer.Typer(
    rich_markup_mode=None,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Makes PyTorch transformers run at what the GPU can give, and proves it.",
)
app.command("tune")(tune.tune)
app.command("report")(report.report)
app.command("train")(train.train)
app.add_typer(plan.app, name="plan")
app.add_typer(config.app, name="config")
app.add_typer(data.app, name="data")
app.command("export")(export.export)
app.command("bench")(bench.bench)
app.command("doctor")(doctor.doctor)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"tilewright {tilewright.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    pass


def main() -> None:
    """Run the command line; what the user can put right is one sentence and exit code 2."""
    try:
        app()
    except UserError as error:
        Console(stderr=True, soft_wrap=True).print(f"[red]error:[/] {escape(str(error))}", highlight=False)
        sys.exit(2)
    except KeyboardInterrupt:
        Console(stderr=True).print("stopped")
        sys.exit(130)
