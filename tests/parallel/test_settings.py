"""Settings of FSDP2, optimizers whose states ranks share, and what ranks must have alike, on four of them over gloo."""

import contextlib
import json
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ranks import run_ranks
from tilewright.errors import UserError
from tilewright.runtime import dispatch
from tilewright.train import loop
from tilewright.train.checkpoint import read
from tilewright.train.loop import train
from train.tiny import as_on_a_cpu, losses, tiny  # noqa: F401

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"),
    pytest.mark.usefixtures("as_on_a_cpu"),
]
RANKS, STEPS = 4, 4
MODEL = {"dropout": 0.1, "heads": 4, "kv_heads": 2}
# By their names: the section `parallel` of a run. What they change is when ranks send, and to whom.
SETTINGS = {
    "reshard within pairs": {"zero": 3, "reshard": 2},
    "reshard nothing": {"zero": 3, "reshard": 4},
    "no prefetch": {"zero": 3, "prefetch": 0},
    "prefetch 2": {"zero": 3, "prefetch": 2},
    "float32 asked for": {"zero": 2, "parameters": "fp32", "gradients": "fp32"},
}
# What steps the parts of a rank, each number by itself.
OPTIMIZERS = {
    "lion": {"optimizer": {"name": "lion"}},
    "sgd": {"optimizer": {"name": "sgd"}},
    "adamw_bf16": {"optimizer": {"name": "adamw_bf16"}},
    "bf16_kahan": {"precision": "bf16_kahan"},
}
SPLITS = {"zero 3": {"zero": 3}, "tp + sp": {"tp": 2, "sp": True}}
MESHES = {**SPLITS, "pp x tp": {"pp": 2, "tp": 2}, "cp, 2 groups": {"zero": 2, "cp": 2, "dp_replicate": 2}}
ON_16_BITS = {"parameters": "bf16", "gradients": "bf16", "zero": 3}
IN_16_BITS = {"precision": "bf16", "model": {**MODEL, "residual": "bf16"}}


def run_of(folder, parallel=None, **changes):
    changes = {"model": MODEL, "checkpoint": {"final": False}} | changes
    parallel = {"dropout": "position", **(parallel or {})}
    return tiny(folder, steps=STEPS, micro_batch=1, global_batch=4, parallel=parallel, **changes)


class Sent(TorchDispatchMode):
    """The dtypes of what is gathered and of gradients."""

    def __init__(self):
        super().__init__()
        self.dtypes = {}

    def __torch_dispatch__(self, op, types, inputs=(), options=None):
        name = op.overloadpacket.__name__
        if op.namespace == "c10d" and name in ("_allgather_base_", "_reduce_scatter_base_"):
            tensors = [each for each in tree_leaves(inputs) if isinstance(each, torch.Tensor)]
            self.dtypes.setdefault(name, set()).update(str(each.dtype) for each in tensors)
        return op(*inputs, **(options or {}))


def _refusal(run):
    with pytest.raises(UserError) as refused:
        train(run)
    return str(refused.value)


def _differing(folder, rank, found):
    """What one rank has otherwise than the others is found by all before they wait for it."""
    with pytest.MonkeyPatch.context() as patch:
        if rank == 2:
            patch.setattr(loop, "__version__", "0.0.0")
        found["version"] = _refusal(run_of(folder / "version"))
    with pytest.MonkeyPatch.context() as patch:
        here = folder / f"machine-{rank}"  # each with another file under the same name
        here.mkdir()
        (here / "text.txt").write_text("one text or another " * (100 + (rank == 3)))
        patch.chdir(here)
        found["data"] = _refusal(run_of(folder / "data", data={"kind": "text", "paths": ["text.txt"]}))
    changes = {"model": {**MODEL, "width": 64}, "checkpoint": {"resume": str(saved_in(folder))}}
    found["another model"] = _refusal(run_of(folder / "other", {"zero": 3}, **changes))


def _rank(rank, folder):
    dispatch.INTERPRETED = False
    folder, found = Path(folder), {}
    for name, parallel in SETTINGS.items():
        found[name] = losses(run_of(folder / name, parallel))
    for name, changes in OPTIMIZERS.items():
        for split, parallel in SPLITS.items():
            found[f"{name}, {split}"] = losses(run_of(folder / f"{name}-{split}", parallel, **changes))
    with Sent() as sent:
        found["16 bits"] = losses(run_of(folder / "16", ON_16_BITS, **IN_16_BITS))
    found["dtypes"] = {name: sorted(dtypes) for name, dtypes in sent.dtypes.items()}
    for name, parallel in MESHES.items():
        config = run_of(folder / name, parallel, checkpoint={"resume": str(saved_in(folder))})
        with contextlib.ExitStack() as closing:
            run = loop._Run(config, loop.Shown(), None, closing)
            run.journal = None
            run._save()
    _differing(folder, rank, found)
    (folder / f"{rank}.json").write_text(json.dumps(found))


def saved_in(folder):
    return folder / "checkpoints" / f"step-{STEPS:08d}"


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """The folder of all runs, with a checkpoint that one process has saved, and what each rank found."""
    folder = tmp_path_factory.mktemp("settings")
    losses(run_of(folder, checkpoint={"final": True}))
    run_ranks(_rank, RANKS, str(folder))
    return folder, [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


def test_settings_of_fsdp_change_no_loss(everything, tmp_path):
    _, (found, *_) = everything
    alone = losses(run_of(tmp_path))
    for name in SETTINGS:
        assert found[name] == pytest.approx(alone, abs=1e-5, rel=0), name


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_steps_parts_as_it_does_the_whole(everything, tmp_path, name):
    _, (found, *_) = everything
    alone = losses(run_of(tmp_path, **OPTIMIZERS[name]))
    for split, parallel in SPLITS.items():
        # A loss of 5 in bfloat16 goes in steps of 1/32; one that ranks of tp share is in float32. Where a gradient's
        # last bit differs, a state rounds to another bfloat16, and changes a weight by 2^-8 of what a step does.
        near = {"bf16_kahan": 2**-5 if parallel.get("tp") else 1e-5, "adamw_bf16": 1e-4}.get(name, 1e-5)
        assert found[f"{name}, {split}"] == pytest.approx(alone, abs=near, rel=0), split


def test_weights_and_gradients_travel_in_16_bits_where_that_is_asked_for(everything, tmp_path):
    _, (found, *_) = everything
    assert found["dtypes"] == {name: ["torch.bfloat16"] for name in ("_allgather_base_", "_reduce_scatter_base_")}
    alone = losses(run_of(tmp_path, **IN_16_BITS))
    assert found["16 bits"] == pytest.approx(alone, abs=0.02, rel=0)


@pytest.mark.parametrize("mesh", MESHES)
def test_what_a_mesh_loads_and_saves_is_the_same_to_the_bit(everything, mesh):
    folder, _ = everything
    for part in ("model", "optimizer"):
        before, after = (read(saved_in(each), part)[0] for each in (folder, folder / mesh))
        assert before.keys() == after.keys() and before
        for name, value in before.items():
            assert value.dtype == after[name].dtype and torch.equal(value, after[name]), name


@pytest.mark.parametrize("what, words", [
    ("version", r"Rank 2 has another version than rank 0: tilewright is '0.0.0' and there "),
    ("data", r"Rank 3 has another data set than rank 0: hash is "),
    ("another model", r"has model/token.weight as \(256, 32\) in torch.float32, this run as \(256, 64\) "),
])  # fmt: skip
def test_what_ranks_must_have_alike_is_refused_by_all_in_the_same_words(everything, what, words):
    _, found = everything
    assert len({each[what] for each in found}) == 1 and re.search(words, found[0][what])
