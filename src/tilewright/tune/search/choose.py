"""Which of the runs that were measured is the best: the fastest, less the levers that give it nothing.

Pure functions of the records, so that a later reader of a study comes to the same answer as its worker.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from tilewright.tune.search.space import Space
from tilewright.tune.store.proof import VERDICTS, Proof
from tilewright.tune.store.record import CONFIRMATION, Record, key

NOISE, MOST_NOISE = 0.005, 0.02  # speeds this near are the same; however wide their spreads, no more than this
ALIKE = 0.01  # two runs of one point that say the same
SHAKEN = 0.1  # between two runs of the reference the machine changed by this: what ran there has to run again
UNKNOWN = "A speed with a ? is not known: the machine became faster or slower around it."
_AGAIN = 3  # times that a run is repeated, at most


def latest(records: Iterable[Record]) -> dict[str, Record]:
    """Map each point's key to the run that counts."""
    runs: dict[str, list[Record]] = {}
    for record in records:
        runs.setdefault(key(record.point), []).append(record)
    return {name: _counting(each) for name, each in runs.items()}


def _counting(runs: Sequence[Record]) -> Record:
    """Choose the run of a point that counts.

    - A baseline: the first run that was measured.
    - A run that failed when it was run again: that failure. A run that was lost or out of time does not count.
    - Runs on a steady machine: the second of two, because the first may have been lucky, and the median of more.
    - No run again on a steady machine: the run with the least doubt, and of equals the last.
    """
    if runs[0].purpose == "reference":
        return next((run for run in runs if run.outcome == "done"), runs[0])
    again = [run for run in runs[1:] if run.purpose == CONFIRMATION and run.outcome not in ("lost", "timed out")]
    failed = next((run for run in again if run.measurement is None), None)
    if failed is not None:
        return failed
    steady = [run for run in again if is_known(run)]
    if len(steady) > 1:
        first = [run for run in runs[:1] if run.outcome == "done" and is_known(run)]
        ranked = sorted((*first, *steady), key=lambda run: run.tokens_per_second or 0.0)
        return ranked[(len(ranked) - 1) // 2]
    return steady[0] if steady else min((*reversed(again), runs[0]), key=lambda run: run.doubt)


def confirmed(records: Iterable[Record], record: Record) -> bool:
    """Whether the run was measured twice on a steady machine, equally fast."""
    others = [run for run in _steady(records, record) if run.began != record.began]
    again = any(run.purpose == CONFIRMATION for run in (record, *others))
    speed = record.tokens_per_second or 0.0
    return (
        again
        and record.doubt <= MOST_NOISE
        and any(abs((run.tokens_per_second or 0.0) - speed) <= ALIKE * speed for run in others)
    )


def _steady(records: Iterable[Record], record: Record) -> list[Record]:
    """The runs of a record's point that were measured to the end on a steady machine."""
    return [run for run in records if run.point == record.point and run.outcome == "done" and is_known(run)]


def is_known(record: Record) -> bool:
    """Whether a run's speed is known: the machine stayed as it was."""
    return record.doubt <= SHAKEN


def at_least(record: Record) -> float:
    """Tokens a second of a run, or where its speed is not known what it had at least; 0 where nothing was measured."""
    speed = record.tokens_per_second or 0.0
    return speed if is_known(record) else speed / (1 + record.doubt)


def fastest(records: Iterable[Record], cap: float = math.inf, wrong: Iterable[str] = ()) -> Record | None:
    """The quickest of the runs that were measured to the end, within a memory cap, but for those shown to be wrong.

    Beside a machine that was slow for a moment anything looks fast: what counts is how fast a run was at least.
    """
    return max(_sound(records, cap, wrong), key=at_least, default=None)


def best_of(space: Space, records: Sequence[Record], cap: float = math.inf, wrong: Iterable[str] = ()) -> Record | None:
    """Return the fastest run, with every lever put back that does not make it slower.

    Of runs that are as fast it is one that has been confirmed.
    """
    wrong = set(wrong)
    top = fastest(records, cap, wrong)
    if top is None:
        return None
    ran = {key(record.point): record for record in _sound(records, cap, wrong)}
    chosen = fastest(record for record in ran.values() if confirmed(records, record) and _as_fast(record, top)) or top
    while True:
        without = [{**chosen.point, name: space.baseline[name]} for name in space.changes(chosen.point)]
        if chosen.point.get("rules") == "all":  # or some of them
            without += [run.point for run in ran.values() if run.point == {**chosen.point, "rules": run.point["rules"]}]
        names = {key(point) for point in without} - {key(chosen.point)}
        simpler = fastest(ran[name] for name in names if name in ran and _as_fast(ran[name], top))
        if simpler is None:
            return chosen
        chosen = simpler


def doubted(
    records: Sequence[Record], best: Record, cap: float = math.inf, wrong: Iterable[str] = (), *, shaken: bool = False
) -> Record | None:
    """Return the run to repeat before the best is confirmed: the best itself, or one that may be as fast.

    Args:
        shaken: only what ran while the machine changed so much that nothing is known of it.
    """
    again = Counter(key(record.point) for record in records if record.purpose == CONFIRMATION)
    found = [
        record for name, record in latest(records).items()
        if again[name] < _AGAIN and record.purpose != "reference" and name not in wrong
        if (_is_spoilt(records, record) if shaken else not confirmed(records, record))
        if _may_win(records, record, best, cap)
    ]  # fmt: skip
    return max(found, key=lambda record: (record.point == best.point, _possible(records, record)), default=None)


def _is_spoilt(records: Iterable[Record], record: Record) -> bool:
    """Whether the machine changed too much around a run; before the baseline said so, a second knows no more."""
    later = (run for run in records if run.worker == record.worker and run.began > record.began)
    return not is_known(record) and any(run.purpose == "reference" and run.outcome == "done" for run in later)


def _may_win(records: Sequence[Record], record: Record, best: Record, cap: float) -> bool:
    if record.point == best.point:
        return True
    if not record.measurement or record.measurement.bytes > cap or record.outcome not in ("done", "stopped early"):
        return False
    unsure = record.doubt > MOST_NOISE or len(_steady(records, record)) > 1  # and it is not confirmed
    margin = -NOISE if unsure else NOISE
    return _possible(records, record) > (1 + margin) * (best.tokens_per_second or 0.0)


def _sound(records: Iterable[Record], cap: float, wrong: Iterable[str]) -> list[Record]:
    refused = set(wrong)
    return [
        record for name, record in latest(records).items()
        if record.outcome == "done" and record.measurement and record.measurement.bytes <= cap and name not in refused
    ]  # fmt: skip


def _possible(records: Sequence[Record], record: Record) -> float:
    """Tokens a second that a point may have: of two runs that differ, nobody knows which was the unlucky one."""
    runs = (record, *_steady(records, record))
    return max((run.tokens_per_second or 0.0) * (1 + run.doubt) for run in runs)


def _as_fast(record: Record, top: Record) -> bool:
    """Whether a run is as fast as the fastest, as far as the two could be told apart."""
    if record.measurement is None or top.measurement is None:
        return False
    noise = max(NOISE, record.measurement.spread, top.measurement.spread, record.doubt, top.doubt)
    noise = min(MOST_NOISE, noise)
    return at_least(record) >= (1 - noise) * at_least(top)


def proved(
    space: Space,
    records: Sequence[Record],
    proofs: Mapping[str, Proof],
    cap: float = math.inf,
    wrong: Collection[str] = (),
) -> tuple[Record | None, Proof | None]:
    """The best run and its proof; one that nobody has proved gives way to one that somebody has.

    Args:
        proofs: by the key of the run's point.
    """
    best = best_of(space, records, cap, wrong)
    if best is None or not proofs:
        return best, None
    if (found := proofs.get(key(best.point))) is not None:
        return best, found
    if best.point == space.baseline:  # which asks nobody to change anything
        return best, None
    sound = {name for name, proof in proofs.items() if proof.verdict in VERDICTS[:3]}
    if (run := fastest((r for r in records if key(r.point) in sound), cap, wrong)) is not None:
        return run, proofs[key(run.point)]
    why = "the runs that were faster were wrong, and this one was not looked at." if wrong else "nobody looked at it."
    return best, Proof("not proven", why)
