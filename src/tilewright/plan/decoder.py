"""A transformer's shape, from a preset or a Hugging Face `config.json`, and its exact parameter count."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewright.errors import UserError
from tilewright.plan import huggingface
from tilewright.plan.gpt import GPT_BLOCKS, PRESETS, GPTConfig, preset
from tilewright.plan.huggingface.config import LARGEST_NUMBER, read_json, shorten

MOST_LAYERS = 100_000
_SIZES = ("width", "layers", "heads", "kv_heads", "head_dim", "ffn", "vocabulary", "sequence", "norms", "experts",
          "active_experts")  # fmt: skip


@dataclass(frozen=True)
class Decoder:
    """A decoder-only transformer, with `causal=False` an encoder or, with `cross_layers`, an encoder and a decoder.

    Of the latter, `layers` are those of both, and a token is one of the source and one of the target, of one length.

    One letter in the formulas of `--explain` for each of the first fields: h, L, a, k, d, f, v, s.

    >>> Decoder(width=4096, layers=32, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocabulary=128256, sequence=8192,
    ...         gated=True, tied=False, norm="rms", positions="rope").parameters
    8030261248
    """

    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocabulary: int
    sequence: int
    causal: bool = True  # a token sees those before it; False: all of them
    head: bool = True  # logits over the vocabulary; False: an encoder without one
    gated: bool = False  # three matmuls in the MLP and not two
    tied: bool = True  # the head shares the embedding's weight
    head_bias: bool = False
    norm: str = "layer"  # or "rms"
    norms: int = 2  # a layer
    final_norm: bool = True  # one more behind the last layer or, in an encoder, behind the embeddings
    norm_weight: bool = True
    norm_bias: bool = False
    qk_norm: bool = False  # a norm over each head's queries and keys
    wide_qk_norm: bool = False  # its weights are one for each feature of all heads, not shared by the heads
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    cross_layers: int = 0  # of `layers`, the decoder's: they attend to the output of the others, the encoder's, too
    positions: str = "learned"  # "rope", or "none" (ALiBi, or learned numbers that are added to scores)
    score_biases: int = 0  # those numbers
    longest: int = 0  # sequence that its config.json allows; 0: nobody has said
    position_rows: int = 0  # of a learned table; 0: one for each token of the sequence
    token_types: int = 0  # rows of a table that is added to the embeddings
    embedding_norm: bool = False
    pooler: bool = False  # a square matmul over the first token of a sequence
    sinks: bool = False  # a learned logit for each head of attention
    experts: int = 1
    active_experts: int = 1
    router_bias: bool = False
    shared_ffn: int = 0  # width of an expert that every token takes
    shared_gate: bool = True  # which weighs that expert by a gate of its own
    dense_layers: int = 0  # of `layers`, without experts, in a mixture of experts
    dense_ffn: int = 0  # and their width
    window: int = 0  # tokens a windowed layer looks back on; 0: all
    windowed_layers: int = 0
    chunked: bool = False  # windows are chunks: a token sees those before it in its own
    # Multi-head latent attention: keys and values are made of `kv_rank` numbers a token, and so many more that rotary
    # positions turn and all heads share; 0: there is none. Queries are made of `q_rank` numbers, or 0: of the width.
    kv_rank: int = 0
    q_rank: int = 0
    rope_dim: int = 0
    value_dim: int = 0  # of a head's values; 0: as of its keys
    dropout: float = 0.0
    gpt_block: str = "standard"
    note: str = ""  # what had to be assumed

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, least = getattr(self, field.name), 1 if field.name in _SIZES else 0
            whole = isinstance(value, int) and not isinstance(value, bool)
            if field.type == "int" and not (whole and least <= value <= LARGEST_NUMBER):
                raise UserError(f"{field.name} is {shorten(value)}; it must be a whole number of at least {least}.")
        for name, allowed in (
            ("norm", ("layer", "rms")),
            ("positions", ("learned", "rope", "none")),
            ("gpt_block", GPT_BLOCKS),
        ):
            if getattr(self, name) not in allowed:
                raise UserError(
                    f"{name} is {shorten(getattr(self, name))}; choose {', '.join(allowed[:-1])} or {allowed[-1]}."
                )
        if self.layers > MOST_LAYERS:
            raise UserError(f"layers is {self.layers}; no model has more than {MOST_LAYERS:,}.")
        if self.heads % self.kv_heads:
            raise UserError(f"{self.heads} heads do not divide into {self.kv_heads} key-value heads.")
        if not 1 <= self.active_experts <= self.experts:
            raise UserError(f"{self.active_experts} of {self.experts} experts cannot be active.")
        if max(self.windowed_layers, self.dense_layers, self.cross_layers) > self.layers:
            raise UserError("There are more special layers than layers.")
        if self.cross_layers and (self.experts > 1 or self.kv_rank or not self.causal):
            raise UserError("cross_layers are a decoder's, with keys and values of its own and without experts.")
        if self.experts == 1 and (self.shared_ffn or self.dense_layers or self.dense_ffn):
            raise UserError("shared_ffn, dense_layers and dense_ffn are a mixture's; give experts of at least 2.")
        if not 0.0 <= self.dropout < 1.0:
            raise UserError(f"dropout is {self.dropout}; it must lie in [0, 1).")
        if (self.q_rank or self.rope_dim or self.value_dim) and not self.kv_rank:
            raise UserError("q_rank, rope_dim and value_dim are latent attention's; give kv_rank.")
        if self.rope_dim >= self.head_dim or (self.kv_rank and self.kv_heads != self.heads):
            raise UserError("Latent attention has as many key heads as heads, and rope_dim is less than head_dim.")
        self.check_length(self.sequence, "sequence")

    def check_length(self, tokens: int, name: str) -> None:
        """Refuse more tokens than a learned position table has rows."""
        if self.positions == "learned" and self.longest and tokens > self.longest:
            raise UserError(f"{name} is {tokens:,}; the model has learned positions for {self.longest:,} tokens.")

    @property
    def attention_weights(self) -> int:
        """Weights of one layer's projections: 2h·a·d + 2h·k·d, or those of latent attention."""
        return sum(columns * rows for _, columns, rows in self.projections(1))

    @property
    def values(self) -> int:
        """Numbers of a head's values."""
        return self.value_dim or self.head_dim

    @property
    def attention_dim(self) -> float:
        """The mean width of attention's two matmuls, over keys and over values."""
        return (self.head_dim + self.values) / 2

    @property
    def latent(self) -> int:
        """Numbers a token that latent attention keeps in place of keys and values."""
        return self.kv_rank + self.rope_dim

    def projections(self, ranks: int) -> list[tuple[str, int, int]]:
        """Name, outputs and inputs of attention's matmuls with weights, on one of the tensor-parallel ranks."""
        heads = self.heads // ranks
        out = ("out", self.width, heads * self.values)
        if not self.kv_rank:
            return [("qkv", (heads + 2 * self.kv_heads_on(ranks)) * self.head_dim, self.width), out]
        queries = heads * self.head_dim
        ways = [("q down", self.q_rank, self.width), ("q up", queries, self.q_rank)] if self.q_rank else []
        up = heads * (self.head_dim - self.rope_dim + self.values)
        ways = ways or [("q", queries, self.width)]
        return [*ways, ("kv down", self.latent, self.width), ("kv up", up, self.kv_rank), out]

    def mlp_weights(self, ffn: int) -> int:
        """Weights of one MLP of this inner width: (2 or 3)·h·f."""
        return (3 if self.gated else 2) * self.width * ffn

    def _mlp_biases(self, ffn: int) -> int:
        return ((2 if self.gated else 1) * ffn + self.width) if self.mlp_bias else 0

    @property
    def router_weights(self) -> int:
        """h for each expert, and for the gate of a shared one; with a bias, 1 more for each expert."""
        if self.experts == 1:
            return 0
        return (self.experts + self.expert_gates) * self.width + (self.experts if self.router_bias else 0)

    @property
    def expert_gates(self) -> int:
        """Of experts that every token takes."""
        return 1 if self.shared_ffn and self.shared_gate else 0

    @property
    def _norm_weights(self) -> int:
        return self.width * (self.norm_weight + self.norm_bias)

    @property
    def norm_parameters(self) -> int:
        """Weights and biases of every norm."""
        heads = self.heads + self.kv_heads if self.wide_qk_norm else 2
        layer = self.norms * self._norm_weights + (heads * self.head_dim if self.qk_norm else 0)
        layer += self.q_rank + self.kv_rank  # latents have norms of their own
        ends = self.final_norm * self.stacks + self.embedding_norm
        return self.layers * layer + (self.cross_layers + ends) * self._norm_weights

    @property
    def stacks(self) -> int:
        """An encoder and a decoder are two."""
        return 2 if self.cross_layers else 1

    @property
    def attentions(self) -> int:
        """Attention's, each with projections of its own, in all layers."""
        return self.layers + self.cross_layers

    @property
    def _layer_biases(self) -> int:
        """Of attention's projections, and what else a layer has that is no matrix."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        first = queries + 2 * keys if not self.kv_rank else self.q_rank + self.latent
        biases = (first if self.qkv_bias else 0) + (self.width if self.out_bias else 0)
        return biases + (self.heads if self.sinks else 0)

    def expert_parameters(self, layers: int) -> int:
        """Of all experts that not every token takes, in at most so many layers."""
        if self.experts == 1:
            return 0
        sparse = min(layers, self.layers - self.dense_layers)
        return sparse * self.experts * (self.mlp_weights(self.ffn) + self._mlp_biases(self.ffn))

    def adapter_parameters(self, rank: int) -> int:
        """Of LoRA's two factors beside every linear layer but router and head: r·(inputs + outputs) each.

        Queries, keys and values are layers of their own, and so are gate and up.

        >>> one = Decoder(8, 1, 2, 2, 4, 32, 100, 16)
        >>> one.adapter_parameters(2) == 2 * (4 * (8 + 8) + (8 + 32) + (32 + 8))
        True
        """

        def mlp(ffn: int) -> int:
            return (3 if self.gated else 2) * (self.width + ffn)

        attention = sum(columns + rows for _, columns, rows in self.projections(1))
        attention += 0 if self.kv_rank else 2 * self.width
        dense = self.layers if self.experts == 1 else self.dense_layers
        sparse = self.experts * mlp(self.ffn) + (mlp(self.shared_ffn) if self.shared_ffn else 0)
        inner = dense * mlp(self.ffn if self.experts == 1 else self.dense_ffn or self.ffn)
        return rank * (self.attentions * attention + inner + (self.layers - dense) * sparse)

    def _mlp(self, experts: float) -> tuple[float, float]:
        """Parameters of a layer's MLP, with this many experts of a mixture counted, and of a layer without experts."""
        one = self.mlp_weights(self.ffn) + self._mlp_biases(self.ffn)
        shared = self.mlp_weights(self.shared_ffn) if self.shared_ffn else 0
        dense = self.mlp_weights(self.dense_ffn or self.ffn) + self._mlp_biases(self.dense_ffn or self.ffn)
        return experts * one + shared + self.router_weights, dense

    def _mlps(self, experts: float) -> float:
        """Every MLP of the model, with this many experts of each mixture counted."""
        sparse, dense = self._mlp(experts)
        return (self.layers - self.dense_layers) * sparse + self.dense_layers * dense

    def fullest_stage(self, layers: int) -> float:
        """Parameters of `layers` layers, as many of them of the larger kind as there are; without the embeddings."""
        body = self.parameters - self.embedding_parameters - self._mlps(self.experts)
        kinds = zip(self._mlp(self.experts), (self.layers - self.dense_layers, self.dense_layers), strict=True)
        (large, many), (small, _) = sorted(kinds, reverse=True)
        many = min(layers, many)
        return body * layers / self.layers + many * large + (layers - many) * small

    @property
    def head_weights(self) -> int:
        """Of the matmul that makes the logits: v·h, or 0 where there is no head."""
        return self.vocabulary * self.width if self.head else 0

    @property
    def embedding_parameters(self) -> int:
        """Token and learned position embeddings, the tied head once: (1 or 2)·v·h + s·h."""
        positions = (self.position_rows or self.sequence) if self.positions == "learned" else 0
        rows = self.vocabulary + positions + self.token_types
        return rows * self.width + (0 if self.tied else self.head_weights)

    def _count(self, experts: float) -> float:
        ends = (self.vocabulary if self.head_bias else 0) + (self.width * (self.width + 1) if self.pooler else 0)
        body = self.attentions * (self.attention_weights + self._layer_biases) + self._mlps(experts)
        return self.embedding_parameters + ends + self.score_biases + body + self.norm_parameters

    @property
    def parameters(self) -> int:
        """Every parameter, a tied head once."""
        return int(self._count(self.experts))

    @property
    def active_parameters(self) -> int:
        """Those that one token meets: of a mixture, the active experts alone."""
        return int(self._count(self.active_experts))

    def experts_read(self, tokens: int) -> float:
        """Distinct experts of a layer that `tokens` tokens meet, expected: E·(1 - (1 - k/E)^tokens).

        Each token draws its k of the E experts by chance, all alike, as a balanced router does.
        """
        return self.experts * (1 - (1 - self.active_experts / self.experts) ** tokens)

    def parameters_read(self, tokens: int) -> float:
        """Parameters that a forward pass over `tokens` tokens reads whole; tables that are only looked up are not."""
        return self._count(self.experts_read(tokens)) - (self.embedding_parameters - self.head_weights)

    def context(self, causal: bool = False) -> float:
        """Tokens that a token looks at in its own sequence, the mean over tokens and layers: s, or s/2 if causal.

        In a layer with a window w they are w, or w - w²/2s: only the first w tokens have fewer before them.
        """
        causal = causal and self.causal
        s, w = self.sequence, min(self.window or self.sequence, self.sequence)
        full, windowed = (s / 2, w - w * w / (2 * s)) if causal else (float(s), float(w))
        if self.chunked:
            windowed = (s // w * w * w + (s % w) ** 2) / s / (2 if causal else 1)
        if self.cross_layers:  # the encoder's layers have no mask
            full = (self.cross_layers * full + (self.layers - self.cross_layers) * s) / self.layers
        return (self.windowed_layers * windowed + (self.layers - self.windowed_layers) * full) / self.layers

    def tensor_problem(self, ranks: int) -> str:
        """Why this many tensor-parallel ranks cannot share heads, feed-forward and vocabulary; "" where they can."""
        widths = [("heads", self.heads), ("columns of the feed-forward", self.ffn)]
        widths += [("columns of the feed-forward", width) for width in (self.shared_ffn, self.dense_ffn) if width]
        for name, value in widths:
            if value % ranks:
                return f"{value} {name} do not divide by tensor parallel {ranks}; choose a divisor."
        if self.kv_heads % ranks and ranks % self.kv_heads:
            return f"{self.kv_heads} key-value heads neither divide by tensor parallel {ranks} nor divide it."
        if self.vocabulary < ranks:
            return f"A vocabulary of {self.vocabulary} is less than tensor parallel {ranks}."
        return ""

    def check_tensor(self, ranks: int) -> None:
        """Refuse a number of tensor-parallel ranks that heads, feed-forward width or vocabulary do not allow."""
        problem = self.tensor_problem(ranks)
        if problem:
            raise UserError(problem)

    def kv_heads_on(self, ranks: int) -> int:
        """Key-value heads on each of the tensor-parallel ranks; where there are fewer heads than ranks, repeated."""
        return max(1, self.kv_heads // ranks)


def from_gpt(config: GPTConfig) -> Decoder:
    """The shape of one of our own GPTs.

    >>> from_gpt(preset("7b")).parameters == preset("7b").parameters
    True
    """
    return Decoder(
        width=config.width, layers=config.layers, heads=config.heads, kv_heads=config.key_heads,
        head_dim=config.head_dim, ffn=config.ffn_width, vocabulary=config.vocabulary, sequence=config.sequence,
        gated=config.gated, norm=config.norm, norm_bias=config.bias and config.norm == "layer", qkv_bias=config.bias,
        out_bias=config.bias, mlp_bias=config.bias and not config.experts, experts=config.experts or 1,
        active_experts=config.experts_per_token if config.experts else 1, positions=config.position,
        dropout=config.dropout, gpt_block=config.gpt_block, tied=config.tied,
    )  # fmt: skip


def load(name: str, overrides: list[str] | tuple[str, ...] = ()) -> Decoder:
    """A preset by name or a config.json by path, with `field=value` overrides.

    >>> load("125m", ["sequence=1024"]).sequence
    1024
    """
    if name not in PRESETS and _is_path(name):
        path = Path(name)
        return override(read_config(path / "config.json" if path.is_dir() else path), overrides)
    try:
        config = preset(name)
    except UserError as error:
        raise UserError(f"{error} A path to a config.json works too.") from None
    # A preset's own fields first: what follows from them, such as the width of a head, then follows.
    own = {field.name for field in dataclasses.fields(GPTConfig)} & {
        field.name for field in dataclasses.fields(Decoder)
    }
    mine = [item for item in overrides if item.partition("=")[0].removeprefix("model.") in own]
    rest = [item for item in overrides if item not in mine]
    return override(from_gpt(dataclasses.replace(config, **_parse(mine))), rest)


def _is_path(name: str) -> bool:
    try:
        return name.endswith(".json") or "/" in name or Path(name).exists()
    except OSError:  # longer than a path can be
        return False


def override(decoder: Decoder, overrides: list[str] | tuple[str, ...]) -> Decoder:
    """The decoder with `field=value` changes; an unknown field is refused with the nearest name."""
    return dataclasses.replace(decoder, **_parse(overrides))


def _parse(overrides: list[str] | tuple[str, ...]) -> dict[str, Any]:
    fields = {field.name: field.type for field in dataclasses.fields(Decoder)}
    changes: dict[str, Any] = {}
    for item in overrides:
        name, equals, text = item.partition("=")
        name = name.removeprefix("model.")
        if not equals or name not in fields:
            near = difflib.get_close_matches(name, fields, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]}?" if near else f"fields: {', '.join(fields)}."
            raise UserError(f"{item!r} is not field=value of a model; {hint}")
        kind = str(fields[name])
        parse: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str, "bool": _truth}
        try:
            changes[name] = parse[kind](text)
        except ValueError:
            raise UserError(f"{name} is {shorten(text)}; it must be of type {kind}.") from None
    return changes


def _truth(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"


def read_config(path: Path) -> Decoder:
    """The model that a Hugging Face config.json describes."""
    return Decoder(**huggingface.decoder_fields(read_json(path)))


def from_config(raw: dict[str, Any]) -> Decoder:
    """The same from the parsed object.

    >>> from_config({"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}).parameters
    124439808
    """
    return Decoder(**huggingface.decoder_fields(raw))
