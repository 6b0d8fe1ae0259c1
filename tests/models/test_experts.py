"""A GPT whose MLPs are mixtures of experts: its blocks, its balance, a run of it, and what refuses it."""

import dataclasses

import pytest
import torch

from ops.contract import DEVICE
from tilewright.errors import UserError
from tilewright.generate.config import of_gpt
from tilewright.models import GPT
from tilewright.nn.experts import Experts
from tilewright.parallel.layout import Layout
from tilewright.plan.decoder import from_gpt, load
from tilewright.plan.gpt import LLAMA, GPTConfig
from tilewright.runtime import dispatch
from tilewright.train.check_ranks import check_ranks
from tilewright.train.checkpoint import read
from tilewright.train.engine import Engine, check_levers
from tilewright.train.export import export_safetensors, load_model
from tilewright.train.huggingface import to_json
from tilewright.train.metrics import read as read_metrics
from tilewright.train.world import World
from train.tiny import as_on_a_cpu, losses, tiny, trained  # noqa: F401

pytestmark = pytest.mark.usefixtures("as_on_a_cpu")
SMALL = GPTConfig(width=32, layers=2, heads=2, vocabulary=64, sequence=16, experts=4)
STYLES = {
    "gpt": SMALL,
    "llama": dataclasses.replace(SMALL, **LLAMA, experts_per_token=3),
    "one each": dataclasses.replace(SMALL, activation="geglu", experts_per_token=1, tied=False),
}


def gradients(config, state=None, device="cpu"):
    torch.manual_seed(0)
    model = GPT(config).to(device)
    if state is not None:
        model.load_state_dict(state)
    batch = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0)).to(device)
    loss = model(batch, batch)
    loss.backward()
    return model, {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}


@pytest.mark.parametrize("style", STYLES)
def test_both_blocks_agree_whatever_is_computed_again(style):
    model, expected = gradients(STYLES[style])
    config = model.config
    assert sum(p.numel() for p in model.parameters()) == config.parameters == from_gpt(config).parameters
    idle = 2 * (4 - config.experts_per_token) * 32 * config.ffn_width * (3 if config.gated else 2)
    assert from_gpt(config).active_parameters == config.parameters - idle
    down, up = model.blocks[1].mlp.experts.down, model.blocks[1].mlp.experts.up
    assert up.std().item() == pytest.approx(0.02, rel=0.1) and down.std().item() == pytest.approx(0.01, rel=0.1)
    for block in ("standard", "optimized"):
        for recompute, mlp in (("none", "auto"), ("none", "recompute"), ("selective", "auto"), ("full", "auto")):
            changed = dataclasses.replace(config, gpt_block=block, recompute=recompute, mlp=mlp)
            assert_alike(gradients(changed, model.state_dict())[1], expected)


def assert_alike(found, expected):
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=name)


def test_where_kernels_run_what_is_given_up_is_made_again(monkeypatch):
    monkeypatch.setattr(dispatch, "INTERPRETED", DEVICE == "cpu")
    config = dataclasses.replace(STYLES["llama"], layers=1, gpt_block="optimized")
    model, expected = gradients(config, device=DEVICE)
    again = dataclasses.replace(config, recompute="selective")
    assert_alike(gradients(again, model.state_dict(), DEVICE)[1], expected)


def test_a_run_balances_alike_in_any_micro_batches_and_goes_on_from_a_checkpoint(tmp_path):
    model = {"experts": 4, "activation": "swiglu", "gpt_block": "optimized", "balance_rate": 0.02}
    whole = tiny(tmp_path / "whole", steps=6, global_batch=4, micro_batch=4, model=model, schedule={"name": "constant"})
    metrics = trained(whole)
    parts = dataclasses.replace(whole, out=str(tmp_path / "parts"), micro_batch=1, steps=3)
    found = losses(parts) + losses(dataclasses.replace(parts, steps=6))
    assert found == pytest.approx([one.loss for one in metrics], abs=1e-5)
    one, other = (read(tmp_path / name / "checkpoints" / "step-00000006", "model")[0] for name in ("whole", "parts"))
    assert one.keys() == other.keys() and "blocks.1.mlp.bias" in one
    assert torch.equal(one["blocks.1.mlp.bias"], other["blocks.1.mlp.bias"]) and one["blocks.1.mlp.bias"].any()
    assert all(0.25 <= each.largest_share <= 0.5 for each in metrics)
    assert [line["largest_share"] for line in read_metrics(tmp_path / "whole" / "metrics.jsonl")] == [
        each.largest_share for each in metrics
    ]
    assert "share" in metrics[0].header() and f"{metrics[0].largest_share:.1%}" in metrics[0].line()
    fixed = dataclasses.replace(whole, model=dataclasses.replace(whole.model, balance_rate=0.0))
    assert losses(dataclasses.replace(fixed, steps=7)), "another rate is not another model"
    exported = load_model(tmp_path / "parts")
    export_safetensors(exported, tmp_path / "model.safetensors")
    assert isinstance(exported.blocks[0].mlp.experts, Experts)


def test_a_skipped_step_does_not_move_the_balance(tmp_path):
    run, cpu = tiny(tmp_path, model={"experts": 4}), torch.device("cpu")
    engine = Engine(run, cpu, World.current(Layout(), "cpu"), ["none"] * 2)
    for limit, moves in ((-1.0, False), (99.0, True)):
        loss = engine.accumulate(torch.randint(256, (2, 33)), True)
        norm, skipped, share = engine.update(loss, torch.tensor(limit), 1e-3, 1).tolist()
        assert norm > 0 and skipped != moves and 0.25 < share <= 0.5
        for mixture in engine.mixtures:
            assert bool(mixture.bias.any()) == moves and not mixture.counts.any()


@pytest.mark.parametrize("changes, words", [
    ({"experts": 1}, "an MLP like any other"),
    ({"experts": -1}, "at least 0"),
    ({"experts_per_token": 5}, "a token can take 1 to 4 of 4"),
    ({"experts_per_token": 0}, "a token can take 1 to 4 of 4"),
    ({"balance_rate": float("nan")}, "must lie in"),
])  # fmt: skip
def test_a_mixture_that_cannot_be_is_refused(changes, words):
    with pytest.raises(UserError, match=words):
        dataclasses.replace(SMALL, **changes)


def test_what_does_not_know_experts_says_so(tmp_path):
    run = tiny(tmp_path, model={"experts": 4}, global_batch=4)
    cpu = torch.device("cpu")
    for changes, words in [({"compile": "default"}, "compile=default"), ({"rules": "all"}, "rules=all")]:
        with pytest.raises(UserError, match=f"{words} does not know model.experts"):
            check_levers(dataclasses.replace(run, **changes), cpu, 1)
    with pytest.raises(UserError, match="its tiles are of one MLP"):
        check_levers(tiny(tmp_path, model={"experts": 4, "mlp": "tilesync"}), cpu, 1)
    graphs = dataclasses.replace(run, cuda_graphs=True)
    with pytest.raises(UserError, match="do not wait for the host .the standard loop waits"):
        check_levers(graphs, torch.device("cuda"), 1)
    for parallel, words in [
        ({"tp": 2, "ep": 4}, "4 experts do not divide by tensor parallel 2 x expert parallel 4"),
        ({"ep": 4, "zero": 3, "dp_replicate": 4}, "2 data and context ranks of a group do not divide by expert"),
        ({"ep": 4, "zero": 3, "reshard": 2}, "parallel.reshard is 2 and ep 4; with ep, choose 4 for both"),
        ({"tp": 2, "zero": 3, "reshard": 2}, "parallel.reshard=2 among 4 ranks does not go together with tp and pp"),
    ]:
        with pytest.raises(UserError, match=words):
            check_ranks(tiny(tmp_path, model={"experts": 4}, global_batch=8, micro_batch=1, parallel=parallel), 8)
    again = tiny(tmp_path, model={"experts": 4, "recompute": "selective"}, global_batch=4, micro_batch=1,
                 parallel={"ep": 2, "pp": 2, "zero": 3})  # fmt: skip
    with pytest.raises(UserError, match="recompute=selective does not go together with parallel.ep or tp, pp and"):
        check_ranks(again, 4)
    with pytest.raises(UserError, match="cuda_graphs does not go together with parallel .dp 2, ep 2"):
        check_ranks(dataclasses.replace(graphs, parallel=dataclasses.replace(run.parallel, ep=2), micro_batch=2), 2)
    with pytest.raises(UserError, match="not written for transformers"):
        to_json(SMALL)
    with pytest.raises(UserError, match="generate does not run"):
        of_gpt(SMALL)


def test_a_preset_takes_experts():
    assert load("125m", ["experts=8"]).active_experts == 2
    assert load("125m", ["experts=8", "active_experts=3"]).active_experts == 3
