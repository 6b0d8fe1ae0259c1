"""A process that has imported torch and forks a child for each trial: no trial waits seconds for imports.

CUDA does not work in the child of a process that has initialised it. So the server imports, and touches no GPU; it
looks whether an import has, and then refuses to serve. A child has its own session and pipes, sees the environment and
folder that a new process would see, and runs `tune.worker.trial`; from there on nothing tells it from a new process.

    tuner to server    {"token": "...", "cwd": "..."} and three file descriptors: standard input, output and error
    server to tuner    {"ready": true} or {"refused": "why"}, then {"pid": 12} and {"ended": 12, "code": 0}

The server adopts what a trial leaves behind, so all that a trial started are the server's descendants. It runs one
trial at a time. When its tuner is gone it kills them all and ends.

Not multiprocessing's fork server: that one imports the user's main script into every child and keeps the environment
of the time when it was started. Linux alone has what this needs; elsewhere every trial is a new process.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

# What a trial imports that needs no GPU. Not the compiler's back end, which starts processes of its own.
IMPORTED = (
    "torch._dynamo", "tilewright.train.loop", "tilewright.tune.own_model", "tilewright.tune.worker.probe",
    "tilewright.tune.proof.prove", "tilewright.measure.work", "tilewright.tune.worker.trial",
)  # fmt: skip
TOKEN = "TILEWRIGHT_TRIAL"  # the environment variable that tells a trial's processes from all others
_LONGEST = 1 << 16  # bytes of a message
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class Unavailable(Exception):
    """Raised where there is no server to fork from; says why."""


class ForkServer:
    """The tuner's side: starts the process at once, and waits for it when a child is first wanted."""

    def __init__(self, command: Sequence[str] = (sys.executable, "-m", "tilewright.tune.worker.forkserver")) -> None:
        self.environment, self._ready = dict(os.environ), False
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  # of the server's own errors; closed with it
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.codes: dict[int, int] = {}  # exit codes of its children
        with theirs:
            self.process = subprocess.Popen(
                (*command, str(theirs.fileno()), str(os.getpid())),
                stdin=subprocess.DEVNULL, stdout=self._said, stderr=self._said,
                env={**os.environ, "PYTHONUNBUFFERED": "1"}, pass_fds=(theirs.fileno(),), start_new_session=True,
            )  # fmt: skip

    def fork(self, token: str, seconds: float) -> Forked:
        """Start a trial; raises Unavailable, or TimeoutError where the server is not ready in time."""
        until = time.monotonic() + seconds
        while not self._ready:
            message = self._next(until)
            if "refused" in message:
                raise Unavailable(message["refused"])
            self._ready = "ready" in message
        (stdin, job), (output, stdout), (errors, stderr) = (os.pipe() for _ in range(3))
        pipes = [os.fdopen(job, "wb", 0), os.fdopen(output, "rb", 0), os.fdopen(errors, "rb", 0)]
        try:
            request = json.dumps({"token": token, "cwd": os.getcwd()}).encode()
            socket.send_fds(self._control, [request], [stdin, stdout, stderr])
            while "pid" not in (message := self._next(until)):
                pass
        except BaseException as error:
            for pipe in pipes:
                pipe.close()
            if isinstance(error, OSError) and not isinstance(error, TimeoutError):
                raise Unavailable(str(error)) from error
            raise
        finally:
            for end in (stdin, stdout, stderr):
                os.close(end)
        return Forked(self, message["pid"], pipes)

    def _next(self, until: float) -> dict[str, Any]:
        message = self.hear(until - time.monotonic())
        if message is None:
            raise TimeoutError("the process that trials are forked from was not ready in time")
        return message

    def hear(self, seconds: float) -> dict[str, Any] | None:
        """The next message, or None where there is none in so many seconds; raises Unavailable when it is gone."""
        try:
            if not select.select([self._control], [], [], max(0.0, seconds))[0]:
                return None
            if message := self._control.recv(_LONGEST):
                found: dict[str, Any] = json.loads(message)
                if "ended" in found:
                    self.codes[found["ended"]] = found["code"]
                if "pid" in found:  # another process had this number before
                    self.codes.pop(found["pid"], None)
                return found
        except (OSError, ValueError) as error:  # of a socket that was closed
            raise Unavailable(str(error)) from error
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        raise Unavailable(lines[-1] if lines else "its process has ended")

    def close(self) -> None:
        """End the server and whatever it has forked."""
        self._control.close()  # it kills what is left of a trial, and ends
        try:
            self.process.wait(1.0)
        except subprocess.TimeoutExpired:  # it imports still
            self.process.kill()
            self.process.wait()
        self._said.close()


class Forked:
    """A child of the server, as `subprocess.Popen` shows one of our own."""

    returncode: int | None

    def __init__(self, server: ForkServer, pid: int, pipes: Sequence[IO[bytes]]) -> None:
        self.server, self.pid, self.returncode = server, pid, None
        self.stdin, self.stdout, self.stderr = pipes

    def poll(self) -> int | None:
        """Its exit code, or None while it runs."""
        return self._wait(0.0)

    def wait(self, timeout: float) -> int:
        """Its exit code; raises subprocess.TimeoutExpired."""
        if self._wait(timeout) is None:
            raise subprocess.TimeoutExpired("trial", timeout)
        assert self.returncode is not None
        return self.returncode

    def _wait(self, seconds: float) -> int | None:
        until = time.monotonic() + seconds
        try:
            while self.returncode is None and self.server.hear(until - time.monotonic()) is not None:
                self.returncode = self.server.codes.pop(self.pid, None)
        except Unavailable:  # it ends with its parent
            self.returncode = -signal.SIGKILL
        return self.returncode


_lock = threading.Lock()  # of the server: held while a trial runs
_starting = threading.Lock()
_server: ForkServer | None = None


def start() -> None:
    """Start a server that imports in the background."""
    global _server
    with _starting:
        if sys.platform == "linux" and _server is None:
            _server = ForkServer()


@contextlib.contextmanager
def reserved() -> Iterator[ForkServer | None]:
    """The server for one trial; None where there cannot be one, or another thread has it."""
    global _server
    if sys.platform != "linux" or not _lock.acquire(blocking=False):
        yield None
        return
    try:
        # What a library reads when it is imported has to be as the trial wants it.
        if _server is not None and (_server.process.poll() is not None or _server.environment != dict(os.environ)):
            _close()
        start()
        yield _server
    finally:
        _lock.release()


def stop() -> None:
    """End the server, unless a trial of another thread runs: that thread's study ends it."""
    if _lock.acquire(blocking=False):
        try:
            _close()
        finally:
            _lock.release()


@atexit.register
def _close() -> None:
    global _server
    if _server is not None:
        _server.close()
        _server = None


# The server's side


def serve(control: socket.socket, tuner: int) -> bool:
    """Fork for every request: True in a child, that is a trial then; False where there is nothing to serve."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != tuner:  # it died before that
        return False
    for name in IMPORTED:
        importlib.import_module(name)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if touched := _gpu_files():
        _send(control, {"refused": f"an import has opened {touched[0]}, and a CUDA context cannot be forked"})
        return False
    _remember_mapped_files()
    gc.collect()
    gc.freeze()  # else the first collection in a child copies every page
    signal.signal(signal.SIGCHLD, lambda *_: _reap(control))
    signal.signal(signal.SIGTERM, lambda *_: _kill_all())
    _send(control, {"ready": True})
    while True:
        request, pipes, _, _ = socket.recv_fds(control, _LONGEST, 3)
        if not request:
            _kill_all()
        signals = {signal.SIGCHLD, signal.SIGTERM}
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # a child may end before its number is told
        pid = os.fork()
        if pid == 0:
            for each in signals:
                signal.signal(each, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
            _become_trial(json.loads(request), pipes)
            return True
        for pipe in pipes:
            os.close(pipe)
        _send(control, {"pid": pid})
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)


def _become_trial(request: dict[str, str], pipes: Sequence[int]) -> None:
    os.setsid()
    for number, pipe in enumerate(pipes):
        os.dup2(pipe, number)
        os.close(pipe)
    os.environ[TOKEN] = request["token"]
    os.chdir(request["cwd"])


def _remember_mapped_files() -> None:
    from tilewright.tune.worker import meter

    meter.inherited_file_bytes = meter.host_bytes("RssFile")


def _send(control: socket.socket, message: dict[str, Any]) -> None:
    try:
        control.send(json.dumps(message).encode())
    except OSError:
        _kill_all()


def _reap(control: socket.socket) -> None:
    """Say how children ended; what was adopted is among them."""
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            _send(control, {"ended": found[0], "code": os.waitstatus_to_exitcode(found[1])})


def _kill_all() -> None:
    """End, and with it all that was ever forked here: their orphans come to this process, until none are left."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with contextlib.suppress(ChildProcessError, FileNotFoundError):  # a kernel may not list them; each sees us go
        while True:
            for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            os.waitpid(-1, 0)
    os._exit(0)


def _gpu_files() -> list[str]:
    """The devices of GPUs that this process has open: who has initialised CUDA has."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return [path for path in found if path.startswith(("/dev/nvidia", "/dev/kfd"))]


def main() -> None:
    """Serve, and in a child do a trial."""
    control = socket.socket(fileno=int(sys.argv[1]))
    if serve(control, int(sys.argv[2])):
        control.close()
        from tilewright.tune.worker import trial

        trial.main()


if __name__ == "__main__":
    main()
