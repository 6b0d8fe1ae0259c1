"""Where results and compiled kernels are cached, and how a folder is made sure to be the user's alone.

What is in a cache runs with the rights of the user, or counts as measured. So a cache folder must belong to the user,
nobody else may be able to write to it, and it must not be a symbolic link.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

OFF = ("off", "0")  # values of TILEWRIGHT_CACHE
ADVICE = "Make it yours alone (chown, chmod go-w), or set TILEWRIGHT_CACHE to another folder."


class RefusedError(OSError):
    """A folder or file that somebody else could have written."""


def cache_root() -> Path | None:
    """Returns the user's cache folder, which need not exist, or None where the cache is off."""
    named = os.environ.get("TILEWRIGHT_CACHE")
    if named in OFF:
        return None
    if named:
        return Path(named)
    base = Path(os.environ.get("XDG_CACHE_HOME") or "")
    return (base if base.is_absolute() else Path.home() / ".cache") / "tilewright"


def private_folder(root: Path, *parts: str) -> Path:
    """Returns a folder below `root`, made where it is missing; each one from `root` on is the user's alone."""
    root.parent.mkdir(parents=True, exist_ok=True)
    path, folder = root, open_folder(str(root), None, str(root), create=True)
    try:
        for part in parts:
            path, outer = path / part, folder
            folder = open_folder(part, outer, str(path), create=True)
            os.close(outer)
    finally:
        os.close(folder)
    return path


def open_folder(name: str, parent: int | None, path: str, create: bool) -> int:
    """Returns a descriptor of a folder that is the user's alone.

    Args:
        name: of the folder in `parent`.
        parent: descriptor of the folder that has it, or None where `name` is a path.
        path: of the folder, for errors.
        create: make the folder where it is missing, with mode 0700.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    if stat.S_ISLNK(_lstat_mode(name, parent)):
        raise RefusedError(f"{path} is a symbolic link")
    try:
        folder = os.open(name, flags, dir_fd=parent)
    except FileNotFoundError:
        if not create:
            raise
        with contextlib.suppress(FileExistsError):  # another process was first
            os.mkdir(name, 0o700, dir_fd=parent)
        folder = os.open(name, flags, dir_fd=parent)
    try:
        check_owner(os.fstat(folder), path)
    except OSError:
        os.close(folder)
        raise
    return folder


def check_owner(status: os.stat_result, path: str) -> None:
    """Raises RefusedError for what somebody else owns or can write to."""
    if status.st_uid != os.geteuid():
        raise RefusedError(f"{path} belongs to another user")
    if status.st_mode & 0o022:
        raise RefusedError(f"other users can write to {path}")


def _lstat_mode(name: str, parent: int | None) -> int:
    try:
        return os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return 0
