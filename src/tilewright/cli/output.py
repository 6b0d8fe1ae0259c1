"""One result three ways: tables for a terminal, JSON, and an HTML page that needs nothing else."""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tilewright.errors import UserError
from tilewright.measure.markup import Node, Verbatim, render, tag
from tilewright.measure.results import SCHEMA, write_text

COLOURS = ("blue", "cyan", "green", "yellow", "magenta", "red", "bright_black", "white")
_PAGE_COLOURS = ("#3b6fb6", "#4bb3c3", "#5aa469", "#d9a441", "#a05fa8", "#c9514a", "#8a8f98", "#c7ccd4")


# What a terminal obeys, but for colours: what a study holds may be anybody's.
_OBEYED = re.compile(
    r"\x1b\[[0-9;]*m|\x1b\[[0-9;?]*[ -/]*[@-~]|[^\t\n\x20-\x7e\xa0-\U0010ffff]|[\u202a-\u202e\u2066-\u2069]"
)
_NUMBER = re.compile(r"(n/a|-?[\d,.]+ ?(%|[kMG]?B|x|)?)?")


class ProgressConsole(Console):
    """Shows how a long run goes. Where that cannot be written it calls `lost` with the reason, and shows no more."""

    def __init__(self, lost: Callable[[str], None] = lambda why: None, **more: Any) -> None:
        super().__init__(soft_wrap=True, **more)
        self._lost = lost

    def on_broken_pipe(self) -> None:
        self._stop(os.strerror(errno.EPIPE))

    def print(self, *objects: Any, **more: Any) -> None:
        try:
            super().print(*objects, **more)
        except OSError as error:
            self._stop(error.strerror or "it cannot be written")

    def _stop(self, why: str) -> None:
        if not self.quiet:
            self.quiet = True
            with contextlib.suppress(OSError), open(os.devnull, "wb") as nothing:  # nothing fails at the end
                os.dup2(nothing.fileno(), self.file.fileno())
            self._lost(why)


@dataclass(frozen=True)
class Grid:
    """A table. A column whose heading is in `explained` shows with --explain only."""

    title: str
    header: list[str]
    rows: list[list[str]]
    explained: tuple[str, ...] = ()


@dataclass(frozen=True)
class Bar:
    """Parts of a whole, in bytes, and what there is room for."""

    title: str
    parts: list[tuple[str, float]]
    capacity: float | None = None


@dataclass
class Report:
    """What a command has to say, in order; `data` is the same for machines."""

    title: str
    data: dict[str, Any]
    items: list[Grid | Bar | str] = field(default_factory=list)
    figure: dict[str, Any] | None = None  # of plotly: data and layout

    def show(self, *, as_json: bool, explain: bool, page: Path | None) -> None:
        """Print, and write the page where one is asked for."""
        if page is not None:
            write_text(page, self._html(explain))
        if as_json:
            print(json.dumps({"schema": SCHEMA, **self.data}, allow_nan=False))
            return
        console = Console()
        console.print(self.title, style="bold", highlight=False, soft_wrap=True, markup=False)
        for item in self.items:
            if isinstance(item, Grid):
                for table in tables(item, explain, console.width):
                    console.print(table)
            elif isinstance(item, Bar):
                console.print(_bar(item, max(20, min(console.width, 100) - 2)))
            else:
                console.print(item, highlight=False, soft_wrap=True, markup=False)
        if page is not None:
            console.print(f"Written to {page}.", highlight=False, soft_wrap=True, markup=False)

    def _html(self, explain: bool) -> str:
        body: list[Node] = [tag("h1", self.title)]
        for item in self.items:
            if isinstance(item, Grid):
                body.append(_html_table(item, explain))
            elif isinstance(item, Bar):
                body.append(_html_bar(item))
            else:
                body.append(tag("p", item))
        figure = ""
        if self.figure is not None:
            import plotly.graph_objects as graph

            figure = graph.Figure(self.figure).to_html(full_html=False, include_plotlyjs=True)
        head = tag("head", tag("meta", charset="utf-8"), tag("meta", name="viewport", content="width=device-width"),
                   tag("title", self.title), tag("style", Verbatim(_CSS)))  # fmt: skip
        start = f'<!doctype html>\n<html lang="en">{render(head)}<body>\n'
        return f"{start}{render(body)}\n{figure}\n</body></html>\n"


# For a terminal or a file that has no more than ASCII.
_PLAIN = {
    "█": "#", "■": "#", "┃": "|", "·": ".", "…": "...", "\u00d7": "x", "µ": "u", "±": "+-", "★": "*", "\u2013": "-",
    "“": '"', "”": '"', "²": "^2",
}  # fmt: skip


def _replaced(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    part = error.object[error.start : error.end]
    return "".join(_PLAIN.get(each, "?") for each in part), error.end


def make_printable() -> None:
    """Let standard output and error take any text: a character that they have not is written as one they have."""
    codecs.register_error("tilewright", _replaced)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="tilewright")


def printable(text: str) -> str:
    """Text that may be anybody's, without what a terminal obeys.

    >>> printable("caf\u00e9 \x1b[2Jx")
    'café x'
    """
    return _OBEYED.sub("", text)


class _Printable:
    """A stream that lets text and colours through, and nothing else that a terminal obeys."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        colours = self._stream.isatty()
        self._stream.write(_OBEYED.sub(lambda found: found[0] if colours and found[0].endswith("m") else "", text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def console(**options: Any) -> Console:
    """A console on standard output for text that may be anybody's: it moves no cursor and sets no title."""
    return Console(file=_Printable(sys.stdout), **options)  # type: ignore[arg-type]


def gigabytes(value: float) -> str:
    """Bytes as people say them.

    >>> gigabytes(141e9), gigabytes(2.5e6)
    ('141.00 GB', '2.5 MB')
    """
    return f"{value / 1e9:,.2f} GB" if abs(value) >= 1e8 else f"{value / 1e6:,.1f} MB"


def count(text: str) -> int:
    """A whole number, with k, M, G or T behind it where it is large.

    >>> count("8k"), count("2M"), count("1,024")
    (8000, 2000000, 1024)
    """
    scale = {"k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12}.get(text[-1:].lower(), 1)
    digits = (text[:-1] if scale > 1 else text).replace(",", "").replace("_", "")
    try:
        value = float(digits) * scale
    except ValueError:
        raise UserError(f"{text!r} is not a number; write 2048, 8k or 2M.") from None
    if not 0 < value < 1e15 or value != int(value):
        raise UserError(f"{text!r} is not a whole number above 0 and below 1e15.")
    return int(value)


def positive(name: str, value: float) -> float:
    """The value, or a sentence where it is no number above 0.

    >>> positive("--link", 450.0)
    450.0
    """
    if not 0 < value < float("inf"):
        raise UserError(f"{name} is {value}; give a number above 0.")
    return value


def _visible(grid: Grid, explain: bool) -> list[int]:
    return [i for i, heading in enumerate(grid.header) if explain or heading not in grid.explained]


_WORD = 24  # characters of a column of text: what is longer is folded


def tables(grid: Grid, explain: bool, width: int) -> list[Table]:
    """A table, or where a terminal is too narrow for it several, each with the first column and some of the others.

    >>> wide = Grid("title", ["name", "a" * 40, "b" * 40], [["x", "1", "2"]])
    >>> [len(table.columns) for table in tables(wide, False, 80)], len(tables(wide, False, 120))
    ([2, 2], 1)
    """
    first, *others = columns = _visible(grid, explain)
    for gap in (3, 1):  # a border, and a space on either side of a column or none
        if 1 + sum(_least(grid, column) + gap for column in columns) <= width:
            return [_table(grid, columns, grid.title, width, gap)]
    room = width - 1 - _least(grid, first) - 3
    groups: list[list[int]] = [[]]
    for column in others:
        taken = sum(_least(grid, each) + 3 for each in groups[-1])
        if groups[-1] and taken + _least(grid, column) + 3 > room:
            groups.append([])
        groups[-1].append(column)
    return [
        _table(grid, [first, *group], "" if number else grid.title, width, 3) for number, group in enumerate(groups)
    ]


def _cells(grid: Grid, column: int) -> list[str]:
    return [row[column] for row in grid.rows]


def _is_number(grid: Grid, column: int) -> bool:
    return all(_NUMBER.fullmatch(cell) is not None for cell in _cells(grid, column))


def _least(grid: Grid, column: int) -> int:
    """The narrowest that a column can be without losing anything: a number and a first column are not folded."""
    texts = [grid.header[column], *_cells(grid, column)]
    if column == 0:
        return min(_WIDEST, max(map(len, texts)))
    if _is_number(grid, column):
        return max(map(len, (*_cells(grid, column), *grid.header[column].split())))
    return min(_WORD, max(len(word) for text in texts for word in (text.split() or [""])))


_WIDEST = 40  # characters of a first column


def _table(grid: Grid, columns: list[int], title: str, width: int, gap: int) -> Table:
    """A table of some columns, each at least as wide as it must be, and as wide as it likes while there is room."""
    widths = {i: _least(grid, i) for i in columns}
    room = width - 1 - sum(value + gap for value in widths.values())
    wanted = {i: max(map(len, (grid.header[i], *_cells(grid, i)))) for i in columns}
    while room > 0 and (narrow := [i for i in columns if widths[i] < wanted[i]]):
        for i in narrow[:room]:  # a character each, for as long as there is room
            widths[i] += 1
        room -= len(narrow)
    table = Table(title=title or None, title_justify="left", padding=(0, gap // 2))
    for i in columns:
        side: Any = "right" if i > 0 and _is_number(grid, i) else "left"
        table.add_column(grid.header[i], justify=side, overflow="fold", width=widths[i])
    for row in grid.rows:
        table.add_row(*(Text(row[i]) for i in columns))
    return table


def _bar(bar: Bar, width: int) -> Text:
    whole = max(sum(size for _, size in bar.parts), bar.capacity or 0.0) or 1.0
    line, legend = Text(), Text()
    for i, (name, size) in enumerate(bar.parts):
        colour = COLOURS[i % len(COLOURS)]
        line.append("█" * round(width * size / whole), style=colour)
        legend.append("■ ", style=colour)
        legend.append(f"{name}  ")
    line.append("·" * max(0, width - len(line)), style="dim")
    if bar.capacity and bar.capacity < whole:  # where the GPU ends
        edge = round(width * bar.capacity / whole)
        line = line[:edge] + Text("┃", style="bold") + line[edge + 1 :]
    return Text(f"{bar.title}\n") + line + "\n" + legend


def _html_table(grid: Grid, explain: bool) -> Node:
    columns = _visible(grid, explain)
    head = tag("tr", [tag("th", grid.header[i]) for i in columns])
    rows = [tag("tr", [tag("td", row[i]) for i in columns]) for row in grid.rows]
    return [tag("h2", grid.title), tag("div", tag("table", head, rows), class_="wide")]


def _html_bar(bar: Bar) -> Node:
    whole = max(sum(size for _, size in bar.parts), bar.capacity or 0.0) or 1.0
    cells, legend = [], []
    for i, (name, size) in enumerate(bar.parts):
        colour, label = _PAGE_COLOURS[i % len(_PAGE_COLOURS)], f"{name}: {gigabytes(size)}"
        cells.append(tag("span", title=label, style=f"width:{100 * size / whole:.3f}%;background:{colour}"))
        legend.append(tag("li", tag("i", style=f"background:{colour}"), label))
    if bar.capacity and bar.capacity < whole:
        cells.append(tag("b", title="the GPU ends here", style=f"left:{100 * bar.capacity / whole:.3f}%"))
    return [tag("h2", bar.title), tag("div", cells, class_="bar"), tag("ul", legend)]


_CSS = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1080px; margin: 2rem auto; padding: 0 1rem; color: #1c2128 }
h1 { font-size: 1.4rem } h2 { font-size: 1.05rem; margin-top: 1.8rem }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .7rem; border-bottom: 1px solid #d8dde3; text-align: left; vertical-align: top }
.bar { display: flex; height: 2rem; background: #eef0f3; position: relative }
.bar span { display: block; height: 100% }
.bar b { position: absolute; top: -.4rem; bottom: -.4rem; border-left: 3px solid #1c2128 }
ul { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .2rem 1.2rem }
li i { display: inline-block; width: .8em; height: .8em; margin-right: .4em; border-radius: 2px }
"""
