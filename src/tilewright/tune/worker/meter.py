"""The speed of a run, metered step by step until it is known."""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.tune.outcome import NotFinite
from tilewright.tune.store.record import Measurement, spread

if TYPE_CHECKING:  # which loads torch
    from tilewright.train.metrics import Metrics

Job = dict[str, Any]
Say = Callable[[dict[str, Any]], None]
LOSSES = 20  # of the first steps, for a comparison of curves


class Enough(Exception):
    """Raised inside of a run to end it: its speed is known."""


def begin_phase(say: Say, name: str) -> None:
    """Tell the parent that the trial's seconds belong to another phase from now on."""
    say({"event": "phase", "name": name})


inherited_file_bytes = 0  # that the process this one was forked from had mapped of files, libraries above all


def host_bytes(name: str) -> int:
    """A number of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024


def peak_host_bytes() -> int:
    """The most memory this process has had at once.

    What is mapped of files does not count in a child until it is touched there; a run that imports for itself has it.
    """
    if Path("/proc/self/status").exists():  # on Linux the number below is inherited from the parent where it had more
        return host_bytes("VmHWM") + max(0, inherited_file_bytes - host_bytes("RssFile"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


def peak_of(metrics: Metrics) -> int:
    """The most bytes that a rank has had allocated in a step; on a CPU, that its process has had."""
    return metrics.memory_allocated or peak_host_bytes()


class Meter:
    """Meter the steps of a run, and end it by `Enough` as soon as its speed is known.

    Those that a profile takes, and the `warm` ones after them, do not count. What is known then is in `measurement`.
    """

    def __init__(self, job: Job, profiled: int, say: Say) -> None:
        self._job, self._say, self._profiled = job, say, profiled
        self._skipped = profiled + job["warm"]
        self._counted: list[Metrics] = []
        self._losses: list[float] = []
        self._first = self._began = 0.0
        self._profile: dict[str, Any] = {}
        self.steps = 0

    def step(self, metrics: Metrics, steps: int) -> None:
        """Take note of a step, and decide whether there must be more."""
        self.steps = metrics.step
        if metrics.loss is None or metrics.gradient_norm is None:
            what = "loss" if metrics.loss is None else "gradient's norm"
            raise NotFinite(f"the {what} of step {metrics.step} is not a finite number.")
        self._say({"event": "step", "step": metrics.step, "seconds": metrics.seconds, "loss": metrics.loss})
        if metrics.step == 1:
            self._first = metrics.seconds
            begin_phase(self._say, "profile" if self._profiled else "warm up")
        if metrics.step <= LOSSES:
            self._losses.append(metrics.loss)
        if metrics.step <= self._skipped:
            self._began = time.monotonic()
            if metrics.step == self._skipped:
                begin_phase(self._say, "measure")
            return
        self._counted.append(metrics)
        self._decide()

    def _decide(self) -> None:
        job, seconds = self._job, [metrics.seconds for metrics in self._counted]
        if len(seconds) >= job["fewest"]:
            if 0 < job["stop_above"] < statistics.median(seconds) * (1 - spread(seconds)):
                raise Enough("stopped early")
            if spread(seconds) <= job["spread"] and sum(seconds) >= job["least"]:
                raise Enough("done")
            if self._is_beaten(seconds):
                raise Enough("done")
        late = len(seconds) >= 3 and time.monotonic() - self._began >= job["seconds"]  # of two nobody knows the spread
        if (len(seconds) >= job["most"] and sum(seconds) >= job["least"]) or late:
            raise Enough("done")

    def _is_beaten(self, seconds: list[float]) -> bool:
        """Whether a run is slower than the best beyond doubt: how much slower decides nothing.

        A GPU grows slower as it warms up, so what is too slow in its first steps stays so. By four standard deviations
        of the median, and where that is known well enough to be shown.
        """
        wide = spread(seconds)
        return wide <= self._job["widest"] and 0 < self._job["best"] < statistics.median(seconds) * (1 - 2 * wide)

    def profile(self, found: dict[str, Any]) -> None:
        self._profile = found
        self._say({"event": "alive", "what": "profiled"})
        begin_phase(self._say, "warm up")

    def measurement(self) -> Measurement:
        """Return the measurement that the counted steps make."""
        last = self._counted[-1]
        allocated = [one.memory_allocated for one in self._counted if one.memory_allocated is not None]
        used = [(one.mfu, one.hfu) for one in self._counted if one.mfu is not None and one.hfu is not None]
        return Measurement(
            tokens_per_step=round(last.tokens_per_second * last.seconds),
            step_seconds=[one.seconds for one in self._counted],
            first_step_seconds=self._first,
            data_wait=statistics.median(one.data_wait for one in self._counted),
            losses=self._losses,
            bytes=max(allocated, default=0) or peak_host_bytes(),
            memory=self._profile.get("memory_measured", {}),
            profile=self._profile.get("time"),
            mfu=statistics.median(mfu for mfu, _ in used) if used else None,
            hfu=statistics.median(hfu for _, hfu in used) if used else None,
        )
