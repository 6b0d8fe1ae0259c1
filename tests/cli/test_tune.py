"""`tilewright tune` and `tilewright report` as a user runs them, with real trials of a tiny model."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from tilewright.cli.main import app
from tilewright.cli.tune import _notes, _Progress, _table
from tilewright.errors import UserError
from tilewright.train.fields import fields
from tilewright.train.load_config import read
from tilewright.tune import api
from tilewright.tune.report.answer import Answer
from tilewright.tune.report.page import page
from tilewright.tune.search.choose import at_least
from tilewright.tune.store.ledger import Ledger
from tilewright.tune.store.record import Measurement, Record
from tilewright.tune.store.storage import StorageLost, in_folder
from tilewright.tune.worker import jobs
from tune.example_answer import example

TINY = ("model.width=32", "model.layers=1", "model.sequence=32", "global_batch=2", "micro_batch=2")
# All levers but two are set, and so left as they are.
FIXED = (
    "compile=none", "threads=1", "precision=fp32", "optimizer.name=adamw", "model.attention=auto", "model.mlp=auto",
    "model.residual=auto", "model.recompute=none", "model.recompute_budget=0",
)  # fmt: skip
OWN = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    def forward(self, x, y):
        print("a line that is no event")
        return (self.layers(x) - y).square().mean()

def build():
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    return Model(), (x, x.sum(1, keepdim=True))

def broken():
    raise RuntimeError("no weights in /nowhere")

def empty():
    return torch.nn.Tanh(), torch.randn(4, 8)

def no_loss():
    return torch.nn.Linear(8, 2), torch.randn(4, 8)
"""


@pytest.fixture
def tilewright(tmp_path):
    """The command line, in a folder of its own."""
    (tmp_path / "mine.py").write_text(OWN)
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = f"{Path(__file__).parents[2] / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    plain |= {"CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    plain["TILEWRIGHT_CACHE"] = str(tmp_path / "cache")

    def run(*arguments):
        command = [sys.executable, "-c", "from tilewright.cli.main import main; main()", *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=plain, cwd=tmp_path)

    return run


def proved(answer, *verdicts):
    """Runs of so tiny a model differ by chance: where the baseline wins after all, it needs no proof."""
    assert answer.proof.verdict in verdicts if answer.proof is not None or answer.changes else answer.recommended


def test_from_a_run_to_a_report_and_a_configuration_that_trains(tilewright, tmp_path):
    one_lever = (*TINY, *FIXED, "model.loss=fused")
    done = tilewright("tune", *one_lever, "--budget", "600s", "--study", "small", "--json")
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    answer = Answer.from_dict(json.loads(done.stdout))
    assert set(answer.levers) == {"model.gpt_block"} and len(answer.sentences) == 3
    assert {record.outcome for record in answer.records} <= {"done", "stopped early"}
    assert answer.reference.measurement.losses[0] == pytest.approx(5.55, abs=0.5)  # ln 256
    proved(answer, "bit-identical", "same within rounding")
    assert "tokens/s" in done.stderr  # progress, as plain lines where there is no terminal
    folder = tmp_path / "runs/tune/small"
    assert {"best.yaml", "report.html", "answer.json", "study.db", "trials.jsonl"} <= {p.name for p in folder.iterdir()}
    assert read(folder / "best.yaml", []).train.model.width == 32
    trained = tilewright("train", str(folder / "best.yaml"), "steps=2", "--json")
    assert trained.returncode == 0, trained.stderr

    page = folder / "report.html"
    page.unlink()
    again = tilewright("report", "small")
    assert again.returncode == 0 and page.stat().st_size > 10**6, again.stderr
    assert answer.sentences[1] in again.stdout and "Report: runs/tune/small/report.html" in again.stdout
    assert "give it with log.peak_tflops=TFLOPS" in again.stdout and "loss diff" in again.stdout
    assert answer.loss_difference(answer.reference) < 1e-5  # by its fused loss it differs from the standard model

    resumed = tilewright("tune", "--budget", "2s", "--resume")  # the newest, as it was begun
    assert resumed.returncode == 0 and f"trials already finished: {len(answer.records)}" in resumed.stderr
    refused = tilewright("tune", *one_lever, "--study", "small")
    assert refused.returncode == 2 and "continue it with --resume" in refused.stderr


def test_a_model_of_somebody_elses(tilewright, tmp_path):
    fixed = ("compile=none", "threads=1", "precision=fp32", "micro_batch=4", "rules=none")
    done = tilewright("tune", "--model", "mine:build", *fixed, "--numerics", "state", "--budget", "600s", "--json")
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    answer = Answer.from_dict(json.loads(done.stdout))
    assert set(answer.levers) == {"optimizer.name"} and answer.reference.prediction is not None
    assert {r.point["optimizer.name"] for r in answer.records} >= {"adamw", "adamw_8bit", "adamw_bf16"}
    proved(answer, "bit-identical", "same within rounding", "different by design")
    assert answer.own_model == "mine:build" and "Train:" not in done.stdout
    best = next((tmp_path / "runs/tune").iterdir()) / "best.yaml"
    text = f"own_model: mine:build\noptimizer:\n  name: {answer.best.point['optimizer.name']}\n"
    assert best.read_text() == text
    with pytest.raises(UserError, match="levers that `tilewright tune` chose for a model of your own, 'mine:build'"):
        read(best, [])  # as `tilewright train` does, which would train Tilewright's GPT
    # Neither the answer nor the page describes Tilewright's GPT, whose vocabulary this is.
    assert not {"model", "data"} & set(answer.start) and "vocabulary" not in page(answer)
    assert answer.unit == "samples" and "samples/s" in done.stderr and "tokens" not in done.stderr
    assert "samples a second" in answer.sentences[1]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--budget", "0"), "The budget is '0'; give a time above 0, such as 90s, 20m or 2h."),
        (("--budget", "soon"), "give a time above 0"),
        (("--memory", "lots"), "give a size above 0, such as 80GB or 64GiB"),
        (("model.gpt_blok=optimized",), "did you mean model.gpt_block?"),
        (("missing.yaml",), "missing.yaml"),
        (("--numerics", "sloppy"), "choose same, rounding, state, rule"),
        (("--precision-floor", "fp99"), "choose fp32, tf32"),
        (("--search", "model.width"), "'model.width' is no lever; choose all, or"),
        (("--study", "../x"), "A study cannot be named '../x'"),
        (("--resume",), "There is no study in runs/tune to go on with"),
        (("--resume", "--study", "nightyl"), "There is no study nightyl in runs/tune to go on with"),
        (("--try", "model.width=64"), "model.width is not open to the search"),
        (("--model", "mine"), "mine"),
        (("--model", "mine:build", "model.width=32"), "leave model.* and data.* out"),
        (("--storage", "postgresql://127.0.0.1:1/x", *TINY), "127.0.0.1:1"),
        (("--storage", "nonsense", *TINY), "no URL"),
        (("--model", "nowhere:build"), "nowhere"),
        (("--for", "decode", "--hf", "llama"), "takes the folder without --hf: tilewright tune --for decode llama"),
        (("llama", "--for", "decode", "--search", "weights"), "--search is of --for train; leave it out"),
        (("llama", "--for", "prefill", "--numerics", "same"), "--numerics is of --for train; leave it out"),
        (("--model", "mine:biuld"), "did you mean build"),
        (("--model", "mine:broken"), "no weights in /nowhere"),
        (("--model", "mine:empty"), "parameters"),
        (("--model", "mine:no_loss"), "a loss of shape (4, 2); let it return one number"),
        (("--model", "mine:build", "micro_batch=3"), "global batch 4 is not micro batch 3"),
        (("--model", "mine:build", "global_batch=8"), "leave global_batch and accumulation out"),
        (("--out", "/proc/nowhere", *TINY, *FIXED), "/proc/nowhere"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, tuple) else "",
)
def test_a_mistake_is_one_sentence(tmp_path, monkeypatch, arguments, sentence):
    """What the command line prints behind `error:`; that it does, and with exit code 2, is shown above and below."""
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    if "--model" not in arguments:  # which takes a process to see
        monkeypatch.setattr(jobs, "probe", lambda *_, **__: pytest.fail("a machine was measured for nothing"))
    command = typer.main.get_command(app)
    with pytest.raises(UserError) as refused:
        command.main(["tune", *arguments], standalone_mode=False)
    assert sentence in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (TINY, "exists; continue it with --resume"),
        ((*TINY, "--resume"), "is of another configuration or of other levers"),
    ],
)
def test_a_study_that_is_there_is_refused_before_anything_is_measured(tmp_path, monkeypatch, arguments, sentence):
    monkeypatch.setattr(jobs, "probe", lambda *_, **__: pytest.fail("a machine was measured for nothing"))
    folder = tmp_path / "mine"
    folder.mkdir()
    Ledger.open(in_folder(folder), "mine", {"space": "another"}, folder, resume=False).close()
    with pytest.raises(UserError, match=sentence):
        typer.main.get_command(app).main(
            ["tune", *arguments, "--study", "mine", "--out", str(tmp_path)], standalone_mode=False
        )


def test_what_is_known_is_shown_where_the_storage_is_lost(tmp_path, monkeypatch, capsys):
    answer = dataclasses.replace(example(hostile=False), name="study")

    def lost(*arguments, **options):
        error = StorageLost("The storage is out of reach.")
        error.answer = answer
        raise error

    monkeypatch.setattr(api, "tune", lost)
    (tmp_path / "study").mkdir()
    with pytest.raises(StorageLost, match="out of reach"):
        typer.main.get_command(app).main(["tune", "--out", str(tmp_path)], standalone_mode=False)
    assert (tmp_path / "study/report.html").is_file() and "tokens/s" in capsys.readouterr().out


def test_a_log_says_of_each_run_what_it_measured(capsys):
    """Corrected for drift, the baseline would always be as fast as the first time."""
    progress = _Progress()
    progress.begin({"levers": {}, "name": "a study", "finished": 0, "budget": 60.0})
    for drift in (1.0, 0.5):
        found = Measurement(1000, [1 / drift], 1.0, 0.0, [], 1)
        progress.record(Record({}, "reference", "done", measurement=found, drift=drift), None)
    printed = capsys.readouterr().err
    assert "done, 1,000 tokens/s" in printed and "done, 500 tokens/s" in printed


def test_a_speed_that_is_not_known_has_a_question_mark_and_no_place_at_the_top():
    answer = example()
    fastest = max(answer.records, key=at_least)
    others = [record for record in answer.records if record.point != fastest.point]
    shaken = dataclasses.replace(fastest, drift=fastest.drift / 2, doubt=1.5)
    for records, marked in ((answer.records, []), ([*others, shaken], [1])):
        shown = dataclasses.replace(answer, records=records)
        ratios = list(_table(shown, 80).columns[2].cells)
        assert [number for number, ratio in enumerate(ratios) if ratio.endswith("x?")] == marked
        assert any("A speed with a ?" in note for note in _notes(shown)) == bool(marked)


def test_a_configuration_that_fixes_every_lever_says_how_to_open_them(tilewright, tmp_path):
    lines = [name for name, field in fields().items() if field.lever is not None]
    values = dict(item.split("=") for item in (*TINY, *FIXED))
    values |= {"model.gpt_block": "standard", "model.loss": "plain", "cuda_graphs": "false", "rules": "none"}
    done = tilewright("tune", *(f"{name}={values[name]}" for name in lines), "global_batch=2")
    assert done.returncode == 2 and "fixes every lever" in done.stderr and "--search all" in done.stderr


def test_a_report_of_nothing_is_a_sentence(tilewright):
    done = tilewright("report", "nightly")
    assert done.returncode == 2 and "There is no study in runs/tune/nightly" in done.stderr
