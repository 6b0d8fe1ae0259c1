"""`tilewright data`: make token files and check them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from tilewright.measure.results import SCHEMA

if TYPE_CHECKING:
    from tilewright.train.tokens import Part

app = typer.Typer(rich_markup_mode=None, no_args_is_help=True, help="Make token files of text, and check them.")

AS_JSON = typer.Option(False, "--json", help="Print JSON instead of a line a file.")


@app.command("pack")
def pack(
    paths: list[str] = typer.Argument(help="Files of text, or folders: all text below, hidden files and links aside."),
    out: Path = typer.Option(..., help="The token file to write; data.paths finds *.tokens in folders."),
    tokenizer: str = typer.Option("bytes", help="`bytes`, or the path of a Hugging Face tokenizer.json."),
    as_json: bool = AS_JSON,
) -> None:
    """Turn text into one token file, which training reads with data.kind=tokens.

    Examples:

        tilewright data pack corpus/ --out corpus.tokens

        tilewright data pack one.txt two.txt --tokenizer path/to/tokenizer.json --out both.tokens
    """
    from tilewright.train import text

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        task = bars.add_task("Packing", total=None)
        files = text.text_files(paths)
        part = text.pack(files, out, tokenizer, lambda done, total: bars.update(task, completed=done, total=total))
    _show([part], as_json)


@app.command("check")
def check(
    files: list[Path] = typer.Argument(help="Token files."),
    as_json: bool = AS_JSON,
) -> None:
    """Read token files through: are they whole, and are their tokens those that were written?

    Exit code 2, and what is wrong, at the first one that is not.

    Example:

        tilewright data check *.tokens
    """
    from tilewright.train.tokens import verify

    _show([verify(path) for path in files], as_json)


def _show(parts: list[Part], as_json: bool) -> None:
    facts: list[dict[str, Any]] = [
        {
            "file": str(part.path), "tokens": part.tokens, "vocabulary": part.vocabulary,
            "bytes": part.offset + part.tokens * part.width,
        }
        for part in parts
    ]  # fmt: skip
    if as_json:
        print(json.dumps({"schema": SCHEMA, "files": facts}))
        return
    for fact in facts:
        print(f"{fact['file']}: {fact['tokens']:,} tokens, vocabulary {fact['vocabulary']:,}, {fact['bytes']:,} bytes")
