import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.train.schedule import learning_rate
from tilewright.train.schema import SCHEDULES, Schedule


def rates(steps, **fields):
    return [learning_rate(step, steps, 2.0, Schedule(**fields)) for step in range(1, steps + 1)]


@given(
    name=st.sampled_from(SCHEDULES), steps=st.integers(1, 60), warmup=st.integers(0, 80), final=st.floats(0, 1),
    decay=st.floats(0, 2),
)  # fmt: skip
def test_it_rises_to_the_highest_then_never_rises_again_and_ends_at_the_final(name, steps, warmup, final, decay):
    found = rates(steps, name=name, warmup=warmup, final=final, decay=decay)
    top = min(warmup, steps)
    assert found[:top] == pytest.approx([2.0 * step / top for step in range(1, top + 1)])
    after = ([2.0] if top else []) + found[top:]
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(after))
    assert all(2.0 * final - 1e-12 <= rate <= 2.0 for rate in found[top:])
    falls = name in ("linear", "cosine") or (name == "wsd" and decay > 0)
    if steps > warmup:
        assert found[-1] == pytest.approx(2.0 * final if falls else 2.0)


def test_a_cosine_is_half_way_down_in_the_middle_and_wsd_falls_at_the_end_alone():
    assert rates(10, name="cosine", warmup=0, final=0.0)[4] == pytest.approx(1.0)
    assert rates(8, name="cosine", warmup=0, final=0.0)[1] == pytest.approx(1 + math.cos(math.pi / 4))
    assert rates(10, name="wsd", warmup=2, final=0.5, decay=0.25) == pytest.approx([1, 2, 2, 2, 2, 2, 2, 2, 1.5, 1])
