"""The report of a quantized folder: what the model has lost, and each matmul's errors along its depth."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tilewright.measure.markup import tag
from tilewright.quantize.quality import Quality
from tilewright.quantize.report import Layer, Report, size
from tilewright.tune.report import html as piece
from tilewright.tune.report.html import Section, number, plot, section, sentence, table, words
from tilewright.tune.report.plots import COLOURS, LOSS, Drawn, axis, dots, figure, logarithmic

_DEPTH = re.compile(r".*?\.(\d+)\.")


@dataclass(frozen=True)
class Kind:
    """The matmuls of one name in all blocks, with the depth of each."""

    name: str
    layers: Sequence[tuple[int, Layer]]

    def worst(self) -> tuple[int, Layer]:
        """The one that errs most, on outputs where these are known."""
        return max(self.layers, key=lambda each: error_of(each[1]))


def error_of(layer: Layer) -> float:
    """The error that decides about a layer; 0 where it was never tried."""
    return (layer.weight_error if layer.output_error is None else layer.output_error) or 0.0


def kinds(report: Report) -> list[Kind]:
    """The matmuls by name; what is in no block comes behind the last one.

    >>> found = kinds(Report("int8", 2, 1, [Layer("h.0.up", 1, 1, 2, 1), Layer("h.1.up", 1, 1, 2, 1)]))
    >>> [(kind.name, len(kind.layers)) for kind in found]
    [('up', 2)]
    """
    depths = [_DEPTH.match(layer.name) for layer in report.layers]
    behind = 1 + max((int(depth[1]) for depth in depths if depth), default=-1)
    groups: dict[str, list[tuple[int, Layer]]] = {}
    for depth, layer in zip(depths, report.layers, strict=True):
        name = layer.name[depth.end() :] if depth else layer.name
        groups.setdefault(name, []).append((int(depth[1]) if depth else behind, layer))
    return [Kind(name, layers) for name, layers in groups.items()]


def quality_rows(quality: Quality) -> list[list[str]]:
    """What of a model has changed, for a table of three columns."""
    change = quality.quantized_perplexity / quality.perplexity - 1
    return [
        ["perplexity", f"{quality.perplexity:,.3f}", f"{quality.quantized_perplexity:,.3f} ({change:+.2%})"],
        ["divergence, nats a token", "0", f"{quality.divergence:.5f} (at most {quality.largest_divergence:.5f})"],
        ["same first choice", "100%", f"{quality.agreement:.2%}"],
    ]


def page(title: str, described: str, report: Report, quality: Quality | None, text: str) -> str:
    """The report as HTML that needs no other file.

    Args:
        title: the folder.
        described: how it was quantized.
        report, quality: what `quantize_folder` returns.
        text: what the quality was measured on.
    """
    figures: dict[str, Any] = {}
    share = report.bytes_after / max(1, report.bytes_before)
    facts = {
        "Format": described, "Weights": f"{size(report.bytes_before)} to {size(report.bytes_after)}, {share:.0%}",
        "Matmuls": f"{len(report.quantized)} quantized, {len(report.left_out)} left out",
    }  # fmt: skip
    verdict = ""
    if quality is not None:
        facts["Text"] = f"{quality.tokens:,} tokens of {text}"
        verdict = f"Perplexity {quality.quantized_perplexity / quality.perplexity - 1:+.2%}, " + (
            f"divergence {quality.divergence:.4f} nats, same first choice {quality.agreement:.1%}"
        )
    header = tag(
        "header", tag("h1", title), tag("p", verdict, class_="verdict") if verdict else None,
        tag("dl", [tag("div", tag("dt", name), tag("dd", value)) for name, value in facts.items()], class_="facts"),
    )  # fmt: skip
    sections = [*_quality(quality), *_errors(report, figures), _left_out(report), _layers(report), *_notes(report)]
    return piece.whole_page(f"{title}: {described}", header, sections, figures)


def _quality(quality: Quality | None) -> list[Section]:
    if quality is None:
        return []
    note = (
        "Both models read the same text. The divergence (Kullback-Leibler) is that of the quantized model's "
        "probabilities from the model's, a token: each error adds to it, while errors can lower a perplexity by chance."
    )
    cells = [[words(each) for each in row] for row in quality_rows(quality)]
    return [section("Quality", note, table(["", "the model", "quantized"], cells))]


def _errors(report: Report, figures: dict[str, Any]) -> list[Section]:
    outputs = "||y - y'|| / ||y|| over inputs that the layer gets from a text, where earlier layers are quantized."
    weights = "||W - W'|| / ||W||. Calibration lets it grow where inputs are small, for less error of the outputs."
    found = []
    for which, title, note in (("output", "Error of outputs", outputs), ("weight", "Error of weights", weights)):
        drawn = errors(report, f"{which}_error")
        found.append(section(title, note, plot(f"errors-{which}", title, drawn, figures)))
    return found


def errors(report: Report, which: str) -> Drawn:
    """The errors along the depth, a line a matmul; those that were left out are crosses."""
    groups = [(kind, [(at, layer) for at, layer in kind.layers if getattr(layer, which)]) for kind in kinds(report)]
    values = [getattr(layer, which) for _, layers in groups for _, layer in layers]
    if not values:
        return "There was no text to measure it on." if which == "output_error" else "No matmul was tried."
    traces, legend = [], []
    for number_, (kind, layers) in enumerate(groups):
        if not layers:
            continue
        colour = COLOURS[number_ % len(COLOURS)]
        texts = [
            f"{layer.name}: {getattr(layer, which):.3%}{', left out' if layer.left_out else ''}" for _, layer in layers
        ]
        marker = {
            "size": 8, "color": [LOSS if layer.left_out else colour for _, layer in layers],
            "symbol": ["x" if layer.left_out else "circle" for _, layer in layers],
        }  # fmt: skip
        depths, heights = [at for at, _ in layers], [100 * getattr(layer, which) for _, layer in layers]
        traces.append(dots(
            depths, heights, texts, mode="lines+markers", line={"color": colour, "width": 1.5}, marker=marker,
        ))  # fmt: skip
        legend.append(("●", colour, kind.name))
    if any(layer.left_out for _, layers in groups for _, layer in layers):
        legend.append(("\N{MULTIPLICATION SIGN}", LOSS, "left out"))
    deepest = max(at for _, layers in groups for at, _ in layers)
    x = axis("block, and the head behind the last", tickmode="linear", tick0=0, dtick=max(1, deepest // 8))
    y = axis("error, %", **logarithmic(min(values) * 100 / 1.3, max(values) * 100 * 1.3))
    return figure(traces, 340, x, y, legend)


def _left_out(report: Report) -> Section:
    note = "Matmuls that stay as they were."
    if not report.left_out:
        return section("Left out", note, sentence("None."))
    rows = [[words(layer.name), words(layer.left_out)] for layer in report.left_out]
    return section("Left out", note, table(["matmul", "why"], rows))


def _layers(report: Report) -> Section:
    rows = [
        [
            words(layer.name), words(f"{layer.outputs} x {layer.inputs}"), number(layer.bytes_before, size),
            number(layer.bytes_after, size), number(layer.weight_error, "{:.2%}".format),
            number(layer.output_error, "{:.3%}".format),
        ]
        for layer in report.layers
    ]  # fmt: skip
    header = ["matmul", "size", "before", "after", "weight error", "output error"]
    return section("All matmuls", "A press on a column's name sorts by it.", table(header, rows, sortable=True))


def _notes(report: Report) -> list[Section]:
    return [section("Notes", None, tag("ul", [tag("li", note) for note in report.notes]))] if report.notes else []
