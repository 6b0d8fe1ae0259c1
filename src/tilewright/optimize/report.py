"""What `optimize` did to a model: sites, reasons, gains; as text, JSON and HTML."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tilewright.measure.markup import Element, render, tag
from tilewright.optimize.backend import Captured
from tilewright.optimize.rewrite import Site

VERSION = 1


@dataclass(frozen=True)
class Gain:
    """What a rule gives: a training step with all rules, and without this one."""

    rule: str
    seconds: float  # that the step takes longer without the rule
    spread: float  # of that difference, in seconds
    bytes: int | None  # of peak memory that the step takes more without it
    kept: bool


@dataclass(frozen=True)
class Step:
    """A training step as it was measured."""

    seconds: float
    spread: float
    peak: int | None  # bytes


@dataclass(frozen=True)
class SiteTime:
    """One kind of site by itself, at the shapes of the batch: forward and backward."""

    rule: str
    detail: str
    count: int
    before: float  # seconds
    after: float
    peak_before: int | None = None  # bytes beyond the inputs
    peak_after: int | None = None


@dataclass
class Report:
    """What was changed, what was not and why; with a batch, what each rule gives."""

    model: str
    rules: list[str]
    compile: str
    captured: Captured
    _undo: Callable[[], None]
    before: Step | None = None
    after: Step | None = None
    gains: list[Gain] = field(default_factory=list)
    site_times: list[SiteTime] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def sites(self) -> list[Site]:
        """Every place that a rule looked at; empty until the model has been called."""
        return self.captured.sites

    @property
    def changed(self) -> list[Site]:
        """The sites that run by our kernels now."""
        return [site for site in self.sites if site.is_changed]

    @property
    def declined(self) -> list[Site]:
        """The places that stay as they were, each with its reason."""
        return [site for site in self.sites if not site.is_changed]

    def undo(self) -> None:
        """Take everything back: the model is as it was."""
        self._undo()

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON has it."""
        return {
            "version": VERSION, "model": self.model, "rules": self.rules, "compile": self.compile,
            "sites": [asdict(site) for site in self.sites], "failures": self.captured.failures,
            "before": self.before and asdict(self.before), "after": self.after and asdict(self.after),
            "gains": [asdict(each) for each in self.gains],
            "site_times": [asdict(each) for each in self.site_times], "notes": self.notes,
        }  # fmt: skip

    def to_json(self) -> str:
        """The report as text that `json.loads` reads."""
        return json.dumps(self.as_dict(), indent=2)

    def __str__(self) -> str:
        if not self.captured.graphs and not self.captured.failures:
            return f"{self.model}: nothing captured yet; sites are found when the model is called."
        lines = [self._headline()]
        for title, rows in (("changed", _grouped(self.changed)), ("left as it was", _grouped(self.declined))):
            if rows:
                lines += ["", f"{title}:"]
                lines += [f"  {count:>4} x {rule}: {words}  ({where})" for count, rule, words, where in rows]
        if self.gains:
            lines += ["", "a step without each rule:"]
            lines += [f"  {_gain(each)}" for each in self.gains]
        if self.site_times:
            lines += ["", "one site, forward and backward:"]
            lines += [f"  {_time(each)}" for each in self.site_times]
        lines += [*([""] if self.notes else []), *self.notes]
        lines += [f"The rules could not be applied to a graph: {each}" for each in self.captured.failures]
        return "\n".join(lines)

    def _headline(self) -> str:
        words = f"{self.model}: {len(self.changed)} sites changed, {len(self.declined)} left as they were"
        if self.before and self.after:
            words += f"; a step {self.before.seconds * 1e3:.1f} -> {self.after.seconds * 1e3:.1f} ms"
            words += f" ({self.before.seconds / self.after.seconds:.2f}x)"
            if self.before.peak and self.after.peak:
                words += f", {self.before.peak / 1e9:.1f} -> {self.after.peak / 1e9:.1f} GB"
        return words

    def to_html(self) -> str:
        """The report as one page that needs nothing else."""
        rows = [("changed", *each) for each in _grouped(self.changed)]
        rows += [("left", *each) for each in _grouped(self.declined)]
        page = tag(
            "html", tag("head", tag("meta", charset="utf-8"), tag("title", f"tilewright optimize: {self.model}")),
            tag(
                "body", tag("h1", self._headline()), _table(("", "sites", "rule", "what", "where"), rows),
                _table(("a step without each rule",), [(_gain(each),) for each in self.gains]) if self.gains else None,
                [tag("p", note) for note in self.notes],
            ),
        )  # fmt: skip
        return "<!doctype html>\n" + render(page)

    def _repr_html_(self) -> str:
        return render(tag("pre", str(self)))


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> Element:
    cells = [tag("tr", [tag("th", each) for each in head])]
    return tag("table", cells + [tag("tr", [tag("td", str(each)) for each in row]) for row in rows])


def _gain(gain: Gain) -> str:
    memory = "" if gain.bytes is None else f", {gain.bytes / 1e9:+.2f} GB"
    kept = "kept" if gain.kept else "undone: it gives nothing beyond the spread"
    return f"{gain.rule}: {gain.seconds * 1e3:+.2f} ms (spread {gain.spread * 1e3:.2f}){memory}, {kept}"


def _time(each: SiteTime) -> str:
    memory = ""
    if each.peak_before is not None and each.peak_after is not None:
        memory = f", {each.peak_before / 1e6:,.0f} -> {each.peak_after / 1e6:,.0f} MB"
    time = f"{each.before * 1e6:,.0f} -> {each.after * 1e6:,.0f} us"
    return f"{each.count} x {each.rule}, {each.detail}: {time}{memory}"


def _grouped(sites: Sequence[Site]) -> list[tuple[int, str, str, str]]:
    """Sites that differ in their place alone in one row: how many, rule, words, the first place and the last."""
    found: dict[tuple[str, str], list[str]] = {}
    for site in sites:
        found.setdefault((site.rule, site.detail if site.is_changed else _words(site)), []).append(site.where)
    return [
        (len(places), rule, words, places[0] if len(places) == 1 else f"{places[0]} ... {places[-1]}")
        for (rule, words), places in found.items()
    ]


def _words(site: Site) -> str:
    return f"{site.detail}: {site.declined}" if site.detail else site.declined
