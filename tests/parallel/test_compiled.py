"""A run on several ranks with `compile` on has the losses of one process without it, and runs what was compiled."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.utils import counters

from parallel.test_equal import STEPS, run_of
from ranks import run_ranks
from tilewright.runtime import dispatch
from train.tiny import as_on_a_cpu, losses  # noqa: F401

pytestmark = [
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"),
    pytest.mark.usefixtures("as_on_a_cpu"),
]
TRACED, BY_INDUCTOR = {"tp": 2, "sp": True}, {"zero": 3}
LAYERS = 3  # a first block, and more than one that share what is compiled


class Counted:
    """A compiler that traces as Inductor does, and counts graphs and how often they run."""

    def __init__(self):
        self.graphs = self.calls = 0

    def __call__(self, module, inputs):
        self.graphs += 1
        compiled = aot_eager(module, inputs)

        def call(*given):
            self.calls += 1
            return compiled(*given)

        return call


def run_with(folder, parallel, layers, **changes):
    run = run_of(folder, "standard", **parallel)
    return dataclasses.replace(run, model=dataclasses.replace(run.model, layers=layers), **changes)


def _rank(rank, folder):
    dispatch.INTERPRETED = False
    folder, counted, compile = Path(folder), Counted(), torch.compile
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda run, options, **how: compile(run, backend=counted, **how))
        traced = losses(run_with(folder / "traced", TRACED, LAYERS, compile="default"))
    torch._dynamo.reset()
    counters.clear()
    compiled = losses(run_with(folder / "compiled", BY_INDUCTOR, 1, compile="default"))
    graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    found = {"traced": (traced, counted.graphs, counted.calls), "compiled": (compiled, graphs, breaks)}
    (folder / f"losses-{rank}.json").write_text(json.dumps(found))


def test_losses_are_those_of_one_process_that_compiles_nothing(tmp_path):
    run_ranks(_rank, 2, str(tmp_path))
    found = json.loads((tmp_path / "losses-0.json").read_text())
    for name, layers in (("traced", LAYERS), ("compiled", 1)):
        alone = losses(run_with(tmp_path / f"{name}-alone", {}, layers))
        assert found[name][0] == pytest.approx(alone, abs=1e-5, rel=0), name
    # With tp a first block and one behind another; with zero a block and the loss. Nothing runs but these.
    assert found["traced"][1:] == [2, STEPS * 2 * LAYERS]
    assert found["compiled"][1:] == [2, 0]
