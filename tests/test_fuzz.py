"""Files that strangers hand us, mutated: nothing but a sentence may come of them.

Every run draws from another seed, which is printed (TILEWRIGHT_SEED repeats it), for TILEWRIGHT_FUZZ_SECONDS a kind of
file. What was ever found lies in tests/corpus/<kind>/ and is tried first. A new find is written there: commit it with
the fix.
"""

import hashlib
import json
import os
import random
import re
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from tilewright.errors import UserError
from tilewright.models import GPT
from tilewright.plan.gpt import LLAMA, GPTConfig
from tilewright.train import checkpoint, checkpoint_format
from tilewright.train.checkpoint import Checkpoints
from tilewright.train.export import export_huggingface
from tilewright.train.import_ import import_huggingface
from tilewright.train.load_config import read as read_configuration
from tilewright.train.resume import check_facts
from tilewright.train.tokens import open_tokens, write_tokens

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
CORPUS = Path(__file__).parent / "corpus"
SECONDS = float(os.environ.get("TILEWRIGHT_FUZZ_SECONDS", "3"))
WORDS = [
    b"0", b"-1", b"1e400", b"NaN", b"null", b"true", b"[]", b"{}", b'""', b"9" * 5000, b"18446744073709551616", b"\x00",
    b"\xff\xfe", b"\xf0\x9f\xa6\x84", b'"\\ud800"', b"[" * 2000, b"../", b"/etc/passwd", b"!!python/name:os",
    b"&a", b"*a", b"<<", b"${a}", b"---", b"%TAG", b"\n", b"\r", b"\x1b[2J",
]  # fmt: skip
STATE = {"model": {"weight": torch.arange(600.0).view(20, 30), "bias": torch.arange(30.0)}}
FACTS = {
    "step": 1, "samples": 8, "data": {"tokens": 9, "hash": ""}, "configuration": {"model": {"width": 8}},
    "recent_losses": [[1, 2.5]], "skipped_in_a_row": 0,
}  # fmt: skip


class Checkpoint:
    """A checkpoint of which one file is given, and the manifest, where that is another, agrees."""

    def __init__(self, folder, name):
        checkpoints = Checkpoints(folder, keep=1, asynchronous=False)
        checkpoints.save(1, STATE, FACTS)
        checkpoints.close()
        self.path, self.name = folder / "step-00000001", name
        self.sound = [(self.path / name).read_bytes()]
        self.bytes = sorted((self.path / "0-0.bin").read_bytes())

    def check(self, content):
        (self.path / self.name).write_bytes(content)
        if self.name != "manifest.json":
            files = json.loads(self.manifest)["files"]
            files[self.name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            (self.path / "manifest.json").write_text(checkpoint_format.manifest_text(files))
        files, saved, facts = checkpoint._open(self.path)
        check_facts(facts, self.path)
        checkpoint_format.verify(self.path, files, files)
        flat = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in saved.items()}
        checkpoint._fill(self.path, saved, flat, None)
        # Each byte of the file once: nothing uninitialised, nothing twice.
        read = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in flat.values()]
        assert sorted(torch.cat(read).tolist()) == self.bytes

    @property
    def manifest(self):
        if not hasattr(self, "_manifest"):
            self._manifest = (self.path / "manifest.json").read_text()
        return self._manifest


class Configuration:
    """A run.yaml."""

    def __init__(self, folder, name):
        self.path = folder / "run.yaml"
        self.sound = [
            b"steps: 100\nmodel:\n  preset: 125m\n  dropout: 0.1\ndata:\n  paths: [a, 'b c']\nseed: 3\n",
            b"{model: {width: 64, heads: 4}, optimizer: {name: lion, learning_rate: 1e-3}, out: 'runs/${seed}'}\n",
            b"base: other.yaml\neval: {every: 10, held_out: 0.1}\nmicro_batch: 8\nglobal_batch: 1k\n",
        ]
        (folder / "other.yaml").write_text("steps: 7\n")

    def check(self, content):
        self.path.write_bytes(content)
        read_configuration(self.path, [])


class Tokens:
    """A token file."""

    def __init__(self, folder, name):
        self.path = folder / "n.tokens"
        self.sound = [write_tokens(self.path, [np.arange(50)], size).path.read_bytes() for size in (256, 70_000)]

    def check(self, content):
        self.path.write_bytes(content)
        part = open_tokens(self.path)
        assert 0 < part.tokens * part.width <= len(content)


class HuggingFace:
    """The config.json of a Hugging Face folder."""

    def __init__(self, folder, name):
        self.sound = []
        for fields in ({}, LLAMA, {**LLAMA, "kv_heads": 2, "rope_base": 500.0, "tied": False}):
            model = GPT(GPTConfig(width=16, layers=1, heads=4, vocabulary=32, sequence=8, **fields))
            export_huggingface(model, folder / f"hf-{len(self.sound)}")
            self.sound.append((folder / f"hf-{len(self.sound)}" / "config.json").read_bytes())
        self.folders = sorted(folder.glob("hf-*"))

    def check(self, content):
        """In each of the folders: one of them may have the tensors that it calls for."""
        refusals = []
        for folder in self.folders:
            (folder / "config.json").write_bytes(content)
            try:
                model = import_huggingface(folder)
            except UserError as error:
                refusals.append(error)
            else:
                tokens = torch.arange(min(4, model.config.sequence, model.config.vocabulary))[None]
                assert model.eval()(tokens).shape[-1] == model.config.vocabulary == 32
        if len(refusals) == len(self.folders):
            raise refusals[0]


KINDS = {
    "tensors.json": Checkpoint, "manifest.json": Checkpoint, "facts.json": Checkpoint, "run.yaml": Configuration,
    "tokens": Tokens, "config.json": HuggingFace,
}  # fmt: skip


def mutate(rng, content, words):
    """One to four changes: a bit, a cut, a piece twice or elsewhere, a word, a number."""
    for _ in range(rng.randint(1, 4)):
        at, end = sorted(rng.randint(0, len(content)) for _ in range(2))
        end = min(end, at + rng.choice((1, 4, 40, 4000)))
        numbers = [match.span() for match in re.finditer(rb"-?\d+", content)]
        how = rng.randrange(6)
        if how == 0 and at < len(content):
            content = content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]
        elif how == 1:
            content = content[:at] + content[end:]
        elif how == 2:
            content = content[:end] + content[at:]
        elif how == 3:
            content = content[:at] + rng.choice(words) + content[end:]
        elif how == 4 and numbers:
            begin, stop = rng.choice(numbers)
            number = str(
                rng.choice((0, 1, -1, 2**31, 2**62, 2**64, int(content[begin:stop][:20]) * 2, rng.randrange(99)))
            )
            content = content[:begin] + number.encode() + content[stop:]
        else:
            piece = content[at:end]
            where = rng.randint(0, len(content))
            content = content[:where] + piece + content[where:]
    return content[:20_000]


def problem_of(subject, content):
    """What is wrong about how a file is taken; None where it is read, or refused by one sentence."""
    began = time.process_time()
    try:
        subject.check(content)
    except UserError as error:
        said = str(error)
        if "\n" in said or not said.endswith((".", "?")) or len(said) > 1500:
            return f"no sentence: {said!r:.300}"
    except Exception as error:
        return f"{type(error).__name__}: {error!s:.300}"
    return "it takes more than five seconds" if time.process_time() - began > 5 else None


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_but_a_sentence(kind, tmp_path):
    subject = KINDS[kind](tmp_path, kind)
    for content in subject.sound:
        subject.check(content)
    known = sorted((CORPUS / kind).glob("*"))
    assert known, f"tests/corpus/{kind} is missing"
    for path in known:
        assert problem_of(subject, path.read_bytes()) is None, path
    seed = f"{os.environ['TILEWRIGHT_SEED']} {kind}"
    rng, deadline, tried = random.Random(seed), time.monotonic() + SECONDS, 0
    pool = [*subject.sound, *(path.read_bytes() for path in known)]
    while time.monotonic() < deadline:
        content, tried = mutate(rng, rng.choice(pool), WORDS), tried + 1
        problem = problem_of(subject, content)
        if problem:
            found = CORPUS / kind / hashlib.sha256(content).hexdigest()[:16]
            found.write_bytes(content)
            pytest.fail(f"seed {seed}, input {tried}, now in tests/corpus/{kind}/{found.name}: {problem}")


def test_a_crash_is_found_and_kept(tmp_path, monkeypatch):
    """The fuzzer itself: what the reader does not refuse as it should ends up in the corpus."""
    shutil.copytree(CORPUS / "tokens", tmp_path / "corpus" / "tokens")
    monkeypatch.setitem(globals(), "CORPUS", tmp_path / "corpus")
    before = set((tmp_path / "corpus" / "tokens").iterdir())

    def careless(self, content):
        if len(content) > 70 and content not in self.sound:
            raise IndexError("careless")

    monkeypatch.setattr(Tokens, "check", careless)
    with pytest.raises(pytest.fail.Exception, match="now in tests/corpus/tokens/.*IndexError: careless"):
        test_nothing_but_a_sentence("tokens", tmp_path)
    assert len(set((tmp_path / "corpus" / "tokens").iterdir()) - before) == 1
