"""What a study says in the end, in three plain sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilewright.tune.report.answer import UNSTEADY, Answer
from tilewright.tune.search.choose import confirmed
from tilewright.tune.store.record import first_step


def sentences(answer: Answer) -> list[str]:
    """What to change, what it gives, what it costs: three sentences in plain words."""
    if answer.best is None or answer.best.measurement is None:
        if any(record.measurement for record in answer.records):
            why = "Every run that was measured takes more memory than it may, or was found wrong."
            return [
                "There is nothing to recommend.",
                why,
                "Allow more with --memory, or open other levers with --search.",
            ]
        failed = [record for record in answer.records if record.error]
        first = f"The first that failed said: {failed[0].error}" if failed else "None was tried in the time there was."
        todo = "Put that right and run again."
        if not failed or failed[0].outcome in ("out of memory", "timed out", "hung"):
            todo = "Give more time with --budget, or a smaller model or batch, and run again."
        return ["No run was measured to its end, so there is nothing to recommend.", first, todo]
    return [_what(answer), _gives(answer), _costs(answer)]


def _what(answer: Answer) -> str:
    assert answer.best is not None
    if answer.proof is not None and not answer.recommended:
        why = answer.proof.why.rstrip(".")
        return f"Change nothing yet: the fastest run was not shown to be the same model ({why})."
    if not answer.changes:
        if why := alone(answer):
            return f"Change nothing yet: only the baseline was measured; {why}."
        return (
            "Change nothing: of all that ran and was not found wrong, no run is faster than the baseline by more "
            "than the noise of measuring."
        )
    what = listed(f"{name} to {_word(value)}" for name, value in answer.changes.items())
    if answer.generates:
        return f"Set {what}: {answer.ready}"
    return f"Set {what}, as best.yaml does." if not answer.own_model else f"Set {what} in your own training."


def alone(answer: Answer) -> str:
    """Say why only the best run was measured; empty where others were."""
    others = [record for record in answer.records if answer.best is not None and record.point != answer.best.point]
    if any(record.measurement for record in others):
        return ""
    failed = next((record.error for record in others if record.error), None)
    if failed and all(record.outcome == "timed out" for record in others):
        return "no other run ended in the time it had; give more --budget, and --resume goes on"
    if failed:
        return f"all others failed, the first of them so: {failed.rstrip('.')}"
    if answer.interrupted or answer.elapsed >= answer.budget or not answer.discarded:
        return "there was no time for others, and --resume goes on"
    return (
        "of the others none can fit or be faster by the plan, or none fitted into the time that was left, and --resume "
        "with more --budget goes on"
    )


def _gives(answer: Answer) -> str:
    assert answer.best is not None
    does, form = ("generates", ",.4g") if answer.generates else ("trains", ",.0f")
    speed = f"{answer.best.tokens_per_second:{form}} {answer.unit} a second"
    if answer.generates and answer.best.tokens_per_second:
        speed += f" ({1e3 / answer.best.tokens_per_second:.3g} ms each)"
    if answer.reference is None or answer.ratio is None:
        return f"It {does} {speed}; the baseline did not run."
    drift = answer.drift or 0.0
    how = "measured on this machine" + (", and once more to be sure" if confirmed(answer.records, answer.best) else "")
    if drift > UNSTEADY:
        how = f"but do not rely on it: the machine was not steady, and the same run differed by {drift:.0%}"
    if not answer.changes:
        return f"It {does} {speed}, {how}."
    return (
        f"That {does} {answer.ratio:.2f} times as fast: {speed} instead of "
        f"{answer.reference.tokens_per_second:{form}}, {how}."
    )


def _costs(answer: Answer) -> str:
    best, reference = answer.best, answer.reference
    assert best is not None and best.measurement is not None
    memory = f"{best.measurement.bytes / 1e9:.2f} GB of memory"
    begin = f"its first step takes {first_step(answer.records, best):.0f} s"
    if answer.changes and reference is not None and reference.measurement is not None:
        memory += f" instead of {reference.measurement.bytes / 1e9:.2f}"
        begin += f" instead of {first_step(answer.records, reference):.0f}"
    if answer.proof is not None:
        beside = "" if answer.generates else "beside the standard float32 model "
        the = "the " if answer.proof.verdict.startswith("same") else ""
        numbers = f"{beside}it is {the}{answer.proof.verdict}: {answer.proof.why.rstrip('.')}"
    elif answer.changes:
        numbers = "whether the numbers are the same was not looked at"
    else:
        numbers = "its numbers are those it had"
    return f"It takes {memory}, {begin}, and {numbers}."


def listed(words: Any) -> str:
    """Join words by commas and "and".

    >>> listed(["a", "b", "c"])
    'a, b and c'
    """
    found: Sequence[str] = list(words)
    return found[0] if len(found) == 1 else f"{', '.join(found[:-1])} and {found[-1]}"


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
