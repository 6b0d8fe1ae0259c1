"""The report of a study: one HTML file that needs no network, no server and no other file.

What comes from a study may hold anything, a user's paths or a library's error messages: all of it is escaped, and the
page's own policy lets nothing run but the two scripts whose hashes it names, and nothing be fetched.
"""

from __future__ import annotations

import base64
import collections
import hashlib
import html
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tilewright.measure.results import write_text
from tilewright.tune import report_anatomy as anatomy
from tilewright.tune import report_plots as plots
from tilewright.tune.answer import UNSTEADY, Answer, alone
from tilewright.tune.choose import UNKNOWN, is_known
from tilewright.tune.record import OUTCOMES, Record
from tilewright.tune.report_plots import Drawn, changes, clean, has_speed, milliseconds, size
from tilewright.tune.report_style import CSS, JAVASCRIPT
from tilewright.tune.space import label

Form = Callable[[float], str]
_NAME = 90  # characters of a kernel's name
_ERROR = 240  # characters of an error in the table; the whole is in its log
_LOG = 8000  # characters of a trial's log that are shown, the last ones


def write_report(answer: Answer, path: Path) -> None:
    """Write the page whole or not at all."""
    write_text(path, page(answer))


def page(answer: Answer) -> str:
    """The report as HTML.

    >>> empty = Answer("no trial yet", {}, {}, {}, {}, [], None, None)
    >>> "No trial was measured" in page(empty)
    True
    """
    from plotly.offline import get_plotlyjs

    figures: dict[str, Any] = {}
    body = "\n".join([
        _head(answer), _rehearsal(answer), _waterfall(answer, figures), _tradeoff(answer, figures),
        _kernels(answer, figures),
        _memory(answer, figures), _time(answer, figures), _timeline(answer, figures), _forecast(answer, figures),
        _proof(answer, figures), _drift(answer, figures), _trials(answer), _phases(answer), _machine(answer),
        _best(answer),
    ])  # fmt: skip
    library, script = (text.replace("\r\n", "\n") for text in (get_plotlyjs(), JAVASCRIPT))
    policy = (
        f"default-src 'none'; script-src '{_hash(library)}' '{_hash(script)}'; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    # As escapes of JSON, so that no text in it can end the script or begin a comment.
    data = json.dumps(_finite(figures), allow_nan=False).replace("<", "\\u003c")
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{html.escape(policy, quote=True)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{_escape(answer.name)}: {_escape(_verdict(answer))}</title>
<style>{CSS}</style></head><body>
{body}
<script type="application/json" id="figures">{data}</script>
<script>{library}</script>
<script>{script}</script>
</body></html>
"""


def _escape(value: Any) -> str:
    return html.escape(clean(value))


def _hash(script: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _finite(value: Any) -> Any:
    """The same tree, with null for what JSON has no number for."""
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# Pieces of HTML


def _section(title: str, note: str, *content: str) -> str:
    return f"<section><h2>{title}</h2><p class=note>{note}</p>{''.join(content)}</section>"


def _plot(name: str, title: str, drawn: Drawn, figures: dict[str, Any]) -> str:
    """A place for a figure and its legend, or the sentence in its stead."""
    if isinstance(drawn, str):
        return _none(drawn)
    figures[name] = {"data": drawn.data, "layout": drawn.layout}
    items = "".join(f"<li>{_mark(mark, colour)}{_escape(words)}</li>" for mark, colour, words in drawn.legend)
    style = f"height:{drawn.layout['height']}px"
    legend = f"<ul class=legend>{items}</ul>" if items else ""
    place = f'<div class=plot id={name} role=img aria-label="{title}" style="{style}"></div>'
    return f"<figure>{place}{legend}</figure>"


def _mark(mark: str, colour: str) -> str:
    line = {"solid": "solid", "dash": "dashed", "dot": "dotted"}.get(mark)
    return (
        f'<i class=line style="border-top:2px {line} {colour}"></i>'
        if line
        else f'<i style="color:{colour}">{mark}</i>'
    )


def _none(sentence: str) -> str:
    return f"<p class=none>{_escape(sentence)}</p>"


def _words(value: Any) -> str:
    return f"<td>{_escape(value)}</td>"


def _name(value: str, more: str = "") -> str:
    """A cell with the name of a kernel, which can go on for pages."""
    return f'<td class=name title="{_escape(value)}">{_escape(clean(value, _NAME))}{more}</td>'


def _number(value: float | None, form: Form) -> str:
    """A cell that shows a value in some form, and sorts by it."""
    if value is None or not math.isfinite(value):
        return "<td class=number></td>"
    return f'<td class=number data-value="{value!r}">{_escape(form(value))}</td>'


def _swatch(colour: str, words: str) -> str:
    return f"<td class=swatch>{_mark('■', colour)}&nbsp;{_escape(words)}</td>"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], *, sortable: bool = False, kind: str = "") -> str:
    """Rows of cells that are HTML already."""
    cells = (f"<button type=button>{each}</button>" if sortable else each for each in header)
    kinds = (" class=number" if cell.startswith("<td class=number") else "" for cell in rows[0])
    head = "".join(f"<th scope=col{each}>{cell}</th>" for each, cell in zip(kinds, cells, strict=True))
    lines = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    classes = f"{kind} sortable" if sortable else kind
    return (
        f'<div class=wide tabindex=0><table class="{classes}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{lines}</tbody></table></div>"
    )


def _bars(name: str, title: str, found: anatomy.Bars | str, form: Form, figures: dict[str, Any]) -> str:
    """A figure of stacked bars, and the table of its parts, which is its legend too."""
    if isinstance(found, str):
        return _none(found)
    rows = []
    for part, colour, values in found.parts:
        rows.append([_swatch(colour, part), *(_number(value, form) for value in values), *_more(values, form)])
    sums = [sum(values[i] or 0.0 for _, _, values in found.parts) for i in range(len(found.names))]
    rows.append([_words("together"), *(_number(value, form) for value in sums), *_more(sums, form)])
    header = ["Part", *(each.capitalize() for each in found.names), *(["More"] if len(found.names) == 2 else [])]
    return _plot(name, title, found.figure, figures) + _table(header, rows, kind="parts")


def _more(values: Sequence[float | None], form: Form) -> list[str]:
    if len(values) != 2:
        return []
    more = (values[1] or 0.0) - (values[0] or 0.0)
    return [_number(more, lambda value: form(value) if form(value).startswith(("-", "0 ")) else f"+{form(value)}")]


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes and rest else f"{minutes} min" if minutes else f"{seconds:.3g} s"


# The sections


def _ratio(answer: Answer, record: Record | None) -> float | None:
    if record is None or answer.reference is None or not (has_speed(record) and has_speed(answer.reference)):
        return None
    return (record.tokens_per_second or 0.0) / (answer.reference.tokens_per_second or math.inf)


def _verdict(answer: Answer) -> str:
    if answer.best is None:
        return "no run to recommend"
    if not answer.changes and answer.recommended:
        return "nothing to change yet" if alone(answer) else "nothing to change"
    ratio = _ratio(answer, answer.best)
    speed = f"{ratio:.2f} times as fast, " if ratio is not None else ""
    if speed and (answer.drift or 0.0) > UNSTEADY:
        speed = "speed not certain, "
    return speed + (answer.proof.verdict if answer.proof else "not proven yet")


def _head(answer: Answer) -> str:
    bad = "" if answer.recommended else " bad"
    sentences = "".join(f"<p>{_escape(each)}</p>" for each in answer.sentences)
    gpu, found = answer.machine.get("gpu") or {}, answer.machine
    host = answer.ceilings.get("host") or {}
    outcomes = collections.Counter(record.outcome for record in answer.records)
    interrupted = ", interrupted" if answer.interrupted else ""
    facts = {
        "Machine": gpu.get("name") or host.get("cpu") or "CPU",
        "Versions": ", ".join(f"{name} {found[name]}" for name in ("tilewright", "torch", "triton") if found.get(name)),
        "Date": str(found.get("date", ""))[:16].replace("T", " "),
        "Time": f"{_clock(answer.elapsed)} of {_clock(answer.budget)}{interrupted}" if answer.budget else "",
        "Trials": ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common()) or "none",
    }
    items = "".join(f"<div><dt>{name}</dt><dd>{_escape(value)}</dd></div>" for name, value in facts.items() if value)
    return (
        f"<header><h1>{_escape(answer.name)}</h1><p class='verdict{bad}'>{_escape(_verdict(answer))}"
        f"</p><div class=sentences>{sentences or _none('The study has not come to an answer yet.')}</div>"
        f"<dl class=facts>{items}</dl></header>"
    )


def _rehearsal(answer: Answer) -> str:
    """Of a study without a GPU: that it is none of a GPU, and what the plan predicts for one."""
    if not answer.is_rehearsal:
        return ""
    note = (
        "It ran without a GPU: its speeds are a CPU's, where fused ops run as plain PyTorch, and say nothing of a GPU."
    )
    rows = [
        [
            _words(row["model"]), _words(row["run"]), _number(row["tokens_per_second"], "{:,.0f}".format),
            _number(row["ratio"], "{:.2f}x".format), _number(row["seconds"], milliseconds), _number(row["bytes"], size),
        ]
        for row in answer.on_gpu.get("rows", ())
    ]  # fmt: skip
    if not rows:
        return _section("A rehearsal", note)
    source = f"<p>Predicted by the plan for one {_escape(answer.on_gpu['gpu'])}, not measured:</p>"
    header = ["Model", "Run", "Tokens/s", "Ratio", "Step", "Memory"]
    rates = f"<p class=note>By {_escape(answer.on_gpu['rates'])}.</p>"
    return _section("A rehearsal", note, source, _table(header, rows), rates)


def _waterfall(answer: Answer, figures: dict[str, Any]) -> str:
    missing = [f"Without {label({each.lever: each.value})} it did not run: {each.error or 'no reason is known'}"
               for each in answer.ablations if each.tokens_per_second is None]  # fmt: skip
    note = (
        "What the best run loses when one lever alone is put back. “Together” is what the levers give, or take, beyond "
        "the sum of that, so the bars add up from the run as given to the best."
    )
    drawn = plots.waterfall(answer)
    return _section(
        "What each lever gives", note, _plot("waterfall", "Waterfall", drawn, figures), *map(_none, missing)
    )


def _tradeoff(answer: Answer, figures: dict[str, Any]) -> str:
    note = "Every trial that was measured, its speed corrected for the drift of the machine."
    drawn = plots.tradeoff(answer)
    return _section("Throughput against memory", note, _plot("tradeoff", "Throughput against memory", drawn, figures))


def _kernels(answer: Answer, figures: dict[str, Any]) -> str:
    note = (
        "One step of the best run, observed op by op: the FLOPs and bytes that each cannot avoid, its inputs read once "
        "and its results written once, over the time of its kernels, under the ceilings measured on this machine. An "
        "op that multiplies no matrices counts one FLOP an element. What lies in a cache can pass the memory's limit; "
        "what takes next to no time is at the lower edge."
    )
    drawn = anatomy.roofline(answer)
    table = _observed(answer) if answer.work else _profiled(answer)
    doubt = anatomy.doubted_ceilings(answer)
    parts = ([_none(doubt)] if doubt else []) + [_plot("roofline", "Roofline", drawn, figures), table]
    return _section("Kernels and their limit", note, *parts)


def _observed(answer: Answer) -> str:
    """Every kind of work of the step that was observed."""
    found = answer.best.measurement if answer.best else None
    step = found.seconds if found and has_speed(answer.best) else 0.0
    total = max(step, sum(each["seconds"] for each in answer.work)) or 1.0  # what a compiler has on a CPU is not seen
    longest = max(each["seconds"] for each in answer.work) or 1.0
    rows = []
    for each in answer.work:
        colour, at = anatomy.CATEGORIES.get(each["category"], plots.GREY), anatomy.point(answer, each)
        bar = f"<i class=bar style='width:{max(0.5, 100 * each['seconds'] / longest):.1f}%;background:{colour}'></i>"
        rows.append([
            _name(f"{each['op']} {each['shapes']}", bar), _swatch(colour, each["category"]), _name(each["kernel"]),
            _number(each["seconds"], milliseconds), _number(each["calls"], "{:,.4g}".format),
            _number(each["seconds"] / total, "{:.1%}".format), _number(at.share if at else None, "{:.0%}".format),
        ])  # fmt: skip
    header = ["Op", "Kind", "Longest kernel", "Time a step", "Calls", "Share", "Of its limit"]
    return _table(header, rows, sortable=True)


def _profiled(answer: Answer) -> str:
    """Where no step was observed: every kernel of the profile, of which nobody knows what it had to do."""
    kernels = (anatomy.step_profile(answer) or {}).get("kernels", [])
    longest = max((each["share"] for each in kernels), default=0.0) or 1.0
    rows = []
    for each in kernels:
        colour, share = anatomy.CATEGORIES.get(each["category"], plots.GREY), each["share"]
        bar = f"<i class=bar style='width:{max(0.5, 100 * share / longest):.1f}%;background:{colour}'></i>"
        rows.append([
            _name(each["name"], bar), _swatch(colour, each["category"]),
            _number(each["seconds"], milliseconds), _number(each["calls"], "{:,.4g}".format),
            _number(share, "{:.1%}".format),
        ])  # fmt: skip
    header = ["Kernel", "Kind", "Time a step", "Calls", "Share"]
    return _table(header, rows, sortable=True) if rows else ""


def _memory(answer: Answer, figures: dict[str, Any]) -> str:
    note = (
        "The best run at its peak. Activations are all that is allocated and nobody else's: 16-bit copies of weights, "
        "logits and loss are among them. On a CPU all but weights, gradients and optimizer is the process's."
    )
    return _section("Memory", note, _bars("memory", "Memory by part", anatomy.memory(answer), size, figures))


def _time(answer: Answer, figures: dict[str, Any]) -> str:
    found = answer.best.measurement if answer.best else None
    alone = f" On its own a step takes {milliseconds(found.seconds)}." if found and has_speed(answer.best) else ""
    note = f"One step of the best run; the measured one under the profiler, which costs the host a little.{alone}"
    rows = []
    for each in answer.best.differences if answer.best else []:
        form: Form = milliseconds if each.unit == "s" else size
        numbers = [
            _number(each.predicted, form),
            _number(each.measured, form),
            *_more([each.predicted, each.measured], form),
        ]
        rows.append([_words(each.part), *numbers, _words(each.why)])
    why = _table(["Difference", "Predicted", "Measured", "More", "Why"], rows, kind="why") if rows else ""
    bars = _bars("time", "Time by part", anatomy.time_parts(answer), milliseconds, figures)
    return _section("Where the time went", note, bars, why)


def _timeline(answer: Answer, figures: dict[str, Any]) -> str:
    note = (
        "One step of the best run as it went: for each of 400 parts what took most of it. Below, the sums of kinds of "
        "work and of phases, which are in no order, and the longest gaps in which nothing ran."
    )
    gaps = (anatomy.step_profile(answer) or {}).get("longest_gaps", [])
    rows = [[_number(gap["seconds"], milliseconds), _name(gap["before"]), _name(gap["after"])]
            for gap in gaps]  # fmt: skip
    table = _table(["Longest gaps", "After", "Before"], rows, kind="gaps") if rows else ""
    return _section("Timeline", note, _plot("timeline", "Timeline", anatomy.timeline(answer), figures), table)


def _forecast(answer: Answer, figures: dict[str, Any]) -> str:
    note = "Every trial that was predicted and measured. Above the line a step took longer than predicted."
    left_out = "".join(
        f"<li>{count:,} left out by the plan: {_escape(why)}</li>" for why, count in answer.discarded.items()
    )
    listed = f"<ul class=plain>{left_out}</ul>" if left_out else ""
    drawn = plots.forecast(answer)
    return _section("Predicted and measured", note, _plot("forecast", "Predicted and measured", drawn, figures), listed)


def _proof(answer: Answer, figures: dict[str, Any]) -> str:
    if answer.proof is None:
        why = "The best run has not been compared with the standard float32 model yet."
        if answer.best is not None and not answer.changes:
            why = "The answer is the run as given: there is nothing to compare with it."
        return _section("Proof", "", _none(why))
    bad = "" if answer.recommended else " bad"
    said = f"<p class='verdict{bad}'>{_escape(answer.proof.verdict)}</p><p>{_escape(answer.proof.why)}</p>"
    note = (
        "The best run and the standard block in the same precision, both against the standard float32 model on the "
        "same batch; errors are root mean squares over that of the float32 values. Where a line has a gap it is 0. "
        "Outputs are those of the run's modules, eager: nobody can look inside a compiled or recorded graph. Gradients "
        "and losses are the run's own."
    )
    drawn = [
        f"<div><h3>{title}</h3>{_plot(name, title, figure, figures)}</div>"
        for name, title, figure in (
            ("outputs", "Outputs", plots.layer_errors(answer, "output")),
            ("gradients", "Gradients", plots.layer_errors(answer, "gradient")),
            ("losses", "Loss", plots.losses(answer)),
        )
    ]
    return _section("Proof", note, said, f"<div class=side>{''.join(drawn)}</div>")


def _drift(answer: Answer, figures: dict[str, Any]) -> str:
    note = "The run as given, measured again and again between the others; their speeds are corrected by it."
    return _section("Drift of the machine", note, _plot("drift", "Drift", plots.drift(answer), figures))


def _trials(answer: Answer) -> str:
    if not answer.records:
        return _section("Trials", "", _none("No trial has run yet."))
    rows = []
    for index, record in enumerate(answer.records, 1):
        found, expected = record.measurement if has_speed(record) else None, record.prediction
        mark, sure = " ★" if record == answer.best else "", "" if is_known(record) else "?"
        rows.append([
            _number(index, str), _words(label(changes(answer, record.point)) + mark),
            f'<td title="{_escape(OUTCOMES.get(record.outcome, ""))}">{_escape(record.outcome)}</td>',
            _number(record.tokens_per_second if found else None, f"{{:,.0f}}{sure}".format),
            _number(_ratio(answer, record), f"{{:.2f}}x{sure}".format), _number(found.bytes if found else None, size),
            _number(found.mfu if found else None, "{:.1%}".format),
            _number(answer.loss_difference(record) if found else None, "{:.1e}".format),
            _number(expected.seconds if expected else None, milliseconds),
            _number(found.seconds if found else None, milliseconds),
            _words(record.purpose + (", from the cache" if record.cached else "")), _error(record),
        ])  # fmt: skip
    header = [
        "#", "Levers", "Outcome", f"{answer.unit.capitalize()}/s", "Ratio", "Memory", "MFU", "Loss diff", "Predicted",
        "Measured", "Purpose",
        "Error",
    ]  # fmt: skip
    unknown = "" if all(map(is_known, answer.records)) else f" {UNKNOWN}"
    note = f"Levers are those that are not as given; ★ is the best. A heading sorts. {answer.about_losses}{unknown}"
    return _section("Trials", note, _table(header, rows, sortable=True, kind="trials"))


def _error(record: Record) -> str:
    error, log = clean(record.error or ""), clean(record.log).strip()[-_LOG:]
    whole = f"{error}\n\n{log}" if len(error) > _ERROR else log
    more = f"<details><summary>log</summary><pre>{html.escape(whole)}</pre></details>" if whole else ""
    return f"<td>{_escape(clean(error, _ERROR))}{more}</td>"


def _phases(answer: Answer) -> str:
    """What the seconds of each trial, and of the proof, went into."""
    timed = [(label(changes(answer, each.point)), each.phases) for each in answer.records if each.phases]
    if answer.proof is not None and answer.proof.phases:
        timed.append(("the proof", answer.proof.phases))
    if not timed:
        return _section("Time of the trials", "", _none("Where the seconds of the trials went is not known."))
    names = list(answer.phases)
    rows = [
        [_words(name), *(_number(phases.get(each), "{:.1f} s".format) for each in names)]
        for name, phases in (*timed, ("together", answer.phases))
    ]
    note = "Seconds of each process, from its start to its end; start is all before it does anything."
    return _section("Time of the trials", note, _table(["Run", *map(_escape, names)], rows))


def _machine(answer: Answer) -> str:
    rows = [[_words(name), _words(value)] for name, value in _flat({**answer.machine, "measured": answer.ceilings})]
    content = _table(["What", "Value"], rows, kind="machine") if rows else _none("Nothing is known of the machine.")
    return _section("Hardware and versions", "The machine that the trials ran on.", content)


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


def _best(answer: Answer) -> str:
    if not answer.start:
        return _section("Configuration", "", _none("There is no configuration to show."))
    text = yaml.safe_dump(anatomy.configuration(answer), sort_keys=False, allow_unicode=True)
    whose = "The best run" if answer.recommended else "The fastest run, which is not recommended (see the proof)"
    if answer.best is None:
        whose = "The run as given, for no other can be recommended"
    note = f"{whose}, as <code>tilewright train</code> takes it."
    if answer.own_model:
        note = f"{whose}: its levers, to set in your own training of <code>{_escape(answer.own_model)}</code>."
    return _section(
        "Configuration", note, f"<button type=button id=copy>Copy</button><pre id=yaml>{_escape(text)}</pre>"
    )
