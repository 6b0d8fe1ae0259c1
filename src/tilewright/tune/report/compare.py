"""Two studies side by side: what each is of, what each found, and where the time and the memory of each best run go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilewright.measure.markup import tag
from tilewright.tune.report import anatomy, plots
from tilewright.tune.report import html as piece
from tilewright.tune.report.answer import Answer
from tilewright.tune.report.head import facts, ratio, verdict
from tilewright.tune.report.html import plot, section, table, words
from tilewright.tune.report.page import bars_section
from tilewright.tune.report.plots import has_speed, milliseconds, size
from tilewright.tune.store.record import Record

_LETTERS = ("A", "B")


def rows(first: Answer, second: Answer) -> list[list[str]]:
    """What is known of both studies: (what, of the first, of the second)."""
    answers = (first, second)
    found = [["Study", *(f"{letter}: {answer.name}" for letter, answer in zip(_LETTERS, answers, strict=True))]]
    found += [["Verdict", *map(verdict, answers)]]
    known = [facts(answer) for answer in answers]
    for name in dict.fromkeys(name for each in known for name in each):
        found.append([name, *(each.get(name, "") for each in known)])
    measured: dict[str, Callable[[Answer], str]] = {
        "Tokens/s of the baseline": lambda answer: _speed(answer.reference),
        "Tokens/s of the baseline, compiled": lambda answer: _speed(answer.compiled),
        "Tokens/s of the best": lambda answer: _speed(answer.best),
        "Best over the baseline": lambda answer: _form(ratio(answer, answer.best), "{:.2f}x".format),
        "Step of the best": lambda answer: _of_best(answer, lambda found: milliseconds(found.seconds)),
        "Memory of the best": lambda answer: _of_best(answer, lambda found: size(found.bytes)),
        "MFU of the best": lambda answer: _of_best(answer, lambda found: _form(found.mfu, "{:.1%}".format)),
    }
    return [*found, *([name, *map(value, answers)] for name, value in measured.items())]


def lever_rows(first: Answer, second: Answer) -> list[list[str]]:
    """Each lever that either best run moved: its value there, and what it gives."""
    moved = dict.fromkeys((*first.changes, *second.changes))
    return [[name, *(_lever(answer, name) for answer in (first, second))] for name in moved]


def comparison(first: Answer, second: Answer) -> str:
    """The page of two studies."""
    answers = (first, second)
    drawn: dict[str, Any] = {}
    names = [f"{letter}: {answer.name}" for letter, answer in zip(_LETTERS, answers, strict=True)]
    speeds = [
        tag("div", tag("h3", name), plot(f"tradeoff-{letter}", name, plots.tradeoff(answer), drawn))
        for letter, name, answer in zip("ab", names, answers, strict=True)
    ]
    moved = lever_rows(first, second)
    levers = table(["Lever", *_LETTERS], [list(map(words, row)) for row in moved]) if moved else piece.sentence(
        "Neither best run moves a lever."
    )  # fmt: skip
    header = tag("header", tag("h1", "Two studies side by side"), tag("p", names[0]), tag("p", names[1]))
    sections = [
        section("Side by side", None, table(["", *_LETTERS], [list(map(words, row)) for row in rows(*answers)[1:]])),
        section("Levers of the best runs", "In brackets, what the best run loses without the lever alone.", levers),
        section("Throughput against memory", "Every trial that was measured.", tag("div", speeds, class_="side")),
        bars_section("Where the time went", "One step of each best run, as profiled.", "time",
                     anatomy.both(answers, _LETTERS, anatomy.spent, 1e3, "ms a step"), milliseconds, drawn),
        bars_section("Memory", "Each best run at its peak.", "memory",
                     anatomy.both(answers, _LETTERS, anatomy.held, 1e-9, "GB"), size, drawn),
    ]  # fmt: skip
    return piece.whole_page(f"{first.name} beside {second.name}", header, sections, drawn)


def _speed(record: Record | None) -> str:
    return f"{record.tokens_per_second:,.0f}" if record is not None and has_speed(record) else "not measured"


def _of_best(answer: Answer, value: Callable[[Any], str]) -> str:
    return value(answer.best.measurement) if answer.best is not None and has_speed(answer.best) else "not measured"


def _form(value: float | None, form: Callable[[float], str]) -> str:
    return "n/a" if value is None else form(value)


def _lever(answer: Answer, name: str) -> str:
    if answer.best is None or name not in answer.best.point:
        return "no lever of this study"
    value = str(answer.best.point[name])
    if name not in answer.changes:
        return f"{value}, as the baseline"
    rate = next((each.tokens_per_second for each in answer.ablations if each.lever == name), None)
    best = answer.best.tokens_per_second
    return value + (f" ({rate / best - 1:+.1%})" if rate and best else " (not tried)")
