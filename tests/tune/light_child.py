"""A trial that costs 20 ms: it speaks the protocol of `tune.worker.trial` without torch, and misbehaves as told.

Start it by COMMAND, or `command({...})`, with `run_child(job, limits, command=...)`. How it behaves is in the job:

    {"kind": "measure", "do": "good", "value": {...}, "delay": 0.0, "steps": 3}
        do      what happens, a name of DEEDS; those with no result in their name or comment end without one
        value   of the result; without it, a measurement made up from the rest
        delay   seconds before anything is said
        steps   step events before the deed

A job as a study makes it (kind, configuration, warm, fewest, stop_above ...) has none of these, and is done by a rule:
job["light"] if it is there, or else the first argument on the command line, JSON as well (`command(rule)` gives it):

    {"step_seconds": 0.1, "bytes": 1000000, "delay": 0.0, "pace": 0.0,
     "levers": {"model.gpt_block": {"optimized": [0.5, 0.8]}, "compile": {"default": [0.9, 1.1]}},
     "faults": [{"when": {"compile": "default", "threads": 1}, "do": "segfault"}]}
        step_seconds, bytes  of the baseline; each lever with that value multiplies both
        pace                 seconds that each step really takes, for a test that wants to come in between
        faults               the first whose levers are all so is what happens
        gains                what single rules give, as tune.store.record.RuleGains has it
        norms                {"pp": 2.0}: what ranks of such a layout make of the norm of the gradients

Measured times move by a thousandth from step to step, in the same way each time. "probe", "prove", "links" and
"first steps" have answers too.
"""

import json
import os
import resource
import signal
import sys
import time
from _thread import start_new_thread

COMMAND = (sys.executable, "-S", "-E", __file__)
ASLEEP = (sys.executable, "-S", "-E", "-c", "import time; time.sleep(120)")


def command(rule):
    """The command of a child that goes by a rule where its job has none."""
    return (*COMMAND, json.dumps(rule))


def say(event):
    os.write(1, json.dumps(event).encode() + b"\n")


def result(outcome, error=None, value=None):
    say({"event": "result", "outcome": outcome, "error": error, "value": value})


def complain(text):
    os.write(2, text.encode() + b"\n")


def good(job):
    result("done", value=made_up(job))


def made_up(job):
    if "value" in job:
        return job["value"]
    rule = job.get("light", {})
    seconds = [rule.get("step_seconds", 0.1) * (1 + 0.001 * (n % 3 - 1)) for n in range(max(3, job.get("fewest", 5)))]
    run = job.get("configuration", {})
    sequences = run.get("global_batch") or max(1, run.get("micro_batch", 1)) * max(1, run.get("accumulation", 1))
    return {
        "tokens_per_step": sequences * run.get("model", {}).get("sequence", 128), "step_seconds": seconds,
        "first_step_seconds": seconds[0] * 3, "data_wait": 0.0, "losses": [5.0 / (n + 1) for n in range(len(seconds))],
        "bytes": int(rule.get("bytes", 1_000_000)),
    }  # fmt: skip


# --- Death


def illegal_access(job):
    import ctypes

    ctypes.string_at(0)


def traced_access(job):
    """As the real child does it."""
    import faulthandler

    faulthandler.enable()
    illegal_access(job)


def killed_by(number):
    return lambda job: os.kill(os.getpid(), number)


def no_memory_in_python(job):
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    bytearray(2 << 30)


def no_memory_in_cpp(job):
    complain("terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc")
    os.abort()


def no_memory_in_cuda(job):
    complain("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB.")
    complain("[W] resources were not released")
    os._exit(1)


def no_memory_in_the_host(job):
    complain("oom-kill: this process")
    os.kill(os.getpid(), signal.SIGKILL)


def raised(job):
    complain("some warning")
    raise ValueError("the widths do not match")


def half_a_result(job):
    os.write(1, json.dumps({"event": "result", "outcome": "done", "value": made_up(job)}).encode()[:-9])


def result_then_crash(job):
    good(job)
    complain("and then it fell over")
    os.kill(os.getpid(), signal.SIGSEGV)


# --- No end


def deaf_loop(job):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    while True:
        pass


def endless_steps(job):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    step = 0
    while True:
        say({"event": "step", "step": step, "seconds": 0.01, "loss": 1.0})
        time.sleep(0.01)
        step += 1


def silent_without_pipes(job):
    os.closerange(0, 3)
    time.sleep(120)


def flood(pipe, chunk):
    def pour(job):
        while True:
            os.write(pipe, chunk)

    return pour


# --- Noise; a result follows


def noise(*chunks):
    def make(job):
        for chunk in chunks:
            while chunk:
                chunk = chunk[os.write(1, chunk) :]
        good(job)

    return make


def long_line(job):
    """The result of others: more than any line may be, and something that looks like one behind it."""
    noise(b"{" + b" " * (17 << 20) + b'"event": "result", "outcome": "done", "value": {}}\n')(job)


def flood_then_good(job):
    for _ in range(60):
        os.write(1, b"noise\n" * 5000)
        os.write(2, b"noise\n" * 5000)
    good(job)


def crash_after_noise(job):
    os.write(1, os.urandom(100_000) + b"\n" + b"{" * 2000)
    os._exit(7)


# --- Others left behind: each is named by an event, {"event": "alive", "what": "process 123"}


def leave(session, environment, then):
    """Start a process that holds all pipes open, and leave it in the session or make it its own."""

    def start(job):
        import subprocess  # here: it is half of what the others cost

        other = subprocess.Popen(ASLEEP, start_new_session=session, env=environment)
        say({"event": "alive", "what": f"process {other.pid}"})
        then(job)

    return start


def daemon(job):
    """Fork twice, with a session in between: nothing but what it inherited links it to its grandparent."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.write(writing, str(os.getpid()).encode())
            time.sleep(120)
        os._exit(0)
    os.wait()
    say({"event": "alive", "what": f"process {os.read(reading, 99).decode()}"})
    good(job)


def helped(job):
    """A good trial that needs a process in a session of its own to live as long as itself."""
    import subprocess

    helper = subprocess.Popen(ASLEEP, start_new_session=True)
    say({"event": "alive", "what": f"process {helper.pid}"})
    until = time.monotonic() + job["helped"]
    while time.monotonic() < until:
        time.sleep(0.02)
        say({"event": "alive"})
    assert helper.poll() is None, "somebody killed the helper"
    good(job)


def nothing(job):
    time.sleep(120)


DEEDS = {
    "good": good,
    "helped": helped,  # for job["helped"] seconds; good
    # Death.
    "illegal access": illegal_access,
    "traced access": traced_access,
    "segfault": killed_by(signal.SIGSEGV),
    "abort": lambda job: os.abort(),
    "killed": killed_by(signal.SIGKILL),
    "exit 3": lambda job: os._exit(3),
    "exit 0": lambda job: os._exit(0),
    "raised": raised,
    "half a result": half_a_result,
    "crash after noise": crash_after_noise,
    "no memory in Python": no_memory_in_python,
    "no memory in C++": no_memory_in_cpp,
    "no memory in CUDA": no_memory_in_cuda,
    "no memory in the host": no_memory_in_the_host,
    # A result that is none, or none to be proud of.
    "out of memory": lambda job: result("out of memory", "CUDA out of memory. Tried to allocate 2.00 GiB"),
    "not finite": lambda job: result("not finite", "the loss is nan after 3 steps", {"losses": [1.0, float("nan")]}),
    "refused": lambda job: result("refused", "torch.compile found no C++ compiler: install g++ or set CXX."),
    "error": lambda job: result("error", "ValueError: heads\x00 do not divide \ud800"),
    "not finite, done": lambda job: result("done", value={**made_up(job), "losses": [float("nan")]}),
    "no time, done": lambda job: result("done", value={**made_up(job), "step_seconds": []}),
    "text for time, done": lambda job: result("done", value={**made_up(job), "bytes": "many"}),
    "unknown outcome": lambda job: result("splendid", value=made_up(job)),
    "outcome is a list": lambda job: result(["done"], value=made_up(job)),
    "value is a list": lambda job: result("done", value=[1, 2]),
    "error is a list": lambda job: result("error", ["no"]),
    "done with nothing": lambda job: result("done"),
    # No end.
    "hang": nothing,
    "deaf loop": deaf_loop,
    "stopped": killed_by(signal.SIGSTOP),
    "endless steps": endless_steps,
    "silent without pipes": silent_without_pipes,
    "flood of stdout": flood(1, b"x" * (1 << 20)),
    "flood of lines": flood(1, b"x\n" * (1 << 15)),
    "flood of stderr": flood(2, b"the sky is falling\n" * (1 << 12)),
    # Noise, and a good result.
    "garbage": noise(bytes(range(256)) * 50, b"\n\n\x00\xff{\n"),
    "no events": noise(b'[1, 2]\n"text"\nnull\nNaN\n{}\n{"event": "done"}\n{"event": ["result"]}\n{"event": {}}\n'),
    "no steps": noise(
        b'{"event": "step"}\n{"event": "step", "step": "x", "seconds": 1.0, "loss": 1.0}\n'
        b'{"event": "alive", "what": 3}\n'
        b'{"event": "step", "step": 1, "seconds": 1' + b"0" * 400 + b', "loss": 1.0}\n'
        b'{"event": "step", "step": 1, "seconds": 1' + b"0" * 9000 + b', "loss": 1.0}\n'
    ),
    "deep": noise(b'{"event": ' * 100_000 + b"\n"),
    "long line": long_line,
    "flood, then good": flood_then_good,
    # A good result that something follows.
    "two results": lambda job: [good(job), result("error", "a second thought"), say({"event": "alive"})],
    "result, then crash": result_then_crash,
    "result, then exit 5": lambda job: [good(job), os._exit(5)],
    "result, then hang": lambda job: [good(job), nothing(job)],
    "result without a newline": lambda job: os.write(
        1, json.dumps({"event": "result", "outcome": "done", "value": made_up(job)}).encode()
    ),
    # Others left behind.
    "child left, good": leave(False, None, good),
    "child in its session left, good": leave(True, None, good),
    "child left, crash": leave(False, None, illegal_access),
    "child in its session left, hang": leave(True, {}, nothing),
    "daemon left, good": daemon,
}


def follow_rule(job):
    """A job of a study, by its rule."""
    rule, run = job["light"], job["configuration"]

    def at(name):
        value = run
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value

    for name, factors in rule.get("levers", {}).items():
        time_factor, bytes_factor = factors.get(str(at(name)), (1.0, 1.0))
        rule["step_seconds"] = rule.get("step_seconds", 0.1) * time_factor
        rule["bytes"] = rule.get("bytes", 1_000_000) * bytes_factor
    for fault in rule.get("faults", []):
        if all(at(name) == value for name, value in fault["when"].items()):
            return fault["do"]
    return rule.get("do", "good")


def measure(job):
    deed = follow_rule(job) if "configuration" in job else job["do"]
    rule = job.get("light", {})
    say({"event": "phase", "name": "measure"})
    time.sleep(job.get("delay", rule.get("delay", 0.0)))
    seconds = rule.get("step_seconds", 0.1)
    for step in range(job.get("steps", job.get("warm", 0) + job.get("fewest", 3))):
        time.sleep(rule.get("pace", 0.0))
        say({"event": "step", "step": step, "seconds": seconds, "loss": 5.0 / (step + 1)})
    if deed == "good" and 0 < job.get("stop_above", 0.0) < seconds * 0.99:
        result("stopped early", value=made_up(job))
    else:
        DEEDS[deed](job)


def probe(job):
    machine = {"cpu": "light", "cores": 2, "memory_bytes": 8 << 30}
    metrics = {"copy_bytes_per_second": 1e10, "flops": {"fp32": 1e11, "bf16": 1e11}}
    costs = {"launch_seconds": 1e-5, "kernel_seconds": 1e-6}
    result("done", value={
        "machine": {"hardware": "light"}, "host": machine, "device": "cpu", "memory_bytes": 8 << 30, **metrics, **costs
    })  # fmt: skip


def prove(job):
    losses = {name: [5.0, 4.0] for name in ("float32", "standard", "best")}
    value = {"verdict": "same within rounding", "why": "It is light.", "layers": [], "losses": losses}
    if job.get("curve"):
        say({"event": "proof", "value": value})
        if deed := job.get("light", {}).get("curve"):
            DEEDS[deed](job)
        value["curve"] = [5.0, 2.5, 1.5]
    result("done", value=value)


def links(job):
    result("done", value={"bytes_per_second": 1e9, "round_seconds": 1e-4})


def first_steps(job):
    layout, factor = job["configuration"]["parallel"], 1.0
    for name, times in job["light"].get("norms", {}).items():
        factor *= times if layout[name] > 1 else 1.0
    numbers = [5.0 / (step + 1) for step in range(job["steps"])]
    result("done", value={"losses": numbers, "norms": [factor * number for number in numbers]})


def observe(job):
    work = {"op": "aten::mm", "shapes": "8x4, 4x2", "dtype": "fp32", "kernel": "mm", "category": "matmul", "calls": 1}
    result("done", value={"work": [{**work, "seconds": 0.01, "flops": 128.0, "bytes": 224.0}]})


def rules(job):
    result("done", value=job["light"].get("gains", {"gains": [], "not_measured": []}))


def end_with_parent():
    while os.read(0, 1 << 16):
        pass
    os._exit(1)


def main():
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    job = json.loads(sys.stdin.buffer.readline())
    if "configuration" in job:
        job.setdefault("light", json.loads(sys.argv[1]) if len(sys.argv) > 1 else {})
    start_new_thread(end_with_parent, ())
    kinds = {
        "measure": measure, "probe": probe, "prove": prove, "observe": observe, "rules": rules, "links": links,
        "first steps": first_steps,
    }  # fmt: skip
    kinds[job["kind"]](job)


if __name__ == "__main__":
    main()
