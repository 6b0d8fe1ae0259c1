import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from tilewright.cli.data import app
from tilewright.errors import UserError


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def packed(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("hello ")
    (tmp_path / "text" / "b.txt").write_text("world")
    out = tmp_path / "new folder" / "x.tokens"
    done = run("pack", tmp_path / "text", "--out", out, "--json")
    assert done.exit_code == 0, done.output
    return out, json.loads(done.stdout)


def test_pack_writes_one_file_and_check_agrees(packed):
    out, said = packed
    assert said == {"schema": 1, "files": [{"file": str(out), "tokens": 11, "vocabulary": 256, "bytes": 75}]}
    assert out.read_bytes()[64:] == b"hello world"
    assert json.loads(run("check", out, out, "--json").stdout)["files"] == said["files"] * 2
    assert run("check", out).stdout == f"{out}: 11 tokens, vocabulary 256, 75 bytes\n"


@pytest.mark.parametrize("at", [3, 40, 70])
def test_check_finds_a_flipped_byte_in_any_file(packed, at):
    out, _ = packed
    bad = out.with_name("bad.tokens")
    content = bytearray(out.read_bytes())
    content[at] ^= 4
    bad.write_bytes(content)
    done = run("check", out, bad)
    assert isinstance(done.exception, UserError) and str(bad) in str(done.exception)


def test_mistakes_are_sentences(tmp_path):
    assert "There is no file or folder" in str(run("pack", tmp_path / "no", "--out", tmp_path / "x").exception)
    (tmp_path / "empty").touch()
    assert "There is no text" in str(run("pack", tmp_path / "empty", "--out", tmp_path / "x").exception)
    (tmp_path / "a").write_text("a")
    done = run("pack", tmp_path / "a", "--out", tmp_path / "x", "--tokenizer", "gpt2")
    assert "There is no tokenizer 'gpt2'" in str(done.exception)
    assert sorted(os.listdir(tmp_path)) == ["a", "empty"]


def test_help_has_examples_and_nothing_loads_torch(tmp_path):
    assert "tilewright data pack corpus/ --out corpus.tokens" in run("pack", "--help").stdout
    (tmp_path / "a").write_text("a")
    code = """
import sys
from tilewright.cli.data import app
assert "numpy" not in sys.modules
app(standalone_mode=False)
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code, "pack", tmp_path / "a", "--out", tmp_path / "x.tokens"], check=True)
