import gc
import itertools

import pytest
import torch

from ops.contract import on_gpu
from tilewright.measure.clock import (
    Timing,
    interleaved_event_time,
    interleaved_graph_time,
    interleaved_wall_time,
    turns,
)
from tilewright.measure.numerics import relative_error, tolerance


def test_timing_is_median_and_quartiles():
    timing = Timing.summarise([5.0, 1.0, 3.0, 2.0, 4.0])
    assert (timing.low, timing.median, timing.high, timing.runs) == (2.0, 3.0, 4.0, 5)


def test_nan_never_passes_for_close():
    error = relative_error(torch.tensor([float("nan"), 1.0]), torch.tensor([1.0, 1.0]))
    assert not error <= 1.0


def test_tolerances_grow_with_the_sum_and_shrink_with_the_dtype():
    assert tolerance(torch.float32, 10_000) > tolerance(torch.float32, 100)
    assert tolerance(torch.float64, 100) < 1e-13 < tolerance(torch.float32, 100) < tolerance(torch.bfloat16, 100)


@on_gpu
def test_the_three_clocks_agree_on_a_long_kernel():
    a = torch.randn(4096, 4096, device="cuda")
    function = lambda: a @ a  # noqa: E731
    device = interleaved_event_time({"f": function})[0]["f"].median
    with torch.cuda.stream(torch.cuda.Stream()):
        assert interleaved_graph_time({"f": function})[0]["f"].median == pytest.approx(device, rel=0.2)
    assert interleaved_wall_time({"f": function})["f"].median == pytest.approx(device, rel=0.3)


def test_nobody_has_the_same_neighbour_in_every_round():
    behind = {name: set() for name in "abcd"}
    for order in turns("abcd", 30):
        assert sorted(order) == list("abcd")
        for before, name in itertools.pairwise(order):
            behind[name].add(before)
    assert all(len(neighbours) == 3 for neighbours in behind.values())
    assert list(turns("abcd", 3)) == list(turns("abcd", 3))


def test_garbage_is_not_collected_while_a_caller_is_timed_and_is_afterwards(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    seen = []
    interleaved_wall_time({"f": lambda: seen.append(gc.isenabled())}, rounds=2, calls=2)
    assert not any(seen) and gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        interleaved_wall_time({"f": lambda: 1 / 0})
    assert gc.isenabled()
