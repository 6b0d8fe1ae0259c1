import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.errors import UserError
from tilewright.plan.decoder import from_gpt
from tilewright.plan.memory import kept_activations
from tilewright.plan.memory import train as plan_memory
from tilewright.train.config import OPTIMIZERS, PRECISIONS, Model, Optimizer, Train
from tilewright.train.recompute import planned, policies

LAYERS = 6


def run(budget):
    return Train(model=Model(layers=LAYERS, recompute="budget", recompute_budget=budget))


def kept(config, chosen):
    """GiB that the blocks keep under a policy each."""
    decoder, training = from_gpt(config.model), planned(config, "bf16", 8, 1, 1)
    each = {
        how: kept_activations(decoder, dataclasses.replace(training, recompute=how), 1, first=False, last=False)
        for how in ("none", "selective", "full")
    }
    return sum(each[how] for how in chosen) / 2**30


LEAST, MOST = (kept(run(1.0), [how] * LAYERS) for how in ("full", "none"))


@given(share=st.floats(0, 1))
def test_what_is_kept_fits_the_budget_and_one_block_more_would_not(share):
    budget = LEAST + share * (MOST - LEAST)
    config = run(budget)
    chosen = policies(config, planned(config, "bf16", 8, 1, 1))
    assert len(chosen) == LAYERS and kept(config, chosen) <= budget * (1 + 1e-9)
    order = ["none", "selective", "full"]
    assert chosen == sorted(chosen, key=order.index)
    for number, how in enumerate(chosen):
        if how != "none" and (number == 0 or chosen[number - 1] != how):  # the next that could keep more
            more = [*chosen[:number], order[order.index(how) - 1], *chosen[number + 1 :]]
            assert kept(config, more) > budget * (1 - 1e-9)


def test_a_budget_below_the_least_is_refused_with_the_least():
    config = run(LEAST * 0.9)
    with pytest.raises(UserError, match=f"still keep {LEAST:.3g} GiB"):
        policies(config, planned(config, "bf16", 8, 1, 1))


def test_without_a_budget_all_blocks_are_alike():
    config = Train(model=Model(layers=3, recompute="selective"))
    assert policies(config, planned(config, "fp32", 8, 1, 1)) == ["selective"] * 3


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", PRECISIONS[1:])
def test_the_plan_knows_every_run(optimizer, precision):
    config = Train(optimizer=Optimizer(name=optimizer))
    assert plan_memory(from_gpt(config.model), planned(config, precision, 4, 2, 1)).total > 0
