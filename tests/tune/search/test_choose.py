"""Which of several runs counts, and how a machine that changes its speed is taken out: of records alone."""

import dataclasses

import pytest

from tilewright.tune.search.choose import confirmed, doubted, latest
from tilewright.tune.search.drift import corrected
from tilewright.tune.store.record import Measurement, Record, key


def timed(point, rate, began, purpose="search", worker="a", **more):
    found = Measurement(1000, [1000 / rate] * 5, 1.0, 0.0, [], 1)
    return Record(point, purpose, "done", measurement=found, began=began, worker=worker, **more)


def test_drift_is_taken_out():
    """A machine that slows down evenly: a run that is twice as fast as the baseline is so at any time."""
    references = [timed({}, rate, began, "reference") for began, rate in ((0.0, 100.0), (10.0, 50.0))]
    found = corrected([*references, timed({"x": 1}, 150.0, 5.0), timed({"x": 2}, 100.0, 12.0)])
    assert [record.tokens_per_second for record in found] == pytest.approx([100.0, 100.0, 200.0, 200.0])


def test_a_machine_that_was_slow_for_a_moment_makes_what_ran_behind_it_no_faster():
    """The last run of the baseline met something else on the machine, and nobody looked again whether that was gone."""
    references = [timed({}, rate, began, "reference") for began, rate in ((0.0, 100.0), (10.0, 101.0), (20.0, 30.0))]
    first, again = timed({"x": 1}, 100.0, 5.0), timed({"x": 1}, 99.0, 25.0, "confirmation")
    found = corrected([*references, first, again])
    assert latest(found)[key(first.point)].tokens_per_second == pytest.approx(100.0, rel=0.01)
    assert not confirmed(found, found[-1])
    # It is not run again and again before the baseline says more, but then it is.
    assert doubted(found, found[0], shaken=True) is None
    found = corrected([*references, again, timed({}, 100.0, 30.0, "reference")])
    assert doubted(found, found[0], shaken=True) is found[3]


def test_workers_on_machines_of_different_speed_are_compared_by_their_own_reference():
    records = [
        timed({}, 100.0, 0.0, "reference", "a"), timed({}, 25.0, 1.0, "reference", "b"),
        timed({"x": 1}, 200.0, 2.0, worker="a"), timed({"x": 2}, 75.0, 3.0, worker="b"),
    ]  # fmt: skip
    assert [r.tokens_per_second for r in corrected(records)] == pytest.approx([100.0, 100.0, 200.0, 300.0])


def test_what_the_cache_kept_is_compared_by_the_reference_of_its_time():
    kept = timed({"x": 1}, 300.0, -99.0, worker="long ago", cached=True, reference=150.0)
    found = corrected([timed({}, 100.0, 0.0, "reference"), kept])
    assert found[1].tokens_per_second == pytest.approx(200.0)


def test_which_of_several_runs_of_a_point_counts():
    """However often the machine changes: a run across a change says less than one on a steady machine."""
    first = timed({"x": 1}, 1200.0, 1.0)
    slow, fast = (timed({"x": 1}, rate, 2.0, "confirmation", doubt=0.03) for rate in (1190.0, 1230.0))
    steady, spoilt = (
        timed({"x": 1}, 1210.0, 4.0, "confirmation"),
        timed({"x": 1}, 1633.0, 5.0, "confirmation", doubt=0.9),
    )
    assert counts(first) is first and counts(first, fast) is fast and counts(first, spoilt) is first
    assert counts(first, fast, spoilt) is fast
    assert counts(first, fast, steady) is steady and counts(first, fast, steady, slow) is first  # the middle one
    assert confirmed([first, steady], steady) and not confirmed([first, fast], fast)
    at_first = dataclasses.replace(spoilt, purpose="search")
    assert counts(at_first, steady) is steady and not confirmed([at_first, steady], steady)  # worth something once
    failed = dataclasses.replace(steady, outcome="crashed", measurement=None)
    assert counts(first, steady, failed) is failed
    assert counts(first, dataclasses.replace(failed, outcome="lost")) is first
    other = timed({"x": 1}, 1180.0, 3.0, "confirmation")  # than the first: a third has to say who is right
    assert counts(first, other) is other and not confirmed([first, other], other)
    assert counts(first, other, steady) is first and confirmed([first, other, steady], first)
    middle = timed({"x": 1}, 1100.0, 6.0, "confirmation")  # two that agree do not vouch for a third
    assert not confirmed([middle, first, steady], middle)


def test_an_unlucky_second_run_does_not_put_a_run_out():
    simple = [timed({"x": 1}, 1430.0, 1.0), timed({"x": 1}, 1400.0, 3.0, "confirmation")]
    other = [timed({"x": 2}, 1425.0, 2.0), timed({"x": 2}, 1424.0, 4.0, "confirmation")]
    records = [*simple, *other]
    assert doubted(records, other[1]) is simple[1]
    again = timed({"x": 1}, 1428.0, 5.0, "confirmation")
    assert counts(*simple, again) is again and doubted([*records, again], again) is None


def counts(*runs):
    return latest(runs)[key(runs[0].point)]
