"""A program's schedule as a picture: SMs against time, one stage after the other above, tile by tile below."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewright.tilesync.check import Program
from tilewright.tilesync.simulate import Event, Timeline

_COLOURS = ("#3b6fb6", "#d9a441", "#5aa469", "#a05fa8", "#4bb3c3", "#c9514a", "#8a8f98")
_WAITING = "#dfe3e8"


def timeline_of(times: np.ndarray, sms: int) -> Timeline:
    """Return the timeline of what a kernel's clock has noted; blocks that share an SM in turn are one worker."""
    begin = int(times["start"].min())
    events = tuple(
        Event(
            task, int(row["processor"]) % sms, *((int(row[name]) - begin) * 1e-9 for name in ("start", "ready", "end"))
        )
        for task, row in enumerate(times)
    )
    return Timeline(events, sms)


def figure(program: Program, timelines: dict[str, Timeline]) -> dict[str, Any]:
    """Return a figure for plotly: a panel for each timeline, a colour for each stage, grey where an SM waits."""
    data: list[dict[str, Any]] = []
    most = max(timeline.seconds for timeline in timelines.values()) * 1e6
    layout: dict[str, Any] = {
        "barmode": "overlay",
        "height": 340 * len(timelines),
        "bargap": 0,
        "plot_bgcolor": "white",
    }
    gap = 0.08
    share = (1 - gap * (len(timelines) - 1)) / len(timelines)
    for number, (name, timeline) in enumerate(timelines.items()):
        axis = "" if number == 0 else str(number + 1)
        top = 1 - number * (share + gap)
        layout[f"xaxis{axis}"] = {"title": {"text": "µs"}, "range": [0, most], "anchor": f"y{axis}"}
        layout[f"yaxis{axis}"] = {
            "title": {"text": f"SM, {name}"}, "domain": [max(0.0, top - share), top], "range": [timeline.workers, -1],
        }  # fmt: skip
        for stage, of_stage in enumerate(program.stages):
            events = [event for event in timeline.events if program.tasks[event.task].stage == stage]
            for waits in (True, False):
                bars = [(e.worker, e.start, e.ready) if waits else (e.worker, e.ready, e.end) for e in events]
                data.append({
                    "type": "bar", "orientation": "h", "xaxis": f"x{axis}", "yaxis": f"y{axis}", "width": 1,
                    "y": [worker for worker, _, _ in bars],
                    "base": [start * 1e6 for _, start, _ in bars],
                    "x": [(end - start) * 1e6 for _, start, end in bars],
                    "text": [str(program.tasks[event.task].tile) for event in events],
                    "textposition": "none",
                    "hovertemplate": f"{of_stage.name} %{{text}}<br>%{{base:.2f}} µs + %{{x:.2f}} µs<extra></extra>",
                    "name": f"{of_stage.name} waits" if waits else of_stage.name,
                    "showlegend": number == 0 and not waits, "legendgroup": of_stage.name,
                    "marker": {"color": _WAITING if waits else _COLOURS[stage % len(_COLOURS)], "line": {"width": 0}},
                })  # fmt: skip
    return {"data": data, "layout": layout}
