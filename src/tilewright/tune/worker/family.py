"""All processes that a trial has started, found and killed."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from tilewright.tune.worker.forkserver import Forked

PATIENCE = 3.0  # seconds for a killed process to be gone: a driver may hold on to it
PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Become, on Linux, the parent of what a dying trial leaves: what is killed is then reaped in any container."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class Process(NamedTuple):
    """A process as /proc has it."""

    pid: int
    alive: bool  # or dead, and waiting for its parent to ask how it ended
    parent: int
    session: int
    began: int  # ticks since the machine started


def end_family(process: Forked | subprocess.Popen[bytes], since: int, token: bytes) -> list[int]:
    """Kill a process and everything it has started; return what survives."""
    until, quiet, sessions, alive = time.monotonic() + PATIENCE, 0, {process.pid}, list[int]()
    server = process.server.process.pid if isinstance(process, Forked) else 0
    # Twice nothing: in the middle of an exec a process has no environment to know it by.
    while quiet < 2 and time.monotonic() < until:
        family = _members(sessions, since, token, server)
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        for one in family:
            with contextlib.suppress(OSError):
                os.kill(one.pid, signal.SIGKILL)
                if one.pid != process.pid:
                    os.waitpid(one.pid, os.WNOHANG)
        sessions.update(one.session for one in family)  # the dead have a session still, and no environment
        alive = [one.pid for one in family if one.alive]
        there = family if server else alive  # the dead too, which a server asks for how they ended
        quiet = 0 if there or process.poll() is None else quiet + 1
        time.sleep(0.005)
    return alive


def _members(sessions: set[int], since: int, token: bytes, server: int) -> list[Process]:
    """The processes of a trial, the dead among them; none where there is no /proc.

    Args:
        server: whose children are all of this trial; 0 for none.
    """
    with contextlib.suppress(FileNotFoundError):
        table = [one for name in os.listdir("/proc") if name.isdigit() and (one := process_of(int(name)))]
        table = [one for one in table if one.began >= since]
        family = {
            one.pid: one for one in table
            if one.session in sessions or (server and one.parent == server) or _has(one.pid, token)
        }  # fmt: skip
        while more := {one.pid: one for one in table if one.parent in family and one.pid not in family}:
            family.update(more)
        return list(family.values())
    return []


def process_of(pid: int) -> Process | None:
    """The process of a number, or None where it is gone."""
    try:
        # After the name, which is in brackets and may hold anything: state, parent, group, session ... (man proc)
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:  # gone
        return None
    return Process(pid, fields[0] not in b"ZX", int(fields[1]), int(fields[3]), int(fields[19]))


def _has(pid: int, token: bytes) -> bool:
    try:
        return token in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # gone, or somebody else's
        return False
