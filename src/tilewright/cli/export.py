"""`tilewright export`: a trained model as files that others read."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from tilewright.errors import UserError

FORMATS = ("safetensors", "huggingface")


def export(
    source: Path = typer.Argument(metavar="RUN_OR_CHECKPOINT", help="A run's folder, or one checkpoint of it."),
    out: Path = typer.Option(help="The folder to write; it must not be there, or be empty."),
    form: str = typer.Option("huggingface", "--format", help=f"{' or '.join(FORMATS)}."),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
) -> None:
    """Write the weights of a run's newest checkpoint: alone, or as a folder that transformers loads.

    Examples:

        tilewright export runs/default --out my-gpt

        tilewright export runs/default/checkpoints/step-00000100 --out weights --format safetensors
    """
    if form not in FORMATS:
        raise UserError(f"format is {form!r}; choose {' or '.join(FORMATS)}.")
    from tilewright.train.export import export_huggingface, export_safetensors, load_model, refuse_taken, tokenizer_of

    refuse_taken(out)
    model, note = load_model(source), ""
    if form == "huggingface":
        tokenizer, note = tokenizer_of(source)
        export_huggingface(model, out, tokenizer)
    else:
        export_safetensors(model, out / "model.safetensors")
    if as_json:
        print(json.dumps({"out": str(out), "format": form, "parameters": model.config.parameters, "note": note}))
    else:
        typer.echo(f"{model.config.parameters / 1e6:.1f}M parameters are in {out}." + (f" {note}" if note else ""))
