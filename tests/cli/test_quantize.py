"""`tilewright quantize` as a user calls it."""

import dataclasses
import json
import re
import shutil

import pytest

from generate.models import tiny
from tilewright.models import GPT
from tilewright.plan.gpt import LLAMA, GPTConfig
from tilewright.train.checkpoint import Checkpoints
from tilewright.train.export import byte_tokenizer

pytest.importorskip("tokenizers", reason="text needs it")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SHORT = ("--length", 24, "--samples", 4, "--device", "cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama") / "llama"
    tiny("llama", vocab_size=256, hidden_size=64, intermediate_size=128).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))
    return folder


def test_a_folder_is_quantized_checked_and_read(folder, tmp_path, tilewright):
    out = tmp_path / "q"
    arguments = ("--format", "int4", "--group", 64, "--calibrate", "gptq", "--act-order", "--check", *SHORT)
    code, printed, progress = tilewright("quantize", folder, "--out", out, *arguments)
    assert code == 0 and "Quantizing: 3 steps done" in progress
    assert printed.startswith("int4 in groups of 64, the head int8, calibrated by gptq with act-order: ")
    tables = [line for line in printed.splitlines() if re.match("[┏┃┡│└]", line)]
    assert len(tables) > 12 and max(map(len, tables)) <= 80
    assert re.search(r"0\.\d{5} \(at most 0\.\d{5}\)", printed), "the worst token beside the mean, in the same digits"
    for said in ("self_attn.q_proj, k_proj, v_proj", "perplexity", "divergence", "same first choice", "report.html"):
        assert said in printed
    facts = json.loads((out / "quantized.json").read_text())
    assert facts["quality"]["tokens"] == 16 * 23 and facts["layers"]["lm_head"] == {"format": "int8", "version": 1}
    assert facts["layers"]["model.layers.0.mlp.up_proj"]["group"] == 64 and len(facts["layers"]) == 15
    page = (out / "report.html").read_text()
    assert "errors-output" in page and "model.layers.1.mlp.down_proj" in page and "default-src" in page
    code, printed, _ = tilewright("generate", out, "def ", "--max-tokens", 5, "--device", "cpu", "--json")
    assert code == 0 and len(json.loads(printed)["tokens"]) == 5


def test_json_has_all_of_it_and_the_default_folder_is_beside_the_model(folder, tilewright):
    code, printed, _ = tilewright("quantize", folder, "--head", "keep", *SHORT, "--json")
    found = json.loads(printed)
    assert code == 0 and found["out"] == f"{folder}-int8" and found["quality"] is None and found["page"] is None
    assert found["described"] == "int8, the head as it was, rounded to nearest"
    assert len(found["report"]["layers"]) == 8 and all(each["output_error"] for each in found["report"]["layers"])


@pytest.mark.parametrize("name", [".", "../model"])
def test_the_default_folder_is_beside_the_model_however_that_is_named(name, folder, tmp_path, tilewright, monkeypatch):
    shutil.copytree(folder, tmp_path / "model")
    monkeypatch.chdir(tmp_path / "model")
    code, _, _ = tilewright("quantize", name, *SHORT)
    assert code == 0 and (tmp_path / "model-int8" / "quantized.json").exists()


def test_a_text_of_one_s_own_and_layers_that_are_left_out(folder, tmp_path, tilewright):
    text = tmp_path / "text"
    text.write_text("to be or not to be " * 40)
    code, printed, _ = tilewright(
        "quantize", folder, "--out", tmp_path / "q", "--text", text, "--format", "fp8", "--head", "int8",
        "--keep", "*.o_proj", "--most-error", 0.015, "--calibrate", "search", "--check", *SHORT,
    )  # fmt: skip
    assert code == 0 and "Left out: model.layers." in printed and "above most_error=0.015" in printed
    assert "o_proj" not in printed and str(text) in (tmp_path / "q" / "report.html").read_text()


def test_a_run_of_ours_becomes_a_folder(tmp_path, tilewright):
    model = GPT(GPTConfig(width=64, layers=1, heads=2, vocabulary=256, sequence=32, **LLAMA))
    configuration = {"model": dataclasses.asdict(model.config), "data": {"kind": "text", "tokenizer": "bytes"}}
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", keep=1, asynchronous=False)
    checkpoints.save(1, {"model": model.state_dict()}, {"configuration": configuration})
    checkpoints.close()
    code, _, err = tilewright("quantize", tmp_path / "run", *SHORT)
    assert code == 0, err
    code, printed, _ = tilewright("generate", tmp_path / "run-int8", "def ", "--max-tokens", 3, "--device", "cpu")
    assert code == 0 and printed


def test_without_a_tokenizer_errors_are_those_of_weights(folder, tmp_path, tilewright):
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((folder / name).read_bytes())
    code, printed, _ = tilewright("quantize", bare, *SHORT)
    assert code == 0 and "no tokenizer.json to read text with" in printed
    assert "read it with `tilewright.quantize.load`" in printed, "generate needs a tokenizer"
    code, _, err = tilewright("quantize", bare, "--out", tmp_path / "c", "--calibrate", "gptq", *SHORT)
    assert code == 2 and "has no tokenizer.json" in err and not (tmp_path / "c").exists()


BAD = (
    (("--format", "int3"), "--format is 'int3'; choose int8, fp8 or int4"),
    (("--head", "big"), "--head is 'big'"), (("--calibrate", "awq"), "--calibrate is 'awq'"),
    (("--act-order",), "add --calibrate gptq"), (("--zeros",), "--zeros are of int4"),
    (("--group", "64"), "--group is of int4, and --format is int8"),
    (("--most-error", "0"), "--most-error is 0"), (("--samples", "0"), "--samples is 0"),
    (("--format", "int4"), "has 64 inputs, no multiple of 128"), (("--format", "int4", "--group", 7), "group of int4"),
    (("--text", "nothing-there"), "Cannot read nothing-there"), (("--device", "tpu"), "--device is 'tpu'"),
    (("--format", "int4", "--group", "64", "--keep", "*"), "No layer was quantized"),
    (("--keep", "down_proj"), "--keep down_proj names no layer"),
)  # fmt: skip


@pytest.mark.parametrize(("arguments", "says"), BAD, ids=[says for _, says in BAD])
def test_what_cannot_be_done_is_one_sentence_and_leaves_nothing(arguments, says, folder, tmp_path, tilewright):
    code, printed, err = tilewright("quantize", folder, "--out", tmp_path / "q", *SHORT, *arguments)
    assert code == 2 and not printed and says in err.replace("\n", " ") and "Traceback" not in err
    assert not list(tmp_path.iterdir())


def test_text_that_is_too_short_and_folders_of_other_kinds_are_refused(folder, tmp_path, tilewright):
    (tmp_path / "text").write_text("short")
    (tmp_path / "empty").mkdir()
    for arguments, says in (
        ((folder, "--text", tmp_path / "text"), "has 5 tokens, and 96 are read"),
        ((tmp_path / "nothing",), "is not a folder"), ((tmp_path / "empty",), "There is no checkpoint in"),
    ):  # fmt: skip
        code, _, err = tilewright("quantize", *arguments, "--out", tmp_path / "q", *SHORT)
        assert code == 2 and says in err.replace("\n", " "), err
    assert not (tmp_path / "q").exists()


def test_an_interrupt_is_polite(folder, tmp_path, tilewright, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("tilewright.generate.quantizing.quantize_", interrupted)
    code, _, err = tilewright("quantize", folder, "--out", tmp_path / "q", *SHORT)
    assert (
        code == 130 and err.endswith(f"Stopped; {tmp_path / 'q'} was not written.\n") and not list(tmp_path.iterdir())
    )
