"""Finished trials as lines of JSON in a file: what is known even while a study's storage is away.

A line is on the disk before anybody is told of it. A process that dies while it writes leaves half a line at the end,
which is no JSON and is passed over; the next line begins on its own.
"""

from __future__ import annotations

import dataclasses
import fcntl
import functools
import json
import math
import os
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tilewright.errors import UserError
from tilewright.tune.record import OUTCOMES, PURPOSES, Record


def append(path: Path, line: Mapping[str, Any]) -> None:
    """Add a line; when this returns it is on the disk."""
    content = json.dumps(line).encode() + b"\n"
    with open(path, "ab+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # workers of one machine may share the file
        size = file.seek(0, os.SEEK_END)
        if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
            content = b"\n" + content
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The lines that are whole."""
    try:
        with open(path, "rb") as file:
            for line in file:
                try:
                    found = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(found, dict):
                    yield found
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror}; give the trials.jsonl of a study.") from error


def parse(tree: Any) -> Record | None:
    """The record that a tree of JSON is, or None where it is none: it may come from anywhere, and be anything.

    >>> parse({"point": {}, "purpose": "search", "outcome": "hung"}).outcome
    'hung'
    >>> parse({"point": {}, "purpose": "search", "outcome": "hung", "log": 7}) is None
    True
    """
    try:
        record = Record.from_dict(tree)
        sound = _fits(record, Record) and record.purpose in PURPOSES and record.outcome in OUTCOMES
    except (TypeError, ValueError, AttributeError, RecursionError):
        return None
    if not sound or not 0 < record.drift < math.inf:
        return None
    measured = record.measurement
    if measured is not None:
        if not all(0 < seconds < math.inf for seconds in measured.step_seconds) or measured.tokens_per_step < 1:
            return None
        if record.outcome in ("done", "stopped early") and not measured.step_seconds:
            return None  # these have a speed
    return record


_hints = functools.cache(typing.get_type_hints)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is what a type hint says; numbers pass for one another."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin in (types.UnionType, typing.Union):
        return any(_fits(value, one) for one in arguments)
    if origin is list:
        return isinstance(value, list) and all(_fits(each, arguments[0]) for each in value)
    if origin is dict:
        return isinstance(value, dict) and all(
            _fits(name, arguments[0]) and _fits(each, arguments[1]) for name, each in value.items()
        )
    if hint in (int, float):
        return isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        hints = _hints(hint)
        return isinstance(value, hint) and all(
            _fits(getattr(value, item.name), hints[item.name]) for item in dataclasses.fields(hint)
        )
    return isinstance(value, hint)
