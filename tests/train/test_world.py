"""Two processes learn what one does from the same global batch, and one of them speaks for both."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ranks import run_ranks
from tilewright.errors import UserError
from tilewright.train.checkpoint import newest, read
from tilewright.train.engine import Engine
from tilewright.train.loop import train
from tilewright.train.metrics import read as read_metrics
from tilewright.train.shown import Shown
from tilewright.train.world import World
from train.tiny import losses, tiny

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"),
]
STEPS = 6


def shared(folder, **changes):
    every = {"every": STEPS, "samples": 5}  # of which one rank takes three, the other two
    return tiny(
        folder,
        **{
            "steps": STEPS,
            "global_batch": 8,
            "micro_batch": 2,
            "schedule": {"name": "constant"},
            "eval": every,
            **changes,
        },
    )


def both(folder, ranks=2):
    """The part of each of two processes; what each of them was told to show goes to a file of its own."""
    run_ranks(_rank, ranks, str(folder))
    return [json.loads((Path(folder) / f"said-{rank}.json").read_text()) for rank in range(ranks)]


def _rank(rank, folder):
    folder = Path(folder)
    said = {"world": [World.current().rank, World.current().ranks, World.current().is_rank_zero]}

    def run(name, config, step=lambda metrics, steps: None):
        lines = []

        def note(metrics, steps):
            lines.append(metrics.loss)
            step(metrics, steps)

        def say(text):
            if "validation loss" not in text:
                lines.append(text)

        shown = Shown(begin=lambda facts: lines.append("begin"), step=note, say=say)
        try:
            outcome = train(config, shown)
            said[name] = {"lines": lines, "step": outcome.step, "stopped": outcome.stopped}
        except UserError as error:
            said[name] = {"lines": lines, "error": str(error)}

    run("whole", shared(folder / "two"))
    # A signal that reaches one rank alone ends both, after the same step.
    tell = Shown().step
    if rank == 0:
        tell = lambda metrics, steps: os.kill(os.getpid(), signal.SIGTERM) if metrics.step == 2 else None  # noqa: E731
    run("stopped", shared(folder / "stopped", steps=40), tell)
    # A micro batch of one rank that is no number is a bad step for both.
    accumulate = Engine.accumulate
    if rank == 1:
        Engine.accumulate = lambda self, *given: accumulate(self, *given) * float("nan")
    run("bad", shared(folder / "bad"))
    Engine.accumulate = accumulate
    # What one process has saved goes on in two.
    run("from one", shared(folder / "from-one", steps=STEPS + 3))
    (folder / f"said-{rank}.json").write_text(json.dumps(said))


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    folder = tmp_path_factory.mktemp("both")
    train(shared(folder / "from-one"))
    return folder, *both(folder)


def test_two_processes_learn_what_one_does(said, tmp_path):
    folder, first, second = said
    assert first["world"] == [0, 2, True] and second["world"] == [1, 2, False]
    alone = losses(shared(tmp_path))
    assert first["whole"]["lines"][1:] == pytest.approx(alone, rel=1e-5)
    assert [r["loss"] for r in read_metrics(folder / "two" / "metrics.jsonl")] == first["whole"]["lines"][1:]
    validated = [read_metrics(path / "metrics.jsonl")[-1]["validation_loss"] for path in (folder / "two", tmp_path)]
    assert validated[0] == pytest.approx(validated[1], rel=1e-5)
    two, one = (
        read(path / "checkpoints" / f"step-{STEPS:08d}", "model")[0] for path in (folder / "two", tmp_path)
    )  # fmt: skip
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-3, atol=1e-5)


def test_one_speaks(said):
    _, first, second = said
    assert first["whole"]["lines"][0] == "begin" and second["whole"]["lines"] == []


def test_what_two_have_saved_goes_on_in_one_and_the_other_way_round(said, tmp_path):
    folder, first, _ = said
    alone = losses(shared(tmp_path, steps=STEPS + 3))
    assert losses(shared(folder / "two", steps=STEPS + 3)) == pytest.approx(alone[STEPS:], rel=1e-5)
    assert first["from one"]["lines"][1:] == pytest.approx(alone[STEPS:], rel=1e-5)


def test_a_signal_to_one_stops_both_after_the_same_step_with_a_checkpoint(said):
    folder, first, second = said
    assert first["stopped"]["stopped"] and second["stopped"]["stopped"]
    step = first["stopped"]["step"]
    assert 2 < step == second["stopped"]["step"] < 8
    assert newest(folder / "stopped" / "checkpoints").name == f"step-{step:08d}"


def test_a_bad_micro_batch_of_one_stops_both_and_both_keep_theirs(said):
    folder, first, second = said
    assert "step 1: the loss is nan" in first["bad"]["error"] and "step 1: the loss is nan" in second["bad"]["error"]
    kept = {path.name for path in (folder / "bad").glob("bad-step*")}
    assert kept >= {"bad-step-00000001-rank-1.safetensors", "bad-step-00000001.safetensors"}


def test_alone_a_sum_is_what_it_was():
    value = World.current().mesh.sum_(torch.tensor([3.0]))
    assert value.item() == 3.0 and World.current() == World(0, 1)
