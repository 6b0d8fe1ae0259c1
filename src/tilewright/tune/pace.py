"""How much time a study has, and how long its parts will take, by how long they have taken."""

from __future__ import annotations

import statistics
import time

# Seconds that a trial takes by its compile mode, before one has run: on a CPU, and on a GPU.
_TUNED = (300.0, 300.0)
_USUAL = {"none": (10.0, 20.0), "max-autotune": _TUNED, "max-autotune-no-cudagraphs": _TUNED}
_COMPILED = (20.0, 60.0)
_PROOF, _PROOF_TRIALS = 20.0, 2.0  # seconds, or so many trials' where that is longer; but for compiling
_MARGIN = 1.2


class Pace:
    """The clock of a study.

    >>> pace = Pace(480.0, "cuda")
    >>> pace.expected("none"), pace.note("none", 15.0), pace.expected("none"), pace.proof(first_step=10.0)
    (20.0, None, 15.0, 42.0)
    """

    def __init__(self, budget: float, device: str) -> None:
        self.budget, self._on_gpu = budget, device == "cuda"
        self.began = time.monotonic()
        self._trials: dict[str, list[float]] = {}  # seconds, by compile mode
        self._proof = 0.0  # seconds, the longest

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.began

    @property
    def left(self) -> float:
        return self.budget - self.elapsed

    def note(self, mode: str, seconds: float) -> None:
        """What a trial took."""
        self._trials.setdefault(mode, []).append(seconds)

    def note_proof(self, seconds: float) -> None:
        self._proof = max(self._proof, seconds)

    def expected(self, mode: str) -> float:
        """Seconds that a trial will take: what those of its compile mode took; before there are any, what is usual."""
        if self._trials.get(mode):
            return statistics.median(self._trials[mode])
        return _USUAL.get(mode, _COMPILED)[self._on_gpu]

    def limit(self, mode: str, beyond: float = 0.0) -> float:
        """Seconds after which a trial has hung, or is not worth its time: a third of all there is, for the dearest.

        Args:
            mode: how it is compiled.
            beyond: seconds by which it may overrun the budget.
        """
        most = max(60.0, min(4 * self.expected(mode), self.budget / 3), self.budget / 6)
        return max(30.0, min(most, self.left + beyond))

    def proof(self, first_step: float = 0.0) -> float:
        """Seconds to leave for a proof, as long as that is not most of all there is."""
        usual = max(_PROOF, _PROOF_TRIALS * self.expected("none")) + _MARGIN * first_step
        return min(0.4 * self.budget, _MARGIN * self._proof or usual)

    @property
    def another(self) -> float:
        """Seconds that one more of both takes, at least: a trial, and what has been seen of a proof."""
        return self.expected("none") + _MARGIN * self._proof
