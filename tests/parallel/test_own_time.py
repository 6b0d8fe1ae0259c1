"""A rank that is slow is named, though all take the same time for a step."""

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ranks import run_ranks
from tilewright.models import GPT
from tilewright.models.block import Block
from tilewright.parallel.layout import Layout
from tilewright.parallel.own_time import OwnTime, Slowest
from tilewright.parallel.spread import Spread
from tilewright.plan.gpt import GPTConfig
from tilewright.runtime import dispatch
from tilewright.train.loop import train
from tilewright.train.metrics import read
from tilewright.train.shown import Shown
from train.tiny import tiny

STEPS, SLOW = 22, 1
MESHES = {"ddp": {}, "zero 3": {"zero": 3}, "pp": {"dp": 1, "pp": 3}, "pieces": {"dp": 1, "pp": 3, "pieces": 2}}


def run_of(folder, mesh):
    parallel = MESHES[mesh]
    return tiny(
        folder / mesh, steps=STEPS, micro_batch=1, accumulation=parallel.get("pp", 1), parallel=parallel,
        model={"width": 16, "layers": 3 * parallel.get("pieces", 1), "sequence": 16},
    )  # fmt: skip


def _rank(rank, folder):
    dispatch.INTERPRETED, forward = False, Block.forward

    def slowed(*inputs):
        time.sleep(0.04)
        return forward(*inputs)

    Block.forward = slowed if rank == SLOW else forward
    said = {mesh: [] for mesh in MESHES}
    for mesh, lines in said.items():
        train(run_of(Path(folder), mesh), Shown(say=lines.append))
    (Path(folder) / f"said-{rank}.json").write_text(json.dumps(said))


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_slow_rank_is_named_whatever_the_mesh_is(tmp_path):
    run_ranks(_rank, 3, str(tmp_path))
    said = [json.loads((tmp_path / f"said-{rank}.json").read_text()) for rank in range(3)]
    for mesh in MESHES:
        (line,) = said[0][mesh]
        assert line.startswith(f"Rank {SLOW} takes ") and not said[1][mesh] and not said[2][mesh]
        records = {record["step"]: record for record in read(tmp_path / mesh / "metrics.jsonl")}
        assert records[20]["slowest_rank"] == SLOW and records[20]["slowest_times"] > 1.5
        assert records[19]["slowest_rank"] is None


@pytest.mark.parametrize("layout, spans", [
    (Layout(pp=2), 3), (Layout(dp=2, zero=3), 3), (Layout(dp=2, pp=2), 3), (Layout(tp=2), 1),
], ids=str)  # fmt: skip
def test_of_a_pipeline_it_is_the_blocks_which_each_stage_has_as_many_of(layout, spans):
    """The last one's output layer can take as long as ten blocks, and the first one's embeddings nothing."""
    spread = Spread.__new__(Spread)
    spread.model = GPT(GPTConfig(width=16, layers=3, heads=2, vocabulary=64, sequence=16))
    spread.mesh, own = SimpleNamespace(layout=layout), OwnTime(torch.device("cpu"))
    assert spread.watch(own)
    own.running = True
    spread.model(torch.zeros(1, 16, dtype=torch.int64))
    assert len(own.take()) == spans


def test_it_is_said_when_it_begins():
    slowest = Slowest()
    works = [[1.0, 1.0, 1.4], [1.0, 1.0, 1.6], [1.0, 1.0, 3.0], [2.0, 1.0, 1.0], [1.0, 1.0, 1.0], [2.0, 1.0, 1.0]]
    assert [slowest.take(each)[1][:6] for each in works] == ["", "Rank 2", "", "Rank 0", "", "Rank 0"]
    assert slowest.take([3.0, 1.0])[0] == {"slowest_rank": 0, "slowest_times": 3.0}
    assert slowest.take([0.0, 0.0])[0]["slowest_times"] == 1.0
