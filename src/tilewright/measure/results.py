"""Result files: JSON, versioned, written whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import secrets
from pathlib import Path
from typing import Any

from tilewright.errors import UserError

SCHEMA = 1
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # of what a disk says: it is full


def write_json(path: Path, value: Any) -> None:
    """Write a result so that a reader never sees half of it."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = create_temporary(path)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        advice = "make room and run again" if error.errno in NO_ROOM else "choose another file"
        raise UserError(f"Cannot write {path}: {error.strerror}; {advice}.") from error


def create_temporary(path: Path) -> tuple[int, Path]:
    """A descriptor and the name of a new file beside `path`, with the permissions that the umask gives."""
    temporary = path.with_name(f"{path.name}{secrets.token_hex(8)}.tmp")
    return os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), temporary
