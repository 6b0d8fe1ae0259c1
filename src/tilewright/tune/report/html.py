"""The pieces that a report is made of: sections, tables and their cells, places for figures; and the page around them.

Everything here is a tree of `measure.markup` elements, which escapes what it shows.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tilewright.measure.markup import Element, Node, Verbatim, clean, render, tag
from tilewright.tune.report.plots import Drawn, Rich
from tilewright.tune.report.style import CSS, JAVASCRIPT

Form = Callable[[float], str]
_NAME = 90  # characters of a kernel's name
_CARD_COLUMNS = 5  # from so many columns on, a narrow window shows a row as a card


@dataclass(frozen=True)
class Section:
    """A part of a page, with a place in its table of contents."""

    title: str
    note: Node
    content: tuple[Node, ...]

    @property
    def id(self) -> str:
        """Its place in the page, for links.

        >>> Section("Kernels and their limit", "", ()).id
        'about-kernels-and-their-limit'
        """
        return "about-" + re.sub(r"[^a-z]+", "-", self.title.lower()).strip("-")


def section(title: str, note: Node, *content: Node) -> Section:
    """A section of what is not None."""
    return Section(title, note, content)


def whole_page(title: str, header: Node, sections: Sequence[Section], figures: Mapping[str, Any]) -> str:
    """The HTML of a page that needs no network, no server and no other file.

    Its policy lets nothing run but the two scripts whose hashes it names, and nothing be fetched.
    """
    from plotly.offline import get_plotlyjs

    library, script = (text.replace("\r\n", "\n") for text in (get_plotlyjs(), JAVASCRIPT))
    policy = (
        f"default-src 'none'; script-src '{_hash(library)}' '{_hash(script)}'; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    # As escapes of JSON, so that no text in it can end the script or begin a comment.
    data = json.dumps(plain(figures), allow_nan=False).replace("<", "\\u003c")
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("style", Verbatim(CSS)),
    )
    contents = tag("nav", tag("ul", [tag("li", tag("a", each.title, href=f"#{each.id}")) for each in sections]),
                   aria_label="Contents")  # fmt: skip
    body = tag(
        "body",
        header,
        contents,
        [
            tag("section", tag("h2", each.title), tag("p", each.note, class_="note") if each.note else None,
                each.content, id=each.id)
            for each in sections
        ],
        tag("script", Verbatim(data), type="application/json", id="figures"),
        tag("script", Verbatim(library)),
        tag("script", Verbatim(script)),
    )  # fmt: skip
    return f"<!doctype html>\n{render(tag('html', head, body, lang='en'))}\n"


def _hash(script: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def plain(value: Any) -> Any:
    """A figure for plotly, which takes some tags for its own: escaped, and null for what JSON has no number for."""
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, str) and not isinstance(value, Rich):
        return html.escape(clean(value), quote=False)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def sentence(words: Node) -> Element:
    """Write the sentence that replaces what cannot be shown."""
    return tag("p", words, class_="none")


def plot(name: str, title: str, drawn: Drawn, figures: dict[str, Any]) -> Element:
    """A place for a figure and its legend, or the sentence in its stead."""
    if isinstance(drawn, str):
        return sentence(drawn)
    figures[name] = {"data": drawn.data, "layout": drawn.layout, "labels": drawn.labels}
    items = [tag("li", mark(each, colour), words) for each, colour, words in drawn.legend]
    style = f"height:{drawn.layout['height']}px"
    place = tag("div", class_="plot", id=name, role="img", aria_label=title, style=style)
    return tag("figure", place, tag("ul", items, class_="legend") if items else None)


def mark(shape: str, colour: str) -> Element:
    """The sign of a legend: a character, or a line by its dash."""
    line = {"solid": "solid", "dash": "dashed", "dot": "dotted"}.get(shape)
    if line:
        return tag("i", class_="line", style=f"border-top:2px {line} {colour}")
    return tag("i", shape, style=f"color:{colour}")


# Cells and tables


def words(value: Any, title: Any = None) -> Element:
    """A cell of text."""
    return tag("td", value, title=title)


def name(value: str, more: Node = None) -> Element:
    """A cell with the name of a kernel, which can go on for pages."""
    return tag("td", clean(value, _NAME), more, class_="name", title=value)


def number(value: float | None, form: Form) -> Element:
    """A cell that shows a value in some form, and sorts by it."""
    if value is None or not math.isfinite(value):
        return tag("td", class_="number")
    return tag("td", form(value), class_="number", data_value=repr(value))


def swatch(colour: str, label: str) -> Element:
    """A cell that is a legend's entry too."""
    return tag("td", mark("■", colour), "\N{NO-BREAK SPACE}", label, class_="swatch")


def bar(share: float, colour: str) -> Element:
    """A bar below a cell's text, as long as its share of the longest."""
    return tag("i", class_="bar", style=f"width:{min(100.0, max(0.5, 100 * share)):.1f}%;background:{colour}")


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[Element]],
    *,
    sortable: bool = False,
    kind: str = "",
    foot: Sequence[Element] = (),
) -> Element:
    """Rows of cells; the foot is a row that stays last, however one sorts.

    Where there are many columns, a narrow window shows each row as a card of labelled lines.
    """
    first = rows[0] if rows else foot
    if len(header) >= _CARD_COLUMNS:
        kind = f"{kind} cards".strip()
        rows, foot = [_labelled(header, row) for row in rows], foot and _labelled(header, foot)
    kinds = ["number" if ("class", "number") in cell.attributes else None for cell in first]
    head = [
        tag("th", tag("button", each, type="button") if sortable else each, scope="col", class_=kind_of)
        for each, kind_of in zip(header, kinds, strict=True)
    ]
    return tag(
        "div",
        tag(
            "table",
            tag("thead", tag("tr", head)),
            tag("tbody", [tag("tr", row) for row in rows]),
            tag("tfoot", tag("tr", foot)) if foot else None,
            class_=f"{kind} sortable".strip() if sortable else kind or None,
        ),
        class_="wide",
        tabindex=0,
    )


def _labelled(header: Sequence[str], row: Sequence[Element]) -> list[Element]:
    """The cells of a row, each with its column's name."""
    named = zip(header, row, strict=True)
    return [replace(cell, attributes=(*cell.attributes, ("data-label", column))) for column, cell in named]


def signed(form: Form) -> Form:
    """Format a difference with its sign."""
    return lambda value: form(value) if form(value).startswith(("-", "0 ")) else f"+{form(value)}"


def clock(seconds: float) -> str:
    """A time as people say it.

    >>> clock(75), clock(120), clock(3.21)
    ('1 min 15 s', '2 min', '3.21 s')
    """
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes and rest else f"{minutes} min" if minutes else f"{seconds:.3g} s"
