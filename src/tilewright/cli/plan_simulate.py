"""`tilewright plan simulate`: a small run on paper at the size of a large cluster, with its failures."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import typer

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
    RECOMPUTE,
    app,
    load_shape,
    model_data,
    notes_of,
    title_of,
)  # fmt: skip
from tilewright.cli.plan_cluster import LINK, NETWORK, NODE, basis, make_cluster
from tilewright.errors import UserError
from tilewright.plan import budget, failures, parallel, replay
from tilewright.plan.flops import DEFAULT, conventions
from tilewright.plan.training import PRECISIONS, Training, check_parallel

_COPY = 25e9  # bytes a second that a GPU copies to its host, behind a training run
_MOST_SIZES = 32


@app.command("simulate")
def simulate(
    model: str = MODEL,
    changes: list[str] = CHANGES,
    gpu: str = GPU,
    gpus: str = typer.Option("8,64,512,4096,16384", help="Sizes to simulate."),
    events: Path = typer.Option(None, help="JSON of a small run's events, in place of the model's own plan."),
    micro_batch: int = MICRO,
    accumulation: int = typer.Option(1, min=1, help="Micro batches a step."),
    precision: str = typer.Option("fsdp", help=", ".join(PRECISIONS) + "."),
    optimizer: str = OPTIMIZER,
    recompute: str = RECOMPUTE,
    compiled: bool = COMPILED,
    zero: int = typer.Option(3, min=0, max=3, help="ZeRO stage; 3 is FSDP."),
    tensor: int = typer.Option(1, "--tensor", "--tp", min=1, help="Tensor-parallel ranks."),
    pipeline: int = typer.Option(1, "--pipeline", "--pp", min=1, help="Pipeline stages."),
    interleave: int = typer.Option(1, min=1, help="Pieces of a pipeline stage."),
    node: int = NODE,
    link: float = LINK,
    network: float = NETWORK,
    hours_a_failure: float = typer.Option(
        failures.HOURS_A_FAILURE, help="GPU-hours between two failures. Default: Llama 3's, 419 in 54 days of 16,384."
    ),
    restart: float = typer.Option(failures.RESTART_SECONDS, help="Seconds of a restart, without the checkpoint."),
    storage: float = typer.Option(0.125, help="GB/s a GPU that checkpoints are written with; Llama 3's had 2 TB/s."),
    background: bool = typer.Option(False, help="Checkpoints are written while the run goes on."),
    as_json: bool = AS_JSON,
    page: Path = PAGE,
    explain: bool = EXPLAIN,
) -> None:
    """A small run on more GPUs: speed, failures, the best checkpoint interval and goodput.

    Every rank has as much to do as in the small run, so the batch grows with the GPUs.

    Example:

        tilewright plan simulate 7b --gpu H100-SXM5 --micro-batch 6 --gpus 8,512,16384
    """
    shape = load_shape(model, changes or [])
    how = Training(
        micro_batch=micro_batch or 1, accumulation=accumulation, precision=precision, optimizer=optimizer or "adamw",
        recompute=recompute or "none", compiled=compiled, loss="fused", zero=zero, tensor=tensor, pipeline=pipeline,
        sequence_parallel=tensor > 1, interleave=interleave,
    )  # fmt: skip
    check_parallel(shape, how)
    recording = replay.read(events) if events is not None else None
    kept = budget.checkpoint(shape, how)
    found = []
    for size in _sizes(gpus):
        cluster = make_cluster(gpu, size, node, link, network, None)
        seconds, tokens, mfu = _step(recording, shape, how, cluster)
        failing = failures.of_cluster(
            size, kept.whole, hours_a_failure=positive("--hours-a-failure", hours_a_failure),
            restart=positive("--restart", restart), storage=positive("--storage", storage) * 1e9 * size,
            copy=_COPY if background else None,
        )  # fmt: skip
        interval = failing.best_interval()
        goodput = failing.simulate(interval)
        found.append(
            {
                "gpus": size, "step_seconds": seconds, "tokens_per_second": tokens / seconds, "mfu": mfu,
                "failures_a_day": 86400 / failing.between, "checkpoint_seconds": failing.write,
                "best_interval_seconds": interval, "young_seconds": failing.young(), "daly_seconds": failing.daly(),
                "goodput": goodput, "tokens_a_day": 86400 * goodput * tokens / seconds,
            }
        )  # fmt: skip
    report = Report(
        f"{title_of(model, shape)}; {cluster.accelerator.name}",
        {
            "model": model_data(model, shape), "training": dataclasses.asdict(how), "sizes": found,
            "checkpoint_bytes": kept.whole, "hours_a_failure": hours_a_failure, "restart_seconds": restart,
        },
        [
            _grid(found),
            f"Assumed: one failure in {hours_a_failure:,.0f} GPU-hours, by chance at a constant rate; a restart of "
            f"{restart:,.0f} s, and reading the checkpoint; {kept.whole / 1e9:,.0f} GB of it at {storage:g} GB/s a "
            f"GPU, {'in the background' if background else 'while the run waits'}; no slow ranks, no maintenance.",
            "The best interval and goodput are simulated, 3,000 failures each; Young's formula stands beside them.",
            *(basis(cluster, how) if recording is None else [f"Steps are those of {events}, its traffic scaled."]),
            *(_FORMULAS if explain else ()),
            *notes_of(shape, cluster.accelerator),
        ],
    )  # fmt: skip
    report.show(as_json=as_json, explain=explain, page=page)


def _sizes(text: str) -> list[int]:
    sizes = [count(part.strip()) for part in text.split(",") if part.strip()]
    if not 1 <= len(sizes) <= _MOST_SIZES:
        raise UserError(f"--gpus is {text!r}; give 1 to {_MOST_SIZES} sizes, such as 8,512,16384.")
    return sizes


def _step(
    recording: replay.Recording | None, shape: Any, how: Training, cluster: parallel.Cluster
) -> tuple[float, float, float]:
    """Seconds and tokens of a step, and its MFU."""
    size, ranks = cluster.gpus, how.tensor * how.pipeline
    if recording is not None:
        seconds, tokens = recording.replay(size, cluster.links), recording.tokens * size / recording.gpus
        peak = cluster.accelerator.peak_flops[cluster.matmul(how.precision).dtype]
        return seconds, tokens, tokens * conventions(shape)[DEFAULT].model / seconds / (size * peak)
    if size % ranks:
        raise UserError(
            f"{size} GPUs do not divide by tensor {how.tensor} x pipeline {how.pipeline}; give other --gpus."
        )
    data = size // ranks
    plan = parallel.estimate(shape, dataclasses.replace(how, data=data, zero=how.zero if data > 1 else 0), cluster)
    return plan.seconds, plan.tokens_per_second * plan.seconds, plan.mfu


def _grid(found: list[dict[str, Any]]) -> Grid:
    header = ["GPUs", "s/step", "tokens/s", "MFU", "failures a day", "checkpoint, s", "best interval, s", "Young, s"]
    rows = [
        [f"{row['gpus']:,}", f"{row['step_seconds']:.3g}", f"{row['tokens_per_second']:,.0f}", f"{row['mfu']:.1%}",
         f"{row['failures_a_day']:.3g}", f"{row['checkpoint_seconds']:.3g}", f"{row['best_interval_seconds']:,.0f}",
         f"{row['young_seconds']:,.0f}", f"{row['goodput']:.1%}", f"{row['tokens_a_day'] / 1e9:,.4g}"]
        for row in found
    ]  # fmt: skip
    return Grid("The same run on more GPUs", [*header, "goodput", "GTokens a day"], rows)


_FORMULAS = (
    "failures: exponential, one in (GPU-hours a failure) / GPUs hours; each loses the work since the last whole "
    "checkpoint, and costs a restart; a failure in a restart begins it again",
    "goodput = work that is kept / time; Young: sqrt(2 x checkpoint x time between failures)",
    "checkpoint = parameters x (stored bytes + optimizer's) / (storage of all GPUs together)",
)
