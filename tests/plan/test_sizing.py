import dataclasses

import pytest

from tilewright import hardware
from tilewright.errors import UserError
from tilewright.plan.decoder import load
from tilewright.plan.flops import Matmul
from tilewright.plan.sizing import MISALIGNED, better_sizes, fit, lint, tiles_and_waves

H100 = hardware.find("H100-SXM5")


def test_a_matmul_of_whole_tiles_and_waves_loses_nothing():
    assert fit(128 * 12, 256 * 11, 4096, 132).efficiency == 1.0


def test_one_row_too_many_costs_a_wave():
    assert tiles_and_waves(128 * 132 + 1, 256, (128, 256), 132) == (133, 2)
    assert fit(128 * 132, 256, 4096, 132).efficiency == 1.0
    assert fit(128 * 132 + 1, 256, 4096, 132).efficiency < 0.85  # by smaller tiles, not by half


def test_alignment_is_what_was_published():
    found = fit(8192, 10922, 4096, 132)
    assert found.alignment == MISALIGNED == pytest.approx(0.684, abs=0.001)
    assert fit(8192, 10944, 4096, 132).alignment == 1.0


def test_the_sizes_named_as_better_are_better_and_near():
    matmul = Matmul("up", 8192, 10922, 4096)
    named = better_sizes(matmul, 132)
    assert len(named) == 2 and named[0][0] < 10922 < named[1][0]
    for n, gain in named:
        assert abs(n / 10922 - 1) <= 0.1
        assert fit(8192, n, 4096, 132).efficiency == pytest.approx((1 + gain) * fit(8192, 10922, 4096, 132).efficiency)


def test_a_bad_vocabulary_is_found_and_a_good_shape_is_left_alone():
    bad = lint(load("1b", ["vocabulary=50257"]), H100, micro_batch=4)
    assert [f.what for f in bad if not f.good] == ["logits matmul", "vocabulary v"]
    assert "50,304" in bad[1].advice and bad[1].cost == pytest.approx(1 - MISALIGNED)
    assert all(f.good for f in lint(load("1b"), H100, micro_batch=4))


def test_what_cannot_be_linted_is_one_sentence():
    with pytest.raises(UserError, match="tensor parallel 3"):
        lint(load("1b"), H100, tensor=3)
    with pytest.raises(UserError, match="multiprocessors"):
        lint(load("1b"), dataclasses.replace(H100, multiprocessors=None))
