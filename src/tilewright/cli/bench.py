"""`tilewright bench`: measure an op against its peers and the GPU's own limits."""

from __future__ import annotations

import difflib
import importlib
import json
import os
from pathlib import Path
from typing import Any

import typer

from tilewright.bench import NAMES
from tilewright.errors import UserError
from tilewright.measure.results import write_json


def bench(
    name: str = typer.Argument(help=f"What to measure: {', '.join(NAMES)}."),
    quick: bool = typer.Option(False, help="A few cases only."),
    only: str = typer.Option("", help="Those cases whose label, as it is printed, has this in it."),
    jobs: int = typer.Option(
        None, help="Processes that compile; 1: none of its own. [default: 8, for shapes all cores but 2]"
    ),
    seed: int = typer.Option(0, help="Of the cases that shapes draws."),
    cases: int = typer.Option(200, help="How many cases shapes draws for each op."),
    ops: str = typer.Option("", help="The ops that shapes measures, with commas; all if left out."),
    budget: float = typer.Option(
        0.0, help="Seconds after which shapes stops and names what it has not reached; 0: none."
    ),
    resume: bool = typer.Option(False, help="Let shapes go on with the cases that are not in --out yet."),
    again: str = typer.Option(
        "",
        help="Beside --resume, measure cases of --out again: device, those behind by device time; behind, those behind "
        "by device or wall time; all.",
    ),
    learn: bool = typer.Option(False, help="Let ops.attention pick its backends by what attention measures here."),
    against: Path = typer.Option(
        None,
        help="A result, or a folder of results: measure only ours, and name what is slower. With `bench all`: each.",
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
    out: Path = typer.Option(None, help="Also write the JSON to this file, after every case."),
) -> None:
    """Measure an op against eager PyTorch, torch.compile and other packages, and the memory's own speed.

    Examples:

        tilewright bench dropout_add_norm --quick

        tilewright bench dropout_add_norm --out results/h200/dropout_add_norm.json

        tilewright bench all --against results/h200

        tilewright bench train --only 125m

        tilewright bench shapes --seed 1 --ops rope,swiglu --budget 420 --out shapes.json

        tilewright bench shapes --seed 1 --ops rope --resume --again device --out shapes.json
    """
    if name not in NAMES and not (name == "all" and against is not None):
        near = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.3)
        hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(NAMES)}."
        raise UserError(f"There is no benchmark {name!r}; {hint}")
    if name != "shapes" and (resume or (seed, cases, ops, budget, again) != (0, 200, "", 0.0, "")):
        raise UserError("--seed, --cases, --ops, --budget, --resume, --again are of `tilewright bench shapes` alone.")
    if again and not resume:
        raise UserError("--again measures cases of --out once more; give --resume, and --out, too.")
    if learn and name != "attention":
        raise UserError("--learn is of `tilewright bench attention` alone.")
    if against is not None and out is not None:
        raise UserError("--against measures only ours, which is no result to record; leave out --out.")

    def save(result: dict[str, Any]) -> None:
        if out is not None:
            write_json(out, result)

    previous = _read_previous(out) if resume else None
    cores = os.cpu_count() or 1
    jobs = jobs or (max(1, cores - 2) if name == "shapes" else min(8, cores))
    from tilewright.bench.protocol import Ask
    from tilewright.cli.progress import Stages
    from tilewright.measure.compile_cache import own_compile_cache, redirect_defaults

    redirect_defaults()
    with own_compile_cache(), Stages() as stages:
        ask = Ask(stages.line, save, quick, only, jobs, seed, cases, ops, budget, previous, again, learn)
        if against is None:
            result = importlib.import_module(f"tilewright.bench.{name}").run(ask)
        else:
            from tilewright.bench.against import run

            changes = run(name, against, ask)
            result = {
                "slower": sum(each.is_slower for each in changes),
                "changes": [each._asdict() for each in changes],
            }
    if as_json:
        print(json.dumps(result))
    if against is not None and result["slower"]:
        raise typer.Exit(1)


def _read_previous(out: Path | None) -> dict[str, Any]:
    if out is None:
        raise UserError("--resume goes on with the file of --out; give --out too.")
    try:
        result: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"Cannot resume {out}: {error}; leave out --resume to start anew.") from error
    return result
