"""A GPT's shape, and the arithmetic that follows from it. No torch: a laptop can ask how large a 70b is."""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass

from tilewright.errors import UserError

GPT_BLOCKS = ("standard", "optimized")
RECOMPUTE = ("none", "full")
LOSSES = ("plain", "fused")


@dataclass(frozen=True)
class GPTConfig:
    """Decoder with biases, learned positions and a head tied to the embedding.

    >>> preset("7b").parameters
    6658859008
    """

    width: int
    layers: int
    heads: int
    vocabulary: int = 50368
    sequence: int = 2048
    dropout: float = 0.0
    gpt_block: str = "standard"
    recompute: str = "none"  # "full": a block keeps its inputs alone and runs again in backward
    loss: str = "plain"  # "fused": one pass over the logits, whose memory the gradient takes

    def __post_init__(self) -> None:
        for name in ("width", "layers", "heads", "vocabulary", "sequence"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if self.width % self.heads:
            raise UserError(
                f"width {self.width} does not divide into {self.heads} heads; choose another number of heads."
            )
        if not 0.0 <= self.dropout < 1.0:
            raise UserError(f"dropout is {self.dropout}; it must lie in [0, 1).")
        if self.gpt_block not in GPT_BLOCKS:
            raise UserError(f"gpt_block is {self.gpt_block!r}; choose {' or '.join(GPT_BLOCKS)}.")
        if self.recompute not in RECOMPUTE:
            raise UserError(f"recompute is {self.recompute!r}; choose {' or '.join(RECOMPUTE)}.")
        if self.loss not in LOSSES:
            raise UserError(f"loss is {self.loss!r}; choose {' or '.join(LOSSES)}.")

    @property
    def parameters(self) -> int:
        """vh + sh + L(12h^2 + 13h) + 2h, the tied head counted once."""
        h = self.width
        return (self.vocabulary + self.sequence) * h + self.layers * (12 * h * h + 13 * h) + 2 * h


PRESETS = {
    "125m": GPTConfig(width=768, layers=12, heads=12),
    "350m": GPTConfig(width=1024, layers=24, heads=16),
    "760m": GPTConfig(width=1536, layers=24, heads=12),
    "1b": GPTConfig(width=2048, layers=24, heads=16),
    "3b": GPTConfig(width=2560, layers=32, heads=20),
    "7b": GPTConfig(width=4096, layers=32, heads=32),
    "13b": GPTConfig(width=5120, layers=40, heads=40),
    "30b": GPTConfig(width=7168, layers=48, heads=56),
    "70b": GPTConfig(width=8192, layers=80, heads=64),
}


def preset(name: str, **overrides: object) -> GPTConfig:
    """A preset by name, with any field changed.

    >>> preset("125m", dropout=0.1).dropout
    0.1
    """
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1, cutoff=0.3)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UserError(f"There is no preset {name!r}; {hint}Choose one of {', '.join(PRESETS)}.")
    return dataclasses.replace(PRESETS[name], **overrides)  # type: ignore[arg-type]
