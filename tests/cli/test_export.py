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
from tilewright.train.checkpoint import Checkpoints

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
app = typer.Typer()
app.command()(export)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    model = GPT(GPTConfig(width=16, layers=1, heads=2, vocabulary=32, sequence=8))
    checkpoints = Checkpoints(folder / "checkpoints", keep=1, asynchronous=False)
    checkpoints.save(1, {"model": model.state_dict()}, {"configuration": {"model": dataclasses.asdict(model.config)}})
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
    for arguments, sentence in (
        ([folder, "--out", tmp_path / "o", "--format", "gguf"], "format is 'gguf'; choose safetensors or huggingface"),
        ([folder, "--out", tmp_path / "full"], "not empty; choose another folder"),
        ([tmp_path / "nothing", "--out", tmp_path / "o"], "There is no checkpoint"),
        ([tmp_path, "--out", tmp_path / "o"], "manifest.json is missing"),
    ):
        error = CliRunner().invoke(app, [str(argument) for argument in arguments]).exception
        assert isinstance(error, UserError) and sentence in str(error)
    assert not (tmp_path / "o").exists()
