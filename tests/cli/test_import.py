import json
import sys

import pytest
import torch

from tilewright.cli import main
from tilewright.models import GPT
from tilewright.plan.gpt import LLAMA, GPTConfig
from tilewright.train.export import export_huggingface, load_model

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("import") / "hf"
    export_huggingface(GPT(GPTConfig(width=16, layers=1, heads=2, vocabulary=32, sequence=8, **LLAMA)), path)
    return path


def tilewright(monkeypatch, *arguments):
    """Run a command in this process; its exit code."""
    monkeypatch.setattr(sys, "argv", ["tilewright", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        main.main()
    return stopped.value.code


def test_a_folder_becomes_a_run_that_trains_and_is_exported(folder, tmp_path, monkeypatch, capsys):
    run = tmp_path / "runs" / "llama"
    assert tilewright(monkeypatch, "import", folder, "--out", run, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["config"] == str(run / "config.yaml") and found["parameters"] == load_model(run).config.parameters
    assert tilewright(monkeypatch, "export", run, "--out", tmp_path / "back") == 0
    names = ("config.json", "model.safetensors")
    assert all((tmp_path / "back" / name).read_bytes() == (folder / name).read_bytes() for name in names)
    arguments = ("steps=1", "device=cpu", "data.kind=synthetic", "data.workers=0", "micro_batch=2")
    assert tilewright(monkeypatch, "train", run / "config.yaml", *arguments) == 0
    assert "weights that were imported" in capsys.readouterr().out
    assert (run / "checkpoints" / "step-00000001").exists()
    assert tilewright(monkeypatch, "train", run / "config.yaml", *arguments, "steps=2") == 0
    assert "goes on from step 1" in capsys.readouterr().out


def test_what_to_do_next_is_said(folder, tmp_path, monkeypatch, capsys):
    assert tilewright(monkeypatch, "import", folder, "--out", tmp_path / "run") == 0
    said = capsys.readouterr().out
    assert f"begin with `tilewright train {tmp_path / 'run' / 'config.yaml'}`" in said and "no tokenizer.json" in said
    assert tilewright(monkeypatch, "train", tmp_path / "run" / "config.yaml") == 2
    assert "data.paths" in capsys.readouterr().err


def test_mistakes_are_one_sentence_and_exit_code_2(folder, tmp_path, monkeypatch, capsys):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "x").touch()
    (tmp_path / "pickle").mkdir()
    (tmp_path / "pickle" / "config.json").write_text((folder / "config.json").read_text())
    (tmp_path / "pickle" / "pytorch_model.bin").touch()
    before = sorted(tmp_path.rglob("*"))
    for arguments, sentence in (
        ([tmp_path / "nothing", "--out", tmp_path / "o"], "is not a folder"),
        ([tmp_path, "--out", tmp_path / "o"], "has no config.json"),
        ([folder, "--out", tmp_path / "taken"], "not empty; choose another folder"),
        ([tmp_path / "pickle", "--out", tmp_path / "o"], "a pickle, which can run code and is not read"),
        ([folder], "see `tilewright import --help`"),
    ):
        assert tilewright(monkeypatch, "import", *arguments) == 2
        said = capsys.readouterr().err
        assert sentence in said and said.count("\n") == 1 and "Traceback" not in said
    assert sorted(tmp_path.rglob("*")) == before
