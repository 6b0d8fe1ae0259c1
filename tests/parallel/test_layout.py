"""Sizes of a mesh: what is left out follows, what cannot be is one sentence."""

import dataclasses

import pytest

from tilewright.errors import UserError
from tilewright.parallel.layout import Layout, check, derive
from tilewright.plan.decoder import from_gpt
from tilewright.plan.gpt import GPTConfig
from tilewright.plan.training import Training

MODEL = GPTConfig(width=48, layers=4, heads=6, kv_heads=3, vocabulary=96, sequence=32)


@pytest.mark.parametrize("ranks, given, expected", [
    (1, {}, Layout()),
    (8, {}, Layout(dp=8)),
    (8, {"tp": 2, "zero": 3}, Layout(dp=4, tp=2, zero=3)),
    (8, {"dp": 2, "tp": 2, "pp": 2}, Layout(dp=2, tp=2, pp=2)),
    (8, {"zero": 3, "dp_replicate": 2}, Layout(dp=8, zero=3, dp_replicate=2)),
    (8, {"cp": 4, "sp": True, "tp": 2}, Layout(cp=4, tp=2, sp=True)),
    (8, {"cp": 2, "ep": 4}, Layout(dp=4, cp=2, ep=4)),
])  # fmt: skip
def test_what_is_left_out_follows(ranks, given, expected):
    found = derive(ranks, **given)
    assert found == expected and found.ranks == ranks


@pytest.mark.parametrize("ranks, given, words", [
    (6, {"tp": 4}, "6 processes do not divide by tp 4"),
    (8, {"dp": 2, "tp": 2}, "are 4 ranks, and there are 8 processes"),
    (2, {"sp": True}, "tp is 1"),
])  # fmt: skip
def test_sizes_that_do_not_fit_the_processes(ranks, given, words):
    with pytest.raises(UserError, match=words):
        derive(ranks, **given)


@pytest.mark.parametrize("layout, optimizer, words", [
    (Layout(tp=4), "adamw", "6 heads do not divide by tensor parallel 4"),
    (Layout(tp=6), "adamw", "key-value heads"),
    (Layout(pp=3), "adamw", "4 layers do not divide by pp 3"),
    (Layout(pp=8), "adamw", "layers do not fill 8 pipeline stages"),
    (Layout(pp=4), "adamw", "at least 4 micro batches"),
    (Layout(cp=3), "adamw", "sequence of 32 does not divide by 6"),
    (Layout(dp=2, zero=3), "adafactor", "means over whole rows"),
    (Layout(dp=4, dp_replicate=2), "adamw", "2 groups that each share the weights need ZeRO 2 or 3; zero is 0"),
    (Layout(dp=4, zero=3, dp_replicate=4), "adamw", "4 data and context ranks do not make 4 groups of several"),
    (Layout(dp=4, zero=3, dp_replicate=3), "adamw", "do not make 3 groups"),
    (Layout(dp=2, ep=2), "adamw", "The model has no experts"),
])  # fmt: skip
def test_layouts_that_the_model_does_not_allow(layout, optimizer, words):
    with pytest.raises(UserError, match=words):
        check(layout, from_gpt(MODEL), Training(accumulation=2), optimizer=optimizer)


@pytest.mark.parametrize("layout, optimizer, words", [
    (Layout(dp=3, ep=3), "adamw", "4 experts do not divide by expert parallel 3"),
    (Layout(dp=3, cp=2, ep=4), "adamw", "6 data and context ranks do not divide by expert parallel 4"),
    (Layout(dp=4, tp=2, ep=4), "adamw", "4 experts do not divide by tensor parallel 2 x expert parallel 4"),
    (Layout(tp=3, ep=1), "adamw", "sequence of 32 does not divide by tensor parallel 3"),
    (Layout(dp=4, ep=4, zero=3, dp_replicate=2), "adamw", "2 data and context ranks of a group do not divide by"),
    (Layout(dp=2, ep=2), "adafactor", "means over whole rows"),
])  # fmt: skip
def test_experts_that_cannot_be_shared_so(layout, optimizer, words):
    with pytest.raises(UserError, match=words):
        check(layout, from_gpt(dataclasses.replace(MODEL, kv_heads=6, experts=4)), Training(), optimizer=optimizer)
    assert str(layout).endswith(f", ep {layout.ep}" if layout.ep > 1 else "tp 3") and not layout.is_replicated


def test_layouts_that_the_model_allows():
    for layout in (Layout(tp=3), Layout(pp=2), Layout(pp=2, pieces=2), Layout(cp=4), Layout(dp=2, zero=2, tp=3),
                   Layout(dp=4, zero=3, dp_replicate=2)):  # fmt: skip
        check(layout, from_gpt(MODEL), Training(accumulation=4), optimizer="adamw")
    with pytest.raises(UserError, match="vocabulary of 97"):
        check(Layout(tp=3), from_gpt(dataclasses.replace(MODEL, vocabulary=97)), Training(), optimizer="adamw")
