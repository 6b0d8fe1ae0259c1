"""Token files: their format, how one is written and checked, and many read as one stream.

    offset  bytes
         0      8   magic, b"TWTOKENS"
         8      4   version of the format, 1
        12      4   bytes a token: 1, 2 or 4
        16      8   vocabulary: every token is below it
        24      8   number of tokens
        32     16   BLAKE2b-128 of the tokens
        48     16   BLAKE2b-128 of the 48 bytes above
        64          the tokens, one after the other

All numbers are unsigned and little-endian. A file appears under its name when it is complete and on the disk. Opening
one checks all of the header and the length, which costs the same whatever the size; `verify` reads the tokens as well.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import hashlib
import itertools
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from tilewright.errors import UserError
from tilewright.measure.results import create_temporary

MAGIC = b"TWTOKENS"
VERSION = 1
SUFFIX = ".tokens"
LARGEST_VOCABULARY = 2**31  # so that a token fits into torch.int32

_FIELDS = struct.Struct("<8sIIQQ16s")
_SEAL = 16
_HEADER = _FIELDS.size + _SEAL


@dataclass(frozen=True)
class Part:
    """A run of tokens that lies in a file."""

    path: Path
    offset: int  # in bytes
    width: int  # bytes a token
    vocabulary: int
    tokens: int


def write_tokens(path: Path, pieces: Iterable[npt.NDArray[Any]], vocabulary: int) -> Part:
    """Write a token file, whole or not at all; no more than one piece is in memory.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     part = write_tokens(Path(folder, "two.tokens"), [np.array([1, 2]), np.array([999])], vocabulary=1000)
    >>> part.tokens, part.width
    (3, 2)
    """
    if not 0 < vocabulary <= LARGEST_VOCABULARY:
        raise UserError(f"A vocabulary of {vocabulary} cannot be written; it must lie in 1 to 2^31.")
    width = next(width for width in (1, 2, 4) if vocabulary <= 256**width)
    digest, tokens = _hasher(), 0
    with _whole(path) as file:
        file.write(bytes(_HEADER))
        for piece in pieces:
            if piece.size == 0:
                continue
            if piece.dtype.kind not in "iu" or piece.min() < 0 or piece.max() >= vocabulary:
                raise UserError(f"A token for {path} is no whole number from 0 to {vocabulary - 1}; choose a larger "
                                "vocabulary.")  # fmt: skip
            raw = np.ascontiguousarray(piece, dtype=f"<u{width}").data
            file.write(raw)
            digest.update(raw)
            tokens += piece.size
        if not tokens:
            raise UserError(f"There is no text to write to {path}; name files that are not empty.")
        fields = _FIELDS.pack(MAGIC, VERSION, width, vocabulary, tokens, digest.digest())
        file.seek(0)
        file.write(fields + _hasher(fields).digest())
    return Part(path, _HEADER, width, vocabulary, tokens)


def open_tokens(path: Path) -> Part:
    """Check the header and the length of a token file, and say where its tokens are."""
    return _open(path)[0]


def verify(path: Path) -> Part:
    """`open_tokens`, and check that the tokens are those that were written, which reads them all."""
    part, expected = _open(path)
    digest = _hasher()
    with reading(path), open(path, "rb") as file:
        file.seek(part.offset)
        while piece := file.read(1 << 20):
            digest.update(piece)
    if digest.digest() != expected:
        raise UserError(f"The tokens of {path} are not those that were written; copy the file or pack its text again.")
    return part


def _open(path: Path) -> tuple[Part, bytes]:
    """The part, and the digest its tokens should have."""
    if not path.is_file():  # a pipe would wait for a writer
        raise UserError(f"{path} is not a file; name token files made with `tilewright data pack`.")
    with reading(path), open(path, "rb") as file:
        header = file.read(_HEADER)
        length = os.fstat(file.fileno()).st_size
    if not header.startswith(MAGIC) or len(header) < _HEADER:
        raise UserError(f"{path} is not a token file; make one with `tilewright data pack`.")
    fields, seal = header[: _FIELDS.size], header[_FIELDS.size :]
    _, version, width, vocabulary, tokens, digest = _FIELDS.unpack(fields)
    if version != VERSION:
        raise UserError(f"{path} is a token file of version {version}, not {VERSION}; pack its text again.")
    sound = width in (1, 2, 4) and 0 < vocabulary <= LARGEST_VOCABULARY and tokens > 0
    if seal != _hasher(fields).digest() or not sound:
        raise UserError(f"The header of {path} is damaged; copy the file or pack its text again.")
    if length != _HEADER + tokens * width:
        what = "was cut short" if length < _HEADER + tokens * width else "has grown"
        raise UserError(f"{path} {what}: {length:,} bytes where {tokens:,} tokens take {_HEADER + tokens * width:,}; "
                        "copy the file or pack its text again.")  # fmt: skip
    return Part(path, _HEADER, width, vocabulary, tokens), digest


def _hasher(data: bytes = b"") -> hashlib.blake2b:
    return hashlib.blake2b(data, digest_size=_SEAL)


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn errors of the operating system into a sentence."""
    try:
        yield
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror}; check the path and its permissions.") from error


@contextlib.contextmanager
def _whole(path: Path) -> Iterator[BinaryIO]:
    """A file that takes its name, and the place of an older one, when all of it is on the disk."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = create_temporary(path)
        try:
            with os.fdopen(handle, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the name too, not only the content
        finally:
            os.close(folder)
    except OSError as error:
        raise UserError(f"Cannot write {path}: {error.strerror}; choose another file.") from error


def find_files(paths: Sequence[str | Path], wanted: Callable[[Path], bool]) -> list[Path]:
    """Return the files that are named, and all `wanted` files below named folders, sorted.

    Hidden files and links of a folder are left out: a link leads to a file that is found anyway, or out of the folder.
    """
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_file():
            found.append(path)
        elif path.is_dir():
            below = list(_below(path, wanted))
            if not below:
                raise UserError(f"The folder {path} has no file of the right kind; name another one.")
            found += below
        else:
            raise UserError(f"There is no file or folder {str(path)!r}; correct the path.")
    return found


def _below(folder: Path, wanted: Callable[[Path], bool]) -> Iterator[Path]:
    with reading(folder):
        for parent, folders, names in os.walk(folder, onerror=_refuse):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for path in (Path(parent, name) for name in sorted(names) if not name.startswith(".")):
                if not path.is_symlink() and path.is_file() and wanted(path):
                    yield path


def _refuse(error: OSError) -> None:
    raise error  # a folder that cannot be read is no reason to train on less


class Stream:
    """Parts one after the other, as if they were one long array.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     parts = [write_tokens(Path(folder, name), [np.arange(5)], vocabulary=5) for name in "ab"]
    ...     Stream(parts).read(3, np.empty(4, np.int32))
    array([3, 4, 0, 1], dtype=int32)
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        self._starts = list(itertools.accumulate((part.tokens for part in parts), initial=0))
        self.tokens = self._starts.pop()

    def read(self, first: int, out: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Fill `out` with the tokens from number `first` on."""
        index = bisect.bisect_right(self._starts, first) - 1
        skipped, filled = first - self._starts[index], 0
        while filled < len(out):
            found = _mapped(self.parts[index])[skipped : skipped + len(out) - filled]
            out[filled : filled + len(found)] = found
            index, skipped, filled = index + 1, 0, filled + len(found)
        return out


@functools.lru_cache(maxsize=512)
def _mapped(part: Part) -> npt.NDArray[Any]:
    """Mapped when first read and not too many at once: a folder may have more files than a process may have maps."""
    shape, dtype = (part.tokens,), np.dtype(f"<u{part.width}")
    # A plain view: slices of np.memmap itself are slower.
    return np.memmap(part.path, dtype=dtype, mode="r", offset=part.offset, shape=shape).view(np.ndarray)
