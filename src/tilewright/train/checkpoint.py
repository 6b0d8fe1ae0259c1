"""Checkpoints that survive a kill at any moment, a full disk and a broken one.

A checkpoint is written in a hidden folder and renamed once it is whole and on the disk, so every `step-...` folder is
a whole one, and older ones are deleted only after that. What the disk breaks later shows when it is loaded: every file
is compared with the manifest first (`checkpoint_format` has the layout, in which nothing is a pickle).

Asynchronous, `save` returns as soon as the tensors are copied to the host; a thread hashes and writes the copies. What
goes wrong there is raised by the next `save`, `wait` or `close`.

With torch.distributed every rank makes the same calls with its own shards. A plain tensor (no DTensor) counts as equal
on all ranks and is written once: one that differs between ranks, such as the state of a random generator, needs a
section of its own for each rank.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

from tilewright.errors import UserError
from tilewright.measure.machine import host_memory_bytes
from tilewright.parallel.ordered import Ordered, Pieces
from tilewright.train.checkpoint_format import (
    FACTS,
    MANIFEST,
    TENSORS,
    DamagedCheckpoint,
    File,
    SavedTensor,
    manifest_text,
    name_of,
    read_facts,
    read_manifest,
    read_tensors,
    step_of,
    verify,
    write_file,
)
from tilewright.train.checkpoint_storage import Reader, Writer
from tilewright.train.sentences import short

# DCP says so at every save of a single process, which here is no surprise.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

_LARGE = 1 << 26  # bytes; from here on several files, written and hashed at once, are worth it
_THREADS = 4
WEIGHTS_ALONE = "weights_alone"  # of the facts: true where a checkpoint has the section `model` and is to begin with


class Checkpoints:
    """The checkpoints of one run, in one folder, which no other process may write to meanwhile.

    Args:
        folder: made where it is missing.
        keep: how many there are at most; older ones are deleted.
        asynchronous: write in the background.

    >>> import tempfile
    >>> weight = torch.ones(2, 3)
    >>> checkpoints = Checkpoints(Path(tempfile.mkdtemp()), keep=2, asynchronous=True)
    >>> checkpoints.save(7, {"model": {"weight": weight}}, {"samples": 56})
    >>> _ = weight.zero_()
    >>> checkpoints.wait()
    >>> checkpoints.newest().name, checkpoints.load_newest({"model": {"weight": weight}}), weight.sum().item()
    ('step-00000007', {'samples': 56}, 6.0)
    >>> checkpoints.close()
    """

    def __init__(self, folder: Path, *, keep: int, asynchronous: bool) -> None:
        self.folder, self.keep, self.asynchronous = folder, keep, asynchronous
        self.warnings: list[str] = []  # what `load_newest` passed over, and why
        # A group of its own: the background's messages must not mix with those of training.
        self._group = dist.new_group(backend="gloo") if dist.is_available() and dist.is_initialized() else None
        self._is_first = self._group is None or dist.get_rank(self._group) == 0
        self._writer = _gather(os.getpid(), self._group)[0]
        self._lock: IO[str] | None = None
        self._stager = StateDictStager(pin_memory=torch.cuda.is_available())
        self._background = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[None] | None = None
        problem = None
        if self._is_first:
            try:
                self._claim()
            except UserError as error:
                problem = error
        _agree(problem, self._group)

    def save(self, step: int, tensors: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Save nested dictionaries of tensors, and facts that are JSON; first wait for the save before."""
        self.wait()
        text = json.dumps(facts, indent=1, allow_nan=False) + "\n"
        flat, orders = flatten(tensors), _orders(tensors)
        if not self.asynchronous:
            self._write(step, _in_order(flat, orders), text)
            return
        staged = self._stager.stage(flat, non_blocking=True)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self._pending = self._background.submit(self._write, step, _in_order(staged, orders), text)

    def wait(self) -> None:
        """Block until the last save is on the disk."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait, and leave the folder to others."""
        try:
            self.wait()
        finally:
            self._background.shutdown()
            self._stager.close()
            if self._lock is not None:
                self._lock.close()

    def newest(self) -> Path | None:
        """The newest complete checkpoint."""
        return newest(self.folder)

    def load(self, path: Path, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Load a checkpoint on all ranks, as the function `load` does."""
        return load(path, tensors, self._group)

    def load_newest(self, tensors: Mapping[str, Any]) -> dict[str, Any] | None:
        """Load the newest whole checkpoint and return its facts, or None where there is none.

        A damaged one is passed over; `warnings` then has a sentence that names the file.
        """
        for path in _gather(_folders(self.folder), self._group)[0]:
            try:
                return self.load(path, tensors)
            except DamagedCheckpoint as error:
                self.warnings.append(str(error))
        return None

    def _claim(self) -> None:
        """Lock the folder and put in order what a killed writer left behind."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.folder / ".lock", "a")  # noqa: SIM115 - held until close()
        except OSError as error:
            raise UserError(
                f"Cannot write checkpoints to {self.folder}: {short(error)}; choose another out."
            ) from error
        try:
            # Ends with this very process and not with its forks: a worker that outlives it does not hold the folder.
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise UserError(
                    f"Another process writes checkpoints to {self.folder}; end it or choose another out."
                ) from error
            return  # a file system without locks: what lies there may be another's
        for path in self.folder.iterdir():
            if path.name.startswith(".replaced-"):
                final = self.folder / path.name.removeprefix(".replaced-")
                if not final.exists():
                    path.rename(final)
            if path.name.startswith((".replaced-", ".writing-", ".deleting-")):
                shutil.rmtree(path, ignore_errors=True)

    def _write(self, step: int, flat: dict[str, Tensor], facts: str) -> None:
        writing = self.folder / f".writing-{step}-{self._writer}"
        large = sum(tensor.numel() * tensor.element_size() for tensor in flat.values()) > _LARGE
        rank = 0 if self._group is None else dist.get_rank(self._group)
        writer, problem = Writer(writing, rank, _THREADS if large else 1), None
        try:
            state_dict_saver.save(
                flat,
                storage_writer=writer,
                planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                process_group=self._group,
                no_dist=self._group is None,
            )
        except CheckpointException as error:
            problem = _first_failure(error)
        written = _gather((writer.files, problem), self._group)
        problem = next((problem for _, problem in written if problem), None)
        if problem is None and self._is_first:
            try:
                self._publish(step, writing, {name: file for part, _ in written for name, file in part.items()}, facts)
            except OSError as error:
                problem = error
        problem = next(filter(None, _gather(problem, self._group)), None)
        if problem is not None:
            if self._is_first:
                shutil.rmtree(writing, ignore_errors=True)
            raise UserError(self._explain(step, problem)) from problem

    def _publish(self, step: int, writing: Path, files: dict[str, File], facts: str) -> None:
        """Complete a folder that has all tensors, and give it its name."""
        files[FACTS] = write_file(writing / FACTS, [facts.encode()])
        write_file(writing / MANIFEST, [manifest_text(files).encode()])
        _sync_folder(writing)
        final = self.folder / name_of(step)
        replaced = self.folder / f".replaced-{final.name}"
        if final.exists():  # no folder can be renamed over another; `_claim` undoes this where the next line never ran
            final.rename(replaced)
        writing.rename(final)
        _sync_folder(self.folder)
        shutil.rmtree(replaced, ignore_errors=True)
        # One of a later step, from before a run went back, is neither counted nor deleted.
        older = [path for path in _complete(self.folder) if (step_of(path) or 0) < step]
        for path in older[self.keep - 1 :]:
            deleting = self.folder / f".deleting-{path.name}"
            with contextlib.suppress(OSError):  # the new one is whole all the same
                path.rename(deleting)
                shutil.rmtree(deleting)

    def _explain(self, step: int, problem: BaseException) -> str:
        if isinstance(problem, OSError):
            what = f"{short(problem)} writing {problem.filename or self.folder}"
        else:
            what = f"{type(problem).__name__} writing step {step}: {short(problem)}"
        full = isinstance(problem, OSError) and problem.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        previous = self.newest()
        found = f"the previous checkpoint {previous.name} is whole" if previous else "there is no checkpoint before it"
        resumes = ": it resumes there" if previous else ""
        return f"{what}; {found}. {'Free space' if full else 'Put that right'} and run again{resumes}."


def flatten(tensors: Mapping[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """Nested dictionaries of tensors as one.

    >>> list(flatten({"model": {"weight": torch.ones(1)}, "optimizer": {0: {"step": torch.ones(())}}}))
    ['model/weight', 'optimizer/0/step']
    """
    flat: dict[str, Tensor] = {}
    for key, value in tensors.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{name}/")
        elif isinstance(value, (Tensor, Ordered)):
            flat[name] = value.tensor if isinstance(value, Ordered) else value
        else:
            raise TypeError(f"{name} is a {type(value).__name__}; only tensors are saved here, put it into the facts.")
    return flat


def _orders(tensors: Mapping[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """The order of rows of those tensors, named as `flatten` does, that have one of their own."""
    found: dict[str, Tensor] = {}
    for key, value in tensors.items():
        if isinstance(value, Mapping):
            found |= _orders(value, f"{prefix}{key}/")
        elif isinstance(value, Ordered):
            found[f"{prefix}{key}"] = value.order
    return found


def _in_order(flat: dict[str, Tensor], orders: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors, as they are to be saved and loaded."""
    return {name: Pieces.of(Ordered(each, orders[name])) if name in orders else each for name, each in flat.items()}


def newest(folder: Path) -> Path | None:
    """The newest complete checkpoint of a folder."""
    return next(_complete(folder), None)


def load(path: Path, tensors: Mapping[str, Any], group: Any = None) -> dict[str, Any]:
    """Fill nested dictionaries of tensors, in place, from a checkpoint; return its facts.

    The first level's keys are sections. A section that is given has to be the checkpoint's, name by name, in shape and
    dtype; one that is not is left alone. A checkpoint of weights alone fills the section `model`, whatever its dtype.

    Args:
        path: the checkpoint's folder.
        tensors: as they were given to `save`.
        group: the ranks that load together; None: this process alone.
    """
    flat, orders = flatten(tensors), _orders(tensors)
    wanted = set().union(*_gather(list(flat), group))
    problem = None
    saved: dict[str, SavedTensor] = {}
    facts: dict[str, Any] = {}
    rank, ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    try:
        files, saved, facts = _open(path)
        if facts.get(WEIGHTS_ALONE) is True:
            flat = {name: tensor for name, tensor in flat.items() if name.startswith("model/")}
            _compare(path, saved, flat, {name for name in wanted if name.startswith("model/")}, any_dtype=True)
        else:
            _compare(path, saved, flat, wanted)
        verify(path, files, sorted(files)[rank::ranks])  # the ranks each their share
    except UserError as error:
        problem = error
    _agree(problem, group)
    _fill(path, saved, _in_order(flat, orders), group)
    return facts


def read(path: Path, section: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A section of a checkpoint as it was saved, on the CPU, flat, and the checkpoint's facts."""
    files, saved, facts = _open(path)
    inside = {name: tensor for name, tensor in saved.items() if name.startswith(f"{section}/")}
    if not inside:
        raise UserError(f"The checkpoint {path} has no section {section!r}; choose one that `tilewright` has written.")
    needed, there = (
        sum(tensor.bytes for tensor in inside.values()),
        host_memory_bytes(),
    )
    if needed > there:
        raise UserError(
            f"The {section} of {path} takes {needed / 1e9:,.1f} GB and this machine has {there / 1e9:,.1f} GB of "
            "memory; read it on a larger one."
        )
    verify(path, files, files)
    flat = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in inside.items()}
    _fill(path, saved, flat, None)
    return {name.removeprefix(f"{section}/"): tensor for name, tensor in flat.items()}, facts


def _open(path: Path) -> tuple[dict[str, File], dict[str, SavedTensor], dict[str, Any]]:
    """The files of a checkpoint, its tensors and its facts; verified but for the files of the tensors."""
    if not path.is_dir():
        raise UserError(f"There is no checkpoint {path}; give the path of a step-... folder.")
    files = read_manifest(path)
    verify(path, files, (TENSORS, FACTS))
    return files, read_tensors(path, files), read_facts(path)


def _compare(
    path: Path, saved: dict[str, SavedTensor], flat: dict[str, Tensor], wanted: set[str], any_dtype: bool = False
) -> None:
    advice = "resume with the model and optimizer it was saved with, or start in another folder"
    sections = {name.split("/")[0] for name in wanted}
    for name in saved:
        if name not in wanted and name.split("/")[0] in sections:
            raise UserError(f"The checkpoint {path} has {name}, which this run has not; {advice}.")
    for name, tensor in flat.items():
        if name not in saved:
            raise UserError(f"The checkpoint {path} has no {name}, which this run has; {advice}.")
        shape, dtype = saved[name].shape, saved[name].dtype
        if shape != tuple(tensor.shape) or (dtype != tensor.dtype and not any_dtype):
            there, here = f"{shape} in {dtype}", f"{tuple(tensor.shape)} in {tensor.dtype}"
            raise UserError(f"The checkpoint {path} has {name} as {there}, this run as {here}; {advice}.")


def _fill(path: Path, saved: dict[str, SavedTensor], flat: dict[str, Tensor], group: Any) -> None:
    reader = Reader(path, saved)
    try:
        state_dict_loader.load(
            flat,
            storage_reader=reader,
            planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=group,
            no_dist=group is None,
        )
    except CheckpointException as error:
        problem = _first_failure(error)
        raise DamagedCheckpoint.at(path, reader.reading, f"cannot be read ({short(problem)})") from error


def _folders(folder: Path) -> list[Path]:
    """What has the name of a checkpoint, the latest step first."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if step_of(path) is not None), key=step_of, reverse=True)  # type: ignore[arg-type]


def _complete(folder: Path) -> Iterator[Path]:
    for path in _folders(folder):
        with contextlib.suppress(UserError):
            read_manifest(path)
            yield path


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _first_failure(error: CheckpointException) -> BaseException:
    cause = next(iter(error.failures.values()))[0]
    if not isinstance(cause, Exception):  # Ctrl-C, which DCP catches too
        raise cause
    return cause


def _gather(value: Any, group: Any) -> list[Any]:
    """What each rank has."""
    if group is None:
        return [value]
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _agree(problem: UserError | None, group: Any) -> None:
    """Raise on all ranks what one of them found, that none waits for another."""
    found = next(filter(None, _gather(problem, group)), None)
    if found is not None:
        raise found
