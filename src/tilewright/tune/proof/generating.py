"""Whether a run that generates is good enough: its predictions on a text beside the model's as it was saved, and
whether graphs, compilers and drafts leave its greedy text as it is.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.errors import UserError
from tilewright.tune.search.generating import SAVED, Generating
from tilewright.tune.store.proof import Proof

if TYPE_CHECKING:
    from torch import Tensor

    from tilewright.generate import Generator

_WINDOWS = {"cuda": (8, 512), "cpu": (2, 128)}  # of the text that is compared
_TEXT = 24  # greedy tokens
_ROUNDING = {"torch.float32": 1e-3, "torch.float16": 2.0**-6, "torch.bfloat16": 2.0**-4}  # of a logit


@dataclass(frozen=True)
class Floor:
    """The least quality that a run must have beside the model as it was saved."""

    perplexity: float = 0.01  # that it may rise, as a share
    divergence: float = math.inf  # nats a token
    agreement: float = 0.0  # share of equal first choices

    @classmethod
    def parse(cls, text: str) -> Floor:
        """A floor in words.

        >>> Floor.parse("2%"), Floor.parse("divergence=0.02,agreement=95%").agreement
        (Floor(perplexity=0.02, divergence=inf, agreement=0.0), 0.95)
        """
        found = {}
        for part in text.split(","):
            name, _, number = part.partition("=") if "=" in part else ("perplexity", "=", part)
            match = re.fullmatch(r"([0-9]*\.?[0-9]+)(%?)", number.strip())
            if match is None or name.strip() not in ("perplexity", "divergence", "agreement"):
                raise UserError(
                    f"The quality is {text[:60]!r}; give how far the perplexity may rise, such as 1%, or "
                    "perplexity=1%,divergence=0.02,agreement=95%."
                )
            if not match[2] and float(match[1]) >= 1 and name.strip() != "divergence":
                raise UserError(f"The quality is {text[:60]!r}; write percent, such as {match[1]}%.")
            found[name.strip()] = float(match[1]) / (100 if match[2] else 1)
        return cls(**found)

    def refuse(self, quality: Mapping[str, float]) -> str:
        """Why a quality is below the floor; nothing where it is not."""
        rise = quality["quantized_perplexity"] / quality["perplexity"] - 1
        if not rise <= self.perplexity:
            return f"its perplexity rises by {rise:.2%}, and --quality allows {self.perplexity:.2%}"
        if not quality["divergence"] <= self.divergence:
            return f"its divergence is {quality['divergence']:.4f} nats, and --quality allows {self.divergence:g}"
        if not quality["agreement"] >= self.agreement:
            return (
                f"it has the same first choice in {quality['agreement']:.1%}, and --quality asks {self.agreement:.1%}"
            )
        return ""


def build(run: Generating, **options: Any) -> Generator:
    """Build the generator of a run; `options` replace the run's own."""
    import torch

    from tilewright.train.export import generator_of

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}.get(run.dtype)
    how: dict[str, Any] = {
        "kv_cache": None if run.kv_cache == SAVED else run.kv_cache, "graph": run.graph and run.device != "cpu",
        "compile": run.compile != "none", "weights": "" if run.weights == SAVED else run.weights,
        "decode": run.decode, "pdl": run.pdl, **options,
    }  # fmt: skip
    if run.draft and run.speculate:
        how["draft"] = generator_of(Path(run.draft), device=run.device, dtype=dtype)
    generator = generator_of(Path(run.model), device=run.device, dtype=dtype, **how)
    room = min(generator.longest, run.prompt + run.tokens + 16 + run.speculate)
    if run.prompt + run.tokens + 1 > room:
        raise UserError(
            f"prompt={run.prompt} and tokens={run.tokens} are more than the model's {generator.longest:,} positions; "
            "give fewer."
        )
    generator.set_context(room)
    return generator


def text_tokens(generator: Generator, count: int, seed: int) -> list[int]:
    """Return tokens of real text, the standard library's sources; without a tokenizer random ones."""
    import torch

    if generator.tokenizer is None:
        made = torch.Generator().manual_seed(seed)
        return torch.randint(generator.model.config.shape.vocabulary, (count,), generator=made).tolist()
    tokens: list[int] = []
    while len(tokens) < count:
        tokens += generator.tokenizer.encode("".join(map(inspect.getsource, (textwrap, argparse))))
    return tokens[:count]


def compare(plain: Generator, other: Generator, device: str, seed: int) -> dict[str, Any]:
    """Compare two generators by `quantize.check_quality`, each over its own cache."""
    import torch

    from tilewright.quantize.quality import check_quality

    windows, length = _WINDOWS[device]
    length = min(length, plain.longest)
    tokens = torch.tensor(text_tokens(plain, windows * length, seed)).view(windows, length)
    return check_quality(_Reader(plain), _Reader(other), tokens).as_dict()


class _Reader:
    """A generator as `check_quality` calls a model: logits of all tokens, by one prompt over its own kind of cache."""

    def __new__(cls, generator: Generator) -> Any:
        import torch

        from tilewright.generate import KVCache

        class Reader(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = generator.model

            def forward(self, tokens: Tensor) -> Tensor:
                shape = self.model.config.shape
                cache = KVCache(
                    shape, batch=1, context=tokens.shape[1], device=self.model.device, dtype=generator.cache_dtype
                )  # fmt: skip
                cache.begin(torch.tensor([tokens.shape[1]]))
                logits: Tensor = self.model(tokens, cache)
                return logits

        return Reader()


def prove(job: dict[str, Any]) -> Proof:
    """Prove a run: its quality is above the floor, and its greedy text is that of plain steps."""
    best, start = Generating(**job["configuration"]), Generating(**job["start"])
    given = {"graph": False, "compile": False, "decode": "graph"}
    other = build(best)
    if (best.weights, best.kv_cache) == (start.weights, start.kv_cache):
        verdict, said = "same within rounding", "weights, keys and values are in the formats of the baseline"
        plain = build(dataclasses.replace(best, speculate=0), **given)
    else:
        quality = compare(build(start, **given), other, best.device, best.seed)
        if why := Floor(**job["floor"]).refuse(quality):
            return Proof("wrong", f"{why}.")
        verdict, said = "different by design", _sentence(quality)
        plain = build(dataclasses.replace(best, speculate=0), **given)
    prompt = text_tokens(plain, min(best.prompt, plain.context - _TEXT - 1), best.seed)
    count = min(_TEXT, best.tokens)
    rows = [prompt[row % len(prompt) :] for row in range(best.batch)]
    expected = zip(*plain.steps(rows, max_tokens=count), strict=True)
    found = zip(*other.steps(rows, max_tokens=count, speculate=best.speculate), strict=True)
    for row, one, two in zip(rows, expected, found, strict=True):
        if why := _differ(plain, row, one, two):
            return Proof("wrong", why)
    return Proof(verdict, f"{said}, and its greedy text is that of plain steps.")


def _sentence(quality: Mapping[str, float]) -> str:
    from tilewright.quantize.quality import Quality

    return f"beside the model as it was saved, on {Quality(**quality)}"  # type: ignore[arg-type]


def _differ(plain: Generator, prompt: Sequence[int], expected: Sequence[int], found: Sequence[int]) -> str:
    """Say why two greedy texts differ by more than rounding; empty where they do not."""
    import torch

    place = next((i for i, (a, b) in enumerate(zip(expected, found, strict=True)) if a != b), None)
    if place is None:
        return ""
    with torch.no_grad():
        logits = _Reader(plain)(torch.tensor([[*prompt, *expected[:place]]], device=plain.model.device))[0, -1].float()
    gap = float(logits[expected[place]] - logits[found[place]])
    if abs(gap) <= _ROUNDING[str(plain.model.dtype)] * float(logits.abs().max()):
        return ""
    return (
        f"its greedy text differs from that of plain steps at token {place + 1}, where the logits are {gap:.3f} apart."
    )
