"""`tilewright plan`: what a model takes and how fast it can be, before anybody rents a GPU. Arithmetic only.

Here: what is common, and the questions of memory and batches. `plan_speed` has those of time.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import typer

from tilewright import hardware
from tilewright.cli.output import Bar, Grid, Report, count, gigabytes, positive
from tilewright.errors import UserError
from tilewright.plan import batches, budget, decode, decoder, memory, parallel
from tilewright.plan.decoder import Decoder
from tilewright.plan.serving_memory import WEIGHT_BYTES, infer, kv_bytes_per_token
from tilewright.plan.training import OPTIMIZERS, Training

app = typer.Typer(
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Will it fit, how fast can it be, what batch, how many GPUs, is this shape a bad one? Needs no GPU.",
)

MODEL = typer.Argument(
    help="A preset (125m ... 70b), the YAML of a run, a Hugging Face config.json, or a folder with one."
)
CHANGES = typer.Argument(None, help="Fields to change: sequence=8192 dropout=0.1 gpt_block=optimized ...")
GPU = typer.Option(None, "--gpu", help="Accelerator, such as H100-SXM5; a wrong one lists the nearest.")
AS_JSON = typer.Option(False, "--json", help="Print JSON instead of tables.")
PAGE = typer.Option(None, "--html", help="Also write a self-contained HTML page to this file.")
EXPLAIN = typer.Option(False, "--explain", help="Show the formula of every number.")
MICRO = typer.Option(None, "--micro-batch", min=1, help="Sequences a GPU takes at once. Default: 1.")
PRECISION = typer.Option(
    None,
    help="As in `train`: bf16 (autocast over float32; the default), tf32, fp32, bf16_kahan or bf16_stochastic "
    "(16-bit weights); or mixed (16-bit weights, float32 in the optimizer).",
)
OPTIMIZER = typer.Option(None, help="Default: adamw. Or: " + ", ".join(OPTIMIZERS) + ".")
RECOMPUTE = typer.Option(None, help="none (the default), selective or full.")
TENSOR = typer.Option(1, min=1, help="Tensor-parallel ranks.")
LORA = typer.Option(0, min=0, help="Rank of LoRA's adapters beside all linear layers, which alone are trained.")
RELEASES = typer.Option(
    False, "--release-buffers",
    help="The pipeline's engine releases what it has received, as Megatron's does; PyTorch's schedules, and so "
    "`tilewright train`, have a buffer for every micro batch of a step.",
)  # fmt: skip
COMPILED = typer.Option(False, "--compiled", help="As torch.compile makes it of the model.")


def load_shape(model: str, changes: list[str]) -> Decoder:
    """The shape of a preset, of a Hugging Face config.json, or of the model that a run's YAML describes."""
    if not model.endswith((".yaml", ".yml")):
        return decoder.load(model, changes)
    from tilewright.train.load_config import read

    return decoder.from_gpt(read(Path(model), changes).train.model)


def load_run(model: str, changes: list[str], split: dict[str, Any], **options: Any) -> tuple[Decoder, Training]:
    """A model and how it is trained: by the options, or as the YAML of a run says.

    Args:
        model, changes: as the command line has them.
        split: over how many GPUs, and how.
        options: fields of `Training`; None where they were not given.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if not model.endswith((".yaml", ".yml")):
        if split.get("zero") == 3:
            given = {"precision": "fsdp", **given}
        return decoder.load(model, changes), Training(**given, **split)
    if given:
        option = next(iter(given)).replace("_", "-")
        raise UserError(f"{model} says how it trains; leave --{option} out, and write FIELD=VALUE to change a field.")
    from tilewright.train.load_config import read
    from tilewright.train.memory_plan import planned

    run = read(Path(model), changes).train
    sizes = run.batch_sizes(split.get("data", 1))
    precision = "bf16" if run.precision == "auto" else run.precision  # what auto is on a GPU
    how = planned(run, precision, sizes.micro, sizes.accumulation)
    return decoder.from_gpt(run.model), dataclasses.replace(how, **split)


def find_gpu(name: str | None) -> hardware.Accelerator:
    """The accelerator of --gpu."""
    if name is None:
        raise UserError(f"Give the accelerator with --gpu; known: {', '.join(hardware.table())}.")
    return hardware.find(name)


def title_of(name: str, model: Decoder) -> str:
    """What stands above every answer."""
    active = f", {model.active_parameters:,} active" if model.experts > 1 else ""
    return (
        f"{name}: {model.parameters:,} parameters{active}, {model.layers} layers of {model.width}, sequence "
        f"{model.sequence:,}"
    )


def model_data(name: str, model: Decoder) -> dict[str, Any]:
    """The model, for JSON."""
    fields = {**dataclasses.asdict(model), "parameters": model.parameters, "active_parameters": model.active_parameters}
    return {"name": name, **fields}


def notes_of(model: Decoder, chip: hardware.Accelerator | None = None) -> list[Grid | Bar | str]:
    """What had to be assumed about the model and the accelerator."""
    found = [model.note] if model.note else []
    if model.longest and model.sequence == model.longest:
        found.append(f"sequence {model.sequence:,} is the longest its config.json allows.")
    elif model.longest and model.sequence > model.longest:
        found.append(f"sequence {model.sequence:,} is more than the {model.longest:,} its config.json allows.")
    return [f"Note: {note}" for note in (*found, *(chip.notes if chip else ()))]


@app.command("train")
def train(
    model: str = MODEL,
    changes: list[str] = CHANGES,
    gpu: str = GPU,
    micro_batch: int = MICRO,
    precision: str = PRECISION,
    optimizer: str = OPTIMIZER,
    recompute: str = RECOMPUTE,
    attention: str = typer.Option(None, help="flash (the default), or softmax whose scores are stored."),
    loss: str = typer.Option(None, help="plain (the default), fused or linear_fused."),
    compiled: bool = COMPILED,
    lora: int = LORA,
    accumulation: int = typer.Option(None, min=1, help="Micro batches a step; more than 1 keep their gradients."),
    data: int = typer.Option(1, min=1, help="Data-parallel ranks."),
    zero: int = typer.Option(0, min=0, max=3, help="ZeRO stage; 3 is FSDP."),
    tensor: int = TENSOR,
    sequence_parallel: bool = typer.Option(False, help="Split the norms over the tensor-parallel ranks."),
    pipeline: int = typer.Option(1, min=1, help="Pipeline stages."),
    context: int = typer.Option(1, "--context", "--cp", min=1, help="Ranks that share every sequence."),
    expert: int = typer.Option(
        1, "--expert", "--ep", min=1, help="Of data and context ranks, those that share experts."
    ),
    interleave: int = typer.Option(1, min=1, help="Pieces of a pipeline stage."),
    replicate: int = typer.Option(1, min=1, help="Groups of data ranks that each share the weights (HSDP)."),
    releases: bool = RELEASES,
    memory_gb: float = typer.Option(None, help="Memory of a GPU in GB, in place of the table's."),
    as_json: bool = AS_JSON,
    page: Path = PAGE,
    explain: bool = EXPLAIN,
) -> None:
    """Where the memory of a training step goes, whether it fits, and what each lever would save.

    Examples:

        tilewright plan train 1b --gpu H200-SXM --micro-batch 16

        tilewright plan train run.yaml model.recompute=full --gpu H100-SXM5

        tilewright plan train path/to/config.json sequence=8192 --gpu H100-SXM5 --data 64 --zero 3 --recompute full
    """
    shape, how = load_run(
        model, changes or [],
        dict(data=data, zero=zero, tensor=tensor, sequence_parallel=sequence_parallel, pipeline=pipeline,
             interleave=interleave, context=context, expert=expert, replicate=replicate, releases=releases),
        micro_batch=micro_batch, precision=precision, optimizer=optimizer, recompute=recompute, attention=attention,
        loss=loss, accumulation=accumulation, compiled=compiled or None, lora=lora or None,
    )  # fmt: skip
    anatomy = memory.train(shape, how)
    chip = find_gpu(gpu) if gpu else None
    capacity = chip.usable_bytes if chip else None
    if memory_gb is not None:
        capacity = positive("--memory-gb", memory_gb) * 1e9
    rows = [[p.name, gigabytes(p.bytes), f"{p.bytes / anatomy.total:.1%}", p.formula] for p in anatomy.parts]
    rows.append(["total", gigabytes(anatomy.total), "", f"allocated {gigabytes(anatomy.allocated)}"])
    saved = memory.levers(shape, how)
    report = Report(
        f"{title_of(model, shape)}; peak at: {anatomy.moment}",
        {
            "model": model_data(model, shape), "training": dataclasses.asdict(how), "moment": anatomy.moment,
            "parts": [dataclasses.asdict(p) for p in anatomy.parts], "allocated": anatomy.allocated,
            "total": anatomy.total, "capacity": capacity, "levers": dict(saved),
        },
    )  # fmt: skip
    title = f"{gigabytes(anatomy.total)} on the fullest GPU" + (f" of {gigabytes(capacity)}" if capacity else "")
    report.items = [
        Grid("Memory", ["part", "bytes", "share", "formula"], rows, explained=("formula",)),
        Bar(title, [(p.name, p.bytes) for p in anatomy.parts], capacity),
        *notes_of(shape, chip),
    ]
    if how.zero == 3 and how.is_autocast:
        report.items.append(
            "Autocast keeps the stream and what norms take in float32. FSDP's own mixed precision, --precision fsdp, "
            "keeps neither."
        )
    if capacity is not None:
        largest = memory.largest_micro_batch(shape, how, capacity)
        report.data |= {"largest_micro_batch": largest, "fits": anatomy.total <= capacity}
        if largest:
            verdict = "It fits." if anatomy.total <= capacity else "It does not fit."
            report.items.append(f"{verdict} The largest micro batch that does: {largest}.")
        else:
            report.items.append("Not even one sequence fits; pull a lever, or split the model (`plan parallel`).")
    kept = budget.checkpoint(shape, how)
    report.data["checkpoint"] = dataclasses.asdict(kept)
    report.items.append(
        f"A checkpoint takes {gigabytes(kept.whole)}, of which {gigabytes(kept.weights)} are weights: "
        f"{kept.whole / 1e9:,.0f} s at a GB/s."
    )
    if saved:
        levers = [
            [
                name, gigabytes(value), f"{value / anatomy.total:.0%}",
                f"{gigabytes(anatomy.total)} - {gigabytes(anatomy.total - value)}, the total with it",
            ]
            for name, value in saved
        ]  # fmt: skip
        header = ["lever", "saves", "share", "formula"]
        report.items.append(Grid("What each lever alone would save", header, levers, explained=("formula",)))
    report.show(as_json=as_json, explain=explain, page=page)


@app.command("serve")
def serve(
    model: str = MODEL,
    changes: list[str] = CHANGES,
    gpu: str = GPU,
    batch: int = typer.Option(1, min=1, help="Sequences at once."),
    tokens: str = typer.Option(None, help="Tokens a sequence can grow to; 8k works. Default: 4096, or all it allows."),
    weights: str = typer.Option("bf16", help=", ".join(WEIGHT_BYTES) + "."),
    kv_bytes: float = typer.Option(2.0, help="Bytes of a cached number."),
    prompt: str = typer.Option(None, help="Tokens of a prompt, for the time to the first token; 2k works."),
    tensor: int = TENSOR,
    as_json: bool = AS_JSON,
    page: Path = PAGE,
    explain: bool = EXPLAIN,
) -> None:
    """The memory of inference: weights, cache and the rest, and the speed that memory allows.

    Example:

        tilewright plan serve path/to/config.json --gpu H100-SXM5 --batch 32 --tokens 8k --weights int8
    """
    shape = load_shape(model, changes or [])
    length = count(tokens) if tokens else min(4096, shape.sequence)
    anatomy = infer(shape, batch, length, weights=weights, kv_bytes=kv_bytes, tensor=tensor)
    chip = find_gpu(gpu) if gpu else None
    rows = [[p.name, gigabytes(p.bytes), f"{p.bytes / anatomy.total:.1%}", p.formula] for p in anatomy.parts]
    per_token = kv_bytes_per_token(shape, kv_bytes)
    data: dict[str, Any] = {
        "model": model_data(model, shape), "parts": [dataclasses.asdict(p) for p in anatomy.parts],
        "total": anatomy.total, "kv_bytes_per_token": per_token, "tokens": length,
    }  # fmt: skip
    items: list[Grid | Bar | str] = [Grid("Memory", ["part", "bytes", "share", "formula"], rows, ("formula",))]
    capacity = chip.usable_bytes if chip else None
    items.append(Bar(f"{gigabytes(anatomy.total)} a GPU", [(p.name, p.bytes) for p in anatomy.parts], capacity))
    windows = " until its windows are full" if shape.windowed_layers else ""
    items.append(f"The cache takes {per_token:,.0f} bytes a token{windows}.")
    if chip is not None:
        floor = decode.decode(shape, batch, length, chip, weights=weights, kv_bytes=kv_bytes, tensor=tensor)
        fits = anatomy.total <= chip.usable_bytes
        data |= {
            "capacity": capacity, "fits": fits, "decode_floor_seconds": floor.seconds, "bound": floor.bound,
            "tokens_per_second": batch / floor.seconds, "decode_bytes": floor.bytes, "decode_flops": floor.flops,
            "dtype": floor.dtype, "experts_read": floor.experts_read,
        }  # fmt: skip
        items.append(f"It {'fits' if fits else 'does not fit'} on {chip.name}.")
        items.append(
            f"A decoding step with every sequence at {length:,} tokens takes at least {floor.seconds * 1e3:.2f} ms, so "
            f"at most {batch / floor.seconds:,.0f} tokens/s. Its bound is {floor.bound}: a GPU reads "
            f"{gigabytes(floor.bytes)} and computes {floor.flops / 1e12:,.3g} TFLOPs in {floor.dtype}, at the "
            "datasheet's rates."
        )
        if prompt is not None:
            read = decode.prefill(
                shape, batch, count(prompt), parallel.Cluster(chip, tensor), weights=weights, kv_bytes=kv_bytes
            )
            data["prefill"] = dataclasses.asdict(read)
            items.append(
                f"The first token of {batch} prompts of {count(prompt):,} tokens takes at least "
                f"{read.floor * 1e3:,.1f} ms. Its bound is {read.bound}. Expected are {read.seconds * 1e3:,.1f} ms, "
                "without a queue before them."
            )
        if shape.experts > 1:
            items.append(
                f"All {shape.experts} experts are in memory; the batch reads {floor.experts_read:.1f} of them in a "
                "layer, as expected of a balanced router."
            )
    elif prompt is not None:
        raise UserError("--prompt asks for a time; give the accelerator with --gpu.")
    items += notes_of(shape, chip)
    Report(title_of(model, shape), data, items).show(as_json=as_json, explain=explain, page=page)


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
    page: Path = PAGE,
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
    Report(text, dict(values), [grid]).show(as_json=as_json, explain=False, page=page)
