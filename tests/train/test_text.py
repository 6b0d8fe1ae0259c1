import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from tilewright.errors import UserError
from tilewright.train import text
from tilewright.train.data import open_batches
from tilewright.train.schema import Data
from tilewright.train.text import byte_parts, cached, pack, text_files
from tilewright.train.tokens import Stream, verify

needs_tokenizers = pytest.mark.skipif(text.package_version("tokenizers") is None, reason="tokenizers is not installed")


def quiet(done, total):
    pass


def refuse(done, total):
    raise AssertionError("tokenised where the cache has it")


def tokens_of(part):
    return Stream([part]).read(0, np.empty(part.tokens, np.int32)).tolist()


@pytest.fixture
def tokenizer(tmp_path, monkeypatch):
    """Words by number, `<eos>` among them, in a file that also asks for truncation and padding."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    words = {"<unk>": 0, "<eos>": 1, "a": 2, "b": 3, "c": 4, "\N{EURO SIGN}": 5, "far": 700}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.enable_truncation(2)
    made.enable_padding(length=5)
    path = tmp_path / "tokenizer.json"
    made.save(str(path))
    return str(path)


def entries(tmp_path):
    return sorted(os.listdir(tmp_path / "cache" / "tilewright" / "tokens"))


def test_text_is_what_has_no_zero_byte(tmp_path):
    (tmp_path / "a").write_text("a")
    (tmp_path / "b.bin").write_bytes(b"abc\0def")
    (tmp_path / "c.txt").write_bytes(b"\xff\xfe no UTF-8")
    assert text_files([tmp_path]) == [tmp_path / "a", tmp_path / "c.txt"]
    assert [part.tokens for part in byte_parts(text_files([tmp_path / "b.bin"]))] == [7]  # named, so wanted


def test_packing_bytes_tells_how_far_it_is_and_does_not_overwrite_its_text(tmp_path):
    content = np.random.default_rng(0).bytes(3_000_000)
    (tmp_path / "a").write_bytes(content)
    seen = []
    part = pack([tmp_path / "a"], tmp_path / "a.tokens", "bytes", lambda *event: seen.append(event))
    assert bytes(tokens_of(verify(part.path))) == content and part.vocabulary == 256
    assert len(seen) == 3 and seen[-1] == (3_000_000, 3_000_000)
    with pytest.raises(UserError, match="choose another file"):
        pack([tmp_path / "a"], tmp_path / "a", "bytes", quiet)
    assert (tmp_path / "a").read_bytes() == content


def test_without_the_package_one_sentence_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    for function in (lambda t: cached([tmp_path / "tokenizer.json"], t, quiet),
                     lambda t: pack([tmp_path / "tokenizer.json"], tmp_path / "out", t, quiet)):  # fmt: skip
        with pytest.raises(UserError, match="pip install tokenizers"):
            function(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match="There is no tokenizer 'gpt2'"):
        pack([], tmp_path / "out", "gpt2", quiet)


@needs_tokenizers
def test_all_text_is_tokenised_and_files_end_with_the_end_of_text(tmp_path, tokenizer):
    (tmp_path / "one").write_text("a b c a b c far")
    (tmp_path / "two").write_text("c\nz")
    part = pack([tmp_path / "one", tmp_path / "two"], tmp_path / "x.tokens", tokenizer, quiet)
    assert tokens_of(part) == [2, 3, 4, 2, 3, 4, 700, 1, 4, 0, 1] and part.vocabulary == 701


@needs_tokenizers
@pytest.mark.parametrize("word", ["a b\n", "\N{EURO SIGN} ", "a\N{EURO SIGN}b far\n\n"])
def test_pieces_do_not_change_the_tokens(tmp_path, tokenizer, word, monkeypatch):
    (tmp_path / "one").write_text(word * 500)
    whole = tokens_of(pack([tmp_path / "one"], tmp_path / "whole.tokens", tokenizer, quiet))
    assert 0 not in whole and len(whole) >= 500
    for piece in (7, 16, 100):  # with no line to end at, characters are cut
        monkeypatch.setattr(text, "_PIECE", piece)
        assert tokens_of(pack([tmp_path / "one"], tmp_path / "pieces.tokens", tokenizer, quiet)) == whole


@needs_tokenizers
def test_a_tokenizer_that_is_none_is_one_sentence(tmp_path, tokenizer):
    bad = tmp_path / "bad.json"
    for content in (b"{}", b"\x80\x04K\x01.", b"", b"[" * 5000):
        bad.write_bytes(content)
        with pytest.raises(UserError, match="is not a tokenizer.json"):
            cached([bad], str(bad), quiet)
    assert not [name for name in entries(tmp_path) if not name.endswith(".lock")]


@needs_tokenizers
def test_the_cache_is_used_at_once_and_made_anew_when_text_or_tokenizer_change(tmp_path, tokenizer):
    path = tmp_path / "one"
    path.write_text("a b c")
    first = cached([path], tokenizer, quiet)
    assert tokens_of(first) == [2, 3, 4, 1]
    assert cached([path], tokenizer, refuse) == first
    stat = path.stat()
    path.write_text("c b a")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # same size, and its time of writing set back
    assert tokens_of(cached([path], tokenizer, quiet)) == [4, 3, 2, 1]
    Path(tokenizer).write_text(Path(tokenizer).read_text().replace('"c"', '"d"'))
    assert tokens_of(cached([path], tokenizer, quiet)) == [0, 3, 2, 1]
    folder = tmp_path / "cache" / "tilewright" / "tokens"
    assert folder.stat().st_mode & 0o777 == 0o700 and len(list(folder.glob("*.tokens"))) == 3


@needs_tokenizers
@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "grow", "foreign", "missing"])
def test_a_damaged_entry_is_made_anew(tmp_path, tokenizer, damage):
    path = tmp_path / "one"
    path.write_text("a b c " * 100)
    entry = cached([path], tokenizer, quiet).path
    content = entry.read_bytes()
    time.sleep(0.02)  # the kernel's clock of changes ticks every few milliseconds
    if damage == "missing":
        entry.unlink()
    else:
        flipped = content[:100] + bytes([content[100] ^ 1]) + content[101:]
        damaged = {"flip": flipped, "cut": content[:-1], "empty": b"", "grow": content + b"\0", "foreign": b"x" * 500}
        entry.write_bytes(damaged[damage])
    seen = []
    part = cached([path], tokenizer, lambda *event: seen.append(event))
    assert seen and part.path == entry and verify(entry) and entry.read_bytes() == content
    assert cached([path], tokenizer, refuse) == part


@needs_tokenizers
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_cache_of_somebody_else_is_refused(tmp_path, tokenizer):
    folder = tmp_path / "cache" / "tilewright" / "tokens"
    folder.mkdir(parents=True)
    os.chown(folder, 12345, 12345)
    with pytest.raises(UserError, match="belongs to somebody else"):
        cached([], tokenizer, quiet)


SCRIPT = """
import sys, time
from pathlib import Path
from tilewright.train.text import cached
def progress(done, total):
    print("progress", flush=True)
    time.sleep(float(sys.argv[3]))
print(cached([Path(sys.argv[1])], sys.argv[2], progress).tokens)
"""


def start(path, tokenizer, seconds):
    arguments = [sys.executable, "-c", SCRIPT, str(path), tokenizer, str(seconds)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)


@needs_tokenizers
def test_one_that_is_killed_leaves_nothing_and_of_many_only_one_works(tmp_path, tokenizer):
    path = tmp_path / "one"
    path.write_text("a b c\n" * 10)
    killed = start(path, tokenizer, 100)
    assert killed.stdout.readline() == "progress\n"
    killed.kill()
    killed.communicate()
    assert [name.rpartition(".")[2] for name in entries(tmp_path)] == ["lock", "tmp"]
    together = [start(path, tokenizer, 0.3) for _ in range(3)]
    said = [process.communicate()[0] for process in together]
    assert sorted(said) == ["31\n", "31\n", "progress\n31\n"]
    assert [name.rpartition(".")[2] for name in entries(tmp_path)] == ["lock", "tokens"]


@needs_tokenizers
@pytest.mark.parametrize("workers", [0, 1])
def test_training_reads_what_the_tokenizer_makes(tmp_path, tokenizer, workers, capfd):
    (tmp_path / "one").write_text("a b c " * 10)
    data = Data(paths=[str(tmp_path / "one")], tokenizer=tokenizer, shuffle=False, workers=workers)
    shape = dict(sequence=5, micro_batch=1, accumulation=1, device=torch.device("cpu"))
    batches = open_batches(data, vocabulary=1000, **shape)
    assert [batches.next().tolist() for _ in range(2)] == [[[2, 3, 4, 2, 3, 4]], [[4, 2, 3, 4, 2, 3]]]
    batches.close()
    assert capfd.readouterr().err == ""  # no word about parallelism from a forked tokenizer
    with pytest.raises(UserError, match="model.vocabulary=701"):
        open_batches(data, vocabulary=700, **shape)
