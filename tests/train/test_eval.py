"""The validation loss: of sequences that are never trained on, and without a trace in what the run learns."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from tilewright.errors import UserError
from tilewright.train.data import open_dataset
from tilewright.train.export import load_model
from tilewright.train.load_config import read
from tilewright.train.loop import train
from tilewright.train.metrics import read as read_metrics
from tilewright.train.schema import Data, Eval
from tilewright.train.shown import Shown
from tilewright.train.tokens import write_tokens
from train.tiny import as_on_a_cpu, tiny, trained

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.usefixtures(as_on_a_cpu.__name__),
]


def counted(tmp_path, tokens):
    """A token file of 0, 1, 2, ..."""
    return Data(kind="tokens", paths=[str(write_tokens(tmp_path / "n.tokens", [np.arange(tokens)], 2**16).path)])


@pytest.mark.parametrize("seed", range(5))
def test_no_token_is_a_target_of_both(tmp_path, seed):
    rng = np.random.default_rng(seed)
    sequence, tokens, share = int(rng.integers(1, 20)), int(rng.integers(50, 3000)), float(rng.uniform(0.001, 0.5))
    data = dataclasses.replace(counted(tmp_path, tokens), seed=seed)
    dataset = open_dataset(data, sequence=sequence, vocabulary=2**16, micro_batch=1, held_out=share)
    windows = (tokens - 1) // sequence
    assert dataset.windows + dataset.held == windows and dataset.held == max(1, math.floor(share * windows))
    learnt = {int(token) for sample in range(2 * dataset.windows) for token in dataset[sample][0, 1:]}
    held = {int(token) for token in dataset.held_out(0, dataset.held)[:, 1:].flatten()}
    assert not learnt & held and learnt | held == set(range(1, windows * sequence + 1))


def test_random_tokens_hold_others_out():
    dataset = open_dataset(Data(kind="synthetic"), sequence=8, vocabulary=1000, micro_batch=4, held_out=0.1)
    assert not torch.equal(dataset.held_out(0, 4), dataset[0])


def test_too_little_data_to_hold_any_out_is_a_sentence(tmp_path):
    with pytest.raises(UserError, match="one sequence of 64 tokens.*give more data, a smaller model.sequence or"):
        open_dataset(counted(tmp_path, 70), sequence=64, vocabulary=2**16, micro_batch=1, held_out=0.1)


@pytest.mark.parametrize(("share", "says"), [(0.0, "above 0"), (1.0, "below 1"), (-1.0, "at least 0")])
def test_a_share_that_leaves_nothing_is_refused(share, says):
    with pytest.raises(UserError, match=f"eval.held_out is .*{says}"):
        Eval(every=1, held_out=share)


DROPOUT = {"model": {"dropout": 0.3}, "steps": 8}


def test_the_validation_loss_is_there_where_it_is_due_and_changes_nothing(tmp_path):
    """The same run, evaluated at every other step and at the last alone: bit by bit the same losses."""
    often = trained(tiny(tmp_path / "often", eval={"every": 3, "samples": 5}, **DROPOUT))
    once = trained(tiny(tmp_path / "once", eval={"every": 100, "samples": 5}, **DROPOUT))
    assert [one.validation_loss is not None for one in often] == [step in (3, 6, 8) for step in range(1, 9)]
    assert [one.loss for one in often] == [one.loss for one in once]
    assert often[-1].validation_loss == once[-1].validation_loss
    written = read_metrics(tmp_path / "often" / "metrics.jsonl")
    assert [record["validation_loss"] for record in written] == [one.validation_loss for one in often]


@pytest.mark.parametrize("micro_batch", [1, 4, 7])
def test_it_is_the_mean_over_the_sequences_without_dropout(tmp_path, micro_batch):
    changes = {"model": {"dropout": 0.3}, "steps": 2, "eval": {"every": 2, "samples": 7, "held_out": 0.01}}
    run = tiny(tmp_path, micro_batch=micro_batch, **changes)
    metrics = trained(run)
    shape = {"sequence": run.model.sequence, "vocabulary": run.model.vocabulary, "micro_batch": 1}
    held = open_dataset(run.data, **shape, held_out=0.01).held_out(0, 7).long()
    with torch.no_grad():
        loss = load_model(tmp_path).eval()(held[:, :-1], held[:, 1:])
    assert metrics[-1].validation_loss == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.parametrize(
    "levers",
    [
        {"model": {"gpt_block": "optimized", "loss": "linear_fused", "recompute": "selective"}},
        {"model": {"loss": "fused", "recompute": "full"}},
        {"micro_batch": 2, "accumulation": 2},
    ],
    ids=str,
)
def test_levers_do_not_change_it(tmp_path, levers):
    (plain,) = trained(tiny(tmp_path / "plain", steps=1, eval={"every": 1, "samples": 6}))
    (other,) = trained(tiny(tmp_path / "other", steps=1, eval={"every": 1, "samples": 6}, **levers))
    assert other.validation_loss == pytest.approx(plain.validation_loss, rel=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("levers", [{}, {"cuda_graphs": True}, {"compile": "default"}], ids=str)
def test_on_a_gpu_it_leaves_recordings_and_compiled_code_alone(tmp_path, levers):
    changes = {"device": "cuda", "precision": "fp32", "steps": 6, "model": {"dropout": 0.0}, **levers}
    without = trained(tiny(tmp_path / "without", eval={"every": 100, "samples": 5}, **changes))
    often = trained(tiny(tmp_path / "often", eval={"every": 2, "samples": 5}, **changes))
    assert [one.loss for one in often] == pytest.approx([one.loss for one in without], rel=1e-5)
    assert often[-1].validation_loss == pytest.approx(without[-1].validation_loss, rel=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU with 80 GB")
@pytest.mark.parametrize("name", ["125m", "760m", "1b"])
def test_a_preset_learns_from_its_first_step_on(tmp_path, name):
    """With 3e-4 within ten steps the loss of 1b was 11.06, 13.32, 16.53."""
    run = read(None, [
        f"model.preset={name}", "model.gpt_block=optimized", "micro_batch=8", "steps=100", f"out={tmp_path}",
        "checkpoint.final=false",
    ]).train  # fmt: skip
    found = [one.loss for one in trained(run)]
    assert max(found[:20]) < found[0] + 0.3 and found[19] < found[0] - 0.5 and found[-1] < 5


def test_a_run_that_learns_by_heart_is_found_out(tmp_path):
    """On random text the loss of what is repeated falls, and that of what is held out does not."""
    text = tmp_path / "text"
    text.write_bytes(np.random.default_rng(0).integers(0, 256, 33 * 9, np.uint8).tobytes())
    data = {"paths": [str(text)], "workers": 0}
    metrics = trained(
        tiny(
            tmp_path / "run",
            steps=60,
            data=data,
            optimizer={"learning_rate": 1e-2},
            eval={"every": 60, "held_out": 0.2},
        )
    )
    assert metrics[-1].loss < 4 < 5.5 < metrics[-1].validation_loss


def test_a_run_that_goes_on_evaluates_as_one_that_was_never_interrupted(tmp_path):
    changes = {**DROPOUT, "deterministic": True, "checkpoint": {"every": 4}, "eval": {"every": 2, "samples": 4}}
    whole = trained(tiny(tmp_path / "whole", **changes))

    class Crash(Exception):
        pass

    def crash(metrics, steps):
        if metrics.step == 5:
            raise Crash

    with pytest.raises(Crash):
        train(tiny(tmp_path / "broken", **changes), Shown(step=crash))
    rest = trained(tiny(tmp_path / "broken", **changes))
    assert [one.step for one in rest] == [5, 6, 7, 8]
    assert [one.validation_loss for one in rest] == [one.validation_loss for one in whole[4:]]


def test_the_time_of_an_evaluation_is_not_the_next_steps(tmp_path, monkeypatch):
    import time

    from tilewright.train.engine import Engine

    evaluate = Engine.evaluate
    monkeypatch.setattr(Engine, "evaluate", lambda self, tokens: (time.sleep(1.0), evaluate(self, tokens))[1])
    metrics = trained(tiny(tmp_path, steps=4, eval={"every": 2, "samples": 1}))
    assert metrics[2].seconds < 0.8
