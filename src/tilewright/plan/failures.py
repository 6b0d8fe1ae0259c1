"""What failures cost a run on many GPUs: the share of its time that is kept, and how often to write a checkpoint.

Failures come by chance at a constant rate: with n GPUs, n times as often as with one. Each throws away what was
computed since the last checkpoint that is whole, and then costs a restart. `simulate` draws failures and adds up.
Young's and Daly's formulas, and the exact mean of the same process where checkpoints stop the run, check it.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from tilewright.errors import UserError

# Llama 3 405B (arXiv 2407.21783): 419 unexpected interruptions in 54 days of 16,384 GPUs.
HOURS_A_FAILURE = 54 * 24 * 16384 / 419  # of a GPU
RESTART_SECONDS = 600.0  # until the run computes again, without reading the checkpoint: assumed
_DRAWN = 3000  # failures of a simulation


@dataclass(frozen=True)
class Failures:
    """How a run of some size fails and saves: seconds between failures, to restart, and of a checkpoint.

    `stall` is how long a checkpoint stops the run, `write` until it is whole; they are alike unless it is written in
    the background.
    """

    between: float
    restart: float
    stall: float
    write: float

    def __post_init__(self) -> None:
        for name, value in (("between", self.between), ("restart", self.restart), ("stall", self.stall)):
            if not 0 <= value < math.inf or (name == "between" and value == 0):
                raise UserError(f"Seconds of {name} are {value}; give a number of at least 0, and between above it.")
        if self.write < self.stall:
            raise UserError("A checkpoint cannot be whole before the run goes on.")

    def expected_goodput(self, interval: float) -> float:
        """The exact mean where a checkpoint stops the run: computing of an interval over the time it takes.

        >>> round(Failures(10000.0, 600.0, 10.0, 10.0).expected_goodput(450.0), 3)
        0.9
        """
        rate = 1 / self.between
        segment, restart = rate * (interval + self.stall), rate * self.restart
        if segment + restart > 700:  # beyond what a number holds: no interval is ever finished
            return 0.0
        return interval * rate / (math.exp(restart) * math.expm1(segment))

    def young(self) -> float:
        """The best interval, to first order: sqrt(2 · stall · between).

        >>> Failures(10000.0, 600.0, 2.0, 2.0).young()
        200.0
        """
        return math.sqrt(2 * self.stall * self.between)

    def daly(self) -> float:
        """The same to a higher order."""
        if self.stall >= 2 * self.between:
            return self.between
        ratio = self.stall / (2 * self.between)
        return self.young() * (1 + math.sqrt(ratio) / 3 + ratio / 9) - self.stall

    def simulate(self, interval: float, seed: int = 0, failures: int = _DRAWN) -> float:
        """The goodput of a run with so many failures, each drawn, and its checkpoints `interval` seconds of work apart.

        A checkpoint in the background is whole `write` seconds after it began; the next begins not before that.
        """
        draw, period = random.Random(seed), interval + self.stall
        late = self.write - self.stall  # in the background
        kept = passed = 0.0
        for _ in range(failures):
            left = draw.expovariate(1 / self.between)
            passed += left
            whole = math.floor(max(0.0, left - late) / period)  # checkpoints that are whole when it fails
            kept += whole * interval
            again = self.restart  # a failure while it restarts begins the restart again
            while (failed := draw.expovariate(1 / self.between)) < again:
                passed += failed
            passed += again
        return kept / passed

    def best_interval(self) -> float:
        """The interval between checkpoints, in seconds of work, with the most goodput.

        Simulated with the same failures for each; none is shorter than it takes until the last checkpoint is whole.
        """
        least = max(self.write - self.stall, 1.0)
        middle = max(self.daly(), least)
        tried = {max(least, middle * 1.15**step) for step in range(-10, 11)}
        return max(sorted(tried), key=self.simulate)


def of_cluster(
    gpus: int, checkpoint_bytes: float, *, hours_a_failure: float = HOURS_A_FAILURE,
    restart: float = RESTART_SECONDS, storage: float, copy: float | None = None,
) -> Failures:  # fmt: skip
    """Failures and checkpoints of a run on so many GPUs.

    Args:
        gpus: how many there are, each of which can stop the run.
        checkpoint_bytes: of the whole model with its optimizer.
        hours_a_failure: of a GPU, with its share of node and network.
        restart: seconds until the run computes again, without reading the checkpoint.
        storage: bytes a second, of all GPUs together, that checkpoints are written and read with.
        copy: bytes a second to its host a GPU, for checkpoints written in the background; None: they stop the run.
    """
    if not (hours_a_failure > 0 and storage > 0 and gpus >= 1):
        raise UserError("Give hours between failures and a storage rate above 0.")
    write = checkpoint_bytes / storage
    stall = write if copy is None else min(write, checkpoint_bytes / gpus / copy)
    return Failures(hours_a_failure * 3600 / gpus, restart + write, stall, write)
