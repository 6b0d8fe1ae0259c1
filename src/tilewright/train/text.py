"""Text as tokens: the bytes themselves where they lie, or what a Hugging Face tokenizer.json makes of them.

Bytes are mapped and never copied. A tokenizer's work is done once: its tokens are kept in a token file in
`$XDG_CACHE_HOME/tilewright/tokens`, under a name made from the tokenizer's content and every file's path, size and time
of last change. That is the time the kernel sets whenever a file is written to and nobody can set back; to read all the
text at every start, to see whether it is still the same, would cost minutes where there is much of it.

Ranks that start together take turns: the first one tokenises, the rest find the file. One that is killed leaves no half
file under the name, and what it leaves beside it is swept away by the next.
"""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from tilewright.errors import UserError
from tilewright.measure.machine import package_version
from tilewright.train.tokens import MAGIC, VERSION, Part, find_files, open_tokens, reading, verify, write_tokens

Progress = Callable[[int, int], None]  # bytes of text done, bytes in all
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
_PIECE = 1 << 16  # bytes of text that are encoded as one
_AT_ONCE = 64  # pieces, which the tokenizer spreads over the cores


def text_files(paths: Sequence[str | Path]) -> list[Path]:
    """The files of text under `paths`; without any, the sources of Python's standard library.

    In folders, a file with a zero among its first 8,000 bytes is binary and left out, as git has it.
    """
    if not paths:
        return sorted(Path(os.__file__).parent.glob("*.py"))
    files = find_files(paths, lambda path: b"\0" not in _opening(path))
    for path in files:
        if _opening(path).startswith(MAGIC):
            raise UserError(f"{path} is a token file; read it with data.kind=tokens.")
    return files


def _opening(path: Path) -> bytes:
    with reading(path), open(path, "rb") as file:
        return file.read(8000)


def byte_parts(files: Sequence[Path]) -> list[Part]:
    """Each byte a token, where it lies."""
    parts = []
    for path in files:
        with reading(path):
            size = path.stat().st_size
        if size:
            parts.append(Part(path, 0, 1, 256, size))
    return parts


def pack(files: Sequence[Path], out: Path, tokenizer: str, progress: Progress) -> Part:
    """Write the text of `files` to one token file; `tokenizer` is `bytes` or the path of a tokenizer.json."""
    if out.resolve() in {path.resolve() for path in files}:
        raise UserError(f"{out} is one of the files to be read; choose another file to write to.")
    if tokenizer == "bytes":
        arrays = (np.frombuffer(piece, np.uint8) for piece in _pieces(files, progress))
        return write_tokens(out, arrays, 256)
    return _encode(files, out, _load(_content(Path(tokenizer)), tokenizer), progress)


def cached(files: Sequence[Path], tokenizer: str, progress: Progress) -> Part:
    """Return the tokens of `files` from the cache, or make and cache them."""
    content = _content(Path(tokenizer))
    folder = _cache_folder()
    name = _key(files, content)
    path = folder / f"{name}.tokens"
    with _locked(folder / f"{name}.lock") as lock:
        if not _sound(path, lock.read()):
            for left in folder.glob(f"{path.name}*.tmp"):  # nobody else writes while we hold the lock
                left.unlink()
            _encode(files, path, _load(content, tokenizer), progress)
        lock.seek(0)
        lock.truncate()
        lock.write(_stamp(path))
    return open_tokens(path)


def _sound(path: Path, stamp: str) -> bool:
    """Whether there is a whole file. One that was changed since it was last looked at is read through."""
    try:
        if stamp != _stamp(path):
            verify(path)
        open_tokens(path)
    except (FileNotFoundError, UserError):
        return False
    return True


def _stamp(path: Path) -> str:
    found = path.stat()
    return f"{found.st_ino} {found.st_size} {found.st_ctime_ns}"


def _key(files: Sequence[Path], tokenizer: bytes) -> str:
    stated = []
    for path in files:
        with reading(path):
            found = path.stat()
        stated.append([os.fsencode(path.resolve()).hex(), found.st_size, found.st_ctime_ns])
    recipe = [VERSION, package_version("tokenizers"), hashlib.blake2b(tokenizer).hexdigest(), stated]
    return hashlib.blake2b(json.dumps(recipe).encode(), digest_size=16).hexdigest()


def _cache_folder() -> Path:
    """Return the cache folder, closed to other users, because its files are trained on."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tilewright" / "tokens"
    try:
        for each in (folder.parent, folder):  # the first has other caches, which only the user may write to
            each.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.geteuid():
            raise UserError(f"The cache folder {folder} belongs to somebody else; set XDG_CACHE_HOME to one of yours.")
        folder.chmod(0o700)
    except OSError as error:
        raise UserError(f"Cannot use the folder {folder}: {error.strerror}; set XDG_CACHE_HOME to another.") from error
    return folder


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[IO[str]]:
    """Hold the file open and locked; the kernel releases the lock when the process dies."""
    try:
        with open(path, "a+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            yield file
    except OSError as error:
        raise UserError(f"Cannot use {path}: {error.strerror}; set XDG_CACHE_HOME to another folder.") from error


def _content(path: Path) -> bytes:
    if not path.is_file():
        raise UserError(f"There is no tokenizer {str(path)!r}; choose `bytes` or the path of a tokenizer.json.")
    with reading(path):
        return path.read_bytes()


def _load(content: bytes, name: str) -> Any:
    try:
        from tokenizers import Tokenizer  # type: ignore[import-not-found]
    except ImportError:
        raise UserError("A tokenizer.json needs a package that is missing: pip install tokenizers.") from None
    try:
        tokenizer = Tokenizer.from_buffer(content)
    except Exception as error:  # the package has no narrower one
        raise UserError(f"{name} is not a tokenizer.json: {error}; choose another file or `bytes`.") from error
    tokenizer.no_truncation()  # some files ask for it, and it would drop text without a word
    tokenizer.no_padding()
    return tokenizer


def _encode(files: Sequence[Path], out: Path, tokenizer: Any, progress: Progress) -> Part:
    # Set, whichever way, so that the package does not warn of parallelism in every data worker that is forked later.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    vocabulary = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0) + 1  # numbers may have gaps
    return write_tokens(out, _tokens(files, tokenizer, progress), vocabulary)


def _tokens(files: Sequence[Path], tokenizer: Any, progress: Progress) -> Iterator[npt.NDArray[np.uint32]]:
    end = next((found for name in END_OF_TEXT if (found := tokenizer.token_to_id(name)) is not None), None)
    advance = _advance(files, progress)
    for path in files:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a long line may be cut inside a character
        pieces = _lines(path)
        while batch := list(itertools.islice(pieces, _AT_ONCE)):
            texts = [decoder.decode(piece) for piece in batch]
            for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
                yield np.array(encoding.ids, np.uint32)
            advance(sum(map(len, batch)))
        if end is not None:
            yield np.array([end], np.uint32)


def _pieces(files: Sequence[Path], progress: Progress) -> Iterator[bytes]:
    advance = _advance(files, progress)
    for path in files:
        with reading(path), open(path, "rb") as file:
            while piece := file.read(1 << 20):
                yield piece
                advance(len(piece))


def _lines(path: Path) -> Iterator[bytes]:
    """Pieces that end with a line, so that no word is cut; only in a line longer than a piece one may be."""
    with reading(path), open(path, "rb") as file:
        while piece := file.read(_PIECE):
            yield piece if piece.endswith(b"\n") else piece + file.readline(_PIECE)


def _advance(files: Sequence[Path], progress: Progress) -> Callable[[int], None]:
    """A progress callback that takes the number of further bytes done."""
    total = sum(part.tokens for part in byte_parts(files))
    done = 0

    def advance(more: int) -> None:
        nonlocal done
        done += more
        progress(done, total)

    return advance
