"""What a disk, a copy or an attacker does to a checkpoint is found, named, and never run."""

import contextlib
import hashlib
import io
import json
import os
import pickle
import resource
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from tilewright.errors import UserError
from tilewright.train.checkpoint import Checkpoints, load, newest, read
from tilewright.train.checkpoint_files import DamagedCheckpoint, manifest_text, read_facts, read_manifest

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
FILES = ["__0_0.distcp", ".metadata", "facts.json", "manifest.json"]


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
            with pytest.raises(UserError, match="damaged|newer Tilewright"):  # the latter where it hits the schema
                load(path.parent, state(0))
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
    if threads == 4:  # all but one of DCP's threads lose their errors
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
    assert said.startswith("File too large writing ") and ".distcp" in said
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


def torch_saved(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def assert_refused(path, canary):
    for attempt in (lambda: load(path, state(0)), lambda: read(path, "model")):
        with pytest.raises(DamagedCheckpoint) as found:
            attempt()
        assert not canary.exists() and "\n" not in str(found.value)
    return str(found.value)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_in_place_of_the_metadata_never_runs(run, tmp_path, protocol):
    path, canary = newest(run.folder), tmp_path / "canary"
    forge(path, ".metadata", pickle.dumps(Canary(canary), protocol))
    assert ".metadata cannot be read" in assert_refused(path, canary)
    pickle.loads((path / ".metadata").read_bytes())
    assert canary.exists()  # the canary is one


def metadata_of(path):
    return pickle.loads((path / ".metadata").read_bytes())


def test_an_object_in_place_of_a_tensor_never_runs(run, tmp_path):
    # DCP's own planner loads what `.metadata` declares to be no tensor with weights_only=False.
    path, canary = newest(run.folder), tmp_path / "canary"
    metadata, content = metadata_of(path), torch_saved(Canary(canary))
    info = metadata.storage_data.pop(MetadataIndex("model/bias", [0]))
    info.offset, info.length = 0, len(content)
    metadata.storage_data[MetadataIndex("model/bias")] = info
    metadata.state_dict_metadata["model/bias"] = BytesStorageMetadata()
    forge(path, "__0_0.distcp", content)
    forge(path, ".metadata", pickle.dumps(metadata))
    assert ".metadata cannot be read" in assert_refused(path, canary)


@pytest.mark.parametrize("saved", [torch_saved, pickle.dumps])
def test_a_pickle_in_place_of_a_tensors_bytes_never_runs(run, tmp_path, saved):
    path, canary = newest(run.folder), tmp_path / "canary"
    metadata, content = metadata_of(path), saved(Canary(canary))
    for info in metadata.storage_data.values():
        info.offset, info.length = 0, len(content)
    forge(path, "__0_0.distcp", content)
    forge(path, ".metadata", pickle.dumps(metadata))
    assert "__0_0.distcp cannot be read" in assert_refused(path, canary)


def test_files_outside_of_the_checkpoint_are_never_opened(run, tmp_path):
    path, canary = newest(run.folder), tmp_path / "canary"
    metadata = metadata_of(path)
    for outside in ("../step-00000001/__0_0.distcp", "/etc/passwd", str(path / "__0_0.distcp")):
        for info in metadata.storage_data.values():
            info.relative_path = outside
        forge(path, ".metadata", pickle.dumps(metadata))
        assert "is no file of the checkpoint" in assert_refused(path, canary)
        files = read_manifest(path)
        sound = (path / "manifest.json").read_text()
        (path / "manifest.json").write_text(manifest_text({**files, outside: {"bytes": 1, "sha256": "0" * 64}}))
        assert "manifest.json is not what was saved" in assert_refused(path, canary)
        (path / "manifest.json").write_text(sound)


def test_pieces_that_do_not_make_up_a_tensor_are_refused(run, tmp_path):
    path = newest(run.folder)
    metadata = metadata_of(path)
    metadata.state_dict_metadata["model/weight"].chunks.clear()
    forge(path, ".metadata", pickle.dumps(metadata))
    assert "is not whole" in assert_refused(path, tmp_path / "canary")


def test_a_checkpoint_of_a_newer_version_is_no_damage(run):
    path = newest(run.folder)
    (path / "manifest.json").write_text(json.dumps({"schema": 99, "files": []}))
    with pytest.raises(UserError, match="written by a newer Tilewright"):
        run.load_newest(state(0))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["schema", "files", "bytes", "x"]), inner),
)
FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FUZZ
@given(content=st.binary() | JSON.map(lambda value: json.dumps(value).encode()) | st.just(b"[" * 100_000))
def test_any_bytes_in_place_of_a_json_file_are_a_sentence(tmp_path, content):
    for name, read_it in (("manifest.json", read_manifest), ("facts.json", read_facts)):
        (tmp_path / name).write_bytes(content)
        try:
            read_it(tmp_path)
        except UserError as error:
            assert "\n" not in str(error)
        else:
            assert isinstance(json.loads(content), dict)


@FUZZ
@given(place=st.floats(0, 1), content=st.binary(min_size=1, max_size=30))
def test_any_bytes_in_the_metadata_are_a_sentence_or_the_same_tensors(run, place, content):
    path = newest(run.folder)
    sound = (path / ".metadata").read_bytes()
    at = int(place * len(sound))
    forge(path, ".metadata", sound[:at] + content + sound[at + len(content) :])
    try:
        read(path, "model")
    except UserError as error:
        assert "\n" not in str(error)
    finally:
        forge(path, ".metadata", sound)
