"""The half of `tilewright plan` that is about one GPU's time: FLOPs, utilisation, shapes, floors and steps."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import typer

from tilewright import hardware
from tilewright.cli.output import Grid, Report, count, positive
from tilewright.cli.plan import (
    AS_JSON,
    CHANGES,
    COMPILED,
    EXPLAIN,
    GPU,
    MICRO,
    MODEL,
    OPTIMIZER,
    PAGE,
    PRECISION,
    RECOMPUTE,
    TENSOR,
    app,
    find_gpu,
    load_run,
    load_shape,
    model_data,
    notes_of,
    title_of,
)  # fmt: skip
from tilewright.errors import UserError
from tilewright.plan import flops, parallel, roofline, sizing
from tilewright.plan.training import check_parallel


@app.command("flops")
def flops_command(
    model: str = MODEL,
    changes: list[str] = CHANGES,
    as_json: bool = AS_JSON,
    page: Path = PAGE,
    explain: bool = EXPLAIN,
) -> None:
    """FLOPs a token: every matmul, forward and backward, and the sum by every convention.

    Example:

        tilewright plan flops 7b --explain
    """
    shape = load_shape(model, changes or [])
    rows = []
    for matmul in flops.matmuls(shape, 1):
        one = matmul.flops_per_token
        layer = "" if matmul.name == "logits" else _millions(one / shape.layers)
        formula = f"2 x {matmul.n} x {matmul.k} x {matmul.count}"
        rows.append([matmul.name, layer, _millions(one), _millions(2 * one), formula])
    inner = flops.attention_flops(shape)
    layer, formula = _millions(inner / shape.layers), "4·L·a·d·s, not causal"
    rows.append(["attention inside", layer, _millions(inner), _millions(2 * inner), formula])
    found = flops.conventions(shape)
    table = [
        [name + (" (default)" if name == flops.DEFAULT else ""), _millions(c.model), _millions(c.macs()),
         _millions(c.hardware["selective"]), _millions(c.hardware["full"]), c.formula]
        for name, c in found.items()
    ]  # fmt: skip
    report = Report(
        title_of(model, shape),
        {
            "model": model_data(model, shape), "default": flops.DEFAULT,
            "conventions": {name: dataclasses.asdict(c) for name, c in found.items()},
        },
        [
            Grid(
                "MFLOPs a token, by matmul",
                ["matmul", "forward, a layer", "forward", "backward", "formula"],
                rows,
                ("formula",),
            ),
            Grid(
                "Training MFLOPs a token, by convention; selective and full: with what recompute runs again",
                ["convention", "model", "MMACs", "selective", "full", "formula"],
                table,
                ("formula",),
            ),
            *notes_of(shape),
        ],
    )  # fmt: skip
    report.show(as_json=as_json, explain=explain, page=page)


def _millions(value: float) -> str:
    return f"{value / 1e6:,.1f}"


_DTYPES = ("bf16", "fp16", "fp8", "tf32", "fp32")


@app.command("mfu")
def mfu(
    model: str = MODEL,
    changes: list[str] = CHANGES,
    tokens_per_second: float = typer.Option(None, help="Of all GPUs together."),
    seconds: float = typer.Option(None, help="Of a step, with --global-batch."),
    global_batch: str = typer.Option(None, help="Sequences a step, with --seconds."),
    gpus: str = typer.Option("1", help="How many GPUs gave that speed."),
    gpu: str = GPU,
    peak_tflops: float = typer.Option(None, help="Dense peak, for an accelerator that the table does not know."),
    dtype: str = typer.Option("bf16", help=", ".join(_DTYPES) + "."),
    recompute: str = RECOMPUTE,
    as_json: bool = AS_JSON,
    page: Path = PAGE,
    explain: bool = EXPLAIN,
) -> None:
    """A measured speed as TFLOPS, MFU and HFU under every convention.

    Example:

        tilewright plan mfu 70b --tokens-per-second 515636 --gpus 512 --gpu H100-SXM5 --recompute full
    """
    shape = load_shape(model, changes or [])
    if dtype not in _DTYPES:
        raise UserError(f"--dtype is {dtype!r}; choose {', '.join(_DTYPES)}.")
    if tokens_per_second is not None and seconds is not None:
        raise UserError("Give --tokens-per-second or --seconds, not both.")
    if tokens_per_second is None:
        if seconds is None or global_batch is None or seconds <= 0:
            raise UserError("Give --tokens-per-second, or --seconds of a step with --global-batch.")
        tokens_per_second = count(global_batch) * shape.sequence / seconds
    if gpu is None and peak_tflops is None:
        raise UserError("Give the accelerator with --gpu, or its dense peak with --peak-tflops.")
    chip = hardware.find(gpu) if gpu is not None else None
    if peak_tflops is not None:
        peak = positive("--peak-tflops", peak_tflops) * 1e12
    else:
        assert chip is not None
        peak = chip.peak_flops[chip.first_on_record((dtype,))]
    best = chip.best_flops if chip is not None and dtype == "bf16" else None
    n = count(gpus)
    found = flops.utilisation(shape, tokens_per_second, n, peak, recompute=recompute or "none", best_flops=best)
    flops.check_possible(found, shape, n, dtype, chip)
    rows = [
        [name + (" (default)" if name == flops.DEFAULT else ""), f"{u.model_flops / 1e12:,.1f}",
         f"{u.hardware_flops / 1e12:,.1f}", f"{u.mfu:.2%}", f"{u.hfu:.2%}",
         "n/a" if u.of_best is None else f"{u.of_best:.2%}", u.convention.formula]
        for name, u in found.items()
    ]  # fmt: skip
    source = f"{peak / 1e12:g} TFLOPS" + (
        f", {chip.name}, dense {dtype}" if chip and peak_tflops is None else ", given"
    )
    header = ["convention", "TFLOPS", "hardware", "MFU", "HFU", "of best", "formula"]
    data = {
        "model": model_data(model, shape), "tokens_per_second": tokens_per_second, "gpus": n, "peak_flops": peak,
        "default": flops.DEFAULT, "best_flops": best,
        "conventions": {k: {"tflops": u.model_flops / 1e12, "hardware_tflops": u.hardware_flops / 1e12, "mfu": u.mfu,
                            "hfu": u.hfu, "of_best": u.of_best} for k, u in found.items()},
    }  # fmt: skip
    title = f"{title_of(model, shape)}; {tokens_per_second:,.0f} tokens/s on {n}; peak {source}"
    legend = "TFLOPS are a GPU's, hardware's with recompute; of best: of the fastest bf16 matmul measured on this chip."
    items = [Grid("Utilisation", header, rows, ("formula",)), legend, *notes_of(shape, chip)]
    Report(title, data, items).show(as_json=as_json, explain=explain, page=page)


_LINT_FORMULAS = (
    "costs = 1 - tile x wave x alignment, of the tile that does best",
    "tile = m n / (m n with both rounded up to whole tiles); wave = tiles / (waves x multiprocessors)",
    f"alignment = {sizing.MISALIGNED:.2f} where rows of n or k elements do not begin on 16 bytes (published: H100)",
)


@app.command("lint")
def lint(
    model: str = MODEL,
    changes: list[str] = CHANGES,
    gpu: str = GPU,
    micro_batch: int = MICRO,
    tensor: int = TENSOR,
    measure: bool = typer.Option(False, help="Time every matmul and its neighbours on this machine's GPU."),
    as_json: bool = AS_JSON,
    page: Path = PAGE,
    explain: bool = EXPLAIN,
) -> None:
    """Is this shape a bad one? Tiles, waves and alignment of every matmul, and the nearest good sizes.

    Example:

        tilewright plan lint 1b vocabulary=50257 --gpu H100-SXM5 --micro-batch 4
    """
    shape = load_shape(model, changes or [])
    chip, micro_batch = find_gpu(gpu), micro_batch or 1
    findings = sizing.lint(shape, chip, micro_batch=micro_batch, tensor=tensor)
    rows = [
        ["ok" if f.good else "bad", f.what, f.value, "" if not f.cost else f"{f.cost:.0%}", f.advice] for f in findings
    ]
    report = Report(
        f"{title_of(model, shape)}; {chip.name}, micro batch {micro_batch}, tensor {tensor}",
        {"model": model_data(model, shape), "findings": [dataclasses.asdict(f) for f in findings]},
        [Grid("Sizes", ["", "what", "is", "costs", "why, and better"], rows), *notes_of(shape)],
    )
    if explain:
        report.items += _LINT_FORMULAS
    if measure:
        from tilewright.measure.matmuls import measure_matmuls

        timed = measure_matmuls(flops.matmuls(shape, micro_batch * shape.sequence, tensor))
        header = ["matmul", "shape", "TFLOPS", "share of the fastest"]
        table = [[t.name, t.shape, f"{t.flops / 1e12:.0f}", f"{t.of_best:.0%}"] for t in timed]
        report.items.append(Grid("Measured on this machine", header, table))
        report.data["measured"] = [dataclasses.asdict(t) for t in timed]
    report.show(as_json=as_json, explain=explain, page=page)


@app.command("roofline")
def roofline_command(
    model: str = MODEL,
    changes: list[str] = CHANGES,
    gpu: str = GPU,
    micro_batch: int = MICRO,
    precision: str = PRECISION,
    optimizer: str = OPTIMIZER,
    recompute: str = RECOMPUTE,
    tensor: int = TENSOR,
    compiled: bool = COMPILED,
    achievable: bool = typer.Option(
        False, help="By the best matmul and copy measured, or assumed where nobody has, not by the datasheet."
    ),
    as_json: bool = AS_JSON,
    page: Path = PAGE,
    explain: bool = EXPLAIN,
) -> None:
    """Every op of a step: what bounds it, and the time below which nothing can go.

    Example:

        tilewright plan roofline 1b gpt_block=optimized --gpu H200-SXM --micro-batch 16 --html roofline.html
    """
    chip = find_gpu(gpu)
    shape, how = load_run(
        model, changes or [], {"tensor": tensor}, micro_batch=micro_batch, precision=precision, optimizer=optimizer,
        recompute=recompute, compiled=compiled or None,
    )  # fmt: skip
    micro_batch = how.micro_batch
    check_parallel(shape, how)
    expected = parallel.timed(shape, how, parallel.Cluster(chip, how.tensor))
    floors = roofline.roofline(shape, how, chip, achievable=achievable)
    rate, bandwidth = roofline.rates(chip, how, achievable)
    copied = chip.copy_source if achievable else "the datasheet"
    total = sum(floor.seconds for floor in floors)
    tokens = micro_batch * shape.sequence
    rows = [
        [f.op.name, str(f.op.calls), f"{f.op.intensity:,.1f}", f.bound, f"{f.seconds * 1e3:.3f}", f"{f.share:.1%}",
         f"{f.op.cost.flops:,}", f"{f.op.cost.bytes_read:,} + {f.op.cost.bytes_written:,}"]
        for f in floors
    ]  # fmt: skip
    header = ["op", "calls", "FLOPs a byte", "bound", "floor, ms", "share", "FLOPs a call", "bytes read + written"]
    data = {
        "model": model_data(model, shape), "training": dataclasses.asdict(how), "gpu": chip.name,
        "step_floor_seconds": total, "step_seconds": expected.seconds, "matmul": dataclasses.asdict(rate),
        "bytes_per_second": bandwidth,
        "bandwidth_source": copied,
        "ops": [{"name": f.op.name, "calls": f.op.calls, "intensity": f.op.intensity, "bound": f.bound,
                 "seconds": f.seconds, "share": f.share} for f in floors],
    }  # fmt: skip
    report = Report(
        f"{title_of(model, shape)}; {chip.name}, micro batch {micro_batch}",
        data,
        [
            Grid("Roofline", header, rows, ("FLOPs a call", "bytes read + written")),
            *(["floor = calls x max(FLOPs / rate, bytes / bandwidth, 2 us)"] if explain else []),
            f"Matmuls at {rate.flops / 1e12:,.4g} TFLOPS: {rate.source}.",
            f"Memory at {bandwidth / 1e9:,.0f} GB/s: {copied}.",
            f"The step's floor: {total * 1e3:.2f} ms, {tokens / total:,.0f} tokens/s; one GPU, no traffic.",
            f"Expected: {expected.seconds * 1e3:.2f} ms, {total / expected.seconds:.0%} of it the floor; `plan step` "
            "says where it goes.",
            *notes_of(shape, chip),
        ],
        _roofline_figure(floors, chip.name, rate.flops, bandwidth),
    )
    report.show(as_json=as_json, explain=explain, page=page)


def _roofline_figure(floors: list[roofline.Floor], name: str, peak: float, bandwidth: float) -> dict[str, Any]:
    """Intensity against speed, each op at its own roof."""
    line = [0.1, peak / bandwidth, 1e5]
    dots = [f for f in floors if f.op.cost.flops]
    return {
        "data": [
            {"type": "scatter", "mode": "lines", "name": "roof", "x": line,
             "y": [min(peak, x * bandwidth) / 1e12 for x in line]},
            {"type": "scatter", "mode": "markers", "name": "ops", "x": [f.op.intensity for f in dots],
             "y": [f.op.cost.flops * f.op.calls / f.seconds / 1e12 for f in dots],
             "text": [f"{f.op.name}: {f.share:.1%} of the floor, {f.bound}" for f in dots],
             "marker": {"size": [8 + 40 * f.share for f in dots]}},
        ],
        "layout": {
            "title": {"text": f"Roofline, {name}"}, "xaxis": {"type": "log", "title": {"text": "FLOPs a byte"}},
            "yaxis": {"type": "log", "title": {"text": "TFLOPS"}}, "template": "plotly_white",
        },
    }  # fmt: skip
