"""Twenty losses of a run on several ranks are those of one process, dropout on, whatever the mesh is."""

import json
from pathlib import Path

import pytest
import torch.distributed as dist

from ranks import run_ranks
from tilewright.runtime import dispatch
from tilewright.train.checkpoint import read
from train.tiny import as_on_a_cpu, losses, tiny  # noqa: F401

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"),
    pytest.mark.usefixtures("as_on_a_cpu"),
]
STEPS = 20
MODELS = {
    "standard": {"dropout": 0.1},
    "optimized": {
        "dropout": 0.1, "gpt_block": "optimized", "loss": "linear_fused", "position": "rope", "activation": "swiglu",
        "norm": "rms", "bias": False, "kv_heads": 2, "heads": 4, "tied": False, "recompute": "selective",
    },
}  # fmt: skip
# By the number of ranks: the section `parallel` of a run.
MESHES = {
    2: {
        "ddp": {},
        "ddp, no overlap": {"overlap": False},
        "zero 2": {"zero": 2},
        "zero 3": {"zero": 3},
    },
}


def run_of(folder, model, **parallel):
    return tiny(
        folder, steps=STEPS, micro_batch=2, global_batch=8, model=MODELS[model], eval={"every": STEPS, "samples": 3},
        parallel={"dropout": "position", **parallel},
    )  # fmt: skip


def _rank(rank, folder):
    dispatch.INTERPRETED = False
    found = {}
    for name, parallel in MESHES[dist.get_world_size()].items():
        for model in MODELS:
            found[f"{name}: {model}"] = losses(run_of(Path(folder) / f"{name}-{model}", model, **parallel))
    if rank == 0:
        (Path(folder) / "losses.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The losses and the last weights of one process, by model."""
    folder = tmp_path_factory.mktemp("alone")
    found = {model: losses(run_of(folder / model, model)) for model in MODELS}
    return found, {model: read(folder / model / "checkpoints" / f"step-{STEPS:08d}", "model")[0] for model in MODELS}


@pytest.mark.parametrize("ranks", MESHES)
def test_losses_are_those_of_one_process(ranks, alone, tmp_path):
    run_ranks(_rank, ranks, str(tmp_path))
    expected, weights = alone
    found = json.loads((tmp_path / "losses.json").read_text())
    assert len(found) == len(MODELS) * len(MESHES[ranks])
    for name, values in found.items():
        mesh, _, model = name.partition(": ")
        assert values == pytest.approx(expected[model], abs=1e-5, rel=0), name
        saved, _ = read(tmp_path / f"{mesh}-{model}" / "checkpoints" / f"step-{STEPS:08d}", "model")
        assert saved.keys() == weights[model].keys(), name
        assert all((saved[key] - value).abs().max() < 2e-4 for key, value in weights[model].items()), name
