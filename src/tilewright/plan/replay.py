"""A step of a small run as a graph of events, and how long it takes with more ranks and other links.

An event is computing or traffic. It begins when the events it comes after have ended and its stream is free, as a GPU's
streams do. Computing takes what it took. Traffic is a ring over all ranks: with more of them, or other links, it takes
as much longer as `plan.traffic` says of its bytes, so what it lost in the small run, it loses again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewright.errors import UserError
from tilewright.plan.traffic import Links

_LARGEST_FILE = 64 << 20
_MOST_SECONDS = 1e6


@dataclass(frozen=True)
class Event:
    """Something on a stream."""

    name: str
    seconds: float
    stream: str = "compute"
    bytes: float = 0.0  # of the tensor that a collective gathers or scatters; 0: it is computing
    after: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recording:
    """The events of a step on `gpus` GPUs, in the order in which the host launched them, and tokens of the step."""

    gpus: int
    tokens: float
    events: tuple[Event, ...]

    def replay(self, gpus: int, links: Links, recorded_on: Links | None = None) -> float:
        """Seconds of the step on so many GPUs, each with as much to do as in the small run.

        >>> pair = (Event("gather", 1.0, "traffic", 1e9), Event("forward", 2.0, after=("gather",)))
        >>> small = Recording(8, 1024.0, pair)
        >>> small.replay(8, Links()), small.replay(64, Links()) > 3.0
        (3.0, True)
        """
        ended: dict[str, float] = {}
        free: dict[str, float] = {}
        for event in self.events:
            seconds = event.seconds
            if event.bytes:
                before = (recorded_on or links).ring(event.bytes, self.gpus)
                now = links.ring(event.bytes, gpus)
                # One GPU sends nothing: what its events took is not of a ring, and what the ring takes is added.
                seconds = seconds * now / before if before else seconds + now
            start = max([free.get(event.stream, 0.0), *(ended[name] for name in event.after)])
            ended[event.name] = free[event.stream] = start + seconds
        return max(ended.values())


def read(path: Path) -> Recording:
    """A recording from JSON: {"gpus": 8, "tokens": 131072, "events": [{"name": ..., "seconds": ...}, ...]}.

    An event may also have "stream", "bytes" and "after", a list of names of events before it.
    """
    try:
        with path.open("rb") as file:
            text = file.read(_LARGEST_FILE + 1)
        raw = json.loads(text) if len(text) <= _LARGEST_FILE else None
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror}.") from None
    except (ValueError, RecursionError):
        raise UserError(f"{path} is no JSON; write an object with gpus, tokens and events.") from None
    if not isinstance(raw, dict) or not isinstance(raw.get("events"), list) or not raw["events"]:
        raise UserError(f"{path} has no events; write an object with gpus, tokens and events.")
    gpus = raw.get("gpus")
    if not isinstance(gpus, int) or isinstance(gpus, bool) or not 1 <= gpus <= 10**6:
        raise UserError(f"{path}: gpus must be the whole number of GPUs that the events are of.")
    tokens = _number(path, "tokens", raw.get("tokens"), 1e15)
    names: set[str] = set()
    events = []
    for position, each in enumerate(raw["events"]):
        events.append(_event(path, position, each, names))
        names.add(events[-1].name)
    return Recording(gpus, tokens, tuple(events))


def _number(path: Path, name: str, value: Any, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise UserError(f"{path}: {name} must be a number from 0 to {most:g}.")
    return float(value)


def _event(path: Path, position: int, raw: Any, names: set[str]) -> Event:
    where = f"event {position}"
    if not isinstance(raw, dict) or not isinstance(raw.get("name"), str) or raw["name"] in names:
        raise UserError(f"{path}: {where} needs a name that no event before it has.")
    after, stream = raw.get("after", []), raw.get("stream", "compute")
    if not isinstance(after, list) or not all(isinstance(name, str) and name in names for name in after):
        raise UserError(f"{path}: {where} comes after an event that is not before it.")
    if not isinstance(stream, str):
        raise UserError(f"{path}: the stream of {where} must be a name.")
    seconds = _number(path, f"seconds of {where}", raw.get("seconds"), _MOST_SECONDS)
    moved = _number(path, f"bytes of {where}", raw.get("bytes", 0), 1e15)
    return Event(raw["name"], seconds, stream, moved, tuple(after))
