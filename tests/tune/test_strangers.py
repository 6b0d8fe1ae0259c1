"""A study from a stranger is data: it decides neither what code runs nor how the command ends."""

import dataclasses

import pytest

from tilewright.errors import UserError
from tilewright.train.load_config import read
from tilewright.tune import api
from tilewright.tune.search.space import open_space
from tilewright.tune.store.ledger import Ledger
from tilewright.tune.store.storage import in_folder
from tilewright.tune.worker import forkserver, jobs

HEAD = {"schema": 1, "tilewright": "0", "space": "00"}


@pytest.fixture
def study(tmp_path, monkeypatch):
    """Writes a study whose facts are given; its payload is importable from here and leaves a canary if it runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(forkserver, "start", lambda: None)
    (tmp_path / "payload.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w')\ndef build(): pass\n")
    space = open_space(read(None, ["device=cpu"]), device="cpu", of_any_model=True)
    facts = {
        "machine": {}, "ceilings": {"memory_cap": None, "device": "cpu"}, "start": dataclasses.asdict(space.start),
        "levers": {name: list(values) for name, values in space.levers.items()}, "own_model": "payload:build",
    }  # fmt: skip

    def write(**changes):
        folder = tmp_path / "runs/tune/gift"
        ledger = Ledger.open(in_folder(folder), "gift", HEAD, folder, resume=False)
        ledger.note("facts", {**facts, **changes})
        ledger.close()

    return write


def refusal(monkeypatch, **more):
    monkeypatch.setattr(jobs, "probe", lambda *_, **__: pytest.fail("the study was gone on with"))
    with pytest.raises(UserError) as refused:
        api.tune(resume=True, budget=5, **more)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_resume_asks_for_the_model_instead_of_importing_what_the_study_names(study, tmp_path, monkeypatch):
    study()
    assert "--model payload:build" in refusal(monkeypatch)
    assert "other:build" in refusal(monkeypatch, model="other:build")
    assert not (tmp_path / "canary").exists()


def test_resume_goes_on_with_the_model_that_is_named_again(study, monkeypatch):
    study()
    seen = []

    def probe(device, *, own_model, path, run):
        seen.append(own_model)
        raise UserError("far enough")

    monkeypatch.setattr(jobs, "probe", probe)
    with pytest.raises(UserError, match="far enough"):
        api.tune(resume=True, model="payload:build", budget=5)
    assert seen == ["payload:build"]


@pytest.mark.parametrize("own_model", [7, ["payload:build"], {"a": 1}, "x" * 10_000, "\x1b[31m\n:y", None])
def test_a_model_that_is_no_name_is_one_sentence(study, monkeypatch, own_model):
    study(own_model=own_model)
    said = refusal(monkeypatch)
    assert len(said) < 400 and said.isprintable()


@pytest.mark.parametrize(
    "changes",
    [{"start": 5}, {"levers": []}, {"levers": {"no.such": [1]}}, {"ceilings": None}, {"start": {"steps": "many"}}],
    ids=str,
)
def test_damaged_facts_are_one_sentence(study, monkeypatch, changes):
    study(own_model="", **changes)
    refusal(monkeypatch)
