"""One process by DDP and FSDP2, which share with nobody there: the same losses, the same checkpoints."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from ranks import run_ranks
from tilewright.errors import UserError
from tilewright.parallel.spread import Spread
from tilewright.runtime import dispatch
from tilewright.train.check_ranks import check_ranks
from tilewright.train.checkpoint import read
from train.tiny import losses, tiny

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
STEPS, MORE = 4, 2
WRAPPED = {"plain": {}, "ddp": {"wrap": True}} | {f"zero {zero}": {"wrap": True, "zero": zero} for zero in (2, 3)}


def run_of(folder, name, **changes):
    return tiny(
        folder / name, steps=STEPS, micro_batch=2, global_batch=4, model={"dropout": 0.1, "tied": False},
        schedule={"name": "constant"}, eval={"every": STEPS, "samples": 3}, parallel=WRAPPED[name], **changes,
    )  # fmt: skip


def _rank(rank, folder):
    """One process, as a user starts it: without a process group, which it has in a run alone."""
    dist.destroy_process_group()
    dispatch.INTERPRETED = False
    folder, found = Path(folder), {}
    kinds, replicate = [], Spread.replicate

    def watched(self, streams):
        replicate(self, streams)
        kinds.append([type(self.forward).__name__, isinstance(self.model, FSDPModule)])
        assert dist.is_initialized() == (self.mesh.whole is not None)

    Spread.replicate = watched
    for name in WRAPPED:
        found[name] = losses(run_of(folder, name))
        assert not dist.is_initialized()
    found["kinds"] = kinds[:]
    for name, other in zip(WRAPPED, [*list(WRAPPED)[1:], "plain"], strict=True):
        saved = folder / other / "checkpoints" / f"step-{STEPS:08d}"
        run = run_of(folder / "on", name, checkpoint={"resume": str(saved)})
        found[f"{other} on {name}"] = losses(dataclasses.replace(run, steps=STEPS + MORE))
    (folder / "found.json").write_text(json.dumps(found))


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
def test_a_wrapped_run_is_the_plain_one(tmp_path):
    run_ranks(_rank, 1, str(tmp_path))
    found = json.loads((tmp_path / "found.json").read_text())
    gpt = "FSDPGPT"
    assert found.pop("kinds") == [["GPT", False], [DistributedDataParallel.__name__, False], [gpt, True], [gpt, True]]
    plain = found["plain"]
    for name in WRAPPED:
        assert found[name] == pytest.approx(plain, abs=1e-5, rel=0), name
        weights = [read(tmp_path / one / "checkpoints" / f"step-{STEPS:08d}", "model")[0] for one in ("plain", name)]
        assert weights[0].keys() == weights[1].keys()
    after = [values for name, values in found.items() if " on " in name]
    assert len(after) == len(WRAPPED)
    for values in after:
        assert len(values) == MORE and values == pytest.approx(after[0], abs=1e-5, rel=0)


@pytest.mark.parametrize("ranks, given, words", [
    (2, {}, "parallel.wrap is for one process, and there are 2"),
    (1, {"zero": 3, "tp": 2}, "1 process do not divide"),
])  # fmt: skip
def test_what_it_is_not_for_is_refused(tmp_path, ranks, given, words):
    run = tiny(tmp_path, micro_batch=1, parallel={"wrap": True, **given})
    with pytest.raises(UserError, match=words):
        check_ranks(run, ranks)


def test_recordings_do_not_go_together_with_gathered_weights(tmp_path):
    run = tiny(tmp_path, micro_batch=1, parallel={"wrap": True, "zero": 3})
    with pytest.raises(UserError, match=r"cuda_graphs does not go together with parallel \(one rank, zero 3\)"):
        check_ranks(dataclasses.replace(run, cuda_graphs=True), 1)
