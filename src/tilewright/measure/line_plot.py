"""Line plots as SVG: one or more panels with a shared y axis, log or linear, a legend, light and dark.

Text is text, colours follow the reader's preference, and the same figures give the same bytes, so that a check can see
that a picture is out of date.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 800
_LEFT, _RIGHT, _GAP, _PANEL_HEIGHT = 64.0, 28.0, 44.0, 270.0
_CHARACTER = 6.8  # pixels, of 12-pixel text, on the safe side
# Colours that differ for those who see few of them, on white and on black; markers and dashes differ as well.
_LIGHT = ("#0072b2", "#d55e00", "#007d5a", "#a8508a", "#8a6d00", "#555555", "#3b8ec4", "#8b2d00")
_DARK = ("#56b4e9", "#ff9a4d", "#2fd0a0", "#e39ac6", "#f0e442", "#bbbbbb", "#9fd3f5", "#ffc08a")
_DASHES = ("", "7 3", "2 3", "9 3 2 3")
_STEPS = (1.0, 2.0, 5.0)


@dataclass(frozen=True)
class Point:
    """A measurement; `low` and `high` are the ends of its spread."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Line:
    """The points of one label. The same label has the same colour in every panel."""

    label: str
    points: Sequence[Point]


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str
    lines: Sequence[Line]


@dataclass(frozen=True)
class Plot:
    """A picture: panels side by side, which share the y axis."""

    title: str
    x_label: str
    y_label: str
    panels: Sequence[Panel]
    note: str = ""
    log_x: bool = True
    log_y: bool = True


@dataclass(frozen=True)
class _Axis:
    """Numbers from `low` to `high`, to pixels from `start` to `end`."""

    low: float
    high: float
    is_log: bool
    start: float
    end: float

    def __call__(self, value: float) -> float:
        low, high, at = (math.log(v) if self.is_log else v for v in (self.low, self.high, value))
        return self.start + (at - low) / (high - low) * (self.end - self.start)


def draw(plot: Plot) -> str:
    """The picture as SVG.

    >>> line = Line("eager", [Point(1, 10.0), Point(2, 20.0, 19.0, 21.0)])
    >>> svg = draw(Plot("Time", "width", "µs", [Panel("forward", [line])]))
    >>> svg.startswith("<svg") and ">eager</text>" in svg
    True
    """
    points = [p for panel in plot.panels for line in panel.lines for p in line.points]
    numbers = [v for p in points for v in (p.x, p.y, p.low, p.high) if v is not None]
    if not points or not all(math.isfinite(v) for v in numbers):
        raise ValueError(f"{plot.title}: a plot needs points, and all of them finite")
    ys = [v for p in points for v in (p.y, p.low, p.high) if v is not None]
    if (plot.log_x and min(p.x for p in points) <= 0) or (plot.log_y and min(ys) <= 0):
        raise ValueError(f"{plot.title}: a log axis has no room for 0 or less")
    labels = list(dict.fromkeys(line.label for panel in plot.panels for line in panel.lines))
    if len(labels) > len(_LIGHT):
        raise ValueError(f"{plot.title}: {len(labels)} labels, and colours for {len(_LIGHT)}; leave some out")
    legend, legend_height = _legend(labels)
    top = 56.0 + legend_height + 24.0
    bottom = top + _PANEL_HEIGHT
    height = bottom + (64.0 if plot.note else 46.0)
    y = _Axis(*_bounds(ys, plot.log_y), plot.log_y, bottom, top)
    each = (WIDTH - _LEFT - _RIGHT - _GAP * (len(plot.panels) - 1)) / len(plot.panels)
    parts = [_text(_LEFT, 26, plot.title, "title"), _text(_LEFT, 46, plot.y_label, "label"), *legend]
    for number, panel in enumerate(plot.panels):
        left = _LEFT + number * (each + _GAP)
        xs = [p.x for line in panel.lines for p in line.points]
        x = _Axis(*_bounds(xs, plot.log_x, margin=0.03), plot.log_x, left, left + each)
        parts += _axes(x, y, sorted(set(xs)), names_y=number == 0)
        parts.append(_text(left + each / 2, top - 8, panel.title, "label", "middle"))
        parts.append(_text(left + each / 2, bottom + 36, plot.x_label, "label", "middle"))
        for line in panel.lines:
            parts += _line(line, labels.index(line.label), x, y)
    if plot.note:
        parts.append(_text(_LEFT, height - 8, plot.note, "note"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" '
        f'height="{height:.0f}" role="img" aria-label="{escape(plot.title)}">\n<style>\n{_style(len(labels))}</style>\n'
        f'<rect class="page" width="100%" height="100%"/>\n{"".join(part + chr(10) for part in parts)}</svg>\n'
    )


def _style(count: int) -> str:
    def colours(page: str, text: str, soft: str, grid: str, series: Sequence[str]) -> str:
        rules = [f".page{{fill:{page}}}text{{fill:{text}}}.note,.tick{{fill:{soft}}}.grid{{stroke:{grid}}}"]
        rules += [f".c{i}{{stroke:{series[i]};fill:{series[i]}}}" for i in range(count)]
        return "".join(rules)

    return (
        "text{font-family:system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;font-size:12px}"
        ".title{font-size:16px;font-weight:600}.note{font-size:11px}.line{stroke-width:2}"
        ".spread{stroke-width:1.2}.line,.spread{fill:none!important}.grid{stroke-width:1;fill:none}\n"
        f"{colours('#ffffff', '#1f2328', '#59636e', '#d8dee4', _LIGHT)}\n"
        f"@media (prefers-color-scheme:dark){{{colours('#0d1117', '#f0f6fc', '#9198a1', '#30363d', _DARK)}}}\n"
    )


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    where = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}"{where}>{escape(text)}</text>'


def _legend(labels: Sequence[str]) -> tuple[list[str], float]:
    """Marks and names in rows, and the height of these."""
    parts, x, y = [], _LEFT, 68.0
    for number, label in enumerate(labels):
        width = 54 + _CHARACTER * len(label)
        if x > _LEFT and x + width > WIDTH - _RIGHT:
            x, y = _LEFT, y + 20
        parts.append(_stroke(f"M{x:.1f} {y - 4:.1f}H{x + 24:.1f}", number))
        parts.append(_marker(x + 12, y - 4, number))
        parts.append(_text(x + 30, y, label, "label"))
        x += width
    return parts, y - 48.0


def _bounds(values: Iterable[float], is_log: bool, margin: float = 0.06) -> tuple[float, float]:
    """What an axis spans: the values, and some room. A linear axis begins at 0 unless something is below."""
    values = list(values)
    low, high = min(values), max(values)
    if not is_log:
        low = min(0.0, low)
        return low, high + margin * ((high - low) or 1.0)
    room = max((high / low) ** margin, 1.05)
    return low / room, high * room


def ticks(low: float, high: float, is_log: bool, most: int = 8) -> list[float]:
    """Round numbers from `low` to `high`.

    >>> ticks(8.0, 1200.0, is_log=True)
    [10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0]
    >>> ticks(0.0, 9.0, is_log=False, most=5)
    [0.0, 2.0, 4.0, 6.0, 8.0]
    >>> ticks(2.1, 2.9, is_log=True, most=5)
    [2.2, 2.4, 2.6, 2.8]
    """
    if is_log and high / low > 4:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for steps in (_STEPS, (1.0,)):
            found = [step * 10.0**decade for decade in decades for step in steps]
            found = [round(value, 12) for value in found if low <= value <= high]
            if len(found) <= most:
                return found
        return found[:: math.ceil(len(found) / most)]
    rough = (high - low) / most
    decade = 10.0 ** math.floor(math.log10(rough))
    step = next(s * decade for s in (*_STEPS, 10.0) if s * decade >= rough)
    return [round(step * n, 12) for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) else f"{value:g}"


def _axes(x: _Axis, y: _Axis, measured: Sequence[float], names_y: bool) -> list[str]:
    """A grid with its numbers. On x these are the sizes that were measured, as far as there is room for them."""
    parts = []
    for value in ticks(y.low, y.high, y.is_log):
        parts.append(f'<path class="grid" d="M{x.start:.1f} {y(value):.1f}H{x.end:.1f}"/>')
        if names_y:
            parts.append(_text(x.start - 8, y(value) + 4, _number(value), "tick", "end"))
    last = -math.inf
    for value in measured:
        half = _CHARACTER * len(_number(value)) / 2
        parts.append(f'<path class="grid" d="M{x(value):.1f} {y.start:.1f}v5"/>')
        if x(value) - half > last + 6:
            parts.append(_text(x(value), y.start + 18, _number(value), "tick", "middle"))
            last = x(value) + half
    parts.append(f'<path class="grid" d="M{x.start:.1f} {y.end:.1f}V{y.start:.1f}H{x.end:.1f}"/>')
    return parts


def _line(line: Line, number: int, x: _Axis, y: _Axis) -> list[str]:
    points = sorted(line.points, key=lambda point: point.x)
    parts = [_stroke("M" + "L".join(f"{x(p.x):.1f} {y(p.y):.1f}" for p in points), number)]
    for p in points:
        if p.low is not None and p.high is not None:
            low, high = y(p.low), y(p.high)
            bar = f"M{x(p.x) - 4:.1f} {low:.1f}h8m-4 0V{high:.1f}m-4 0h8"
            parts.append(f'<path class="spread c{number}" d="{bar}"/>')
        parts.append(_marker(x(p.x), y(p.y), number))
    return parts


def _stroke(path: str, number: int) -> str:
    dash = _DASHES[number % len(_DASHES)]
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<path class="line c{number}" d="{path}"{dashes}/>'


def _marker(x: float, y: float, number: int) -> str:
    shapes = (
        f'<circle class="c{number}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>',
        f'<rect class="c{number}" x="{x - 3.5:.1f}" y="{y - 3.5:.1f}" width="7" height="7"/>',
        f'<path class="c{number}" d="M{x:.1f} {y - 5:.1f}l4.5 8h-9z"/>',
        f'<path class="c{number}" d="M{x:.1f} {y - 5:.1f}l5 5l-5 5l-5 -5z"/>',
    )
    return shapes[(number + number // 4) % 4]
