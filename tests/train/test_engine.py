"""The weights that an engine keeps in 16 bits beside float32 change no bit of a run, and are always up to date."""

import math

import pytest
import torch

from ops.contract import DEVICE, on_gpu
from tilewright.ops import rounded
from tilewright.train import optimizers
from tilewright.train.engine import Engine
from tilewright.train.world import World
from train.tiny import tiny

CASES = {
    "8-bit states": {"optimizer": {"name": "adamw_8bit"}},
    "adamw": {},
    "graphs": {"cuda_graphs": True},
}


def steps(config, parts=2):
    """Losses and weights of three steps; before the third, weights are changed as a checkpoint changes them."""
    engine = Engine(config, torch.device(DEVICE), World(), ["none"] * 2)
    tokens = torch.randint(256, (3, parts, 4, 33), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    losses = []
    for number, batch in enumerate(tokens):
        if number == 2:
            engine.model.load_state_dict({name: 0.9 * value for name, value in engine.model.state_dict().items()})
        engine.seed(number)
        losses += [engine.accumulate(micro, first=index == 0).clone() for index, micro in enumerate(batch)]
        engine.update(losses[-1], torch.tensor(math.inf, device=DEVICE), 1e-2, parts)
    return engine, torch.stack(losses), [parameter.detach().clone() for parameter in engine.model.parameters()]


@pytest.mark.parametrize("case", [pytest.param(case, marks=on_gpu if case != "8-bit states" else ()) for case in CASES])
def test_weights_kept_in_16_bits_change_no_bit_of_a_run(case, tmp_path, monkeypatch):
    monkeypatch.setattr(optimizers, "LARGE", 1000)
    levers = {"gpt_block": "optimized", "loss": "linear_fused"}
    config = tiny(tmp_path, precision="bf16", device=DEVICE, model=levers, **CASES[case])
    engine, *found = steps(config)
    kept = [weight for weight in engine.model.parameters() if rounded.kept(weight) is not None]
    assert {id(p) for p in kept} == {id(p) for p in engine.rounded}
    assert len(kept) == 1 + 4 * 2
    for weight in kept:
        assert torch.equal(rounded.kept(weight), weight.detach().bfloat16())
    monkeypatch.setattr(rounded, "keep", lambda parameter: None)
    _, *plain = steps(config)
    for with_copies, without in zip(found, plain, strict=True):
        for one, other in zip(with_copies, without, strict=True):
            assert torch.equal(one, other)


def test_nothing_is_kept_where_nobody_writes_it(tmp_path, monkeypatch):
    monkeypatch.setattr(optimizers, "LARGE", 1)
    for changes in ({"precision": "fp32"}, {"compile": "default"}, {"model": {"gpt_block": "standard"}}):
        levers = {"precision": "bf16", "model": {"gpt_block": "optimized"}, "optimizer": {"name": "adamw_8bit"}}
        config = tiny(tmp_path, **{**levers, **changes})
        assert Engine(config, torch.device("cpu"), World(), ["none"] * 2).rounded == []
