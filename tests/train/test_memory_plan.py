import dataclasses
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilewright.errors import UserError
from tilewright.plan import memory
from tilewright.plan.decoder import from_gpt
from tilewright.plan.memory import kept_activations
from tilewright.plan.memory import train as plan_memory
from tilewright.plan.training import Training
from tilewright.train import memory_plan
from tilewright.train.load_config import read
from tilewright.train.memory_plan import planned, policies
from tilewright.train.schema import OPTIMIZERS, PRECISIONS, Model, Optimizer, Train

LAYERS = 6


def run(budget):
    return Train(model=Model(layers=LAYERS, recompute="budget", recompute_budget=budget))


def kept(config, chosen):
    """GiB that the blocks keep under a policy each."""
    decoder, training = from_gpt(config.model), planned(config, "bf16", 8, 1)
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
    chosen = policies(config, planned(config, "bf16", 8, 1))
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
        policies(config, planned(config, "bf16", 8, 1))


def test_without_a_budget_all_blocks_are_alike():
    config = Train(model=Model(layers=3, recompute="selective"))
    assert policies(config, planned(config, "fp32", 8, 1)) == ["selective"] * 3


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", PRECISIONS[1:])
def test_the_plan_knows_every_run(optimizer, precision):
    config = Train(optimizer=Optimizer(name=optimizer))
    assert plan_memory(from_gpt(config.model), planned(config, precision, 4, 2)).total > 0


RESULTS = sorted((Path(__file__).parents[2] / "results" / "h200").glob("train_*.json"))
RECORDED = [case for path in RESULTS for case in json.loads(path.read_text())["cases"] if "peak_allocated" in case]


@pytest.mark.parametrize("case", RECORDED, ids=lambda case: f"{case['group']}: {case['case']}")
def test_the_plan_of_a_run_is_what_an_h200_measured(case):
    """Every lever there is a record of: what is recomputed, the residual stream, the loss, optimizers, precisions."""
    run = read(None, case["overrides"]).train
    sizes = run.batch_sizes(1)
    training = planned(run, "bf16" if run.precision == "auto" else run.precision, sizes.micro, sizes.accumulation)
    decoder, chosen = from_gpt(run.model), policies(run, training)
    share = {policy: chosen.count(policy) / len(chosen) for policy in chosen}
    allocated = sum(
        share[policy] * memory.train(decoder, dataclasses.replace(training, recompute=policy)).allocated
        for policy in share
    )
    assert allocated == pytest.approx(case["peak_allocated"], rel=0.03)


def test_there_are_records_of_recomputed_norms():
    recomputed = [case for case in RECORDED if "model.recompute=selective" in case["overrides"]]
    assert len(recomputed) >= 2 and all("model.gpt_block=optimized" in case["overrides"] for case in recomputed)


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize(("block", "dropout", "kept"), [
    ("standard", 0.0, 4), ("standard", 0.1, 4 + 1),  # the sum in float32; the mask of one dropout
    ("optimized", 0.0, 4), ("optimized", 0.1, 4 + 4),  # a sum behind dropout cannot be made twice alike
])  # fmt: skip
def test_a_recomputed_norm_keeps_its_sum_and_neither_output_nor_statistics(block, dropout, norm, kept):
    width, heads = 64, 4
    decoder = from_gpt(Model(width=width, heads=heads, gpt_block=block, dropout=dropout, norm=norm))
    found = memory.layer_activation_bytes(decoder, Training(recompute="selective"))
    attention, inner = 2 * 4 * width + 4 * heads, 2 * 4 * width
    assert found == kept * width + attention + inner


def test_a_run_that_cannot_fit_names_what_would(monkeypatch):
    config = Train(model=Model(width=1024, layers=24, heads=16, vocabulary=50368, sequence=2048))
    training = planned(config, "bf16", 64, 1)
    decoder, cpu = from_gpt(config.model), torch.device("cpu")
    needed = memory.train(decoder, dataclasses.replace(training, device="cpu")).allocated - memory.WORKSPACE_BYTES
    for share, refused in ((0.91, False), (0.89, True)):  # a tenth is the plan's doubt
        monkeypatch.setattr(memory_plan, "host_memory_bytes", lambda share=share: int(share * needed))
        if not refused:
            memory_plan.refuse_misfit(decoder, training, ["none"], cpu)
            continue
        with pytest.raises(UserError, match=r"this machine has [\d,.]+ GB: micro_batch=(\d+) fits") as found:
            memory_plan.refuse_misfit(decoder, training, ["none"], cpu)
        fits = int(str(found.value).partition("micro_batch=")[2].split()[0])
        assert 0 < fits < 64
    memory_plan.refuse_misfit(decoder, training, ["none"] * 12 + ["full"] * 12, cpu)  # which may fit: it is tried
    monkeypatch.setattr(memory_plan, "host_memory_bytes", lambda: 2**30)
    with pytest.raises(UserError, match=r"no micro_batch fits; .* saves [\d,.]+ GB") as found:
        memory_plan.refuse_misfit(decoder, training, ["none"], cpu)
    read(None, [str(found.value).partition("fits; ")[2].split()[0]])  # what it advises is a field of a run
