"""The report of a study: one HTML file that needs no network, no server and no other file.

What comes from a study may hold anything, a user's paths or a library's error messages. The page is built of
`measure.markup` elements, which escape every text, so that nothing here has to remember to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tilewright.measure.markup import Element, Node, clean, tag
from tilewright.measure.results import write_text
from tilewright.tune.report import anatomy, plots
from tilewright.tune.report import html as piece
from tilewright.tune.report.answer import NOT_TRIED, Answer, gpus_of
from tilewright.tune.report.head import badge, head, ratio, verdict
from tilewright.tune.report.html import Form, Section, number, plot, section, sentence, table, words
from tilewright.tune.report.plots import changes, has_speed, milliseconds, size
from tilewright.tune.search.choose import UNKNOWN, is_known
from tilewright.tune.search.space import label
from tilewright.tune.store.record import OUTCOMES, Record

_ERROR = 240  # characters of an error in the table; the whole is in its log
_LOG = 8000  # characters of a trial's log that are shown, the last ones
_FOLDED = 0.005  # of the step: kernels below it share one row


def write_report(answer: Answer, path: Path) -> None:
    """Write the page whole or not at all."""
    write_text(path, page(answer))


def page(answer: Answer) -> str:
    """The report as HTML.

    >>> empty = Answer("no trial yet", {}, {}, {}, {}, [], None, None)
    >>> "No trial was measured" in page(empty)
    True
    """
    figures: dict[str, Any] = {}
    header, sections = content(answer, figures)
    return piece.whole_page(f"{answer.name}: {verdict(answer)}", header, sections, figures)


def content(answer: Answer, figures: dict[str, Any]) -> tuple[Element, list[Section]]:
    """The header and the sections of a page; the figures go into `figures` by their place."""
    if answer.generates:
        return head(answer), [
            _waterfall(answer, figures), _tradeoff(answer, figures), _forecast(answer, figures), _quality(answer),
            _drift(answer, figures), _trials(answer), _phases(answer), _machine(answer), _best(answer),
        ]  # fmt: skip
    return head(answer), [
        *_rehearsal(answer), _waterfall(answer, figures), _tradeoff(answer, figures), _kernels(answer, figures),
        _memory(answer, figures), _time(answer, figures), _timeline(answer, figures), _forecast(answer, figures),
        _proof(answer, figures), _drift(answer, figures), _trials(answer), _phases(answer), _machine(answer),
        _best(answer),
    ]  # fmt: skip


def _rehearsal(answer: Answer) -> list[Section]:
    """Say that a study ran without a GPU, and show what the plan predicts for one."""
    if not answer.is_rehearsal:
        return []
    note = (
        "It ran without a GPU: its speeds are a CPU's, where fused ops run as plain PyTorch, and say nothing of a GPU."
    )
    rows = [
        [
            words(row["model"]), words(row["run"]), number(row["tokens_per_second"], "{:,.0f}".format),
            number(row["ratio"], "{:.2f}x".format), number(row["seconds"], milliseconds), number(row["bytes"], size),
        ]
        for row in answer.on_gpu.get("rows", ())
    ]  # fmt: skip
    if not rows:
        return [section("A rehearsal", note)]
    source = tag("p", f"Predicted by the plan for {gpus_of(answer.on_gpu)}, not measured:")
    header = ["Model", "Run", "Tokens/s", "Ratio", "Step", "Memory"]
    rates = tag("p", f"By {answer.on_gpu['rates']}.", class_="note")
    return [section("A rehearsal", note, source, table(header, rows), rates)]


def _waterfall(answer: Answer, figures: dict[str, Any]) -> Section:
    missing = []
    for each in answer.ablations:
        if each.tokens_per_second is None:
            why = each.error or "no reason is known"
            why = why if why == NOT_TRIED else f"it did not run: {why}"
            missing.append(f"Without {label({each.lever: each.value})} {why}")
    note = (
        "What the best run loses when one lever alone is put back. “Together” is what the levers give, or take, beyond "
        "the sum of that, so the bars add up from the baseline to the best."
    )
    drawn = plot("waterfall", "Waterfall", plots.waterfall(answer), figures)
    return section("What each lever gives", note, drawn, [sentence(each) for each in missing], _rules(answer))


def _rules(answer: Answer) -> list[Element]:
    """What each rule of `optimize` gives in the best run, where that was measured."""
    found = answer.rules
    if found is None or not (found.gains or found.not_measured):
        return []
    kept = answer.rule_names
    rows = [
        [
            words(each.rule), number(each.seconds, piece.signed(milliseconds)), number(each.spread, milliseconds),
            number(each.bytes, piece.signed(size)), words("kept" if each.rule in kept else "undone: it gives nothing"),
        ]
        for each in found.gains
    ]  # fmt: skip
    rows += [
        [words(each), *[number(None, str)] * 3, words("kept: there was no time to measure it")]
        for each in found.not_measured
    ]
    note = "A step, forward and backward, with all rules beside one without each: what it takes more."
    header = ["Rule", "More time", "Spread", "More memory", "Outcome"]
    return [tag("h3", "Rules"), tag("p", note, class_="note"), table(header, rows)]


def _tradeoff(answer: Answer, figures: dict[str, Any]) -> Section:
    title = "Throughput against memory"
    note = (
        "Every trial that was measured, its speed corrected for the drift of the machine. Where a label has no room a "
        "number stands for it: the trial's in the table of trials."
    )
    return section(title, note, plot("tradeoff", title, plots.tradeoff(answer), figures))


def _kernels(answer: Answer, figures: dict[str, Any]) -> Section:
    note = (
        "One step of the best run, observed op by op: the FLOPs and bytes that each cannot avoid, its inputs read once "
        "and its results written once, over the time of its kernels, under the ceilings of this machine. A ceiling is "
        "the best of what the probe measured and of what an op of this step reached. An op that multiplies no matrices "
        "counts one FLOP an element. An op that found its data in a cache, or had less to do than its shapes say, has "
        "no share of a limit; what takes next to no time is at the lower edge."
    )
    roof = anatomy.roof(answer)
    content = _observed(answer, roof) if answer.work else _profiled(answer)
    raised = [tag("p", each) for each in roof.raised] if answer.work and roof.is_known else []
    return section("Kernels and their limit", note,
                   plot("roofline", "Roofline", anatomy.roofline(answer), figures), raised, content)  # fmt: skip


def _observed(answer: Answer, roof: anatomy.Roof) -> Element:
    """Tabulate the work of the observed step; kinds below half a percent share a row."""
    total = anatomy.step_seconds(answer)
    longest = max(each["seconds"] for each in answer.work) or 1.0
    rows: list[list[Element]] = []
    small = [each for each in answer.work if each["seconds"] / total < _FOLDED]
    for each in answer.work:
        if each in small and len(small) > 1:
            continue
        colour, at = anatomy.CATEGORIES.get(each["category"], plots.GREY), roof.point(each)
        rows.append([
            piece.name(f"{each['op']} {each['shapes']}", piece.bar(each["seconds"] / longest, colour)),
            piece.swatch(colour, each["category"]), piece.name(each["kernel"]),
            number(each["seconds"], milliseconds), number(each["calls"], "{:,.4g}".format),
            number(each["seconds"] / total, "{:.1%}".format), number(at.share if at else None, "{:.0%}".format),
        ])  # fmt: skip
    header = ["Op", "Kind", "Longest kernel", "Time a step", "Calls", "Share", "Of its limit"]
    foot = _folded(small, total, [words(""), words("")], [number(None, str)])
    return table(header, rows, sortable=True, foot=foot)


def _profiled(answer: Answer) -> Node:
    """Tabulate the profile's kernels where no step was observed; their FLOPs and bytes are unknown."""
    kernels = (anatomy.step_profile(answer) or {}).get("kernels", [])
    if not kernels:
        return None
    longest = max(each["share"] for each in kernels) or 1.0
    rows: list[list[Element]] = []
    small = [each for each in kernels if each["share"] < _FOLDED]
    for each in kernels:
        if each in small and len(small) > 1:
            continue
        colour, share = anatomy.CATEGORIES.get(each["category"], plots.GREY), each["share"]
        rows.append([
            piece.name(each["name"], piece.bar(share / longest, colour)), piece.swatch(colour, each["category"]),
            number(each["seconds"], milliseconds), number(each["calls"], "{:,.4g}".format),
            number(share, "{:.1%}".format),
        ])  # fmt: skip
    total = sum(each["seconds"] for each in kernels) / (sum(each["share"] for each in kernels) or 1.0) or 1.0
    return table(["Kernel", "Kind", "Time a step", "Calls", "Share"], rows, sortable=True,
                 foot=_folded(small, total, [words("")], []))  # fmt: skip


def _folded(
    small: Sequence[Mapping[str, Any]], total: float, before: Sequence[Element], after: Sequence[Element]
) -> list[Element]:
    """Fold rows that take too little time into one; a single one stays as it is."""
    if len(small) < 2:
        return []
    seconds, calls = (sum(each[name] for each in small) for name in ("seconds", "calls"))
    return [
        words(f"{len(small)} others, each below {_FOLDED:.1%}"), *before, number(seconds, milliseconds),
        number(calls, "{:,.4g}".format), number(seconds / total, "{:.1%}".format), *after,
    ]  # fmt: skip


def _bars(name: str, title: str, found: anatomy.Bars | str, form: Form, figures: dict[str, Any]) -> Node:
    """A figure of stacked bars, and the table of its parts, which is its legend too."""
    if isinstance(found, str):
        return sentence(found)
    rows = []
    for part, colour, values in found.parts:
        rows.append([piece.swatch(colour, part), *(number(value, form) for value in values), *_more(values, form)])
    sums = [sum(values[i] or 0.0 for _, _, values in found.parts) for i in range(len(found.names))]
    rows.append([words("together"), *(number(value, form) for value in sums), *_more(sums, form)])
    header = ["Part", *(each.capitalize() for each in found.names), *(["More"] if len(found.names) == 2 else [])]
    return [plot(name, title, found.figure, figures), table(header, rows, kind="parts")]


def bars_section(
    title: str, note: str, name: str, found: anatomy.Bars | str, form: Form, figures: dict[str, Any]
) -> Section:
    """A section of stacked bars and the table of their parts."""
    return section(title, note, _bars(name, title, found, form, figures))


def _more(values: Sequence[float | None], form: Form) -> list[Element]:
    if len(values) != 2:
        return []
    return [number((values[1] or 0.0) - (values[0] or 0.0), piece.signed(form))]


def _memory(answer: Answer, figures: dict[str, Any]) -> Section:
    note = (
        "The best run at its peak. Activations are all that is allocated and nobody else's: 16-bit copies of weights, "
        "logits and loss are among them. On a CPU all but weights, gradients and optimizer is the process's."
    )
    return bars_section("Memory", note, "memory", anatomy.memory(answer), size, figures)


def _time(answer: Answer, figures: dict[str, Any]) -> Section:
    found = answer.best.measurement if answer.best else None
    alone = f" On its own a step takes {milliseconds(found.seconds)}." if found and has_speed(answer.best) else ""
    note = f"One step of the best run; the measured one under the profiler, which costs the host a little.{alone}"
    rows = []
    for each in answer.best.differences if answer.best else []:
        form: Form = milliseconds if each.unit == "s" else size
        numbers = [number(each.predicted, form), number(each.measured, form)]
        rows.append([words(each.part), *numbers, *_more([each.predicted, each.measured], form), words(each.why)])
    why = table(["Difference", "Predicted", "Measured", "More", "Why"], rows, kind="why") if rows else None
    return section(
        "Where the time went",
        note,
        _bars("time", "Time by part", anatomy.time_parts(answer), milliseconds, figures),
        why,
    )


def _timeline(answer: Answer, figures: dict[str, Any]) -> Section:
    note = (
        "One step of the best run as it went: for each of 400 parts what took most of it. Below, the sums of kinds of "
        "work and of phases, which are in no order, and the longest gaps in which nothing ran."
    )
    gaps = (anatomy.step_profile(answer) or {}).get("longest_gaps", [])
    rows = [[number(gap["seconds"], milliseconds), piece.name(gap["before"]), piece.name(gap["after"])]
            for gap in gaps]  # fmt: skip
    listed = table(["Longest gaps", "After", "Before"], rows, kind="gaps") if rows else None
    return section("Timeline", note, plot("timeline", "Timeline", anatomy.timeline(answer), figures), listed)


def _forecast(answer: Answer, figures: dict[str, Any]) -> Section:
    title = "Predicted and measured"
    note = "Every trial that was predicted and measured. Above the line a step took longer than predicted."
    items = [tag("li", f"{count:,} left out by the plan: {why}") for why, count in answer.discarded.items()]
    return section(title, note, plot("forecast", title, plots.forecast(answer), figures),
                   tag("ul", items, class_="plain") if items else None)  # fmt: skip


def _proof(answer: Answer, figures: dict[str, Any]) -> Section:
    if answer.proof is None:
        why = "The best run has not been compared with the standard float32 model yet."
        if answer.best is not None and not answer.changes:
            why = "The answer is the baseline: there is nothing to compare with it."
        return section("Proof", None, sentence(why))
    note = (
        "The best run and the standard block in the same precision, both against the standard float32 model on the "
        "same batch; errors are root mean squares over that of the float32 values. Where a line has a gap it is 0. "
        "Outputs are those of the run's modules, eager: nobody can look inside a compiled or recorded graph. Gradients "
        "and losses are the run's own."
    )
    drawn = [
        tag("div", tag("h3", title), plot(name, title, figure, figures))
        for name, title, figure in (
            ("outputs", "Outputs", plots.layer_errors(answer, "output")),
            ("gradients", "Gradients", plots.layer_errors(answer, "gradient")),
            ("losses", "Loss", plots.losses(answer)),
        )
    ]
    said = [badge(answer, answer.proof.verdict), tag("p", answer.proof.why)]
    return section("Proof", note, said, tag("div", drawn, class_="side"))


def _quality(answer: Answer) -> Section:
    """What each format costs on a text, and the proof of the best run."""
    note = "Every format beside the model as it was saved, on the same text; what fell below the floor was not tried."
    quality, rows = answer.ceilings.get("quality"), []
    for lever, formats in (quality if isinstance(quality, Mapping) else {}).items():
        for name, found in (formats if isinstance(formats, Mapping) else {}).items():
            each = found if isinstance(found, Mapping) else {}
            values = (each.get(key) for key in ("quantized_perplexity", "divergence", "agreement"))
            forms: tuple[Form, ...] = ("{:.3f}".format, "{:.4f}".format, "{:.1%}".format)
            cells = [number(value if isinstance(value, int | float) else None, form)
                     for value, form in zip(values, forms, strict=True)]  # fmt: skip
            rows.append([words(f"{lever} {name}"), *cells, words(str(each.get("refused", "good enough")))])
    header = ["Format", "Perplexity", "Divergence", "Same first choice", "Outcome"]
    said = [badge(answer, answer.proof.verdict), tag("p", answer.proof.why)] if answer.proof is not None else []
    return section("Quality", note, table(header, rows) if rows else None, said)


def _drift(answer: Answer, figures: dict[str, Any]) -> Section:
    note = "The baseline, measured again and again between the others; their speeds are corrected by it."
    return section("Drift of the machine", note, plot("drift", "Drift", plots.drift(answer), figures))


def _trials(answer: Answer) -> Section:
    if not answer.records:
        return section("Trials", None, sentence("No trial has run yet."))
    rows = []
    for index, record in enumerate(answer.records, 1):
        found, expected = record.measurement if has_speed(record) else None, record.prediction
        mark, sure = " ★" if record == answer.best else "", "" if is_known(record) else "?"
        rows.append([
            number(index, str), words(label(changes(answer, record.point)) + mark),
            words(record.outcome, OUTCOMES.get(record.outcome, "")),
            number(record.tokens_per_second if found else None, f"{{:,.0f}}{sure}".format),
            number(ratio(answer, record), f"{{:.2f}}x{sure}".format), number(found.bytes if found else None, size),
            number(found.mfu if found else None, "{:.1%}".format),
            number(answer.loss_difference(record) if found else None, "{:.1e}".format),
            number(expected.seconds if expected else None, milliseconds),
            number(found.seconds if found else None, milliseconds),
            words(record.purpose + (", from the cache" if record.cached else "")), _error(record),
        ])  # fmt: skip
    header = [
        "#", "Levers", "Outcome", f"{answer.unit.capitalize()}/s", "Ratio", "Memory", "MFU", "Loss diff", "Predicted",
        "Measured", "Purpose",
        "Error",
    ]  # fmt: skip
    unknown = "" if all(map(is_known, answer.records)) else f" {UNKNOWN}"
    note = f"Shown are the levers that were changed; ★ is the best. A heading sorts. {answer.about_losses}{unknown}"
    return section("Trials", note, table(header, rows, sortable=True, kind="trials"))


def _error(record: Record) -> Element:
    error, log = clean(record.error or ""), clean(record.log).strip()[-_LOG:]
    whole = f"{error}\n\n{log}" if len(error) > _ERROR else log
    more = tag("details", tag("summary", "log"), tag("pre", whole)) if whole else None
    return tag("td", clean(error, _ERROR), more)


def _phases(answer: Answer) -> Section:
    """What the seconds of each trial, and of the proof, went into."""
    timed = [(label(changes(answer, each.point)), each.phases) for each in answer.records if each.phases]
    if answer.proof is not None and answer.proof.phases:
        timed.append(("the proof", answer.proof.phases))
    if not timed:
        return section("Time of the trials", None, sentence("Where the seconds of the trials went is not known."))
    names = list(answer.phases)
    rows = [
        [words(name), *(number(phases.get(each), "{:.1f} s".format) for each in names)]
        for name, phases in (*timed, ("together", answer.phases))
    ]
    note = "Seconds of each process, from its start to its end; start is all before it does anything."
    return section("Time of the trials", note, table(["Run", *names], rows))


def _machine(answer: Answer) -> Section:
    rows = [[words(name), words(value)] for name, value in _flat({**answer.machine, "measured": answer.ceilings})]
    found = table(["What", "Value"], rows, kind="machine") if rows else sentence("Nothing is known of the machine.")
    return section("Hardware and versions", "The machine that the trials ran on.", found)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield prefix + name, _quantity(prefix + name, value)
        elif value is not None:
            yield prefix + name, str(value)


def _quantity(name: str, value: float) -> str:
    if name.endswith("_bytes"):
        return size(value)
    if name.endswith("bytes_per_second"):
        return f"{size(value)}/s"
    if "flops." in name:
        return f"{value / 1e12:,.4g} TFLOP/s"
    return f"{value * 1e6:,.3g} µs" if name.endswith("_seconds") else f"{value:,.6g}"


def _best(answer: Answer) -> Section:
    if not answer.start:
        return section("Configuration", None, sentence("There is no configuration to show."))
    text = yaml.safe_dump(anatomy.configuration(answer), sort_keys=False, allow_unicode=True)
    whose = "The best run" if answer.recommended else "The fastest run, which is not recommended (see the proof)"
    if answer.best is None:
        whose = "The baseline, for no other can be recommended"
    ranks = f" --nproc {answer.ranks}" if answer.ranks > 1 else ""
    note = [f"{whose}, as ", tag("code", f"tilewright train{ranks}"), " takes it."]
    if answer.generates:
        note = [f"{whose}: ", tag("code", answer.ready)]
    if answer.own_model:
        note = [f"{whose}: its levers, to set in your own training of ", tag("code", answer.own_model), "."]
        pasted = "\n".join(answer.own_lines)
        note.append(tag("pre", pasted) if pasted else "")
    return section("Configuration", note, tag("button", "Copy", type="button", id="copy"), tag("pre", text, id="yaml"))
