"""The best run taken apart: its memory and its step, predicted and measured, and its kernels under the roofline."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tilewright.errors import UserError
from tilewright.tune.answer import Answer
from tilewright.tune.record import Prediction, Record
from tilewright.tune.report_plots import (
    COLOURS,
    DARK,
    GREY,
    Drawn,
    Figure,
    axis,
    clean,
    dots,
    figure,
    logarithmic,
    milliseconds,
    shown,
)

IDLE = "#dfe3e8"
_KINDS = ("product", "attention", "fused", "pointwise", "optimizer", "communication", "copy", "other")
CATEGORIES = dict(zip(_KINDS, COLOURS, strict=False))  # those of `measure.profile`, and their colours
_SHADES = ("#3d5a80", "#7a9cc6", "#b7a57a", "#5f7d63", "#b4b9bf")
_REST = "pointwise and fused"
_DASHES = ("solid", "dash", "dot")
_PARTS = ("weights", "gradients", "optimizer", "temporary buffers")  # which both the plan and a measurement know
# What the plan counts as activations in parts, and a measurement can only see together.
_AT_WORK = ("activations", "16-bit copies", "logits and loss")
NO_PROFILE = "There is no profile of a best run, so nobody can say where its time went."


def configuration(answer: Answer) -> dict[str, Any]:
    """The best run, every field; as given where there is none."""
    tree = copy.deepcopy(answer.start)
    for name, value in (answer.best.point if answer.best else {}).items():
        *sections, last = name.split(".")
        at = tree
        for section in sections:
            at = at.setdefault(section, {})
        at[last] = value
    return tree


@dataclass(frozen=True)
class Bars:
    """A figure of stacked bars, and its numbers: (part, colour, one value a bar or None where it has none)."""

    figure: Figure
    names: list[str]
    parts: list[tuple[str, str, list[float | None]]]


def _stack(bars: Mapping[str, Mapping[str, float]], scale: float, unit: str, fixed: Mapping[str, str]) -> Bars:
    """Bars of parts; a part has the same colour in all of them."""
    order = list(dict.fromkeys(part for bar in bars.values() for part, value in bar.items() if value))
    order.sort(key=lambda part: part == "idle")  # which comes last
    free = [colour for colour in COLOURS if colour not in {fixed.get(part) for part in order}] or list(COLOURS)
    others = [part for part in order if part not in fixed]
    colours = {**{part: free[i % len(free)] for i, part in enumerate(others)}, **fixed}
    traces = []
    for part in order:
        values = [bar.get(part, 0.0) * scale for bar in bars.values()]
        text = [shown(part)] * len(bars)
        traces.append({
            "type": "bar", "orientation": "h", "x": values, "y": [-i for i in range(len(bars))], "width": 0.5,
            "marker": {"color": colours[part], "line": {"color": "white", "width": 0.6}}, "text": text,
            "textposition": "none", "hovertemplate": "%{text}: %{x:,.4~g}<extra></extra>",
        })  # fmt: skip
    labels = [
        {"xref": "paper", "x": 0, "xanchor": "left", "y": -i, "yshift": 28, "text": f"<b>{shown(name)}</b>",
         "showarrow": False}
        for i, name in enumerate(bars)
    ]  # fmt: skip
    y = {"visible": False, "fixedrange": True, "range": [-len(bars) + 0.6, 0.75]}
    x = axis(unit, rangemode="tozero")
    drawn = figure(traces, 66 * len(bars) + 52, x, y, barmode="stack", annotations=labels)
    parts = [(part, colours[part], [bar.get(part) for bar in bars.values()]) for part in order]
    return Bars(drawn, list(bars), parts)


def memory_parts(record: Record) -> dict[str, float]:
    """The memory that was measured, by the plan's names; what nobody owns up to is activations, or the process's."""
    found = record.measurement
    assert found is not None
    parts: dict[str, float] = {name: found.memory[name] for name in _PARTS if name in found.memory}
    if record.prediction is not None and not record.prediction.memory.get("gradients"):
        parts.pop("gradients", None)  # they are not there yet at the peak
    parts[_rest(record)] = max(0.0, found.bytes - sum(parts.values()))
    context = found.memory.get("CUDA context")
    if context is not None:
        # From the total: the peak of a recorded step is its recording's, which the parts saw nothing of.
        beyond = {"fragmentation": max(0.0, found.memory["total"] - context - found.bytes), "CUDA context": context}
        return {**parts, **beyond}
    return parts


def _rest(record: Record) -> str:
    """A GPU's allocator knows all that is not activations; a process on a CPU has all in one."""
    return "activations" if record.measurement and "allocated" in record.measurement.memory else "process"


def _predicted_memory(prediction: Prediction, rest: str) -> dict[str, float]:
    parts = {name: value for name, value in prediction.memory.items() if name not in (*_AT_WORK, rest)}
    return {**parts, rest: sum(prediction.memory.get(name, 0.0) for name in {*_AT_WORK, rest})}


def _in_order(parts: Mapping[str, float]) -> dict[str, float]:
    first = [name for name in _PARTS if name in parts]
    return {name: parts[name] for name in (*first, *parts)}


def memory(answer: Answer) -> Bars | str:
    """The best run's memory, predicted and measured."""
    best = answer.best
    if best is None or best.measurement is None:
        return "There is no best run whose memory could be shown."
    bars = {"measured": memory_parts(best)}
    if best.prediction is not None:
        bars = {"predicted": _predicted_memory(best.prediction, _rest(best)), **bars}
    return _stack({name: _in_order(parts) for name, parts in bars.items()}, 1e-9, "GB", {})


def step_profile(answer: Answer) -> dict[str, Any] | None:
    """Of the best run, as `measure.profile.StepProfile` has it."""
    found = answer.best.measurement if answer.best else None
    return found.profile if found and found.profile and found.profile.get("categories") else None


def time_parts(answer: Answer) -> Bars | str:
    """The best run's step, as predicted and as profiled."""
    profile = step_profile(answer)
    if profile is None or answer.best is None:
        return NO_PROFILE
    spent = {each["name"]: each["seconds"] for each in profile["categories"]}
    bars = {"predicted": answer.best.prediction.parts} if answer.best.prediction is not None else {}
    return _stack({**bars, "measured": {**spent, "idle": profile["idle_seconds"]}}, 1e3, "ms a step",
                  {**CATEGORIES, "idle": IDLE})  # fmt: skip


def timeline(answer: Answer) -> Drawn:
    """One step of the best run: in the order of time, by kind of work, and by phase, with what nothing ran in."""
    profile = step_profile(answer)
    if profile is None:
        return NO_PROFILE
    bars = {
        "by kind of work": {each["name"]: each["seconds"] for each in profile["categories"]},
        "by phase": {f"{each['name']} phase": each["seconds"] for each in profile.get("phases", [])},
    }
    bars = {name: {**parts, "idle": profile["idle_seconds"]} for name, parts in bars.items() if parts}
    if profile.get("timeline"):
        bars = {"in the order of time": {}, **bars}
    phases = {part: _SHADES[i % len(_SHADES)] for i, part in enumerate(bars.get("by phase", {}))}
    colours = {**phases, **CATEGORIES, "idle": IDLE}
    stack = _stack(bars, 1e3, "ms of one step", colours)
    stack.figure.data.extend(_placed(profile.get("timeline", []), colours))
    return dataclasses.replace(stack.figure, legend=[
        ("■", colour, f"{part} {milliseconds(next(value for value in values if value is not None))}")
        for part, colour, values in stack.parts
    ])  # fmt: skip


def _placed(pieces: list[dict[str, Any]], colours: Mapping[str, str]) -> list[dict[str, Any]]:
    """A bar whose parts stand where they were; plotly stacks none that says where it begins."""
    begins = [0.0, *itertools.accumulate(piece["seconds"] * 1e3 for piece in pieces)]
    traces = []
    for kind in dict.fromkeys(piece["category"] for piece in pieces):
        mine = [(start, piece["seconds"] * 1e3) for start, piece in zip(begins, pieces, strict=False)
                if piece["category"] == kind]  # fmt: skip
        traces.append({
            "type": "bar", "orientation": "h", "y": [0] * len(mine), "base": [start for start, _ in mine],
            "x": [length for _, length in mine], "width": 0.5, "marker": {"color": colours.get(kind, IDLE)},
            "text": [shown(kind)] * len(mine), "textposition": "none",
            "hovertemplate": "%{text}: %{x:,.3~g} ms<extra></extra>",
        })  # fmt: skip
    return traces


# Roofline


def plan_work(answer: Answer) -> tuple[str, dict[str, tuple[float, float]]] | str:
    """The precision of the best run, and the FLOPs and bytes of a step of it by kind, as the plan counts them."""
    from tilewright.plan.decoder import from_gpt
    from tilewright.plan.roofline import step_ops
    from tilewright.train.configuration import from_dict
    from tilewright.train.loop import batch_sizes
    from tilewright.train.recompute import planned

    if answer.best is None or answer.best.prediction is None or "model" not in answer.start:
        return "A model of one's own has no plan: its FLOPs and bytes are not known, only its kernels' times."
    try:
        run = from_dict(configuration(answer))
        sizes = batch_sizes(run, 1)
        precision = run.precision if run.precision != "auto" else "bf16" if answer.machine.get("gpu") else "fp32"
        training = planned(run, precision, sizes.micro, sizes.accumulation, 1)
        ops = list(step_ops(from_gpt(run.model), training))
    except UserError as error:
        return f"The plan does not know this run: {clean(error)}"
    work: dict[str, tuple[float, float]] = {}
    for op in ops:
        kind = next((name for name in ("product", "attention", "optimizer") if name in op.name), _REST)
        calls = op.calls * (1 if kind == "optimizer" else sizes.accumulation)
        flops, moved = work.get(kind, (0.0, 0.0))
        work[kind] = flops + calls * op.cost.flops, moved + calls * op.cost.bytes
    return precision, work


@dataclass(frozen=True)
class Point:
    """A kind of work on the roofline; `limit` is the FLOPs a second that the ceilings allow at its intensity."""

    kind: str
    colour: str
    intensity: float
    flops_per_second: float
    limit: float


def roofline_points(answer: Answer) -> list[Point] | str:
    """Each kind of work of the best run: the plan's FLOPs and bytes, and the seconds of the profile."""
    profile, copy_rate, rates = step_profile(answer), *_ceilings(answer)
    if profile is None:
        return NO_PROFILE
    if not rates or not copy_rate:
        return "The ceilings of this machine were not measured, so there is nothing to hold the kernels against."
    found = plan_work(answer)
    if isinstance(found, str):
        return found
    precision, work = found
    peak = rates.get(precision, rates.get("bf16" if "bf16" in precision else "fp32", max(rates.values())))
    seconds = {each["name"]: each["seconds"] for each in profile["categories"]}
    seconds[_REST] = seconds.get("pointwise", 0.0) + seconds.get("fused", 0.0)
    points = []
    for kind, (flops, moved) in work.items():
        if flops and moved and seconds.get(kind):
            top = peak if kind in ("product", "attention") else rates.get("fp32", peak)
            colour = CATEGORIES.get(kind, CATEGORIES["fused"])
            limit = min(top, copy_rate * flops / moved)
            points.append(Point(kind, colour, flops / moved, flops / seconds[kind], limit))
    return points or "The profile and the plan have no kind of work in common."


def _ceilings(answer: Answer) -> tuple[float, dict[str, float]]:
    rates = {name: rate for name, rate in (answer.ceilings.get("flops") or {}).items() if rate}
    return answer.ceilings.get("copy_bytes_per_second") or 0.0, rates


def roofline(answer: Answer) -> Drawn:
    """Each kind of work of the best run under the ceilings that were measured."""
    points, (copy_rate, rates) = roofline_points(answer), _ceilings(answer)
    if isinstance(points, str):
        return points
    unit, word = (1e12, "TFLOP/s") if max(rates.values()) >= 5e12 else (1e9, "GFLOP/s")
    knees = [rate / copy_rate for rate in rates.values()]
    seen = [*knees, *(point.intensity for point in points)]
    left, right = min(seen) / 3, max(seen) * 3
    legend = [("solid", DARK, f"the slope: memory, {copy_rate / 1e9:,.0f} GB/s")]
    traces = [_ceiling([left, max(knees)], [left * copy_rate / unit, max(rates.values()) / unit], "solid", DARK)]
    for i, (name, rate) in enumerate(rates.items()):
        dash = _DASHES[i % len(_DASHES)]
        traces.append(_ceiling([rate / copy_rate, right], [rate / unit] * 2, dash, GREY))
        legend.append((dash, GREY, f"{name}, {_digits(rate / unit)} {word}"))
    for point in points:
        share = point.flops_per_second / point.limit
        much = f"{share:.0%} of the limit" if share <= 1.05 else "more than the plan's bytes allow, so not comparable"
        reached = f"{_digits(point.flops_per_second / unit)} {word}, {much}"
        marker = {"size": 13, "color": point.colour, "line": {"color": "white", "width": 1}}
        at = [point.intensity], [point.flops_per_second / unit]
        traces.append(dots(*at, [f"{point.kind}: {reached}"], marker=marker))
        legend.append(("●", point.colour, f"{point.kind}, {reached}"))
    heights = [value for trace in traces for value in trace["y"]]
    y = axis(word, **logarithmic(min(heights) / 1.5, max(heights) * 1.5))
    return figure(traces, 380, axis("FLOPs a byte", **logarithmic(left, right)), y, legend)


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _ceiling(x: list[float], y: list[float], dash: str, colour: str) -> dict[str, Any]:
    line = {"color": colour, "width": 1.5, "dash": dash}
    return {"type": "scatter", "mode": "lines", "x": x, "y": y, "hoverinfo": "skip", "line": line}
