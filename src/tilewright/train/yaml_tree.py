"""YAML as a tree of text, with the line of every piece, and nothing constructed.

The parser's events are read one by one: a scalar stays text. What has no use in a configuration and could do harm
(tags, anchors, deep nesting, huge files) is refused by name.
"""

from __future__ import annotations

import dataclasses
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tilewright.errors import UserError

_MOST_BYTES = 1 << 20  # of a file
_MOST_EVENTS = 10_000  # of a file: a few for each value in it
_MOST_LEVELS = 4  # of nesting: the file, a section, a list and one to be wrong in
_NULLS = ("", "~", "null", "Null", "NULL")
_TAGS = tuple(f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null", "seq", "map"))


@dataclass(frozen=True)
class Node:
    """A piece of YAML: text, nothing, a list or a mapping."""

    value: str | list[Node] | dict[str, Node] | None
    where: str


Place = Callable[[int], str]  # what a line is called


def read_text(path: Path, asked: str) -> str:
    """Read the text of a configuration file; `asked` begins the sentence of a refusal."""
    try:
        mode = path.stat().st_mode
        data = b""
        if stat.S_ISREG(mode):
            with path.open("rb") as file:
                data = file.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        hint = "give the path of a YAML file."
        if re.fullmatch(r"[\w.]+:\w+", str(path)):
            hint = f"give the path of a YAML file, or --model {path} to tune a model of your own."
        raise UserError(f"{asked}there is no file {path}; {hint}") from None
    except OSError as error:
        raise UserError(f"{asked}cannot read {path}: {error.strerror}; give the path of a YAML file.") from None
    if not stat.S_ISREG(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "not a file"
        raise UserError(f"{asked}{path} is {what}; give the path of a YAML file.")
    if len(data) > _MOST_BYTES:
        raise UserError(f"{asked}{path} is larger than 1 MiB; that is no configuration.")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{asked}{path} is not UTF-8 text; give the path of a YAML file.") from None


def _events(text: str, place: Place) -> Iterator[Any]:
    line = 1
    try:
        for count, event in enumerate(yaml.parse(text, Loader=yaml.SafeLoader)):
            line = event.start_mark.line + 1
            if count >= _MOST_EVENTS:
                raise UserError(f"{place(line)}: there are too many values; name a folder in place of its files.")
            yield event
    except UserError:
        raise
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else line
        raise UserError(f"{place(line)}: this is not YAML: {error.problem}.") from None
    except (yaml.YAMLError, ValueError, OverflowError):  # a character, an escape or a version that cannot be
        raise UserError(f"{place(line)}: this or the next line has a character that YAML does not allow.") from None


def document(text: str, place: Place) -> Node | None:
    """Parse the one document of a text, if there is any."""
    events = _events(text, place)
    next(events)
    if isinstance(next(events), yaml.StreamEndEvent):
        return None
    node = _tree(events, next(events), place, 1)
    next(events)
    after = next(events)
    if not isinstance(after, yaml.StreamEndEvent):
        raise UserError(f"{place(after.start_mark.line + 1)}: a second document begins; a configuration is one.")
    return node


def _tree(events: Iterator[Any], event: Any, place: Place, level: int) -> Node:
    where = place(event.start_mark.line + 1)
    if event.anchor is not None:  # an alias has one too: its own name
        raise UserError(f"{where}: anchors and aliases are not read; share values with `base:` or ${{section.field}}.")
    if event.tag not in (None, *_TAGS):
        raise UserError(f"{where}: the tag {shown(event.tag)} is not read; write a plain value.")
    if isinstance(event, yaml.ScalarEvent):
        return Node(None if event.style is None and event.value in _NULLS else event.value, where)
    if level >= _MOST_LEVELS:
        raise UserError(f"{where}: this is nested deeper than any field.")
    if isinstance(event, yaml.SequenceStartEvent):
        items = []
        while not isinstance(event := next(events), yaml.SequenceEndEvent):
            items.append(_tree(events, event, place, level + 1))
        return Node(items, where)
    children: dict[str, Node] = {}
    while not isinstance(event := next(events), yaml.MappingEndEvent):
        key = _tree(events, event, place, level + 1)
        if not isinstance(key.value, str) or "." in key.value:
            raise UserError(f"{key.where}: a key must be the name of a field, and a field stands under its section.")
        if key.value in children:
            raise UserError(f"{key.where}: {word(key.value)} is set twice; {children[key.value].where} has it too.")
        children[key.value] = dataclasses.replace(_tree(events, next(events), place, level + 1), where=key.where)
    return Node(children, where)


def word(name: str) -> str:
    """A name as a message may show it."""
    return name if re.fullmatch(r"[\w.-]{1,80}", name) else shown(name)


def shown(value: Any) -> str:
    """A value as a message may show it: short, and nothing in it that a terminal would obey."""
    if not isinstance(value, str):
        return "null" if value is None else "a list" if isinstance(value, list) else "a mapping"
    return repr(value if len(value) <= 60 else value[:60] + "...")
