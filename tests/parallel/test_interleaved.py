"""Interleaved stages of a pipeline: what they save and evaluate, under a compiler, and what the plan says of them.

That their losses are those of one process, and their traffic the plan's, is among the meshes of `test_equal.py`.
"""

import dataclasses
import functools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.backends.debugging import aot_eager
from torch.distributed.pipelining import ScheduleInterleaved1F1B

from parallel.test_equal import ALONE, run_of
from ranks import run_ranks
from tilewright.plan.decoder import load
from tilewright.plan.memory import train
from tilewright.plan.traffic import Links, Phases, exposed, piece_gathers
from tilewright.plan.training import Training
from tilewright.runtime import dispatch
from tilewright.train.schema import Checkpoint, Parallel, Schedule
from train.tiny import as_on_a_cpu, losses, trained  # noqa: F401

PIECES, STAGES = Parallel(pp=2, pieces=2), Parallel(pp=2)
SAVED, STEPS = 4, 7


def run_with(folder, parallel=ALONE, **changes):
    run = run_of(folder, "optimized", pieces=2)
    run = dataclasses.replace(run, parallel=dataclasses.replace(parallel, dropout="position"), steps=SAVED)
    return dataclasses.replace(run, schedule=Schedule(name="constant", warmup=2), **changes)


def go_on(folder, saved_by, parallel):
    """The losses after a checkpoint."""
    saved = Checkpoint(resume=str(folder / f"saved by {saved_by}" / "checkpoints" / f"step-{SAVED:08d}"))
    return losses(run_with(folder / f"{saved_by} on pp {parallel.pp}", parallel, steps=STEPS, checkpoint=saved))


def compiled(run):
    """The losses of a run under compile and full recompute, and its validation losses."""
    model = dataclasses.replace(run.model, recompute="full")
    return both_losses(dataclasses.replace(run, model=model, compile="default"))


def both_losses(run):
    metrics = trained(run)
    return [one.loss for one in metrics], [one.validation_loss for one in metrics if one.validation_loss is not None]


def _rank(rank, folder):
    dispatch.INTERPRETED = False
    folder, compile = Path(folder), torch.compile
    losses(run_with(folder / "saved by pieces", PIECES))
    found = {
        "one stage a rank": go_on(folder, "pieces", STAGES),
        "pieces": go_on(folder, "one process", PIECES),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda run, options, **how: compile(run, backend=aot_eager, **how))
        found["compiled"] = compiled(run_with(folder / "compiled", PIECES, eval=evaluated()))
    (folder / f"losses-{rank}.json").write_text(json.dumps(found))


def evaluated():
    return dataclasses.replace(run_of("", "optimized").eval, every=SAVED)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
@pytest.mark.usefixtures("as_on_a_cpu")
def test_checkpoints_evaluation_and_compile_are_those_of_one_process(tmp_path):
    losses(run_with(tmp_path / "saved by one process"))
    run_ranks(_rank, 2, str(tmp_path))
    found = json.loads((tmp_path / "losses-0.json").read_text())
    found["one process"] = go_on(tmp_path, "pieces", ALONE)
    whole = losses(run_with(tmp_path / "whole", steps=STEPS))
    for name in ("one stage a rank", "pieces", "one process"):
        assert found[name] == pytest.approx(whole[SAVED:], abs=1e-5, rel=0), name
    alone = both_losses(run_with(tmp_path / "alone", eval=evaluated()))
    assert len(alone[0]) == SAVED and len(alone[1]) == 1
    for by_compiler, eager in zip(found["compiled"], alone, strict=True):
        assert by_compiler == pytest.approx(eager, abs=1e-5, rel=0)


@functools.cache
def schedule(ranks, pieces, count):
    """PyTorch's own, without anything to run."""
    stages = [SimpleNamespace(num_stages=ranks * pieces, group_size=ranks, group_rank=0) for _ in range(pieces)]
    return ScheduleInterleaved1F1B(stages, count, loss_fn=lambda output, target: output)


def run_of_schedule(ranks, pieces, count, forward, backward):
    """The seconds of a step by the order of PyTorch's schedule, and a rank's most forwards in flight."""
    orders = schedule(ranks, pieces, count).pipeline_order
    left = {rank: [action for action in order if action is not None] for rank, order in orders.items()}
    ended, clock, flight, most = {}, [0.0] * ranks, [0] * ranks, [0] * ranks
    last = ranks * pieces - 1
    while any(left.values()):
        for rank, actions in left.items():
            if not actions:
                continue
            stage, kind, batch = actions[0].stage_index, actions[0].computation_type.name, actions[0].microbatch_index
            is_forward = kind == "FORWARD"
            before = (True, stage - 1, batch) if is_forward else (False, stage + 1, batch)
            before = (True, last, batch) if stage == last and not is_forward else before
            if before not in ended and not (is_forward and stage == 0):
                continue
            clock[rank] = max(clock[rank], ended.get(before, 0.0)) + (forward if is_forward else backward)
            ended[is_forward, stage, batch] = clock[rank]
            flight[rank] += 1 if is_forward else -1
            most[rank] = max(most[rank], flight[rank])
            actions.pop(0)
    return max(clock), most


@pytest.mark.parametrize("ranks, pieces, count", [(2, 2, 4), (4, 2, 8), (4, 3, 8), (2, 4, 8), (4, 6, 4)])
def test_the_plan_is_that_of_the_schedule(ranks, pieces, count):
    decoder = dataclasses.replace(load("1b"), vocabulary=256)  # the first stage is the fullest
    training = Training(micro_batch=8, pipeline=ranks, interleave=pieces, accumulation=count, loss="fused")
    phases = Phases(forward=2.0, backward=5.0)  # of a stage, all of its pieces
    seconds, most = run_of_schedule(ranks, pieces, count, phases.forward / pieces, phases.backward / pieces)
    assert exposed(decoder, training, Links(), phases)["bubble"] == pytest.approx(seconds - count * 7.0)

    (activations,) = (part for part in train(decoder, training).parts if part.name == "activations")
    assert activations.formula.endswith(f" {most[0] / pieces:g} in flight")

    orders = schedule(ranks, pieces, count).pipeline_order_with_comms
    gathers = sum(action.computation_type.name == "UNSHARD" for order in orders.values() for action in order)
    assert piece_gathers(ranks, pieces, count) == pytest.approx(gathers / (ranks * pieces))
