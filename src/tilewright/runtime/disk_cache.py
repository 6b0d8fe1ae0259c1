"""A cache on disk for what takes long to make: compiled kernels, and algorithms that were chosen by the clock.

The folder is `kernels` in `$TILEWRIGHT_CACHE`, else in `tilewright` in `$XDG_CACHE_HOME` or `~/.cache`. It can be
deleted at any time; `TILEWRIGHT_CACHE=off` switches the cache off. An entry is one file. It is named by the SHA-256 of
all that it depends on, so a stale entry is never found:

    tilewright 1
    <key>
    <SHA-256 of the payload>
    <payload>

A kernel from the cache runs with the rights of the user. So the folders must belong to the user, nobody else may be
able to write to them, and they must not be symbolic links. Where that is not so, a warning is logged once, and nothing
is read or written. A damaged entry counts as missing. Entries are written to a temporary file and renamed, so any
number of processes can read and write at once. No error of the file system is an error of the caller.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from typing import Any

from tilewright.measure.folder import ADVICE, RefusedError, cache_root, check_owner, open_folder
from tilewright.runtime.log import log

_MAGIC = b"tilewright 1"
_HAS_FOLDER_DESCRIPTORS = hasattr(os, "O_NOFOLLOW") and {os.open, os.mkdir, os.rename, os.unlink} <= os.supports_dir_fd
_refused: set[str] = set()  # paths that were warned about


def make_key(*parts: Any) -> str:
    """Returns the name of an entry that depends on `parts`, which JSON can express.

    >>> make_key("cubin", "source", ["-DROWS=1"]) == make_key("cubin", "source", ["-DROWS=2"])
    False
    """
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def get(key: str) -> bytes | None:
    """Returns what was stored under `key`, or None."""
    try:
        with _folder(create=False) as folder, open(_open_file(key, folder), "rb") as file:
            check_owner(os.fstat(file.fileno()), key)
            content = file.read()
    except (OSError, RuntimeError) as error:
        _explain("read", error)
        return None
    magic, found_key, digest, payload = (content.split(b"\n", 3) + [b""] * 4)[:4]
    if (magic, found_key, digest) != (_MAGIC, key.encode(), hashlib.sha256(payload).hexdigest().encode()):
        log.debug("cache: %s is damaged and is made again", key)
        return None
    return payload


def put(key: str, payload: bytes) -> None:
    """Stores `payload` under `key`, if it can."""
    content = b"\n".join((_MAGIC, key.encode(), hashlib.sha256(payload).hexdigest().encode(), payload))
    temporary = f".{key}.{os.getpid()}.{secrets.token_hex(8)}"
    try:
        with _folder(create=True) as folder:
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
                with open(os.open(temporary, flags, 0o600, dir_fd=folder), "wb") as file:
                    file.write(content)
                os.rename(temporary, key, src_dir_fd=folder, dst_dir_fd=folder)
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(temporary, dir_fd=folder)
                raise
    except (OSError, RuntimeError) as error:
        _explain("write", error)


@contextlib.contextmanager
def _folder(create: bool) -> Any:
    """Opens the folder of entries. All later calls go through its descriptor, so nobody can swap it in between."""
    path = cache_root() if _HAS_FOLDER_DESCRIPTORS else None
    if path is None:
        raise FileNotFoundError("the cache is off")
    if create:
        path.parent.mkdir(parents=True, exist_ok=True)
    outer = open_folder(str(path), None, str(path), create)
    try:
        inner = open_folder("kernels", outer, f"{path}/kernels", create)
    finally:
        os.close(outer)
    try:
        yield inner
    finally:
        os.close(inner)


def _open_file(name: str, folder: int) -> int:
    return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)


def _explain(verb: str, error: Exception) -> None:
    if not isinstance(error, RefusedError):
        if not isinstance(error, FileNotFoundError):
            log.debug("cache: could not %s: %s", verb, error)
    elif str(error) not in _refused:
        _refused.add(str(error))
        log.warning("Compiled kernels are not cached: %s. %s", error, ADVICE)
