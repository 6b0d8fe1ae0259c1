"""Trials that are forked from a process that has imported torch: quick, and as much on their own as new processes."""

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slowness import soon
from tilewright.tune.settings import TRIAL
from tilewright.tune.worker import forkserver
from tilewright.tune.worker.process import Limits, run_child
from train.tiny import RUN

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks on Linux alone")
LIMITS = Limits(120.0, 100.0)
TESTS, SOURCE = Path(__file__).parents[2], Path(forkserver.__file__).parents[3]
JOB = {
    "kind": "measure", "configuration": dataclasses.asdict(RUN), "own_model": "", "path": [str(TESTS)], "warm": 1,
    "fewest": 3, "most": 3, "least": 0.0, "seconds": 60.0, "spread": 0.0, "stop_above": 0.0, "best": 0.0, "widest": 0.0,
    "profile": False, "memory_cap": 0,
}  # fmt: skip
MODEL = """
import os, signal, subprocess, sys, time

ESCAPE = "import os, time; os.setsid(); os.write(1, str(os.getpid()).encode()); os.close(1); time.sleep(300)"

def say():
    raise RuntimeError("SAID")

def environment():
    raise RuntimeError(f"{os.environ.get('OF_A_TRIAL')} in {os.getcwd()}, started by {os.getppid()}")

def escape():
    # Own session, own parent, empty environment: nothing of it tells whose it is.
    other = subprocess.Popen([sys.executable, "-S", "-E", "-c",
        f"import os, sys\\nif os.fork(): os._exit(0)\\n{ESCAPE}"], env={}, stdout=subprocess.PIPE)
    raise RuntimeError("pid=" + other.stdout.read().decode())

def crash():
    os.kill(os.getpid(), signal.SIGSEGV)

def leave():
    os._exit(7)

def hang():
    escaped = subprocess.Popen([sys.executable, "-S", "-E", "-c", "import os, time; os.setsid(); time.sleep(300)"])
    print("pids", os.getppid(), os.getpid(), escaped.pid, file=sys.stderr, flush=True)
    while True:
        time.sleep(1)
"""


@pytest.fixture(scope="module", autouse=True)
def no_server_is_left():
    """The tests share a server, whose start takes seconds, where they do not end it."""
    yield
    server = forkserver._server
    forkserver.stop()
    assert server is None or gone(server.process.pid)


@pytest.fixture(autouse=True)
def same_environment(monkeypatch):
    """Another environment is another server, and pytest sets this variable anew for every part of a test."""
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    monkeypatch.setattr("_pytest.runner._update_current_test_var", lambda item, when: None)


@pytest.fixture
def model(tmp_path):
    """What came of a factory of the module, in a trial of its own."""
    file = tmp_path / "forked_model.py"
    file.write_text(MODEL)

    def call(name, limits=LIMITS):
        job = {**JOB, "own_model": f"forked_model:{name}", "path": [str(tmp_path), str(TESTS)]}
        return run_child(job, limits)

    call.file = file
    return call


def gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def wait_until(condition, seconds=30.0):
    began = time.monotonic()
    while not condition():
        assert soon(seconds, began), "it did not happen"
        time.sleep(0.05)


def test_a_trial_waits_for_no_imports_and_the_phases_are_all_of_its_time():
    took, found = [], []
    for command in (TRIAL, TRIAL, list(TRIAL)):  # the server starts, it is there, a new process as it was before
        began = time.monotonic()
        found.append(run_child(JOB, LIMITS, command=command))
        took.append(time.monotonic() - began)
        assert found[-1].outcome == "done", found[-1]
        assert sum(found[-1].phases.values()) == pytest.approx(took[-1], rel=0.05, abs=0.2)
        assert {"start", "imports", "build", "first step", "measure", "exit"} < set(found[-1].phases)
    before_build = [each.phases["start"] + each.phases["imports"] for each in found]
    assert before_build[1] < before_build[2] / 4
    assert found[1].value["losses"] == found[2].value["losses"]
    assert found[1].value["bytes"] == pytest.approx(found[2].value["bytes"], rel=0.2)  # on a CPU, all of the process


def test_a_forked_trial_computes_with_several_threads_and_the_next_one_too():
    threads = {**JOB["configuration"], "threads": 2}
    threads["model"] = {**threads["model"], "width": 128, "ffn": 512}
    for _ in range(3):
        assert run_child({**JOB, "configuration": threads}, LIMITS).outcome == "done"
    assert len(os.listdir(f"/proc/{forkserver._server.process.pid}/task")) == 1


def test_the_imports_of_the_server_touch_no_gpu():
    code = (
        "import importlib, torch\n"
        "def touched(*_, **__): raise AssertionError('CUDA was touched')\n"
        "for name in ('is_available', 'device_count', 'init', '_lazy_init', 'current_device'):\n"
        "    setattr(torch.cuda, name, touched)\n"
        "from tilewright.tune.worker.forkserver import IMPORTED, _gpu_files\n"
        "for name in IMPORTED: importlib.import_module(name)\n"
        "assert not _gpu_files() and not torch.cuda.is_initialized()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_trial_sees_the_environment_and_folder_of_now(model, tmp_path, monkeypatch):
    seen = []
    for value in ("one", "one", "two"):
        monkeypatch.setenv("OF_A_TRIAL", value)
        (tmp_path / value).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / value)
        ended = model("environment")
        assert f"{value} in {tmp_path / value}" in ended.error, ended
        seen.append(ended.error.rpartition("by ")[2].split()[0])
    assert seen[0] == seen[1] != seen[2]  # what is read at an import is as it should be: another server


def test_the_module_of_a_user_is_imported_anew_by_every_trial(model):
    assert "SAID" in model("say").error
    model.file.write_text(MODEL.replace("SAID", "CHANGED AND LONGER"))
    assert "CHANGED AND LONGER" in model("say").error


def test_what_a_trial_leaves_behind_is_found_whatever_it_does(model):
    ended = model("escape")
    assert gone(int(ended.error.partition("pid=")[2].split()[0].rstrip(";"))), ended


def test_after_any_end_the_next_trial_runs(model):
    crashed = model("crash")
    assert crashed.outcome == "crashed" and "SIGSEGV" in crashed.error and "in crash" in crashed.log
    left = model("leave")
    assert left.outcome == "crashed" and "exit code 7" in left.error
    began = time.monotonic()
    hung = model("hang", Limits(4.0, 100.0))
    assert hung.outcome == "timed out" and soon(4.0 + 5.0, began)
    pids = [int(pid) for pid in hung.log.partition("pids")[2].split()[:3]]
    assert pids[0] == forkserver._server.process.pid and not gone(pids[0]) and all(map(gone, pids[1:]))
    assert run_child(JOB, LIMITS).outcome == "done" and forkserver._server.process.pid == pids[0]


def test_a_server_that_dies_takes_its_trial_along_and_is_replaced():
    def kill(event):
        if event["event"] == "step":
            os.kill(forkserver._server.process.pid, signal.SIGKILL)

    ended = run_child({**JOB, "most": 10**6, "seconds": 600.0}, LIMITS, kill)
    assert ended.outcome == "crashed" and "SIGKILL" in ended.error
    assert run_child(JOB, LIMITS).outcome == "done"


def test_without_a_server_a_trial_is_a_new_process_and_says_so(monkeypatch):
    broken = forkserver.ForkServer((sys.executable, "-c", "import sys; sys.exit('torch is broken')"))
    monkeypatch.setattr(forkserver, "_server", broken)
    monkeypatch.setattr(broken.process, "poll", lambda: None)  # it dies just after somebody has looked
    with contextlib.closing(broken):
        ended = run_child(JOB, LIMITS)
    assert ended.outcome == "done"
    assert "[started as a new process, for there is none to fork from: torch is broken]" in ended.log


def test_an_import_that_opens_a_gpu_is_refused(tmp_path):
    code = (
        "import socket, sys\n"
        "from tilewright.tune.worker import forkserver\n"
        "forkserver.IMPORTED, forkserver._gpu_files = (), lambda: ['/dev/nvidiactl']\n"
        "forkserver.main()\n"
    )
    server = forkserver.ForkServer((sys.executable, "-c", code))
    with contextlib.closing(server), pytest.raises(forkserver.Unavailable, match="opened /dev/nvidiactl"):
        server.fork("token", 60.0)


SCRIPT = """
import sys
from tilewright.tune.worker.process import Limits, run_child

print("once", flush=True)  # and no `if __name__ == "__main__"`
job = JOB
ended = run_child(job, Limits(120.0, 100.0), lambda event: print(event.get("what", ""), flush=True))
print(ended.outcome)
"""


def script(job):
    path = {**os.environ, "PYTHONPATH": f"{SOURCE}:{TESTS}"}
    code = SCRIPT.replace("JOB", repr(job))
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=path)


def test_the_script_of_a_user_is_not_run_again_by_its_trials():
    with script(JOB) as tuner:
        said = tuner.communicate(timeout=120)[0].split("\n")
    assert said.count("once") == 1 and said[-2] == "done"


@pytest.mark.parametrize("early", [True, False], ids=["while it imports", "in a trial"])
def test_kill_minus_nine_of_the_tuner_leaves_no_process(model, early):
    job = {**JOB, "own_model": "forked_model:hang", "path": [str(model.file.parent), str(TESTS)]}
    with script(job) as tuner:
        children = Path(f"/proc/{tuner.pid}/task/{tuner.pid}/children")
        wait_until(lambda: children.read_text().split())
        pids = [int(pid) for pid in children.read_text().split()]
        if not early:
            next(line for line in tuner.stdout if "calling forked_model" in line)
            wait_until(lambda: _descendants(pids[0], 2))
            pids += _descendants(pids[0], 2)
        assert len(pids) == (1 if early else 3)
        tuner.kill()
    wait_until(lambda: all(map(gone, pids)), 5.0)


def _descendants(pid, generations):
    found = []
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            found += [int(child), *(_descendants(child, generations - 1) if generations > 1 else [])]
    return found if generations == 1 or len(found) >= generations else []
