"""The best run taken apart: its memory and its step, predicted and measured, and its kernels under the roofline."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilewright.hardware import by_driver_name
from tilewright.tune.report.answer import Answer
from tilewright.tune.report.best import own_levers
from tilewright.tune.report.plots import (
    COLOURS,
    DARK,
    GREY,
    Drawn,
    Figure,
    Rich,
    axis,
    dots,
    figure,
    logarithmic,
    milliseconds,
    rich,
    rich_lines,
    shown,
)
from tilewright.tune.search.layouts import LAYOUT, sizes_of
from tilewright.tune.store.record import Prediction, Record

IDLE = "#dfe3e8"
_KINDS = ("matmul", "attention", "fused", "pointwise", "optimizer", "communication", "copy", "other")
CATEGORIES = dict(zip(_KINDS, COLOURS, strict=False))  # those of `measure.profile`, and their colours
_SHADES = ("#3d5a80", "#7a9cc6", "#b7a57a", "#5f7d63", "#b4b9bf")
_LABELLED = 16  # ops of the roofline that have a label, those that take longest
_DASHES = ("solid", "dash", "dot")
_PARTS = ("weights", "gradients", "optimizer", "temporary buffers")  # which both the plan and a measurement know
# What the plan counts as activations in parts, and a measurement can only see together.
_AT_WORK = ("activations", "16-bit copies", "logits and loss")
NO_PROFILE = "There is no profile of a best run, so nobody can say where its time went."


def configuration(answer: Answer) -> dict[str, Any]:
    """The best run, every field; the baseline where there is none. Of a user's own model it is the levers alone."""
    if answer.own_model:
        return own_levers(answer)
    tree = copy.deepcopy(answer.start)
    for name, value in (answer.best.point if answer.best else {}).items():
        if name == LAYOUT and isinstance(tree.get(name), dict):
            tree[name] |= sizes_of(str(value))
            continue
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
            "textposition": "none", "hovertemplate": Rich("%{text}: %{x:,.4~g}<extra></extra>"),
        })  # fmt: skip
    labels = [
        {"xref": "paper", "x": 0, "xanchor": "left", "y": -i, "yshift": 28, "text": rich("<b>{}</b>", shown(name)),
         "showarrow": False}
        for i, name in enumerate(bars)
    ]  # fmt: skip
    y = {"visible": False, "fixedrange": True, "range": [-len(bars) + 0.6, 0.75]}
    x = axis(unit, rangemode="tozero")
    drawn = figure(traces, 66 * len(bars) + 52, x, y, barmode="stack", annotations=labels)
    parts = [(part, colours[part], [bar.get(part) for bar in bars.values()]) for part in order]
    return Bars(drawn, list(bars), parts)


def memory_parts(record: Record) -> dict[str, float]:
    """Return the measured memory by the plan's names; the remainder is activations, or on a CPU the process."""
    found = record.measurement
    assert found is not None
    parts: dict[str, float] = {name: found.memory[name] for name in _PARTS if name in found.memory}
    if record.prediction is not None and not record.prediction.memory.get("gradients"):
        parts.pop("gradients", None)  # they are not there yet at the peak
    parts[_rest(record)] = max(0.0, found.bytes - sum(parts.values()))
    context = found.memory.get("CUDA context")
    if context is not None:
        # From the total: the peak of a recorded step is its recording's, which the parts saw nothing of.
        beyond = {
            "fragmentation": max(0.0, found.memory.get("total", 0) - context - found.bytes),
            "CUDA context": context,
        }
        return {**parts, **beyond}
    return parts


def _rest(record: Record) -> str:
    """Name the remainder: activations on a GPU, whose allocator counts all else, and the process on a CPU."""
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
    """Return the profile of the best run's step, as `measure.profile.StepProfile` has it."""
    found = answer.best.measurement if answer.best else None
    return found.profile if found and found.profile and found.profile.get("categories") else None


def time_parts(answer: Answer) -> Bars | str:
    """The best run's step, as predicted and as profiled."""
    profile = step_profile(answer)
    if profile is None or answer.best is None:
        return NO_PROFILE
    bars = {"predicted": answer.best.prediction.parts} if answer.best.prediction is not None else {}
    colours = {**CATEGORIES, "idle": IDLE}
    return _stack({**bars, "measured": spent(answer) or {}}, 1e3, "ms a step", colours)


def spent(answer: Answer) -> dict[str, float] | None:
    """Seconds of a step of the best run, by kind of work; None where there is no profile."""
    profile = step_profile(answer)
    if profile is None:
        return None
    return {**{each["name"]: each["seconds"] for each in profile["categories"]}, "idle": profile["idle_seconds"]}


def held(answer: Answer) -> dict[str, float] | None:
    """Bytes of the best run at its peak, by part; None where it was not measured."""
    if answer.best is None or answer.best.measurement is None:
        return None
    return _in_order(memory_parts(answer.best))


def both(
    answers: Sequence[Answer], names: Sequence[str], parts: Callable[[Answer], dict[str, float] | None], scale: float,
    unit: str,
) -> Bars | str:  # fmt: skip
    """The same parts of several studies, a bar each."""
    bars = {name: found for name, answer in zip(names, answers, strict=True) if (found := parts(answer)) is not None}
    return _stack(bars, scale, unit, {**CATEGORIES, "idle": IDLE}) if bars else "Neither study has a best run to show."


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
    """Place the parts of a bar by hand, because plotly does not stack bars that have a base."""
    begins = [0.0, *itertools.accumulate(piece["seconds"] * 1e3 for piece in pieces)]
    traces = []
    for kind in dict.fromkeys(piece["category"] for piece in pieces):
        mine = [(start, piece["seconds"] * 1e3) for start, piece in zip(begins, pieces, strict=False)
                if piece["category"] == kind]  # fmt: skip
        traces.append({
            "type": "bar", "orientation": "h", "y": [0] * len(mine), "base": [start for start, _ in mine],
            "x": [length for _, length in mine], "width": 0.5, "marker": {"color": colours.get(kind, IDLE)},
            "text": [shown(kind)] * len(mine), "textposition": "none",
            "hovertemplate": Rich("%{text}: %{x:,.3~g} ms<extra></extra>"),
        })  # fmt: skip
    return traces


# Roofline


_BEYOND = 1.5  # times the probe's rate: no machine is so much better than its probe, so the work was less


@dataclass(frozen=True)
class Point:
    """Some work of the best run's on the roofline; `limit` is the FLOPs a second that the ceilings allow for it."""

    work: Mapping[str, Any]  # as `measure.work` has it
    intensity: float
    flops_per_second: float
    limit: float

    @property
    def share(self) -> float:
        """The share of its limit that an op reaches."""
        return self.flops_per_second / self.limit


@dataclass(frozen=True)
class Roof:
    """The ceilings: bytes and FLOPs a second, by dtype; and a sentence for each that an op of the step has raised."""

    copy_rate: float
    rates: dict[str, float]
    raised: list[str]

    @property
    def is_known(self) -> bool:
        return bool(self.copy_rate and self.rates)

    def limit(self, work: Mapping[str, Any]) -> float | None:
        """FLOPs a second that the ceilings allow for some work; None where they are not known."""
        top = self.rates.get(work["dtype"] or "fp32")
        if top is None or not (self.copy_rate and work["flops"] and work["bytes"] and work["seconds"]):
            return None
        return min(top, self.copy_rate * work["flops"] / work["bytes"])

    def point(self, work: Mapping[str, Any]) -> Point | None:
        """Return the point of some work; None where its FLOPs, its bytes or the machine's ceilings are unknown."""
        limit = self.limit(work)
        if limit is None:
            return None
        found = Point(work, work["flops"] / work["bytes"], work["flops"] / work["seconds"], limit)
        return found if found.share <= 1 + 1e-9 else None


def step_seconds(answer: Answer) -> float:
    """Return the time of the observed step; on a CPU compiled code is not seen, so the ops may sum to less."""
    found = answer.best.measurement if answer.best else None
    whole = found.seconds if found is not None and found.step_seconds else 0.0
    return max(whole, sum(each["seconds"] for each in answer.work)) or 1.0


def roof(answer: Answer) -> Roof:
    """The ceilings that the probe measured, raised to what an op of the observed step has reached.

    A rate that an op reached is one that the machine can. Not so where the op had less to do than its shapes say: a
    lookup that reads a part of its table, or data that lay in a cache. Such are quick, so an op counts here that takes
    half a percent of the step, and within the datasheet's rates, or 1.5 times the probe's where there is none.
    """
    probed = {name: rate for name, rate in (answer.ceilings.get("flops") or {}).items() if rate}
    copied = answer.ceilings.get("copy_bytes_per_second") or 0.0
    if not (probed and copied):
        return Roof(copied, probed, [])
    gpu = (answer.machine.get("gpu") or {}).get("name")
    chip = by_driver_name(gpu) if isinstance(gpu, str) else None
    most_copied = chip.bytes_per_second if chip else _BEYOND * copied
    rates, copy_rate, raised = dict(probed), copied, {}
    for work in answer.work:
        dtype = work["dtype"] or "fp32"
        limit = Roof(copy_rate, rates, []).limit(work)
        if limit is None or work["seconds"] < 0.005 * step_seconds(answer):
            continue
        rate, intensity = work["flops"] / work["seconds"], work["flops"] / work["bytes"]
        most = chip.peak_flops.get(dtype, _BEYOND * probed[dtype]) if chip else _BEYOND * probed[dtype]
        if rate <= limit or rate > min(most, most_copied * intensity):
            continue
        what = f"{work['op']} {work['shapes']}"
        if rate > rates[dtype]:
            rates[dtype] = rate
            raised[dtype] = (
                f"{dtype} is {_flops(rate)}, which {what} reached here; the probe reached {_flops(probed[dtype])}"
            )
        if rate > copy_rate * intensity:
            copy_rate = rate / intensity
            raised["memory"] = (
                f"memory is {copy_rate / 1e9:,.0f} GB/s, which {what} reached here; the probe's copy reached "
                f"{copied / 1e9:,.0f} GB/s"
            )
    return Roof(copy_rate, rates, [f"The ceiling of {words}." for words in raised.values()])


def _flops(rate: float) -> str:
    return f"{_digits(rate / 1e12)} TFLOP/s" if rate >= 5e12 else f"{_digits(rate / 1e9)} GFLOP/s"


def roofline_points(answer: Answer) -> list[Point] | str:
    """Return the work of a step of the best run, longest first."""
    if answer.best is None or not answer.work:
        return "No step of a best run was observed, so nobody can say what its kernels had to do."
    ceilings = roof(answer)
    if not ceilings.is_known:
        return "The ceilings of this machine were not measured, so there is nothing to hold the kernels against."
    points = [found for work in answer.work if (found := ceilings.point(work)) is not None]
    return points or "Of none of the kernels that were observed is it known what they had to do."


def roofline(answer: Answer) -> Drawn:
    """Draw each op of the best run's step under the measured ceilings; the longer it takes, the larger the dot."""
    points, ceilings = roofline_points(answer), roof(answer)
    if isinstance(points, str):
        return points
    copy_rate, rates = ceilings.copy_rate, ceilings.rates
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
            rich_lines([
                f"{shown(point.work['op'])} {shown(point.work['shapes'])}",
                f"{_digits(point.flops_per_second / unit)} {word}, {point.share:.0%} of its limit, "
                f"{milliseconds(point.work['seconds'])} a step",
            ])
            for point in mine
        ]  # fmt: skip
        marker = {"size": sizes, "color": colour, "opacity": 0.8, "line": {"color": "white", "width": 1}}
        heights = [max(lowest, point.flops_per_second / unit) for point in mine]
        traces.append(dots([point.intensity for point in mine], heights, texts, marker=marker))
        reached = sum(point.work["seconds"] * point.share for point in mine) / seconds
        legend.append(("●", colour, f"{kind}, {milliseconds(seconds)} at {reached:.0%} of the limit"))
    heights = [value for trace in traces for value in trace["y"]]
    y = axis(word, **logarithmic(min(heights) / 1.5, max(heights) * 1.5))
    labels = [
        {
            "x": point.intensity,
            "y": max(lowest, point.flops_per_second / unit),
            "texts": [shown(_short(point.work["op"]))],
        }
        for point in sorted(points, key=lambda point: -point.work["seconds"])[:_LABELLED]
    ]
    return figure(traces, 460, axis("FLOPs a byte", **logarithmic(left, right)), y, legend, labels)


def _short(op: str) -> str:
    """An op's name without its library's.

    >>> _short("aten::mm"), _short("tilewright_dropout_add_norm_backward")
    ('mm', 'dropout_add_norm_backward')
    """
    return op.rpartition("::")[2].removeprefix("tilewright_")


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _ceiling(x: list[float], y: list[float], dash: str, colour: str) -> dict[str, Any]:
    line = {"color": colour, "width": 1.5, "dash": dash}
    return {"type": "scatter", "mode": "lines", "x": x, "y": y, "hoverinfo": "skip", "line": line}
