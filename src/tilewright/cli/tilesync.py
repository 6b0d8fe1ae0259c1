"""`tilewright tilesync`: how tiles that wait for each other fill the GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from tilewright import hardware
from tilewright.cli.output import Grid, Report
from tilewright.errors import UserError

app = typer.Typer(rich_markup_mode=None, no_args_is_help=True, help="Dependent tile kernels that wait tile by tile.")


@app.callback()
def _root() -> None:
    pass


@app.command("show")
def show(
    chain: str = typer.Argument(
        help="llama-mlp, llama-mlp-2816, gpt3-mlp, attention, decode-1b, conv-56, conv-28, conv-14, conv-7."
    ),
    rows: int = typer.Option(1, min=1, help="Rows of x; images of a convolution."),
    gpu: str = typer.Option("H200", help="Accelerator to simulate."),
    measured: bool = typer.Option(
        False, "--measured", help="Run on this machine's Hopper instead; times from the kernel."
    ),
    page: Path | None = typer.Option(None, "--html", help="Also draw the schedule, as a self-contained HTML page."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead of tables."),
) -> None:
    """Show a chain's schedule: one stage after the other, and tile by tile."""
    from tilewright.tilesync import chains, simulate
    from tilewright.tilesync.check import check
    from tilewright.tilesync.show import figure

    if chain not in chains.CHAINS:
        raise UserError(f"There is no chain {chain!r}; take one of {', '.join(chains.CHAINS)}.")
    hardware.find(gpu)
    machine = simulate.Machine.of(gpu)
    program = check(chains.CHAINS[chain](rows))
    if measured:
        timelines = _measure(program)
    else:
        timelines = {
            "serial": simulate.simulate_serial(program, machine),
            "tilesync": simulate.simulate(program, machine),
        }
    prediction = simulate.predict(program, machine)
    serial, synchronised = (timeline.seconds for timeline in timelines.values())
    source = "measured here" if measured else f"simulated for {gpu}"
    stages = [
        [stage.name, type(stage).__name__, " x ".join(map(str, stage.grid)), str(len(stage.tiles)),
         ", ".join(f"{tensor}: {type(policy).__name__}" for (tensor, _, consumer), policy in program.policies.items()
                   if consumer == stage.name) or "-"]
        for stage in program.stages
    ]  # fmt: skip
    schedules = [
        [name, f"{1e6 * timeline.seconds:.1f}", f"{100 * timeline.busy:.0f}%"] for name, timeline in timelines.items()
    ]
    saving = f"Waiting tile by tile saves {100 * (1 - synchronised / serial):.1f}% of the time"
    items: list[Any] = [
        Grid("Stages", ["stage", "kind", "grid", "tiles", "policies"], stages),
        Grid(f"Schedules, {source}", ["schedule", "µs", "busy"], schedules),
        f"{saving}; idle SMs are {100 * prediction.tail:.1f}% of the serial schedule by the simulator.",
        f"{len(program.tasks)} tiles, semaphores: {len(program.semaphores)}. Every wait is for a tile that begins "
        "earlier, so nothing can deadlock.",
    ]
    data = {
        "chain": chain, "rows": rows, "source": source, "tiles": len(program.tasks),
        "semaphores": len(program.semaphores), "serial_seconds": serial, "synchronised_seconds": synchronised,
        "predicted": {"serial": prediction.serial, "synchronised": prediction.synchronised, "ideal": prediction.ideal},
    }  # fmt: skip
    drawn = figure(program, timelines) if page is not None else None
    Report(f"{chain}, {rows} rows", data, items, drawn).show(as_json=as_json, explain=False, page=page)


def _measure(program: Any) -> dict[str, Any]:
    """Both schedules by the kernel's own clock, each after a run that warms up."""
    import torch

    from tilewright.runtime import dispatch
    from tilewright.tilesync import launch
    from tilewright.tilesync.show import timeline_of

    if not torch.cuda.is_available():
        raise UserError("PyTorch sees no GPU to measure on; leave out --measured for the simulator.")
    device = torch.device("cuda", torch.cuda.current_device())
    inputs = {
        name: torch.full(shape, program.graph.shape("k0")[0] // 2, device=device, dtype=torch.int32)
        if name in program.graph.integers
        else torch.randn(shape, device=device, dtype=torch.bfloat16) * shape[-1] ** -0.5
        for name, shape in program.graph.inputs.items()
    }
    if why := launch.why_no_kernel(program, list(inputs.values())):
        raise UserError(f"The chain cannot run here. {why} Leave out --measured for the simulator.")
    runner, timelines = launch.runner(program, device, torch.bfloat16), {}
    for name, mode in (("serial", "serial"), ("tilesync", "persistent")):
        runner.run(mode, inputs)
        timelines[name] = timeline_of(runner.times(mode, inputs), dispatch.multiprocessors(device))
    return timelines
