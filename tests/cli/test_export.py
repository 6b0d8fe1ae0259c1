import dataclasses
import json

import pytest
import torch
import typer
from safetensors.torch import load_file
from typer.testing import CliRunner

from tilewright.cli.export import export
from tilewright.errors import UserError
from tilewright.models import GPT
from tilewright.plan.gpt import GPTConfig
from tilewright.train import export as exporting
from tilewright.train.checkpoint import Checkpoints
from tilewright.train.export import byte_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
app = typer.Typer()
app.command()(export)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    model = GPT(GPTConfig(width=16, layers=1, heads=2, vocabulary=32, sequence=8))
    configuration = {"model": dataclasses.asdict(model.config), "data": {"kind": "text", "tokenizer": "bytes"}}
    checkpoints = Checkpoints(folder / "checkpoints", keep=1, asynchronous=False)
    checkpoints.save(1, {"model": model.state_dict()}, {"configuration": configuration})
    checkpoints.close()
    return folder, model


def test_a_run_is_exported_in_either_format(run, tmp_path):
    folder, model = run
    done = CliRunner().invoke(app, [str(folder), "--out", str(tmp_path / "hf"), "--json"])
    assert done.exit_code == 0 and json.loads(done.stdout)["parameters"] == model.config.parameters
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["model_type"] == "gpt2"
    done = CliRunner().invoke(app, [str(folder), "--out", str(tmp_path / "plain"), "--format", "safetensors"])
    assert done.exit_code == 0 and str(tmp_path / "plain") in done.stdout
    weights = load_file(tmp_path / "plain" / "model.safetensors")
    assert weights.keys() == model.state_dict().keys() and torch.equal(weights["token.weight"], model.token.weight)


def test_mistakes_are_sentences(run, tmp_path):
    folder, _ = run
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    study = tmp_path / "study"
    study.mkdir()
    (study / "trials.jsonl").touch()
    for arguments, sentence in (
        ([folder, "--out", tmp_path / "o", "--format", "gguf"], "format is 'gguf'; choose safetensors or huggingface"),
        ([folder, "--out", tmp_path / "full"], "not empty; choose another folder"),
        ([tmp_path / "nothing", "--out", tmp_path / "o"], "There is no checkpoint"),
        ([tmp_path, "--out", tmp_path / "o"], "There is no checkpoint in"),
        (
            [study, "--out", tmp_path / "o"],
            f"is a study, which keeps no weights; train its answer with `tilewright train {study / 'best.yaml'}`",
        ),
    ):
        error = CliRunner().invoke(app, [str(argument) for argument in arguments]).exception
        assert isinstance(error, UserError) and sentence in str(error)
    assert not (tmp_path / "o").exists()


def test_an_export_has_its_tokenizer_and_the_permissions_of_any_new_file(run, tmp_path):
    done = CliRunner().invoke(app, [str(run[0]), "--out", str(tmp_path / "hf"), "--json"])
    assert done.exit_code == 0 and json.loads(done.stdout)["note"] == ""
    (tmp_path / "new").touch()
    files = {path.name: path.stat().st_mode for path in (tmp_path / "hf").iterdir()}
    assert files.keys() == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert set(files.values()) == {(tmp_path / "new").stat().st_mode}
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    made = tokenizers.Tokenizer.from_file(str(tmp_path / "hf/tokenizer.json"))
    text = "def f(x):\n\treturn 'caf\u00e9 \U0001f600'  # \x00\x7f"
    assert made.encode(text).ids == list(text.encode()) and made.decode(list(text.encode())) == text


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"kind": "tokens", "tokenizer": "bytes"}, "was not trained on text"),
        ({"kind": "text", "tokenizer": "SECRET"}, "no tokenizer.json at"),
        ({"kind": "text", "tokenizer": "/nowhere/tokenizer.json"}, "no tokenizer.json at"),
        ([], "was not trained on text"),
        ({"kind": "text", "tokenizer": "TOKENIZER"}, ""),
    ],
)
def test_a_checkpoint_names_no_file_but_a_tokenizer(data, sentence, tmp_path, monkeypatch):
    (tmp_path / "secret").write_text("a key that nobody should publish")
    (tmp_path / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))
    if isinstance(data, dict):
        places = {"SECRET": str(tmp_path / "secret"), "TOKENIZER": str(tmp_path / "tokenizer.json")}
        data = {**data, "tokenizer": places.get(data["tokenizer"], data["tokenizer"])}
    monkeypatch.setattr(exporting, "_facts", lambda source: (source, {"configuration": {"data": data}}))
    content, note = exporting.tokenizer_of(tmp_path)
    assert (content is None) == bool(sentence) and sentence in note
    assert content is None or json.loads(content) == byte_tokenizer()
