"""The cache on disk: what is found is what was stored, and nothing else is ever found."""

from __future__ import annotations

import errno
import hashlib
import logging
import os

import pytest

from tilewright.runtime import disk_cache

KEY, OTHER = disk_cache.make_key("one"), disk_cache.make_key("other")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(disk_cache, "_refused", set())
    return tmp_path / "cache"


def only_file(folder):
    (path,) = (folder / "kernels").iterdir()
    return path


@pytest.mark.parametrize(
    "payload", [b"", b"a cubin\n\0\n with lines", os.urandom(100_000)], ids=["empty", "lines", "long"]
)
def test_what_is_stored_is_found_under_its_key_alone(payload, folder):
    assert disk_cache.get(KEY) is None
    disk_cache.put(KEY, payload)
    assert disk_cache.get(KEY) == payload and disk_cache.get(OTHER) is None
    disk_cache.put(KEY, b"later")
    assert disk_cache.get(KEY) == b"later"
    assert [path.stat().st_mode & 0o777 for path in (folder, folder / "kernels", only_file(folder))] == [
        0o700,
        0o700,
        0o600,
    ]


def test_a_key_depends_on_every_part():
    parts = [
        ["cubin", {"a.cuh": "x"}, ["-DA=1"]],
        ["cubin", {"a.cuh": "y"}, ["-DA=1"]],
        ["cubin", {"a.cuh": "x"}, ["-DA=2"]],
    ]
    parts += [
        ["cubin", {"b.cuh": "x"}, ["-DA=1"]],
        ["cubin", {"a.cuh": "x"}, ["-DA=1", ""]],
        ["other", {"a.cuh": "x"}, ["-DA=1"]],
    ]
    assert len({disk_cache.make_key(*each) for each in parts}) == len(parts)


def test_reading_makes_no_folder(folder):
    assert disk_cache.get(KEY) is None and not folder.exists()


@pytest.mark.parametrize("length", [0, 1, 20, 90, 140, -1])
def test_a_truncated_entry_is_missing_and_is_made_again(length, folder):
    disk_cache.put(KEY, b"payload")
    path = only_file(folder)
    path.write_bytes(path.read_bytes()[:length])
    assert disk_cache.get(KEY) is None
    disk_cache.put(KEY, b"payload")
    assert disk_cache.get(KEY) == b"payload"


def test_an_entry_with_any_bit_flipped_is_missing(folder):
    disk_cache.put(KEY, b"payload")
    path = only_file(folder)
    whole = path.read_bytes()
    for position in range(len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 4]) + whole[position + 1 :])
        assert disk_cache.get(KEY) is None, position
    path.write_bytes(whole)
    assert disk_cache.get(KEY) == b"payload"


def test_an_entry_under_the_name_of_another_is_missing(folder):
    disk_cache.put(KEY, b"payload")
    only_file(folder).rename(folder / "kernels" / OTHER)
    assert disk_cache.get(OTHER) is None


@pytest.mark.parametrize("which", ["", "kernels"])
@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_a_folder_that_others_can_write_to_is_refused_with_one_warning(mode, which, folder, caplog):
    disk_cache.put(KEY, b"payload")
    (folder / which).chmod(mode)
    assert disk_cache.get(KEY) is None
    disk_cache.put(OTHER, b"payload")
    assert not (folder / "kernels" / OTHER).exists()
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "other users can write to" in record.getMessage() and "TILEWRIGHT_CACHE" in record.getMessage()
    (folder / which).chmod(0o700)
    assert disk_cache.get(KEY) == b"payload"


def test_a_folder_of_another_user_is_refused(folder, caplog, monkeypatch):
    disk_cache.put(KEY, b"payload")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert disk_cache.get(KEY) is None
    disk_cache.put(OTHER, b"payload")
    assert not (folder / "kernels" / OTHER).exists()
    assert [record.getMessage() for record in caplog.records if "belongs to another user" in record.getMessage()]


@pytest.mark.parametrize("which", ["", "kernels"])
def test_a_symbolic_link_is_refused(which, folder, caplog, tmp_path):
    disk_cache.put(KEY, b"payload")
    (folder / which).rename(tmp_path / "elsewhere")
    (folder / which).symlink_to(tmp_path / "elsewhere")
    assert disk_cache.get(KEY) is None
    disk_cache.put(OTHER, b"payload")
    assert not list((tmp_path / "elsewhere").rglob(OTHER))
    assert "is a symbolic link" in caplog.text


def test_an_entry_that_is_a_link_or_that_others_can_write_to_is_missing(folder, tmp_path):
    disk_cache.put(KEY, b"payload")
    path = only_file(folder)
    path.chmod(0o622)
    assert disk_cache.get(KEY) is None
    path.chmod(0o600)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert disk_cache.get(KEY) is None
    disk_cache.put(KEY, b"new")  # takes the link's place, not its target's
    assert disk_cache.get(KEY) == b"new" and b"payload" in (tmp_path / "elsewhere").read_bytes()


@pytest.mark.parametrize("value", ["off", "0"])
def test_it_can_be_switched_off(value, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TILEWRIGHT_CACHE", value)
    disk_cache.put(KEY, b"payload")
    assert disk_cache.get(KEY) is None and not list(tmp_path.iterdir())


def test_the_folder_is_the_users_own_by_default(monkeypatch, tmp_path):
    monkeypatch.delenv("TILEWRIGHT_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert disk_cache.cache_root() == tmp_path / "xdg" / "tilewright"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert disk_cache.cache_root() == tmp_path / ".cache" / "tilewright"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT])
@pytest.mark.parametrize("function", ["open", "mkdir", "rename"])
def test_a_full_or_read_only_disk_is_no_error(function, code, folder, monkeypatch):
    def fails(*_, **__):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr(os, function, fails)
        disk_cache.put(KEY, b"payload")
    assert disk_cache.get(KEY) is None
    assert not [path for path in folder.rglob("*") if path.is_file()]  # no temporary file stays
    disk_cache.put(KEY, b"payload")
    assert disk_cache.get(KEY) == b"payload"


def test_a_file_in_the_place_of_a_folder_is_no_error(folder):
    folder.write_text("in the way")
    disk_cache.put(KEY, b"payload")
    assert disk_cache.get(KEY) is None


def write_and_read(number):
    keys = [disk_cache.make_key("shared", each) for each in range(4)]
    for turn in range(30):
        key = keys[(turn + number) % 4]
        found = disk_cache.get(key)
        # Whatever is found was written whole, by one of the processes.
        if found is not None and hashlib.sha256(found[64:]).hexdigest().encode() != found[:64]:
            return 1
        body = os.urandom(200_000)
        disk_cache.put(key, hashlib.sha256(body).hexdigest().encode() + body)
        if disk_cache.get(key) is None:
            return 2
    return 0


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # forked children touch files alone
def test_sixteen_processes_at_once_never_see_half_an_entry(folder):
    children = []
    for number in range(16):
        if (child := os.fork()) == 0:
            code = 3
            try:
                code = write_and_read(number)
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 16
    assert len(list((folder / "kernels").iterdir())) == 4
