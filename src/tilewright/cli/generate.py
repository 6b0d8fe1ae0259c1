"""`tilewright generate`: text from a model, and how fast it came."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tilewright.cli.output import printable
from tilewright.errors import UserError

if TYPE_CHECKING:
    from tilewright.generate import Generator, Metrics

_DTYPES = ("bf16", "fp16", "fp32")
_DRAFTED = 4  # tokens that a draft model proposes, where nobody says how many


def generate(
    folder: Path = typer.Argument(help="A Hugging Face folder, or a run's folder or checkpoint of `tilewright train`."),
    prompt: str = typer.Argument(help="The text to go on from."),
    max_tokens: int = typer.Option(128, help="The most tokens that follow."),
    temperature: float = typer.Option(0.0, help="0 takes the likeliest token; above 0 draws."),
    top_k: int = typer.Option(0, help="Draw from the k likeliest tokens; 0: from all."),
    top_p: float = typer.Option(1.0, help="Draw from the fewest tokens that have this much of the probability."),
    min_p: float = typer.Option(0.0, help="Draw from tokens of at least this share of the likeliest's probability."),
    seed: int = typer.Option(0, help="The same seed draws the same text."),
    stop: list[str] = typer.Option([], help="End at this text, which is left out; may be given more than once."),
    speculate: int = typer.Option(
        None, help="Tokens that the text so far, or --draft, may propose at a time. [default: none, and 4 with --draft]"
    ),
    draft: Path = typer.Option(None, help="A smaller model with the same tokenizer, which proposes tokens instead."),
    context: int = typer.Option(None, help="Tokens the cache has room for. [default: as many as are needed]"),
    graph: bool = typer.Option(None, help="One CUDA graph for each step. [default: on a GPU]"),
    compile: bool = typer.Option(False, help="Have torch.compile compile a step as well."),
    decode: str = typer.Option(
        "graph", help="tilesync: a step's layers are one graph of tiles that wait; on a Hopper."
    ),
    pdl: bool = typer.Option(
        False, help="Kernels of the graph begin while the one before them ends; from compute capability 9.0 on."
    ),
    kv_cache: str = typer.Option("", help="int8 or fp8 for keys and values of 8 bits. [default: the model's dtype]"),
    weights: str = typer.Option("", help="int8, fp8 or int4: quantize the weights as they are loaded."),
    dtype: str = typer.Option("", help=f"{', '.join(_DTYPES)}. [default: as it was saved]"),
    device: str = typer.Option("", help="cuda or cpu. [default: cuda where there is one]"),
    as_json: bool = typer.Option(False, "--json", help="Print text, tokens and metrics as JSON at the end."),
) -> None:
    """Print the text that follows a prompt as it comes, then how fast it came.

    Runs Llama, Qwen2, Qwen3 and GPT-2 folders of Hugging Face, and runs of `tilewright train`. Reads JSON and
    safetensors: no pickle, no code of the folder's, no network.

    Examples:

        tilewright generate path/to/llama "Once upon a time"

        tilewright generate runs/default "def main(" --temperature 0.8 --top-p 0.95 --seed 1 --stop "def "
    """
    options: dict[str, Any] = {"kv_cache": kv_cache or None, "graph": graph, "compile": compile, "weights": weights}
    options |= {"decode": decode, "pdl": pdl}
    if draft is not None:
        if speculate == 0:
            raise UserError("--speculate 0 leaves --draft nothing to propose; leave one of them out.")
        options["draft"] = _open(draft, dtype, device)
        speculate = _DRAFTED if speculate is None else speculate
    if temperature == 0 and (top_k or top_p < 1 or min_p):
        typer.echo("--top-k, --top-p and --min-p are about drawing, and --temperature 0 draws nothing.", err=True)
    generator = _open(folder, dtype, device, **options)
    if pdl and generator.why_no_pdl:
        typer.echo(f"--pdl changes nothing: {generator.why_no_pdl}.", err=True)
    if generator.tokenizer is None:
        raise UserError(f"{folder} has no tokenizer.json, which makes text of tokens; put it beside the model.")
    tokens = generator.tokenizer.encode(prompt)
    if not tokens:
        raise UserError("The prompt is empty, and the model begins with no token of its own; give some text.")
    longest = generator.longest
    if context is None and len(tokens) + max_tokens > longest:
        raise UserError(
            f"A prompt of {len(tokens):,} tokens and --max-tokens {max_tokens:,} are more than the model's "
            f"{longest:,} positions; give fewer."
        )
    generator.set_context(max(2, len(tokens) + max_tokens) if context is None else context)
    asked: dict[str, Any] = {
        "max_tokens": max_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
        "seed": seed, "stop": stop, "speculate": speculate or 0,
    }  # fmt: skip
    if as_json:
        (found,) = generator.generate([tokens], **asked)
        facts = {"text": found.text, "tokens": found.tokens, "reason": found.reason}
        print(json.dumps({**facts, "prompt_tokens": len(tokens), **_facts(generator)}))
        return
    for piece in generator.stream(tokens, **asked):
        sys.stdout.write(printable(piece))
        sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()
    typer.echo(_sentence(_facts(generator), bool(speculate)), err=True)


def _open(folder: Path, dtype: str, device: str, **options: Any) -> Generator:
    """The generator of a Hugging Face folder, or of a run."""
    import torch

    if dtype and dtype not in _DTYPES:
        raise UserError(f"--dtype is {dtype!r}; choose {', '.join(_DTYPES[:-1])} or {_DTYPES[-1]}.")
    if device not in ("", "cpu", "cuda"):
        raise UserError(f"--device is {device!r}; choose cuda or cpu.")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device is cuda and PyTorch sees no GPU; `tilewright doctor` says why.")
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    if options.get("graph") and (device == "cpu" or not torch.cuda.is_available()):
        raise UserError("--graph needs a GPU; leave it out.")
    place, kind = device or ("cuda" if torch.cuda.is_available() else "cpu"), kinds.get(dtype)
    from tilewright.train.export import generator_of

    return generator_of(folder, device=place, dtype=kind, **options)


def _facts(generator: Generator) -> dict[str, Any]:
    """What was measured, and the share of the memory's speed where there is a GPU to measure it on."""
    found: Metrics | None = generator.metrics
    assert found is not None
    ceiling = None
    if generator.model.device.type == "cuda":
        from tilewright.measure.ceilings import measure_copy

        ceiling = measure_copy()
    speed = found.bytes_per_second
    return {
        "new_tokens": found.new_tokens, "first_token_seconds": found.first_seconds,
        "tokens_per_second": found.tokens_per_second, "bytes_per_second": speed,
        "memory_ceiling_bytes_per_second": ceiling,
        "memory_share": speed / ceiling if speed is not None and ceiling else None,
        "tokens_per_forward": found.tokens_per_forward,
    }  # fmt: skip


def _sentence(facts: dict[str, Any], speculates: bool) -> str:
    first = f"First token after {facts['first_token_seconds'] * 1e3:,.0f} ms"
    if facts["tokens_per_second"] is None:
        return f"{first}; no other followed."
    share = f", {facts['tokens_per_forward']:.2f} of them a forward" if speculates else ""
    speed = f"{first}, then {facts['tokens_per_second']:,.1f} tokens/s{share}: {_rate(facts['bytes_per_second'])}"
    if facts["memory_share"] is None:
        return f"{speed} read. There is no measured ceiling of a CPU's memory."
    return f"{speed} read, {facts['memory_share']:.0%} of {facts['memory_ceiling_bytes_per_second'] / 1e9:,.0f} GB/s."


def _rate(speed: float) -> str:
    """Bytes a second in words.

    >>> _rate(3.6e12), _rate(2.5e6)
    ('3,600.0 GB/s', '2.5 MB/s')
    """
    return f"{speed / 1e9:,.1f} GB/s" if speed >= 1e8 else f"{speed / 1e6:,.1f} MB/s"
