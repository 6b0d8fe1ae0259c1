"""A GPT's shape, and the arithmetic that follows from it. No torch: a laptop can ask how large a 70b is."""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass

from tilewright.errors import UserError
from tilewright.plan.lever import Lever

GPT_BLOCKS = ("standard", "optimized")
OWN_ATTENTION = ("hopper", "triton")  # backends of `ops.attention`
CHOICES = {
    "gpt_block": GPT_BLOCKS,
    "recompute": ("none", "selective", "full", "budget"),
    "attention": ("auto", "hopper", "triton", "flash", "cudnn", "efficient", "math"),
    "mlp": ("auto", "standard", "fused", "recompute", "tilesync"),
    "residual": ("auto", "bf16"),
    "loss": ("plain", "fused", "linear_fused"),
    "norm": ("layer", "rms"),
    "activation": ("gelu_tanh", "gelu", "swiglu", "geglu_tanh", "geglu"),
    "position": ("learned", "rope"),
}

# What changes how a model runs, and not, beyond rounding, what it computes.
LEVERS = {
    "gpt_block": Lever(),
    "recompute": Lever(values=("none", "selective", "full")),
    "recompute_budget": Lever(values=()),  # a number for who knows which
    "loss": Lever(),
    # PyTorch's plain one keeps every score: for looking into, not for training. Our own are in "auto", by a table of
    # measurements: as values of the search they have no prediction that tells them from it, and take its time.
    "attention": Lever(values=("auto", "flash", "cudnn", "efficient"), devices={"cudnn": "cuda", "efficient": "cuda"}),
    # "standard" and "fused" are what a block of one kind or the other has anyway.
    "mlp": Lever(values=("auto", "recompute", "tilesync"), devices={"tilesync": "cuda"}),
    "residual": Lever(numerics={"bf16": "rounding"}),
}
# What a Llama has where a GPT-2 has something else; `preset("1b", **LLAMA)` is one.
LLAMA = {"norm": "rms", "activation": "swiglu", "position": "rope", "bias": False}
# What a checkpoint means that was written before a model had these fields.
ADDED = {"tied": True, "norm_epsilon": 1e-5, "rope_base": 10000.0, "experts": 0}


@dataclass(frozen=True)
class GPTConfig:
    """Decoder; as it comes, GPT-2's: biases, learned positions, LayerNorm, GELU, a head tied to the embedding.

    >>> preset("7b").parameters
    6658859008
    >>> preset("7b", **LLAMA, kv_heads=8).ffn_width
    11008
    """

    width: int
    layers: int
    heads: int
    vocabulary: int = 50368
    sequence: int = 2048
    dropout: float = 0.0
    gpt_block: str = "standard"
    # What backward computes again. "selective": all but matmuls and attention; "full": the whole block, which keeps
    # its inputs alone; "budget": of as few blocks as keep no more than `recompute_budget` GiB.
    recompute: str = "none"
    recompute_budget: float = 0.0
    attention: str = "auto"  # who computes it; "auto" leaves that to PyTorch, or to what gpt_block has
    residual: str = "auto"  # dtype of the stream between blocks: under autocast float32, as PyTorch leaves it
    # As `gpt_block` has it. "recompute": fused, and its activation is computed again in backward; "tilesync": forward
    # is one graph of tiles that wait for each other, and backward computes the whole MLP again.
    mlp: str = "auto"
    loss: str = "plain"  # "fused": one pass over the logits; "linear_fused": never all logits at once
    norm: str = "layer"
    activation: str = "gelu_tanh"
    position: str = "learned"
    bias: bool = True
    kv_heads: int = 0  # heads of keys and values; 0: as many as of queries
    ffn: int = 0  # inner width of an MLP; 0: 4 times the width or, gated, 8 / 3 of it
    tied: bool = True  # whether the output layer is the embedding's weight
    norm_epsilon: float = 1e-5  # added to the variance, or to the mean of squares
    rope_base: float = 10000.0  # of the wavelengths of rotary positions, also called theta
    experts: int = 0  # MLPs of a block, of which a token takes some; 0: one, that all take. They have no biases
    experts_per_token: int = 2
    balance_rate: float = 0.001  # by which a step moves the router's choice to experts with few tokens; 0: it does not

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
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                choices = f"{', '.join(allowed[:-1])} or {allowed[-1]}"
                raise UserError(f"{name} is {getattr(self, name)!r}; choose {choices}.")
        for name, largest in (("norm_epsilon", 1.0), ("rope_base", 1e15)):
            if not 0.0 < getattr(self, name) < largest:
                raise UserError(f"{name} is {getattr(self, name)}; it must be above 0 and below {largest:g}.")
        if self.experts == 1:
            raise UserError("experts is 1, which is an MLP like any other; give 2 or more, or leave it out.")
        if self.experts > 1 and not 1 <= self.experts_per_token <= self.experts:
            raise UserError(
                f"experts_per_token is {self.experts_per_token}; a token can take 1 to {self.experts} of "
                f"{self.experts} experts."
            )
        if not 0.0 <= self.balance_rate < 1.0:
            raise UserError(f"balance_rate is {self.balance_rate}; it must lie in [0, 1).")
        for name in ("kv_heads", "ffn", "experts"):
            if getattr(self, name) < 0:
                raise UserError(f"{name} is {getattr(self, name)}; it must be at least 0.")
        if self.heads % self.key_heads:
            raise UserError(f"{self.heads} heads do not divide into {self.kv_heads} key-value heads.")
        if self.position == "rope" and self.head_dim % 2:
            raise UserError(
                f"a head of {self.head_dim} cannot be rotated; choose a number of heads that makes it even."
            )

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def key_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def gated(self) -> bool:
        return self.activation in ("swiglu", "geglu_tanh", "geglu")

    @property
    def ffn_width(self) -> int:
        """Inner width of an MLP; a gated one's, with its third matmul, is rounded up to whole tiles."""
        return self.ffn or (-(-8 * self.width // (3 * 256)) * 256 if self.gated else 4 * self.width)

    @property
    def parameters(self) -> int:
        """vh + sh + L(12h^2 + 13h) + 2h for a GPT-2, a tied head counted once."""
        h, f, keys = self.width, self.ffn_width, self.key_heads * self.head_dim
        attention, mlp = h * (2 * h + 2 * keys), (3 if self.gated else 2) * h * f
        biases = 2 * h + 2 * keys + (0 if self.experts else (2 if self.gated else 1) * f + h)
        biases = biases if self.bias else 0
        mlp = self.experts * (mlp + h) if self.experts else mlp  # and the router
        norm = 2 * h if self.norm == "layer" and self.bias else h
        positions = self.sequence if self.position == "learned" else 0
        tables = (1 if self.tied else 2) * self.vocabulary + positions
        return tables * h + self.layers * (attention + mlp + biases + 2 * norm) + norm


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
        near = difflib.get_close_matches(name.rpartition("=")[2], PRESETS, n=1, cutoff=0.5)  # of model.preset=1b, too
        hint = f"did you mean {near[0]}? C" if near else "c"
        raise UserError(f"There is no preset {name!r}; {hint}hoose one of {', '.join(PRESETS)}.")
    return dataclasses.replace(PRESETS[name], **overrides)  # type: ignore[arg-type]
