"""`tilewright generate` on a model that `tilewright export` has written, and on the run it is from."""

import dataclasses
import json

import pytest
import torch

from tilewright.models import GPT
from tilewright.plan.gpt import LLAMA, GPTConfig
from tilewright.train.checkpoint import Checkpoints

pytest.importorskip("tokenizers", reason="text needs it")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    model = GPT(GPTConfig(width=32, layers=2, heads=2, vocabulary=256, sequence=64, **LLAMA))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    configuration = {"model": dataclasses.asdict(model.config), "data": {"kind": "text", "tokenizer": "bytes"}}
    checkpoints = Checkpoints(folder / "checkpoints", keep=1, asynchronous=False)
    checkpoints.save(1, {"model": model.state_dict()}, {"configuration": configuration})
    checkpoints.close()
    return folder


def test_an_exported_model_writes_text_as_it_comes_and_says_how_fast(run, tmp_path, tilewright):
    assert tilewright("export", run, "--out", tmp_path / "hf")[0] == 0
    code, out, err = tilewright("generate", tmp_path / "hf", "def ", "--max-tokens", 20, "--device", "cpu")
    assert code == 0 and out.endswith("\n") and len(out) > 1
    assert "First token after" in err and "tokens/s" in err and "no measured ceiling of a CPU" in err
    code, printed, _ = tilewright("generate", tmp_path / "hf", "def ", "--max-tokens", 20, "--json")
    found = json.loads(printed)
    assert len(found["tokens"]) == 20 and found["reason"] == "length" and found["prompt_tokens"] == 4
    assert found["tokens_per_second"] > 0 and found["memory_share"] is None
    # A control character of the text must not reach a terminal.
    assert "\x1b" not in out and "".join(each for each in found["text"] if each.isprintable()) in out.replace("\n", "")
    code, printed, _ = tilewright("generate", run, "def ", "--max-tokens", 20, "--json")
    assert code == 0 and json.loads(printed)["tokens"] == found["tokens"]


def test_sampling_and_stop_strings_are_options(run, tilewright):
    arguments = ("generate", run, "ab", "--max-tokens", 30, "--temperature", 1.0, "--top-k", 50, "--seed", 3, "--json")
    whole = json.loads(tilewright(*arguments)[1])
    assert json.loads(tilewright(*arguments, "--pdl")[1])["tokens"] == whole["tokens"]
    stop = whole["text"][8:10]
    cut = json.loads(tilewright(*arguments, "--stop", stop)[1])
    assert cut["text"] == whole["text"][: whole["text"].index(stop)] and cut["reason"] == "stop"


def test_what_changes_nothing_and_what_speculation_gives_is_said(run, tilewright):
    code, _, err = tilewright("generate", run, "abab", "--max-tokens", 9, "--top-p", 0.9, "--device", "cpu")
    assert code == 0 and "--temperature 0 draws nothing" in err and "forward" not in err
    arguments = ("generate", run, "abab", "--max-tokens", 9, "--speculate", 3, "--temperature", 1, "--top-k", 9)
    code, _, err = tilewright(*arguments, "--device", "cpu")
    assert code == 0 and " of them a forward: " in err and "draws nothing" not in err
    found = json.loads(tilewright(*arguments, "--json")[1])
    assert 1 <= found["tokens_per_forward"] <= 4
    assert json.loads(tilewright(*arguments[:5], "--json")[1])["tokens_per_forward"] == 1
    err = tilewright(*arguments[:5], "--device", "cpu", "--pdl")[2]
    assert err.startswith("--pdl changes nothing: PDL is for CUDA.\n")


def test_mistakes_are_one_sentence_and_exit_code_2(run, tmp_path, tilewright):
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "model.safetensors").touch()
    for arguments, sentence in (
        ((run, "ab", "--max-tokens", 100), "are more than the model's 64 positions"),
        ((run, "ab", "--context", 8, "--max-tokens", 20), "more than the cache's context of 8"),
        ((run, "ab", "--context", 800), "context is 800; the model has positions for 2 to 64"),
        ((run, "ab", "--max-tokns", 3), "--max-tokens"), ((run, ""), "The prompt is empty"),
        ((run, "ab", "--dtype", "int3"), "choose bf16, fp16 or fp32"), ((run, "ab", "--device", "tpu"), "cuda or cpu"),
        ((tmp_path / "nothing", "ab"), "is not a folder"), ((tmp_path, "ab"), "no checkpoint"),
        ((bare, "ab"), "has weights and no config.json"),
        ((run, "ab", "--draft", run, "--speculate", 0), "leaves --draft nothing to propose"),
        ((run, "ab", "--temperature", -1, "--max-tokens", 3), "temperature is -1.0"),
    ):  # fmt: skip
        code, _, err = tilewright("generate", *arguments)
        assert code == 2 and sentence in err and err.count("\n") == 1, (arguments, err)
