"""The search on worlds whose truth is known: a plan that is wrong by a factor, levers that help together, that fail."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.train.load_config import read
from tilewright.tune.search.choose import fastest
from tilewright.tune.search.search import UNTRIED, Search
from tilewright.tune.search.space import open_space
from tilewright.tune.store.record import Measurement, Prediction, Record, key

SPACE = open_space(read(None, ["global_batch=8", "threads=1"]), device="cuda", numerics="rounding")


def predicted(seconds, floor=None, size=1e9):
    return Prediction(seconds, seconds / 2 if floor is None else floor, {"matmul": seconds}, size, {"weights": size})


def record(point, seconds, outcome="done", purpose="search", size=10**9):
    ran = outcome in ("done", "stopped early")
    found = Measurement(1000, [seconds] * 5, seconds, 0.0, [1.0], size) if ran else None
    return Record(dict(point), purpose, outcome, None if ran else outcome, measurement=found)


def explore(search, truth, fails=lambda point: False, most=400):
    """Run until the search has had enough; what a study does, without processes."""
    records = [record(search.space.baseline, truth(search.space.baseline), purpose="reference")]
    while len(records) < most and (point := search.next(records)) is not None:
        assert key(point) not in {key(each.point) for each in records}, "no point twice"
        assert search.space.refusal(point) is None
        records.append(record(point, truth(point), "error" if fails(point) else "done"))
    return records


def multiplied(factors):
    def seconds(point):
        matmul = 1.0
        for name, value in point.items():
            matmul *= factors.get((name, value), 1.0)
        return matmul

    return seconds


HELPS = {
    ("model.gpt_block", "optimized"): 0.8, ("model.loss", "linear_fused"): 0.95, ("cuda_graphs", True): 0.97,
    ("model.recompute", "full"): 1.3, ("model.recompute", "selective"): 1.08, ("precision", "fp32"): 9.0,
    ("precision", "tf32"): 3.0, ("micro_batch", 4): 1.05, ("micro_batch", 2): 1.2, ("micro_batch", 1): 1.6,
}  # fmt: skip


def test_a_good_plan_is_followed_at_once_and_hopeless_moves_are_not_tried():
    truth = multiplied(HELPS)
    search = Search(SPACE, lambda point: predicted(truth(point)))
    records = explore(search, truth)
    assert truth(records[1].point) == min(truth(each.point) for each in records) == pytest.approx(0.8 * 0.95 * 0.97)
    best = fastest(records)
    assert all(each.measurement.seconds <= UNTRIED * best.measurement.seconds for each in records[1:])
    assert not any(each.point["precision"] in ("fp32", "tf32") for each in records[1:])
    assert "cannot win" in search.discarded.values()


def test_floors_that_a_run_has_beaten_discard_nothing_better_than_it():
    """A machine that was busy when its limits were measured: floors are too high, and say so themselves."""
    truth = multiplied(HELPS)
    search = Search(SPACE, lambda point: predicted(3 * truth(point), floor=2 * truth(point)))
    assert fastest(explore(search, truth)).measurement.seconds == pytest.approx(0.8 * 0.95 * 0.97)


def test_a_plan_that_is_wrong_about_a_lever_is_put_right_by_measuring():
    truth = multiplied({**HELPS, ("compile", "default"): 0.7, ("model.residual", "bf16"): 0.9})
    plan = multiplied({**HELPS, ("compile", "default"): 1.05, ("model.gpt_block", "optimized"): 1.4})
    records = explore(Search(SPACE, lambda point: predicted(3 * plan(point), floor=0.01)), truth)
    best = fastest(records).point
    assert best["model.gpt_block"] == "optimized" and best["compile"] == "default" and best["model.residual"] == "bf16"


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6))
def test_whatever_the_levers_do_one_by_one_the_best_of_them_is_found(seed):
    chance = random.Random(seed)
    factors = {
        (name, value): chance.uniform(0.75, 1.4) for name, values in SPACE.levers.items() for value in values[1:]
    }
    truth = multiplied(factors)
    plan = multiplied({move: factor * chance.uniform(0.95, 1.05) for move, factor in factors.items()})
    records = explore(Search(SPACE, lambda point: predicted(plan(point), floor=0.01)), truth)
    found = fastest(records)
    around = [point for _, point in SPACE.neighbours(found.point) if SPACE.refusal(point) is None]
    assert all(truth(point) >= 0.95 * truth(found.point) for point in around)
    assert len(records) < 60


def test_without_a_plan_every_move_is_tried_but_those_seen_to_lose():
    truth = multiplied({("compile", "default"): 0.8, ("cuda_graphs", True): 0.9})
    space = open_space(read(None, ["global_batch=2", "threads=1"]), device="cuda", numerics="same", of_any_model=True)
    records = explore(Search(space, lambda point: None), truth)
    assert fastest(records).point["compile"] == "default" and fastest(records).point["cuda_graphs"] is True
    tried = {key(each.point) for each in records}
    left = [(name, p) for name, p in space.neighbours(fastest(records).point) if space.refusal(p) is None]
    lost = {("compile", "none"), ("compile", "max-autotune-no-cudagraphs"), ("cuda_graphs", False)}
    lost |= {("precision", "fp32")}  # beside bf16 more bits are slower
    assert {(name, p[name]) for name, p in left if key(p) not in tried} <= lost


def test_what_does_not_fit_is_never_run_and_counted():
    truth = multiplied(HELPS)
    search = Search(
        SPACE,
        lambda point: predicted(truth(point), size=9e9 if point["micro_batch"] == 8 else 1e9),
        lambda found: "too large" if found.bytes > 5e9 else None,
    )
    records = explore(search, truth)
    assert all(each.point["micro_batch"] < 8 for each in records[1:]) and len(records) > 2
    assert "does not fit" in search.discarded.values()


def test_where_the_run_as_given_does_not_run_something_else_is_tried_until_nothing_is_left():
    search = Search(SPACE, lambda point: predicted(multiplied(HELPS)(point)))
    records = [record(SPACE.baseline, 1.0, "out of memory", "reference")]
    while (point := search.next(records)) is not None:
        records.append(record(point, 1.0, "crashed"))
        assert len(records) < 60
    assert len(records) > 5


def test_a_lever_that_fails_wherever_it_is_tried_is_left_alone():
    truth = multiplied({**HELPS, ("model.attention", "cudnn"): 0.5})
    search = Search(SPACE, lambda point: predicted(truth(point), floor=0.01))
    records = explore(search, truth, fails=lambda point: point["model.attention"] == "cudnn")
    assert sum(each.outcome == "error" for each in records) == 2
    assert fastest(records).point["model.gpt_block"] == "optimized"


def test_points_that_others_run_are_not_chosen():
    truth = multiplied(HELPS)
    records = [record(SPACE.baseline, 1.0, purpose="reference")]
    taken = []
    for _ in range(5):
        taken.append(Search(SPACE, lambda point: predicted(truth(point))).next(records, taken))
    assert len({key(point) for point in taken}) == 5


def test_the_fastest_within_a_cap_and_not_wrong():
    points = [{**SPACE.baseline, "micro_batch": size} for size in (8, 4, 2)]
    records = [record(p, s, size=m) for p, s, m in zip(points, (1.0, 2.0, 3.0), (9, 5, 4), strict=True)]
    assert fastest(records).point == points[0]
    assert fastest(records, cap=6).point == points[1]
    assert fastest(records, cap=6, wrong=[key(points[1])]).point == points[2]
    stopped = record(points[0], 0.1, "stopped early")
    assert fastest([stopped]) is None
    for order in itertools.permutations(records):
        assert fastest(order).point == points[0]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_of_a_model_that_the_plan_does_not_know_compile_comes_first_and_more_bits_never(device):
    space = open_space(read(None, ["global_batch=8", "threads=1"]), device=device, of_any_model=True)
    search = Search(space, lambda point: None)
    records = [record(space.baseline, 1.0, purpose="reference")]
    first = search.next(records)
    assert space.changes(first) == {"compile": "default"}
    ran = explore(search, multiplied({("compile", "default"): 0.9}))
    tried = {each.point["precision"] for each in ran}
    assert tried == ({"bf16"} if device == "cuda" else {"fp32", "bf16"})  # each begins with the first of these
    assert {each.point["micro_batch"] for each in ran} == {8, 4, 2, 1}


def test_where_the_baseline_of_an_unknown_model_fails_more_bits_are_tried():
    space = open_space(read(None, ["global_batch=8"]), device="cuda", of_any_model=True)
    fails = [record(space.baseline, 1.0, "error", purpose="reference")]
    search = Search(space, lambda point: None)
    seen = []
    while (point := search.next([*fails, *seen])) is not None and len(seen) < 20:
        seen.append(record(point, 1.0, "error"))
    assert {"fp32", "tf32"} <= {each.point["precision"] for each in seen}
