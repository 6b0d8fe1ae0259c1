"""`tilewright plan`: what a model takes and how fast it can be, before anybody rents a GPU. Arithmetic only."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import typer

from tilewright import hardware
from tilewright.cli.report import Bar, Grid, Report, count, gigabytes
from tilewright.errors import UserError
from tilewright.plan import batches, decoder, flops, memory, parallel, roofline, sizing
from tilewright.plan.decoder import Decoder

app = typer.Typer(
    no_args_is_help=True,
    help="Will it fit, how fast can it be, what batch, how many GPUs, is this shape a bad one? Needs no GPU.",
)

MODEL = typer.Argument(help="A preset (125m ... 70b), or a Hugging Face config.json, or a folder with one.")
CHANGES = typer.Argument(None, help="Fields to change: sequence=8192 dropout=0.1 gpt_block=optimized ...")
GPU = typer.Option(None, "--gpu", help="Accelerator, such as H100-SXM5; a wrong one lists the nearest.")
AS_JSON = typer.Option(False, "--json", help="Print JSON instead of tables.")
PAGE = typer.Option(None, "--html", help="Also write a self-contained HTML page to this file.")
EXPLAIN = typer.Option(False, "--explain", help="Show the formula of every number.")
MICRO = typer.Option(1, "--micro-batch", min=1, help="Sequences a GPU takes at once.")
PRECISION = typer.Option(
    "amp", help="amp (bf16 autocast over float32), mixed (16 bits, float32 in the optimizer), bf16 or fp32."
)
OPTIMIZER = typer.Option("adamw", help=", ".join(memory.OPTIMIZERS) + ".")
RECOMPUTE = typer.Option("none", help="none, selective or full.")
TENSOR = typer.Option(1, min=1, help="Tensor-parallel ranks.")


def _gpu(name: str | None) -> hardware.Accelerator:
    if name is None:
        raise UserError(f"Give the accelerator with --gpu; known: {', '.join(hardware.table())}.")
    return hardware.find(name)


def _title(name: str, model: Decoder) -> str:
    active = f", {model.active_parameters:,} active" if model.experts > 1 else ""
    return f"{name}: {model.parameters:,} parameters{active}, {model.layers} layers of {model.width}"


def _model_data(name: str, model: Decoder) -> dict[str, Any]:
    fields = {**dataclasses.asdict(model), "parameters": model.parameters, "active_parameters": model.active_parameters}
    return {"name": name, **fields}


def _notes(model: Decoder) -> list[Grid | Bar | str]:
    return [f"Note: {model.note}"] if model.note else []


@app.command("train")
def train(
    model: str = MODEL,
    changes: list[str] = CHANGES,
    gpu: str = GPU,
    micro_batch: int = MICRO,
    precision: str = PRECISION,
    optimizer: str = OPTIMIZER,
    recompute: str = RECOMPUTE,
    attention: str = typer.Option("flash", help="flash, or softmax whose scores are stored."),
    loss: str = typer.Option("plain", help="plain, fused or linear_fused."),
    accumulates: bool = typer.Option(False, help="Gradients of earlier micro batches are kept."),
    data: int = typer.Option(1, min=1, help="Data-parallel ranks."),
    zero: int = typer.Option(0, min=0, max=3, help="ZeRO stage; 3 is FSDP."),
    tensor: int = TENSOR,
    sequence_parallel: bool = typer.Option(False, help="Split the norms over the tensor-parallel ranks."),
    pipeline: int = typer.Option(1, min=1, help="Pipeline stages."),
    memory_gb: float = typer.Option(None, help="Memory of a GPU in GB, in place of the table's."),
    as_json: bool = AS_JSON,
    page: Path = PAGE,
    explain: bool = EXPLAIN,
) -> None:
    """Where the memory of a training step goes, whether it fits, and what each lever would save.

    Examples:

        tilewright plan train 1b --gpu H200-SXM --micro-batch 16

        tilewright plan train path/to/config.json sequence=8192 --gpu H100-SXM5 --data 64 --zero 3 --recompute full
    """
    shape = decoder.load(model, changes or [])
    how = memory.Training(
        micro_batch=micro_batch, precision=precision, optimizer=optimizer, recompute=recompute, attention=attention,
        loss=loss, accumulates=accumulates, data=data, zero=zero, tensor=tensor, sequence_parallel=sequence_parallel,
        pipeline=pipeline,
    )  # fmt: skip
    anatomy = memory.train(shape, how)
    capacity = memory_gb * 1e9 if memory_gb else max(_gpu(gpu).memory_bytes) if gpu else None
    rows = [[p.name, gigabytes(p.bytes), f"{p.bytes / anatomy.total:.1%}", p.formula] for p in anatomy.parts]
    rows.append(["total", gigabytes(anatomy.total), "", f"allocated {gigabytes(anatomy.allocated)}"])
    saved = memory.levers(shape, how)
    report = Report(
        f"{_title(model, shape)}; peak at: {anatomy.moment}",
        {
            "model": _model_data(model, shape), "training": dataclasses.asdict(how), "moment": anatomy.moment,
            "parts": [dataclasses.asdict(p) for p in anatomy.parts], "allocated": anatomy.allocated,
            "total": anatomy.total, "capacity": capacity, "levers": dict(saved),
        },
    )  # fmt: skip
    title = f"{gigabytes(anatomy.total)} on the fullest GPU" + (f" of {gigabytes(capacity)}" if capacity else "")
    report.items = [
        Grid("Memory", ["part", "bytes", "share", "formula"], rows, explained=("formula",)),
        Bar(title, [(p.name, p.bytes) for p in anatomy.parts], capacity),
        *_notes(shape),
    ]
    if capacity is not None:
        largest = memory.largest_micro_batch(shape, how, capacity)
        report.data |= {"largest_micro_batch": largest, "fits": anatomy.total <= capacity}
        if largest:
            verdict = "It fits." if anatomy.total <= capacity else "It does not fit."
            report.items.append(f"{verdict} The largest micro batch that does: {largest}.")
        else:
            report.items.append("Not even one sequence fits; pull a lever, or split the model (`plan parallel`).")
    if saved:
        levers = [[name, gigabytes(value), f"{value / anatomy.total:.0%}"] for name, value in saved]
        report.items.append(Grid("What each lever alone would save", ["lever", "saves", "share"], levers))
    report.show(as_json=as_json, explain=explain, page=page)


@app.command("serve")
def serve(
    model: str = MODEL,
    changes: list[str] = CHANGES,
    gpu: str = GPU,
    batch: int = typer.Option(1, min=1, help="Sequences at once."),
    tokens: str = typer.Option("4096", help="Tokens a sequence can grow to; 8k works."),
    weights: str = typer.Option("bf16", help=", ".join(memory.WEIGHT_BYTES) + "."),
    kv_bytes: float = typer.Option(2.0, help="Bytes of a cached number."),
    tensor: int = TENSOR,
    as_json: bool = AS_JSON,
    page: Path = PAGE,
    explain: bool = EXPLAIN,
) -> None:
    """The memory of inference: weights, cache and the rest, and the speed that memory allows.

    Example:

        tilewright plan serve path/to/config.json --gpu H100-SXM5 --batch 32 --tokens 8k --weights int8
    """
    shape = decoder.load(model, changes or [])
    length = count(tokens)
    anatomy = memory.infer(shape, batch, length, weights=weights, kv_bytes=kv_bytes, tensor=tensor)
    chip = _gpu(gpu) if gpu else None
    rows = [[p.name, gigabytes(p.bytes), f"{p.bytes / anatomy.total:.1%}", p.formula] for p in anatomy.parts]
    per_token = memory.kv_bytes_per_token(shape, kv_bytes)
    data: dict[str, Any] = {
        "model": _model_data(model, shape), "parts": [dataclasses.asdict(p) for p in anatomy.parts],
        "total": anatomy.total, "kv_bytes_per_token": per_token,
    }  # fmt: skip
    items: list[Grid | Bar | str] = [Grid("Memory", ["part", "bytes", "share", "formula"], rows, ("formula",))]
    capacity = max(chip.memory_bytes) if chip else None
    items.append(Bar(f"{gigabytes(anatomy.total)} a GPU", [(p.name, p.bytes) for p in anatomy.parts], capacity))
    items.append(f"The cache takes {per_token:,.0f} bytes a token.")
    if chip is not None:
        active = memory.WEIGHT_BYTES[weights] * shape.active_parameters / tensor
        floor = (active + anatomy["KV cache"]) / chip.bytes_per_second
        data |= {"capacity": capacity, "fits": anatomy.total <= max(chip.memory_bytes), "decode_floor_seconds": floor}
        fits = "It fits" if anatomy.total <= max(chip.memory_bytes) else "It does not fit"
        items.append(
            f"{fits} on {chip.name}. A decoding step reads active weights and cache once: at least "
            f"{floor * 1e3:.2f} ms, so at most {batch / floor:,.0f} tokens/s."
        )
    Report(_title(model, shape), data, items + _notes(shape)).show(as_json=as_json, explain=explain, page=page)


@app.command("flops")
def flops_command(
    model: str = MODEL,
    changes: list[str] = CHANGES,
    as_json: bool = AS_JSON,
    page: Path = PAGE,
    explain: bool = EXPLAIN,
) -> None:
    """FLOPs a token: every product, forward and backward, and the sum by every convention.

    Example:

        tilewright plan flops 7b --explain
    """
    shape = decoder.load(model, changes or [])
    rows = []
    share = shape.active_experts / shape.experts
    for product in flops.products(shape, 1):
        one = 2 * product.n * product.k * product.count * (share if product.name.startswith("expert") else 1)
        layer = "" if product.name == "logits" else f"{one / shape.layers:,.0f}"
        formula = f"2 x {product.n} x {product.k} x {product.count}"
        rows.append([product.name, layer, f"{one:,.0f}", f"{2 * one:,.0f}", formula])
    inner = flops.attention_flops(shape)
    layer = f"{inner / shape.layers:,.0f}"
    rows.append(["attention inside", layer, f"{inner:,.0f}", f"{2 * inner:,.0f}", "4·L·a·d·s, not causal"])
    found = flops.conventions(shape)
    table = [
        [name + (" (default)" if name == flops.DEFAULT else ""), f"{c.model:,.0f}", f"{c.macs():,.0f}",
         f"{c.hardware['selective']:,.0f}", f"{c.hardware['full']:,.0f}", c.formula]
        for name, c in found.items()
    ]  # fmt: skip
    report = Report(
        _title(model, shape),
        {
            "model": _model_data(model, shape), "default": flops.DEFAULT,
            "conventions": {name: dataclasses.asdict(c) for name, c in found.items()},
        },
        [
            Grid("FLOPs a token, by product", ["product", "forward, a layer", "forward", "backward", "formula"], rows, ("formula",)),
            Grid(
                "Training FLOPs a token, by convention",
                ["convention", "model", "MACs", "hardware, selective", "hardware, full recompute", "formula"],
                table,
                ("formula",),
            ),
            *_notes(shape),
        ],
    )  # fmt: skip
    report.show(as_json=as_json, explain=explain, page=page)


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
    dtype: str = typer.Option("bf16", help="bf16, fp16, fp8, tf32 or fp32."),
    recompute: str = RECOMPUTE,
    as_json: bool = AS_JSON,
    page: Path = PAGE,
    explain: bool = EXPLAIN,
) -> None:
    """A measured speed as TFLOPS, MFU and HFU under every convention.

    Example:

        tilewright plan mfu 70b --tokens-per-second 515636 --gpus 512 --gpu H100-SXM5 --recompute full
    """
    shape = decoder.load(model, changes or [])
    if tokens_per_second is None:
        if seconds is None or global_batch is None or seconds <= 0:
            raise UserError("Give --tokens-per-second, or --seconds of a step with --global-batch.")
        tokens_per_second = count(global_batch) * shape.sequence / seconds
    if gpu is None and peak_tflops is None:
        raise UserError("Give the accelerator with --gpu, or its dense peak with --peak-tflops.")
    chip = hardware.find(gpu) if gpu is not None else None
    if peak_tflops is not None:
        peak = peak_tflops * 1e12
    else:
        assert chip is not None
        if dtype not in chip.peak_flops:
            raise UserError(f"{chip.name} has no {dtype} peak in the table; it has {', '.join(chip.peak_flops)}.")
        peak = chip.peak_flops[dtype]
    best = chip.best_flops if chip is not None and dtype == "bf16" else None
    n = count(gpus)
    found = flops.utilisation(shape, tokens_per_second, n, peak, recompute=recompute, best_flops=best)
    flops.check_possible(found[flops.DEFAULT].mfu, n, dtype, chip)
    rows = [
        [name + (" (default)" if name == flops.DEFAULT else ""), f"{u.model_flops / 1e12:,.1f}",
         f"{u.hardware_flops / 1e12:,.1f}", f"{u.mfu:.2%}", f"{u.hfu:.2%}",
         "n/a" if u.of_best is None else f"{u.of_best:.2%}", u.convention.formula]
        for name, u in found.items()
    ]  # fmt: skip
    source = f"{peak / 1e12:g} TFLOPS" + (
        f", {chip.name}, dense {dtype}" if chip and peak_tflops is None else ", given"
    )
    header = ["convention", "TFLOPS a GPU", "with recompute", "MFU", "HFU", "of the best product", "formula"]
    data = {
        "model": _model_data(model, shape), "tokens_per_second": tokens_per_second, "gpus": n, "peak_flops": peak,
        "default": flops.DEFAULT, "best_flops": best,
        "conventions": {k: {"tflops": u.model_flops / 1e12, "hardware_tflops": u.hardware_flops / 1e12, "mfu": u.mfu,
                            "hfu": u.hfu, "of_best": u.of_best} for k, u in found.items()},
    }  # fmt: skip
    title = f"{_title(model, shape)}; {tokens_per_second:,.0f} tokens/s on {n}; peak {source}"
    Report(title, data, [Grid("Utilisation", header, rows, ("formula",))]).show(
        as_json=as_json, explain=explain, page=page
    )


@app.command("batch")
def batch(
    micro_batch: int = typer.Option(None, help="Sequences a GPU takes at once."),
    global_batch: str = typer.Option(None, help="Sequences a step."),
    accumulation: int = typer.Option(None, help="Micro batches a step."),
    data: int = typer.Option(None, help="Data-parallel ranks."),
    tensor: int = typer.Option(None, help="Tensor-parallel ranks."),
    pipeline: int = typer.Option(None, help="Pipeline stages."),
    gpus: str = typer.Option(None, help="GPUs in all."),
    as_json: bool = AS_JSON,
) -> None:
    """Give any of the numbers, get the rest.

    Example:

        tilewright plan batch --gpus 64 --tensor 8 --global-batch 1024 --micro-batch 4
    """
    found = batches.solve(
        micro=micro_batch, global_=count(global_batch) if global_batch else None, accumulation=accumulation, data=data,
        tensor=tensor, pipeline=pipeline, gpus=count(gpus) if gpus else None,
    )  # fmt: skip
    values = found.as_dict()
    text = "global batch = micro batch x accumulation x data; GPUs = data x tensor x pipeline"
    grid = Grid("Batches", [name.replace("_", " ") for name in values], [[f"{v:,}" for v in values.values()]])
    Report(text, dict(values), [grid]).show(as_json=as_json, explain=False, page=None)


@app.command("lint")
def lint(
    model: str = MODEL,
    changes: list[str] = CHANGES,
    gpu: str = GPU,
    micro_batch: int = MICRO,
    tensor: int = TENSOR,
    measure: bool = typer.Option(False, help="Time every product and its neighbours on this machine's GPU."),
    as_json: bool = AS_JSON,
    page: Path = PAGE,
) -> None:
    """Is this shape a bad one? Tiles, waves and alignment of every product, and the nearest good sizes.

    Example:

        tilewright plan lint 1b vocabulary=50257 --gpu H100-SXM5 --micro-batch 4
    """
    shape = decoder.load(model, changes or [])
    chip = _gpu(gpu)
    findings = sizing.lint(shape, chip, micro_batch=micro_batch, tensor=tensor)
    rows = [
        ["ok" if f.good else "bad", f.what, f.value, "" if not f.cost else f"{f.cost:.0%}", f.advice] for f in findings
    ]
    report = Report(
        f"{_title(model, shape)}; {chip.name}, micro batch {micro_batch}, tensor {tensor}",
        {"model": _model_data(model, shape), "findings": [dataclasses.asdict(f) for f in findings]},
        [Grid("Sizes", ["", "what", "is", "costs", "why, and better"], rows), *_notes(shape)],
    )
    if measure:
        from tilewright.measure.products import measure_products

        timed = measure_products(flops.products(shape, micro_batch * shape.sequence, tensor))
        header = ["product", "shape", "TFLOPS", "share of the fastest"]
        table = [[t.name, t.shape, f"{t.flops / 1e12:.0f}", f"{t.of_best:.0%}"] for t in timed]
        report.items.append(Grid("Measured on this machine", header, table))
        report.data["measured"] = [dataclasses.asdict(t) for t in timed]
    report.show(as_json=as_json, explain=False, page=page)


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
    achievable: bool = typer.Option(False, help="By the best rates measured, not by the datasheet's."),
    as_json: bool = AS_JSON,
    page: Path = PAGE,
    explain: bool = EXPLAIN,
) -> None:
    """Every op of a step: what bounds it, and the time below which nothing can go.

    Example:

        tilewright plan roofline 1b gpt_block=optimized --gpu H200-SXM --micro-batch 16 --html roofline.html
    """
    shape = decoder.load(model, changes or [])
    chip = _gpu(gpu)
    how = memory.Training(
        micro_batch=micro_batch, precision=precision, optimizer=optimizer, recompute=recompute, tensor=tensor
    )
    memory.check_parallel(shape, how)
    floors = roofline.roofline(shape, how, chip, achievable=achievable)
    total = sum(floor.seconds for floor in floors)
    tokens = micro_batch * shape.sequence
    rows = [
        [f.op.name, str(f.op.calls), f"{f.op.intensity:,.1f}", f.bound, f"{f.seconds * 1e3:.3f}", f"{f.share:.1%}",
         f"{f.op.cost.flops:,}", f"{f.op.cost.bytes_read:,} + {f.op.cost.bytes_written:,}"]
        for f in floors
    ]  # fmt: skip
    header = ["op", "calls", "FLOPs a byte", "bound", "floor, ms", "share", "FLOPs a call", "bytes read + written"]
    data = {
        "model": _model_data(model, shape), "training": dataclasses.asdict(how), "gpu": chip.name,
        "step_floor_seconds": total,
        "ops": [{"name": f.op.name, "calls": f.op.calls, "intensity": f.op.intensity, "bound": f.bound,
                 "seconds": f.seconds, "share": f.share} for f in floors],
    }  # fmt: skip
    report = Report(
        f"{_title(model, shape)}; {chip.name}, micro batch {micro_batch}",
        data,
        [
            Grid("Roofline", header, rows, ("FLOPs a call", "bytes read + written")),
            *(["floor = calls x max(FLOPs / peak, bytes / bandwidth, 2 us)"] if explain else []),
            f"The step's floor: {total * 1e3:.2f} ms, {tokens / total:,.0f} tokens/s; one GPU, no traffic.",
            *_notes(shape),
        ],
        _roofline_figure(floors, chip),
    )
    report.show(as_json=as_json, explain=explain, page=page)


def _roofline_figure(floors: list[roofline.Floor], chip: hardware.Accelerator) -> dict[str, Any]:
    """Intensity against speed, each op at its own roof."""
    peak, bandwidth = max(chip.peak_flops.get("bf16", 0.0), chip.peak_flops.get("fp32", 0.0)), chip.bytes_per_second
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
            "title": {"text": f"Roofline, {chip.name}"}, "xaxis": {"type": "log", "title": {"text": "FLOPs a byte"}},
            "yaxis": {"type": "log", "title": {"text": "TFLOPS"}}, "template": "plotly_white",
        },
    }  # fmt: skip


@app.command("parallel")
def parallel_command(
    model: str = MODEL,
    changes: list[str] = CHANGES,
    gpu: str = GPU,
    gpus: str = typer.Option(..., help="How many; 16k works."),
    global_batch: str = typer.Option(..., help="Sequences a step."),
    node: int = typer.Option(8, min=1, help="GPUs a node."),
    link: float = typer.Option(None, help="GB/s a GPU inside a node, one direction; default: the table's."),
    network: float = typer.Option(50.0, help="GB/s a GPU between nodes."),
    memory_gb: float = typer.Option(None, help="Memory of a GPU in GB, in place of the table's."),
    efficiency: float = typer.Option(0.75, min=0.01, max=1.0, help="Share of the best product that computing reaches."),
    keep: int = typer.Option(10, min=1, help="Plans to show."),
    as_json: bool = AS_JSON,
    page: Path = PAGE,
    explain: bool = EXPLAIN,
) -> None:
    """Every way to spread a run over many GPUs that fits, fastest first.

    Example:

        tilewright plan parallel 70b --gpu H100-SXM5 --gpus 512 --global-batch 2048
    """
    shape = decoder.load(model, changes or [])
    cluster = parallel.Cluster(
        accelerator=_gpu(gpu),
        gpus=count(gpus),
        node=node,
        link=link * 1e9 if link else None,
        network=network * 1e9,
        memory=memory_gb * 1e9 if memory_gb else None,
        efficiency=efficiency,
    )
    plans = parallel.search(shape, cluster, count(global_batch), keep)
    rows = [
        [str(p.training.tensor), _stages(p), str(p.training.data), str(p.training.zero), p.training.recompute,
         f"{p.training.micro_batch} x {p.accumulation}", f"{p.seconds:.2f}", f"{p.bubble / p.seconds:.0%}",
         f"{(p.tensor_traffic + p.pipeline_traffic + p.data_traffic) / p.seconds:.0%}", gigabytes(p.memory),
         f"{p.mfu:.1%}"]
        for p in plans
    ]  # fmt: skip
    header = ["tensor", "pipeline", "data", "ZeRO", "recompute", "micro x steps", "s/step", "bubble", "traffic"]
    header += ["memory", "MFU"]
    best = plans[0]
    report = Report(
        f"{_title(model, shape)}; {cluster.gpus:,} {cluster.accelerator.name}, global batch {count(global_batch):,}",
        {"model": _model_data(model, shape), "plans": [parallel.as_dict(p) for p in plans]},
        [
            Grid("Plans, fastest first", header, rows),
            *(_PARALLEL_FORMULAS if explain else ()),
            f"Fastest: {best.tokens_per_second:,.0f} tokens/s. An estimate to order plans by: computing at "
            f"{efficiency:.0%} of the best product, fused loss, links of {cluster.link_rate / 1e9:g} and {network:g} "
            "GB/s.",
            *_notes(shape),
        ],
    )
    report.show(as_json=as_json, explain=explain, page=page)


_PARALLEL_FORMULAS = (
    "step = compute + bubble + traffic; compute = steps x tokens x FLOPs (with recompute) / (tensor x pipeline x rate)",
    "bubble = (pipeline - 1) x one micro batch / pieces; over the ideal time (p - 1) / (m x pieces)",
    "tensor traffic = layers x 4 (6 with full recompute) x 2(t - 1)/t x tokens x h x 2 B / link, not hidden",
    "data traffic = 8 B x parameters here x (d - 1)/d / network (ZeRO 3: 8 B a micro batch), less what backward hides",
)


def _stages(plan: parallel.Plan) -> str:
    pieces = plan.training.interleave
    return str(plan.training.pipeline) + (f" ({pieces} pieces)" if pieces > 1 else "")
