"""A process killed at a random moment of a save leaves a checkpoint that loads, and no later one is lost."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tilewright.train.checkpoint import Checkpoints

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
KILLS = 50  # of each kind, 100 in all


def state(step):
    return {"model": {"weight": torch.full((40, 50), float(step)), "step": torch.tensor(step)}}


def save_for_ever(folder, step, asynchronous):
    """Save the step that was reached once more, as a resumed run may, then each one after it; say which are done."""
    checkpoints = Checkpoints(folder, keep=1, asynchronous=asynchronous)
    while True:
        checkpoints.save(step, state(step), {"step": step})
        done = step - 1 if asynchronous else step
        os.write(1, f"{done}\n".encode())
        step += 1


def nursery():
    """Import torch once and fork a writer for each line of standard input: how often is what counts here."""
    for line in sys.stdin:
        folder, step, asynchronous = line.rsplit(maxsplit=2)
        child = os.fork()
        if child == 0:
            save_for_ever(Path(folder), int(step), asynchronous == "True")
        os.write(1, f"pid {child}\n".encode())
        os.waitpid(child, 0)
        os.write(1, b"dead\n")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_every_resume_after_a_kill_loads_the_newest_complete_checkpoint(tmp_path, asynchronous):
    chance = random.Random(asynchronous)
    folder = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    step, complete, interrupted = 0, -1, 0  # complete: the latest step known to have been
    for _ in range(KILLS):
        wanted = chance.randrange(4)  # saves that are to succeed
        process.stdin.write(f"{folder} {step} {asynchronous}\n")
        process.stdin.flush()
        lines = []
        while not any(line.startswith("pid") for line in lines) or len(lines) <= wanted:
            lines.append(process.stdout.readline())
        time.sleep(chance.uniform(0.0, 0.01))  # about as long as a save
        pid = next(line for line in lines if line.startswith("pid")).split()[1]
        os.kill(int(pid), signal.SIGKILL)
        while lines[-1] != "dead\n":
            lines.append(process.stdout.readline())
        complete = max([complete, *(int(line) for line in lines if line.strip().isdigit())])
        folder.mkdir(exist_ok=True)  # the first may die before it could
        interrupted += any(path.name.startswith(".") and path.name != ".lock" for path in folder.iterdir())

        checkpoints = Checkpoints(folder, keep=1, asynchronous=False)
        loaded = state(-1)
        facts = checkpoints.load_newest(loaded)
        assert checkpoints.warnings == []  # not one that looks complete and is not
        checkpoints.close()
        assert not [path for path in folder.iterdir() if path.name.startswith((".writing", ".deleting", ".replaced"))]
        if facts is None:
            assert complete < 0
            continue
        assert facts["step"] >= complete
        assert bool((loaded["model"]["weight"] == facts["step"]).all()) and loaded["model"]["step"] == facts["step"]
        step = complete = facts["step"]
    process.stdin.close()
    assert process.wait(timeout=60) == 0
    process.stdout.close()
    assert step > KILLS // 5 and interrupted > KILLS // 5  # the kills did hit saves, and the run got on all the same


if __name__ == "__main__":
    nursery()
