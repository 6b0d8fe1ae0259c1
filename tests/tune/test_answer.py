"""What the answer says where there is nothing to change, or nothing to recommend."""

import dataclasses

import pytest

from tilewright.tune.answer import Answer, sentences
from tilewright.tune.record import Measurement, Record
from tilewright.tune.report import page

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
        ({"discarded": {"it does not fit": 7}}, "of the others none can fit, or be faster"),
        ({"records": [GIVEN, FAILED]}, "all others failed, the first of them so: It is broken."),
    ],
)
def test_where_nothing_but_the_run_as_given_was_measured_it_says_why(changes, why):
    answer = dataclasses.replace(ALONE, **changes)
    what, gain, _ = sentences(answer)
    assert what.startswith("Change nothing yet: only the run as given was measured; ") and why in what
    assert gain == "It trains 1,200 tokens a second, measured on this machine."
    assert "nothing to change yet" in page(answer)


def test_where_all_that_was_measured_is_too_large_or_wrong_it_does_not_say_that_nothing_was():
    words = " ".join(sentences(dataclasses.replace(ALONE, best=None, records=[GIVEN, OTHER])))
    assert words.startswith("There is nothing to recommend. Every run that was measured takes more memory than it may")
    assert "--memory" in words and "measured to its end" not in words
