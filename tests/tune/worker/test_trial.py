"""A trial measures a real run, stops when it should, and turns whatever happens into an outcome with its real error."""

import contextlib
import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tilewright.train import loop
from tilewright.train.metrics import Metrics
from tilewright.train.profile import TAKES
from tilewright.train.shown import Shown
from tilewright.tune.store.proof import Proof
from tilewright.tune.store.record import OUTCOMES, PHASES, Measurement, read_gains
from tilewright.tune.worker import trial
from tilewright.tune.worker.meter import LOSSES
from tilewright.tune.worker.trial import attempt
from train.tiny import RUN, as_on_a_cpu  # noqa: F401

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"), pytest.mark.usefixtures("as_on_a_cpu")
]  # fmt: skip
TESTS = str(Path(__file__).parents[2])
JOB = {
    "kind": "measure", "configuration": dataclasses.asdict(RUN), "own_model": "", "path": [TESTS], "warm": 2,
    "fewest": 5, "most": 9, "least": 0.0, "seconds": 60.0, "spread": 0.0, "stop_above": 0.0, "best": 0.0, "widest": 0.0,
    "profile": False, "memory_cap": 0,
}  # fmt: skip
OWN = {**JOB, "configuration": dataclasses.asdict(dataclasses.replace(RUN, micro_batch=0))}  # the whole batch at once
LONG = {**JOB, "most": 10**6, "seconds": 600.0}


def done(**changes):
    """The result of a job in this process, and what it said before."""
    said = []
    result = attempt(json.dumps({**(OWN if changes.get("own_model") else JOB), **changes}), said.append)
    assert result["event"] == "result" and result["outcome"] in OUTCOMES
    assert (
        (result["error"] is None) == (result["value"] is not None) == (result["outcome"] in ("done", "stopped early"))
    )
    json.dumps([result, *said], allow_nan=False)
    return result, said


def measured(**changes):
    result, _ = done(**changes)
    assert result["outcome"] == "done", result["error"]
    return Measurement(**result["value"])


def steps(said):
    return [event["step"] for event in said if event["event"] == "step"]


# In this process


def test_what_is_measured_is_the_run_after_its_warm_up():
    result, said = done()
    found = Measurement(**result["value"])
    assert len(found.step_seconds) == 9 and min(found.step_seconds) > 0
    assert steps(said) == list(range(1, 12))  # two of them to warm up
    assert found.step_seconds == [event["seconds"] for event in said if event["event"] == "step"][2:]
    assert found.losses == [event["loss"] for event in said if event["event"] == "step"]
    assert found.tokens_per_step == 4 * 32 and found.bytes > 2**26 and 0 <= found.data_wait < found.seconds
    assert found.first_step_seconds == next(event["seconds"] for event in said if event["event"] == "step")
    assert found.profile is None and found.memory == {} and found.mfu is None
    assert said[0] == {"event": "alive", "what": "starting"}


def test_the_losses_are_those_of_the_run_itself(tmp_path):
    """And so those of two trials are of the same learning rates, however long either takes."""
    own = []
    config = dataclasses.replace(
        RUN, out=str(tmp_path), steps=40, schedule=dataclasses.replace(RUN.schedule, name="wsd")
    )
    loop.train(config, Shown(step=lambda one, steps: own.append(one.loss)))  # wsd: does not fall before step 32
    assert measured(most=25).losses == own[:LOSSES] and measured(most=4).losses == own[:6]


def test_a_profile_goes_first_and_does_not_count():
    result, said = done(profile=True)
    found = Measurement(**result["value"])
    assert len(found.step_seconds) == 9 and max(steps(said)) == TAKES + 2 + 9
    assert found.profile["device"] == "cpu" and found.profile["kernels"]
    assert found.memory["weights"] == found.memory["gradients"] == 4 * RUN.model.parameters
    assert found.losses == measured().losses + found.losses[11:] and len(found.losses) == 19


def test_it_stops_as_soon_as_the_spread_is_small():
    assert len(measured(spread=1e6).step_seconds) == JOB["fewest"]


def test_it_goes_on_until_the_machine_is_warm_however_small_the_spread_is():
    found = measured(spread=1e6, least=0.5, most=10**6).step_seconds
    assert sum(found) >= 0.5 and (sum(found[:-1]) < 0.5 or len(found) == JOB["fewest"])
    assert sum(measured(least=0.5, most=3).step_seconds) >= 0.5


def test_it_stops_when_the_time_is_over():
    assert len(measured(seconds=0.0).step_seconds) == 3  # of fewer nobody knows the spread


def test_what_is_hopeless_stops_early_with_what_was_measured():
    result, _ = done(stop_above=1e-9)
    assert result["outcome"] == "stopped early" and result["error"] is None
    assert 5 <= len(result["value"]["step_seconds"]) <= 9
    assert len(measured(stop_above=1e9).step_seconds) == 9


def counted(times, **changes):
    """How many of these steps are measured before it is enough."""
    meter = trial.Meter({**JOB, "warm": 1, "least": 60.0, "most": 10**6, **changes}, 0, lambda event: None)
    with contextlib.suppress(trial.Enough):
        for number, seconds in enumerate(times, 1):
            meter.step(Metrics(number, 1.0, 1.0, False, 0.1, 1, seconds, 10.0, 1.0, None, None, "", 1, 1, 1, 0.0), 100)
    return len(meter.measurement().step_seconds)


def test_what_is_slower_than_the_best_beyond_doubt_needs_no_more_steps():
    times = [0.100, 0.101, 0.102] * 20
    for best, widest, enough in (
        (0.095, 0.02, True),
        (0.1005, 0.02, False),  # it may be as fast
        (0.095, 0.001, False),  # it is slower, and by how much is hardly known
        (0.2, 0.02, False),  # it is faster
        (0.0, 0.02, False),  # there is no best, or this has to be known well
    ):
        assert (counted(times, best=best, widest=widest) < 10) is enough, (best, widest)


def test_the_phases_of_a_trial_are_told_in_order():
    for profile, told in ((False, ["warm up"]), (True, ["profile", "warm up"])):
        _, said = done(profile=profile)
        found = [event["name"] for event in said if event["event"] == "phase"]
        assert found == ["device", "build", "first step", *told, "measure"] and set(found) < set(PHASES)


def test_micro_batches_keep_the_tokens_of_a_step():
    small = dataclasses.replace(RUN, micro_batch=1, global_batch=4)
    found = measured(configuration=dataclasses.asdict(small))
    assert found.tokens_per_step == 4 * 32 and found.losses == pytest.approx(measured().losses, rel=1e-4)


def test_nothing_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(trial.tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    measured(profile=True)
    done(own_model="tune.factories:not_a_number")
    assert list(tmp_path.iterdir()) == []


def test_a_loss_that_is_no_number_is_an_outcome_and_saves_nothing(monkeypatch):
    monkeypatch.setattr(loop._Run, "_save", lambda run: pytest.fail("a checkpoint was saved"))
    wild = dataclasses.replace(
        RUN, optimizer=dataclasses.replace(RUN.optimizer, name="sgd", learning_rate=1e30, clip=0.0)
    )
    result, said = done(configuration=dataclasses.asdict(wild), most=50)
    assert result["outcome"] == "not finite" and "step" in result["error"]
    assert steps(said)  # and it did train before


@pytest.mark.parametrize(
    ("name", "outcome", "words"),
    [
        ("not_a_number", "not finite", "the loss of step 3 is not a finite number."),
        ("starves", "out of memory", "CUDA out of memory. Tried to allocate 2.00 GiB."),
        ("starves_on_the_host", "out of memory", "you tried to allocate"),
        ("starves_at_once", "out of memory", "CUDA out of memory. Tried to allocate 9.00 GiB."),
        ("fails", "error", "RuntimeError: the third step is cursed"),
        ("raises", "refused", "raised RuntimeError: no such file;"),
        ("has_no_parameters", "refused", "without parameters"),
    ],
)
def test_what_goes_wrong_is_an_outcome_with_its_real_error(capsys, name, outcome, words):
    result, _ = done(own_model=f"tune.factories:{name}")
    assert result["outcome"] == outcome and words in result["error"] and "\n" not in result["error"]
    assert "Traceback" in capsys.readouterr().err


def test_memory_that_runs_out_in_the_real_loop_is_named_so(monkeypatch):
    def update(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")

    monkeypatch.setattr(loop.Engine, "update", update)
    result, _ = done()
    assert (result["outcome"], result["error"]) == (
        "out of memory", "CUDA out of memory. Tried to allocate 1.00 GiB."
    )  # fmt: skip


def test_levers_that_cannot_run_here_are_refused():
    result, _ = done(configuration=dataclasses.asdict(dataclasses.replace(RUN, cuda_graphs=True)))
    assert result["outcome"] == "refused" and "needs a GPU" in result["error"]


@pytest.mark.parametrize("line", ["", "no json", "[]", "{}", '{"kind": "measure"}', '{"kind": "dance"}', "null"])
def test_a_job_that_makes_no_sense_is_an_error(line):
    result = attempt(line, lambda event: None)
    assert result["outcome"] == "error" and result["value"] is None and result["error"]


def test_a_run_that_is_asked_to_end_has_no_speed(monkeypatch):
    monkeypatch.setattr(loop.Signals, "came", True, raising=False)
    monkeypatch.setattr(loop.Signals, "__init__", lambda signals: setattr(signals, "_before", {}))
    result, _ = done()
    assert result["outcome"] == "error" and "before its speed was known" in result["error"]


@pytest.mark.parametrize("own_model", ["", "tune.factories:with_attribute"])
@pytest.mark.parametrize("changes", [{}, {"cuda_graphs": True}, {"compile": "reduce-overhead"}])
def test_what_is_observed_is_one_step_as_it_runs_without_a_recording(own_model, changes, monkeypatch):
    """Of two runs of which one takes twice as many micro batches, that one has twice the calls."""
    monkeypatch.setattr(torch, "compile", lambda module, **how: module)
    found = []
    for parts in (1, 2):
        run = {**JOB["configuration"], "global_batch": 4, "micro_batch": 4 // parts, **changes}
        result, _ = done(kind="observe", own_model=own_model, configuration=run)
        assert result["outcome"] == "done", result["error"]
        found.append(result["value"]["work"])
    if "compile" in changes:  # of which the trace tells
        assert all(any(each["op"] == "aten::mm" and each["flops"] for each in work) for work in found)
    else:
        calls = [sum(each["calls"] for each in work if "mm" in each["op"]) for work in found]
        assert calls[1] == 2 * calls[0] > 0
        flops = [sum(each["flops"] for each in work if each["dtype"]) for work in found]
        assert flops[0] == flops[1] > 0


def test_own_models_are_measured_like_any_other():
    found = measured(own_model="tune.factories:with_attribute", profile=True)
    assert found.tokens_per_step == 36 and len(found.step_seconds) == 9 and len(found.losses) == 19
    assert found.profile["kernels"] and found.losses == measured(
        own_model="tune.factories:with_attribute", most=LOSSES
    ).losses[:19]  # fmt: skip


def test_the_probe_says_what_the_machine_can_do():
    result, _ = done(kind="probe", device="cpu", seconds=0.2, own_model="tune.factories:with_attribute")
    found = result["value"]
    assert 1e8 < found["copy_bytes_per_second"] < 1e13 and set(found["flops"]) == {"fp32", "bf16"}
    assert all(1e6 < flops < 1e15 for flops in found["flops"].values())
    assert 1e-8 < found["kernel_seconds"] < 1e-3 and 1e-7 < found["launch_seconds"] < 1e-2
    assert found["memory_bytes"] == found["host"]["memory_bytes"] > 2**28 and found["host"]["cores"] >= 1
    assert found["host"]["cpu"] and found["device"] == "cpu" and found["machine"]["torch"] == torch.__version__
    own = {"global_batch": 4, "splits": True, "unit": "tokens", "count": 36, "parameters": 1056, "tensors": 3}
    counted = found["own_model"].pop("counted")  # of its first step: a matmul forward, and its two gradients
    assert counted["matmul"] > 0 and counted["bytes"] > 0 and counted["ops"] > 10 and counted["peak"] >= 0
    assert found["own_model"] == own | {"draws": False}


def test_the_probe_refuses_what_every_trial_would():
    """One forward and backward, before anything is measured: 73 s of refused trials otherwise."""
    result, _ = done(kind="probe", device="cpu", seconds=0.2, own_model="tune.factories:returns_no_loss")
    assert result["outcome"] == "refused" and "which is no loss" in result["error"]


def test_a_probe_without_the_device_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result, _ = done(kind="probe", device="cuda", seconds=0.1)
    assert result["outcome"] == "refused" and "no GPU" in result["error"]


def test_a_proof_is_passed_on(monkeypatch):
    from tilewright.tune.proof import prove

    monkeypatch.setattr(prove, "prove", lambda job, say: Proof("bit-identical", "all bits are equal."))
    result, _ = done(kind="prove")
    assert result["outcome"] == "done" and Proof(**result["value"]).verdict == "bit-identical"


def test_with_a_proof_come_the_first_losses_of_float32(monkeypatch):
    from tilewright.tune.proof import prove
    from tilewright.tune.search import standard

    monkeypatch.setattr(prove, "prove", lambda job, say: Proof("bit-identical", "all bits are equal."))
    start = dataclasses.replace(RUN, precision="bf16", model=dataclasses.replace(RUN.model, gpt_block="optimized"))
    sgd = dataclasses.replace(RUN, optimizer=dataclasses.replace(RUN.optimizer, name="sgd"))  # a best of another rule
    job = {"kind": "prove", "configuration": dataclasses.asdict(sgd), "start": dataclasses.asdict(start)}
    result, said = done(**job, curve=60.0)
    plain = measured(configuration=dataclasses.asdict(dataclasses.replace(RUN, precision="fp32"))).losses
    assert result["value"]["curve"] == pytest.approx(plain[:3], rel=1e-6)
    (early,) = [event["value"] for event in said if event["event"] == "proof"]
    assert early["verdict"] == "bit-identical"

    result, _ = done(**job, curve=1e-9)  # as time allows, and one at least
    assert result["value"]["curve"] == pytest.approx(plain[:1], rel=1e-6)

    monkeypatch.setattr(standard, "float32", lambda run: 1 / 0)
    result, _ = done(**job, curve=60.0)
    assert result["value"]["verdict"] == "bit-identical" and "division by zero" in result["value"]["no_curve"]


def test_the_learning_rate_rises_as_in_the_run_itself():
    short = dataclasses.replace(RUN, steps=5, schedule=dataclasses.replace(RUN.schedule, warmup=2000))
    assert trial._short_run(short, "folder", False).schedule.warmup == 5


# As the real process


class Child:
    """A trial's process, as its parent has it."""

    def __init__(self, job):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        environment.pop("TRITON_INTERPRET", None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tilewright.tune.worker.trial"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, env=environment, start_new_session=True, bufsize=0,
        )  # fmt: skip
        self.process.stdin.write(json.dumps(job).encode() + b"\n")

    def events(self):
        """Until the end; every line must be one."""
        for line in self.process.stdout:
            yield json.loads(line)

    def finish(self):
        events = list(self.events())
        self.log = self.process.stderr.read().decode()
        assert self.process.wait(10) == 0, self.log
        return events

    def __enter__(self):
        return self

    def __exit__(self, *error):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            pipe.close()


def test_two_processes_compute_the_same():
    job = {**JOB, "configuration": {**JOB["configuration"], "data": {**JOB["configuration"]["data"], "workers": 1}}}
    with Child(job) as one, Child({**JOB, "profile": True}) as other:
        found = [child.finish() for child in (one, other)]
    values = [events[-1]["value"] for events in found]
    assert all(events[-1]["outcome"] == "done" for events in found)
    told = [event["event"] for event in found[0] if event["event"] != "phase"]
    assert told == ["alive", "alive", *["step"] * 11, "result"]
    assert values[0]["losses"] == values[1]["losses"][:11] == measured().losses
    assert len(values[0]["step_seconds"]) == len(values[1]["step_seconds"]) == 9


def test_what_a_model_prints_is_no_event():
    with Child({**OWN, "own_model": "tune.factories:talks"}) as child:
        events = child.finish()
    assert [event["event"] for event in events].count("result") == 1
    assert events[-1]["outcome"] == "done" and len(events[-1]["value"]["step_seconds"]) == 9
    assert child.log.count('"outcome": "done"') == 4 * (11 + 1)  # in four ways; one step was under way at the end


def test_it_ends_when_its_standard_input_does():
    with Child(LONG) as child:
        next(event for event in child.events() if event["event"] == "step")
        child.process.stdin.close()
        assert child.process.wait(5) in (-signal.SIGKILL, 1)
        assert not _alive(child.process.pid)


def test_it_ends_when_its_parent_is_killed_although_its_standard_input_stays_open():
    """Somebody else keeps the pipe open, so that the parent's death alone can end it."""
    ours, theirs = os.pipe()
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-m', 'tilewright.tune.worker.trial'], stdin=sys.stdin, "
        "start_new_session=True)\n"
        "print(child.pid, flush=True)\ntime.sleep(600)\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=ours, stdout=subprocess.PIPE, env=environment
    ) as parent:  # fmt: skip
        pid = 0
        try:
            os.write(theirs, json.dumps(LONG).encode() + b"\n")
            pid = int(parent.stdout.readline())
            line = b""
            while b'"step"' not in line:
                assert select.select([parent.stdout], [], [], 60)[0], "no step in a minute"
                line = parent.stdout.readline()
            parent.kill()
            parent.wait()
            until = time.monotonic() + 5
            while _alive(pid) and time.monotonic() < until:
                time.sleep(0.05)
            assert not _alive(pid) or sys.platform != "linux"
        finally:
            os.close(ours)
            os.close(theirs)
            if pid and _alive(pid):
                os.kill(pid, signal.SIGKILL)
            parent.kill()


def _alive(pid):
    """Whether a process is there and not a zombie that nobody has asked for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize("within", [600.0, 0.0])
def test_the_gain_of_each_rule_is_measured_as_far_as_there_is_time(within):
    run = {**OWN["configuration"], "rules": "all", "precision": "bf16", "micro_batch": 2}
    result, _ = done(kind="rules", own_model="tune.factories:sized:rows=4", configuration=run, within=within)
    found = read_gains(result["value"])
    assert found.found == ["add_norm", "gelu"] and [each.rule for each in found.gains] == (
        found.found if within else []
    )
    assert all(each.spread >= 0 and each.bytes is None for each in found.gains)
