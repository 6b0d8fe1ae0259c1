"""The head of a report: the answer in a few words, and what the study was of."""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping

from tilewright.measure.markup import Element, tag
from tilewright.tune.report import html as piece
from tilewright.tune.report.answer import UNSTEADY, Answer
from tilewright.tune.report.html import sentence
from tilewright.tune.report.plots import has_speed
from tilewright.tune.report.sentences import alone
from tilewright.tune.store.record import Record


def ratio(answer: Answer, record: Record | None) -> float | None:
    """Speed of a run over that of the baseline."""
    if record is None or answer.reference is None or not (has_speed(record) and has_speed(answer.reference)):
        return None
    return (record.tokens_per_second or 0.0) / (answer.reference.tokens_per_second or math.inf)


def verdict(answer: Answer) -> str:
    """The answer in a few words."""
    if answer.best is None:
        return "no run to recommend"
    if not answer.changes and answer.recommended:
        return "nothing to change yet" if alone(answer) else "nothing to change"
    times = ratio(answer, answer.best)
    speed = f"{times:.2f} times as fast, " if times is not None else ""
    if speed and (answer.drift or 0.0) > UNSTEADY:
        speed = "speed not certain, "
    return speed + (answer.proof.verdict if answer.proof else "not proven yet")


def facts(answer: Answer) -> dict[str, str]:
    """What a study is of, in a few words each; without what is not known."""
    gpu, found = answer.machine.get("gpu") or {}, answer.machine
    host = answer.ceilings.get("host") or {}
    outcomes = collections.Counter(record.outcome for record in answer.records)
    ranks = f"{answer.ranks} ranks on " if answer.ranks > 1 else ""
    interrupted = ", interrupted" if answer.interrupted else ""
    time = f"{piece.clock(answer.elapsed)} of {piece.clock(answer.budget)}{interrupted}" if answer.budget else ""
    listed = {
        "Model": _model(answer),
        "Batch": _batch(answer),
        "Beside torch.compile": _beside_compile(answer),
        "Machine": f"{ranks}{gpu.get('name') or host.get('cpu') or 'CPU'}",
        "Versions": ", ".join(f"{name} {found[name]}" for name in ("tilewright", "torch", "triton") if found.get(name)),
        "Date": str(found.get("date", ""))[:16].replace("T", " "),
        "Time": time,
        "Trials": ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common()) or "none",
    }
    return {name: str(value) for name, value in listed.items() if value}


def _model(answer: Answer) -> str:
    model = answer.start.get("model")
    if answer.generates:
        return f"{model}, for {answer.start['aim']}, {answer.start.get('unit')}"
    if answer.own_model:
        return f"{answer.own_model}, a model of your own"
    if not isinstance(model, Mapping):
        return ""
    found = {name: value for name, value in model.items() if isinstance(value, int) and not isinstance(value, bool)}
    shape = [f"{found['layers']:,} layers"] if "layers" in found else []
    shape += [f"{word} {found[name]:,}" for name, word in (("width", "width"), ("vocabulary", "vocabulary"))
              if name in found]  # fmt: skip
    return f"GPT {model.get('preset') or ''}".strip() + (f": {', '.join(shape)}" if shape else "")


def _batch(answer: Answer) -> str:
    if answer.generates:
        return f"prompts of {answer.start.get('prompt')} tokens, {answer.start.get('tokens')} behind each"
    rows, model = answer.start.get("global_batch"), answer.start.get("model")
    if not isinstance(rows, int) or not rows:
        return ""
    if answer.own_model:
        return f"{rows:,} rows"
    length = model.get("sequence") if isinstance(model, Mapping) else None
    tokens = f", {rows * length:,} tokens a step" if isinstance(length, int) else ""
    return f"{rows:,} sequences" + (f" of {length:,} tokens{tokens}" if isinstance(length, int) else "")


def _beside_compile(answer: Answer) -> str:
    """How the best run compares with the baseline under torch.compile."""
    if answer.best is None or answer.generates:
        return ""
    compiled = answer.compiled
    times, plain = ratio(answer, answer.best), ratio(answer, compiled)
    if compiled is None or times is None or not plain:
        return "not measured"
    mode = compiled.point.get("compile", answer.start.get("compile"))
    if compiled.point == answer.best.point:
        return f"is the best run ({mode})"
    return f"{times / plain:.2f} times as fast as the baseline compiled ({mode})"


def head(answer: Answer) -> Element:
    """The header of a page: the answer in a few sentences, and what the study was of."""
    said = [tag("p", each) for each in answer.sentences]
    items = [tag("div", tag("dt", name), tag("dd", value)) for name, value in facts(answer).items()]
    return tag(
        "header",
        tag("h1", answer.name),
        badge(answer, verdict(answer)),
        tag("div", said or sentence("The study has not come to an answer yet."), class_="sentences"),
        tag("dl", items, class_="facts"),
    )


def badge(answer: Answer, text: str) -> Element:
    """A few words in the colour of what they say."""
    return tag("p", text, class_="verdict" if answer.recommended else "verdict bad")
