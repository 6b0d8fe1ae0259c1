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
    jobs: int = typer.Option(min(8, os.cpu_count() or 1), help="Processes that compile ahead; 1: none."),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
    out: Path = typer.Option(None, help="Also write the JSON to this file, after every case."),
) -> None:
    """Measure an op against eager PyTorch, torch.compile and other packages, and the memory's own speed.

    Examples:

        tilewright bench dropout_add_norm --quick

        tilewright bench dropout_add_norm --out results/h200/dropout_add_norm.json

        tilewright bench train --only 125m
    """
    if name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.3)
        hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(NAMES)}."
        raise UserError(f"There is no benchmark {name!r}; {hint}")
    module = importlib.import_module(f"tilewright.bench.{name}")

    def save(result: dict[str, Any]) -> None:
        if out is not None:
            write_json(out, result)

    from tilewright.bench.protocol import Ask
    from tilewright.cli.progress import Stages

    with Stages() as stages:
        result = module.run(Ask(stages.line, save, quick, only, jobs))
    if as_json:
        print(json.dumps(result))
