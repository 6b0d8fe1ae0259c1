"""`tilewright train` as a user meets it: what it shows, how it ends, and a mistake in one sentence."""

import contextlib
import fcntl
import json
import multiprocessing
import os
import pty
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
import termios
import time

import numpy as np
import pytest
import torch

from tilewright.cli import train as command
from tilewright.cli.main import main
from tilewright.train.checkpoint import newest
from tilewright.train.engine import Engine
from tilewright.train.metrics import read
from tilewright.train.tokens import write_tokens

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
TINY = [
    "device=cpu", "steps=6", "micro_batch=2", "model.width=16", "model.layers=1", "model.heads=2", "model.sequence=16",
    "data.workers=0", f"data.paths=[{__file__}]",
]  # fmt: skip
RUN = [sys.executable, "-W", "ignore", "-c", "from tilewright.cli.main import main; main()", "train", *TINY]
PLAIN = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "COLUMNS", "LINES")}


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run the command in this process: exit code, standard output, standard error."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["tilewright", "train", *TINY, f"out={tmp_path / 'run'}", *arguments])
        with pytest.raises(SystemExit) as done:
            main()
        shown = capsys.readouterr()
        return done.value.code or 0, shown.out, shown.err

    return run


def assert_refused(done, *words):
    code, _, error = done
    assert code == 2 and error.count("\n") == 1 and error.startswith("error: "), error
    for word in words:
        assert word in error


def test_it_trains_and_shows_figures_under_a_header(run, tmp_path):
    code, out, error = run()
    assert (code, error) == (0, "")
    lines = out.splitlines()
    assert lines[0].endswith("on cpu, fp32; global batch 2 = micro batch 2 x accumulation 1 x 1 ranks")
    assert lines[1].startswith("MFU and HFU by ")
    header = next(number for number, line in enumerate(lines) if "tokens/s TFLOPS" in line)
    steps = [int(line.split()[0]) for line in lines[header + 1 : -1] if line.split()[0].isdigit()]
    assert steps == [1, 6]  # no terminal: the first, then one in five seconds, and the last
    assert f"everything is in {tmp_path / 'run'}" in lines[-1]
    assert [record["step"] for record in read(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]


def test_log_every_is_taken_at_its_word(run):
    _, out, _ = run("log.every=1")
    assert [line.split()[0] for line in out.splitlines() if "n/a   n/a" in line] == list("123456")


def test_json_is_a_line_an_event(run):
    code, out, _ = run("--json", "profile=true", "steps=8")
    events = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [event["event"] for event in events if event["event"] not in ("step", "note")] == ["begin", "profile", "end"]
    assert [event["step"] for event in events if event["event"] == "step"] == list(range(1, 9))
    assert events[-1]["step"] == 8 and not events[-1]["stopped"]


def test_a_profile_is_two_tables(run):
    _, out, _ = run("profile=true", "steps=9")
    for word in ("where the step went", "matmul", "backward", "optimizer", "predicted", "measured", "trace.json.gz"):
        assert word in out


# -- mistakes


def test_a_wrong_type_in_a_file(run, tmp_path):
    (tmp_path / "run.yaml").write_text("schedule:\n  warmup: many\n")
    assert_refused(run(str(tmp_path / "run.yaml")), "run.yaml", "schedule.warmup", "many")
    assert not (tmp_path / "run").exists()


def test_data_that_is_not_there_whether_or_not_the_run_is_done(run):
    assert_refused(run("data.paths=[nope]"), "There is no file or folder 'nope'", "correct the path")
    run()
    assert_refused(run("data.paths=[nope]"), "There is no file or folder 'nope'", "correct the path")


@pytest.mark.parametrize("name", ["WORLD_SIZE", "LOCAL_RANK", "RANK"])
@pytest.mark.parametrize("value", ["abc", "-1", "1.5", ""])
def test_an_environment_that_torchrun_did_not_set(run, monkeypatch, name, value):
    for each, good in {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(each, good)
    monkeypatch.setenv(name, value)
    assert_refused(run(), f"{name} is {value!r}", "unset")


def test_a_world_without_its_address(run, monkeypatch):
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert_refused(run(), "MASTER_ADDR", "torchrun")


@pytest.mark.parametrize("rank, why", [(0, "1/2 clients joined"), (1, "trying to connect to")])
def test_ranks_that_do_not_meet_say_so(run, monkeypatch, rank, why):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    where = {"WORLD_SIZE": 2, "RANK": rank, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in where.items():
        monkeypatch.setenv(name, str(value))
    code, _, error = run("parallel.timeout=0.5", "global_batch=2", "micro_batch=1")
    assert code == 1 and error.splitlines()[-1].startswith(
        f"error: Rank {rank} of 2 has not met the others at 127.0.0.1:{port} ("
    )
    assert why in error and "Traceback" not in error


def test_a_run_that_cannot_fit_is_refused_before_it_starts(run, tmp_path):
    done = run("model.width=16384", "model.layers=200", "model.sequence=4096")
    assert_refused(done, "GB", "this machine has", "micro_batch", "tilewright plan train")
    assert not (tmp_path / "run").exists()


def test_a_validation_loss_is_a_line_of_its_own(run):
    _, out, _ = run("eval.every=2", "eval.samples=3")
    assert re.findall(r"step (\d+): validation loss \d\.\d{4} of 3 sequences held out", out) == ["2", "4", "6"]
    _, out, _ = run("eval.every=2", "eval.samples=3", "steps=8", "--json")
    events = [json.loads(line) for line in out.splitlines()]
    assert events[-1]["validation_loss"] == [e for e in events if e["event"] == "step"][-1]["validation_loss"] > 0


def test_batches_that_cannot_be(run, tmp_path):
    assert_refused(run("micro_batch=3", "global_batch=8"), "global batch 8", "choose numbers that divide")
    assert not (tmp_path / "run").exists()


def test_a_device_that_is_not_there(run):
    if not torch.cuda.is_available():
        assert_refused(run("device=cuda"), "choose device=cpu")
    assert_refused(run("device=tpu"), "choose auto, cuda or cpu")
    assert_refused(run("device=cpu:x"), "choose auto, cuda or cpu")


def test_a_budget_that_is_too_small(run):
    assert_refused(run("model.recompute=budget"), "model.recompute_budget is 0 GiB")


@pytest.mark.parametrize("damage", ["flipped", "truncated"])
def test_a_damaged_checkpoint(run, tmp_path, damage):
    run()
    file = next((tmp_path / "run" / "checkpoints" / "step-00000006").glob("*.bin"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content if damage == "flipped" else content[:-100])
    metrics = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    assert_refused(run("steps=9"), "No checkpoint of", file.name, "choose another out")
    assert_refused(run(f"checkpoint.resume={file.parent}", "steps=9"), file.name)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == metrics


def test_damaged_and_missing_data(run, tmp_path):
    path = tmp_path / "a.tokens"
    write_tokens(path, [np.arange(200)], vocabulary=256)
    path.write_bytes(path.read_bytes()[:-20])
    assert_refused(run("data.kind=tokens", f"data.paths=[{path}]"), "a.tokens")
    assert_refused(run(f"data.paths=[{tmp_path / 'no'}]"), "There is no file or folder")
    (tmp_path / "short").write_text("abc")
    assert_refused(run(f"data.paths=[{tmp_path / 'short'}]"), "give more data")
    assert not (tmp_path / "run" / "config.yaml").exists()  # nothing is written before all is well


@pytest.mark.parametrize("limit", [1_000, 8_000])  # bytes a file may have: too few for metrics, for a checkpoint
def test_a_full_disk(run, tmp_path, limit):
    run("steps=2", "log.every=1")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
    try:
        done = run("steps=4")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert_refused(done, "File too large", "run again")
    assert newest(tmp_path / "run" / "checkpoints").name == "step-00000002"
    assert run("steps=4")[0] == 0
    assert [record["step"] for record in read(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3, 4]


def test_a_folder_that_cannot_be_written_to(run):
    assert_refused(run("out=/proc/nowhere/x"), "/proc/nowhere", "choose another out")


def test_two_runs_in_one_folder(run, tmp_path):
    run()
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    holds = "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.lockf(f, 2); print(flush=True); input()"
    lock = tmp_path / "run" / "checkpoints" / ".lock"
    other = subprocess.Popen([sys.executable, "-c", holds, lock], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    other.stdout.readline()
    assert_refused(run("steps=9", "seed=3"), "Another process writes checkpoints to", "choose another out")
    other.communicate(b"\n")
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


def test_a_data_worker_that_dies(run, tmp_path, monkeypatch):
    def kill(self, metrics, steps):
        if metrics.step == 3:
            for child in multiprocessing.active_children():
                os.kill(child.pid, signal.SIGKILL)

    monkeypatch.setattr(command._Live, "step", kill)
    assert_refused(
        run("data.workers=1", "checkpoint.every=2", "steps=40"), "A data worker died (SIGKILL", "data.workers=0"
    )
    assert newest(tmp_path / "run" / "checkpoints") is not None
    monkeypatch.undo()


def test_memory_that_runs_out(run, monkeypatch):
    def full(self, *given):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(Engine, "accumulate", full)
    assert_refused(run(), "memory ran out; take a smaller micro_batch")


def test_a_loss_that_is_no_number(run, monkeypatch):
    accumulate = Engine.accumulate
    monkeypatch.setattr(Engine, "accumulate", lambda *given: accumulate(*given) * float("nan"))
    assert_refused(run(), "step 1: the loss is nan", "bad-step-00000001.safetensors", "guard.nan=skip")


# -- signals and terminals, in a process of its own


@pytest.fixture
def started():
    """Starts a run that does not outlive the test, whatever becomes of that."""
    processes = []

    def start(folder, *arguments, env=(), **options):
        processes.append(subprocess.Popen([*RUN, f"out={folder}", *arguments], env=PLAIN | dict(env), **options))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()


def until_figures(folder):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and len(read(folder / "metrics.jsonl")) < 3:
        time.sleep(0.02)


def test_ctrl_c_ends_the_run_with_a_checkpoint_and_130(started, tmp_path):
    process = started(tmp_path, "steps=1M", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until_figures(tmp_path)
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=60)
    assert process.returncode == 130 and error == ""
    step = int(
        re.search(r"Stopped at step (\d+), with a checkpoint; checkpoint.resume=auto goes on from there.", out)[1]
    )
    assert newest(tmp_path / "checkpoints").name == f"step-{step:08d}"


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_a_reader_that_goes_away_ends_the_run_with_a_checkpoint(started, tmp_path, arguments):
    process = started(
        tmp_path, "steps=1M", "log.every=1", *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    until_figures(tmp_path)
    process.stdout.close()
    assert process.wait(timeout=60) == 130 and process.stderr.read() == ""
    process.stderr.close()
    assert newest(tmp_path / "checkpoints") is not None


def in_a_terminal(started, folder, columns, **environment):
    """All that a run writes to a terminal so wide."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = started(folder, stdin=theirs, stdout=theirs, stderr=theirs, env={"TERM": "xterm", **environment})
    os.close(theirs)
    written = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while chunk := os.read(ours, 65536):
            written += chunk
    os.close(ours)
    assert process.wait(timeout=60) == 0
    return written.decode()


def test_a_terminal_of_80_columns_has_a_bar_and_a_line_a_step_that_does_not_wrap(started, tmp_path):
    written = in_a_terminal(started, tmp_path, 80, NO_COLOR="1")
    assert "━" in written and "6/6" in written
    lines = re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", written).replace("\r", "\n").splitlines()
    found = [line for line in lines if re.match(r" +\d+ +\d\.\d{4} ", line)]
    assert [int(line.split()[0]) for line in found] == [1, 2, 3, 4, 5, 6]
    assert all(len(line) <= 80 for line in found)
    assert not re.search(r"\x1b\[[\d;]*3\d[\d;]*m", written)  # NO_COLOR
