"""A layout beside one process: what is compared, and that what a wrong layout does is found."""

import dataclasses

import pytest

from tilewright.train.check_ranks import check_ranks
from tilewright.train.load_config import read
from tilewright.train.schema import Parallel
from tilewright.tune.proof.layout import STEPS, judge_layout, steps_of, together_and_alone, without_layout
from tilewright.tune.search.layouts import with_layout
from tilewright.tune.store.proof import Proof

PROOF = Proof("same within rounding", "layers are as near to float32 as the standard model's in bf16.")
STEADY = {"losses": [5.0, 4.5, 4.2, 4.0, 3.9, 3.8], "norms": [2.0, 1.5, 1.2, 1.1, 1.0, 1.0]}
LEVERS = (
    "precision=bf16", "compile=default", "optimizer.name=adamw_8bit", "model.gpt_block=optimized",
    "model.residual=bf16", "model.loss=linear_fused", "model.attention=flash", "model.dropout=0.1", "model.heads=4",
    "global_batch=64",
)  # fmt: skip


@pytest.mark.parametrize("word", ["dp8", "dp4+zero3", "tp4+sp", "dp2+pp4", "tp2+cp2+zero2", "dp2+tp2+pp2"])
@pytest.mark.parametrize("micro_batch", [1, 4, 8])
def test_both_runs_are_of_the_same_steps_and_in_float32(word, micro_batch):
    run = read(None, [*LEVERS, f"micro_batch={micro_batch}"]).train
    run = dataclasses.replace(run, parallel=with_layout(run.parallel, word))
    shared, whole = together_and_alone(run)
    ranks = {"dp8": 8, "dp2+pp4": 8, "dp2+tp2+pp2": 8}.get(word, 4)
    layout, sizes = check_ranks(shared, ranks)
    alone, one = check_ranks(whole, 1)
    assert (layout.ranks, alone.ranks) == (ranks, 1)
    assert (sizes.global_, sizes.micro) == (one.global_, one.micro) and sizes.global_ <= 32
    assert dataclasses.replace(shared, parallel=Parallel()) == dataclasses.replace(whole, parallel=Parallel())
    assert (shared.parallel.dropout, whole.parallel.dropout) == ("position", "position")
    assert (whole.precision, whole.compile, whole.optimizer.name, whole.model.attention) == (
        "fp32", "none", "adamw", "auto",
    )  # fmt: skip
    assert (whole.model.gpt_block, whole.model.loss, whole.model.dropout) == ("optimized", "linear_fused", 0.1)


@pytest.mark.parametrize(("kind", "step", "factor", "words"), [
    ("losses", 1, 1.001, "the loss of step 1 is 5.005, and 5 in one process"),
    ("losses", 6, 0.99, "the loss of step 6 is 3.762, and 3.8 in one process"),
    ("norms", 1, 2.0, "the norm of the gradients of step 1 is 4, and 2 in one process"),  # AdamW learns the same of it
    ("norms", 3, float("nan"), "the norm of the gradients of step 3 is nan"),
])  # fmt: skip
def test_a_layout_whose_losses_or_gradients_are_others_is_wrong(kind, step, factor, words):
    run = read(None, ["parallel.dp=2", "parallel.zero=3"]).train
    numbers = [value * (factor if place == step else 1.0) for place, value in enumerate(STEADY[kind], 1)]
    found = judge_layout(PROOF, run, {**STEADY, kind: numbers}, STEADY)
    assert found.verdict == "wrong" and found.why.startswith("with parallel=dp2+zero3 ") and words in found.why


def test_a_layout_that_is_right_says_so_and_changes_no_other_verdict():
    run = read(None, ["parallel.dp=2"]).train
    near = {kind: [value * (1 + 2e-5) for value in values] for kind, values in STEADY.items()}
    found = judge_layout(PROOF, run, near, STEADY)
    assert found.verdict == PROOF.verdict
    assert found.why.endswith("in bf16; with parallel=dp2 losses and gradients in float32 are those of one process.")
    assert without_layout(PROOF, "Rank 1: out of memory").verdict == "not proven"
    for verdict in ("wrong", "not proven"):
        other = Proof(verdict, "it is so.")
        assert judge_layout(other, run, STEADY, STEADY) is other is without_layout(other, "no")


def test_fewer_steps_are_no_proof():
    assert steps_of(STEADY) and len(STEADY["losses"]) == STEPS
    assert not steps_of({**STEADY, "norms": [1.0]}) and not steps_of({}) and not steps_of(None)
