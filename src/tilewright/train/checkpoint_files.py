"""What a checkpoint is on disk, and how one is read that nobody vouches for.

    step-00000042/
      __0_0.distcp ...   the tensors, as torch.distributed.checkpoint (DCP) writes them
      .metadata          DCP's list of them: name, shape, dtype, which bytes of which file
      facts.json         everything that is no tensor
      manifest.json      the size and SHA-256 of each of the above; written last

Hashes are taken of the bytes on their way to the disk, so nothing is read back. They find what a disk or a copy broke;
they do not find malice, for who forges a file can forge the manifest too. `.metadata` is a pickle that DCP would load
as it comes, and DCP would unpickle whatever that declares to be no tensor. So here it passes an unpickler that knows
the few classes it is made of, has to list tensors alone and files of the manifest alone, and tensors are read by
``torch.load(weights_only=True)``.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import os
import pickle
import re
import stat
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypedDict, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from tilewright.errors import UserError

SCHEMA = 1
FACTS, MANIFEST, METADATA = "facts.json", "manifest.json", ".metadata"
_STEP = re.compile(r"step-([0-9]{8,})")
_PLAIN_NAME = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9_.]+")
_HASHERS = 4  # files hashed at once


class File(TypedDict):
    """What the manifest knows of a file."""

    bytes: int
    sha256: str


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


class _Stream:
    """A file on its way to the disk, and the hash of what went in.

    DCP writes in threads of which all but one lose their errors. So an error is kept here, for `Checkpoints` to look
    at, and what comes after it is dropped.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.size, self.hash = path, 0, hashlib.sha256()
        self.problem: OSError | None = None
        self._file: io.BufferedWriter | None = None
        with self._keep_problem():
            self._file = open(path, "wb")  # noqa: SIM115 - closed by close()

    @contextlib.contextmanager
    def _keep_problem(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.problem = self.problem or OSError(error.errno, error.strerror, str(self.path))

    def write(self, data: Any) -> int:
        if self._file is not None and self.problem is None:
            with self._keep_problem():
                self._file.write(data)
        self.hash.update(data)
        written = memoryview(data).nbytes
        self.size += written
        return written

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        """Nothing: all of it is flushed, and to the disk, when the file is closed."""

    def close(self) -> None:
        if self._file is None:
            return
        file, self._file = self._file, None
        with self._keep_problem():
            try:
                file.flush()
                os.fsync(file.fileno())
            finally:
                file.close()


class HashedFiles(FileSystem):
    """DCP's file system; knows afterwards what was written, and what went wrong."""

    def __init__(self) -> None:
        self.files: dict[str, File] = {}
        self.problem: OSError | None = None

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:  # type: ignore[override]
        stream = _Stream(Path(path))
        try:
            yield stream
        finally:
            stream.close()
            self.problem = self.problem or stream.problem
        self.files[stream.path.name] = {"bytes": stream.size, "sha256": stream.hash.hexdigest()}

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.files[Path(new_path).name] = self.files.pop(Path(path).name)

    def write(self, path: Path, text: str) -> None:
        """A small file of our own."""
        with self.create_stream(path, "wb") as stream:
            stream.write(text.encode())
        if self.problem:
            raise self.problem


class Writer(FileSystemWriter):
    """DCP's writer over `HashedFiles`; says nothing of the machine's paths."""

    def __init__(self, folder: Path, files: HashedFiles, threads: int) -> None:
        super().__init__(folder, sync_files=False, thread_count=threads)
        self.fs = files

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()


def manifest_text(files: dict[str, File]) -> str:
    """The one way in which a manifest is written; any other text is not one of ours."""
    return json.dumps({"schema": SCHEMA, "files": files}, indent=1, sort_keys=True) + "\n"


def read_manifest(folder: Path) -> dict[str, File]:
    """The files of a checkpoint by name, from its manifest."""
    try:
        _require_plain_file(folder, MANIFEST)
        text = (folder / MANIFEST).read_text(encoding="utf-8")
        manifest = json.loads(text)
        if isinstance(manifest, dict) and type(manifest.get("schema")) is int and manifest["schema"] > SCHEMA:
            raise UserError(f"{folder} was written by a newer Tilewright; install that one to read it.")
        files = manifest["files"]
        sound = (
            manifest_text(files) == text and {FACTS, METADATA} <= files.keys() and all(map(_is_entry, files.items()))
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise DamagedCheckpoint.at(folder, MANIFEST, f"cannot be read ({short(error)})") from error
    if not sound:
        raise DamagedCheckpoint.at(folder, MANIFEST, "is not what was saved")
    return files


def _is_entry(item: tuple[Any, Any]) -> bool:
    name, entry = item
    return bool(
        _PLAIN_NAME.fullmatch(name) and entry.keys() == {"bytes", "sha256"}
        and type(entry["bytes"]) is int and type(entry["sha256"]) is str
    )  # fmt: skip


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
    if not stat.S_ISREG(found.st_mode):
        raise DamagedCheckpoint.at(folder, name, "is no plain file")
    return found.st_size


def read_facts(folder: Path) -> dict[str, Any]:
    """What a checkpoint says of itself besides tensors."""
    try:
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedCheckpoint.at(folder, FACTS, f"cannot be read ({short(error)})") from error
    if not isinstance(facts, dict):
        raise DamagedCheckpoint.at(folder, FACTS, "holds no facts")
    return facts


_CLASSES: dict[tuple[str, str], Any] = {
    (known.__module__, known.__qualname__): known
    for known in (
        Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata, TensorProperties, ChunkStorageMetadata,
        _MEM_FORMAT_ENCODING, _StorageInfo, torch.Size, torch.serialization._get_layout,
    )
}  # fmt: skip


class _MetadataUnpickler(pickle.Unpickler):
    """Loads what DCP's list of tensors is made of, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _CLASSES:
            return _CLASSES[module, name]
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        raise pickle.UnpicklingError(f"{module}.{name} has no place in it")


def read_metadata(folder: Path, files: dict[str, File]) -> Metadata:
    """DCP's list of tensors, of whose contents nothing is believed."""
    try:
        with open(folder / METADATA, "rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise TypeError("it is no list of tensors")
        for name, tensor in metadata.state_dict_metadata.items():
            _check_tensor(name, tensor)
        for info in metadata.storage_data.values():
            _check_place(info, files)
    except Exception as error:  # what a forged pickle can be is without end
        raise DamagedCheckpoint.at(folder, METADATA, f"cannot be read ({short(error)})") from error
    return metadata


def tensors_of(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    """The tensors of a list that `read_metadata` has checked, and that has nothing else."""
    return cast(dict[str, TensorStorageMetadata], metadata.state_dict_metadata)


def _check_tensor(name: Any, tensor: Any) -> None:
    # What is no tensor DCP would unpickle, and pieces that do not make up the whole it would load in part.
    if type(name) is not str or type(tensor) is not TensorStorageMetadata:
        raise TypeError(f"{name!r:.100} is no tensor")
    if type(tensor.size) is not torch.Size or not isinstance(tensor.properties.dtype, torch.dtype):
        raise TypeError(f"{name!r:.100} has no shape or dtype")
    if sum(math.prod(chunk.sizes) for chunk in tensor.chunks) != math.prod(tensor.size):
        raise ValueError(f"{name!r:.100} is not whole")


def _check_place(info: Any, files: dict[str, File]) -> None:
    if type(info) is not _StorageInfo or type(info.relative_path) is not str or info.relative_path not in files:
        raise ValueError(f"{getattr(info, 'relative_path', info)!r:.100} is no file of the checkpoint")
    if info.transform_descriptors:
        raise ValueError("it asks for a transformation that nothing here writes")
    if not 0 <= info.offset <= info.offset + info.length <= files[info.relative_path]["bytes"]:
        raise ValueError(f"a tensor lies outside of {info.relative_path}")


class Reader(FileSystemReader):
    """DCP's reader, of a list that was checked; remembers which file it reads."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self.metadata, self.reading = metadata, METADATA

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata

    def _slice_file(self, file: Any, sinfo: _StorageInfo) -> Any:
        self.reading = sinfo.relative_path
        return super()._slice_file(file, sinfo)


class TensorsOnly(DefaultLoadPlanner):
    """DCP's planner; never unpickles an object."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        raise TypeError(f"{read_item.dest_index.fqn} is no tensor")


def short(error: BaseException) -> str:
    """An error on one line."""
    text = (getattr(error, "strerror", None) or str(error) or type(error).__name__).splitlines()[0]
    return text[:200]
