"""A callback for Hugging Face's Trainer: one line, and the model it trains is optimized."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilewright.optimize.report import Report


def TilewrightCallback(rules: Sequence[str] | str | None = None, *, compile: str = "none") -> Any:
    """A `transformers.TrainerCallback` that optimizes the model when training begins, and undoes it at the end.

    Args:
        rules, compile: as in `tilewright.optimize`.

    Its `report` says what was changed. `Trainer(..., callbacks=[TilewrightCallback()])` is all there is to it.
    """
    import transformers

    from tilewright.optimize.api import optimize

    class Callback(transformers.TrainerCallback):
        """Optimizes the model for the time of its training."""

        report: Report | None = None

        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            self.report = optimize(model, rules=rules, compile=compile)

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if self.report is not None:
                self.report.undo()

    return Callback()
