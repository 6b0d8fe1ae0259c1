"""Studies over several ranks: the layout is a lever like any other, and the answer says how to start what it found."""

import json
import shlex

import pytest
import typer
import yaml

import tilewright
from tilewright.cli.main import app
from tilewright.errors import UserError
from tilewright.train.check_ranks import check_ranks
from tilewright.train.load_config import read, split_arguments
from tilewright.tune import api
from tilewright.tune.report.anatomy import configuration
from tilewright.tune.report.answer import Answer
from tilewright.tune.report.page import page
from tilewright.tune.report.reread import reread
from tilewright.tune.search.pace import Pace
from tilewright.tune.search.space import open_space
from tilewright.tune.settings import Settings, Shown
from tilewright.tune.store.proof import VERDICTS
from tilewright.tune.study import run
from tilewright.tune.worker import forkserver, jobs
from tilewright.tune.worker.jobs import probe, probe_links
from tune import light_child

FIXED = (
    "model.width=32", "model.heads=4", "model.layers=2", "model.sequence=32", "model.vocabulary=64", "device=cpu",
    "global_batch=4", "micro_batch=1", "precision=fp32", "compile=none", "optimizer.name=adamw", "model.loss=plain",
    "model.attention=auto", "model.mlp=auto", "model.residual=auto", "model.recompute=none", "data.workers=0",
    "model.recompute_budget=0", "data.kind=synthetic",
)  # fmt: skip
RULE = {
    "step_seconds": 0.4,
    "levers": {
        "parallel.pp": {"2": [0.7, 0.9]}, "parallel.tp": {"2": [0.8, 0.9]}, "model.gpt_block": {"optimized": [0.8, 0.9]}
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))


def settings(folder, rule=None, ranks=2, **changes):
    command = light_child.command(rule or RULE)
    space = open_space(read(None, FIXED), device="cpu", numerics="same", ranks=ranks)
    machine = probe("cpu", command=command) | {"links": probe_links(ranks, space.start, command)}
    given = {"space": space, "machine": machine, "folder": folder, "name": folder.name, "command": command}
    return Settings(**(given | {"storage": f"sqlite:///{folder}/study.db", "budget": 60.0} | changes))


def test_the_best_layout_is_found_beside_the_other_levers_and_proved(tmp_path):
    given = settings(tmp_path / "study")
    answer = run(given)
    assert answer.changes == {"parallel": "pp2", "model.gpt_block": "optimized"} and answer.recommended
    assert answer.ranks == 2 and answer.ratio == pytest.approx(1 / (0.7 * 0.8), rel=1e-3)
    assert "with parallel=pp2 losses and gradients in float32 are those of one process" in answer.proof.why
    gives = {each.lever: each.tokens_per_second / answer.best.tokens_per_second for each in answer.ablations}
    assert gives == pytest.approx({"parallel": 0.7, "model.gpt_block": 0.8}, rel=1e-3)
    assert all(record.prediction.parts["communication"] > 0 for record in answer.records)
    best = tmp_path / "study/best.yaml"
    command = shlex.split(answer.ready)
    assert command == ["tilewright", "train", str(best), "--nproc", "2"]
    layout, sizes = check_ranks(read(*split_arguments(command[2:3])).train, 2)
    assert str(layout) == "pp 2" and sizes.global_ == 4
    assert "parallel to pp2" in answer.sentences[0] and "2 ranks on light" in page(answer)
    assert "tilewright train --nproc 2" in page(answer)
    assert configuration(answer) == yaml.safe_load(best.read_text())
    assert Answer.from_dict(json.loads((tmp_path / "study/answer.json").read_text())) == answer
    assert reread(tmp_path / "study", "study") == answer


def test_a_layout_that_trains_something_else_is_struck_and_the_next_is_proved(tmp_path):
    answer = run(settings(tmp_path / "study", {**RULE, "norms": {"pp": 2.0}}))
    fast = [record.point for record in answer.records if record.point["parallel"] == "pp2"]
    assert len(fast) > 1  # all of them faster than what is recommended
    assert answer.changes == {"model.gpt_block": "optimized"} and answer.recommended
    assert answer.ratio == pytest.approx(1 / 0.8, rel=1e-3)


def test_no_layout_is_recommended_where_its_ranks_were_not_compared(tmp_path):
    only = {**RULE, "levers": {"parallel.pp": {"2": [0.7, 0.9]}}, "faults": []}
    given = settings(tmp_path / "study", only)

    def silent(job, *rest):
        found = jobs_run(job, *rest)
        return found if job["kind"] != "first steps" else jobs.Ended("error", "no such thing", "", None)

    jobs_run = jobs.run_child
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs, "run_child", silent)
        answer = run(given)
    assert not answer.recommended and answer.proof.verdict == "not proven"
    assert answer.proof.why == "its ranks were not compared with one process: no such thing"


@pytest.mark.parametrize("word", ["dp2+", "<script>", "tp", 3, None, "dp99999999"])
def test_a_layout_that_is_none_is_refused_where_an_answer_is_read(word):
    tree = {"name": "x", "machine": {}, "ceilings": {}, "start": {}, "levers": {"parallel": ["dp2"]}, "ranks": 2}
    best = {"point": {"parallel": word}, "purpose": "search", "outcome": "error"}
    with pytest.raises(UserError, match="is no layout"):
        Answer.from_dict({**tree, "records": [], "reference": None, "best": best})


def test_time_is_kept_to_compare_the_ranks_with_one_process():
    alone, shared = (Pace(600.0, "cuda", 10**9, ranks=ranks) for ranks in (1, 8))
    assert shared.proof() >= alone.proof() + alone.expected("none")


# As a user says it


@pytest.mark.parametrize(("arguments", "words"), [
    (["--nproc", "0"], "--nproc is 0; it is a number of ranks, 1 or more"),
    (["--nproc", "-2"], "--nproc is -2; it is a number of ranks"),
    (["--nproc", "2", "--model", "some:model"], "--model and --hf run in one process; leave --nproc out"),
    (["--nproc", "2", "--hf", "folder"], "--model and --hf run in one process; leave --nproc out"),
    (["--nproc", "2", "--for", "decode", "folder"], "--for decode run in one process; leave --nproc out"),
    (["--nproc", "2", "global_batch=3"], "global batch 3 does not divide by 2 data ranks"),
    (["--nproc", "2", "parallel.tp=4"], "2 processes do not divide by tp 4"),
    (["--nproc", "9999"], "this machine has no room for them; start at most"),
    (["--nproc", "2", "--search", "parallell"], "'parallell' is no lever"),
    (["--nproc", "2", "--try", "parallel=tp3"], "parallel cannot be tp3 here"),
])  # fmt: skip
def test_ranks_that_cannot_be_are_one_sentence(arguments, words, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(forkserver, "start", lambda: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UserError) as refused:
        typer.main.get_command(app).main(["tune", *arguments], standalone_mode=False)
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    api.check_ranks_here(4, "cuda")
    with pytest.raises(UserError, match="--nproc is 5, and this machine has 4 GPUs; start at most as many ranks"):
        api.check_ranks_here(5, "cuda")


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_machine_of_several_gpus_is_told_what_would_use_them(ranks, monkeypatch, tmp_path):
    """Of one rank alone; and the links are measured where there are several."""
    monkeypatch.setattr(forkserver, "start", lambda: None)
    for name, value in (("is_available", True), ("device_count", 4)):
        monkeypatch.setattr(f"torch.cuda.{name}", lambda value=value: value)
    said, asked = [], []

    class Enough(Exception):
        pass

    def end(*arguments, **_):
        asked.append(arguments)
        raise Enough

    monkeypatch.setattr(jobs, "probe", lambda *_, **__: {"machine": {}})
    monkeypatch.setattr(jobs, "probe_links", end)
    monkeypatch.setattr("tilewright.tune.study.run", end)
    with pytest.raises(Enough):
        tilewright.tune(*FIXED[:5], "global_batch=4", nproc=ranks, out=tmp_path, shown=Shown(say=said.append))
    told = [line for line in said if "--nproc" in line]
    assert told == (["This machine has 4 GPUs, and every run is on one; --nproc 4 uses them all."] * (ranks == 1))
    assert (asked[0][0] == 4) == (ranks == 4)


def test_a_study_goes_on_with_its_ranks(monkeypatch, tmp_path):
    """As it was begun, without a word of ranks; another number of them is another study."""
    run(settings(tmp_path / "study", budget=3.0))
    monkeypatch.setattr(forkserver, "start", lambda: None)
    seen = []
    monkeypatch.setattr(jobs, "probe", lambda *_, **__: {"machine": {}})
    monkeypatch.setattr(jobs, "probe_links", lambda ranks, *_: {"for": ranks})
    monkeypatch.setattr("tilewright.tune.study.run", lambda settings, told: seen.append(settings))
    tilewright.tune(study="study", resume=True, out=tmp_path)
    assert seen[0].space.ranks == 2 and seen[0].machine["links"] == {"for": 2}
    with pytest.raises(UserError, match="The study study has --nproc 2; leave --nproc out"):
        tilewright.tune(study="study", resume=True, out=tmp_path, nproc=4)


def test_a_real_study_of_two_ranks_recommends_a_layout_with_proof(monkeypatch, tmp_path):
    """Over gloo, two processes a run: DDP, and a pipeline."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    monkeypatch.setattr("_pytest.runner._update_current_test_var", lambda item, when: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    fixed = ["parallel.zero=0", "parallel.cp=1", "parallel.tp=1", "model.gpt_block=standard"]
    answer = tilewright.tune(*FIXED, *fixed, nproc=2, numerics="same", budget=900.0, study="two", out=tmp_path)
    assert answer.levers == {"parallel": ["dp2", "pp2"]}
    ran = {record.point["parallel"] for record in answer.records if record.measurement}
    assert ran == {"dp2", "pp2"}, [record.error for record in answer.records]
    losses = [record.measurement.losses[:3] for record in answer.records if record.measurement]
    assert all(each == pytest.approx(losses[0], abs=1e-4) for each in losses)
    assert answer.best is not None and answer.ready.endswith("best.yaml --nproc 2")
    if answer.changes:
        assert answer.phases["proof: layout"] > 0.0
        assert answer.proof.verdict in VERDICTS[:3] and "are those of one process" in answer.proof.why
    assert (tmp_path / "two/best.yaml").is_file()
