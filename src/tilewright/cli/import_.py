"""`tilewright import`: a Hugging Face GPT-2 or Llama as a run to go on from."""

from __future__ import annotations

import json
from pathlib import Path

import typer


def import_(
    folder: Path = typer.Argument(help="A local Hugging Face folder: config.json and model.safetensors."),
    out: Path = typer.Option(help="The run's folder to write; it must not be there, or be empty."),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
) -> None:
    """Make a run of a GPT-2 or Llama that Hugging Face transformers has saved; `train` begins with its weights.

    Reads JSON and safetensors: no pickle, no code of the folder's, no network. What a GPT of Tilewright cannot compute
    exactly is refused by name.

    Examples:

        tilewright import path/to/llama --out runs/llama

        tilewright train runs/llama/config.yaml data.paths=[my-text] optimizer.learning_rate=2e-5
    """
    from tilewright.train.import_ import import_run

    found = import_run(folder, out)
    config, parameters = out / "config.yaml", found.model.config.parameters
    if as_json:
        facts = {"out": str(out), "config": str(config), "parameters": parameters, "notes": found.notes}
        print(json.dumps(facts))
        return
    typer.echo(f"{parameters / 1e6:.1f}M parameters are in {out}; begin with `tilewright train {config}`.")
    for note in found.notes:
        typer.echo(note)
