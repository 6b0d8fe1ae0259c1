"""HTML that is escaped by construction.

A page is a tree of `Element`s. Text and attribute values in it are plain Python values, and `render` escapes every one
of them. Only a `Verbatim` is written as it is; it takes nothing but the style and the scripts that ship with
Tilewright, and refuses text that could end its element. So nothing that a study holds can become a tag.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

# Colours of a terminal, control characters, and marks that turn the direction of text.
_UNPRINTABLE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[^\t\n\x20-\x7e\xa0-\U0010ffff]|[\u202a-\u202e\u2066-\u2069]")
_NAME = re.compile(r"[a-z][a-z0-9-]*")
_VOID = frozenset({"meta"})  # elements without content
_CODE = frozenset({"script", "style"})  # elements whose content HTML does not unescape


def clean(value: Any, most: int = 0) -> str:
    r"""Text that a page or a terminal can show: without terminal colours, control and direction marks.

    Args:
        value: anything that has a text.
        most: characters to show; a longer text is shortened in its middle. 0 for all.

    >>> clean("\x1b[31mred\x1b[0m"), clean("abcdefghij", 7)
    ('red', 'abc…hij')
    """
    text = _UNPRINTABLE.sub("", str(value)).encode("utf-8", "replace").decode()
    return text if not most or len(text) <= most else f"{text[: most // 2]}…{text[len(text) - (most - 1) // 2 :]}"


@dataclass(frozen=True)
class Verbatim:
    """The content of a <style> or <script> that is part of Tilewright or of a library."""

    text: str

    def __post_init__(self) -> None:
        if re.search(r"</(script|style)|<!--", self.text, re.IGNORECASE):
            raise ValueError("a script or style may not hold the tag that ends it")


@dataclass(frozen=True)
class Element:
    """An element of a page; made by `tag`."""

    name: str
    attributes: tuple[tuple[str, str], ...]
    children: tuple[Any, ...]


Node = Element | Verbatim | str | int | float | None | Iterable[Any]


def tag(name: str, /, *children: Node, **attributes: Any) -> Element:
    """An element. A list among the children stands for its items; an attribute that is None is left out.

    A trailing underscore of an attribute's name is dropped (`class_`), and others become dashes (`aria_label`).

    >>> render(tag("p", "1 < 2", tag("b", "&"), class_="note", title=None))
    '<p class="note">1 &lt; 2<b>&amp;</b></p>'
    """
    found = {key.rstrip("_").replace("_", "-"): str(value) for key, value in attributes.items() if value is not None}
    for each in (name, *found):
        if not _NAME.fullmatch(each) or each.startswith("on"):
            raise ValueError(f"{each!r} is no name of an element or attribute")
    return Element(name, tuple(found.items()), children)


def render(node: Node) -> str:
    """The HTML of a tree."""
    parts: list[str] = []
    _write(node, parts, "")
    return "".join(parts)


def _write(node: Node, parts: list[str], inside: str) -> None:
    if isinstance(node, Element):
        attributes = "".join(f' {name}="{html.escape(clean(value))}"' for name, value in node.attributes)
        parts.append(f"<{node.name}{attributes}>")
        for child in node.children:
            _write(child, parts, node.name)
        if node.name not in _VOID:
            parts.append(f"</{node.name}>")
    elif isinstance(node, Verbatim):
        if inside not in _CODE:
            raise ValueError(f"verbatim text stands in a script or style, not in {inside!r}")
        parts.append(node.text)
    elif isinstance(node, str | int | float):
        if inside in _CODE:
            raise ValueError(f"the content of {inside} is not escaped; it must be verbatim")
        parts.append(html.escape(clean(node)))
    elif node is not None:
        for child in node:
            _write(child, parts, inside)
