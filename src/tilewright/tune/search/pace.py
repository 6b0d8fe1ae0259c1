"""How much time a study has, and how long its parts will take, by how long they have taken."""

from __future__ import annotations

import statistics
import time

from tilewright.train.schema import Train
from tilewright.tune.search.generating import Generating

OPTIMIZED = "optimized"  # the kind of a run whose block has kernels to compile; of others it is the compile mode
# Seconds that a trial takes by its kind, before one has run: on a CPU, and on a GPU.
_TUNED = (300.0, 300.0)
_USUAL = {"none": (10.0, 20.0), "max-autotune": _TUNED, "max-autotune-no-cudagraphs": _TUNED}
_COMPILED = (20.0, 60.0)
_COMPILED_TENSOR = 15.0, 0.15  # on a GPU, and more for each parameter tensor, where these are known: 37 s at 150
_KERNELS = (0.0, 12.0)  # more than without it: seconds that the optimized block's kernels take to compile
# Seconds of a proof on a CPU and on a GPU, where a billion parameters take more: on an H200 17 s at 125m, 30 at 760m,
# 43 at 1b. On a CPU, or where the size is not known, so many trials' if that is longer. Compiling comes on top.
_PROOF, _PROOF_PARAMETERS, _PROOF_TRIALS = (12.0, 6.0), 22.0, 2.0
_PROOF_SPARE = 2.0, 0.15  # of a proof that has not run yet: so many times what is usual, up to this share of the budget
_LAYOUT_TRIALS = 2.0  # that a layout takes to be compared with one process
_MARGIN = 1.2
_OVERRUN = 10.0, 0.08  # seconds, or a share of the budget where that is longer, by which a study may overrun


def kind_of(run: Train | Generating) -> str:
    """What the time of a trial depends on beside the speed of its steps: what has to be compiled."""
    if isinstance(run, Generating):
        return run.compile
    return OPTIMIZED if run.compile == "none" and run.model.gpt_block == "optimized" else run.compile


class Pace:
    """The clock of a study.

    >>> pace = Pace(480.0, "cuda")
    >>> pace.expected("none"), pace.note("none", 15.0), pace.expected("none"), pace.proof(first_step=10.0)
    (20.0, None, 15.0, 72.0)

    Args:
        budget: seconds.
        device: "cuda" or "cpu".
        parameters: of the model.
        tensors: that a user's own model has its parameters in; 0: not known.
        ranks: that share every run.
    """

    def __init__(self, budget: float, device: str, parameters: int = 0, tensors: int = 0, ranks: int = 1) -> None:
        self.budget, self._on_gpu, self._parameters, self._tensors = budget, device == "cuda", parameters, tensors
        self._ranks, self.began = ranks, time.monotonic()
        self._trials: dict[str, list[float]] = {}  # seconds, by kind
        self._proof = 0.0  # seconds, the longest

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.began

    @property
    def left(self) -> float:
        return self.budget - self.elapsed

    @property
    def most(self) -> float:
        """Seconds that anything may still take: what is left, and what a study may overrun its budget by."""
        return max(0.0, self.left + max(_OVERRUN[0], _OVERRUN[1] * self.budget))

    def note(self, kind: str, seconds: float) -> None:
        """Note how long a trial took."""
        self._trials.setdefault(kind, []).append(seconds)

    def note_proof(self, seconds: float) -> None:
        self._proof = max(self._proof, seconds)

    def expected(self, kind: str) -> float:
        """Seconds that a trial will take: what those of its kind took; before there are any, what is usual."""
        if self._trials.get(kind):
            return statistics.median(self._trials[kind])
        if kind == OPTIMIZED:
            return self.expected("none") + _KERNELS[self._on_gpu]
        usual = _USUAL.get(kind, _COMPILED)[self._on_gpu]
        if self._on_gpu and self._tensors and kind not in _USUAL:
            return min(usual, _COMPILED_TENSOR[0] + _COMPILED_TENSOR[1] * self._tensors)
        return usual

    def limit(self, kind: str) -> float:
        """Seconds after which a trial has hung, or is not worth its time: a third of all there is, for the dearest."""
        most = max(60.0, min(4 * self.expected(kind), self.budget / 3), self.budget / 6)
        return max(1.0, min(most, self.most))

    def proof(self, first_step: float = 0.0) -> float:
        """Seconds to leave for a proof, as long as that is not most of all there is."""
        usual = max(_PROOF[self._on_gpu], _PROOF_TRIALS * self.expected("none"))
        if self._on_gpu and self._parameters:
            usual = _PROOF[True] + _PROOF_PARAMETERS * self._parameters / 1e9
        usual += _MARGIN * first_step
        if self._ranks > 1:
            usual += _LAYOUT_TRIALS * self.expected("none")
        usual = max(usual, min(_PROOF_SPARE[0] * usual, _PROOF_SPARE[1] * self.budget))
        return min(0.4 * self.budget, _MARGIN * self._proof or usual)

    @property
    def another(self) -> float:
        """Return the least seconds that another trial and its proof take."""
        return self.expected("none") + _MARGIN * self._proof
