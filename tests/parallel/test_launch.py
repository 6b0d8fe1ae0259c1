"""A rank that is killed is named, and the run goes on without it: with the same global batch, so the same losses."""

import dataclasses
import os
import signal
import threading
import time

import pytest
import torch.distributed as dist

from tilewright.parallel import launch
from tilewright.train.load_config import read, write_yaml
from tilewright.train.metrics import read as read_metrics
from train.tiny import as_on_a_cpu, losses, tiny  # noqa: F401

STEPS = 30


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
@pytest.mark.usefixtures("as_on_a_cpu")
def test_a_run_goes_on_without_a_rank_that_was_killed(tmp_path, monkeypatch):
    config = tiny(
        tmp_path / "run", steps=STEPS, micro_batch=2, global_batch=8, checkpoint={"every": 5},
        model={"dropout": 0.1}, parallel={"dropout": "position"},
    )  # fmt: skip
    path, said = tmp_path / "run.yaml", []
    write_yaml(config, path)
    assert read(path, []).train == config

    def kill():
        """The second rank, as soon as there is a checkpoint."""
        while not list((tmp_path / "run" / "checkpoints").glob("step-*")):
            time.sleep(0.02)
        (alive,) = tmp_path.glob("tilewright-ranks-*/rank-1-*")
        os.kill(int(alive.name.split("-")[2]), signal.SIGKILL)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    smaller = lambda most: launch.Start(most) if most else None  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "0")
        patch.setattr(launch.tempfile, "tempdir", str(tmp_path))
        assert launch.run([str(path)], 2, restarts=1, smaller=smaller, say=said.append) == 0
    killer.join()
    assert said == ["rank 1 ended by SIGKILL: goes on from the newest checkpoint with 1 of 2 ranks."]
    found = [record["loss"] for record in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert found == pytest.approx(losses(dataclasses.replace(config, out=str(tmp_path / "alone"))), abs=1e-5, rel=0)


def test_a_rank_without_a_sign_of_life_is_killed(tmp_path, monkeypatch):
    """As after a SIGSTOP, which stops the thread that gives them, too."""
    killed, said = [], []
    monkeypatch.setattr(launch, "_BEAT", 0.02)
    monkeypatch.setattr(launch.os, "kill", lambda process, number: killed.append((process, number)))
    monkeypatch.setenv(launch.FOLDER, str(tmp_path))
    with launch._watched(tmp_path, said.append, silent=0.5), launch.alive(0):
        (tmp_path / "rank-1-4321").touch()
        time.sleep(0.8)
    assert killed == [(4321, signal.SIGKILL)] and len(said) == 1 and said[0].startswith("rank 1 has given no sign")
    assert not list(tmp_path.iterdir())
