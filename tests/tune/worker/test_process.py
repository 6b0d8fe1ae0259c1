"""Whatever a trial does, it is an outcome with its cause, in time, and nothing of it is left: no process, no pipe."""

import contextlib
import dataclasses
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from slowness import soon
from tilewright.train.schema import Train
from tilewright.tune.store.record import Measurement
from tilewright.tune.worker import process
from tilewright.tune.worker.process import LONGEST_LOG, Limits, run_child
from tune import light_child
from tune.light_child import COMMAND, DEEDS, command

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="finds processes in Linux's /proc")
ENOUGH = Limits(60, 40)  # for what ends by itself, on a machine with much else to do
SILENT = Limits(60, 0.4)
LATE = Limits(1.5, 40)
OVERSHOOT = 5.0

GOOD = ("done", None, "")
NONSENSE = "The result of its process makes no sense: "
# What comes of each deed of the light child: its outcome, how its error begins, what its log has; and its limits.
EXPECTED = {
    "good": (*GOOD, ENOUGH),
    "illegal access": ("crashed", "Its process was killed by SIGSEGV, Segmentation fault.", "", ENOUGH),
    "traced access": (
        "crashed", "Its process was killed by SIGSEGV, Segmentation fault: Fatal Python error: Segmentation fault",
        "most recent call first", ENOUGH,
    ),
    "segfault": ("crashed", "Its process was killed by SIGSEGV, Segmentation fault.", "", ENOUGH),
    "abort": ("crashed", "Its process was killed by SIGABRT, Aborted.", "", ENOUGH),
    "killed": ("crashed", "Its process was killed by SIGKILL, Killed (the kernel does that", "", ENOUGH),
    "exit 3": ("crashed", "Its process ended with exit code 3.", "", ENOUGH),
    "exit 0": ("crashed", "Its process ended with exit code 0, without a result.", "", ENOUGH),
    "raised": (
        "crashed", "Its process ended with exit code 1: ValueError: the widths do not match", "some warning", ENOUGH
    ),
    "half a result": ("crashed", "Its process ended with exit code 0, without a result: {", '{"event": "res', ENOUGH),
    "crash after noise": ("crashed", "Its process ended with exit code 7", "{{{", ENOUGH),
    "no memory in Python": ("out of memory", "MemoryError", "Traceback", ENOUGH),
    "no memory in C++": ("out of memory", "what():  std::bad_alloc", "terminate called", ENOUGH),
    "no memory in CUDA": (
        "out of memory", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB.", "[W]", ENOUGH
    ),
    "no memory in the host": ("out of memory", "oom-kill: this process", "", ENOUGH),
    "out of memory": ("out of memory", "CUDA out of memory. Tried to allocate 2.00 GiB", "", ENOUGH),
    "not finite": ("not finite", "the loss is nan after 3 steps", "", ENOUGH),
    "refused": ("refused", "torch.compile found no C++ compiler", "", ENOUGH),
    "error": ("error", "ValueError: heads\ufffd do not divide \ufffd", "", ENOUGH),
    "not finite, done": ("error", NONSENSE + "it has a number that is not finite.", "", ENOUGH),
    "no time, done": ("error", NONSENSE + "its value is no measurement.", "", ENOUGH),
    "text for time, done": ("error", NONSENSE + "its value is no measurement.", "", ENOUGH),
    "unknown outcome": ("error", NONSENSE + "the outcome 'splendid' is none.", "", ENOUGH),
    "outcome is a list": ("error", NONSENSE + "the outcome \"['done']\" is none.", "", ENOUGH),
    "value is a list": ("error", NONSENSE + "its value is no object.", "", ENOUGH),
    "error is a list": ("error", NONSENSE + "its error is no text.", "", ENOUGH),
    "done with nothing": ("error", NONSENSE + "its value is no object.", "", ENOUGH),
    "hang": ("hung", "It gave no sign of life for 0.4 s.", "", SILENT),
    "deaf loop": ("hung", "It gave no sign of life for 0.4 s.", "", SILENT),
    "stopped": ("hung", "It gave no sign of life for 0.4 s.", "", SILENT),
    "silent without pipes": ("hung", "It gave no sign of life for 0.4 s.", "", SILENT),
    "endless steps": ("timed out", "It was not done after 1.5 s", "", LATE),
    "flood of stdout": ("hung", "It gave no sign of life for 0.4 s", "", SILENT),
    "flood of lines": ("hung", "It gave no sign of life for 0.4 s", "", SILENT),
    "flood of stderr": ("timed out", "It was not done after 1.5 s", "", LATE),
    "garbage": ("done", None, "ABCDEF", ENOUGH),
    "no events": ("done", None, '{"event": "done"}', ENOUGH),
    "no steps": ("done", None, '{"event": "step"}', ENOUGH),
    "deep": ("done", None, '{"event": {"event": ', ENOUGH),
    "long line": ("done", None, "[a line of more than 16 MiB on its standard output was dropped]", ENOUGH),
    "flood, then good": ("done", None, "noise\n" * 1000, ENOUGH),
    "two results": (*GOOD, ENOUGH),
    "result, then crash": (
        "done", None, "fell over\n[after its result it was killed by SIGSEGV, Segmentation fault]", ENOUGH
    ),
    "result, then exit 5": ("done", None, "[after its result it ended with exit code 5]", ENOUGH),
    "result, then hang": ("done", None, "[it had to be ended after its result]", ENOUGH),
    "result without a newline": (*GOOD, ENOUGH),
    "child left, good": (*GOOD, ENOUGH),
    "child in its session left, good": (*GOOD, ENOUGH),
    "child left, crash": ("crashed", "Its process was killed by SIGSEGV, Segmentation fault.", "", ENOUGH),
    "child in its session left, hang": ("hung", "It gave no sign of life for 2 s.", "", Limits(60, 2)),
    "daemon left, good": (*GOOD, ENOUGH),
}  # fmt: skip


def measurement(number):
    return dataclasses.asdict(Measurement(number, [0.5, 0.25], 1.0, 0.0, [2.0, 1.0], 10 * number))


def gone(pid):
    """Neither running nor a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def tried(deed, number=1, **more):
    """Run a deed and compare what came of it with what is expected; all processes that it told of."""
    outcome, error, log, limits = EXPECTED[deed]
    heard = []
    began = time.monotonic()
    value = measurement(number)
    if deed == "silent without pipes":
        more["steps"] = 0
    ended = run_child({"kind": "measure", "do": deed, "value": value, **more}, limits, heard.append, COMMAND)
    elapsed = time.monotonic() - began
    assert ended.outcome == outcome, (deed, ended)
    assert ended.value == (value if outcome == "done" else None), (deed, ended)
    assert (ended.error is None) if error is None else ended.error.startswith(error), (deed, ended)
    assert log in ended.log and len(ended.log) < LONGEST_LOG + 8192, (deed, ended)
    json.dumps(dataclasses.asdict(ended), allow_nan=False).encode()
    assert soon(limits.seconds + OVERSHOOT, began), deed
    if deed == "result, then hang":
        assert soon(3 + 10 + OVERSHOOT, began)
    if outcome == "hung":
        assert limits.silence <= elapsed and soon(limits.silence + 10 + OVERSHOOT, began), (deed, elapsed)
    named = [int(event["what"].split()[1]) for event in heard if "process" in event.get("what", "")]
    assert bool(named) == ("left" in deed), (deed, heard)
    assert all(map(gone, named)), deed
    return heard


@pytest.mark.parametrize("deed", EXPECTED)
def test_each_deed_has_its_outcome(deed):
    heard = tried(deed)
    if deed in ("good", "two results"):
        assert heard == [{"event": "step", "step": n, "seconds": 0.1, "loss": 5.0 / (n + 1)} for n in range(3)]


def test_no_deed_is_left_out():
    assert set(EXPECTED) | {"helped"} == set(DEEDS)


@LINUX
def test_every_fault_among_good_trials():
    chance = random.Random(6)
    faults = [deed for deed, (outcome, *_) in EXPECTED.items() if outcome != "done"]
    noisy = [deed for deed in EXPECTED if deed not in faults and deed not in ("good", "long line", "result, then hang")]
    wanted = faults * 2 + ["good"] * 20 + noisy
    chance.shuffle(wanted)
    assert len(faults) >= 12
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    helper_died = threading.Event()

    def beside():
        """A trial with a helper in a session of its own, beside all the others and the ends that they meet."""
        job = {"kind": "measure", "do": "helped", "helped": 6.0, "value": measurement(7)}
        named = []
        ended = run_child(job, ENOUGH, named.append, COMMAND)
        if ended.outcome != "done" or ended.value != measurement(7) or "what" not in named[3]:
            helper_died.set()
        return int(named[3]["what"].split()[1])

    began = time.monotonic()
    with ThreadPoolExecutor(1) as other, ThreadPoolExecutor(6) as pool:
        helper = other.submit(beside)
        list(pool.map(tried, wanted, range(1, len(wanted) + 1)))
    assert not helper_died.is_set() and gone(helper.result())
    assert soon(45, began)
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == (descriptors, threads)


@LINUX
def test_what_a_killed_child_wrote_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    script = "import json, sys, time; open(json.loads(sys.stdin.readline())['folder'] + '/x', 'w'); time.sleep(60)"
    ended = run_child({}, Limits(1.5, 60.0), command=(sys.executable, "-S", "-E", "-c", script))
    assert ended.outcome == "timed out" and list(tmp_path.iterdir()) == []


def test_nothing_is_left_of_fifty_runs():
    def inventory():
        mine = [b"Z", str(os.getpid()).encode()]
        zombies = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                if stat.read_bytes().rpartition(b")")[2].split()[:2] == mine:
                    zombies.append(stat)
        return sorted(os.listdir("/proc/self/fd")), threading.active_count(), zombies

    tried("good")
    before = inventory()
    for deed in ("good", "exit 3", "daemon left, good", "child left, crash", "garbage") * 10:
        tried(deed)
    assert inventory() == before


@pytest.mark.parametrize("read", [0, 10_000])  # with room for some of a chunk the pipe could block who writes it
def test_a_child_that_does_not_read_its_job_is_ended_in_time(read):
    asleep = (sys.executable, "-S", "-E", "-c", f"import os, time; os.read(0, {read}); time.sleep(60)")
    began = time.monotonic()
    ended = run_child({"kind": "measure", "much": "x" * (4 << 20)}, Limits(1.0, 40), command=asleep)
    assert ended.outcome == "timed out" and time.monotonic() - began >= 1.0 and soon(1.0 + OVERSHOOT, began)


def test_a_job_larger_than_a_pipe_arrives_whole():
    value = {**measurement(1), "profile": {"text": "ä" * (1 << 20)}}
    assert run_child({"kind": "measure", "do": "good", "value": value}, ENOUGH, command=COMMAND).value == value


def test_standard_input_stays_open_and_output_is_not_kept_back(monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    code = (
        "import json, os, select, sys\n"
        "sys.stdin.readline()\n"
        "open_still = not select.select([0], [], [], 0.3)[0]\n"
        "print(json.dumps({'event': 'alive', 'what': str(open_still)}))\n"
        "os._exit(0)  # without a flush\n"
    )
    heard = []
    run_child({}, ENOUGH, heard.append, (sys.executable, "-S", "-c", code))
    assert heard == [{"event": "alive", "what": "True"}]


def test_a_command_that_cannot_be_started_is_an_error():
    ended = run_child({}, ENOUGH, command=("/nonexistent/python",))
    assert ended.outcome == "error" and "could not be started" in ended.error and "/nonexistent/python" in ended.error


def test_events_hold_off_silence_but_not_the_time_out():
    job = {"kind": "measure", "do": "endless steps", "steps": 0}
    began = time.monotonic()
    ended = run_child(job, Limits(3.0, 2.0), command=COMMAND)
    assert ended.outcome == "timed out" and time.monotonic() - began >= 3.0 and soon(3.0 + OVERSHOOT, began)


def test_silence_is_not_counted_while_a_listener_takes_its_time():
    heard = []

    def slow(event):
        heard.append(event["step"])
        time.sleep(2.2 if event["step"] == 0 else 0.0)

    job = {"kind": "measure", "do": "good", "value": measurement(3), "steps": 6, "light": {"pace": 0.6}}
    assert run_child(job, Limits(60, 1.8), slow, COMMAND).outcome == "done" and heard == [0, 1, 2, 3, 4, 5]


def test_a_log_keeps_its_end_and_memory_stays_small():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ended = run_child({"kind": "measure", "do": "flood of stderr"}, Limits(2.0, 40), command=COMMAND)
    assert LONGEST_LOG // 2 < len(ended.log) <= LONGEST_LOG + 100
    assert ended.log[-500:].count("the sky is falling\n") > 20 and ended.error == "It was not done after 2 s."
    run_child({"kind": "measure", "do": "flood of stdout"}, Limits(2.0, 40), command=COMMAND)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # KiB on Linux


class Interrupted(BaseException):
    pass


@pytest.mark.parametrize("deed", ["child left, good", "child in its session left, hang", "daemon left, good"])
def test_what_a_listener_raises_passes_and_takes_the_trial_along(deed):
    named = []

    def hear(event):
        if "what" in event:
            named.append(int(event["what"].split()[1]))
            assert not gone(named[0])
            raise Interrupted

    with pytest.raises(Interrupted):
        run_child({"kind": "measure", "do": deed}, ENOUGH, hear, COMMAND)
    assert len(named) == 1 and gone(named[0])


@LINUX
def test_ctrl_c_ends_the_whole_tree_and_the_tuner():
    """A tuner in a process of its own, interrupted in the middle of a trial that has a process in its own session."""
    code = (
        "import signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background inherits it ignored\n"
        "from tilewright.tune.worker.process import Limits, run_child\n"
        "job = {'kind': 'measure', 'do': 'child in its session left, hang'}\n"
        "hear = lambda event: print(event.get('what', ''), flush=True)\n"
        f"run_child(job, Limits(100, 100), hear, {COMMAND!r})\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as tuner:
        pid = next(int(line.split()[1]) for line in tuner.stdout if "process" in line)
        assert not gone(pid)
        tuner.send_signal(signal.SIGINT)
        _, error = tuner.communicate(timeout=30)
    assert "KeyboardInterrupt" in error and tuner.returncode != 0 and gone(pid)


def test_the_light_child_does_a_studys_job_by_a_rule():
    rule = {
        "step_seconds": 0.2, "bytes": 1000,
        "levers": {"model.gpt_block": {"optimized": [0.5, 0.8]}, "cuda_graphs": {"True": [0.9, 1.1]}},
        "faults": [{"when": {"compile": "default"}, "do": "segfault"}],
    }  # fmt: skip

    def run(**changes):
        model = dataclasses.replace(Train().model, gpt_block=changes.pop("block", "standard"))
        train = dataclasses.asdict(dataclasses.replace(Train(global_batch=4), model=model))
        stop = changes.pop("stop_above", 0.0)
        job = {"kind": "measure", "configuration": {**train, **changes}, "warm": 2, "fewest": 4, "stop_above": stop}
        return run_child(job, ENOUGH, command=command(rule))

    given, best = Measurement(**run().value), Measurement(**run(block="optimized", cuda_graphs=True).value)
    assert given.tokens_per_step == 512 and len(given.step_seconds) == 4 and 0 < given.spread < 0.01
    assert best.seconds == pytest.approx(given.seconds * 0.45) and best.bytes == 880 and given.bytes == 1000
    assert run(compile="default").outcome == "crashed"
    assert run(stop_above=0.15).outcome == "stopped early" and run(stop_above=0.25).outcome == "done"


@pytest.mark.parametrize("kind", ["probe", "prove"])
def test_the_light_child_answers_the_other_jobs(kind):
    ended = run_child({"kind": kind}, ENOUGH, command=light_child.COMMAND)
    assert ended.outcome == "done" and ended.value


def test_what_a_killed_tuner_left_is_swept_and_nothing_that_is_in_use(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    long_ago = time.time() - 3600
    left, new, used = (tmp_path / f"tilewright-trial-{name}" for name in ("left", "new", "used"))
    for folder in (left, new, used):
        folder.mkdir()
        (folder / "weights").write_text("many")
    for folder in (left, used):
        os.utime(folder, (long_ago, long_ago))
    (tmp_path / "tilewright-trial-link").symlink_to(tmp_path / "elsewhere")
    with process._locked(used), process._scratch_folder() as own:
        with process._scratch_folder() as second:  # of another study
            assert Path(own).is_dir() and Path(second).is_dir()
        assert not left.exists() and (new / "weights").exists() and (used / "weights").exists()
    assert not Path(own).exists() and not Path(second).exists()


def test_a_full_disk_for_scratch_files_is_the_end_of_a_trial_and_not_of_a_study(monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryDirectory", full)
    ended = run_child({}, Limits(60, 60))
    assert ended.outcome == "error" and "No space left on device" in ended.error
