"""What the answer says where there is nothing to change, or nothing to recommend."""

import dataclasses

import pytest

from tilewright.cli.tune import show
from tilewright.tune.report.answer import Answer
from tilewright.tune.report.page import page
from tilewright.tune.report.sentences import sentences
from tilewright.tune.store.record import Measurement, Record

GIVEN = Record({"x": 1}, "reference", "done", measurement=Measurement(1000, [1 / 1.2] * 5, 1.0, 0.0, [], 1), began=1.0)
OTHER = dataclasses.replace(GIVEN, point={"x": 2}, purpose="search", began=2.0)
ALONE = Answer(
    name="alone", machine={}, ceilings={}, start={}, levers={"x": [1, 2]}, records=[GIVEN], reference=GIVEN, best=GIVEN,
    budget=60.0, elapsed=10.0,
)  # fmt: skip
FAILED = dataclasses.replace(OTHER, outcome="error", error="It is broken.", measurement=None)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"elapsed": 61.0}, "there was no time for others, and --resume goes on."),
        ({"interrupted": True}, "there was no time for others, and --resume goes on."),
        (
            {"discarded": {"it does not fit": 7}},
            "of the others none can fit or be faster by the plan",
        ),
        ({"records": [GIVEN, FAILED]}, "all others failed, the first of them so: It is broken."),
    ],
)
def test_where_nothing_but_the_run_as_given_was_measured_it_says_why(changes, why):
    answer = dataclasses.replace(ALONE, **changes)
    what, gain, _ = sentences(answer)
    assert what.startswith("Change nothing yet: only the baseline was measured; ") and why in what
    assert gain == "It trains 1,200 tokens a second, measured on this machine."
    assert "nothing to change yet" in page(answer)


def test_where_all_that_was_measured_is_too_large_or_wrong_it_does_not_say_that_nothing_was():
    words = " ".join(sentences(dataclasses.replace(ALONE, best=None, records=[GIVEN, OTHER])))
    assert words.startswith("There is nothing to recommend. Every run that was measured takes more memory than it may")
    assert "--memory" in words and "measured to its end" not in words


def shown(answer, capsys, tmp_path):
    show(answer, tmp_path)
    return " ".join(capsys.readouterr().out.split())


def test_the_table_has_mfu_and_how_far_losses_are_from_float32(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    measured = dataclasses.replace(GIVEN.measurement, mfu=0.413, losses=[5.0, 4.5, 4.25])
    given = dataclasses.replace(GIVEN, measurement=measured)
    other = dataclasses.replace(OTHER, measurement=dataclasses.replace(measured, losses=[5.0, 4.51], mfu=0.5))
    failed = dataclasses.replace(FAILED, point={"x": 3})
    known = dataclasses.replace(ALONE, records=[given, other, failed], float32_losses=[5.0, 4.5, 4.0])
    assert known.loss_difference(given) == 0.25 and known.loss_difference(FAILED) is None
    words = shown(known, capsys, tmp_path)
    assert all(word in words for word in ("MFU", "loss diff", "41.3%", "50.0%", "2.5e-01", "1.0e-02"))
    assert "standard model in float32, 5.000 to 4.000 in 3 steps" in words and "n/a" not in words
    assert known.about_losses in page(known)
    monkeypatch.setenv(
        "COLUMNS", "80"
    )  # as where there is no terminal: the outcome is beside the run, nothing is cut off
    words = shown(known, capsys, tmp_path)
    assert all(word in words for word in ("baseline", "x 3: error", "41.3%", "1.0e-02")) and "…" not in words


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, "MFU is n/a: the peak of this machine is not known; give it with log.peak_tflops=TFLOPS."),
        (
            {"own_model": "a:b"},
            "MFU is n/a: the peak of this machine is not known; give it with log.peak_tflops=TFLOPS.",
        ),
        ({"no_float32": "it ran out of memory."}, "Loss diff is n/a: it ran out of memory. "),
        ({}, "Loss diff is n/a: the proof, which trains the standard model in float32, did not run. "),
    ],
)
def test_what_the_table_does_not_know_has_a_reason(changes, sentence, capsys, tmp_path):
    assert sentence in shown(dataclasses.replace(ALONE, **changes), capsys, tmp_path)
