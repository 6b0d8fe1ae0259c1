"""What a run does about a loss that is not a number, or that jumps.

The device decides, with the step, whether an update counts: `limit` is there before the loss is. The host learns of it
a step later, keeps the batch for inspection, and stops or goes on by the rule.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, pstdev

from safetensors.torch import save
from torch import Tensor

from tilewright.errors import UserError
from tilewright.measure.results import write_bytes
from tilewright.train.config import Guard as Rules

WINDOW = 50  # losses that say what is usual
_FEWEST = 20  # of them before anything can be unusual


class Watch:
    """The recent losses of a run, and what they allow the next one to be.

    >>> watch = Watch(Rules(spike=4.0), Path("."))
    >>> for step in range(30):
    ...     watch.take(step, 2.0 + 0.01 * (step % 2), False, [])
    >>> 2.01 < watch.limit < 2.1
    True
    """

    def __init__(self, rules: Rules, folder: Path) -> None:
        self.rules, self.folder = rules, folder
        self.recent: deque[float] = deque(maxlen=WINDOW)
        self.in_a_row = 0

    @property
    def limit(self) -> float:
        """The highest loss that is no spike."""
        if self.rules.spike <= 0 or len(self.recent) < _FEWEST:
            return math.inf
        return fmean(self.recent) + self.rules.spike * max(pstdev(self.recent), 1e-6)

    def take(self, step: int, loss: float, skipped: bool, batches: Sequence[Tensor]) -> str | None:
        """Note a step's loss; where the step was skipped, what was done about it, or an end to the run."""
        if not skipped:
            self.recent.append(loss)
            self.in_a_row = 0
            return None
        self.in_a_row += 1
        spike = math.isfinite(loss) and loss > self.limit
        path = self.folder / f"bad-step-{step:08d}.safetensors"
        write_bytes(path, save({f"micro_batch_{i}": batch.cpu() for i, batch in enumerate(batches)}))
        what = (
            f"step {step}: the loss jumped to {loss:.4g}, the recent ones allow {self.limit:.4g}"
            if spike
            else f"step {step}: the loss is {loss:.4g} and it or a gradient is not finite"
        )
        kept = f"the weights are as they were before it, its batch is in {path}"
        if (self.rules.on_spike if spike else self.rules.nan) == "stop":
            field = "guard.on_spike" if spike else "guard.nan"
            raise UserError(f"{what}; {kept}. Lower optimizer.learning_rate, or go on past it with {field}=skip.")
        if self.in_a_row >= self.rules.patience:
            raise UserError(f"{what}, as in {self.in_a_row} steps in a row; {kept}. Lower optimizer.learning_rate.")
        return f"{what}; skipped, {kept}."
