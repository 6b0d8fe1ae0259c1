"""Twenty losses of a run on several ranks are those of one process, dropout on, whatever the mesh is."""

import dataclasses
import itertools
import json
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ranks import run_ranks
from tilewright.errors import UserError
from tilewright.plan.decoder import from_gpt
from tilewright.plan.traffic import sent
from tilewright.runtime import dispatch
from tilewright.train import loop
from tilewright.train.checkpoint import read
from tilewright.train.loop import train
from tilewright.train.memory_plan import planned
from tilewright.train.schema import Checkpoint, Parallel, Schedule
from train.tiny import as_on_a_cpu, losses, tiny, trained  # noqa: F401

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
    "experts": {
        "dropout": 0.1, "gpt_block": "optimized", "activation": "swiglu", "experts": 4, "balance_rate": 0.01,
        "recompute": "selective",
    },
    "standard experts": {"dropout": 0.1, "experts": 6, "recompute": "full"},
    "full recompute": {"dropout": 0.1, "recompute": "full"},
}  # fmt: skip
# By the number of ranks: the section `parallel` of a run.
MESHES = {
    2: {
        "ddp": {},
        "ddp, no overlap": {"overlap": False},
        "zero 2": {"zero": 2},
        "zero 3": {"zero": 3},
        "tp": {"tp": 2},
        "tp + sp": {"tp": 2, "sp": True},
        "cp": {"cp": 2},
        "pp": {"pp": 2},
        "pp, 2 pieces": {"pp": 2, "pieces": 2},
        "ep": {"ep": 2},
        "zero 3, ep": {"zero": 3, "ep": 2},
    },
    4: {
        "ddp x tp": {"tp": 2},
        "ddp x pp": {"dp": 2, "pp": 2},
        "zero 3 x tp + sp": {"zero": 3, "tp": 2, "sp": True},
        "ddp x pp, 2 pieces": {"dp": 2, "pp": 2, "pieces": 2},
        "zero 3 x pp": {"zero": 3, "pp": 2},
        "zero 3 x pp, 2 pieces": {"zero": 3, "pp": 2, "pieces": 2},
        "tp + sp x pp": {"tp": 2, "sp": True, "pp": 2},
        "pp x cp": {"pp": 2, "cp": 2},
        "zero 2 x cp": {"zero": 2, "cp": 2},
        "zero 3 in 2 groups x cp": {"zero": 3, "cp": 2, "dp_replicate": 2},
        "ddp x ep": {"dp": 4, "ep": 2},
        "ddp x pp, 2 pieces, ep": {"dp": 2, "pp": 2, "pieces": 2, "ep": 2, "overlap": False},
        "zero 3 x ep": {"dp": 4, "zero": 3, "ep": 2},
        "zero 2 x cp, ep": {"zero": 2, "cp": 2, "ep": 4},
        "zero 3 x pp, ep": {"zero": 3, "pp": 2, "ep": 2},
        "tp x cp, ep": {"tp": 2, "cp": 2, "ep": 2},
        "zero 3 x tp + sp, ep": {"zero": 3, "tp": 2, "sp": True, "ep": 2},
        "zero 3 in 2 groups, ep": {"dp": 4, "zero": 3, "dp_replicate": 2, "ep": 2},
        "zero 3, reshard, ep": {"dp": 4, "zero": 3, "reshard": 2, "ep": 2},
    },
}  # fmt: skip
ALONE = Parallel(dropout="position")
DENSE = ("standard", "optimized")
# What sends here does not look at the model.
ONE_IS_ENOUGH = ("ddp, no overlap", "ddp x tp", "ddp x pp", "ddp x pp, 2 pieces")
MODELS_OF = dict.fromkeys(ONE_IS_ENOUGH, DENSE[:1]) | {
    "pp": (*DENSE, "experts"), "ep": ("experts", "standard experts"), "zero 3, ep": ("experts",),
    "ddp x ep": ("experts",), "zero 3 x ep": ("standard experts",), "zero 2 x cp, ep": ("experts",),
    "tp": (*DENSE, "full recompute", "standard experts"), "tp + sp": (*DENSE, "experts"),
    "ddp x pp, 2 pieces, ep": ("experts",), "pp x cp": DENSE[1:],
    "zero 3 x pp, ep": ("standard experts",), "tp x cp, ep": ("experts",),
    "zero 3 x tp + sp, ep": ("experts",), "zero 3 in 2 groups, ep": ("experts",), "zero 3, reshard, ep": ("experts",),
}  # fmt: skip
# A mesh of each number of ranks: what one of them has saved, the others go on with.
SAVERS = {
    "optimized": {1: {}, 2: {"tp": 2, "sp": True}, 4: {"zero": 3, "tp": 2}},
    "experts": {1: {}, 2: {"ep": 2}, 4: {"zero": 3, "tp": 2}},
}
GROUPS = {"tp": 1, "cp": 2, "dp_replicate": 2}  # what else the four may be
SAVED, MORE = 6, 4


def models_of(mesh):
    return MODELS_OF.get(mesh, DENSE)


def run_of(folder, model, **parallel):
    # Each stage needs a micro batch of its own.
    staged = parallel.get("pp") and (parallel.get("zero") or parallel.get("dp"))
    micro = 1 if staged or parallel.get("dp_replicate") or parallel.get("dp") == 4 else 2
    layers = 2 * parallel.get("pieces", 1)
    return tiny(
        folder, steps=STEPS, micro_batch=micro, global_batch=4, model={**MODELS[model], "layers": layers},
        eval={"every": STEPS, "samples": 3}, parallel={"dropout": "position", "timeout": 444.0, **parallel},
    )  # fmt: skip


def read_last(run):
    """The weights at the end of a run."""
    return read(Path(run.out) / "checkpoints" / f"step-{STEPS:08d}", "model")[0]


def saver(folder, model, ranks, **changes):
    run = run_of(folder, model, **SAVERS[model][ranks])
    return dataclasses.replace(run, steps=SAVED, schedule=Schedule(name="constant", warmup=2), **changes)


def go_on(folder, model, ranks, saved_by, name="", **parallel):
    """The losses after a checkpoint that so many ranks have saved; on their own mesh, or by `parallel` on another."""
    path = folder / f"{model}-saved-{saved_by}" / "checkpoints" / f"step-{SAVED:08d}"
    name = name or f"{model}-{saved_by}-on-{ranks}"
    resumed = saver(folder / name, model, ranks, checkpoint=Checkpoint(resume=str(path)))
    resumed = dataclasses.replace(resumed, parallel=dataclasses.replace(resumed.parallel, **parallel))
    return losses(dataclasses.replace(resumed, steps=SAVED + MORE))


class Traffic(TorchDispatchMode):
    """Counts the bytes that this rank sends, as a ring would."""

    bytes = 0.0

    def __torch_dispatch__(self, op, types, inputs=(), options=None):
        if op.namespace == "_c10d_functional" and op.overloadpacket.__name__ == "all_to_all_single":
            tensor, _, sent, _ = inputs  # which rows stay here is chance, in a model this small
            self.bytes += tensor.nbytes * (1 - 1 / len(sent))
        elif op.namespace == "c10d":
            objects = [each for each in inputs if isinstance(each, torch.ScriptObject)]
            (group,) = [each for each in objects if each._type().name() == "ProcessGroup"]
            ring = 1 - 1 / dist.ProcessGroup.unbox(group).size()
            sizes = [tensor.nbytes for tensor in tree_leaves(inputs) if isinstance(tensor, torch.Tensor)]
            name = op.overloadpacket.__name__
            if name == "allreduce_":
                self.bytes += 2 * ring * sum(sizes)
            elif name in ("_allgather_base_", "_reduce_scatter_base_"):
                self.bytes += ring * max(sizes)
            elif name == "send":
                self.bytes += sum(sizes)
            elif name not in ("recv_", "barrier"):
                raise AssertionError(f"{op} is not counted")
        return op(*inputs, **(options or {}))


def counted(run, step=3):
    """Losses, norms of gradients and largest shares of a run, and the bytes that this rank sent in a step."""
    found, launch = [], loop._Run._launch_step

    def watched(self):
        if self.step != step:
            return launch(self)
        with Traffic() as traffic:
            pending = launch(self)
        found.append(traffic.bytes)
        return pending

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop._Run, "_launch_step", watched)
        return *curves(run), *found


def curves(run):
    """Losses, norms of gradients and largest shares of a run."""
    steps = trained(run)
    return [[getattr(one, name) for one in steps] for name in ("loss", "gradient_norm", "largest_share")]


def limits_seen(found, go):
    """`go`, with the limits of all process groups written down first."""

    def watched(run):
        groups = dist.distributed_c10d._world.pg_map
        found["limits"] = sorted({group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
                                  for group in groups})  # fmt: skip
        return go(run)

    return watched


def _rank(rank, folder):
    dispatch.INTERPRETED = False
    folder, found = Path(folder), {}
    with pytest.raises(UserError) as refused:  # a mesh of its own, found by all before they wait for anybody in theirs
        train(dataclasses.replace(run_of(folder / "other", "standard", tp=1 + rank // 3), global_batch=8))
    found["refused"] = str(refused.value)
    for phase, ranks in enumerate((2, 4, 2)):  # the same processes, for to start them takes longest
        dist.destroy_process_group() if dist.is_initialized() else None
        if rank >= ranks:
            continue
        store = f"file://{folder}/store-{phase}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=300))
        if phase < 2:
            for mesh, parallel in MESHES[ranks].items():
                for model in models_of(mesh):
                    found[f"{mesh}: {model}"] = counted(run_of(folder / f"{mesh}-{model}", model, **parallel))
            with pytest.MonkeyPatch.context() as patch:  # every group that a run has made has its limit
                patch.setattr(loop._Run, "go", limits_seen(found, loop._Run.go))
                for model in SAVERS:
                    losses(saver(folder / f"{model}-saved-{ranks}", model, ranks))
        for saved_by, model in itertools.product(((1, 2), (1, 2, 4), (4,))[phase], SAVERS):
            found[f"{model}: {saved_by} on {ranks}"] = go_on(folder, model, ranks, saved_by)
        if ranks == 4:
            found["2 on 4 in groups"] = go_on(folder, "optimized", 4, 2, name="2-in-groups", **GROUPS)
    (folder / f"losses-{rank}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """The folder of all runs, and the losses of those on several ranks."""
    folder = tmp_path_factory.mktemp("everything")
    for model in SAVERS:
        losses(saver(folder / f"{model}-saved-1", model, 1))
    run_ranks(_rank, 4, str(folder))
    return folder, [json.loads((folder / f"losses-{rank}.json").read_text()) for rank in range(4)]


@pytest.mark.parametrize("model", MODELS)
def test_losses_are_those_of_one_process(everything, model, tmp_path):
    folder, (found, *_) = everything
    alone = {}
    for mesh, parallel in (item for meshes in MESHES.values() for item in meshes.items()):
        if model not in models_of(mesh):
            continue
        run = run_of(tmp_path, model, **parallel)
        same = run.micro_batch, run.model.layers
        if same not in alone:
            run = dataclasses.replace(run, out=str(tmp_path / "{}-{}".format(*same)), parallel=ALONE)
            alone[same] = curves(run), read_last(run)
        expected, weights = alone[same]
        *curve, shares, _ = found[f"{mesh}: {model}"]
        for one, other in zip(curve, expected, strict=False):
            assert one == pytest.approx(other, abs=1e-5, rel=0), mesh
        assert shares == expected[-1], mesh
        saved = read_last(run_of(folder / f"{mesh}-{model}", model))
        assert saved.keys() == weights.keys(), mesh
        assert all((saved[key] - value).abs().max() < 2e-4 for key, value in weights.items()), mesh


@pytest.mark.parametrize("model", MODELS)
def test_a_step_sends_what_the_plan_says(everything, tmp_path, model):
    """Nothing is gathered in silence."""
    (_, found), wrong = everything, {}
    for ranks, meshes in MESHES.items():
        for mesh, parallel in ((mesh, given) for mesh, given in meshes.items() if model in models_of(mesh)):
            run = run_of(tmp_path, model, **parallel)
            layout = run.layout(ranks)
            sizes = run.batch_sizes(layout.dp)
            plan = planned(run, "fp32", sizes.micro, sizes.accumulation, layout)
            expected = sum(sent(from_gpt(run.model), plan).values())
            measured = sum(each[f"{mesh}: {model}"][-1] for each in found[:ranks]) / ranks
            if measured != pytest.approx(expected, rel=0.01):
                wrong[mesh] = (measured, expected)
    assert not wrong


def test_a_rank_with_another_configuration_is_named(everything):
    _, (found, *_) = everything
    said = "Rank 3 has another configuration than rank 0: parallel.tp is 2 and there 1; start all ranks alike."
    assert found["refused"] == said


def test_all_groups_have_the_limit_of_the_run(everything):
    _, (found, *_) = everything
    assert found["limits"] == [444.0]


@pytest.mark.parametrize("model", SAVERS)
def test_every_mesh_goes_on_with_what_every_other_has_saved(everything, model, tmp_path):
    folder, (found, *_) = everything
    whole = dataclasses.replace(saver(tmp_path, model, 1), steps=SAVED + MORE)
    expected = losses(whole)[SAVED:]
    for saved_by in SAVERS[model]:
        for ranks in SAVERS[model]:
            after = go_on(folder, model, 1, saved_by) if ranks == 1 else found[f"{model}: {saved_by} on {ranks}"]
            assert after == pytest.approx(expected, abs=1e-5, rel=0), (saved_by, ranks)
    if model == "optimized":
        assert found["2 on 4 in groups"] == pytest.approx(expected, abs=1e-5, rel=0)
