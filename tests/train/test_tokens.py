import os
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slowness import soon
from tilewright.errors import UserError
from tilewright.train import tokens
from tilewright.train.tokens import MAGIC, Part, Stream, find_files, open_tokens, verify, write_tokens


def tokens_of(*parts):
    stream = Stream(parts)
    return stream.read(0, np.empty(stream.tokens, np.int32)).tolist()


def header(width, vocabulary, count):
    fields = tokens._FIELDS.pack(MAGIC, 1, width, vocabulary, count, bytes(16))
    return fields + tokens._hasher(fields).digest()


@pytest.mark.parametrize(
    ("vocabulary", "width"), [(1, 1), (256, 1), (257, 2), (65536, 2), (65537, 4), (tokens.LARGEST_VOCABULARY, 4)]
)
def test_what_is_written_is_read_in_the_narrowest_type(tmp_path, vocabulary, width):
    path = tmp_path / "new" / "a.tokens"
    pieces = [np.array([0, vocabulary - 1]), np.array([], np.int64), np.array([[vocabulary // 2], [0]], np.uint32)]
    written = write_tokens(path, pieces, vocabulary)
    assert written == open_tokens(path) == verify(path) and written.width == width
    assert tokens_of(written) == [0, vocabulary - 1, vocabulary // 2, 0]
    assert path.stat().st_size == 64 + 4 * width and path.read_bytes()[:8] == MAGIC


@pytest.mark.parametrize("piece", [np.array([256]), np.array([-1]), np.array([1.0]), np.array([], np.int32)])
def test_a_file_that_cannot_be_written_leaves_the_old_one_and_nothing_else(tmp_path, piece):
    path = tmp_path / "a.tokens"
    write_tokens(path, [np.arange(7)], 256)
    with pytest.raises(UserError):
        write_tokens(path, [piece], 256)
    assert tokens_of(verify(path)) == list(range(7)) and os.listdir(tmp_path) == ["a.tokens"]


def test_a_vocabulary_out_of_bounds_and_a_folder_that_cannot_be_are_sentences(tmp_path):
    for vocabulary in (0, -1, tokens.LARGEST_VOCABULARY + 1):
        with pytest.raises(UserError, match="must lie in 1 to 2"):
            write_tokens(tmp_path / "a.tokens", [np.array([0])], vocabulary)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="Cannot write .*File exists"):
        write_tokens(tmp_path / "file" / "a.tokens", [np.array([0])], 1)


def test_a_full_disk_is_a_sentence(tmp_path):
    code = """
import resource, signal, sys, numpy as np
from pathlib import Path
from tilewright.errors import UserError
from tilewright.train.tokens import write_tokens
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
try:
    write_tokens(Path(sys.argv[1]), (np.zeros(1 << 14, np.int64) for _ in range(64)), 9)
except UserError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "a.tokens"], capture_output=True, text=True)
    assert done.stdout.startswith("Cannot write") and "File too large" in done.stdout, done.stderr
    assert os.listdir(tmp_path) == []


def test_memory_does_not_grow_with_the_file(tmp_path):
    tracemalloc.start()
    part = write_tokens(tmp_path / "a.tokens", (np.full(1 << 16, n, np.uint16) for n in range(200)), 50257)
    verify(part.path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert part.tokens * part.width > 2.6e7 and peak < 4e6


def test_a_writer_that_is_killed_leaves_nothing_under_the_name(tmp_path):
    code = """
import sys, time, numpy as np
from pathlib import Path
from tilewright.train.tokens import write_tokens
def pieces():
    while True:
        yield np.zeros(1000, np.int64)
        print("wrote", flush=True)
        time.sleep(0.01)
write_tokens(Path(sys.argv[1]), pieces(), 9)
"""
    process = subprocess.Popen([sys.executable, "-c", code, tmp_path / "a.tokens"], stdout=subprocess.PIPE)
    assert process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "a.tokens").exists()


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    path = tmp_path_factory.mktemp("sound") / "a.tokens"
    write_tokens(path, [np.arange(1000)], 1000)
    return path.read_bytes()


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("scratch") / "x.tokens"


@given(data=st.binary(max_size=200), header=st.booleans())
@settings(max_examples=300, deadline=None)
def test_bytes_that_are_no_token_file_are_one_sentence(scratch, data, header):
    scratch.write_bytes(MAGIC + b"\1\0\0\0" + data if header else data)
    for function in (open_tokens, verify):
        with pytest.raises(UserError) as caught:
            function(scratch)
        assert str(scratch) in str(caught.value) and "\n" not in str(caught.value)


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_every_flipped_bit_is_found_by_verify_and_in_the_header_by_opening(scratch, sound, data):
    at = data.draw(st.integers(0, len(sound) - 1) | st.integers(0, 63))
    damaged = bytearray(sound)
    damaged[at] ^= 1 << data.draw(st.integers(0, 7))
    scratch.write_bytes(damaged)
    with pytest.raises(UserError):
        verify(scratch)
    if at < 64:
        with pytest.raises(UserError):
            open_tokens(scratch)
    else:
        assert open_tokens(scratch).tokens == 1000


@given(length=st.integers(0, 2200))
@settings(max_examples=200, deadline=None)
def test_a_file_of_another_length_is_refused(scratch, sound, length):
    scratch.write_bytes((sound + bytes(300))[:length])
    if length == len(sound):
        assert verify(scratch).tokens == 1000
    else:
        with pytest.raises(UserError, match="cut short|has grown|not a token file"):
            open_tokens(scratch)


def test_a_header_with_a_true_seal_and_absurd_numbers_is_refused(scratch):
    for width, vocabulary, count in ((3, 9, 1), (1, 0, 1), (1, 2**40, 1), (1, 9, 0), (4, 9, 2**62)):
        scratch.write_bytes(header(width, vocabulary, count) + bytes(8))
        with pytest.raises(UserError, match="damaged|cut short"):
            open_tokens(scratch)


def test_what_is_no_file_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "pipe.tokens")
    for path in (tmp_path / "pipe.tokens", tmp_path, tmp_path / "missing"):
        with pytest.raises(UserError, match="is not a file"):
            open_tokens(path)
    with pytest.raises(UserError, match="There is no file or folder"):
        find_files([tmp_path / "pipe.tokens"], lambda path: True)


@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=8),
    reads=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1))),
)
@settings(max_examples=100, deadline=None)
def test_parts_read_as_one(tmp_path_factory, lengths, reads):
    folder = tmp_path_factory.mktemp("parts")
    every = np.arange(sum(lengths))
    parts = [
        write_tokens(folder / str(i), [piece], (50, 300, 70000)[i % 3] + 100)
        for i, piece in enumerate(np.split(every, np.cumsum(lengths)[:-1]))
    ]
    stream = Stream(parts)
    assert stream.tokens == len(every)
    for where, how_many in reads:
        first = int(where * (len(every) - 1))
        count = int(how_many * (len(every) - first))
        assert stream.read(first, np.empty(count, np.int32)).tolist() == every[first : first + count].tolist()


def test_folders_are_walked_in_order_without_links_or_hidden_files(tmp_path):
    inside, outside = tmp_path / "inside", tmp_path / "outside.txt"
    for name in ("b.txt", "a.txt", "deep/er/c.txt", ".hidden", ".git/config", "skip.bin"):
        (inside / name).parent.mkdir(parents=True, exist_ok=True)
        (inside / name).write_text(name)
    outside.write_text("secret")
    (inside / "link.txt").symlink_to(outside)
    (inside / "loop").symlink_to(inside)
    os.mkfifo(inside / "pipe.txt")
    found = find_files([outside, inside, inside / "link.txt"], lambda path: path.suffix == ".txt")
    names = ["outside.txt", "inside/a.txt", "inside/b.txt", "inside/deep/er/c.txt", "inside/link.txt"]
    assert found == [tmp_path / name for name in names]
    with pytest.raises(UserError, match="has no file of the right kind"):
        find_files([inside / "deep"], lambda path: False)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_folder_that_cannot_be_read_is_not_passed_over(tmp_path):
    (tmp_path / "closed").mkdir(mode=0)
    with pytest.raises(UserError, match="Cannot read"):
        find_files([tmp_path], lambda path: True)


def test_more_files_than_a_process_keeps_mapped(tmp_path):
    for i in range(600):
        (tmp_path / str(i)).write_bytes(bytes([i % 251]))
    parts = [Part(tmp_path / str(i), 0, 1, 256, 1) for i in range(600)]
    assert tokens_of(*parts) == [i % 251 for i in range(600)] == tokens_of(*parts)
    assert 0 < Path("/proc/self/maps").read_text().count(str(tmp_path)) <= 512


def test_opening_does_not_read_the_tokens(tmp_path):
    path, count = tmp_path / "a.tokens", 1 << 38
    path.write_bytes(header(1, 256, count))
    os.truncate(path, 64 + count)  # a hole of 256 GiB, which takes minutes to read
    began = time.monotonic()
    part = open_tokens(path)
    assert Stream([part]).read(count - 5, np.empty(5, np.int32)).tolist() == [0] * 5
    assert soon(5, began)


def test_a_token_file_is_on_the_disk_before_it_has_its_name_and_its_name_after(tmp_path, monkeypatch):
    log, fsync, replace = [], os.fsync, os.replace

    def synced(handle):
        log.append(("fsync", os.path.basename(os.readlink(f"/proc/self/fd/{handle}"))[:3]))
        fsync(handle)

    def replaced(old, new):
        log.append(("replace", Path(new).name[:3]))
        replace(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    write_tokens(tmp_path / "abc.tokens", [np.arange(9)], 9)
    assert log == [("fsync", "abc"), ("replace", "abc"), ("fsync", tmp_path.name[:3])]
