"""The pictures of a report, as plotly's JSON; where there is nothing to draw, the sentence that says why.

A picture has no legend of its own: a list or a table under it, which wraps on a phone and prints, has the colours.
Plotly takes some tags for its own, so the writer of a page escapes every text of a picture but a `Rich` one, and
`rich` escapes what it puts into one.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tilewright.measure.markup import clean
from tilewright.tune.report.answer import Answer
from tilewright.tune.search.choose import is_known, latest
from tilewright.tune.search.space import label
from tilewright.tune.store.record import Record

ACCENT, DARK, GREY, PALE, LOSS = "#0b61a4", "#27313b", "#8a949e", "#a9c8e4", "#c2541b"
# Okabe and Ito's colours, which people with any kind of colour vision tell apart.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#56b4e9", "#cc79a7", "#d55e00", "#d8c93a", "#999999", "#5b4a8a", "#6b8e23")


@dataclass(frozen=True)
class Figure:
    """Traces and layout for `Plotly.newPlot`, and a legend: (character, or dash of a line; colour; words).

    `labels` are texts for points, the most important first: {"x", "y", "texts"}. The page puts the first text there
    that has room, or none.
    """

    data: list[dict[str, Any]]
    layout: dict[str, Any]
    legend: list[tuple[str, str, str]] = field(default_factory=list)
    labels: list[dict[str, Any]] = field(default_factory=list)


Drawn = Figure | str


class Rich(str):
    """Text in plotly's own markup; made by `rich`."""


def rich(template: str, *values: Any) -> Rich:
    """Text in plotly's markup, with values that are shown as they are.

    >>> rich("<b>{}</b>", "a < b")
    '<b>a &lt; b</b>'
    """
    return Rich(template.format(*(v if isinstance(v, Rich) else html.escape(clean(v), quote=False) for v in values)))


def rich_lines(lines: Sequence[Any]) -> Rich:
    """Lines below one another."""
    return rich("<br>".join(["{}"] * len(lines)), *lines)


_HOVER = Rich("%{text}<extra></extra>")


def shown(value: Any, most: int = 48) -> str:
    """A name in one line, shortened."""
    return clean(value, most).replace("\n", " ")


def size(value: float) -> str:
    """Bytes as people say them.

    >>> size(141e9), size(-2.5e6), size(0)
    ('141.00 GB', '-2.5 MB', '0 MB')
    """
    if abs(value) >= 1e9:
        return f"{value / 1e9:,.2f} GB"
    return f"{value / 1e6:,.1f} MB" if abs(value) >= 5e4 else "0 MB"


def milliseconds(value: float) -> str:
    """Seconds in milliseconds, with the digits that matter.

    >>> milliseconds(0.25), milliseconds(0.0123), milliseconds(0.001234), milliseconds(0)
    ('250 ms', '12.3 ms', '1.23 ms', '0 ms')
    """
    thousandths = value * 1e3
    decimals = sum(abs(thousandths) < limit for limit in (100, 10, 1))
    return f"{thousandths:,.{decimals}f} ms" if abs(thousandths) >= 0.0005 else "0 ms"


def changes(answer: Answer, point: Mapping[str, Any]) -> dict[str, Any]:
    """The levers of a point that are not the baseline's."""
    return {n: v for n, v in point.items() if n not in answer.levers or [v] != list(answer.levers[n][:1])}


def has_speed(record: Record | None) -> bool:
    """Whether a trial was measured."""
    found = record.measurement if record is not None else None
    return found is not None and bool(found.step_seconds) and found.seconds > 0


def measured(answer: Answer) -> list[Record]:
    """Return the trial that counts of each point that has a speed, the best and the baseline among them."""
    records = list(filter(is_known, latest(answer.records).values()))
    known = [*records, *(each for each in (answer.reference, answer.best) if each not in records)]
    return [record for record in known if record is not None and has_speed(record)]


def axis(title: str, **more: Any) -> dict[str, Any]:
    """An axis that a finger scrolls past and does not zoom."""
    return {
        "title": {"text": title, "standoff": 8}, "fixedrange": True, "automargin": True, "zeroline": False,
        "gridcolor": "#e8ebee", "linecolor": "#aab3bc", "ticks": "outside", "ticklen": 4, "tickcolor": "#aab3bc",
        **more,
    }  # fmt: skip


def logarithmic(low: float, high: float) -> dict[str, Any]:
    """What makes an axis logarithmic, with round numbers that have room on a phone.

    >>> logarithmic(80, 700)["tickvals"]
    [100.0, 150.0, 200.0, 300.0, 500.0, 700.0]
    """
    decades = math.log10(high / low)
    leading = (1, 1.5, 2, 3, 5, 7) if decades < 1 else (1, 2, 5) if decades < 2.5 else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    values = [float(f"{first}e{power}") for power in powers for first in leading]
    ticks = [value for value in values if low <= value <= high]
    scale = {"type": "log", "range": [math.log10(low), math.log10(high)], "tickangle": 0}
    return {**scale, "tickvals": ticks} if len(ticks) > 1 else scale  # plotly finds some in the narrowest range


def figure(
    data: list[dict[str, Any]], height: int, x: dict[str, Any], y: dict[str, Any],
    legend: Iterable[tuple[str, str, str]] = (), labels: Iterable[dict[str, Any]] = (), **more: Any,
) -> Figure:  # fmt: skip
    """Traces in the report's style."""
    layout = {
        "height": height, "margin": {"l": 12, "r": 16, "t": 12, "b": 12}, "showlegend": False, "dragmode": False,
        "hovermode": "closest", "font": {"family": "system-ui, sans-serif", "size": 12, "color": DARK},
        "hoverlabel": {"align": "left", "bgcolor": "white", "bordercolor": "#aab3bc", "font": {"color": DARK}},
        "plot_bgcolor": "white", "paper_bgcolor": "white", "xaxis": x, "yaxis": y, **more,
    }  # fmt: skip
    return Figure(data, layout, list(legend), list(labels))


def dots(x: Sequence[Any], y: Sequence[Any], texts: Sequence[str], **more: Any) -> dict[str, Any]:
    """Points that say a text of their own when one touches them."""
    hover = {"text": texts, "hovertemplate": _HOVER}
    return {"type": "scatter", "mode": "markers", "x": x, "y": y, "cliponaxis": False, **hover, **more}


# The waterfall


def waterfall_bars(answer: Answer) -> list[tuple[str, float, float]]:
    """(what, from, to) in tokens a second: the baseline, what each lever gives, what they give together, the best.

    A lever's gain is the best less the best without it. The gains need not add up, since levers help or hinder one
    another; the last bar before the best is what is missing to it, so every bar begins where the one before ended.
    """
    if answer.reference is None or answer.best is None or not (has_speed(answer.reference) and has_speed(answer.best)):
        return []
    first, best = answer.reference.tokens_per_second, answer.best.tokens_per_second
    assert first is not None and best is not None
    gains = [(ablation, best - ablation.tokens_per_second) for ablation in answer.ablations
             if ablation.tokens_per_second is not None]  # fmt: skip
    bars, reached = [("baseline", 0.0, first)], first
    for ablation, gain in sorted(gains, key=lambda item: -item[1]):
        bars.append((label({ablation.lever: ablation.value}), reached, reached + gain))
        reached += gain
    untried = [label({each.lever: each.value}) for each in answer.ablations if each.tokens_per_second is None]
    rest = f"together, with {', '.join(untried)}" if untried else "together"
    return [*bars, (rest, reached, best), ("best", 0.0, best)]


def waterfall(answer: Answer) -> Drawn:
    """Draw what each lever adds, from the baseline to the best."""
    bars = waterfall_bars(answer)
    if not bars or answer.best is None:
        return "There is no best run to compare with the baseline, or the baseline could not be measured."
    if not changes(answer, answer.best.point):
        return "The baseline is the best that was found; no lever is moved."
    last = len(bars) - 1
    colours = [DARK if i in (0, last) else GREY if i == last - 1 else ACCENT if to >= start else LOSS
               for i, (_, start, to) in enumerate(bars)]  # fmt: skip
    amounts = [
        f"{to - start:,.0f}" if i in (0, last) else f"{to - start:+,.0f}" for i, (_, start, to) in enumerate(bars)
    ]
    words = [rich("{}  <b>{}</b>", shown(name, 34), amount) for (name, _, _), amount in zip(bars, amounts, strict=True)]
    trace = {
        "type": "bar", "orientation": "h", "y": [-i for i in range(len(bars))], "base": [start for _, start, _ in bars],
        "x": [to - start for _, start, to in bars], "width": 0.42, "marker": {"color": colours}, "text": words,
        "textposition": "none", "hovertemplate": Rich(f"%{{text}} {answer.unit}/s<extra></extra>"),
    }  # fmt: skip
    labels = [
        {"xref": "paper", "x": 0, "xanchor": "left", "y": -i, "yshift": 20, "text": text, "showarrow": False}
        for i, text in enumerate(words)
    ]
    y = {"visible": False, "fixedrange": True, "range": [-last - 0.4, 0.75]}
    x = axis(f"{answer.unit} a second", tickformat=",~s", rangemode="tozero")
    return figure([trace], 48 * len(bars) + 60, x, y, annotations=labels)


# Throughput against memory


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
    """Which points no other beats, in the order of memory; a point is (bytes, tokens a second).

    >>> pareto([(1, 5), (2, 4), (3, 9), (3, 8)])
    [0, 2]
    """
    front: list[int] = []
    for index in sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1])):
        if not front or points[index][1] > points[front[-1]][1]:
            front.append(index)
    return front


def _groups(answer: Answer, records: Sequence[Record]) -> Iterable[tuple[str, str, str, str, list[Record]]]:
    """(words, symbol of plotly, the same as a character, colour, records), the notable ones last and so on top."""
    notable = (answer.best, answer.reference)
    rest = [record for record in records if record not in notable]
    yield "measured", "circle", "●", PALE, [record for record in rest if record.outcome == "done"]
    yield "stopped early", "circle-open", "○", GREY, [record for record in rest if record.outcome != "done"]
    yield "baseline", "diamond", "◆", DARK, [record for record in records if record == answer.reference]
    yield "best", "star", "★", ACCENT, [record for record in records if record == answer.best]


def _described(answer: Answer, record: Record) -> str:
    found = record.measurement
    assert found is not None and record.tokens_per_second is not None
    lines = [shown(part) for part in label(changes(answer, record.point)).split(", ")]
    lines.append(f"{record.tokens_per_second:,.0f} tokens/s, {milliseconds(found.seconds)} a step, {size(found.bytes)}")
    return rich_lines(lines)


def _labels(answer: Answer, records: Sequence[Record], x: Any, y: Any) -> list[dict[str, Any]]:
    """The labels of points, the notable first: what was moved, or where that has no room the number of the trial."""
    order = sorted(records, key=lambda r: (r != answer.best, r != answer.reference, -(r.tokens_per_second or 0.0)))
    found = []
    for record in order:
        name = label(changes(answer, record.point))
        short = next((str(i) for i, each in enumerate(answer.records, 1) if each == record), "")
        if record == answer.best and name != "baseline":
            texts = [f"best: {name}", "best"]
        else:
            texts = [name, short]
        found.append({"x": x(record), "y": y(record), "texts": [each for each in texts if 0 < len(each) <= 60]})
    return found


def _scatter(
    answer: Answer, records: Sequence[Record], x: Any, y: Any
) -> tuple[list[dict[str, Any]], list[tuple[str, str, str]]]:
    traces, legend = [], []
    for words, symbol, mark, colour, group in _groups(answer, records):
        if group:
            edge = {"color": colour, "width": 1.5} if "open" in symbol else {"color": "white", "width": 0.8}
            marker = {"symbol": symbol, "color": colour, "size": 15 if words == "best" else 10, "line": edge}
            texts = [_described(answer, record) for record in group]
            traces.append(dots([x(r) for r in group], [y(r) for r in group], texts, marker=marker))
            legend.append((mark, colour, words))
    return traces, legend


def memory_cap(answer: Answer) -> float | None:
    """Bytes that a trial may take: as the user said, or all that the device has."""
    return answer.ceilings.get("memory_cap") or answer.ceilings.get("memory_bytes")


def tradeoff(answer: Answer) -> Drawn:
    """Tokens a second against bytes, and the runs that no other beats in both."""
    records = measured(answer)
    if not records:
        return "No trial was measured, so there is nothing to set against its memory."
    traces, legend = _scatter(answer, records, lambda r: r.measurement.bytes / 1e9, lambda r: r.tokens_per_second)
    done = [(r.measurement.bytes, r.tokens_per_second or 0.0) for r in records if r.measurement and r.outcome == "done"]
    front = [done[i] for i in pareto(done)]
    line = {"type": "scatter", "mode": "lines", "x": [b / 1e9 for b, _ in front], "y": [s for _, s in front],
            "line": {"color": ACCENT, "width": 1.5, "shape": "hv"}, "hoverinfo": "skip"}  # fmt: skip
    legend.append(("solid", ACCENT, "no other is both faster and smaller"))
    shapes, cap = [], memory_cap(answer)
    most = max(record.measurement.bytes for record in records if record.measurement)
    least = min(record.measurement.bytes for record in records if record.measurement)
    x = axis("memory at the peak, GB")
    if cap is not None and cap <= 2 * most:  # else it would squeeze all points to one side
        shapes = [{"type": "line", "yref": "paper", "y0": 0, "y1": 1, "x0": cap / 1e9, "x1": cap / 1e9,
                   "line": {"color": LOSS, "width": 1.5, "dash": "dash"}}]  # fmt: skip
        x["range"] = [0.9 * least / 1e9, (1.04 * max(cap, most)) / 1e9]
        legend.append(("dash", LOSS, f"the most it may take, {size(cap)}"))
    elif cap is not None:
        legend.append(("→", GREY, f"the most it may take, {size(cap)}, is far to the right"))
    y = axis(f"{answer.unit} a second", tickformat=",~s")
    labels = _labels(answer, records, lambda r: r.measurement.bytes / 1e9, lambda r: r.tokens_per_second)
    return figure([line, *traces], 460, x, y, legend, labels, shapes=shapes)


# Predicted and measured


def forecast(answer: Answer) -> Drawn:
    """Step times, predicted and measured."""
    records = [r for r in measured(answer) if r.prediction is not None and r.prediction.seconds > 0]
    if not records:
        return "No trial was both predicted and measured."
    traces, legend = _scatter(
        answer, records, lambda r: r.prediction.seconds * 1e3, lambda r: r.measurement.seconds * 1e3
    )
    values = [value for trace in traces for axis in ("x", "y") for value in trace[axis]]
    low, high = min(values) / 1.2, max(values) * 1.2
    line = {"type": "scatter", "mode": "lines", "x": [low, high], "y": [low, high], "hoverinfo": "skip",
            "line": {"color": GREY, "width": 1, "dash": "dash"}}  # fmt: skip
    span = logarithmic(low, high)
    legend.append(("dash", GREY, "as predicted"))
    x, y = axis("ms a step, predicted", **span), axis("ms a step, measured", **span)
    labels = _labels(answer, records, lambda r: r.prediction.seconds * 1e3, lambda r: r.measurement.seconds * 1e3)
    return figure([line, *traces], 460, x, y, legend, labels)


# The proof, and the machine's drift


def layer_errors(answer: Answer, which: str) -> Drawn:
    """How far each layer's "output" or "gradient" is from float32, the best run's and the standard block's."""
    layers = answer.proof.layers if answer.proof else []
    lines = {
        "best": [getattr(layer, which) for layer in layers],
        "standard": [getattr(layer, f"{which}_standard") for layer in layers],
    }
    if not layers:
        return f"The {which}s of the layers were not compared."
    if all(value == 0 for line in lines.values() for value in line):
        return f"Every layer's {which} is that of float32, to the last bit."
    found = [value for line in lines.values() for value in line if _finite(value) and value > 0]
    if not found:
        return f"No layer's {which} could be compared: none of the errors is a number."
    names = [shown(layer.name) for layer in layers]
    scale = logarithmic(min(found) / 1.15, max(found) * 1.15)
    return _curves(lines, names, f"error of the {which}", "layer, from the first to the last", **scale)


def losses(answer: Answer) -> Drawn:
    """The loss over a few steps: float32, the standard block in the best run's precision, the best run."""
    lines = {name: line for name, line in (answer.proof.losses if answer.proof else {}).items() if line}
    if not any(_finite(value) for line in lines.values() for value in line):
        return "No losses were compared."
    steps = [f"step {i + 1}" for i in range(max(map(len, lines.values())))]
    return _curves(lines, steps, "loss", "step")


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


# Colour, dash, width and size of the marks, from the lowest line to the topmost: all can be seen where they are one.
_STYLES = {
    "float32": ("#c9d1d9", "solid", 8, 0),
    "best": (ACCENT, "solid", 2, 6),
    "standard": ("#e69f00", "dot", 2, 0),
}


def _curves(lines: Mapping[str, Sequence[float]], names: Sequence[str], y: str, x: str, **scale: Any) -> Figure:
    traces, legend = [], []
    for name in sorted(lines, key=lambda name: list(_STYLES).index(name) if name in _STYLES else -1):
        colour, dash, width, marks = _STYLES.get(name, (GREY, "solid", 2, 0))
        # A value that is no number, or 0 on a logarithmic axis, is a gap.
        values = [value if _finite(value) and (value > 0 or not scale) else None for value in lines[name]]
        texts = [f"{where}, {shown(name)}: {value}" for where, value in zip(names, lines[name], strict=False)]
        traces.append(dots(
            list(range(1, len(values) + 1)), values, texts, mode="lines+markers" if marks else "lines",
            line={"color": colour, "dash": dash, "width": width}, marker={"size": marks},
        ))  # fmt: skip
        legend.append((dash, colour, name))
    whole = {"tickmode": "linear", "tick0": 1, "dtick": max(1, len(names) // 6)}
    return figure(traces, 280, axis(x, **whole), axis(y, **scale), legend)


def drift(answer: Answer) -> Drawn:
    """The speed of the baseline, each time it ran, beside the first."""
    again = [record for record in answer.records if record.purpose == "reference" and has_speed(record)]
    if len(again) < 2:
        return "The baseline was measured less than twice, so nobody can say how far the machine drifted."
    first = again[0].measurement
    assert first is not None
    minutes = [(record.began - again[0].began) / 60 for record in again]
    found = [record.measurement for record in again if record.measurement is not None]
    more = [100 * (each.tokens_per_second / first.tokens_per_second - 1) for each in found]
    spreads = [100 * min(each.spread, 1.0) for each in found]
    texts = [f"{value:+.2f} % ± {width:.2f} %" for value, width in zip(more, spreads, strict=True)]
    trace = dots(
        minutes, more, texts, mode="lines+markers", line={"color": ACCENT, "width": 1.5}, marker={"size": 8},
        error_y={"type": "data", "array": spreads, "color": GREY, "thickness": 1},
    )  # fmt: skip
    most = 1.2 * max(2.0, *(abs(value) + width for value, width in zip(more, spreads, strict=True)))
    y = axis("speed, % of the first", range=[-most, most], ticksuffix=" %")
    return figure([trace], 260, axis("minutes since the study began", rangemode="tozero"), y)
