"""Trials on several ranks, each a process: what they find, how they end, and that none is left."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tilewright.train.load_config import read
from tilewright.tune.proof.layout import STEPS, judge_layout, steps_of, together_and_alone
from tilewright.tune.search.space import open_space
from tilewright.tune.store.proof import Proof
from tilewright.tune.store.record import Measurement
from tilewright.tune.worker import forkserver, ranks
from tilewright.tune.worker.jobs import probe_links
from tilewright.tune.worker.process import Limits, run_child

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
TINY = (
    "model.width=32", "model.heads=4", "model.layers=2", "model.sequence=32", "model.vocabulary=64", "global_batch=8",
    "device=cpu", "data.kind=synthetic", "data.workers=0", "model.dropout=0.1", "precision=fp32",
)  # fmt: skip
SPACE = open_space(read(None, TINY), device="cpu", ranks=2)
LIMITS = Limits(120.0, 120.0)


@pytest.fixture(autouse=True, scope="module")
def one_server():
    """One process to fork from, without Triton's interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setenv("OMP_NUM_THREADS", "1")
        forkserver.stop()
        forkserver.start()
        yield
        forkserver.stop()


def job(word, kind="measure", **changes):
    run = SPACE.at({**SPACE.baseline, "parallel": word})
    return {
        "kind": kind, "configuration": dataclasses.asdict(run), "own_model": "", "path": [], "ranks": 2, "warm": 1,
        "fewest": 3, "most": 6, "least": 0.0, "seconds": 5.0, "spread": 1.0, "profile": False, "stop_above": 0.0,
        "best": 0.0, "widest": 0.02, "memory_cap": 0,
    } | changes  # fmt: skip


ENDLESS = {"most": 10**6, "least": 1e6, "seconds": 1e6, "spread": 0.0}


def run(work, limits=LIMITS, hear=lambda event: None):
    """A job in a child of the one server, which is another as soon as the environment is."""
    os.environ.pop("PYTEST_CURRENT_TEST", None)
    return run_child(work, limits, hear)


def children(pid):
    """All processes that a process has started, and theirs."""
    try:
        own = [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return [*own, *(further for each in own for further in children(each))]


def is_gone(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    return True


def test_the_losses_of_ranks_are_alike_and_the_memory_is_the_largest():
    found = {word: run(job(word)) for word in ("dp2", "tp2+sp", "pp2")}
    assert {word: (each.outcome, each.error) for word, each in found.items()} == dict.fromkeys(found, ("done", None))
    measured = {word: Measurement(**each.value) for word, each in found.items()}
    for word, each in measured.items():
        assert each.tokens_per_step == 8 * 32 and len(each.losses) >= 4, word
        assert each.losses[:4] == pytest.approx(measured["dp2"].losses[:4], abs=1e-5), word
        assert each.bytes > 50e6
    assert not children(forkserver._server.process.pid)


def test_the_links_between_ranks_are_measured():
    os.environ.pop("PYTEST_CURRENT_TEST", None)
    found = probe_links(2, SPACE.start)
    assert 1e6 < found["bytes_per_second"] < 1e12 and 1e-6 < found["round_seconds"] < 1.0


@pytest.mark.parametrize("word", ["tp2+sp"])
def test_a_layout_is_compared_with_one_process(word):
    """And gradients that are added up wrongly are found, though AdamW learns the same of them."""
    shared = SPACE.at({**SPACE.baseline, "parallel": word, "model.gpt_block": "optimized"})
    found = []
    for count, each in zip((2, 1), together_and_alone(shared), strict=True):
        steps = {"kind": "first steps", "ranks": count, "configuration": dataclasses.asdict(each), "steps": STEPS}
        found.append(run({**steps, "own_model": ""}).value)
    assert all(map(steps_of, found))
    proof = Proof("bit-identical", "it is.")
    assert judge_layout(proof, shared, *found).verdict == "bit-identical"
    found[0]["norms"] = [2 * norm for norm in found[0]["norms"]]
    assert judge_layout(proof, shared, *found).verdict == "wrong"


@pytest.mark.parametrize(("number", "sign", "outcome", "words"), [
    (1, signal.SIGKILL, "crashed", "Rank 1 was killed by SIGKILL"),
    (0, signal.SIGKILL, "crashed", "Its process was killed by SIGKILL"),
    (1, signal.SIGSTOP, "hung", "It gave no sign of life for 3 s"),
])  # fmt: skip
def test_a_rank_that_dies_or_hangs_ends_the_trial_and_all_ranks(number, sign, outcome, words):
    there = []

    def hear(event):
        if event["event"] == "step" and event["step"] == 2 and not there:
            there.extend(children(forkserver._server.process.pid))
            os.kill(there[number], sign)

    ended = run(job("dp2", **ENDLESS), Limits(120.0, 3.0 if sign == signal.SIGSTOP else 60.0), hear)
    assert len(there) == 2 and (ended.outcome, ended.error[: len(words)]) == (outcome, words)
    assert all(map(is_gone, there)) and not children(forkserver._server.process.pid)


def test_what_all_ranks_refuse_is_refused():
    refused = job("dp2")
    refused["configuration"] = {**refused["configuration"], "micro_batch": 3}
    ended = run(refused)
    assert ended.outcome == "refused" and ended.error.startswith("global batch 8 is not micro batch 3 x 2 data ranks")


class Told:
    """A pipe that events are written to."""

    def __init__(self):
        self.reading, writing = os.pipe()
        self.events = os.fdopen(writing, "w")

    def all(self):
        self.events.close()
        with os.fdopen(self.reading) as lines:
            return [json.loads(line) for line in lines]


def first_rank(monkeypatch, *lines, code=0, patience=0.2):
    """A first rank beside one that has said these lines and ended."""
    ended = []
    monkeypatch.setattr(ranks, "_PATIENCE", patience)
    monkeypatch.setattr(ranks, "end_group", lambda: ended.append(True))
    pipe, own = os.pipe()
    process = subprocess.Popen([sys.executable, "-S", "-c", f"import os; os._exit({code})"])
    os.write(own, b"".join(json.dumps(line).encode() + b"\n" for line in lines))
    os.close(own)
    told = Told()
    return ranks.FirstRank(0, os.getppid(), told.events, [(process.pid, pipe)]), told, ended


DONE = {"event": "result", "outcome": "done", "error": None, "value": {"bytes": 5}, "lost": False}
LOST = {"event": "result", "outcome": "error", "error": "Connection closed by peer", "value": None, "lost": True}
FULL = {"event": "result", "outcome": "out of memory", "error": "CUDA out of memory.", "value": None, "lost": False}


def test_memory_is_the_largest_of_all_ranks(monkeypatch):
    first, told, _ = first_rank(monkeypatch, {"event": "memory", "bytes": 7}, {"event": "memory", "bytes": 6}, DONE)
    time.sleep(0.1)
    first.conclude(DONE)
    assert told.all()[-1]["value"]["bytes"] == 7


def test_a_rank_that_lost_another_tells_why_that_failed(monkeypatch):
    first, told, _ = first_rank(monkeypatch, FULL, patience=60.0)
    first.conclude(LOST)
    found = told.all()[0]
    assert (found["outcome"], found["error"]) == ("out of memory", "Rank 1: CUDA out of memory.")


def test_a_first_rank_that_does_not_notice_is_ended(monkeypatch):
    first, told, ended = first_rank(monkeypatch, code=3)
    until = time.monotonic() + 20
    while not ended and time.monotonic() < until:
        time.sleep(0.05)
    assert ended and first.number == 0 and told.all()[0]["error"] == "Rank 1 ended with exit code 3, without a result."


def test_of_ranks_that_all_lost_another_the_first_one_tells(monkeypatch):
    first, told, ended = first_rank(monkeypatch, LOST)
    first.conclude(LOST)
    assert told.all()[0]["error"] == "Connection closed by peer" and not ended


STUDY = """
import dataclasses, json, sys
from tilewright.tune.worker import forkserver
from tilewright.tune.worker.process import Limits, run_child
if __name__ == "__main__":
    forkserver.start()
    hear = lambda event: print(json.dumps(event), forkserver._server.process.pid, flush=True)
    run_child(json.loads(sys.argv[1]), Limits(600.0, 600.0), hear)
"""


def test_no_rank_is_left_of_a_study_that_is_killed():
    with subprocess.Popen(
        [sys.executable, "-c", STUDY, json.dumps(job("dp2", **ENDLESS))], stdout=subprocess.PIPE, text=True
    ) as study:
        line = next(line for line in study.stdout if '"step"' in line)
        server = int(line.split()[-1])
        there = children(server)
        assert len(there) == 2
        study.kill()
        study.wait()
        until = time.monotonic() + 20
        while not all(map(is_gone, [server, *there])) and time.monotonic() < until:
            time.sleep(0.05)
        assert all(map(is_gone, [server, *there]))
