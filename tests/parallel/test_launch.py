"""A rank that is killed is named, and the run goes on without it: with the same global batch, so the same losses."""

import dataclasses
import math
import os
import signal
import threading
import time

import pytest
import torch.distributed as dist

from tilewright.cli import train as cli
from tilewright.errors import UserError
from tilewright.parallel import alive, launch
from tilewright.train.check_ranks import check_ranks, fewer_groups, keeps_its_ranks, with_fewer_ranks
from tilewright.train.load_config import read, split_arguments, write_yaml
from tilewright.train.metrics import read as read_metrics
from tilewright.train.signals import Signals
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
        (sign,) = tmp_path.glob("tilewright-ranks-*/rank-1-*")
        os.kill(int(sign.name.split("-")[2]), signal.SIGKILL)

    handlers = [signal.getsignal(number) for number in launch._SIGNALS]
    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    smaller = lambda most: launch.Start(most) if most else None  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "0")
        patch.setattr(launch.tempfile, "tempdir", str(tmp_path))
        assert launch.run([str(path)], 2, restarts=1, smaller=smaller, say=said.append) == 0
    killer.join()
    assert [signal.getsignal(number) for number in launch._SIGNALS] == handlers
    assert said == ["rank 1 ended by SIGKILL: goes on from the newest checkpoint with 1 of 2 ranks."]
    found = [record["loss"] for record in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert found == pytest.approx(losses(dataclasses.replace(config, out=str(tmp_path / "alone"))), abs=1e-5, rel=0)


def test_a_rank_without_a_sign_of_life_is_killed(tmp_path, monkeypatch):
    """As after a SIGSTOP, which stops the thread that gives them, too."""
    killed, said = [], []
    monkeypatch.setattr(alive, "_BEAT", 0.02)
    monkeypatch.setattr(launch.os, "kill", lambda process, number: killed.append((process, number)))
    monkeypatch.setenv(alive.FOLDER, str(tmp_path))
    with launch._watched(tmp_path, said.append, silent=0.5), alive.alive(0):
        (tmp_path / "rank-1-4321").touch()
        time.sleep(0.8)
    assert killed == [(4321, signal.SIGKILL)] and len(said) == 1 and said[0].startswith("rank 1 has given no sign")
    assert not list(tmp_path.iterdir())


def test_a_rank_whose_launcher_is_gone_stops(tmp_path, monkeypatch):
    monkeypatch.setattr(alive, "_BEAT", 0.02)
    monkeypatch.setenv(alive.FOLDER, str(tmp_path))
    with Signals() as signals, alive.alive(0):
        time.sleep(0.2)
        assert not signals.came
        monkeypatch.setenv(
            "TORCHELASTIC_RUN_ID", "7"
        )  # as the launcher's agent does, so that one a beat does not insist
        monkeypatch.setattr(alive.os, "getppid", lambda: 1)
        time.sleep(0.2)
    assert signals.came


def failure(rank, code, seconds):
    found = launch.ProcessFailure(local_rank=rank, pid=1, exitcode=code, error_file="")
    found.timestamp = seconds
    return found


@pytest.mark.parametrize("failures, first", [
    ([failure(0, 1, 100), failure(1, -signal.SIGKILL, 131)], 0),  # killed by the agent, because it did not end
    ([failure(0, 1, 100), failure(1, -signal.SIGKILL, 101)], 1),  # the others lost it
    ([failure(0, -signal.SIGTERM, 130), failure(1, 1, 100)], 1),
])  # fmt: skip
def test_the_cause_is_named_and_not_who_suffers(failures, first):
    assert launch._first(failures).local_rank == first


@pytest.mark.parametrize("given, ranks, left", [(None, 3, "0,2,3"), ("7,6,5,4", 2, "7,5,4"), ("3,2", 2, "3,2")])
def test_the_gpu_of_a_rank_that_failed_is_left_out(monkeypatch, given, ranks, left):
    monkeypatch.setattr(launch.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(launch.torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given or "")
    if given is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    launch._leave_out(1, ranks)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == left


def test_a_signal_to_the_launcher_stops_the_run(monkeypatch):
    def stopped(*command):
        raise launch.SignalException("stopped", signal.SIGTERM)

    monkeypatch.setattr(launch, "elastic_launch", lambda *given: stopped)
    monkeypatch.setenv(alive.FOLDER, "")
    with pytest.raises(KeyboardInterrupt):
        launch.run([], 2, restarts=3, smaller=lambda most: None, say=print)


def of_run(*arguments):
    return read(*split_arguments(list(arguments))).train


def test_a_restart_changes_nothing_of_what_is_learnt():
    added = with_fewer_ranks(of_run("micro_batch=2", "checkpoint.resume=never"), 4)
    assert set(added) == {"global_batch=8", "micro_batch=2", "accumulation=0", "parallel.dp=0",
                          "parallel.dropout=position", "checkpoint.resume=auto"}  # fmt: skip
    assert keeps_its_ranks(of_run("optimizer.name=adamw_8bit", "parallel.zero=3", "micro_batch=2"), 4)
    assert not keeps_its_ranks(of_run("optimizer.name=adamw_8bit", "micro_batch=2"), 4)


@pytest.mark.parametrize("each", [{}, {"tp": 2}, {"cp": 2}, {"pp": 2, "tp": 2}])
@pytest.mark.parametrize("ranks, groups", [(4, 2), (8, 2), (8, 4), (12, 3), (24, 6)])
def test_with_fewer_ranks_there_are_fewer_groups_and_none_is_smaller(each, ranks, groups):
    sizes = [f"parallel.{name}={size}" for name, size in each.items()]
    own = math.prod(size for name, size in each.items() if name != "cp")  # ranks that are no replicas of each other
    of_all = of_run("model.heads=4", "micro_batch=1", "accumulation=720", "parallel.zero=3",
                    f"parallel.dp_replicate={groups}", *sizes)  # fmt: skip
    before, _ = check_ranks(of_all, ranks * own)
    for left in range(1, ranks):
        (added,) = fewer_groups(of_all, ranks * own, left * own)
        found = int(added.removeprefix("parallel.dp_replicate="))
        assert left % found == 0 and found <= groups
        assert found == 1 or left // found >= before.shards
        fits = [one for one in range(1, groups + 1) if left % one == 0 and left // one >= before.shards]
        assert found == max([1, *fits])
        if left % each.get("cp", 1) == 0 and of_all.batch_sizes(before.dp).global_ % (left // each.get("cp", 1)) == 0:
            again = of_run(*sizes, "model.heads=4", "parallel.zero=3", *with_fewer_ranks(of_all, ranks * own), added)
            layout, batch = check_ranks(again, left * own)
            assert (layout.replicas, layout.dp_replicate) == (left, found)
            assert batch.global_ == of_all.batch_sizes(before.dp).global_
    assert fewer_groups(of_run("micro_batch=1"), 8, 4) == ()


def test_the_launcher_looks_for_a_smaller_mesh_with_fewer_groups(monkeypatch):
    found = {}

    def run(arguments, ranks, *, smaller, **others):
        found.update({most: smaller(most) for most in range(ranks)})
        return 0

    monkeypatch.setattr(launch, "run", run)
    given = ["micro_batch=1", "global_batch=24", "parallel.zero=3", "parallel.dp_replicate=4", "checkpoint.every=1"]
    assert cli._launch(read(*split_arguments(given)), given, 8, 1, False) == 0
    sizes = {most: start and (start.ranks, start.overrides[-1]) for most, start in found.items()}
    groups = lambda count: f"parallel.dp_replicate={count}"  # noqa: E731
    assert sizes == {
        7: (6, groups(3)), 6: (6, groups(3)), 5: (4, groups(2)), 4: (4, groups(2)), 3: (3, groups(1)),
        2: (2, groups(1)), 1: (1, groups(1)), 0: None,
    }  # fmt: skip


@pytest.mark.parametrize("given, words", [
    (("parallel.parameters=bf16", "parallel.zero=3"), "residual stream"),
    (("parallel.parameters=bf16", "model.residual=bf16"), "is for parallel.zero"),
    (("parallel.gradients=fp32",), "is for parallel.zero"),
    (("parallel.reshard=2", "parallel.zero=2"), "is for parallel.zero=3"),
    (("parallel.reshard=3", "parallel.zero=3"), "choose a divisor"),
    (("device=cuda:0",), "choose device=cuda"),
    (("parallel.pieces=2", "parallel.pp=2", "accumulation=3"), "a multiple of 2; accumulation is 3"),
    (("parallel.pieces=2", "accumulation=2"), "a pipeline of at least 2 stages"),
    (("parallel.pieces=3", "parallel.pp=2", "accumulation=2"), "do not fill 2 pipeline stages of 3 pieces"),
    (("parallel.pieces=2", "parallel.pp=2", "accumulation=2", "model.layers=6"), "divide by pp 2 x 2 pieces"),
    (("parallel.pieces=2", "parallel.pp=2", "accumulation=2", "parallel.zero=3", "parallel.reshard=2"), "one of them"),
    (("compile=reduce-overhead", "parallel.zero=3"), "compile=reduce-overhead does not go together"),
    (("rules=all", "compile=default", "parallel.zero=3"), "rules does not go together"),
    (("cuda_graphs=true", "parallel.cp=2"), "cuda_graphs does not go together"),
    (("parallel.tp=4", "model.heads=2"), "heads do not divide"),
])  # fmt: skip
def test_what_every_rank_would_refuse_is_refused_before_any_starts(given, words):
    with pytest.raises(UserError, match=words):
        check_ranks(of_run("micro_batch=2", *given), 4)
    with pytest.raises(UserError, match="parallel.timeout"):
        of_run("parallel.timeout=0")
