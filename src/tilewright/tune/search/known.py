"""What one worker of a study knows so far: trials, proofs, and which runs are wrong."""

from __future__ import annotations

import contextlib
import math
from typing import Any

from tilewright.tune.search.choose import at_least, best_of, latest, proved
from tilewright.tune.search.drift import corrected
from tilewright.tune.search.space import Space
from tilewright.tune.search.standard import float32_losses
from tilewright.tune.store.ledger import Ledger
from tilewright.tune.store.proof import Proof
from tilewright.tune.store.record import Record, RuleGains, key, with_all_rules
from tilewright.tune.store.storage import StorageLost

_NEARLY = 1.1  # times slower than the best: what its rules are worth is of interest still


class Known:
    """The knowledge of one worker, part of which other workers write.

    Args:
        space: that is searched.
        ledger: where the trials of all workers are.
        cap: bytes that a run may take.
        own_model: the name of a user's own model, or nothing.
        draws: whether that draws random numbers.
    """

    def __init__(
        self, space: Space, ledger: Ledger, cap: float = math.inf, own_model: str = "", draws: bool | None = None
    ) -> None:
        self.space, self.ledger, self.cap, self._own_model, self._draws = space, ledger, cap, own_model, draws
        self.records: list[Record] = []  # as they were last read
        self.proofs: dict[str, Proof] = {}  # by the key of the run's point
        self.work: dict[str, list[dict[str, Any]]] = {}  # likewise: of a step, as `measure.work` has it
        self.rules: dict[str, RuleGains] = {}  # likewise
        self.wrong: set[str] = set()  # keys of points
        self._noted: Any = None  # of the losses of the standard model in float32

    def read(self) -> list[Record]:
        """Read the records anew."""
        self.records = corrected(self.ledger.records())
        return self.records

    def read_wrong(self) -> None:
        """Add what other workers have found wrong."""
        self.wrong.update(self.ledger.noted("wrong") or ())

    def best(self) -> Record | None:
        """The best run of the records as they were last read."""
        return best_of(self.space, self.records, self.cap, self.wrong)

    def rules_of(self, run: Record | None) -> RuleGains | None:
        """What single rules give: measured in the run, or in the one with all rules that it was narrowed from."""
        return self.rules.get(key(with_all_rules(run).point)) if run is not None else None

    def with_all_rules(self) -> Record | None:
        """The best run, or that with all rules, where some of them may pay: it was measured, and is not much slower."""
        if (best := self.best()) is None:
            return None
        run = latest(self.records).get(key(with_all_rules(best).point))
        if run is None or run.outcome != "done" or not run.measurement:
            return None
        return run if _NEARLY * at_least(run) >= at_least(best) else None

    def proved(self) -> tuple[Record | None, Proof | None]:
        """The best run and its proof, or the best that has one."""
        return proved(self.space, self.records, self.proofs, self.cap, self.wrong)

    def has_baseline_only(self) -> bool:
        """Whether nothing but the baseline has run."""
        return all(record.point == self.space.baseline for record in self.records)

    def own_baselines(self) -> list[Record]:
        """The baseline's runs by this worker."""
        return [r for r in self.records if r.purpose == "reference" and r.worker == self.ledger.worker]

    def float32(self) -> dict[str, Any]:
        """The losses of the standard model in float32, or why there are none; empty: not known yet."""
        with contextlib.suppress(StorageLost):
            self._noted = self.ledger.noted("float32") or self._noted
        return float32_losses(self.space, self.records, self._own_model, self._noted, self._draws)
