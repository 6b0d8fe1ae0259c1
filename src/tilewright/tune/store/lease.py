"""A lease: who holds a trial, until when, and how others see that its process is gone before that.

Process numbers are used again, and mean nothing on another machine or in another container: so a lease also has the
place where its number holds, and when that process began.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Lease = dict[str, Any]


def write(worker: str, since: float, until: float) -> Lease:
    """A lease of this process."""
    pid = os.getpid()
    return {
        "worker": worker, "since": since, "until": until, "pid": pid, "started": _started(pid), "place": _place(),
    }  # fmt: skip


def sound(value: Any) -> bool:
    """Whether something is a lease."""
    return isinstance(value, dict) and all(isinstance(value.get(name), float) for name in ("since", "until"))


def holds(lease: Mapping[str, Any], now: float) -> bool:
    """Whether a lease has not run out, and its process is not seen to be gone.

    >>> holds(write("me", 0.0, 60.0), now=59.0), holds(write("me", 0.0, 60.0), now=61.0)
    (True, False)
    """
    return lease["until"] > now and not _gone(lease)


def _gone(lease: Mapping[str, Any]) -> bool:
    """Whether the process that holds a lease has ended; of another machine's processes this one knows nothing."""
    place, pid = lease.get("place"), lease.get("pid")
    if place is None or place != _place() or not isinstance(pid, int) or not 0 < pid < 2**31:
        return False
    try:
        os.kill(pid, 0)  # sends nothing: asks whether it is there
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return _started(pid) != lease.get("started")


def _place() -> str | None:
    """This boot of this machine, seen from this container; None where the system does not tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _started(pid: int) -> str | None:
    """When a process began, in the kernel's ticks; None where it has ended, or is not seen."""
    try:
        state, *numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else numbers[18]
