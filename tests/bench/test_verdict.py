"""Where a verdict turns: a difference of just as much as is allowed is none."""

import math

import pytest

from tilewright.bench import verdict as bench


def measured(ours, peer=1.0, spread=0.25):
    each = {"tilewright": ours, "eager": peer}
    return {"device": {name: {"median": seconds, "spread": spread} for name, seconds in each.items()}}


@pytest.mark.parametrize(("ours", "behind"), [(1.25, False), (math.nextafter(1.25, 2), True), (1.0, False)])
@pytest.mark.parametrize(("own", "op"), [(0.25, 0.0), (0.0, 0.25), (0.25, 0.125)])
def test_ours_is_behind_beyond_the_spread_and_not_at_it(ours, behind, own, op):
    assert bench.is_behind(measured(ours, spread=own), "device", op) is behind


def test_noise_is_the_95th_of_a_hundred():
    cases = [{"long": True, "device": {"eager": {"spread": number / 1000}}} for number in range(1, 101)]
    assert bench.noise(cases, "device") == 0.095
    assert bench.noise([], "device") == 0.0
