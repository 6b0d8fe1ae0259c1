"""The cache of compiled code: nobody else's is used, and a damaged or half-written entry is made again."""

import getpass
import os
import pickle
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tilewright.errors import UserError
from tilewright.measure import compile_cache
from tilewright.measure.compile_cache import VARIABLES, own_compile_cache
from tilewright.train import loop
from tilewright.tune.worker import trial

SEED = int(os.environ["TILEWRIGHT_SEED"])


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(compile_cache, "_warned", set())
    return tmp_path / "cache"


def write(name, content=b"compiled"):
    """Write a file as a compiler would, and return its path."""
    path = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"], name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def sealed(*names):
    with own_compile_cache():
        return [write(name) for name in names]


def test_both_compilers_get_folders_that_are_the_users_alone(root):
    before = dict(os.environ)
    with own_compile_cache():
        for name, part in VARIABLES.items():
            folder = Path(os.environ[name])
            assert folder.name == part and folder.is_relative_to(root / "compiled")
        with own_compile_cache():  # one inside another uses the same
            assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).is_relative_to(root)
    assert dict(os.environ) == before
    assert {path.stat().st_mode & 0o777 for path in (root, root / "compiled", folder.parent)} == {0o700}


def test_what_was_compiled_is_found_by_the_next_process():
    (path,) = sealed("ab/kernel.py")
    with own_compile_cache():
        assert path.read_bytes() == b"compiled"


def test_other_versions_and_another_gpu_have_a_part_of_their_own(monkeypatch):
    (path,) = sealed("ab/kernel.py")
    found = {path.parents[2]}
    for name, value in (("_gpus", lambda: ["NVIDIA H200"]), ("package_version", lambda name: "9.9")):
        with monkeypatch.context() as patched:
            patched.setattr(compile_cache, name, value)
            with own_compile_cache():
                found.add(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).parent)
    assert len(found) == 3


@pytest.mark.parametrize("damage", ["truncated", "flipped", "emptied", "deleted", "link"])
def test_a_damaged_entry_is_made_again_and_no_other(damage, tmp_path):
    chance = random.Random(SEED)
    bad, beside, other = sealed("ab/kernel.py", "ab/kernel.so", "cd/kernel.py")
    content = bytearray(chance.randbytes(chance.randrange(2, 5000)))
    with own_compile_cache():
        bad.write_bytes(content)
    place = chance.randrange(len(content))
    if damage == "truncated":
        bad.write_bytes(content[:place])
    elif damage == "flipped":
        content[place] ^= 1 << chance.randrange(8)
        bad.write_bytes(content)
    elif damage == "emptied":
        bad.write_bytes(b"")
    else:
        bad.unlink()
        if damage == "link":
            (tmp_path / "elsewhere").write_bytes(content)
            bad.symlink_to(tmp_path / "elsewhere")
    with own_compile_cache():
        # All of its folder: a compiler does not expect half of what it wrote together.
        assert not bad.exists() and not beside.exists() and other.exists(), SEED


def test_what_a_killed_process_was_writing_is_made_again():
    (old,) = sealed("ab/kernel.py")
    child = os.fork()
    if child == 0:
        with own_compile_cache():
            write("cd/kernel.so", b"half of a lib")
            os.kill(os.getpid(), 9)
    os.waitpid(child, 0)
    new = old.parents[1] / "cd/kernel.so"
    assert new.exists()
    with own_compile_cache():
        assert old.exists() and not new.exists()


def test_what_was_written_before_an_error_is_made_again():
    """A full disk, say: the linker leaves half of a library behind."""
    with pytest.raises(OSError), own_compile_cache():
        path = write("ab/kernel.so")
        raise OSError(28, "No space left on device")
    with own_compile_cache():
        assert not path.exists()


def test_nothing_is_deleted_while_somebody_uses_it():
    with own_compile_cache():
        path = write("ab/kernel.py")
        child = os.fork()
        if child == 0:
            for name in VARIABLES:
                os.environ.pop(name)
            with own_compile_cache():
                os._exit(0 if path.exists() else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 and path.exists()


@pytest.mark.parametrize("which", [".", "compiled"])
@pytest.mark.parametrize("how", ["writable", "foreign", "link"])
def test_a_folder_that_others_could_have_written_is_not_used(root, which, how, monkeypatch, caplog, tmp_path):
    sealed("ab/kernel.py")
    if how == "writable":
        (root / which).chmod(0o777)
    elif how == "link":
        (root / which).rename(tmp_path / "elsewhere")
        (root / which).symlink_to(tmp_path / "elsewhere")
    else:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with own_compile_cache():
        used = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        assert not used.is_relative_to(root) and used.parent.stat().st_mode & 0o777 == 0o700
    assert not used.parent.exists() and "What is compiled is not cached" in caplog.text


def test_a_folder_whose_parent_others_can_write_to_is_not_used(root, caplog):
    sealed("ab/kernel.py")
    root.parent.chmod(0o777)
    with own_compile_cache():
        assert not Path(os.environ["TRITON_CACHE_DIR"]).is_relative_to(root)
    assert "other users can replace" in caplog.text
    root.parent.chmod(0o1777)  # as the temporary directory is
    with own_compile_cache():
        assert Path(os.environ["TRITON_CACHE_DIR"]).is_relative_to(root)
    root.parent.chmod(0o700)


def test_a_folder_that_the_user_names_is_used_if_it_is_theirs(tmp_path, monkeypatch, root, caplog):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "mine"))
    with own_compile_cache():
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "mine")
        assert Path(os.environ["TRITON_CACHE_DIR"]).is_relative_to(root)
    (tmp_path / "mine").chmod(0o777)
    with own_compile_cache():
        assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).is_relative_to(root)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "mine")
    assert "TORCHINDUCTOR_CACHE_DIR is not used: other users can write" in caplog.text


@pytest.mark.parametrize("seal", [b"", b"{", b"[1]", b'{"a": 1}', b'{"a": [1, 2, 3]}', b"[" * 100_000, b"\xff"])
def test_a_damaged_seal_is_no_error(seal, root):
    (path,) = sealed("ab/kernel.py")
    (path.parents[2] / "seal.json").write_bytes(seal)
    with own_compile_cache():
        pass


def test_a_part_that_grew_too_large_is_begun_anew(monkeypatch):
    (path,) = sealed("ab/kernel.py")
    monkeypatch.setattr(compile_cache, "LARGEST", 3)
    with own_compile_cache():
        assert not path.exists()


def test_without_a_cache_what_is_compiled_goes_with_the_run(monkeypatch, tmp_path):
    monkeypatch.setenv("TILEWRIGHT_CACHE", "off")
    with own_compile_cache():
        path = write("ab/kernel.py")
    assert not path.exists() and not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_sixteen_processes_at_once(root):
    (shared,) = sealed("ab/kernel.py")
    children = []
    for number in range(16):
        if (child := os.fork()) == 0:
            code = 1
            try:
                for turn in range(5):
                    with own_compile_cache():
                        own = write(f"{number}/{turn}")
                        code = 0 if own.read_bytes() == shared.read_bytes() == b"compiled" else 2
                    if code:
                        break
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 16
    with own_compile_cache():
        assert shared.exists() and not list((shared.parents[2] / "users").iterdir())[1:]


class Canary:
    """Leaves a file behind where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


COMPILED = """
import os, torch
from tilewright.measure.compile_cache import own_compile_cache, redirect_defaults
with own_compile_cache():
    redirect_defaults()
    x = torch.arange(64.0).view(8, 8)
    print(torch.compile(lambda x: x @ x)(x).sum().item())  # a library's matmul: there is no C++ to wait for
    assert torch._inductor.codecache._HEADER_DIR.startswith(os.environ["TILEWRIGHT_CACHE"])
"""


def test_torch_compile_loads_no_pickle_of_a_stranger_and_survives_truncation(tmp_path, root):
    """Inductor's usual folder holds a stranger's entries, and then every entry of ours is cut in half."""
    temporary = tmp_path / "tmp"
    temporary.mkdir(mode=0o700)
    where = {
        **os.environ,
        "TMPDIR": str(temporary),
        "TILEWRIGHT_CACHE": str(root),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    run = [sys.executable, "-c", COMPILED]
    first = subprocess.run(run, env=where, capture_output=True, text=True)
    assert first.returncode == 0, first.stderr
    entries = [path for path in (root / "compiled").rglob("*") if path.is_file()]
    graphs = [path for path in entries if "fxgraph" in path.parts or "aotautograd" in path.parts]
    assert graphs and not list(temporary.glob("torchinductor_*"))
    # The same entries where Inductor looks by itself, each with a payload.
    (folder,) = {path.parents[len(path.relative_to(root / "compiled").parts) - 3] for path in graphs}
    for path in graphs:
        planted = temporary / f"torchinductor_{getpass.getuser()}" / path.relative_to(folder)
        planted.parent.mkdir(parents=True, exist_ok=True)
        planted.write_bytes(pickle.dumps(Canary(tmp_path / "canary")))
    for path in entries:
        if path.name != "seal.json":
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    second = subprocess.run(run, env=where, capture_output=True, text=True)
    assert second.returncode == 0 and second.stdout == first.stdout, second.stderr
    assert "Traceback" not in second.stderr and not (tmp_path / "canary").exists()
    x = torch.arange(64.0).view(8, 8)
    assert float(second.stdout) == (x @ x).sum().item()


@pytest.mark.parametrize("who", ["train", "trial"])
def test_train_and_trials_compile_in_a_folder_of_our_own(who, root, tmp_path, monkeypatch):
    from train.tiny import RUN

    seen = []

    def note(*_, **__):
        seen.append(os.environ.get("TORCHINDUCTOR_CACHE_DIR", ""))
        raise UserError("far enough")

    if who == "train":
        monkeypatch.setattr(loop, "_Run", note)
        with pytest.raises(UserError, match="far enough"):
            loop.train(RUN)
    else:
        monkeypatch.setattr(trial, "measure", note)
        trial.attempt('{"kind": "measure"}', lambda event: None)
    assert Path(seen[0]).is_relative_to(root / "compiled")
