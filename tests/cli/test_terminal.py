"""What a command shows in a terminal: nothing lost at 80 columns, any encoding, and a hint for what is nearly right."""

import io
import sys

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as some
from rich.console import Console
from typer.testing import CliRunner

from tilewright.cli import main as command_line
from tilewright.cli import output, plan
from tilewright.cli.main import app
from tilewright.cli.output import Grid, Report
from tilewright.errors import UserError
from tilewright.hardware import find

COMMANDS = (
    ("roofline", "1b", "--gpu", "H200-SXM", "--explain"),
    ("flops", "1b", "--explain"),
    ("parallel", "70b", "--gpu", "H100-SXM5", "--gpus", "512", "--global-batch", "2048"),
    ("mfu", "1b", "--tokens-per-second", "60000", "--gpu", "H200-SXM", "--explain"),
    ("lint", "1b", "--gpu", "H200-SXM"),
    ("train", "7b", "--gpu", "H100-SXM5", "--explain"),
    ("batch", "--gpus", "64"),
)


def letters(text):
    """Text without what a table adds and what folding takes."""
    return "".join(each for each in text if each.isalnum())


def drawn(grid, width):
    """The tables of a grid, and what a terminal of this width shows of them."""
    shown, stream = output.tables(grid, True, width), io.StringIO()
    for table in shown:
        Console(file=stream, width=width).print(table)
    assert all(len(line) <= width for line in stream.getvalue().splitlines())
    return shown, stream.getvalue()


def is_whole(grid, shown, text):
    """Whether every character of every cell and heading is there, the first column in each table."""
    titles = sum(len(letters(str(table.title or ""))) for table in shown)
    cells = (len(letters(text)) for table in shown for column in table.columns for text in map(str, column.cells))
    headings = (len(letters(str(column.header))) for table in shown for column in table.columns)
    everything = {heading for table in shown for heading in (str(column.header) for column in table.columns)}
    return everything == set(grid.header) and len(letters(text)) == titles + sum(cells) + sum(headings)


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda each: each[0])
@pytest.mark.parametrize("width", [80, 100, 200])
def test_no_cell_of_a_plan_is_lost(arguments, width, monkeypatch):
    grids = []
    monkeypatch.setattr(Report, "show", lambda report, **_: grids.extend(report.items))
    assert CliRunner().invoke(plan.app, list(arguments)).exit_code == 0
    for grid in (each for each in grids if isinstance(each, Grid)):
        shown, text = drawn(grid, width)
        assert is_whole(grid, shown, text)
        for i in range(1, len(grid.header)):
            if output._is_number(grid, i):  # a number is never folded
                assert all(row[i] in text for row in grid.rows)


words = some.text("abcdefgh ", max_size=60)


@given(some.integers(1, 12).flatmap(lambda n: some.lists(some.lists(words, min_size=n, max_size=n), min_size=1)))
def test_tables_of_any_text_fit_and_hold_everything(rows):
    grid = Grid("", [f"{i}" for i in range(len(rows[0]))], rows)
    assert is_whole(grid, *drawn(grid, 80))


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_stream_takes_any_text(encoding, monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding))
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    output.make_printable()
    Report("x² · \ud800 漢", {}, [Grid("a", ["é", "b"], [["★", "█"]]), output.Bar("bar", [("a", 1.0)])]).show(
        as_json=False, explain=False, page=None
    )
    sys.stdout.flush()
    text = raw.getvalue().decode(encoding)
    assert "Traceback" not in text and "\ud800" not in text
    if encoding == "ascii":
        assert "x^2 . ? ?" in text and "#" in text and "*" in text


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("train", "--steps", "10"), "There is no option --steps; write steps=VALUE."),
        (("tune", "--learning-rate", "1"), "There is no option --learning-rate; write optimizer.learning_rate=VALUE."),
        (("train", "lr=3e-4"), "there is no field lr; did you mean optimizer.learning_rate?"),
        (("config", "show", "batch_size=4"), "did you mean global_batch?"),
        (("train", "model.seq_len=4"), "did you mean model.sequence?"),
        (("plan", "train", "1b", "--frob"), "--frob"),
        (("frob",), "No such command 'frob'; see `tilewright --help`."),
        (("plan", "train", "1b", "--micro-batch", "x"), "see `tilewright plan train --help`."),
        (("plan", "train", "1b", "--gpu", "A100"), "choose A100-SXM4-40GB or A100-SXM4-80GB or A100-PCIe-80GB."),
        (("report",), "see `tilewright report --help`."),
    ],
)
def test_a_mistake_is_one_sentence_that_says_what_to_write(arguments, sentence, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tilewright", *arguments])
    monkeypatch.setenv("COLUMNS", "300")
    with pytest.raises(SystemExit) as ended:
        command_line.main()
    said = capsys.readouterr()
    assert ended.value.code == 2 and said.out == ""
    assert sentence in said.err and said.err.count("\n") == 1


def test_a_command_that_ends_early_has_its_exit_code(monkeypatch, capsys):
    for arguments, code in ((("--version",), 0), (("--help",), 0), (("plan", "batch"), 0)):
        monkeypatch.setattr(sys, "argv", ["tilewright", *arguments])
        with pytest.raises(SystemExit) as ended:
            command_line.main()
        assert ended.value.code == code

    def stop():
        raise typer.Exit(130)

    stopped = typer.Typer()
    stopped.command()(stop)
    monkeypatch.setattr(command_line, "app", stopped)
    monkeypatch.setattr(sys, "argv", ["tilewright"])
    with pytest.raises(SystemExit) as ended:
        command_line.main()
    assert ended.value.code == 130 and app is not stopped


def test_the_beginning_of_a_name_is_enough_where_it_is_the_only_one():
    assert find("H200").name == "H200-SXM" and find("b200").name == "B200"
    for name in ("H100", "A100", "V100", "RTX"):
        with pytest.raises(UserError, match="one of several; choose"):
            find(name)
    with pytest.raises(UserError, match="did you mean"):
        find("H2O0")
