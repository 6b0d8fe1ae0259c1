"""Models trained here on real text, each once for all tests: bf16 texts are those of transformers, token for token."""

import json
import sys
import time

import pytest

from generate import trained
from generate.models import theirs
from tilewright.cli.main import main
from tilewright.generate import Generator
from tilewright.train.export import byte_tokenizer

pytest.importorskip("transformers", reason="is the other side of the comparison")
pytestmark = pytest.mark.filterwarnings("ignore")
PROMPT = trained.passage()[:24]
AFTER = bytes(trained.passage()[24:280])


@pytest.fixture(scope="module", params=trained.KINDS)
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    trained.train(request.param).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))
    return folder


def test_256_greedy_tokens_in_bf16_are_those_of_transformers(folder, request):
    expected = theirs(trained.train(request.node.callspec.params["folder"]), PROMPT, 256)
    assert bytes(expected) == AFTER, "it has learned the passage"
    assert Generator.from_folder(folder, device="cpu").generate([PROMPT], max_tokens=256)[0].tokens == expected
    eight = Generator.from_folder(folder, device="cpu", kv_cache="int8").generate([PROMPT], max_tokens=128)
    assert eight[0].tokens == expected[:128]


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_the_command_writes_the_text_in_under_a_minute(folder, monkeypatch, capsys):
    arguments = ["generate", str(folder), bytes(PROMPT).decode(), "--max-tokens", "64", "--device", "cpu"]
    monkeypatch.setattr(
        sys, "argv", ["tilewright", *arguments, "--kv-cache", "fp8", "--speculate", "4", "--weights", "int8"]
    )
    began = time.process_time()  # of the processor: a busy machine makes no command slower
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert ended.value.code in (0, None) and time.process_time() - began < 60
    assert out == AFTER[:64].decode() + "\n" and "tokens/s" in err
