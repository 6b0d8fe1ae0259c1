"""What a study without a GPU says of a GPU: predicted, by the plan, and near what was recorded on one."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import typer

from tilewright import hardware
from tilewright.cli.main import app
from tilewright.cli.tune import _notes, _predicted, _Progress, show
from tilewright.errors import UserError
from tilewright.train.load_config import read
from tilewright.tune import api
from tilewright.tune.rehearsal import find_gpu, recorded_path, rehearsal
from tilewright.tune.report.answer import Answer
from tilewright.tune.report.page import page
from tilewright.tune.report.reread import prediction_in
from tilewright.tune.worker import forkserver, jobs
from tune.example_answer import example

RESULTS = Path(__file__).parents[2] / "results/h200"


@pytest.mark.parametrize("file", ["tune_125m_max_autotune.json", "tune_1b.json"])
def test_what_is_predicted_for_an_h200_is_near_what_was_recorded_on_one(file):
    answer = Answer.from_dict(json.loads((RESULTS / file).read_text()))
    start = answer.start
    given = [f"model.preset={start['model']['preset']}", f"global_batch={start['global_batch']}"]
    given.append(f"micro_batch={start['micro_batch']}")
    rows = rehearsal({"it": read(None, given)}, find_gpu("H200-SXM"), search=("micro_batch",))["rows"]
    assert [row["run"] for row in rows[:2]] == ["baseline", "compile default"]
    assert rows[0]["tokens_per_second"] == pytest.approx(answer.reference.tokens_per_second, rel=0.1)
    assert rows[0]["bytes"] == pytest.approx(answer.reference.measurement.bytes, rel=0.05)
    assert rows[-1]["tokens_per_second"] == pytest.approx(answer.best.tokens_per_second, rel=0.12)
    assert "gpt_block optimized" in rows[-1]["run"]


def test_a_model_with_experts_is_predicted_without_what_does_not_know_them(monkeypatch):
    """And without asking a GPU that is not there what it can do."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: pytest.fail("nobody is to be asked"))
    run = read(None, ["model.preset=125m", "global_batch=8", "model.experts=8", "model.gpt_block=optimized"])
    rows = rehearsal({"it": run}, find_gpu("H200-SXM"))["rows"]
    assert len(rows) == 2 and "compile" not in rows[1]["run"]


def test_every_gpu_of_the_table_is_predicted_or_refused_in_a_sentence():
    run = read(None, ["model.preset=125m", "global_batch=8", "model.recompute=none", "model.mlp=auto"])
    speeds = {}
    for name, gpu in hardware.table().items():
        if "bf16" not in gpu.peak_flops:
            with pytest.raises(UserError, match="has no bf16 rate"):
                find_gpu(name)
            continue
        rows = rehearsal({"it": run}, find_gpu(name))["rows"]
        speeds[name] = rows[-1]["tokens_per_second"]
    assert speeds["B200"] > speeds["H100-SXM5"] > speeds["A100-SXM4-80GB"] > speeds["A10"]


def test_what_does_not_fit_is_called_so(capsys):
    found = rehearsal({"70b, 1 x 2048": read(None, ["model.preset=70b", "global_batch=1"])}, find_gpu(None))
    assert all(row["tokens_per_second"] is None and row["ratio"] is None for row in found["rows"])
    assert [str(cell) for cell in _predicted(found).columns[2].cells] == ["does not fit"] * len(found["rows"])


@pytest.fixture
def begun(monkeypatch, tmp_path):
    """What `tilewright tune` says before anything is measured: the probe ends it."""

    class Enough(Exception):
        pass

    def probe(*_, **__):
        raise Enough

    monkeypatch.setattr(jobs, "probe", probe)
    monkeypatch.setattr(forkserver, "start", lambda: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments):
        with pytest.raises(Enough):
            typer.main.get_command(app).main(["tune", *arguments], standalone_mode=False)

    return run


def test_without_a_gpu_the_first_words_are_that_it_is_a_rehearsal(begun, capsys):
    begun()
    first, *rest = capsys.readouterr().err.splitlines()
    text = "\n".join(rest)
    assert first.startswith("This study runs without a GPU, so it is a rehearsal: its speeds are this CPU's")
    assert "Predicted by the plan for one H100-SXM5; not measured" in text
    assert "4 layers of 128, 8 x 128" in text and "125m, 32 x 2048" in text  # this, and what it takes on a GPU
    assert "tilewright report" in text and "results/h200/tune_125m_max_autotune.json" in text
    assert text.index("Predicted") < text.index("measuring what this machine can do")


def test_the_gpu_can_be_chosen_and_the_model_is_the_one_given(begun, capsys):
    begun("model.preset=1b", "global_batch=16", "--gpu", "B200")
    text = capsys.readouterr().err
    assert "for one B200" in text and "1b, 16 x 2048" in text and "125m" not in text and "tune_1b.json" in text


def test_nothing_is_predicted_of_a_model_of_your_own(begun, capsys, tmp_path):
    (tmp_path / "anything.py").write_text("def build():\n    raise AssertionError\n")
    begun("--model", "anything:build")
    text = capsys.readouterr().err
    assert "it is a rehearsal" in text and "nothing is predicted for a GPU" in text and "results/h200/" in text


@pytest.mark.parametrize(
    ("name", "words"), [("H1000", "is not in the table; did you mean"), ("T4", "no bf16 rate for T4")]
)
def test_a_gpu_that_cannot_be_predicted_is_a_sentence_before_anything_starts(monkeypatch, tmp_path, name, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(forkserver, "start", lambda: pytest.fail("a process was started for nothing"))
    with pytest.raises(UserError, match=words):
        typer.main.get_command(app).main(["tune", "--gpu", name], standalone_mode=False)
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def rehearsed():
    answer = example(hostile=False)
    run = read(None, ["model.preset=125m", "global_batch=32"])
    on_gpu = rehearsal({"125m, 32 x 2048": run}, find_gpu(None))
    return dataclasses.replace(answer, ceilings={**answer.ceilings, "device": "cpu"}, on_gpu=on_gpu)


def test_the_answer_and_the_page_of_a_rehearsal_say_so(rehearsed, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    show(rehearsed, tmp_path)
    printed = capsys.readouterr().out
    assert "This was a rehearsal" in printed and "Predicted by the plan for one H100-SXM5" in printed
    text = page(rehearsed)
    assert "A rehearsal" in text and "Predicted by the plan for one H100-SXM5, not measured" in text
    assert Answer.from_dict(json.loads(json.dumps(rehearsed.as_dict()))) == rehearsed
    on_gpu = dataclasses.replace(rehearsed, ceilings={**rehearsed.ceilings, "device": "cuda"}, on_gpu={})
    assert "rehearsal" not in page(on_gpu) and not any("rehearsal" in note for note in _notes(on_gpu))


def test_a_prediction_from_a_stranger_runs_nothing_and_breaks_nothing(rehearsed, tmp_path, capsys):
    row = {**rehearsed.on_gpu["rows"][0], "model": "[/bold]<script>", "run": "[nope"}
    hostile = {**rehearsed.on_gpu, "gpu": "<b>[/]", "recorded": "$(reboot)", "rows": [row]}
    answer = Answer.from_dict({**rehearsed.as_dict(), "on_gpu": hostile})
    show(answer, tmp_path)
    assert "reboot" not in capsys.readouterr().out and "<script>" not in page(answer).split("<script", 1)[0]
    for damaged in ({"rows": []}, {**hostile, "rows": [{}]}, {**hostile, "rows": [{**row, "seconds": "x"}]}):
        (tmp_path / "answer.json").write_text(json.dumps({**rehearsed.as_dict(), "on_gpu": damaged}))
        with pytest.raises(UserError, match="is no answer of a study"):
            typer.main.get_command(app).main(["report", str(tmp_path / "answer.json")], standalone_mode=False)


def test_damaged_facts_are_a_sentence():
    assert prediction_in({}) == {} and prediction_in({"on_gpu": {}}) == {}
    for damaged in ({"on_gpu": 3}, {"on_gpu": [1]}, {"on_gpu": {"rows": None}}, {"on_gpu": {"gpu": "H100"}}):
        with pytest.raises(UserError, match="are damaged; begin it again under another name"):
            prediction_in(damaged)


def test_a_recorded_study_is_opened_by_its_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = recorded_path("tune_125m_short.json") or str(RESULTS / "tune_125m_short.json")
    typer.main.get_command(app).main(["report", path], standalone_mode=False)
    printed = capsys.readouterr().out
    assert "1.63 times as fast" in printed and "Report: tune_125m_short.html" in printed
    assert "Train:" not in printed  # there is no best.yaml
    assert "NVIDIA H200" in (tmp_path / "tune_125m_short.html").read_text()
    with pytest.raises(UserError, match="There is no file nope.json; give a study's folder"):
        typer.main.get_command(app).main(["report", "nope.json"], standalone_mode=False)


def test_a_rehearsal_is_shorter_than_a_study_on_a_gpu():
    assert api.seconds(api.REHEARSAL_BUDGET) <= 120 < api.seconds(api.DEFAULT_BUDGET)


def test_the_time_left_is_not_known_before_the_study_begins():
    progress = _Progress()
    assert "left" not in progress._clock()
    progress.begin({"levers": {}, "name": "a study", "finished": 0, "budget": 60.0})
    assert "left" in progress._clock()
