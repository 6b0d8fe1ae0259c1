"""The parent's side of a trial: start its process, hear what it says, and end it with everything it started.

A trial may do anything: crash, hang, flood its pipes, leave processes behind. None of it is the end of a study: each
way to die is an outcome with a sentence. The child reads one line of JSON, its job, and says what it does in events,
one JSON object a line (`tune/worker/trial.py` has them). One loop writes, reads and watches the clock; there are no
threads.

A trial is forked from a process that has imported torch already (`tune/worker/forkserver.py`); any other command, and a
trial where there is no such process, is started anew.

Whose process is whose, where several trials run at once: the child leads a session, and its environment has a token
that all it starts inherit. Processes are found by session, token and parent, so that those of no other trial are. Of
one that was started anew, a process that has left its session, lost its parent and been given an environment without
the token is not found. Of one that was forked all are: what loses its parent is the server's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import re
import selectors
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tilewright.tune.settings import TRIAL
from tilewright.tune.store.record import OUTCOMES, PHASES, Measurement
from tilewright.tune.worker import forkserver
from tilewright.tune.worker.family import adopt_orphans, end_family, process_of
from tilewright.tune.worker.forkserver import TOKEN, Forked, ForkServer

LONGEST_LINE = 16 << 20
LONGEST_LOG = 64 << 10
LONGEST_STRAYS = 4 << 10  # of what is on standard output and is no event
LONGEST_ERROR = 500
CHUNK = 1 << 16
TICK = 0.05  # seconds between two looks at a child that says nothing
GRACE = 3.0  # seconds to exit after the result
DRAIN = 1.0  # seconds to read what is left in the pipes; more only where somebody unknown holds them open
_SCRATCH = "tilewright-trial-"
_NEW = 60.0  # seconds in which a folder that was made is locked
# In lower case. The allocators of CUDA, of C++, of PyTorch on a CPU, and of Python.
NO_MEMORY = (
    "out of memory", "out_of_memory", "bad_alloc", "allocate memory", "not enough memory", "memoryerror", "oom-kill"
)  # fmt: skip
RAISED = re.compile(r"[\w.]*(Error|Exception)\b|Fatal Python error")


@dataclass(frozen=True)
class Limits:
    """Seconds a trial may take, and seconds that may pass between two of its events."""

    seconds: float
    silence: float


@dataclass(frozen=True)
class Ended:
    """How a trial ended: a word of OUTCOMES, why, the last that it wrote, what it gave, and where its seconds went."""

    outcome: str
    error: str | None
    log: str
    value: dict[str, Any] | None
    phases: dict[str, float] = field(default_factory=dict)  # seconds, by names of PHASES


def run_child(
    job: dict[str, Any],
    limits: Limits,
    hear: Callable[[dict[str, Any]], None] = lambda event: None,
    command: Sequence[str] = TRIAL,
) -> Ended:
    """Run a job in a process of its own; nothing that it started is left when this returns or raises.

    Args:
        job: what the child reads from its standard input.
        limits: after which it is ended; by at most 5 s more.
        hear: called with each event but the result, in this thread; nothing is watched while it runs.
        command: the child.

    >>> import sys
    >>> ended = run_child({}, Limits(60, 60), command=(sys.executable, "-c", "raise ValueError('no such lever')"))
    >>> ended.outcome, ended.error
    ('crashed', 'Its process ended with exit code 1: ValueError: no such lever')
    """
    try:
        with _scratch_folder() as folder:
            return _run_child({**job, "folder": folder}, limits, hear, command)
    except OSError as error:  # a full disk
        return Ended("error", f"Its process could not be started: {error}", "", None)


@contextlib.contextmanager
def _scratch_folder() -> Iterator[str]:
    """A folder for what a child writes, made and removed here: a child that is killed removes nothing.

    It is locked while it is in use. The folder of a tuner that was killed is not, and is removed here.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{_SCRATCH}*"):
        with contextlib.suppress(OSError), _locked(left):
            if left.stat().st_uid == os.geteuid() and time.time() - left.stat().st_mtime > _NEW:
                shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_SCRATCH, ignore_cleanup_errors=True) as folder, _locked(Path(folder)):
        yield folder


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a folder alone; raises BlockingIOError where somebody else does."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def _run_child(
    job: dict[str, Any], limits: Limits, hear: Callable[[dict[str, Any]], None], command: Sequence[str]
) -> Ended:
    began, said, token = time.monotonic(), json.dumps(job).encode() + b"\n", uuid.uuid4().hex
    adopt_orphans()
    with forkserver.reserved() if command == TRIAL else contextlib.nullcontext() as server:
        try:
            process, note = _start(command, token, server, limits)
        except TimeoutError as error:
            return Ended("timed out", f"It was not done after {round(limits.seconds, 1):g} s: {error}", "", None)
        except OSError as error:
            return Ended("error", f"Its process could not be started: {error}", "", None)
        assert process.stdin and process.stdout and process.stderr
        with process.stdin, process.stdout, process.stderr:
            leader = process_of(process.pid)
            try:
                child = _Child(process, said, hear, began)
                ended_as = child.follow(limits)
            finally:  # Ctrl-C too: take the trial along
                left = end_family(process, leader.began if leader else 0, f"{TOKEN}={token}".encode())
            child.drain()
    child.begin_phase("")
    child.notes += [note] if note else []
    if left:
        child.notes.append(f"still there after SIGKILL: {', '.join(map(str, sorted(left)))}")
    return dataclasses.replace(_told(child, ended_as, limits, job.get("kind")), phases=child.phases)


def _start(
    command: Sequence[str], token: str, server: ForkServer | None, limits: Limits
) -> tuple[Forked | subprocess.Popen[bytes], str]:
    """A process for a trial, and what there is to say of how it was started."""
    note = ""
    if server is not None:
        try:
            return server.fork(token, limits.seconds), note
        except forkserver.Unavailable as error:
            note = f"started as a new process, for there is none to fork from: {error}"
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
        env={**os.environ, "PYTHONUNBUFFERED": "1", TOKEN: token}, start_new_session=True,
    ), note  # fmt: skip


class _Child:
    """The pipes of a child process: what is still to be written to it, and what it has written."""

    def __init__(
        self,
        process: Forked | subprocess.Popen[bytes],
        said: bytes,
        hear: Callable[[dict[str, Any]], None],
        began: float,
    ) -> None:
        self.process, self.hear, self.unsaid, self.began = process, hear, memoryview(said), began
        self.phases, self._phase, self._since = dict[str, float](), PHASES[0], began
        self.result: dict[str, Any] | None = None
        self.errors, self.strays, self.notes = bytearray(), bytearray(), list[str]()
        self.line, self.too_long = bytearray(), False  # what has come of a line, and whether to forget the rest of it
        self.heard = time.monotonic()
        self.selector = selectors.PollSelector()  # unlike epoll's it has no file descriptor to close
        for pipe, direction, act in (
            (process.stdin, selectors.EVENT_WRITE, self._say),
            (process.stdout, selectors.EVENT_READ, self._hear_events),
            (process.stderr, selectors.EVENT_READ, self._hear_errors),
        ):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            self.selector.register(pipe, direction, act)

    def follow(self, limits: Limits) -> str | None:
        """Read events until the process ends (None), has been silent for too long ("hung") or is "timed out"."""
        deadline = self.began + limits.seconds
        while self.process.poll() is None:
            self._listen()
            now = time.monotonic()
            if self.result is not None:
                deadline = min(deadline, now + GRACE)
            elif now - self.heard >= limits.silence:
                return "hung"
            if now >= deadline:
                return "timed out"
        return None

    def begin_phase(self, name: str) -> None:
        """Count the seconds from here on as another phase."""
        now = time.monotonic()
        self.phases[self._phase] = self.phases.get(self._phase, 0.0) + now - self._since
        self._phase, self._since = name, now

    def drain(self) -> None:
        """Read what was written before the end; half a line at the end of it is a line."""
        until = time.monotonic() + DRAIN
        while self.selector.get_map() and time.monotonic() < until:
            self._listen()
        self._hear_line(bytes(self.line))

    def _listen(self) -> None:
        if not self.selector.get_map():  # all its pipes are closed: it is about to end, or goes on without them
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(TICK)
            return
        for key, _ in self.selector.select(TICK):
            if not key.data(key.fd):
                self.selector.unregister(key.fd)

    # Each of these does what can be done at once, and says whether its pipe is of any more use.

    def _say(self, pipe: int) -> bool:
        try:
            self.unsaid = self.unsaid[os.write(pipe, self.unsaid[:CHUNK]) :]
        except BlockingIOError:
            return True
        except OSError:  # it does not listen any more; how it ends will say why
            return False
        return len(self.unsaid) > 0  # the pipe stays open: its end tells the child that its parent is gone

    def _hear_errors(self, pipe: int) -> bool:
        chunk = os.read(pipe, CHUNK)
        self.errors += chunk
        del self.errors[:-LONGEST_LOG]
        self.heard = time.monotonic()  # a compiler that says what it tries is at work
        return len(chunk) > 0

    def _hear_events(self, pipe: int) -> bool:
        chunk = os.read(pipe, CHUNK)
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            line, skip = bytes(self.line) + end, self.too_long
            self.line.clear()
            self.too_long = False
            if not skip:
                self._hear_line(line)
        self.line += rest
        if len(self.line) > LONGEST_LINE or self.too_long:
            if not self.too_long:
                self.notes.append(f"a line of more than {LONGEST_LINE >> 20} MiB on its standard output was dropped")
            self.line.clear()
            self.too_long = True
        return len(chunk) > 0

    def _hear_line(self, line: bytes) -> None:
        event = _event(line)
        if event is None:
            self.strays += line[:200] + b"\n" if line.strip() else b""
            del self.strays[:-LONGEST_STRAYS]
        elif self.result is None:  # after the first result nothing counts
            if event["event"] == "result":
                self.result = event
                self.begin_phase(PHASES[-1])
            elif event["event"] == "phase":
                self.begin_phase(event["name"])
            else:
                self.hear(event)
            self.heard = time.monotonic()


def _event(line: bytes) -> dict[str, Any] | None:
    """The event that a line is, or None."""
    if not line.startswith(b"{"):
        return None
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    # A listener may count on the types of what it hears.
    sound = {
        "alive": lambda: isinstance(found.get("what", ""), str),
        "step": lambda: type(found.get("step")) is int and all(_number(found.get(of)) for of in ("seconds", "loss")),
        "phase": lambda: found.get("name") in PHASES,
        "proof": lambda: isinstance(found.get("value"), dict),
        "result": lambda: True,
    }
    kind = found.get("event")
    return found if isinstance(kind, str) and kind in sound and sound[kind]() else None


def _number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < 2**63)


def _told(child: _Child, ended_as: str | None, limits: Limits, kind: Any) -> Ended:
    """Describe how a child ended, in a word and a sentence."""
    code, notes = child.process.returncode or 0, child.notes
    strays, errors = _text(child.strays), _text(child.errors)
    value, last = None, _last_line(errors) or _last_line(strays)
    said = f": {last}" if last else "."
    raised = f": {last}" if RAISED.match(last) else "."
    if child.result is not None:
        outcome, error, value = _judged(child.result, kind)
        if ended_as is not None:
            notes.append("it had to be ended after its result")
        elif code:
            notes.append(f"after its result it {_exit(code)}")
    elif ended_as == "timed out":
        outcome, error = ended_as, f"It was not done after {round(limits.seconds, 1):g} s{raised}"
    elif ended_as == "hung":
        outcome, error = ended_as, f"It gave no sign of life for {round(limits.silence, 1):g} s{raised}"
    elif starved := [
        line for line in (strays + errors).splitlines() if any(word in line.lower() for word in NO_MEMORY)
    ]:
        outcome, error = "out of memory", starved[-1].strip()
    else:
        hints = {0: ", without a result", -signal.SIGKILL: " (the kernel does that when the host is out of memory)"}
        outcome, error = "crashed", f"Its process {_exit(code)}{hints.get(code, '')}{said}"
    log = strays + errors + "".join(f"[{note}]\n" for note in notes)
    return Ended(outcome, error and _text(error)[:LONGEST_ERROR].strip(), log, value)


def _exit(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):  # a real-time signal has no name
        return f"was killed by {signal.Signals(-code).name}, {signal.strsignal(-code)}"
    return f"was killed by signal {-code}"


def _judged(result: dict[str, Any], kind: Any) -> tuple[str, str | None, dict[str, Any] | None]:
    """Return outcome, error and value of a result event; a malformed event is an outcome of its own."""
    outcome, error, value = (result.get(name) for name in ("outcome", "error", "value"))
    measured = outcome in ("done", "stopped early")
    if not isinstance(outcome, str) or outcome not in OUTCOMES:
        wrong = f"the outcome {str(outcome)[:50]!r} is none"
    elif not (error is None or isinstance(error, str)):
        wrong = "its error is no text"
    elif not isinstance(value, dict) and (measured or value is not None):
        wrong = "its value is no object"
    elif kind == "measure" and value is not None and (fault := _fault(value)):
        if not measured:
            return outcome, error, None
        wrong = fault
    else:
        return outcome, error, value
    return "error", f"The result of its process makes no sense: {wrong}.", None


def _fault(value: dict[str, Any]) -> str | None:
    """Return what is wrong with a measurement, or None."""
    try:
        found = Measurement(**value)
        json.dumps(value, allow_nan=False)
        sizes = [*found.step_seconds, found.tokens_per_step]
        numbers = [*sizes, *found.losses, found.first_step_seconds, found.data_wait, found.bytes]
        numbers += [*found.memory.values(), *(share for share in (found.mfu, found.hfu) if share is not None)]
    except (TypeError, AttributeError):
        return "its value is no measurement"
    except (ValueError, RecursionError):
        return "it has a number that is not finite"
    plain = all(map(_number, numbers)) and isinstance(found.profile, dict | None)
    return None if plain and found.step_seconds and min(sizes) > 0 else "its value is no measurement"


def _text(raw: bytes | bytearray | str) -> str:
    """Text that any file, page or database takes: no control characters, no halves of characters."""
    text = raw if isinstance(raw, str) else raw.decode(errors="replace")
    return re.sub(r"[^\n\t -~\xa0-\ud7ff\ue000-\U0010ffff]", "\ufffd", text.replace("\r", "\n"))


def _last_line(text: str) -> str:
    """The line that says most about an end: the last exception, or whatever came last."""
    lines = [line.strip() for line in text.splitlines() if any(map(str.isalnum, line))]
    return next((line for line in reversed(lines) if RAISED.match(line)), lines[-1] if lines else "")
