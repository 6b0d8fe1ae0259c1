"""Ranks that die, that are stopped, and that the network cuts off, in runs that go on or end, and never wait."""

import os
import random
import re
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
import torch.distributed as dist
import yaml

from parallel.forked import Command
from tilewright.train.load_config import read, split_arguments
from tilewright.train.metrics import read as read_metrics
from train.tiny import as_on_a_cpu, losses  # noqa: F401

pytestmark = [
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"),
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds ranks by /proc"),
    pytest.mark.usefixtures("as_on_a_cpu"),
]
RUN = [
    "steps=60", "device=cpu", "data.kind=synthetic", "data.workers=0", "micro_batch=1", "global_batch=2",
    "eval.every=0", "checkpoint.every=2", "model.width=16", "model.layers=1", "model.heads=2", "model.sequence=16",
    "model.dropout=0.1", "parallel.dropout=position",
]  # fmt: skip
KILLS = 10


def written(folder):
    return [record["loss"] for record in read_metrics(folder / "metrics.jsonl")]


def alone(folder, *changes):
    """The losses of the run on one process that nobody disturbs."""
    return pytest.approx(losses(read(*split_arguments([*RUN, f"out={folder}", *changes])).train), abs=1e-5, rel=0)


def wait_until(condition, *commands, seconds=120.0):
    end = time.monotonic() + seconds
    while not condition():
        alive = all(command.process.is_alive() for command in commands) and time.monotonic() < end
        assert alive, [command.output.read_text() for command in commands]
        time.sleep(0.01)


@pytest.fixture
def start(tmp_path):
    """Start a command; it ends with the test."""
    commands = []

    def run(*words, **options):
        commands.append(Command(tmp_path / f"said-{len(commands)}", *words, **options))
        return commands[-1]

    yield run
    for command in commands:
        command.end()


def test_a_run_goes_on_however_often_a_rank_is_killed(tmp_path, start):
    """Ten are killed at random moments, and one is stopped; the losses are those of a run that was left alone."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    chance = random.Random(seed)
    expected, stopped, out, size = [], chance.randrange(KILLS + 1), tmp_path / "run", 4
    launcher = start("train", "--nproc", "4", "--restarts", str(KILLS + 1), "parallel.tp=2", f"out={out}", *RUN)
    for failure in range(KILLS + 1):
        wait_until(lambda count=size: len(launcher.ranks()) == count, launcher)
        # Steps that are to succeed first: with none a rank dies while it starts.
        reached = len(written(out)) + chance.randrange(3) + (failure == stopped)
        wait_until(lambda step=reached: len(written(out)) >= step, launcher)
        time.sleep(chance.uniform(0.0, 0.03))
        rank = chance.randrange(size)
        os.kill(launcher.ranks()[rank], signal.SIGSTOP if failure == stopped else signal.SIGKILL)
        expected += [f"rank {rank} has given no sign of life for ... s; it is killed."] * (failure == stopped)
        expected += [f"rank {rank} ended by SIGKILL: goes on from the newest checkpoint with 2 of {size} ranks."]
        size, lines = 2, len(expected)
        wait_until(lambda count=lines: len(launcher.said("rank ")) == count, launcher)
    assert launcher.wait() == 0, launcher.output.read_text()
    assert [re.sub(r"for \d+ s", "for ... s", line) for line in launcher.said("rank ")] == expected
    assert written(out) == alone(tmp_path / "alone")
    assert "Traceback" not in launcher.output.read_text()


def test_groups_that_share_the_weights_go_on_as_fewer(tmp_path, start):
    """With three of four ranks in two groups of two: two of them, which are one group."""
    out = tmp_path / "run"
    words = ["--nproc", "4", "--restarts", "1", "parallel.zero=3", "parallel.dp_replicate=2", f"out={out}"]
    changes = "global_batch=4", "steps=100", "checkpoint.every=5"
    launcher = start("train", *words, *RUN, *changes)
    wait_until(lambda: len(launcher.ranks()) == 4 and len(written(out)) >= 3, launcher)
    os.kill(launcher.ranks()[2], signal.SIGKILL)
    assert launcher.wait() == 0, launcher.output.read_text()
    said = "rank 2 ended by SIGKILL: goes on from the newest checkpoint with 2 of 4 ranks."
    assert launcher.said("rank ") == [said]
    kept = yaml.safe_load((out / "config.yaml").read_text())
    assert kept["parallel"]["dp_replicate"] == 1 and kept["global_batch"] == 4
    assert written(out) == alone(tmp_path / "alone", *changes)


def test_torchrun_starts_all_ranks_anew(tmp_path, start):
    """Whichever of them was killed, the run goes on from its checkpoint, and nobody is left behind."""
    out = tmp_path / "run"
    agent = ["torchrun", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2", "--no-python"]
    changes = "steps=100", "checkpoint.every=5"
    launcher = start(*agent, "tilewright", "train", "parallel.zero=3", f"out={out}", *RUN, *changes)
    killed, seen = [], set()
    for rank in (1, 0):
        reached = len(written(out)) + 3
        wait_until(lambda: len(launcher.ranks()) == 2, launcher)
        wait_until(lambda step=reached: len(written(out)) >= step, launcher)
        seen |= set(launcher.ranks())
        killed.append(launcher.ranks()[rank])
        os.kill(killed[-1], signal.SIGKILL)
        wait_until(lambda ended=frozenset(seen): not ended & set(launcher.ranks()), launcher)
    assert launcher.wait() == 0, launcher.output.read_text()
    assert len(seen) == 4 and not any(Path(f"/proc/{process}").exists() for process in seen)
    assert written(out) == alone(tmp_path / "alone", *changes)


@pytest.fixture
def networks():
    """Two network namespaces with a cable between them: their names, and how to set it down and up."""
    names = [f"tilewright-{os.getpid()}-{number}" for number in range(2)]

    def ip(words):
        subprocess.run(["ip", *words.split()], check=True, capture_output=True, timeout=30)

    try:
        for name in names:
            ip(f"netns add {name}")
        ip(f"-n {names[0]} link add cable type veth peer name cable netns {names[1]}")
        for number, name in enumerate(names):
            ip(f"-n {name} address add 10.77.0.{number + 1}/24 dev cable")
            ip(f"-n {name} link set cable up")
            ip(f"-n {name} link set lo up")
        yield names, lambda state: ip(f"-n {names[1]} link set cable {state}")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs root and iproute2: {error}")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def test_ranks_that_the_network_cuts_off_end_with_a_sentence_each_and_go_on_when_started_again(
    tmp_path, start, networks
):
    names, cable = networks
    out, changes = tmp_path / "run", ("steps=200", "checkpoint.every=5")

    def start_both():
        return [
            start(
                "train", f"out={out}", *RUN, *changes, silent=8.0, network=name, RANK=str(number), WORLD_SIZE="2",
                MASTER_ADDR="10.77.0.1", MASTER_PORT="29511", GLOO_SOCKET_IFNAME="cable",
            )
            for number, name in enumerate(names)
        ]  # fmt: skip

    ranks = start_both()
    wait_until(lambda: len(written(out)) >= 8, *ranks)
    cable("down")
    began = time.monotonic()
    assert [rank.wait(30.0) for rank in ranks] == [1, 1] and time.monotonic() - began < 30.0
    heads = (
        "Rank 1 has given no sign of life for 8 s",
        "The store of the run, 10.77.0.1:29511, has not answered for 8 s",
    )
    for rank, head in zip(ranks, heads, strict=True):
        (line,) = rank.said("error:")
        assert line.startswith(f"error: {head}") and "Traceback" not in rank.output.read_text()
    reached = len(written(out))
    cable("up")
    assert [rank.wait() for rank in start_both()] == [0, 0]
    assert 8 <= reached < 200 and written(out) == alone(tmp_path / "alone", *changes)


def test_ranks_that_do_not_fit_each_other_end_and_rank_zero_says_why(tmp_path, start):
    """As processes of their own: each ends, and the sentence is said once."""
    with socket.socket() as taken:  # a port that nobody else has
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
    ranks = [
        start(
            "train", f"out={tmp_path / 'run'}", *RUN, f"model.heads={2 - number}", RANK=str(number), WORLD_SIZE="2",
            MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
        )
        for number in range(2)
    ]  # fmt: skip
    assert [rank.wait() for rank in ranks] == [2, 2], [rank.output.read_text() for rank in ranks]
    (line,) = [line for rank in ranks for line in rank.said("error:")]
    assert (
        line
        == "error: Rank 1 has another configuration than rank 0: model.heads is 1 and there 2; start all ranks alike."
    )
    assert not (tmp_path / "run/metrics.jsonl").exists()
    assert not any("Traceback" in rank.output.read_text() for rank in ranks)
