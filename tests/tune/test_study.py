"""Whole studies with trials that cost 20 ms: what is found, what survives, what the answer says."""

import dataclasses
import itertools
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

import tilewright
from slowness import soon
from tilewright.errors import UserError
from tilewright.train.load_config import from_dict, read
from tilewright.tune import study
from tilewright.tune.proof import prove_best
from tilewright.tune.report.answer import Answer
from tilewright.tune.report.page import page
from tilewright.tune.report.reread import reread
from tilewright.tune.search import pace
from tilewright.tune.search.space import open_space
from tilewright.tune.search.standard import float32_losses
from tilewright.tune.settings import Settings, Shown
from tilewright.tune.store import cache
from tilewright.tune.store import storage as storages
from tilewright.tune.store.proof import Proof
from tilewright.tune.store.record import CONFIRMATION, Measurement, Record, key, note_of
from tilewright.tune.store.storage import StorageLost
from tilewright.tune.study import run
from tilewright.tune.worker import jobs, runner
from tilewright.tune.worker.jobs import probe
from tilewright.tune.worker.process import Ended
from tilewright.tune.worker.runner import REFERENCE_EVERY
from tune import light_child

RULE = {
    "step_seconds": 0.4,
    "bytes": 1_000_000,
    "levers": {
        "model.gpt_block": {"optimized": [0.7, 0.8]},
        "model.loss": {"fused": [0.95, 0.9], "linear_fused": [0.9, 0.5]},
        "compile": {"default": [0.85, 1.1]},
        "model.attention": {"flash": [1.0001, 1.0]},  # gives nothing
        "micro_batch": {"1": [1.2, 0.6]},
    },
}  # fmt: skip
FLASH = "model.attention=flash,model.gpt_block=optimized,model.loss=linear_fused,compile=default"
BEST = {"model.gpt_block": "optimized", "model.loss": "linear_fused", "compile": "default"}


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))


def settings(folder, rule=None, **changes):
    command = light_child.command(RULE if rule is None else rule)
    fixed = ["global_batch=2", "threads=1", "model.recompute=none", "model.mlp=auto", "model.residual=auto"]
    space = open_space(read(None, fixed), device="cpu", numerics="same")
    given = {"space": space, "machine": probe("cpu", command=command), "folder": folder, "name": folder.name}
    given |= {"storage": f"sqlite:///{folder}/study.db", "budget": 240.0, "command": command}
    return Settings(**(given | changes))


def test_the_best_run_is_found_explained_by_its_levers_and_written(tmp_path):
    given = settings(tmp_path / "study")
    answer = run(given)
    assert answer.changes == BEST and answer.recommended
    assert answer.ratio == pytest.approx(1 / (0.7 * 0.9 * 0.85), rel=1e-3)
    gives = {each.lever: each.tokens_per_second / answer.best.tokens_per_second for each in answer.ablations}
    assert gives == pytest.approx({"model.gpt_block": 0.7, "model.loss": 0.9, "compile": 0.85}, rel=1e-3)
    what, gain, cost = answer.sentences
    assert (
        what
        == "Set compile to default, model.gpt_block to optimized and model.loss to linear_fused, as best.yaml does."
    )
    assert f"{answer.ratio:.2f} times as fast" in gain and "same within rounding" in cost
    # `tilewright train` takes it as it is.
    assert read(tmp_path / "study/best.yaml", []).train == given.space.at(answer.best.point)
    saved = json.loads((tmp_path / "study/answer.json").read_text())
    assert Answer.from_dict(saved) == answer
    for record in answer.records:
        assert record.prediction.seconds >= record.prediction.floor > 0 and record.prediction.bytes > 0
        if record.measurement:
            explained = sum(each.more for each in record.differences if each.unit == "s")
            assert explained == pytest.approx(record.measurement.seconds - record.prediction.seconds, rel=1e-6)


def test_what_is_predicted_to_be_best_comes_first_and_then_what_was_asked_for(tmp_path):
    given = settings(tmp_path / "study")
    asked = [given.space.parse(text) for text in ("model.loss=fused, micro_batch=1", "model.attention=flash")]
    answer = run(dataclasses.replace(given, first=tuple(asked)))
    searched = [record for record in answer.records if record.purpose == "search"]
    assert [record.point for record in searched][1:3] == asked
    assert searched[0].prediction.seconds == min(record.prediction.seconds for record in answer.records)
    assert answer.records[0].purpose == "reference"
    assert answer.changes == BEST


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("model.width=64", "model.width is not open to the search; choose from compile, "),
        ("compile=max-autotune", "compile cannot be max-autotune here; choose from none, default, or"),
        ("model.los=fused", "did you mean model.loss?"),
        ("fused", "is no override"),
    ],
)
def test_a_run_that_cannot_be_asked_for_is_one_sentence(tmp_path, text, sentence):
    with pytest.raises(UserError, match=sentence.replace("?", "[?]")):
        settings(tmp_path / "study").space.parse(text)


def test_a_lever_that_gives_nothing_is_put_back(tmp_path):
    """Within the noise nothing is gained by it, so nothing is to be changed for it."""
    rule = {**RULE, "levers": {**RULE["levers"], "model.attention": {"flash": [0.9995, 1.0]}}}
    answer = run(settings(tmp_path / "study", rule))
    assert answer.changes == BEST


GAINS = {
    "gains": [
        {"rule": "add_norm", "seconds": 0.03, "spread": 0.001, "bytes": None, "kept": True},
        {"rule": "norm", "seconds": -0.02, "spread": 0.001, "bytes": None, "kept": False},
    ],
    "not_measured": ["glu"],
}  # fmt: skip


@pytest.mark.parametrize(("whole", "narrowed", "changes"), [
    (0.8, 0.8, "add_norm+glu"), (0.8, 0.85, "all"), (1.05, 0.9, "add_norm+glu"), (1.3, 0.9, None),
])  # fmt: skip
def test_rules_of_a_users_model_that_give_nothing_are_dropped(tmp_path, whole, narrowed, changes):
    """Measured in one process, and the run with the others counts only where it is as fast in a trial of its own."""
    fixed = ["global_batch=2", "micro_batch=2", "threads=1", "compile=none", "precision=fp32", "optimizer.name=adamw"]
    space = open_space(read(None, fixed), device="cpu", numerics="same", of_any_model=True)
    factors = {"all": [whole, 1.0], "add_norm+glu": [narrowed, 1.0]}
    rule = {"step_seconds": 0.4, "levers": {"rules": factors}, "gains": GAINS}
    given = settings(tmp_path / "study", rule, space=space, own_model="somebody:model")
    answer = run(given)
    searched = [record.point["rules"] for record in answer.records if record.purpose in ("search", "ablation")]
    if changes is None:  # too slow for a part of it to win
        assert searched == ["all"] and answer.rules is None and not answer.own_lines
        return
    assert searched == ["all", "add_norm+glu"]  # one more trial, whatever the number of rules
    assert answer.changes == {"rules": changes} and answer.recommended
    assert answer.rule_names == (["add_norm", "glu"] if changes != "all" else ["add_norm", "norm", "glu"])
    assert [each.rule for each in answer.rules.gains] == ["add_norm", "norm"]
    assert f"optimize(model, rules={json.dumps(answer.rule_names)})" in (tmp_path / "study/best.py").read_text()
    if changes == "all":
        return
    assert "no time to measure it" in page(answer)
    (tmp_path / "study/answer.json").unlink()
    assert reread(tmp_path / "study", "study").rules == answer.rules
    again = run(dataclasses.replace(given, resume=True))
    assert again.rules == answer.rules and again.changes == answer.changes


def test_no_point_runs_twice_and_the_reference_runs_again_and_again(tmp_path):
    answer = run(settings(tmp_path / "study"))
    searched = [key(record.point) for record in answer.records if record.purpose in ("search", "ablation")]
    assert len(searched) == len(set(searched)) > 5
    assert [r.point for r in answer.records if r.purpose == "confirmation"] == [answer.best.point]
    references = [record for record in answer.records if record.purpose == "reference"]
    assert len(references) >= len(answer.records) // (runner.REFERENCE_EVERY + 2)


def test_a_run_over_the_memory_cap_is_not_chosen(tmp_path):
    answer = run(settings(tmp_path / "study", memory_cap=1e8))
    assert answer.changes == {}  # by the plan nothing fits, a process alone takes more: only the baseline ran
    assert {record.purpose for record in answer.records} == {"reference"} and answer.discarded["does not fit"] > 0
    rule = {**RULE, "bytes": 2_000_000_000}
    answer = run(settings(tmp_path / "other", rule, memory_cap=1.2e9))
    assert answer.best.measurement.bytes <= 1.2e9 < answer.reference.measurement.bytes


FAULTS = (
    "illegal access", "segfault", "abort", "exit 3", "exit 0", "raised", "half a result", "crash after noise",
    "no memory in C++", "no memory in CUDA", "out of memory", "not finite", "refused", "error", "not finite, done",
    "no time, done", "unknown outcome", "done with nothing",
)  # fmt: skip


@pytest.mark.parametrize("seed", range(6))
def test_of_two_hundred_faults_each_is_in_its_record_and_a_study_ends_with_the_right_best(tmp_path, seed):
    chance = random.Random(seed)
    given = settings(tmp_path / "study", budget=600.0)
    space = given.space
    best, levers = {**space.baseline, **BEST}, space.levers
    good = [key(point) for point in _path(space, best)]
    points = [dict(zip(levers, values, strict=True)) for values in itertools.product(*levers.values())]
    others = [point for point in points if space.refusal(point) is None and key(point) not in good]
    asked = chance.sample(others, 34)
    faults = [{"when": point, "do": chance.choice(FAULTS)} for point in asked]
    command = light_child.command({**RULE, "faults": faults})
    # One good run of each lever of the best: what has failed wherever it was tried is not tried elsewhere.
    seeds = [{**space.baseline, name: value} for name, value in BEST.items()]
    answer = run(dataclasses.replace(given, command=command, first=(*seeds, *asked)))
    assert answer.best.point == best and answer.proof.verdict == "same within rounding"
    failed = [record for record in answer.records if record.outcome not in ("done", "stopped early")]
    assert sorted(key(record.point) for record in failed) == sorted(map(key, asked))
    assert all(record.error for record in failed)


def _path(space, best):
    """The baseline, the best, and all between that differ from either in one lever: those must work."""
    ends = (space.baseline, best)
    return [*ends, *({**end, name: value} for end in ends for name, value in best.items())]


def test_a_winner_that_turns_out_wrong_is_struck_and_the_next_one_proved(tmp_path, monkeypatch):
    real, proved = jobs.run_child, []

    def wrong_at_first(job, *arguments, **options):
        ended = real(job, *arguments, **options)
        if job["kind"] == "prove":
            proved.append(job["configuration"])
            if len(proved) == 1:
                layers = [{"name": "0", "output": float("nan"), "output_standard": 0.0, "gradient": float("inf"),
                           "gradient_standard": 1e-3}]  # fmt: skip
                value = {
                    "verdict": "wrong",
                    "why": "layer 0 is off.",
                    "layers": layers,
                    "losses": {"best": [1.0, float("nan")]},
                }
                return dataclasses.replace(ended, value=value)
        return ended

    monkeypatch.setattr(jobs, "run_child", wrong_at_first)
    said = []
    answer = run(settings(tmp_path / "study"), Shown(say=said.append))
    assert len(proved) == 2 and proved[0] != proved[1] and answer.proof.verdict == "same within rounding"
    assert dataclasses.asdict(settings(tmp_path / "x").space.at(answer.best.point)) == proved[1]
    assert any("is wrong and not recommended: layer 0 is off." in text for text in said)
    json.loads((tmp_path / "study/answer.json").read_text(), parse_constant=pytest.fail)


@pytest.mark.parametrize(("by", "dropout", "struck"), [(1e-5, 0.0, False), (0.02, 0.0, True), (0.02, 0.1, False)])
def test_a_winner_whose_losses_are_off_at_its_own_batch_is_struck(tmp_path, monkeypatch, by, dropout, struck):
    """A proof is small: a kernel that is wrong only where tensors are large passes it. With dropout nobody can tell."""
    real = jobs.run_child

    def off_where_optimized(job, *arguments, **options):
        ended = real(job, *arguments, **options)
        if job["kind"] == "measure" and ended.value and job["configuration"]["model"]["gpt_block"] == "optimized":
            losses = [loss * (1 + by) for loss in ended.value["losses"]]
            return dataclasses.replace(ended, value={**ended.value, "losses": losses})
        return ended

    monkeypatch.setattr(jobs, "run_child", off_where_optimized)
    given, said = settings(tmp_path / "study"), []
    start = dataclasses.replace(given.space.start, model=dataclasses.replace(given.space.start.model, dropout=dropout))
    space = dataclasses.replace(given.space, start=start)
    answer = run(dataclasses.replace(given, space=space), Shown(say=said.append))
    assert (answer.changes.get("model.gpt_block") == "optimized") is not struck
    assert any("at its own batch the loss of step 1 is" in text for text in said) is struck


def test_a_proof_that_cannot_run_recommends_nothing(tmp_path, monkeypatch):
    real = jobs.run_child

    def no_proof(job, *arguments, **options):
        ended = real({**job, "curve": 0.0}, *arguments, **options)
        return dataclasses.replace(ended, value=None, error="out of memory") if job["kind"] == "prove" else ended

    monkeypatch.setattr(jobs, "run_child", no_proof)
    (tmp_path / "study").mkdir()
    (tmp_path / "study/best.yaml").write_text("of an earlier answer")
    answer = run(settings(tmp_path / "study"))
    assert not answer.recommended and not (tmp_path / "study/best.yaml").exists()
    assert answer.proof.verdict == "not proven" and answer.sentences[0].startswith("Change nothing yet")


def test_what_was_measured_before_is_not_measured_again(tmp_path):
    first = run(settings(tmp_path / "first"))
    second = run(settings(tmp_path / "second"))
    again = [record for record in second.records if not record.cached]
    assert {record.purpose for record in again} == {"reference", "confirmation"}
    assert second.best.point == first.best.point and second.ratio == pytest.approx(first.ratio, rel=1e-3)
    fresh = run(settings(tmp_path / "third", fresh=True))
    assert not any(record.cached for record in fresh.records)


def test_a_study_is_continued_by_name_and_never_by_accident(tmp_path):
    given = settings(tmp_path / "study")
    first = run(given)
    with pytest.raises(UserError, match="exists; continue it with --resume, or choose another --study"):
        run(given)
    second = run(dataclasses.replace(given, resume=True))
    assert len(second.records) >= len(first.records) and second.best.point == first.best.point
    other = dataclasses.replace(given.space, levers={"compile": ("none", "default")})
    with pytest.raises(UserError, match="another configuration"):
        run(dataclasses.replace(given, resume=True, space=other))


def test_who_goes_on_takes_proof_and_kernels_over(tmp_path, monkeypatch):
    given, real, kinds = settings(tmp_path / "study"), jobs.run_child, []

    def child(job, *arguments, **options):
        kinds.append(job["kind"])
        return real(job, *arguments, **options)

    monkeypatch.setattr(jobs, "run_child", child)
    first = run(given)
    assert kinds.count("prove") == kinds.count("observe") == 1
    second = run(dataclasses.replace(given, resume=True))
    assert kinds.count("prove") == kinds.count("observe") == 1
    assert (second.proof, second.work) == (first.proof, first.work) and second.work and second.recommended


def test_a_study_of_another_version_is_refused(tmp_path, monkeypatch):
    given = settings(tmp_path / "study")
    run(given)
    monkeypatch.setattr(tilewright, "__version__", "9.9.9")
    with pytest.raises(UserError, match="made by Tilewright .* and this is 9.9.9"):
        run(dataclasses.replace(given, resume=True))


SCRIPT = """
import json, signal, sys
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background inherits it ignored
sys.path[:0] = json.loads(sys.argv[1])
from tune.test_study import settings
from tilewright.tune.study import run
rule = json.loads(sys.argv[3])
print("ready", flush=True)
answer = run(settings(Path(sys.argv[2]), rule, resume=True))
print(len(answer.records), answer.interrupted, flush=True)
"""


def start(folder, rule):
    path = [str(Path(__file__).parents[1]), str(Path(tilewright.__file__).parents[1])]
    arguments = [sys.executable, "-c", SCRIPT, json.dumps(path), str(folder), json.dumps(rule)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finished(folder):
    path = folder / "trials.jsonl"
    return [json.loads(line)["id"] for line in path.read_text().splitlines()] if path.exists() else []


def wait_for(condition, seconds=60.0):
    began = time.monotonic()
    while not condition():
        assert soon(seconds, began), "nothing happened"
        time.sleep(0.02)


def test_kill_minus_nine_loses_no_finished_trial_and_leaves_no_process(tmp_path):
    rule, folder = {**RULE, "pace": 0.03}, tmp_path / "study"
    for lives in (1, 2, 3):
        tuner = start(folder, rule)
        wait_for(lambda lives=lives: len(finished(folder)) >= 3 * lives)
        tuner.send_signal(signal.SIGKILL)
        tuner.communicate()
    before = finished(folder)
    wait_for(lambda: not _children_of(folder, rule), 10.0)
    answer = run(settings(folder, resume=True))
    assert answer.changes == BEST
    assert set(before) <= set(finished(folder)) and len(finished(folder)) == len(set(finished(folder)))
    searched = [key(record.point) for record in answer.records if record.purpose in ("search", "ablation")]
    assert len(searched) == len(set(searched))


def _children_of(folder, rule):
    text = json.dumps(rule).encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text in path.read_bytes() and b"light_child" in path.read_bytes():
                found.append(path)
        except OSError:
            pass
    return found


def test_ctrl_c_ends_with_the_best_so_far_and_a_study_to_go_on_with(tmp_path):
    rule, folder = {**RULE, "pace": 0.05}, tmp_path / "study"
    tuner = start(folder, rule)
    wait_for(lambda: len(finished(folder)) >= 3)
    tuner.send_signal(signal.SIGINT)
    out, errors = tuner.communicate(timeout=30)
    assert tuner.returncode == 0 and out.split()[-1] == "True", errors
    saved = Answer.from_dict(json.loads((folder / "answer.json").read_text()))
    assert saved.interrupted and saved.best is not None and saved.proof is None
    assert (folder / "best.yaml").exists() and "was not looked at" in saved.sentences[2]
    assert not _children_of(folder, rule)
    assert run(settings(folder, resume=True)).changes == BEST


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_while_python_tidies_up_is_not_lost(tmp_path, monkeypatch, number):
    class Garbage:
        def __del__(self):  # what is raised in here is printed and forgotten
            os.kill(os.getpid(), number)
            time.sleep(0.01)

    def left_behind(job, found):
        Garbage()
        return found

    before = signal.getsignal(number)
    changing(monkeypatch, left_behind)
    answer = run(settings(tmp_path / "study"))
    assert answer.interrupted and len(answer.records) == 1 and answer.best is not None
    assert signal.getsignal(number) == before


def test_the_answer_of_a_study_that_was_killed_is_read_from_its_records(tmp_path):
    folder = tmp_path / "study"
    answer = run(settings(folder))
    assert reread(folder, "study") == answer
    os.unlink(folder / "answer.json")
    again = reread(folder, "study")
    assert again.best.point == answer.best.point and again.ratio == answer.ratio
    assert again.proof == answer.proof and again.work == answer.work and again.recommended
    assert again.ablations == answer.ablations
    with pytest.raises(UserError, match="no study"):
        reread(tmp_path / "nothing", "nothing")


def test_what_was_not_proven_is_not_recommended_by_who_reads_the_study_later(tmp_path, monkeypatch):
    real, folder = jobs.run_child, tmp_path / "study"

    def child(job, *arguments, **options):
        lost = Ended("crashed", "it was killed.", "", None)
        return lost if job["kind"] == "prove" else real(job, *arguments, **options)

    monkeypatch.setattr(jobs, "run_child", child)
    answer = run(settings(folder))
    os.unlink(folder / "answer.json")
    again = reread(folder, "study")
    assert again.proof == answer.proof and again.proof.verdict == "not proven"
    assert not answer.recommended and not again.recommended and not (folder / "best.yaml").exists()


def test_who_reads_a_study_later_recommends_what_was_proved_and_not_what_is_faster(tmp_path, monkeypatch):
    folder = tmp_path / "study"
    answer = run(settings(folder))
    os.unlink(folder / "answer.json")
    place, name = settings(folder).storage, "study"
    notes, records = study.Ledger.read(place, name)
    faster = dataclasses.replace(
        answer.best, point={**answer.best.point, "model.attention": "flash"}, purpose="search", began=1e12,
        measurement=dataclasses.replace(answer.best.measurement, step_seconds=[1e-3] * 8),
    )  # fmt: skip
    others = [record for record in records if record.point != faster.point]
    monkeypatch.setattr(study.Ledger, "read", lambda *_: (notes, [*others, faster]))
    again = reread(folder, name)
    assert again.best.point == answer.best.point and again.proof == answer.proof and again.recommended
    unproved = {name: note for name, note in notes.items() if not name.startswith("proof ")}
    lost = {**unproved, note_of("proof", others[1]): dataclasses.asdict(Proof("wrong", "its loss is another."))}
    monkeypatch.setattr(study.Ledger, "read", lambda *_: (lost, [*others, faster]))
    assert not reread(folder, name).recommended


def test_a_storage_that_goes_away_leaves_what_is_known_and_is_waited_for_once(tmp_path, monkeypatch):
    monkeypatch.setattr(storages, "_BUSY", 0.2)
    folder, locks = tmp_path / "study", []
    opened = study.Ledger.open
    monkeypatch.setattr(study.Ledger, "open", lambda *a, **b: opened(*a, **b, patience=2.0))
    real, patiently, waits = jobs.run_child, storages.Storage._patiently, []

    def waited(storage, *given):
        began = time.monotonic()
        try:
            return patiently(storage, *given)
        except StorageLost:
            waits.extend([began] * (time.monotonic() - began > 1.0))
            raise

    def child(job, *arguments, **options):
        ended = real(job, *arguments, **options)
        if job["kind"] == "measure" and job["configuration"]["model"]["gpt_block"] == "optimized" and not locks:
            locks.append(sqlite3.connect(folder / "study.db", isolation_level=None))
            locks[0].execute("BEGIN EXCLUSIVE")
        return ended

    monkeypatch.setattr(jobs, "run_child", child)
    monkeypatch.setattr(storages.Storage, "_patiently", waited)
    with pytest.raises(StorageLost, match="out of reach for 2 s") as lost:
        run(settings(folder))
    assert len(waits) == 1  # and not once more for each thing that the answer asks of it
    locks[0].close()
    answer = lost.value.answer
    assert answer.reference is not None and Answer.from_dict(json.loads((folder / "answer.json").read_text())) == answer
    os.rename(folder / "study.db", folder / "elsewhere.db")  # as where the study was in a database
    assert reread(folder, "study") == answer


def changing(monkeypatch, change):
    """Let `change(job, measured)` change what the light child has measured."""
    real = jobs.run_child

    def child(job, *arguments, **options):
        ended = real(job, *arguments, **options)
        if job["kind"] == "measure" and ended.value and "step_seconds" in ended.value:
            return dataclasses.replace(ended, value=change(job, ended.value))
        return ended

    monkeypatch.setattr(jobs, "run_child", child)


def slower(measured, factor):
    return {**measured, "step_seconds": [seconds * factor for seconds in measured["step_seconds"]]}


def test_steps_so_slow_that_two_are_all_there_are_do_not_put_every_lever_back(tmp_path, monkeypatch):
    changing(monkeypatch, lambda job, found: {**found, "step_seconds": found["step_seconds"][:2]})
    assert run(settings(tmp_path / "study")).changes == BEST


def test_noise_does_not_eat_up_levers_one_after_the_other(tmp_path, monkeypatch):
    """Each is worth 5 %, the steps vary by more: put back one by one nothing would be left of 16 %."""
    rule = {**RULE, "levers": {name: {value: [0.95, 1.0]} for name, value in BEST.items()}}

    def vary(job, found):
        return {
            **found,
            "step_seconds": [s * f for s, f in zip(found["step_seconds"], (1, 1.2, 0.8, 1, 1), strict=True)],
        }

    changing(monkeypatch, vary)
    assert run(settings(tmp_path / "study", rule)).changes == BEST


def growing_slow(monkeypatch, slowness):
    """A machine whose nth trial takes `slowness(n)` times as long, and that a second after the one before."""
    real, trials = jobs.run_child, []

    def child(job, *arguments, **options):
        if job["kind"] == "measure":
            trials.append(job)
            job["light"] = {**RULE, "step_seconds": RULE["step_seconds"] * slowness(len(trials))}
        return real(job, *arguments, **options)

    monkeypatch.setattr(jobs, "run_child", child)
    clock = types.SimpleNamespace(time=lambda: 1000.0 + len(trials), monotonic=time.monotonic, sleep=time.sleep)
    monkeypatch.setattr(runner, "time", clock)
    return trials


def test_a_machine_that_grows_slow_stops_no_trial_early_for_it(tmp_path, monkeypatch):
    growing_slow(monkeypatch, lambda number: 1 + 0.1 * number)
    monkeypatch.setattr(runner, "REFERENCE_EVERY", 3)
    answer = run(settings(tmp_path / "study"))
    assert answer.changes == BEST and answer.drift > 0.4
    assert answer.ratio == pytest.approx(1 / (0.7 * 0.9 * 0.85), rel=0.05)


CHANGES = [(2, 2.0), (3, 0.5), (4, 0.5), (5, 2.0), (8, 0.5), (11, 2.0), (14, 0.5), (17, 2.0)]


@pytest.mark.parametrize(("at", "factor"), CHANGES)
def test_a_machine_that_changes_at_once_deceives_nobody(tmp_path, monkeypatch, at, factor):
    """As when a neighbour comes or goes: whichever trial is the first at the new speed."""
    growing_slow(monkeypatch, lambda number: factor if number >= at else 1.0)
    answer = run(settings(tmp_path / "study"))
    assert answer.changes == BEST
    assert answer.ratio == pytest.approx(1 / (0.7 * 0.9 * 0.85), rel=0.01)


def test_a_reference_that_failed_at_first_can_still_be_the_best(tmp_path, monkeypatch):
    real, runs = jobs.run_child, []

    def child(job, *arguments, **options):
        runs.append(job)
        ended = real(job, *arguments, **options)
        if job["kind"] == "measure" and len(runs) == 1:
            return dataclasses.replace(ended, outcome="crashed", error="died.", value=None)
        return ended

    monkeypatch.setattr(jobs, "run_child", child)
    slower_levers = {name: {value: [1.25, 1.0] for value in values} for name, values in RULE["levers"].items()}
    given = settings(tmp_path / "study", {**RULE, "levers": slower_levers})
    runs.clear()
    answer = run(given)
    assert answer.records[0].outcome == "crashed" and answer.changes == {} and answer.ratio == 1.0


def test_what_ran_across_a_change_is_not_kept_for_later(tmp_path, monkeypatch):
    growing_slow(monkeypatch, lambda number: 2.0 if number >= 3 else 1.0)
    kept = []
    monkeypatch.setattr(cache, "put", lambda name, record: kept.append(record))
    answer = run(settings(tmp_path / "study"))
    spoilt = {record.began for record in answer.records if record.doubt > 0.1}
    assert spoilt and kept and spoilt.isdisjoint(record.began for record in kept)


def test_a_run_that_was_fast_once_has_to_be_so_again(tmp_path, monkeypatch):
    lucky = []

    def luck(job, found):
        one = job["configuration"]["model"]["attention"] == "flash"
        lucky.extend([job] * one)
        return slower(found, 0.8) if one and len(lucky) == 1 else found

    changing(monkeypatch, luck)
    given = settings(tmp_path / "study")
    answer = run(dataclasses.replace(given, first=(given.space.parse(FLASH),)))
    assert answer.changes == BEST and answer.best.purpose == "confirmation"
    assert "once more to be sure" in answer.sentences[1]


def test_a_run_that_fails_the_second_time_is_not_the_answer(tmp_path, monkeypatch):
    real, runs = jobs.run_child, []

    def child(job, *arguments, **options):
        ended = real(job, *arguments, **options)
        if job["kind"] == "measure" and job["configuration"]["compile"] == "default":
            runs.append(job["configuration"])
            if job["configuration"]["model"]["loss"] == "linear_fused" and runs.count(runs[-1]) > 1:
                return dataclasses.replace(ended, outcome="crashed", error="died.", value=None)
        return ended

    monkeypatch.setattr(jobs, "run_child", child)
    answer = run(settings(tmp_path / "study"))
    crashed = [record for record in answer.records if record.outcome == "crashed"]
    assert crashed and {record.purpose for record in crashed} == {"confirmation"}
    assert answer.best.point not in [record.point for record in crashed] and answer.best.purpose == "confirmation"


@pytest.mark.parametrize("again", ["done", "crashed"])
def test_a_faster_run_that_was_found_after_the_proof_is_not_taken_for_proved(tmp_path, monkeypatch, again):
    def work(self):
        self.ledger.propose([(self.space.parse("model.loss=fused"), "search")])
        while (claim := self.runner.take()) is not None:
            self.runner.run(claim)
        self.prover.prove()
        self.ledger.propose([(self.space.parse("model.gpt_block=optimized"), "search")])
        self.runner.run(self.runner.take())
        if again == "crashed":
            real = jobs.run_child
            monkeypatch.setattr(
                jobs,
                "run_child",
                lambda *job, **options: dataclasses.replace(real(*job, **options), outcome=again, value=None),
            )
            self.ledger.propose([(self.space.parse("model.loss=fused"), "confirmation")])
            self.runner.run(self.runner.take())
        raise KeyboardInterrupt

    monkeypatch.setattr(study._Study, "_work", work)
    answer = run(settings(tmp_path / "study"))
    if again == "done":
        assert answer.changes == {"model.loss": "fused"} and answer.proof.verdict == "same within rounding"
    else:
        assert answer.changes == {"model.gpt_block": "optimized"} and not answer.recommended
        assert not (tmp_path / "study/best.yaml").exists()


def test_where_the_run_as_given_is_the_fastest_after_all_nothing_is_asked_and_nothing_unproved(tmp_path, monkeypatch):
    runs = []

    def luck(job, found):  # as fast as that once, before the proof
        one = job["configuration"]["model"]["loss"] == "fused"
        runs.extend([job] * one)
        return slower(found, 0.8 if len(runs) == 1 else 1.2) if one else found

    def work(self):
        for purpose in ("search", CONFIRMATION):
            self.ledger.propose([(self.space.parse("model.loss=fused"), purpose)])
            while (claim := self.runner.take()) is not None:
                self.runner.run(claim)
            self.prover.prove() if purpose == "search" else None

    changing(monkeypatch, luck)
    monkeypatch.setattr(study._Study, "_work", work)
    answer = run(settings(tmp_path / "study"))
    assert len(runs) == 2 and not answer.changes and answer.recommended and answer.proof is None
    what, gain, cost = answer.sentences
    assert what.startswith("Change nothing:") and gain.startswith("It trains ") and "times" not in gain
    assert "instead" not in cost and cost.endswith("its numbers are those it had.")
    report = page(answer)
    assert "nothing to change" in report and "not proven" not in report and "nothing to compare with it" in report


def test_where_all_that_is_faster_is_wrong_the_run_as_given_is_not_held_to_be_so(tmp_path, monkeypatch):
    space = (given := settings(tmp_path / "study")).space

    def off(job, found):
        wrong = job["configuration"] != dataclasses.asdict(space.start)
        return {**found, "losses": [loss * (1.1 if wrong else 1.0) for loss in found["losses"]]}

    def work(self):
        self.ledger.propose([(self.space.parse("model.loss=fused"), "search")])
        while (claim := self.runner.take()) is not None:
            self.runner.run(claim)
        self.prover.prove()

    changing(monkeypatch, off)
    monkeypatch.setattr(prove_best, "_PROOFS", 1)  # no time for another
    monkeypatch.setattr(study._Study, "_work", work)
    answer = run(given)
    assert not answer.changes and answer.recommended and answer.sentences[0].startswith("Change nothing: of all")
    assert "by more than the noise" in answer.sentences[0]  # which another run may lead the table by
    assert read(tmp_path / "study/best.yaml", []).train == space.start


def test_the_last_word_is_the_same_when_it_is_read_again(tmp_path):
    rule = {**RULE, "levers": {**RULE["levers"], "model.attention": {"flash": [0.9995, 1.0]}}}
    answer = run(settings(tmp_path / "study", rule))
    (tmp_path / "study/answer.json").unlink()
    again = reread(tmp_path / "study", "study")
    assert again.best.point == answer.best.point and again.changes == BEST


def test_the_reference_runs_beside_the_ablations_of_a_machine_that_changes(tmp_path, monkeypatch):
    turns = itertools.count()

    def drifting(job, found):
        return slower(found, 1 + next(turns) % 2 / 80)

    changing(monkeypatch, drifting)
    rows = [purpose for purpose, _ in itertools.groupby(each.purpose for each in run(settings(tmp_path / "s")).records)]
    assert {CONFIRMATION, "ablation"} <= set(rows)
    for before, row, after in zip(rows, rows[1:], [*rows[2:], "reference"], strict=False):
        assert row not in (CONFIRMATION, "ablation") or before == after == "reference"


def test_of_a_steady_machine_the_reference_is_every_fifth_trial(tmp_path):
    purposes = [record.purpose for record in run(settings(tmp_path / "study")).records]
    at = [number for number, purpose in enumerate(purposes) if purpose == "reference"]
    apart = [after - before for before, after in itertools.pairwise(at)]
    assert len(at) > 3 and max(apart) <= REFERENCE_EVERY and set(apart[3:]) <= {REFERENCE_EVERY}


def test_while_another_worker_confirms_the_best_its_levers_are_put_back(tmp_path, monkeypatch):
    given, real = settings(tmp_path / "study"), study.Ledger.running
    other = {"point": {**given.space.baseline, **BEST}, "purpose": CONFIRMATION, "worker": "another", "since": 0.0}

    def running(ledger):
        found = {key(record.point): record.purpose for record in ledger.records()}
        return real(ledger) + [other] * (key(other["point"]) in found and "ablation" not in found.values())

    monkeypatch.setattr(study.Ledger, "running", running)
    answer = run(given)
    purposes = [record.purpose for record in answer.records]
    assert purposes.index("ablation") < purposes.index(CONFIRMATION) and answer.changes == BEST
    assert answer.elapsed < 30.0 and all(lever.tokens_per_second for lever in answer.ablations)


def test_what_was_found_wrong_stays_so(tmp_path, monkeypatch):
    given = settings(tmp_path / "study")

    def off(job, found):
        wrong = job["configuration"]["model"]["gpt_block"] == "optimized"
        return {**found, "losses": [loss * (1.1 if wrong else 1.0) for loss in found["losses"]]}

    changing(monkeypatch, off)
    assert "model.gpt_block" not in run(given).changes
    (tmp_path / "study/answer.json").unlink()
    assert "model.gpt_block" not in reread(tmp_path / "study", "study").changes

    def stop(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(study._Study, "_refine", stop)
    answer = run(dataclasses.replace(given, resume=True))
    assert answer.interrupted and "model.gpt_block" not in answer.changes


def test_a_killed_study_under_a_cap_is_reported_under_it(tmp_path):
    rule = {**RULE, "bytes": 2_000_000_000}
    given = settings(tmp_path / "study", rule, memory_cap=1.2e9)
    answer = run(given)
    os.unlink(tmp_path / "study/answer.json")
    os.unlink(tmp_path / "study/best.yaml")
    again = reread(tmp_path / "study", "study")
    assert again.best.point == answer.best.point
    assert read(tmp_path / "study/best.yaml", []).train == given.space.at(answer.best.point)
    (tmp_path / "study/answer.json").write_text("[]")
    assert reread(tmp_path / "study", "study").best.point == answer.best.point


def test_the_search_goes_on_from_what_is_allowed(tmp_path):
    """Compiled runs are fast and too large: what they are near to is no use."""
    levers = {**RULE["levers"], "compile": {"default": [0.5, 90.0]}}
    rule = {**RULE, "bytes": 200_000_000, "levers": levers}
    answer = run(settings(tmp_path / "study", rule, memory_cap=1.2e9))
    assert answer.changes == {"model.gpt_block": "optimized", "model.loss": "linear_fused"}


def test_what_there_is_no_time_for_does_not_end_the_search(tmp_path, monkeypatch):
    monkeypatch.setattr(pace, "_COMPILED", (1e6, 1e6))
    answer = run(settings(tmp_path / "study", budget=60.0))
    assert answer.changes == {"model.gpt_block": "optimized", "model.loss": "linear_fused"}
    assert not any(record.point["compile"] == "default" for record in answer.records)


def test_a_trial_that_hangs_does_not_take_the_whole_budget(tmp_path, monkeypatch):
    limits = []
    real = jobs.run_child

    def child(job, limit, *arguments, **options):
        limits.append((job["kind"], limit.seconds))
        return real(job, limit, *arguments, **options)

    given = settings(tmp_path / "study", budget=480.0)
    monkeypatch.setattr(jobs, "run_child", child)
    run(given)
    most = {kind: max(seconds for each, seconds in limits if each == kind) for kind in ("measure", "prove", "observe")}
    assert most["measure"] <= 480 / 6 and most["observe"] <= 480 / 6 and most["prove"] <= 480 + 60 + 10


def test_the_run_as_given_is_measured_and_not_proved_however_little_time_is_left(tmp_path, monkeypatch):
    heard = told(monkeypatch)
    answer = run(settings(tmp_path / "study", budget=0.001))
    assert [record.purpose for record in answer.records] == ["reference"] and answer.recommended
    assert [job["kind"] for job in heard] == ["probe", "measure"] and answer.proof is None
    assert "--resume goes on" in answer.sentences[0]


def test_no_budget_and_nothing_that_runs(tmp_path):
    with pytest.raises(UserError, match="budget"):
        run(settings(tmp_path / "none", budget=0.0))
    broken = {**RULE, "faults": [{"when": {}, "do": "segfault"}]}
    answer = run(settings(tmp_path / "broken", broken))
    assert answer.best is None and answer.sentences[0].startswith("No run was measured") and len(answer.sentences) == 3
    assert len(answer.records) > 3 and {record.outcome for record in answer.records} == {"crashed"}


def test_a_machine_that_cannot_be_measured_is_one_sentence():
    with pytest.raises(UserError, match="The machine was not measured"):
        probe("cpu", command=(sys.executable, "-S", "-E", "-c", "raise SystemExit(3)"))


def test_everything_of_a_record_goes_through_json(tmp_path):
    answer = run(settings(tmp_path / "study", budget=20.0))
    for record in answer.records:
        assert Record.from_dict(json.loads(json.dumps(record.as_dict()))) == record
    assert from_dict(json.loads(json.dumps(answer.start))) == settings(tmp_path / "x").space.start
    assert cache.key({}, {}) == cache.key({}, {})


def told(monkeypatch):
    """The jobs of a study's children, as they come."""
    heard, real = [], jobs.run_child
    monkeypatch.setattr(jobs, "run_child", lambda job, *rest, **more: heard.append(job) or real(job, *rest, **more))
    return heard


def test_losses_are_compared_with_those_of_float32_which_are_asked_for_once(tmp_path, monkeypatch):
    heard, given = told(monkeypatch), settings(tmp_path / "study", budget=10.0)
    answer = run(given)
    asked = [job for job in heard if job.get("curve")]
    assert len(asked) == 1 and asked[0]["start"] == dataclasses.asdict(given.space.start)
    assert answer.float32_losses == [5.0, 2.5, 1.5]
    losses = answer.best.measurement.losses
    expected = max(abs(a - b) for a, b in zip(losses, answer.float32_losses, strict=False))
    assert answer.loss_difference(answer.best) == expected
    (tmp_path / "study/answer.json").unlink()
    assert reread(tmp_path / "study", "study").float32_losses == answer.float32_losses
    heard.clear()
    more = run(dataclasses.replace(given, resume=True, budget=2.0))
    assert more.float32_losses == answer.float32_losses and not any(job.get("curve") for job in heard)


def test_a_proof_outlives_what_comes_after_it(tmp_path, monkeypatch):
    heard = told(monkeypatch)
    answer = run(settings(tmp_path / "study", {**RULE, "curve": "segfault"}, budget=20.0))
    assert answer.proof.verdict == "same within rounding" and answer.recommended
    assert answer.no_float32.startswith("the standard model in float32 did not run: Its process was killed by SIGSEGV")
    assert answer.no_float32.rstrip(".") in answer.about_losses
    assert sum(bool(job.get("curve")) for job in heard) == 1

    def interrupted(job, limits, hear=None, command=None):
        if not job.get("curve"):
            return real(job, limits, hear or (lambda event: None), command)
        losses = {name: [5.0] for name in ("float32", "standard", "best")}
        hear({"event": "proof", "value": {"verdict": "bit-identical", "why": "", "layers": [], "losses": losses}})
        raise KeyboardInterrupt

    real = jobs.run_child
    monkeypatch.setattr(jobs, "run_child", interrupted)
    answer = run(settings(tmp_path / "other", budget=10.0))
    assert answer.interrupted and answer.proof.verdict == "bit-identical" and answer.recommended


def test_whose_losses_are_compared_with_float32s(tmp_path):
    plain = open_space(read(None, ["global_batch=2"]), device="cpu")
    given = light_record(plain)
    assert float32_losses(plain, [given], "", None) == {"float32_losses": given.measurement.losses}
    halves = open_space(read(None, ["global_batch=2", "precision=bf16"]), device="cpu")
    noted = {"float32_losses": [1.0]}
    assert float32_losses(halves, [given], "", None) == {} and float32_losses(halves, [given], "", noted) == noted
    dropping = open_space(read(None, ["global_batch=2", "model.dropout=0.1"]), device="cpu")
    for space, own, word in ((dropping, "", "dropout"), (plain, "package:factory", "of your own")):
        assert word in float32_losses(space, [given], own, noted)["no_float32"]


def test_a_users_model_that_draws_nothing_is_compared_with_its_own_float32_baseline(tmp_path, monkeypatch):
    space = open_space(read(None, ["global_batch=4", "precision=fp32", "threads=1"]), device="cpu", of_any_model=True)
    measured = types.SimpleNamespace(losses=[3.0, 2.0])
    records = [types.SimpleNamespace(purpose="reference", measurement=measured)]
    assert float32_losses(space, records, "a:b", None, draws=False) == {"float32_losses": [3.0, 2.0]}
    assert "other random numbers" in float32_losses(space, records, "a:b", None, draws=True)["no_float32"]
    other = dataclasses.replace(space, start=dataclasses.replace(space.start, precision="bf16"))
    assert "not in float32" in float32_losses(other, records, "a:b", None, draws=False)["no_float32"]


def light_record(space):
    measured = Measurement(10, [0.1] * 5, 0.1, 0.0, [3.0, 2.0], 1)
    return Record(space.baseline, "reference", "done", measurement=measured)
