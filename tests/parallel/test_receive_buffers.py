"""What PyTorch's schedules receive into, on ranks over gloo: the plan counts these bytes."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from ranks import run_ranks
from tilewright.parallel.pipeline import Pipeline
from tilewright.plan.decoder import from_gpt
from tilewright.plan.memory import receive_buffers
from tilewright.runtime import dispatch
from tilewright.train.memory_plan import planned
from train.tiny import losses, tiny

# By the number of ranks: the section `parallel` of a run, what else it has, and its micro batches.
RUNS = {
    2: {
        "one stage a rank": ({"pp": 2}, {}, 3),
        "2 pieces": ({"pp": 2, "pieces": 2}, {"model": {"layers": 4}}, 4),
        "bfloat16": ({"pp": 2}, {"precision": "bf16"}, 2),
        "a bfloat16 stream": ({"pp": 2}, {"precision": "bf16", "model": {"residual": "bf16"}}, 2),
    },
    4: {
        "4 stages": ({"pp": 4}, {"model": {"layers": 4}}, 5),
        "tp": ({"pp": 2, "tp": 2}, {}, 2),
        "tp + sp": ({"pp": 2, "tp": 2, "sp": True}, {}, 2),
        "cp": ({"pp": 2, "cp": 2, "zero": 3}, {}, 2),
    },
}  # fmt: skip


def run_of(folder, parallel, changes, micro_batches):
    return tiny(folder, steps=2, micro_batch=2, accumulation=micro_batches, checkpoint={"final": False},
                parallel=parallel, **changes)  # fmt: skip


def _bytes(stage):
    infos = tree_leaves([*stage.args_recv_info.values(), *stage.grad_recv_info.values()])
    buffers = [getattr(info, "buffer", None) for info in infos]
    return sum(buffer.nbytes for buffer in buffers if buffer is not None)


def _rank(rank, folder, ranks):
    dispatch.INTERPRETED = False
    found, step = {}, Pipeline.step

    def watched(self, batches, seeds):
        out = step(self, batches, seeds)
        (schedule,) = self._schedules.values()
        stages = [schedule._stage] if hasattr(schedule, "_stage") else schedule._stages
        sizes.append([sum(map(_bytes, stages)), self.mesh.place("pp")])
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pipeline, "step", watched)
        for name, run in RUNS[ranks].items():
            sizes = []
            losses(run_of(Path(folder) / name, *run))
            assert sizes[0] == sizes[1]  # they stay from step to step
            found[name] = sizes[-1]
    (Path(folder) / f"{ranks}-{rank}.json").write_text(json.dumps(found))


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("ranks", RUNS)
def test_they_are_as_large_as_planned(tmp_path, ranks):
    run_ranks(_rank, ranks, str(tmp_path), ranks)
    for rank in range(ranks):
        found = json.loads((tmp_path / f"{ranks}-{rank}.json").read_text())
        for name, given in RUNS[ranks].items():
            run = run_of(tmp_path, *given)
            layout = run.layout(ranks)
            sizes = run.batch_sizes(layout.dp)
            how = planned(run, "bf16" if run.precision == "bf16" else "fp32", sizes.micro, sizes.accumulation, layout)
            how = dataclasses.replace(how, device="cpu")
            actual, place = found[name]
            expected = receive_buffers(from_gpt(run.model), how, first=place == 0, last=place == layout.pp - 1)
            assert actual == expected > 0, name
