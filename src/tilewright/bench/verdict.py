"""Who is behind whom in cases that were drawn, and the lines that say so."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

from tilewright.bench.protocol import OURS, Case
from tilewright.measure.ceilings import Ceilings

if TYPE_CHECKING:
    from tilewright.bench.drawing import Op

PEERS = ("eager", "compile")
NEIGHBOUR = "neighbour"  # ours, at the round shape
CLOCKS = {"device": "long", "wall": "long_wall"}  # and the mark of a case that was measured for longer by it
# Where the host takes so many times as long as the device, for ours and for every peer, nobody waits for the device.
_HOST_BOUND = 1.25
THROUGHPUT = 0.85  # of the neighbour's, at least
# Below these seconds launches are all that counts: a smaller shape is no quicker, and its throughput lower by that.
_LATENCY = 50e-6
_SHOWN = 5

Measured = dict[str, Any]


def describe_case(case: Case) -> str:
    """One line that names a case.

    >>> describe_case({"op": "rope", "dtype": "bf16", "heads": 8, "interleaved": True, "rows": 7})
    'rope bf16 heads=8 interleaved=True rows=7'
    """
    return " ".join(str(value) if name in ("op", "dtype") else f"{name}={value}" for name, value in case.items())


def add_shares(case: Case, figures: Measured, op: Op, ceilings: Ceilings, l2_bytes: int) -> None:
    """Add ours' share of the GPU's limit and its throughput over the neighbour's; a time below the limit is an error.

    Of the bytes that a call has to move, the L2 can hold its size of what is read again and as much of what is written.
    """
    device = figures.get("device", {})
    rates = ceilings.copy_bytes_per_second, ceilings.bf16_flops
    beside = op.neighbour(case)
    for name in list(device):
        cost = op.cost(beside if name == NEIGHBOUR and beside is not None else case)
        limit = max((cost.bytes - 2 * l2_bytes) / rates[0], cost.flops / rates[1], 0.0)
        share = limit / device[name]["median"]
        if share > 1.05:
            del device[name]
            wrong = f"{share:.0%} of the GPU's limit cannot be: the measurement is wrong"
            figures.setdefault("errors", {})[name] = wrong
        elif name == OURS:
            figures["limit_share"] = round(share, 3)
    if beside is not None and OURS in device and NEIGHBOUR in device:
        floors = [op.cost(each).floor_seconds(*rates) for each in (case, beside)]
        ours, theirs = device[OURS]["median"], device[NEIGHBOUR]["median"]
        figures["throughput"] = round(floors[0] / ours * theirs / floors[1], 3)
        if ours < _LATENCY and ours <= 1.02 * theirs:
            figures["latency_bound"] = True


def is_host_bound(measured: Measured) -> bool:
    """Whether all implementations wait for the host: the case is judged by wall time alone."""
    device, wall = measured.get("device", {}), measured.get("wall", {})
    return bool(wall) and all(
        name in device and wall[name]["median"] > _HOST_BOUND * device[name]["median"] for name in wall
    )


def ratio(measured: Measured, clock: str) -> float | None:
    """Ours over the best peer by a clock: above 1, ours is slower. None where either is missing, or nobody waits for
    it."""
    if clock == "device" and is_host_bound(measured):
        return None
    times = {name: each["median"] for name, each in measured.get(clock, {}).items()}
    peers = [times[name] for name in PEERS if name in times]
    return times[OURS] / min(peers) if peers and OURS in times else None


def noise(cases: list[Measured], clock: str) -> float:
    """Return the spread that 95 % of the long measurements of the same code stay within."""
    spreads = sorted(
        each["spread"] for case in cases if case.get(CLOCKS[clock]) for each in case.get(clock, {}).values()
    )
    return spreads[math.ceil(0.95 * len(spreads)) - 1] if spreads else 0.0


def is_behind(measured: Measured, clock: str, op_noise: float) -> bool:
    """Whether ours is slower than the best peer by more than the same code differs from itself."""
    slower = ratio(measured, clock)
    if slower is None:
        return False
    own = max(each["spread"] for name, each in measured[clock].items() if name != NEIGHBOUR)
    return slower > 1 + max(op_noise, own)


def find_behind(cases: list[Measured], clock: str) -> list[Measured]:
    """The cases in which ours is behind by a clock, each by the noise of its op."""
    names = dict.fromkeys(each["case"]["op"] for each in cases)
    of_op = {name: noise([each for each in cases if each["case"]["op"] == name], clock) for name in names}
    return [each for each in cases if is_behind(each, clock, of_op[each["case"]["op"]])]


def summarise(cases: list[Measured]) -> dict[str, Any]:
    """What the cases of each op say: who is behind by each clock, the worst of each, errors, throughput, recompiles."""
    names = dict.fromkeys(each["case"]["op"] for each in cases)
    return {name: _summarise_op([each for each in cases if each["case"]["op"] == name]) for name in names}


def _summarise_op(cases: list[Measured]) -> dict[str, Any]:
    commits = Counter(each["commit"] for each in cases if each.get("commit"))
    named = [f"{commit} ({count})" if len(commits) > 1 else commit for commit, count in commits.items()]
    summary: dict[str, Any] = {"cases": len(cases), "commits": named}
    for clock in CLOCKS:
        ratios = [(r, each) for each in cases if (r := ratio(each, clock)) is not None]
        ratios.sort(key=lambda pair: -pair[0])
        spread = noise(cases, clock)
        behind = [_named(each, round(r, 3)) for r, each in ratios if is_behind(each, clock, spread)]
        summary[clock] = {
            "cases": len(ratios), "noise": spread, "behind": behind,
            "worst": _named(ratios[0][1], round(ratios[0][0], 3)) if ratios else None,
            "median": round(ratios[len(ratios) // 2][0], 3) if ratios else None,
        }  # fmt: skip
    beside = sorted((each for each in cases if "throughput" in each), key=lambda each: each["throughput"])
    judged = [each for each in beside if "latency_bound" not in each]
    summary[NEIGHBOUR] = {
        "cases": len(judged), "latency_bound": len(beside) - len(judged),
        "below": [_named(each, each["throughput"]) for each in judged if each["throughput"] < THROUGHPUT],
        "worst": _named(judged[0], judged[0]["throughput"]) if judged else None,
    }  # fmt: skip
    summary["errors"] = [
        {"case": describe_case(each["case"]), "of": name, "error": error}
        for each in cases
        for name, error in each.get("errors", {}).items()
    ]
    summary["recompiled"] = [describe_case(each["case"]) for each in cases if "recompiled" in each]
    return summary


def _named(measured: Measured, figure: float) -> dict[str, Any]:
    return {"case": describe_case(measured["case"]), "ratio": figure}


def summary_lines(result: dict[str, Any]) -> list[str]:
    """The summary as text: a line an op and clock, and below it the worst cases that are not as they should be."""
    lines = []
    for name, summary in result["summary"].items():
        failed = sum(each["of"] == OURS for each in summary["errors"])
        mixed = f", measured at {', '.join(summary['commits'])}" if len(summary["commits"]) > 1 else ""
        lines.append(f"{name}: {summary['cases']} cases, {failed} failed{mixed}")
        for clock in CLOCKS:
            part = summary[clock]
            if part["cases"]:
                lines.append(
                    f"  {clock} time over the best of eager and compile: median {part['median']:.2f}, worst "
                    f"{_line(part['worst'])}; {len(part['behind'])} of {part['cases']} behind by more than the spread "
                    f"of {part['noise']:.1%}"
                )
                lines += [f"    {_line(each)}" for each in part["behind"][:_SHOWN]]
        part = summary[NEIGHBOUR]
        if part["cases"]:
            lines.append(
                f"  round neighbour: {len(part['below'])} of {part['cases']} below {THROUGHPUT:.0%} of its throughput; "
                f"worst {_line(part['worst'])}"
            )
            lines += [f"    {_line(each)}" for each in part["below"][:_SHOWN]]
        if summary["recompiled"]:
            lines.append(f"  {len(summary['recompiled'])} row counts needed kernels of their own, such as that of")
            lines.append(f"    {summary['recompiled'][0]}")
        lines += [f"  {each['of']} failed at {each['case']}: {each['error']}" for each in summary["errors"][:_SHOWN]]
    missing = result["not_reached"]
    if missing:
        lines.append(f"{len(missing)} cases were not reached within the budget; the first: {missing[0]}")
    lines.append(f"{result['seconds']} s; seed {result['seed']}")
    return lines


def _line(named: dict[str, Any]) -> str:
    return f"{named['ratio']:.2f} ({named['case']})"
