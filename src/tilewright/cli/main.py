"""`tilewright`: the commands, and how an error is shown."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

import tilewright
from tilewright.cli import (
    bench,
    config,
    data,
    doctor,
    export,
    generate,
    import_,
    launch,
    plan,
    quantize,
    report,
    tilesync,
    train,
    tune,
)
from tilewright.cli import plan_cluster as plan_cluster  # adds its commands to `plan`
from tilewright.cli import plan_simulate as plan_simulate  # and so do these
from tilewright.cli import plan_speed as plan_speed
from tilewright.cli.output import make_printable
from tilewright.errors import UserError
from tilewright.measure.markup import clean
from tilewright.measure.results import NO_ROOM

_LOST = (*NO_ROOM, errno.EROFS, errno.EIO)  # the output, not the program, is at fault

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
app.add_typer(launch.app, name="launch")
app.command("generate")(generate.generate)
app.command("quantize")(quantize.quantize)
app.command("export")(export.export)
app.command("import")(import_.import_)
app.command("bench")(bench.bench)
app.add_typer(tilesync.app, name="tilesync")
app.command("doctor")(doctor.doctor)


_UsageError: Any = typer.BadParameter.__mro__[1]  # click's, or that of the copy of click in newer typers


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
    make_printable()
    try:
        try:
            code = typer.main.get_command(app).main(prog_name="tilewright", standalone_mode=False)
        finally:
            sys.stdout.flush()  # the end of the process would do that, with a traceback where it fails
    except UserError as error:
        _fail(str(error))
    except _UsageError as error:
        _fail(usage_sentence(error))
    except (KeyboardInterrupt, typer.Abort):
        _say("stopped")
        sys.exit(130)
    except OSError as error:
        if error.errno not in _LOST and not isinstance(error, BrokenPipeError):
            raise
        with open(os.devnull, "wb") as nothing:  # what is still to be written goes nowhere
            os.dup2(nothing.fileno(), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # the reader is gone, as with `| head`
            sys.exit(1)
        what = error.filename or "the output"
        _fail(f"Cannot write {what}: {error.strerror}; make room or write elsewhere. What was finished is kept.")
    else:
        sys.exit(code if isinstance(code, int) else 0)


def _fail(sentence: str) -> NoReturn:
    _say(f"[red]error:[/] {escape(clean(sentence))}")
    sys.exit(2)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        Console(stderr=True, soft_wrap=True).print(text, highlight=False)


def usage_sentence(error: Any) -> str:
    """What is wrong with a command's arguments, and what to write instead."""
    command = error.ctx.command_path if error.ctx is not None else "tilewright"
    option = getattr(error, "option_name", "") if command.rpartition(" ")[2] in ("train", "tune", "show") else ""
    if option and (hint := field_hint(option.lstrip("-").replace("-", "_"))):
        return f"There is no option {option}; {hint}."
    return f"{error.format_message().rstrip('.')}; see `{command} --help`."


def field_hint(name: str) -> str:
    """How to set a field of a run that somebody took for an option; empty where it is none.

    >>> field_hint("steps"), field_hint("lr"), field_hint("nonsense")
    ('write steps=VALUE', 'write optimizer.learning_rate=VALUE', '')
    """
    from tilewright.train.fields import find_field

    found = find_field(name)
    return f"write {found}=VALUE" if found else ""
