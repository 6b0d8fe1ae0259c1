"""Bars: what a case is to reach beside named peers, all of them measured in the same run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

CLOSE = 1.01  # of two errors: closer ones are the same rounding of other sums


@dataclass(frozen=True)
class Bar:
    """The fastest of ours takes at most the fastest peer's time over `ratio`, and no more than `seconds`.

    `is_about_errors`: instead, ours is no further from float64 than the closest peer.
    """

    ours: tuple[str, ...]
    peers: tuple[str, ...] = ()
    ratio: float = 0.0
    seconds: float = math.inf
    is_about_errors: bool = False

    def judge(self, rows: dict[str, Any]) -> dict[str, Any]:
        """Return what was found in the rows of a step's implementations: passed, or None where one was not measured.

        >>> rows = {"tilewright": {"median": 10e-6}, "cublas": {"median": 13e-6}}
        >>> Bar(("tilewright",), ("cublas",), 1.2).judge(rows)["sentence"]
        'pass: tilewright 1.30x of 1.20x cublas'
        >>> Bar(("tilewright",), ("cublas", "compile-max"), 1.2).judge(rows)["sentence"]
        'open: compile-max was not measured'
        """
        key = "distance" if self.is_about_errors else "median"
        missing = [name for name in self.peers if key not in rows.get(name, {})]
        measured = [name for name in self.ours if key in rows.get(name, {})]
        if not measured:
            missing = [*self.ours, *missing]
        if missing:
            return {"passed": None, "sentence": f"open: {', '.join(missing)} was not measured"}
        ours, peer = (
            min((rows[name][key], name) for name in names) if names else (0.0, "") for names in (measured, self.peers)
        )
        passed, said = True, ours[1]
        if self.is_about_errors:
            passed, said = ours[0] <= CLOSE * peer[0], f"{said} is {ours[0]:.3g} from float64, {peer[1]} {peer[0]:.3g}"
        elif peer[1]:
            passed, said = (
                peer[0] >= self.ratio * ours[0],
                f"{said} {peer[0] / ours[0]:.2f}x of {self.ratio:.2f}x {peer[1]}",
            )
        if self.seconds < math.inf:
            passed = passed and ours[0] <= self.seconds
            said += f", {1e6 * ours[0]:.1f} of {1e6 * self.seconds:.1f} us"
        return {"passed": bool(passed), "sentence": f"{'pass' if passed else 'miss'}: {said}"}


def summary(cases: list[dict[str, Any]]) -> str:
    """Say how many bars of all cases are passed, missed and open; nothing where there are none.

    >>> summary([{"bars": [{"passed": True}, {"passed": None}]}, {}])
    '1 of 2 bars passed, 0 missed, 1 open'
    """
    found = [bar["passed"] for case in cases for bar in case.get("bars", ())]
    if not found:
        return ""
    return f"{found.count(True)} of {len(found)} bars passed, {found.count(False)} missed, {found.count(None)} open"
