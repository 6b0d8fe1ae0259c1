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
from tilewright.train.schema import Guard as Rules

WINDOW = 50  # losses that say what is usual
_FEWEST = 20  # of them before anything can be unusual


class Watch:
    """The recent losses of a run, and the limit that they set for the next one.

    >>> watch = Watch(Rules(spike=4.0), Path("."))
    >>> for step in range(30):
    ...     watch.take(step, 2.0 + 0.01 * (step % 2), 1.0, False, [])
    >>> 2.01 < watch.limit(30) < 2.1
    True
    """

    def __init__(self, rules: Rules, folder: Path, rank: int = 0) -> None:
        self.rules, self.folder, self.rank = rules, folder, rank
        self.recent: deque[tuple[int, float]] = deque(maxlen=WINDOW + 1)  # (step, its loss), of steps that counted
        self.in_a_row = 0

    def limit(self, step: int) -> float:
        """The highest loss of a step that is no spike, by the losses up to two steps before it.

        That of one step before may be known already, after a checkpoint; it does not count, or a run that resumes
        would judge otherwise than one that was never interrupted.
        """
        losses = [loss for number, loss in self.recent if number < step - 1][-WINDOW:]
        if self.rules.spike <= 0 or len(losses) < _FEWEST:
            return math.inf
        return fmean(losses) + self.rules.spike * max(pstdev(losses), 1e-6)

    def take(self, step: int, loss: float, norm: float, skipped: bool, batches: Sequence[Tensor]) -> str | None:
        """Note a step's loss; where the step was skipped, what was done about it, or an end to the run."""
        if not skipped:
            self.recent.append((step, loss))
            self.in_a_row = 0
            return None
        self.in_a_row += 1
        name = f"bad-step-{step:08d}" + (f"-rank-{self.rank}" if self.rank else "")
        path = self.folder / f"{name}.safetensors"
        write_bytes(path, save({f"micro_batch_{i}": batch.cpu() for i, batch in enumerate(batches)}))
        if math.isfinite(loss) and math.isfinite(norm):
            field, rule = "guard.on_spike", self.rules.on_spike
            what = f"step {step}: the loss jumped to {loss:.4g}, the recent ones allow {self.limit(step):.4g}"
        else:
            field, rule = "guard.nan", self.rules.nan
            what = f"step {step}: the loss is {loss:.4g}, the gradient's norm {norm:.4g}"
        if rule == "stop":
            raise UserError(
                f"{what}; its batch is in {path}. It changed nothing: the run is saved, and the same command goes on "
                f"behind it, as {field}=skip would by itself; consider a lower optimizer.learning_rate."
            )
        if self.in_a_row >= self.rules.patience:
            raise UserError(
                f"{what}, and it is number {self.in_a_row} in a row that was skipped; its batch is in {path}. Lower "
                "optimizer.learning_rate."
            )
        return f"{what}; skipped, its batch is in {path}."
