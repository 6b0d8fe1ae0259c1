"""Finished trials as lines of JSON in a file: what is known even while a study's storage is away.

A line is on the disk before anybody is told of it. A process that dies while it writes leaves half a line at the end,
which is no JSON and is passed over; the next line begins on its own.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tilewright.errors import UserError
from tilewright.tune.store.record import OUTCOMES, PURPOSES, Record


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
    except (UserError, RecursionError):
        return None
    return record if record.purpose in PURPOSES and record.outcome in OUTCOMES else None
