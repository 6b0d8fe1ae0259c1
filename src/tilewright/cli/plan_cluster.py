"""The part of `tilewright plan` that is about a step's expected time, on one GPU or on many."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import typer

from tilewright.cli.output import Bar, Grid, Report, count, gigabytes, positive
from tilewright.cli.plan import (
    AS_JSON,
    CHANGES,
    COMPILED,
    EXPLAIN,
    GPU,
    LORA,
    MICRO,
    MODEL,
    OPTIMIZER,
    PAGE,
    PRECISION,
    RECOMPUTE,
    RELEASES,
    app,
    find_gpu,
    load_run,
    load_shape,
    model_data,
    notes_of,
    title_of,
)  # fmt: skip
from tilewright.errors import UserError
from tilewright.plan import budget, calibration, memory, parallel
from tilewright.plan.training import PRECISIONS, Training, check_parallel

NODE = typer.Option(8, min=1, help="GPUs a node.")
LINK = typer.Option(None, help="GB/s a GPU inside a node, one direction; default: the table's.")
NETWORK = typer.Option(50.0, help="GB/s a GPU between nodes.")
MEMORY = typer.Option(None, help="Memory of a GPU in GB, in place of the table's.")
GPUS = typer.Option(..., help="How many; 16k works.")
GLOBAL_BATCH = typer.Option(..., help="Sequences a step.")


TOKENS = typer.Option(None, help="Of the whole run; 15T works. Gives days, GPU-hours and energy.")
PRICE = typer.Option(None, help="Dollars a GPU-hour, with --tokens.")
GOODPUT = typer.Option(1.0, help="Share of the time in which the GPUs train; `plan simulate` estimates it.")
POWER = typer.Option(budget.POWER_OVERHEAD, help="Power of nodes and cooling over that of the GPUs at their limit.")


def add_budget(
    report: Report, plan: parallel.Plan, cluster: parallel.Cluster, tokens: str | None, price: float | None,
    goodput: float, power_overhead: float,
) -> None:  # fmt: skip
    """What the whole run takes, if somebody has said how many tokens it has."""
    if tokens is None:
        if price is not None:
            raise UserError("--price is of a whole run; give its --tokens, too.")
        return
    found = budget.budget(
        count(tokens), plan.tokens_per_second, cluster.gpus, cluster.accelerator.watts, price=price, goodput=goodput,
        power_overhead=power_overhead,
    )  # fmt: skip
    report.data["budget"] = dataclasses.asdict(found)
    dollars = "n/a" if found.dollars is None else f"{found.dollars:,.0f}"
    row = [f"{found.days:,.1f}", f"{found.gpu_hours:,.0f}", dollars, f"{found.megawatt_hours:,.1f}"]
    report.items += [
        Grid(f"For {count(tokens):,} tokens", ["days", "GPU-hours", "dollars", "MWh"], [row]),
        f"At {goodput:.0%} goodput; GPUs at their limit of {cluster.accelerator.watts:g} W, and {power_overhead:g} "
        "times that with nodes and cooling.",
    ]


def make_cluster(
    gpu: str | None, gpus: int, node: int, link: float | None, network: float, memory_gb: float | None
) -> parallel.Cluster:
    """The GPUs that the options describe."""
    cluster = parallel.Cluster(
        accelerator=find_gpu(gpu),
        gpus=gpus,
        node=node,
        link=None if link is None else positive("--link", link) * 1e9,
        network=positive("--network", network) * 1e9,
        memory=None if memory_gb is None else positive("--memory-gb", memory_gb) * 1e9,
    )
    cluster.check()
    return cluster


def basis(cluster: parallel.Cluster, how: Training) -> list[Grid | Bar | str]:
    """What an estimate rests on."""
    matmul, links = cluster.matmul(how.precision), ""
    if cluster.gpus > 1:
        links = f" Links of {cluster.link_rate / 1e9:g} GB/s in a node and {cluster.network / 1e9:g} between nodes."
    return [
        f"The best matmul has {matmul.flops / 1e12:,.4g} TFLOPS: {matmul.source}.",
        f"What kernels reach of it: {calibration.of(cluster.accelerator).source}.{links}",
    ]


@app.command("step")
def step_command(
    model: str = MODEL,
    changes: list[str] = CHANGES,
    gpu: str = GPU,
    micro_batch: int = MICRO,
    precision: str = PRECISION,
    optimizer: str = OPTIMIZER,
    recompute: str = RECOMPUTE,
    loss: str = typer.Option(None, help="plain (the default), fused or linear_fused."),
    compiled: bool = COMPILED,
    lora: int = LORA,
    accumulation: int = typer.Option(None, min=1, help="Micro batches a step."),
    data: int = typer.Option(1, min=1, help="Data-parallel ranks."),
    zero: int = typer.Option(0, min=0, max=3, help="ZeRO stage; 3 is FSDP."),
    tensor: int = typer.Option(1, "--tensor", "--tp", min=1, help="Tensor-parallel ranks."),
    pipeline: int = typer.Option(1, "--pipeline", "--pp", min=1, help="Pipeline stages."),
    interleave: int = typer.Option(1, min=1, help="Pieces of a pipeline stage."),
    replicate: int = typer.Option(1, min=1, help="Groups of data ranks that each share the weights (HSDP)."),
    context: int = typer.Option(1, "--context", "--cp", min=1, help="Ranks that share every sequence."),
    expert: int = typer.Option(
        1, "--expert", "--ep", min=1, help="Of data and context ranks, those that share experts."
    ),
    node: int = NODE,
    link: float = LINK,
    network: float = NETWORK,
    tokens: str = TOKENS,
    price: float = PRICE,
    goodput: float = GOODPUT,
    power_overhead: float = POWER,
    as_json: bool = AS_JSON,
    page: Path = PAGE,
    explain: bool = EXPLAIN,
) -> None:
    """How long a step of this run takes, and where the time goes.

    Example:

        tilewright plan step 7b --gpu H100-SXM5 --micro-batch 6 --data 8 --zero 3 --loss fused
    """
    split = dict(data=data, zero=zero, tensor=tensor, sequence_parallel=tensor > 1, pipeline=pipeline,
                 interleave=interleave, context=context, expert=expert, replicate=replicate)  # fmt: skip
    shape, how = load_run(
        model, changes or [], split, micro_batch=micro_batch, precision=precision, optimizer=optimizer,
        recompute=recompute, loss=loss, accumulation=accumulation, compiled=compiled or None,
        lora=lora or None,
    )  # fmt: skip
    check_parallel(shape, how)
    cluster = make_cluster(gpu, how.ranks, node, link, network, None)
    found = parallel.estimate(shape, how, cluster, memory.train(shape, how).total)
    rows = [
        [name, f"{1e3 * seconds:,.2f}", f"{seconds / found.seconds:.1%}"]
        for name, seconds in (*found.parts.items(), *_traffic(found).items())
        if seconds
    ]
    report = Report(
        f"{title_of(model, shape)}; {cluster.gpus:,} {cluster.accelerator.name}, micro batch {how.micro_batch}",
        {
            "model": model_data(model, shape), "gpu": cluster.accelerator.name, **dataclasses.asdict(found),
            "matmul": dataclasses.asdict(cluster.matmul(how.precision)),
            "calibration": dataclasses.asdict(calibration.of(cluster.accelerator)),
        },
        [
            Grid("Where a step's time goes", ["part", "ms", "share"], rows),
            f"A step: {1e3 * found.seconds:,.1f} ms, {found.tokens_per_second:,.0f} tokens/s, MFU {found.mfu:.1%} of "
            f"the datasheet; {gigabytes(found.memory)} a GPU{_verdict(found, cluster)}.",
            *basis(cluster, how),
            *(_STEP_FORMULAS if explain else ()),
            *notes_of(shape, cluster.accelerator),
        ],
    )  # fmt: skip
    add_budget(report, found, cluster, tokens, price, goodput, power_overhead)
    report.show(as_json=as_json, explain=explain, page=page)


def _traffic(plan: parallel.Plan) -> dict[str, float]:
    """Seconds that are no computing, by the word that tables have for them."""
    kinds = ("tensor_traffic", "context_traffic", "expert_traffic", "pipeline_traffic", "bubble", "data_traffic")
    return {kind.replace("_", " "): getattr(plan, kind) for kind in kinds}


def _verdict(plan: parallel.Plan, cluster: parallel.Cluster) -> str:
    return "" if plan.fits else f", more than the {gigabytes(cluster.capacity)} that a GPU has"


@app.command("parallel")
def parallel_command(
    model: str = MODEL,
    changes: list[str] = CHANGES,
    gpu: str = GPU,
    gpus: str = GPUS,
    global_batch: str = GLOBAL_BATCH,
    node: int = NODE,
    link: float = LINK,
    network: float = NETWORK,
    memory_gb: float = MEMORY,
    precision: str = typer.Option("fsdp", help=", ".join(PRECISIONS) + "."),
    optimizer: str = OPTIMIZER,
    compiled: bool = COMPILED,
    lora: int = LORA,
    tensor: int = typer.Option(None, "--tensor", "--tp", min=1, help="These tensor-parallel ranks and no others."),
    pipeline: int = typer.Option(None, "--pipeline", "--pp", min=1, help="These pipeline stages and no others."),
    interleave: int = typer.Option(None, min=1, help="So many pieces of a stage."),
    data: int = typer.Option(None, "--data", "--dp", min=1, help="These data-parallel ranks."),
    context: int = typer.Option(None, "--context", "--cp", min=1, help="So many ranks share every sequence."),
    expert: int = typer.Option(None, "--expert", "--ep", min=1, help="So many share the experts."),
    zero: int = typer.Option(None, min=0, max=3, help="This ZeRO stage; 3 is FSDP."),
    recompute: str = typer.Option(None, help="none, selective or full; default: all are tried."),
    micro_batch: int = typer.Option(None, min=1, help="This micro batch."),
    releases: bool = RELEASES,
    keep: int = typer.Option(10, min=1, help="Plans to show."),
    tokens: str = TOKENS,
    price: float = PRICE,
    goodput: float = GOODPUT,
    power_overhead: float = POWER,
    as_json: bool = AS_JSON,
    page: Path = PAGE,
    explain: bool = EXPLAIN,
) -> None:
    """Every way to spread a run over many GPUs that fits, fastest first; or those with a given layout.

    Examples:

        tilewright plan parallel 70b --gpu H100-SXM5 --gpus 512 --global-batch 2048

        tilewright plan parallel 70b --gpu H100-SXM5 --gpus 512 --global-batch 2048 --tp 8 --pp 2

        tilewright plan parallel 7b --gpu H200-SXM --gpus 64 --global-batch 512 --tokens 1T --price 2.5
    """
    shape, cluster = load_shape(model, changes or []), make_cluster(gpu, count(gpus), node, link, network, memory_gb)
    base = Training(precision=precision, optimizer=optimizer or "adamw", loss="fused", compiled=compiled, lora=lora,
                    releases=releases)  # fmt: skip
    given: dict[str, Any] = dict(tensor=tensor, pipeline=pipeline, interleave=interleave, data=data, zero=zero,
                                 recompute=recompute, micro_batch=micro_batch, context=context,
                                 expert=expert)  # fmt: skip
    given = {name: value for name, value in given.items() if value is not None}
    plans = parallel.search(shape, cluster, count(global_batch), keep, base, given)
    report = Report(
        f"{title_of(model, shape)}; {cluster.gpus:,} {cluster.accelerator.name}, global batch {count(global_batch):,}",
        {
            "model": model_data(model, shape),
            "plans": [dataclasses.asdict(p) for p in plans],
            "matmul": dataclasses.asdict(cluster.matmul(precision)),
            "calibration": dataclasses.asdict(calibration.of(cluster.accelerator)),
        },
        [
            _plans_grid(plans),
            *(_PARALLEL_FORMULAS if explain else ()),
            f"Fastest: {plans[0].tokens_per_second:,.0f} tokens/s, with the fused loss"
            f"{_verdict(plans[0], cluster)}. MFU is of the datasheet's dense {cluster.matmul(precision).dtype} peak.",
            *basis(cluster, base),
            *notes_of(shape, cluster.accelerator),
        ],
    )
    add_budget(report, plans[0], cluster, tokens, price, goodput, power_overhead)
    report.show(as_json=as_json, explain=explain, page=page)


def _plans_grid(plans: list[parallel.Plan]) -> Grid:
    rows = [
        [str(p.training.tensor), _stages(p), _data(p), str(p.training.zero), p.training.recompute,
         f"{p.training.micro_batch} x {p.training.accumulation}", f"{p.seconds:.2f}", f"{p.bubble / p.seconds:.0%}",
         f"{(sum(_traffic(p).values()) - p.bubble) / p.seconds:.0%}", gigabytes(p.memory),
         f"{p.mfu:.1%}"]
        for p in plans
    ]  # fmt: skip
    header = ["tensor", "stages", "data", "ZeRO", "recompute", "micro x steps", "s/step", "bubble", "links"]
    return Grid("Plans, fastest first", [*header, "memory", "MFU"], rows)


def _data(plan: parallel.Plan) -> str:
    how = plan.training
    shared = [f"{name} {size}" for name, size in (("cp", how.context), ("ep", how.expert)) if size > 1]
    return str(how.data) + (f" ({', '.join(shared)})" if shared else "")


def _stages(plan: parallel.Plan) -> str:
    pieces = plan.training.interleave
    return str(plan.training.pipeline) + (f" ({pieces} pieces)" if pieces > 1 else "")


_STEP_FORMULAS = (
    "op = max(FLOPs / matmul, bytes / copy) / share; a matmul's share falls with tiles that stick out and waves that "
    "are not full, attention's with short sequences",
    "idle = what the host needs to launch a step's ops beyond what the device needs to run them",
)
_PARALLEL_FORMULAS = (
    "step = compute of the fullest rank (`plan step`) + bubble + traffic that nothing hides",
    "bubble = (pipeline - 1) x one micro batch / pieces; over the ideal time (p - 1) / (m x pieces)",
    "ring of r ranks = (r - 1)/r x bytes / rate + (r - 1) x latency; rate = 3/4 of the least of link and network x "
    "(GPUs of a node that share a group)",
    "tensor traffic = layers x 4 (6 with full recompute) x 2 rings of the tokens' width, not hidden",
    "context traffic = layers x 3 (4) rings of the sequence's keys and values; expert traffic = mixture layers x 4 (6) "
    "exchanges of the tokens' copies; neither hidden",
    "pipeline traffic = steps x pieces x 2 x tokens x h x bytes / t / rate",
    "data traffic = rings of gradients, under ZeRO 3 of weights before each layer: what is longer than the computing "
    "beside it, and what both cost each other",
)
