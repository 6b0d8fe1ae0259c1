"""Start the ranks of a run on this machine, and go on without one that dies or hangs.

torchrun's agent starts the processes and ends them all when one fails. Here that one is named, and a new set of ranks
is started without it, which goes on from the newest checkpoint: `global_batch` stays, accumulation makes up for it.
Each rank says that it is alive, by `alive`; one that was stopped says nothing, and is killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tilewright.errors import UserError
from tilewright.parallel.alive import FOLDER, repeated

_SILENT = 30.0  # seconds without one after which a rank counts as hung
_AT_ONCE = 5.0  # seconds from the first failure in which a rank that was killed counts as its cause
_SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT  # that torchrun's agent handles
_USER_ERROR, _STOPPED = 2, 130  # exit codes that another start would not change


@dataclass(frozen=True)
class Start:
    """One start of all ranks: how many, and what is added to the command line for it."""

    ranks: int
    overrides: tuple[str, ...] = ()


def run(
    arguments: Sequence[str],
    ranks: int,
    *,
    restarts: int,
    smaller: Callable[[int], Start | None],
    say: Callable[[str], None],
    silent: float = _SILENT,
) -> int:
    """Run `tilewright train` on so many ranks of this machine until it ends; its exit code.

    Args:
        arguments: of `tilewright train`.
        restarts: how many times ranks are started anew.
        smaller: the largest start of at most so many ranks, or None where there is none.
        silent: seconds without a sign of life after which a rank is killed.
    """
    start = Start(ranks)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    for attempt in range(restarts + 1):
        failed = _run_once(arguments, start, say, silent)
        if failed is None:
            return 0
        if failed.exitcode in (_USER_ERROR, _STOPPED):
            return failed.exitcode
        why = f"rank {failed.local_rank} {_cause(failed)}"
        following = smaller(start.ranks - 1) or smaller(start.ranks)
        if attempt == restarts or following is None:
            raise UserError(f"{why}, and there is no restart left; look at what it printed, and start again.")
        say(f"{why}: goes on from the newest checkpoint with {following.ranks} of {start.ranks} ranks.")
        _leave_out(failed.local_rank, following.ranks)
        start = following
    raise AssertionError("unreachable")


def _cause(failed: ProcessFailure) -> str:
    return f"ended by {failed.signal_name()}" if failed.exitcode < 0 else f"ended with exit code {failed.exitcode}"


def _run_once(
    arguments: Sequence[str], start: Start, say: Callable[[str], None], silent: float
) -> ProcessFailure | None:  # fmt: skip
    """What failed first, or nothing."""
    with tempfile.TemporaryDirectory(prefix="tilewright-ranks-") as folder:
        os.environ[FOLDER] = folder
        # One machine: nobody else needs to reach the ranks, and nobody else can.
        config = LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=start.ranks, run_id=f"tilewright-{os.getpid()}-{time.time_ns()}",
            rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0", local_addr="127.0.0.1", max_restarts=0,
            monitor_interval=0.2,
        )  # fmt: skip
        command = ["-m", "tilewright", "train", *arguments, *start.overrides]
        with _watched(Path(folder), say, silent), _restored_signals():
            try:
                elastic_launch(config, sys.executable)(*command)
            except ChildFailedError as error:
                return _first(list(error.failures.values()))
            except SignalException as stopped:  # the agent has passed it on to the ranks, and they have ended
                raise KeyboardInterrupt from stopped
    return None


def _first(failures: Sequence[ProcessFailure]) -> ProcessFailure:
    """The failure that the others come from.

    One that was killed takes others with it, whose messages fail: it is the cause, though they may be noticed before.
    Much later the agent kills those that do not end by themselves.
    """
    first = min(failures, key=lambda one: one.timestamp)
    killed = (one for one in failures if one.exitcode in (-signal.SIGKILL, -signal.SIGSEGV))
    return next((one for one in killed if one.timestamp - first.timestamp <= _AT_ONCE), first)


def _leave_out(local_rank: int, ranks: int) -> None:
    """Hide the GPU of a rank that failed from those to come, where there are enough others for them."""
    if not torch.cuda.is_available():
        return
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    seen = [str(number) for number in range(torch.cuda.device_count())] if given is None else given.split(",")
    if local_rank < len(seen) and ranks < len(seen):
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(seen[:local_rank] + seen[local_rank + 1 :])


@contextlib.contextmanager
def _restored_signals() -> Iterator[None]:
    """Take back the handlers of signals that the agent sets, and leaves where they are."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _watched(folder: Path, say: Callable[[str], None], silent: float) -> Iterator[None]:
    """Kill a rank that gives no sign of life: then the others fail at once, and do not wait for it."""

    def watch() -> None:
        for path in folder.glob("rank-*"):
            with contextlib.suppress(OSError, ValueError):
                quiet = time.time() - path.stat().st_mtime
                if quiet > silent:
                    number, process = path.name.split("-")[1:]
                    say(f"rank {number} has given no sign of life for {quiet:.0f} s; it is killed.")
                    path.unlink()
                    os.kill(int(process), signal.SIGKILL)

    with repeated(watch):
        yield
