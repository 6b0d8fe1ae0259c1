"""`tilewright report`: of a file, of a study that may only be read, of a damaged one, and of two side by side."""

import contextlib
import copy
import json
import os
import random
import shutil
import tempfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tilewright.cli.main import app
from tilewright.errors import UserError
from tilewright.tune.store.ledger import Ledger
from tilewright.tune.store.storage import in_folder
from tune.example_answer import example

RECORDED = Path(__file__).parents[2] / "results/h200"
NOBODY = 65534


def report(*arguments):
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


@contextlib.contextmanager
def read_only(folder, *reachable):
    """A folder that this process may read and not write to; root may write to any, so it steps down."""
    folder.chmod(0o555)
    if os.geteuid() == 0:
        for path in (folder, *reachable):
            for parent in path.parents:
                if parent.is_relative_to(tempfile.gettempdir()) and parent != Path(tempfile.gettempdir()):
                    parent.chmod(0o755)
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if os.geteuid() == NOBODY:
            os.seteuid(0)
        folder.chmod(0o755)


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A study that was killed after its first two trials: a database, and no answer."""
    folder, answer = tmp_path_factory.mktemp("studies") / "killed", example("cpu", hostile=False)
    folder.mkdir()
    facts = {name: getattr(answer, name) for name in ("machine", "ceilings", "start", "levers", "own_model")}
    facts = json.loads(json.dumps(facts))
    facts["ceilings"] |= {"device": "cpu", "memory_cap": None}
    ledger = Ledger.open(in_folder(folder), "killed", {"schema": 1}, folder, resume=False)
    with contextlib.closing(ledger):
        ledger.note("facts", facts)
    return folder, facts


def damaged(begun, tmp_path, facts):
    folder = tmp_path / "killed"
    shutil.copytree(begun[0], folder)
    ledger = Ledger.open(in_folder(folder), "killed", {"schema": 1}, folder, resume=True)
    with contextlib.closing(ledger):
        ledger.note("facts", facts)
    return folder


def test_a_recorded_study_opens_from_its_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = report(RECORDED / "tune_1b.json")
    assert done.exit_code == 0, done.exception
    assert "Report: tune_1b.html" in done.stdout and (tmp_path / "tune_1b.html").stat().st_size > 10**6
    done = report(RECORDED / "tune_1b.json", "--html", "other.html", "--json")
    assert json.loads(done.stdout)["levers"] and {p.name for p in tmp_path.iterdir()} == {"tune_1b.html", "other.html"}


def test_two_studies_are_set_side_by_side(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    files = RECORDED / "tune_1b.json", RECORDED / "tune_125m_max_autotune.json"
    done = report(*files)
    assert done.exit_code == 0, done.exception
    page = (tmp_path / "tune_1b-beside-tune_125m_max_autotune.html").read_text()
    for text in ("58,937", "400,559", "70,287", "621,691", "GPT 1b", "GPT 125m", "model.gpt_block", "1.09", "1.20"):
        assert text in page and text in done.stdout, text
    assert page.count('class="plot"') == 4
    found = json.loads(report(*files, "--json", "--html", "x.html").stdout)
    assert [study["name"] for study in found["studies"]] == [json.loads(p.read_text())["name"] for p in files]
    failed = report(*files, files[0]).exception
    assert isinstance(failed, UserError) and "give one or two" in str(failed)


def test_a_study_that_may_only_be_read_is_reported_here(begun, tmp_path, monkeypatch):
    here = tmp_path / "here"
    here.mkdir(mode=0o777)
    here.chmod(0o777)
    monkeypatch.chdir(here)
    assert report(begun[0], "--html", tmp_path / "warm.html").exit_code == 0  # all that is imported is imported as root
    before = sorted(begun[0].iterdir())
    with read_only(begun[0], here):
        done = report(begun[0])
        assert done.exit_code == 0, done.exception
        refused = report(begun[0], "--html", begun[0] / "x.html").exception
    assert "Report: killed.html" in done.stdout and (here / "killed.html").is_file()
    assert isinstance(refused, UserError) and "choose another file" in str(refused)
    assert sorted(begun[0].iterdir()) == before


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda facts: facts.pop("own_model"), "it names no model"),
        (lambda facts: facts.update(levers=[]), "levers is a list"),
        (lambda facts: facts["levers"].update({"compile": []}), "levers.compile has no value"),
        (lambda facts: facts["start"].update(warp=9), "there is no field warp"),
        (lambda facts: facts["ceilings"].pop("device"), "damaged"),
        (lambda facts: facts["ceilings"].update(memory_bytes=10**400), "ceilings.memory_bytes is"),
    ],
)
def test_damaged_facts_are_a_sentence(begun, tmp_path, change, sentence):
    facts = copy.deepcopy(begun[1])
    change(facts)
    folder = damaged(begun, tmp_path, facts)
    failed = report(folder).exception
    assert isinstance(failed, UserError) and sentence in str(failed) and "\n" not in str(failed), failed
    assert not (folder / "report.html").exists()


def test_mutated_facts_are_a_page_or_a_sentence(begun):
    from tilewright.tune.report.reread import check_facts
    from tune.test_strange_answers import mutated, places

    chance, every = random.Random(os.environ["TILEWRIGHT_SEED"]), list(places(begun[1]))
    refused = 0
    for _ in range(300):
        changed, done = mutated(begun[1], every, chance)
        try:
            check_facts(json.loads(json.dumps(changed)), "killed")
        except UserError as error:
            refused += 1
            assert "\n" not in str(error), done
    assert refused > 50
