"""What a checkpoint is on disk, and how one is read that nobody vouches for.

    step-00000042/
      0-0.bin ...     the tensors of rank 0, thread 0 ...: the bytes of one chunk after the other, little-endian
      tensors.json    of each tensor its dtype, its shape and its chunks: which part of it lies where
      facts.json      everything that is no tensor
      manifest.json   the size and SHA-256 of each of the above, and a SHA-256 of itself; written last

Hashes are taken of the bytes on their way to the disk, so nothing is read back. They find what a disk or a copy broke.
They do not find malice, for who forges a file can forge the manifest too. So nothing here is a pickle, and
`tensors.json` is believed only where every chunk is accounted for: the chunks of a tensor cut it like a grid, without
gap or overlap, and the chunks in a file fill it from its first byte to its last. What is loaded is then never more than
what lies on the disk, and every element of it comes from there.

torch.distributed.checkpoint (DCP) decides which rank saves and loads which chunk;
`checkpoint_storage` reads and writes the files for it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import torch

from tilewright.errors import UserError
from tilewright.train.sentences import short

SCHEMA = 2
FACTS, MANIFEST, TENSORS = "facts.json", "manifest.json", "tensors.json"
_STEP = re.compile(r"step-([0-9]{8,})")
_PLAIN_NAME = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9_.-]+")
_HASHERS = 4  # files hashed at once
_LARGEST_JSON = 1 << 26  # bytes, so that nobody's list fills the memory
_MOST_DIMENSIONS, _MOST_ELEMENTS = 64, 1 << 48  # of a tensor
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
    and (dtype.is_floating_point or dtype.is_complex or re.fullmatch(r"torch\.(bool|u?int(8|16|32|64))", str(dtype)))
}


class File(TypedDict):
    """What the manifest knows of a file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor, and where its bytes are."""

    at: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    offset: int
    bytes: int


@dataclass(frozen=True)
class SavedTensor:
    """A tensor of a checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class DamagedCheckpoint(UserError):
    """A checkpoint that is not what was saved; the message names the file."""

    @classmethod
    def at(cls, folder: Path, name: str, what: str) -> DamagedCheckpoint:
        return cls(f"The checkpoint {folder} is damaged: {name} {what}; delete that folder and resume from another.")


def name_of(step: int) -> str:
    """The folder of a step's checkpoint.

    >>> name_of(42)
    'step-00000042'
    """
    return f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """The step of a checkpoint's folder, or None where the name is no such folder's."""
    found = _STEP.fullmatch(path.name)
    return int(found[1]) if found else None


# Writing


def write_file(path: Path, pieces: Iterable[Any]) -> File:
    """Write a file through to the disk; its size, and the hash of what went in."""
    digest, size = hashlib.sha256(), 0
    try:
        with open(path, "wb") as file:
            for piece in pieces:
                file.write(piece)
                digest.update(piece)
                size += memoryview(piece).nbytes
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error  # which Python leaves out for a write
    return {"bytes": size, "sha256": digest.hexdigest()}


# The manifest


def manifest_text(files: dict[str, File]) -> str:
    """The one way in which a manifest is written; any other text is not one of ours."""
    return _sealed({"schema": SCHEMA, "files": files})


def _sealed(content: dict[str, Any]) -> str:
    """JSON with a hash of itself, which tells a damaged field from that of another version."""
    seal = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return json.dumps({**content, "sha256": seal}, indent=1, sort_keys=True) + "\n"


def read_manifest(folder: Path) -> dict[str, File]:
    """The files of a checkpoint by name, from its manifest."""
    manifest, text = _read_json(folder, MANIFEST)
    schema, files = manifest.get("schema"), manifest.get("files")
    sealed = "sha256" in manifest
    if sealed and _sealed({name: value for name, value in manifest.items() if name != "sha256"}) != text:
        raise DamagedCheckpoint.at(folder, MANIFEST, "is not what was saved")
    if sealed and type(schema) is int and schema > SCHEMA:
        raise UserError(f"{folder} was written by a newer Tilewright; install that one to read it.")
    if not sealed and type(schema) is int and schema < SCHEMA:
        raise UserError(f"{folder} was written by an older Tilewright, in format {schema}; choose another out.")
    sound = sealed and schema == SCHEMA and isinstance(files, dict) and {FACTS, TENSORS} <= files.keys()
    if not sound or not isinstance(files, dict) or not all(map(_is_entry, files.items())):
        raise DamagedCheckpoint.at(folder, MANIFEST, "is not what was saved")
    return files


def _is_entry(item: tuple[str, Any]) -> bool:
    name, entry = item
    return bool(
        _PLAIN_NAME.fullmatch(name) and isinstance(entry, dict) and entry.keys() == {"bytes", "sha256"}
        and type(entry["bytes"]) is int and type(entry["sha256"]) is str
    )  # fmt: skip


def _read_json(folder: Path, name: str) -> tuple[dict[str, Any], str]:
    """An object of JSON from a small file, and its text."""
    if _require_plain_file(folder, name) > _LARGEST_JSON:
        raise DamagedCheckpoint.at(folder, name, f"is larger than {_LARGEST_JSON >> 20} MiB")
    try:
        text = (folder / name).read_text(encoding="utf-8")
        tree = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedCheckpoint.at(folder, name, f"cannot be read ({short(error)})") from error
    if not isinstance(tree, dict):
        raise DamagedCheckpoint.at(folder, name, "holds no object")
    return tree, text


def verify(folder: Path, files: dict[str, File], names: Iterable[str]) -> None:
    """Compare these files with what the manifest says of them."""
    with ThreadPoolExecutor(_HASHERS) as pool:
        for _ in pool.map(lambda name: _verify_one(folder, name, files[name]), names):
            pass


def _verify_one(folder: Path, name: str, entry: File) -> None:
    try:
        size = _require_plain_file(folder, name)
        if size != entry["bytes"]:
            raise DamagedCheckpoint.at(folder, name, f"has {size} bytes where {entry['bytes']} were written")
        with open(folder / name, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DamagedCheckpoint.at(folder, name, f"cannot be read ({short(error)})") from error
    if digest != entry["sha256"]:
        raise DamagedCheckpoint.at(folder, name, "is not what was saved (its SHA-256 differs)")


def _require_plain_file(folder: Path, name: str) -> int:
    """The size of a file; refuse a link, which may lead anywhere, and whatever else is no file."""
    try:
        found = os.lstat(folder / name)
    except FileNotFoundError:
        raise DamagedCheckpoint.at(folder, name, "is missing") from None
    except OSError as error:
        raise DamagedCheckpoint.at(folder, name, f"cannot be read ({short(error)})") from error
    if not stat.S_ISREG(found.st_mode):
        raise DamagedCheckpoint.at(folder, name, "is no plain file")
    return found.st_size


def read_facts(folder: Path) -> dict[str, Any]:
    """What a checkpoint says of itself besides tensors."""
    return _read_json(folder, FACTS)[0]


# The list of tensors, of whose contents nothing is believed


def read_tensors(folder: Path, files: dict[str, File]) -> dict[str, SavedTensor]:
    """The tensors of a checkpoint by name; refuse a list that does not fit together or does not fit the files."""
    tree, _ = _read_json(folder, TENSORS)
    try:
        tensors = {name: _parse_tensor(name, entry) for name, entry in tree.items()}
        _check_files(tensors, files)
    except ValueError as error:
        raise DamagedCheckpoint.at(folder, TENSORS, f"cannot be: {short(error)}") from error
    return tensors


def _parse_tensor(name: str, entry: Any) -> SavedTensor:
    if not name.isprintable() or len(name) > 1000:
        raise ValueError(f"{name!r:.100} is no name of a tensor")
    entry = _fields(name, entry, "chunks", "dtype", "shape")
    shape, dtype = _sizes(name, entry["shape"]), entry["dtype"]
    if type(dtype) is not str or dtype not in _DTYPES:
        raise ValueError(f"{name!r} has no dtype that PyTorch knows")
    if not isinstance(entry["chunks"], list):
        raise ValueError(f"the chunks of {name!r} are no list")
    chunks = []
    for found in entry["chunks"]:
        chunk = _fields(name, found, "at", "file", "offset", "shape")
        at, part = _sizes(name, chunk["at"]), _sizes(name, chunk["shape"])
        if type(chunk["offset"]) is not int or type(chunk["file"]) is not str:
            raise ValueError(f"a chunk of {name!r} is in no file")
        size = math.prod(part) * _DTYPES[dtype].itemsize
        chunks.append(Chunk(at, part, chunk["file"], chunk["offset"], size))
    if not _is_grid(shape, chunks):
        raise ValueError(f"the chunks of {name!r} do not make up the whole of it")
    return SavedTensor(_DTYPES[dtype], shape, tuple(chunks))


def _fields(name: str, entry: Any, *expected: str) -> dict[str, Any]:
    if not isinstance(entry, dict) or sorted(entry) != list(expected):
        raise ValueError(f"the entry of {name!r} has not the fields {', '.join(expected)}")
    return entry


def _sizes(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > _MOST_DIMENSIONS or any(type(n) is not int for n in value):
        raise ValueError(f"{name!r} has a shape that is no list of whole numbers")
    if any(n < 0 for n in value) or math.prod(max(1, n) for n in value) > _MOST_ELEMENTS:
        raise ValueError(f"{name!r} has a shape that cannot be")
    return tuple(value)


def _is_grid(shape: tuple[int, ...], chunks: list[Chunk]) -> bool:
    """Whether chunks cut a tensor like a grid, along each dimension at the same places, and each cell is there once.

    That is how sharding cuts, over any number of meshes; and it takes one pass to check, whatever is forged.

    >>> halves = [Chunk((0,), (3,), "", 0, 0), Chunk((3,), (2,), "", 0, 0)]
    >>> _is_grid((5,), halves), _is_grid((6,), halves), _is_grid((5,), halves[:1])
    (True, False, False)
    """
    if not math.prod(shape) or not chunks:
        return not math.prod(shape) and not chunks
    if any(not len(chunk.at) == len(chunk.shape) == len(shape) for chunk in chunks):
        return False
    cuts = [sorted({chunk.at[dimension] for chunk in chunks}) for dimension in range(len(shape))]
    ends = [dict(zip(cut, [*cut[1:], size], strict=True)) for cut, size in zip(cuts, shape, strict=True)]
    return (
        len({chunk.at for chunk in chunks}) == len(chunks) == math.prod(map(len, cuts))
        and all(cut[0] == 0 for cut in cuts)
        and all(
            at + size == end[at] and size > 0
            for chunk in chunks
            for at, size, end in zip(chunk.at, chunk.shape, ends, strict=True)
        )
    )


def _check_files(tensors: dict[str, SavedTensor], files: dict[str, File]) -> None:
    """Refuse chunks that overlap in their file, leave some of it out, or are in none."""
    ends = {name: 0 for name in files if name not in (FACTS, TENSORS)}
    chunks = sorted((chunk for tensor in tensors.values() for chunk in tensor.chunks), key=lambda one: one.offset)
    for chunk in chunks:
        if chunk.file not in ends:
            raise ValueError(f"{chunk.file!r:.100} is no file of the checkpoint")
        if chunk.offset != ends[chunk.file]:
            raise ValueError(f"chunks overlap in {chunk.file} or leave a gap")
        ends[chunk.file] += chunk.bytes
    for name, end in ends.items():
        if end != files[name]["bytes"]:
            raise ValueError(f"its chunks take {end} bytes of {name}, which has {files[name]['bytes']}")
