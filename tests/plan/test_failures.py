import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.errors import UserError
from tilewright.plan.budget import checkpoint
from tilewright.plan.decoder import Decoder
from tilewright.plan.failures import Failures, of_cluster
from tilewright.plan.training import Training

LLAMA_405B = Decoder(16384, 126, 128, 8, 128, 53248, 128256, 8192, gated=True, tied=False, norm="rms", positions="rope")


def test_llama_3_kept_more_than_nine_tenths_of_its_54_days():
    """419 unexpected interruptions on 16,384 GPUs, storage of 2 TB/s, over 90 % effective: arXiv 2407.21783."""
    kept = checkpoint(LLAMA_405B, Training(precision="mixed"))
    assert kept.whole == 14 * LLAMA_405B.parameters
    failing = of_cluster(16384, kept.whole, storage=2e12)
    assert 54 * 86400 / failing.between == pytest.approx(419)
    goodput = failing.simulate(failing.best_interval())
    assert 0.90 < goodput < 0.95
    # Twice the failures, or restarts of an hour, would not have kept it.
    assert of_cluster(16384, kept.whole, storage=2e12, restart=3600.0).simulate(300.0) < 0.80
    assert of_cluster(32768, kept.whole, storage=2e12).simulate(200.0) < 0.90


@given(
    between=st.floats(2000.0, 1e6), restart=st.floats(0.0, 1500.0), stall=st.floats(0.1, 100.0),
    scale=st.floats(0.3, 3.0), seed=st.integers(0, 10**6),
)  # fmt: skip
@settings(max_examples=20, deadline=None)
def test_what_is_simulated_has_the_mean_that_is_known(between, restart, stall, scale, seed):
    failing = Failures(between, restart, stall, stall)
    interval = scale * failing.daly()
    expected, found = failing.expected_goodput(interval), failing.simulate(interval, seed, 4000)
    assert found == pytest.approx(expected, rel=0.12, abs=0.01)


@pytest.mark.parametrize(("between", "stall"), [(11136.0, 2.8), (3600.0, 60.0), (86400.0, 30.0), (5e6, 80.0)])
def test_the_best_interval_is_about_that_of_young_and_daly(between, stall):
    failing = Failures(between, 600.0, stall, stall)
    best, exact = failing.best_interval(), failing.daly()
    assert 0.5 < best / exact < 2.0 and 0.8 < failing.young() / exact < 1.3
    # Around its optimum goodput is flat: what is lost against the exact one is next to nothing.
    assert failing.expected_goodput(best) > failing.expected_goodput(exact) - 0.005
    assert failing.expected_goodput(exact) >= failing.expected_goodput(2 * exact)
    assert failing.expected_goodput(exact) >= failing.expected_goodput(exact / 2)


def test_checkpoints_in_the_background_stop_the_run_less():
    waiting = of_cluster(1024, 6e12, storage=1e11)
    behind = of_cluster(1024, 6e12, storage=1e11, copy=25e9)
    assert behind.write == waiting.write == 60.0 and behind.stall == pytest.approx(6e12 / 1024 / 25e9)
    assert behind.simulate(behind.best_interval()) > waiting.simulate(waiting.best_interval())
    assert behind.best_interval() >= behind.write - behind.stall  # one is whole before the next begins


def test_a_run_that_fails_before_every_checkpoint_keeps_nothing():
    hopeless = Failures(10.0, 1.0, 5.0, 5.0)
    assert hopeless.simulate(10_000.0) == 0.0 and hopeless.expected_goodput(10_000.0) == 0.0
    assert hopeless.expected_goodput(5.0) > 0.0 and math.isfinite(hopeless.best_interval())


@pytest.mark.parametrize("bad", [{"between": 0.0}, {"restart": -1.0}, {"stall": math.inf}, {"write": 0.5}])
def test_bad_input_is_one_sentence(bad):
    with pytest.raises(UserError):
        Failures(**{"between": 1e4, "restart": 60.0, "stall": 1.0, "write": 1.0, **bad})
    with pytest.raises(UserError, match="storage"):
        of_cluster(8, 1e9, storage=0.0)
