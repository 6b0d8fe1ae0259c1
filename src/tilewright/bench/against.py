"""What has become slower: our implementations of a benchmark measured again, beside a recorded result.

The peers are left out, and with them nearly all of the time. Compared is the share of the GPU's limit, each of its own
run: so a machine that copies or multiplies a little slower today makes nothing slower. Slower is what differs by more
than either run's own spread and by more than `NOISE`, which runs of one commit on two days differ by.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tilewright.bench import NAMES, protocol
from tilewright.bench.protocol import Ask, Case
from tilewright.errors import UserError

NOISE = 0.03


class Change(NamedTuple):
    """One implementation of one step of a case; `ratio` above 1 is slower."""

    label: str
    step: str
    implementation: str
    before: float  # seconds
    after: float
    ratio: float
    spread: float

    @property
    def is_slower(self) -> bool:
        return self.ratio > 1 + max(NOISE, self.spread)

    def __str__(self) -> str:
        times = f"{self.before * 1e6:.1f} to {self.after * 1e6:.1f} us"
        return f"{self.label}, {self.step}, {self.implementation}: {self.ratio:.3f}x, {times}"


def find_changes(before: Case, after: Case) -> list[Change]:
    """Return every figure that both results have, the slowest first.

    >>> def result(median, share):
    ...     ours = {"median": median, "low": median, "high": median, "seats": [median], "limit_share": share}
    ...     return {"cases": [{"dtype": "bf16", "forward": {"implementations": {"tilewright": ours}}}]}
    >>> [change] = find_changes(result(1e-3, 0.8), result(1.1e-3, 0.8))  # the GPU itself is slower
    >>> change.ratio, change.is_slower
    (1.0, False)
    >>> str(find_changes(result(1e-3, 0.8), result(1.25e-3, 0.64))[0])
    'dtype=bf16, forward, tilewright: 1.250x, 1000.0 to 1250.0 us'
    """
    then, now = dict(_figures(before)), dict(_figures(after))
    changes = []
    for key in then.keys() & now.keys():
        old, new = then[key], now[key]
        share, now_share = old.get("limit_share"), new.get("limit_share")
        ratio = share / now_share if share and now_share else new["median"] / old["median"]
        changes.append(Change(*key, old["median"], new["median"], round(ratio, 3), max(_spread(old), _spread(new))))
    return sorted(changes, key=lambda change: (-change.ratio, change))


def _figures(result: Case) -> Iterator[tuple[tuple[str, str, str], dict[str, Any]]]:
    for case in result["cases"]:
        label = " ".join(f"{name}={value}" for name, value in case.items() if not isinstance(value, (dict, list)))
        for step, measured in case.items():
            rows = measured.get("implementations", {}) if isinstance(measured, dict) else {}
            for name, row in rows.items():
                if name.startswith(protocol.OURS) and "median" in row:
                    yield (label, step, name), row


def _spread(row: dict[str, Any]) -> float:
    seats = row.get("seats") or [row["median"]]
    spread: float = max(row["high"] - row["low"], max(seats) - min(seats)) / row["median"]
    return spread


def run(name: str, path: Path, ask: Ask) -> list[Change]:
    """Measure ours of a benchmark, or of all that a folder has results of, and say what has changed."""
    changes = []
    for each, recorded in _recorded(name, path).items():
        module = importlib.import_module(f"tilewright.bench.{each}")
        with protocol.only_ours():
            found = find_changes(recorded, module.run(ask))
        if not found:
            ask.progress(f"{each}: no figure is of both results; record it anew, by --out")
            continue
        slower = [change for change in found if change.is_slower]
        middle = found[len(found) // 2].ratio
        ask.progress(f"{each}: {len(slower)} of {len(found)} figures slower, median {middle:.3f}x")
        for change in slower:
            ask.progress(f"  {change}")
        changes += found
    return changes


def _recorded(name: str, path: Path) -> dict[str, Case]:
    """The recorded result of each benchmark to run."""
    if name == "all" and not path.is_dir():
        raise UserError(
            f"`bench all` compares a folder of results, and {path} is none; give one, such as results/h200."
        )
    names = [each for each in NAMES if _takes_part(each)] if name == "all" else [name]
    if not all(map(_takes_part, names)):
        able = ", ".join(filter(_takes_part, NAMES))
        raise UserError(f"--against is of benchmarks of ops, which {name} is not; choose one of {able}, or all.")
    files = {each: path / f"{each}.json" if path.is_dir() else path for each in names}
    results = {each: _read(file, each) for each, file in files.items() if name != "all" or file.exists()}
    if not results:
        raise UserError(f"{path} has no result of a benchmark of an op; give a folder such as results/h200.")
    return results


def _takes_part(name: str) -> bool:
    return hasattr(importlib.import_module(f"tilewright.bench.{name}"), "run_cases")


def _read(file: Path, name: str) -> Case:
    try:
        result: Case = json.loads(file.read_text(encoding="utf-8"))
        if result["benchmark"] == name and isinstance(result["cases"], list):
            return result
    except (OSError, ValueError, KeyError, TypeError) as error:
        hint = f"give a file that --out of `bench {name}` wrote."
        raise UserError(f"Cannot compare with {file}: {error}; {hint}") from error
    raise UserError(f"{file} is a result of {result['benchmark']!r}, not of {name!r}; give that one's.")
