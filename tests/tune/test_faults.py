"""Faults of a real trial, on the GPU where there is one: a study of a model that has them all goes on to its end.

The model is somebody's own. What happens depends on how many rows it gets at once, which is the micro batch.
"""

import json
import subprocess
import sys
import time

import pytest
import torch

from tilewright.measure.machine import describe
from tilewright.train.load_config import read
from tilewright.tune.report.answer import Answer
from tilewright.tune.report.reread import reread
from tilewright.tune.search.space import open_space
from tilewright.tune.settings import TRIAL, Settings
from tilewright.tune.store.storage import in_folder
from tilewright.tune.study import run
from tilewright.tune.worker import jobs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SILENCE = 10.0  # seconds; to import torch, and to begin with a GPU, takes some of them
BUDGET = 240.0  # seconds, a few times what it takes
ROWS, BEST = 128, 64
MODEL = """
import ctypes
import os
import time

import torch
from torch import nn

ROWS = 128
RESULT = b'{"event": "result", "outcome": "done", "error": null, "value": {}}'


def talk(loss):
    os.write(1, bytes(range(256)) + b"\\n" + RESULT + b"\\n" + RESULT[:30])
    print('{"event": "result"}', '{"event": "step", "step": -1}', "[" * 500, "{", sep="\\n", flush=True)
    return loss


def starve(loss):
    return loss + torch.empty(2**50, dtype=torch.uint8, device=loss.device).sum()


def crash(loss):
    ctypes.string_at(0)


def leave(loss):
    print("the licence has run out")
    os._exit(0)


def lose(loss):
    return loss * float("nan")


def fail(loss):
    raise LookupError("row 7 is cursed\\nby a second line")


def hang(loss):
    print("waits for a lock")
    while True:
        time.sleep(1)


DEEDS = {64: talk, 32: starve, 16: crash, 8: leave, 4: lose, 2: fail, 1: hang}
SECONDS = {ROWS: 0.08, 64: 0.02}  # of each call


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 4))
        self.seen = 0

    def forward(self, features, labels):
        rows = len(features)
        self.seen += rows
        time.sleep(SECONDS.get(rows, 0.0))
        loss = nn.functional.cross_entropy(self.body(features), labels)
        return DEEDS[rows](loss) if rows in DEEDS and self.seen > 2 * ROWS else loss  # two steps go well


def make():
    return Model(), (torch.randn(ROWS, 6), torch.randint(4, (ROWS,)))
"""
STARVED = {
    "cpu": "memory: you tried to allocate 1125899906842624 bytes",  # what stands before it differs from CPU to CPU
    "cuda": "CUDA out of memory. Tried to allocate 1048576.00 GiB",
}
# By the rows of a micro batch: what comes of it, what its error says, and what its log has.
FAULTS = {
    32: ("out of memory", STARVED[DEVICE], "in starve"),
    16: ("crashed", "Its process was killed by SIGSEGV, Segmentation fault: Fatal Python error", "in crash"),
    8: ("crashed", "Its process ended with exit code 0, without a result: the licence has run out", ""),
    4: ("not finite", "the loss of step 3 is not a finite number.", ""),
    2: ("error", "LookupError: row 7 is cursed", "by a second line"),
    1: ("hung", "It gave no sign of life for ", "waits for a lock"),
}
EXPECTED = {ROWS: ("done", "", ""), BEST: ("done", "", '{"event": "result"}'), **FAULTS}
FIXED = (
    "device=auto", "compile=none", "precision=fp32", "cuda_graphs=false", "threads=1", "optimizer.name=adamw",
    f"global_batch={ROWS}", f"micro_batch={ROWS}", "rules=none",
)  # fmt: skip


def started_in():
    """Seconds that a process takes to import torch, which is 3 on an idle machine."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.monotonic() - began


def test_a_study_ends_by_itself_with_the_right_best_and_each_fault_in_its_record(tmp_path, monkeypatch):
    """Each fault is tried before the best run, which never stops talking on standard output."""
    slow = started_in() / 3.0  # than an idle machine: by the time to start a process, as trials do
    silence, budget = max(1.0, slow) * SILENCE, max(1.0, slow) * BUDGET
    monkeypatch.setattr(jobs, "SILENCE", silence)
    (tmp_path / "faulty.py").write_text(MODEL)
    folder = tmp_path / "study"
    space = open_space(read(None, FIXED), device=DEVICE, search=["micro_batch"], of_any_model=True)
    assert space.levers == {"micro_batch": tuple(EXPECTED)}
    settings = Settings(
        space=space, machine={"machine": describe(), "device": DEVICE}, folder=folder, name="study",
        storage=in_folder(folder), budget=budget, own_model="faulty:make", path=(str(tmp_path),),
        first=tuple({"micro_batch": rows} for rows in FAULTS), command=TRIAL,
    )  # fmt: skip
    answer = run(settings)

    searched = [record.point["micro_batch"] for record in answer.records if record.purpose == "search"]
    assert searched == [*FAULTS, BEST]
    for record in answer.records:
        outcome, error, log = EXPECTED[record.point["micro_batch"]]
        assert record.outcome == outcome and error in (record.error or "") and log in record.log, record
        assert (record.error is None) == (record.measurement is not None) == (outcome == "done"), record
    assert answer.elapsed < budget and not answer.interrupted
    assert answer.changes == {"micro_batch": BEST} and answer.recommended and answer.ratio > 1.3
    # All that was said can be written, and read again.
    assert Answer.from_dict(json.loads((folder / "answer.json").read_text(), parse_constant=pytest.fail)) == answer
    (folder / "answer.json").unlink()
    assert reread(folder, "study").records == answer.records
