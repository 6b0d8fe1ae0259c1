"""What a disk, a copy or an attacker does to a checkpoint is found, named, and never run."""

import contextlib
import hashlib
import itertools
import json
import os
import pickle
import re
import resource
import shutil
import tempfile
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.errors import UserError
from tilewright.train import checkpoint_format
from tilewright.train.checkpoint import Checkpoints, load, newest, read
from tilewright.train.checkpoint_format import (
    Chunk,
    DamagedCheckpoint,
    _is_grid,
    _sealed,
    manifest_text,
    read_manifest,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
FILES = ["0-0.bin", "tensors.json", "facts.json", "manifest.json"]


def state(step):
    return {"model": {"weight": torch.full((20, 30), float(step)), "bias": torch.full((30,), float(step))}}


@pytest.fixture
def run(tmp_path):
    checkpoints = Checkpoints(tmp_path / "run", keep=3, asynchronous=False)
    for step in (1, 2):
        checkpoints.save(step, state(step), {"step": step})
    yield checkpoints
    checkpoints.close()


def assert_found(checkpoints, name):
    """Given by its path, the newest is refused by a sentence that names the file; left to `auto`, the one before."""
    path, loaded = checkpoints.folder / "step-00000002", state(0)
    with pytest.raises(DamagedCheckpoint) as found:
        load(path, loaded)
    assert str(path) in str(found.value) and f" {name} " in str(found.value) and "\n" not in str(found.value)
    assert checkpoints.load_newest(loaded) == {"step": 1}
    assert loaded["model"]["weight"].eq(1).all() and loaded["model"]["bias"].eq(1).all()
    assert checkpoints.warnings == [str(found.value)]


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_byte_anywhere_is_found(run, name):
    path = run.folder / "step-00000002" / name
    sound, last = path.read_bytes(), path.stat().st_size - 1
    every = name.endswith(".json")
    for place in range(last + 1) if every else {0, 1, last // 3, last // 2, last - 1, last}:
        for bit in (1,) if every else (1, 4, 0x80):
            path.write_bytes(sound[:place] + bytes([sound[place] ^ bit]) + sound[place + 1 :])
            with pytest.raises(DamagedCheckpoint):
                load(path.parent, state(0))
            if name == "manifest.json":  # whichever of its fields it was, the older checkpoint is as good as before
                assert run.load_newest(state(0)) == {"step": 1}
    run.warnings.clear()
    assert run.load_newest(state(0)) == {"step": 1} and len(run.warnings) == 1


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["truncated", "missing", "linked", "folder"])
def test_a_file_that_is_not_the_one_that_was_written_is_named(run, name, damage, tmp_path):
    path = run.folder / "step-00000002" / name
    content = path.read_bytes()
    path.unlink()
    if damage == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "linked":
        (tmp_path / "elsewhere").write_bytes(content)
        path.symlink_to(tmp_path / "elsewhere")
    elif damage == "folder":
        path.mkdir()
    assert_found(run, name)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("threads", [1, 4])
def test_a_disk_that_is_full_is_said_and_the_previous_one_is_whole(run, asynchronous, threads, monkeypatch):
    run.asynchronous = asynchronous
    if threads == 4:
        monkeypatch.setattr("tilewright.train.checkpoint._LARGE", 0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    large = {"model": {str(index): torch.ones(2000) for index in range(8)}}
    resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, limits[1]))
    try:
        with pytest.raises(UserError) as found:
            run.save(3, large, {})
            run.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = str(found.value)
    assert said.startswith("File too large writing ") and ".bin" in said
    assert "step-00000002 is whole. Free space and run again: it resumes there." in said
    assert sorted(os.listdir(run.folder)) == [".lock", "step-00000001", "step-00000002"]  # its space is free again
    run.wait()  # said once
    run.save(3, state(3), {"step": 3})
    run.wait()
    assert run.load_newest(state(0)) == {"step": 3}


def test_an_error_of_the_background_surfaces_at_the_next_save_and_at_close(run):
    run.asynchronous = True
    for surface in (lambda: run.save(4, state(4), {}), run.close):
        (run.folder / f".writing-3-{os.getpid()}").write_text("in the way")
        run.save(3, state(3), {})
        with pytest.raises(UserError, match="the previous checkpoint step-00000002 is whole. Put that right"):
            surface()
        (run.folder / f".writing-3-{os.getpid()}").unlink()


def test_a_folder_that_cannot_be_written_to_is_said_at_once_and_can_be_read():
    folder = Path(tempfile.mkdtemp())
    os.chmod(folder, 0o755)
    checkpoints = Checkpoints(folder / "run", keep=1, asynchronous=False)
    checkpoints.save(1, state(1), {"step": 1})
    checkpoints.close()
    os.chmod(folder / "run", 0o555)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:  # the superuser may write anywhere: become somebody else
        with contextlib.suppress(PermissionError):
            os.setuid(65534)
        answer = str(load(folder / "run" / "step-00000001", state(0)))
        try:
            Checkpoints(folder / "run", keep=1, asynchronous=False)
        except UserError as error:
            answer += str(error)
        os.write(writing, answer.encode())
        os._exit(0)
    os.waitpid(child, 0)
    said = os.read(reading, 10_000).decode()
    os.close(reading)
    os.close(writing)
    os.chmod(folder / "run", 0o755)
    shutil.rmtree(folder)
    assert said == f"{{'step': 1}}Cannot write checkpoints to {folder / 'run'}: Permission denied; choose another out."


class Canary:
    """Unpickled, it leaves a file behind."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def forge(path, name, content):
    """Replace a file and make the manifest agree."""
    (path / name).write_bytes(content)
    files = read_manifest(path)
    files[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (path / "manifest.json").write_text(manifest_text(files))


def refusals(path):
    """What `load` and `read` say to a checkpoint that neither may take."""
    for attempt in (lambda: load(path, state(0)), lambda: read(path, "model")):
        with pytest.raises(DamagedCheckpoint) as found:
            attempt()
        assert "\n" not in str(found.value) and str(found.value).isprintable()
        yield str(found.value)


@pytest.mark.parametrize("protocol", [0, 2, pickle.HIGHEST_PROTOCOL])
@pytest.mark.parametrize("name", FILES)
def test_a_pickle_in_place_of_any_file_never_runs(run, tmp_path, name, protocol):
    path, canary = newest(run.folder), tmp_path / "canary"
    content = pickle.dumps(Canary(canary), protocol)
    if name == "manifest.json":
        (path / name).write_bytes(content)
    else:
        forge(path, name, content)
    assert all(f" {name} " in said or "tensors.json" in said for said in refusals(path))
    assert not canary.exists()
    pickle.loads((path / name).read_bytes())
    assert canary.exists()  # the canary is one


def test_a_torch_file_in_place_of_the_tensors_is_so_many_bytes_and_never_runs(run, tmp_path):
    path, canary = newest(run.folder), tmp_path / "canary"
    torch.save(Canary(canary), tmp_path / "saved")
    content = (tmp_path / "saved").read_bytes()
    content = content.ljust(4 * 630, b"\0")[: 4 * 630]
    forge(path, "0-0.bin", content)
    read(path, "model")
    load(path, state(0))
    assert not canary.exists()


def tensors_of(path):
    return json.loads((path / "tensors.json").read_text())


def forge_tensors(path, tree):
    forge(path, "tensors.json", json.dumps(tree).encode())


WEIGHT, BIAS = "model/weight", "model/bias"


def halves(first, second):
    """The weight of (20, 30) as two chunks of ten rows each, at these rows."""

    def change(tree):
        chunk = tree[WEIGHT]["chunks"][0]
        half = {**chunk, "shape": [10, 30]}
        tree[WEIGHT]["chunks"] = [
            {**half, "at": [first, 0]}, {**half, "at": [second, 0], "offset": chunk["offset"] + 4 * 300}
        ]  # fmt: skip

    return change


def setting(*path_and_value):
    *path, value = path_and_value

    def change(tree):
        for key in path[:-1]:
            tree = tree[key]
        tree[path[-1]] = value

    return change


def chunk(name, field, value):
    return setting(name, "chunks", 0, field, value)


FORGED = {
    "overlapping chunks": (halves(0, 0), "do not make up the whole"),
    "chunks that overlap in part": (halves(0, 5), "do not make up the whole"),
    "a chunk beyond the end": (halves(0, 20), "do not make up the whole"),
    "no chunks": (setting(WEIGHT, "chunks", []), "do not make up the whole"),
    "a chunk of fewer dimensions": (chunk(WEIGHT, "at", [0]), "do not make up the whole"),
    "a chunk below zero": (chunk(WEIGHT, "at", [-1, 0]), "shape that cannot be"),
    "a chunk that is no number": (chunk(WEIGHT, "at", [0.0, 0]), "no list of whole numbers"),
    "a truth for a number": (setting(BIAS, "shape", [True]), "no list of whole numbers"),
    "a million dimensions": (setting(WEIGHT, "shape", [1] * 10**6), "no list of whole numbers"),
    "a shape that nothing holds": (setting(WEIGHT, "shape", [2**62, 2**62]), "shape that cannot be"),
    "an empty shape that overflows": (setting(WEIGHT, "shape", [0, 2**62, 8]), "shape that cannot be"),
    "an empty tensor with a chunk": (setting(WEIGHT, "shape", [0, 30]), "do not make up the whole"),
    "a terabyte in a small file": (
        lambda tree: tree[WEIGHT].update(
            shape=[2**38], chunks=[{"at": [0], "shape": [2**38], "file": "0-0.bin", "offset": 0}]
        ),
        "overlap in 0-0.bin or leave a gap|take .* bytes of 0-0.bin",
    ),
    "the same bytes twice": (
        lambda tree: tree.update(more=json.loads(json.dumps(tree[WEIGHT]))), "overlap in 0-0.bin or leave a gap"
    ),
    "a gap in the file": (lambda tree: tree.pop(WEIGHT), "leave a gap|take .* bytes of 0-0.bin"),
    "the end of the file left out": (lambda tree: tree.pop(BIAS), "take .* bytes of 0-0.bin"),
    "a chunk over the end of the file": (
        lambda tree: (tree[BIAS].update(shape=[31]), tree[BIAS]["chunks"][0].update(shape=[31])),
        "take .* bytes of 0-0.bin",
    ),
    "bytes before the file": (chunk(WEIGHT, "offset", -4), "overlap in 0-0.bin or leave a gap"),
    "bytes behind the file": (chunk(WEIGHT, "offset", 10**9), "overlap in 0-0.bin or leave a gap"),
    "another file": (chunk(WEIGHT, "file", "1-0.bin"), "is no file of the checkpoint"),
    "a file elsewhere": (chunk(WEIGHT, "file", "../step-00000001/0-0.bin"), "is no file of the checkpoint"),
    "a file of the system": (chunk(WEIGHT, "file", "/etc/passwd"), "is no file of the checkpoint"),
    "the facts as a tensor": (chunk(WEIGHT, "file", "facts.json"), "is no file of the checkpoint"),
    "a dtype that is a function": (setting(WEIGHT, "dtype", "load"), "no dtype"),
    "a quantised dtype": (setting(WEIGHT, "dtype", "qint8"), "no dtype"),
    "another dtype": (setting(WEIGHT, "dtype", "float64"), "overlap|take .* bytes of 0-0.bin"),
    "a name that no terminal takes": (lambda tree: tree.update({"model/\x1b[2J\n": tree.pop(WEIGHT)}), "no name"),
    "a lone surrogate": (lambda tree: tree.update({"model/\ud800": tree.pop(WEIGHT)}), "no name"),
    "no object": (setting(WEIGHT, [1]), "has not the fields"),
    "one field more": (setting(WEIGHT, "loads", "os.system"), "has not the fields"),
    "chunks that are no list": (setting(WEIGHT, "chunks", {"0": 1}), "are no list"),
}  # fmt: skip


@pytest.mark.parametrize("case", FORGED)
def test_a_forged_list_of_tensors_is_refused_by_a_sentence(run, case):
    path, (change, says) = newest(run.folder), FORGED[case]
    tree = tensors_of(path)
    change(tree)
    forge_tensors(path, tree)
    for said in refusals(path):
        assert " tensors.json cannot be: " in said and re.search(says, said), said


@given(data=st.data(), shape=st.lists(st.integers(1, 6), max_size=3))
@settings(max_examples=60, deadline=None)
def test_chunks_make_up_a_tensor_exactly_where_each_element_is_in_one(data, shape):
    """Random chunks, most of them cuts of a grid and some of them moved, against counting element by element."""
    cuts = [sorted(data.draw(st.sets(st.integers(1, size - 1)))) if size > 1 else [] for size in shape]
    ranges = [list(itertools.pairwise([0, *cut, size])) for cut, size in zip(cuts, shape, strict=True)]
    boxes = data.draw(st.permutations(list(itertools.product(*ranges))))
    if data.draw(st.booleans()) and shape:
        at = data.draw(st.integers(0, len(boxes) - 1))
        moved = tuple((data.draw(st.integers(0, size)), data.draw(st.integers(0, size))) for size in shape)
        boxes[at] = moved if all(begin <= end for begin, end in moved) else boxes[at]
    if data.draw(st.booleans()):
        boxes = boxes[: data.draw(st.integers(0, len(boxes)))] + boxes[:1]
    counted = torch.zeros(shape, dtype=torch.int64)
    for box in boxes:
        counted[tuple(slice(*each) for each in box)] += 1
    chunks = [Chunk(tuple(b for b, _ in box), tuple(e - b for b, e in box), "", 0, 0) for box in boxes]
    if _is_grid(tuple(shape), chunks):
        assert counted.eq(1).all()
    elif counted.eq(1).all():  # whole, and not cut by sharding: an irregular grid, or an empty chunk
        assert (
            any(b == e for box in boxes for b, e in box)
            or len(boxes)
            != torch.tensor([len({box[dimension][0] for box in boxes}) for dimension in range(len(shape))]).prod()
        )


def test_a_forged_list_takes_no_longer_than_it_is_long(run):
    path = newest(run.folder)
    tree = tensors_of(path)
    one = {"shape": [1, 1], "file": "0-0.bin", "offset": 0}
    tree[WEIGHT]["shape"] = [67, 300]
    tree[WEIGHT]["chunks"] = [{**one, "at": [i // 300, min(i % 300, 298)]} for i in range(20_000)]
    forge_tensors(path, tree)
    began = time.process_time()
    assert all("do not make up the whole" in said for said in refusals(path))
    assert time.process_time() - began < 20  # pair by pair it would be minutes


def test_what_the_machine_cannot_hold_is_refused_before_any_of_it_is_read(run):
    path, size = newest(run.folder), 1 << 42
    os.truncate(path / "0-0.bin", size)  # which takes no space
    files = read_manifest(path)
    files["0-0.bin"]["bytes"] = size
    (path / "manifest.json").write_text(manifest_text(files))
    tree = {WEIGHT: {"dtype": "float32", "shape": [size // 4], "chunks": [
        {"at": [0], "shape": [size // 4], "file": "0-0.bin", "offset": 0}]}}  # fmt: skip
    forge_tensors(path, tree)
    with pytest.raises(UserError, match="takes 4,398.0 GB and this machine has"):
        read(path, "model")
    with pytest.raises(UserError, match="as .* this run as|has no model/bias"):
        load(path, state(0))


@pytest.mark.parametrize("name", ["tensors.json", "facts.json", "manifest.json"])
def test_a_list_that_would_fill_the_memory_is_not_read(run, name, monkeypatch):
    path = newest(run.folder)
    monkeypatch.setattr(checkpoint_format, "_LARGEST_JSON", 4096)
    forge(path, "facts.json", b"{}")
    content = b'{"schema": 2' + b" " * 5000 + b"}"
    if name == "manifest.json":
        (path / name).write_bytes(content)
    else:
        forge(path, name, content)
    assert all(f"{name} is larger than" in said for said in refusals(path))


def test_a_checkpoint_of_another_version_is_no_damage(run):
    path = newest(run.folder)
    (path / "manifest.json").write_text(_sealed({"schema": 99, "files": []}))
    with pytest.raises(UserError, match="written by a newer Tilewright"):
        run.load_newest(state(0))
    (path / "manifest.json").write_text(json.dumps({"schema": 1, "files": {}}))
    with pytest.raises(UserError, match="written by an older Tilewright"):
        run.load_newest(state(0))


def test_one_damaged_field_does_not_condemn_the_older_checkpoint(run):
    path = newest(run.folder)
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"schema": 2', '"schema": 3'))
    assert run.load_newest(state(0)) == {"step": 1}
    assert len(run.warnings) == 1 and "manifest.json is not what was saved" in run.warnings[0]


# What must be on the disk before a checkpoint has its name


def test_every_file_and_both_folders_are_synced_in_that_order(run, monkeypatch):
    """Without it a power cut leaves a checkpoint whose name is there and whose bytes are not."""
    log, fsync, rename = [], os.fsync, Path.rename

    def synced(handle):
        log.append(("fsync", Path(os.readlink(f"/proc/self/fd/{handle}")).name))
        fsync(handle)

    def renamed(path, target):
        log.append(("rename", Path(target).name))
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    run.save(3, state(3), {"step": 3})
    writing = f".writing-3-{os.getpid()}"
    assert log == [
        ("fsync", "0-0.bin"), ("fsync", "tensors.json"), ("fsync", "facts.json"), ("fsync", "manifest.json"),
        ("fsync", writing), ("rename", "step-00000003"), ("fsync", run.folder.name),
    ]  # fmt: skip
