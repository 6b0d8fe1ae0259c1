"""`tilewright quantize`: a model's folder in fewer bits, and what that costs."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tilewright.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from tilewright.generate import Plan
    from tilewright.quantize import Format, Quality, Report

_FORMATS = ("int8", "fp8", "int4")
_CALIBRATE = ("none", "search", "scales", "gptq")
_MEASURE = 4  # windows of text to measure errors of outputs on, where nothing is calibrated
_NAMED = 8  # layers that are left out and named
_CHECK = 16  # windows of text to check on


def quantize(
    folder: Path = typer.Argument(help="A Hugging Face folder, or a run's folder or checkpoint of `tilewright train`."),
    form: str = typer.Option("int8", "--format", help=f"{', '.join(_FORMATS[:-1])} or {_FORMATS[-1]}."),
    out: Path = typer.Option(None, help="The folder to write. [default: FOLDER-FORMAT]"),
    group: int = typer.Option(None, help="Of int4: how many inputs share a scale; 32, 64 or 128. [default: 128]"),
    zeros: bool = typer.Option(False, "--zeros", help="Of int4: a zero point for each group, too."),
    head: str = typer.Option("", help="Format of the head, or keep. [default: int8 with int4, else the format]"),
    calibrate: str = typer.Option("none", help="none, search (of scales), scales (by inputs) or gptq."),
    act_order: bool = typer.Option(False, "--act-order", help="Of gptq: round the largest inputs' columns first."),
    keep: list[str] = typer.Option([], help="Layers that stay, such as '*.down_proj'; may be given more than once."),
    most_error: float = typer.Option(0.3, help="A layer stays whose outputs would differ by more than this share."),
    check: bool = typer.Option(False, "--check", help="Compare both models on a text, and write OUT/report.html."),
    text: Path = typer.Option(None, help="Text to calibrate and check on. [default: Python's standard library]"),
    samples: int = typer.Option(64, help="Windows of text to calibrate on."),
    length: int = typer.Option(512, help="Tokens of a window."),
    device: str = typer.Option("", help="cuda or cpu. [default: cuda where there is one]"),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
) -> None:
    """Write a model's folder with weights of 8 or 4 bits, for `generate`, transformers and `quantize.load`.

    One block of the model is in memory at a time. Reads Llama, Qwen2, Qwen3 and GPT-2; JSON and safetensors only.

    Examples:

        tilewright quantize path/to/llama --format int4 --calibrate gptq --check

        tilewright quantize runs/default --format int8 --out my-gpt-int8
    """
    plan = _plan(form, group, zeros, head, calibrate, act_order, most_error, tuple(keep))
    if samples < 1 or length < 2:
        raise UserError(f"--samples is {samples} and --length {length}; give at least 1 and 2.")
    absolute = Path(os.path.abspath(folder))
    out = out or absolute.with_name(f"{absolute.name}-{form}")
    from tilewright.cli.progress import Stages
    from tilewright.generate import quantize_folder
    from tilewright.train.signals import Signals

    try:
        with Signals(at_once=True), _huggingface(folder) as source, Stages() as stages:
            windows, tokens, why = _tokens(source, text, samples if plan.calibrate else _MEASURE, check, length)
            if windows is None and (plan.calibrate or check):
                raise UserError(
                    f"{folder} has no tokenizer.json, and --calibrate and --check read text; put it beside the model."
                )
            report, quality = quantize_folder(
                source, out, plan, samples=windows, check=tokens, device=_device(device), progress=stages
            )
    except KeyboardInterrupt:
        typer.echo(f"Stopped; {out} was not written.", err=True)
        raise typer.Exit(130) from None
    described = _described(plan, calibrate)
    page = _write_page(out, described, report, quality, text) if check else None
    if as_json:
        from tilewright.quantize.facts import finite

        facts = {"out": str(out), "described": described, "page": None if page is None else str(page)}
        found = {"report": report.as_dict(), "quality": None if quality is None else quality.as_dict()}
        print(json.dumps(finite({"schema": 1, "command": "quantize", **facts, **found}), allow_nan=False))
    else:
        _show(out, described, report, quality, page, "" if windows is not None else why)


def _plan(
    form: str, group: int | None, zeros: bool, head: str, calibrate: str, act_order: bool, most_error: float,
    keep: tuple[str, ...],
) -> Plan:  # fmt: skip
    from tilewright.generate import Plan

    if form not in _FORMATS:
        raise UserError(f"--format is {form!r}; choose {', '.join(_FORMATS[:-1])} or {_FORMATS[-1]}.")
    if head not in ("", "keep", *_FORMATS):
        raise UserError(f"--head is {head!r}; choose keep, {', '.join(_FORMATS[:-1])} or {_FORMATS[-1]}.")
    if calibrate not in _CALIBRATE:
        raise UserError(f"--calibrate is {calibrate!r}; choose {', '.join(_CALIBRATE[:-1])} or {_CALIBRATE[-1]}.")
    if act_order and calibrate != "gptq":
        raise UserError("--act-order is an order of gptq; leave it out, or add --calibrate gptq.")
    if not most_error > 0:
        raise UserError(f"--most-error is {most_error}; give a number above 0.")
    if zeros and form != "int4":
        raise UserError(f"--zeros are of int4, and --format is {form}; leave it out.")
    search = calibrate == "search"
    of_head = head or ("int8" if form == "int4" else form)
    if group is not None and "int4" not in (form, of_head):
        raise UserError(f"--group is of int4, and --format is {form}; leave it out.")
    group = 128 if group is None else group
    return Plan(
        _format(form, group, zeros, search), None if of_head == "keep" else _format(of_head, group, zeros, search),
        calibrate if calibrate in ("scales", "gptq") else "", act_order, most_error, keep,
    )  # fmt: skip


def _format(name: str, group: int, zeros: bool, search: bool) -> Format:
    from tilewright.quantize import Fp8, Int4, Int8

    if name == "int4":
        return Int4(group=group, zeros=zeros, search=search)
    return Int8(search=search) if name == "int8" else Fp8(search=search)


@contextlib.contextmanager
def _huggingface(folder: Path) -> Iterator[Path]:
    """The folder; of a run or a checkpoint of ours, one that transformers could read, for as long as it is needed."""
    if not folder.is_dir() or (folder / "config.json").exists():
        yield folder
        return
    from tilewright.train.export import export_huggingface, load_model, tokenizer_of

    with tempfile.TemporaryDirectory(prefix="tilewright-") as temporary:
        exported = Path(temporary) / "model"
        export_huggingface(load_model(folder), exported, tokenizer_of(folder)[0])
        yield exported


def _tokens(
    folder: Path, text: Path | None, samples: int, check: bool, length: int
) -> tuple[Tensor | None, Tensor | None, str]:
    """(windows from the beginning of a text, windows from its end to check on, why there are none)."""
    import torch

    from tilewright.generate import Tokenizer
    from tilewright.generate.config import of_huggingface
    from tilewright.models.folder import read_tokenizer
    from tilewright.plan.huggingface.config import read_json

    if not (folder / "config.json").exists():
        return None, None, ""  # which `quantize_folder` refuses
    shape = of_huggingface(read_json(folder / "config.json")).shape
    content = read_tokenizer(folder)
    if content is None:
        return None, None, "There is no tokenizer.json to read text with: errors are those of weights, not of outputs."
    length = min(length, shape.longest or shape.sequence)
    needed = (samples + _CHECK * check) * length
    ids = Tokenizer(content, shape.vocabulary).encode(_read(text, needed))
    if len(ids) < needed:
        raise UserError(
            f"{text or 'The text'} has {len(ids):,} tokens, and {needed:,} are read; give more text, or a smaller "
            "--samples or --length."
        )
    tokens = torch.tensor(ids)
    end = tokens[len(ids) - _CHECK * length :].view(_CHECK, length) if check else None
    return tokens[: samples * length].view(samples, length), end, ""


def _read(text: Path | None, tokens: int) -> str:
    from tilewright.measure.corpus import corpus

    if text is None:
        return corpus(8 * tokens).decode("utf-8", "replace")
    try:
        with text.open("rb") as file:
            return file.read(64 * tokens).decode("utf-8", "replace")
    except OSError as error:
        raise UserError(f"Cannot read {text}: {error.strerror}; give a file of text.") from error


def _device(device: str) -> str:
    import torch

    if device not in ("", "cpu", "cuda"):
        raise UserError(f"--device is {device!r}; choose cuda or cpu.")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device is cuda and PyTorch sees no GPU; `tilewright doctor` says why.")
    return device or ("cuda" if torch.cuda.is_available() else "cpu")


def _described(plan: Plan, calibrate: str) -> str:
    """How the folder was quantized, in a few words."""
    group = getattr(plan.config, "group", None)
    parts = [plan.config.name + (f" in groups of {group}" if group else "")]
    parts += ["zero points"] if getattr(plan.config, "zeros", False) else []
    if plan.head is None or plan.head.name != plan.config.name:
        parts.append("the head as it was" if plan.head is None else f"the head {plan.head.name}")
    order = " with act-order" if plan.act_order else ""
    parts.append("rounded to nearest" if calibrate == "none" else f"calibrated by {calibrate}{order}")
    return ", ".join(parts)


def _write_page(out: Path, described: str, report: Report, quality: Quality | None, text: Path | None) -> Path:
    from tilewright.measure.results import write_text
    from tilewright.tune.report.quantized import page

    source = str(text) if text else "Python's standard library"
    write_text(out / "report.html", page(out.name, described, report, quality, source))
    return out / "report.html"


def _show(
    out: Path, described: str, report: Report, quality: Quality | None, page: Path | None, without_text: str
) -> None:
    from tilewright.cli.output import Grid, console, tables
    from tilewright.quantize.report import size
    from tilewright.tune.report.quantized import error_of, kinds, quality_rows

    def percent(values: list[float | None]) -> str:
        known = [value for value in values if value is not None]
        return f"{sum(known) / len(known):.2%}" if known else ""

    rows = []
    for kind in kinds(report):
        layers = [layer for _, layer in kind.layers]
        place, worst = kind.worst()
        known = error_of(worst)
        sizes = [sum(each) for each in zip(*((x.bytes_before, x.bytes_after) for x in layers), strict=True)]
        rows.append([
            kind.name, size(sizes[0]), size(sizes[1]),
            percent([layer.weight_error for layer in layers]), percent([layer.output_error for layer in layers]),
            *((f"{known:.2%}", str(place)) if len(layers) > 1 else ("", "")),
        ])  # fmt: skip
    header = ["matmul", "before", "after", "weight", "output", "worst", "block"]
    grids = [Grid("Relative errors of weights and outputs: the mean, and the worst block", header, rows)]
    grids += [Grid("Quality", ["", "the model", "quantized"], quality_rows(quality))] if quality else []
    screen = console()
    share = report.bytes_after / max(1, report.bytes_before)
    lines: list[Any] = [f"{described}: {size(report.bytes_before)} to {size(report.bytes_after)}, {share:.0%}."]
    for grid in grids:
        lines += tables(grid, True, screen.width)
    lines += [f"Left out: {layer.name}: {layer.left_out}." for layer in report.left_out[:_NAMED]]
    if len(report.left_out) > _NAMED:
        lines.append(f"Left out: {len(report.left_out) - _NAMED} more; {out / 'quantized.json'} has all of them.")
    lines += [*report.notes, *([without_text] if without_text else [])]
    lines += [f"Report: {page}"] if page else []
    reader = "`tilewright.quantize.load`" if without_text else f"`tilewright generate {out} PROMPT`"
    lines.append(f"Written to {out}; read it with {reader}.")
    for line in lines:
        screen.print(line, highlight=False, markup=False, soft_wrap=isinstance(line, str))
