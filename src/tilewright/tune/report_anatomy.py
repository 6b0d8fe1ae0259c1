"""The best run taken apart: its memory and its step, predicted and measured, and its kernels under the roofline."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tilewright.tune.answer import Answer, own_levers
from tilewright.tune.record import Prediction, Record
from tilewright.tune.report_plots import (
    COLOURS,
    DARK,
    GREY,
    Drawn,
    Figure,
    axis,
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
_DASHES = ("solid", "dash", "dot")
_PARTS = ("weights", "gradients", "optimizer", "temporary buffers")  # which both the plan and a measurement know
# What the plan counts as activations in parts, and a measurement can only see together.
_AT_WORK = ("activations", "16-bit copies", "logits and loss")
NO_PROFILE = "There is no profile of a best run, so nobody can say where its time went."


def configuration(answer: Answer) -> dict[str, Any]:
    """The best run, every field; as given where there is none. Of a user's own model it is the levers alone."""
    if answer.own_model:
        return own_levers(answer)
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


@dataclass(frozen=True)
class Point:
    """Some work of the best run's on the roofline; `limit` is the FLOPs a second that the ceilings allow for it."""

    work: Mapping[str, Any]  # as `measure.work` has it
    intensity: float
    flops_per_second: float
    limit: float

    @property
    def share(self) -> float:
        """Of the limit, what it reaches."""
        return self.flops_per_second / self.limit

    @property
    def believable(self) -> bool:
        """Caches take a little beyond the limit; who is far beyond it found that there was nothing to do."""
        return self.share < 1.5


def point(answer: Answer, work: Mapping[str, Any]) -> Point | None:
    """Where some work lies; None where nobody knows what it had to do, or what the machine can."""
    copy_rate, rates = _ceilings(answer)
    if not (rates and copy_rate and work["flops"] and work["bytes"] and work["seconds"]):
        return None
    intensity = work["flops"] / work["bytes"]
    top = rates.get(work["dtype"] or "fp32")
    if top is None:  # of products in fp8, say
        return None
    found = Point(work, intensity, work["flops"] / work["seconds"], min(top, copy_rate * intensity))
    return found if found.believable else None


def roofline_points(answer: Answer) -> list[Point] | str:
    """All work of a step of the best run, what took longest first."""
    if answer.best is None or not answer.work:
        return "No step of a best run was observed, so nobody can say what its kernels had to do."
    if not all(_ceilings(answer)):
        return "The ceilings of this machine were not measured, so there is nothing to hold the kernels against."
    points = [found for work in answer.work if (found := point(answer, work)) is not None]
    return points or "Of none of the kernels that were observed is it known what they had to do."


def doubted_ceilings(answer: Answer) -> str | None:
    """A sentence where products pass the rate that was measured for them, which no cache explains."""
    points, (copy_rate, _) = roofline_points(answer), _ceilings(answer)
    if isinstance(points, str):
        return None
    beyond = max((each.share for each in points if each.limit < copy_rate * each.intensity), default=0.0)
    if beyond < 1.05:
        return None
    return (
        f"Products reach up to {beyond:.0%} of their limit, so the machine was slower while its ceilings were measured "
        "than it was later: something else ran on it. Every share of a limit here is too high."
    )


def _ceilings(answer: Answer) -> tuple[float, dict[str, float]]:
    rates = {name: rate for name, rate in (answer.ceilings.get("flops") or {}).items() if rate}
    return answer.ceilings.get("copy_bytes_per_second") or 0.0, rates


def roofline(answer: Answer) -> Drawn:
    """Each op of a step of the best run under the ceilings that were measured; the longer it takes, the larger."""
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
    longest = max(point.work["seconds"] for point in points)
    # What takes next to no time is at the lower edge: a launch that moves ten bytes would be miles below everything.
    counts = [point for point in points if point.work["seconds"] > 0.002 * longest]
    lowest = min(point.flops_per_second for point in counts) / unit / 3
    for kind in dict.fromkeys(point.work["category"] for point in points):
        mine = [point for point in points if point.work["category"] == kind]
        colour, seconds = CATEGORIES.get(kind, GREY), sum(point.work["seconds"] for point in mine)
        sizes = [6 + 16 * (point.work["seconds"] / longest) ** 0.5 for point in mine]
        texts = [
            f"{shown(point.work['op'])} {shown(point.work['shapes'])}<br>"
            f"{_digits(point.flops_per_second / unit)} {word}, {point.share:.0%} of its limit, "
            f"{milliseconds(point.work['seconds'])} a step"
            for point in mine
        ]  # fmt: skip
        marker = {"size": sizes, "color": colour, "opacity": 0.8, "line": {"color": "white", "width": 1}}
        heights = [max(lowest, point.flops_per_second / unit) for point in mine]
        traces.append(dots([point.intensity for point in mine], heights, texts, marker=marker))
        reached = sum(point.work["seconds"] * point.share for point in mine) / seconds
        legend.append(("●", colour, f"{kind}, {milliseconds(seconds)} at {reached:.0%} of the limit"))
    heights = [value for trace in traces for value in trace["y"]]
    y = axis(word, **logarithmic(min(heights) / 1.5, max(heights) * 1.5))
    return figure(traces, 420, axis("FLOPs a byte", **logarithmic(left, right)), y, legend)


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _ceiling(x: list[float], y: list[float], dash: str, colour: str) -> dict[str, Any]:
    line = {"color": colour, "width": 1.5, "dash": dash}
    return {"type": "scatter", "mode": "lines", "x": x, "y": y, "hoverinfo": "skip", "line": line}
