"""A decoder's shape, from a preset or a Hugging Face `config.json`, and its exact parameter count."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewright.errors import UserError
from tilewright.plan.gpt import GPT_BLOCKS, PRESETS, GPTConfig, preset

_LARGEST_FILE = 1 << 20  # bytes of a config.json; real ones have a few thousand
_LARGEST_NUMBER = 1 << 40
_MOST_LAYERS = 100_000
_SIZES = ("width", "layers", "heads", "kv_heads", "head_dim", "ffn", "vocabulary", "sequence", "norms", "experts",
          "active_experts")  # fmt: skip


@dataclass(frozen=True)
class Decoder:
    """A decoder-only transformer. One letter in the formulas of `--explain` for each: h, L, a, k, d, f, v, s.

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
    gated: bool = False  # three products in the MLP and not two
    tied: bool = True  # the head shares the embedding's weight
    norm: str = "layer"  # or "rms"
    norms: int = 2  # a layer
    norm_bias: bool = False
    qk_norm: bool = False  # a norm over each head's queries and keys
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    positions: str = "learned"  # or "rope"
    experts: int = 1
    active_experts: int = 1
    shared_ffn: int = 0  # width of an expert that every token takes
    dense_layers: int = 0  # of `layers`, without experts, in a mixture of experts
    dense_ffn: int = 0  # and their width
    window: int = 0  # tokens a windowed layer looks back on; 0: all
    windowed_layers: int = 0
    dropout: float = 0.0
    gpt_block: str = "standard"
    note: str = ""  # what had to be assumed

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, least = getattr(self, field.name), 1 if field.name in _SIZES else 0
            whole = isinstance(value, int) and not isinstance(value, bool)
            if field.type == "int" and not (whole and least <= value <= _LARGEST_NUMBER):
                raise UserError(f"{field.name} is {_short(value)}; it must be a whole number of at least {least}.")
        for name, allowed in (
            ("norm", ("layer", "rms")),
            ("positions", ("learned", "rope")),
            ("gpt_block", GPT_BLOCKS),
        ):
            if getattr(self, name) not in allowed:
                raise UserError(f"{name} is {_short(getattr(self, name))}; choose {' or '.join(allowed)}.")
        if self.layers > _MOST_LAYERS:
            raise UserError(f"layers is {self.layers}; no model has more than {_MOST_LAYERS:,}.")
        if self.heads % self.kv_heads:
            raise UserError(f"{self.heads} heads do not divide into {self.kv_heads} key-value heads.")
        if not 1 <= self.active_experts <= self.experts:
            raise UserError(f"{self.active_experts} of {self.experts} experts cannot be active.")
        if self.windowed_layers > self.layers or self.dense_layers > self.layers:
            raise UserError("There are more special layers than layers.")
        if not 0.0 <= self.dropout < 1.0:
            raise UserError(f"dropout is {self.dropout}; it must lie in [0, 1).")

    @property
    def attention_weights(self) -> int:
        """Weights of one layer's four projections: 2h·a·d + 2h·k·d."""
        return 2 * self.width * self.head_dim * (self.heads + self.kv_heads)

    def mlp_weights(self, ffn: int) -> int:
        """Weights of one MLP of this inner width: (2 or 3)·h·f."""
        return (3 if self.gated else 2) * self.width * ffn

    def _mlp_biases(self, ffn: int) -> int:
        return ((2 if self.gated else 1) * ffn + self.width) if self.mlp_bias else 0

    @property
    def router_weights(self) -> int:
        """h for each expert, and for the gate of a shared one."""
        return (self.experts + (1 if self.shared_ffn else 0)) * self.width if self.experts > 1 else 0

    @property
    def _other_weights(self) -> int:
        """Norms and the biases of attention, one layer."""
        norm = self.width * (2 if self.norm_bias else 1)
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        total = self.norms * norm + (2 * self.head_dim if self.qk_norm else 0)
        return total + (queries + 2 * keys if self.qkv_bias else 0) + (self.width if self.out_bias else 0)

    def _mlps(self, experts: int) -> int:
        """Every MLP of the model, with this many experts of each mixture counted."""
        sparse = self.layers - self.dense_layers
        one = self.mlp_weights(self.ffn) + self._mlp_biases(self.ffn)
        shared = self.mlp_weights(self.shared_ffn) if self.shared_ffn else 0
        dense = self.mlp_weights(self.dense_ffn or self.ffn) + self._mlp_biases(self.dense_ffn or self.ffn)
        return sparse * (experts * one + shared + self.router_weights) + self.dense_layers * dense

    @property
    def embedding_parameters(self) -> int:
        """Token and learned position embeddings, the tied head once: (1 or 2)·v·h + s·h."""
        tables = self.vocabulary * (1 if self.tied else 2)
        return (tables + (self.sequence if self.positions == "learned" else 0)) * self.width

    def _count(self, experts: int) -> int:
        final_norm = self.width * (2 if self.norm_bias else 1)
        body = self.layers * (self.attention_weights + self._other_weights) + self._mlps(experts)
        return self.embedding_parameters + body + final_norm

    @property
    def parameters(self) -> int:
        """Every parameter, a tied head once."""
        return self._count(self.experts)

    @property
    def active_parameters(self) -> int:
        """Those that one token meets: of a mixture, the active experts alone."""
        return self._count(self.active_experts)

    def context(self, causal: bool = False) -> float:
        """Tokens that a token looks at, the mean over tokens and layers: s, or s/2 under the causal mask.

        In a layer with a window w they are w, or w - w²/2s: only the first w tokens have fewer before them.
        """
        s, w = self.sequence, min(self.window or self.sequence, self.sequence)
        full, windowed = (s / 2, w - w * w / (2 * s)) if causal else (float(s), float(w))
        return (self.windowed_layers * windowed + (self.layers - self.windowed_layers) * full) / self.layers

    def check_tensor(self, ranks: int) -> None:
        """Refuse a number of tensor-parallel ranks that heads, feed-forward width or vocabulary do not allow."""
        for name, value in (("heads", self.heads), ("columns of the feed-forward", self.ffn)):
            if value % ranks:
                raise UserError(f"{value} {name} do not divide by tensor parallel {ranks}; choose a divisor.")
        if self.vocabulary < ranks:
            raise UserError(f"A vocabulary of {self.vocabulary} is less than tensor parallel {ranks}.")


def from_gpt(config: GPTConfig) -> Decoder:
    """The shape of one of our own GPTs.

    >>> from_gpt(preset("7b")).parameters == preset("7b").parameters
    True
    """
    return Decoder(
        width=config.width, layers=config.layers, heads=config.heads, kv_heads=config.key_heads,
        head_dim=config.head_dim, ffn=config.ffn_width, vocabulary=config.vocabulary, sequence=config.sequence,
        gated=config.gated, norm=config.norm, norm_bias=config.bias and config.norm == "layer", qkv_bias=config.bias,
        out_bias=config.bias, mlp_bias=config.bias, positions=config.position, dropout=config.dropout,
        gpt_block=config.gpt_block,
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
    changes = _parse(overrides)
    if "sequence" in changes and decoder.note.startswith("sequence"):
        changes["note"] = ""
    return dataclasses.replace(decoder, **changes)


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
            raise UserError(f"{name} is {_short(text)}; it must be of type {kind}.") from None
    return changes


def _truth(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:40] + "..."


# Hugging Face config.json. Read as data: nothing of it is imported, called or evaluated.


def read_config(path: Path) -> Decoder:
    """The decoder that a Hugging Face config.json describes."""
    try:
        if path.exists() and not path.is_file():
            raise UserError(f"{path} is no file.")
        with path.open("rb") as file:
            text = file.read(_LARGEST_FILE + 1)
        if len(text) > _LARGEST_FILE:
            raise UserError(f"{path} has more than {_LARGEST_FILE:,} bytes; a config.json has a few thousand.")
        raw = json.loads(text)
    except OSError as error:
        raise UserError(f"Cannot read {_short(str(path))}: {error.strerror}.") from None
    except (ValueError, RecursionError):
        raise UserError(f"{path} is not JSON that a model could have written.") from None
    if not isinstance(raw, dict):
        raise UserError(f"{path} holds no JSON object.")
    return from_config(raw)


def from_config(raw: dict[str, Any]) -> Decoder:
    """The same from the parsed object."""
    if isinstance(raw.get("text_config"), dict) and "hidden_size" not in raw:  # the decoder of a multimodal model
        raw = {**raw["text_config"], "model_type": raw["text_config"].get("model_type", raw.get("model_type"))}
    fields = _Fields(raw)
    kind = raw.get("model_type")
    if not isinstance(kind, str):
        raise UserError("config.json has no model_type; it names the architecture, such as llama.")
    for field in ("kv_lora_rank", "n_routed_experts"):
        if field in raw:
            raise UserError(f"{_short(kind)} compresses its attention or routes experts as DeepSeek does ({field}); "
                            "that is not counted here.")  # fmt: skip
    return _gpt2(fields) if kind == "gpt2" else _llama_like(fields, kind)


class _Fields:
    """Typed access to a configuration that may hold anything."""

    def __init__(self, raw: dict[str, Any]) -> None:
        self.raw = raw

    def number(self, name: str, default: int | None = None) -> int:
        value = self.raw.get(name)
        if value is None:
            if default is None:
                raise UserError(f"config.json lacks {name}, a whole number.")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _LARGEST_NUMBER:
            raise UserError(f"config.json: {name} is {_short(value)}; it must be a whole number from 0 to 2^40.")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.raw.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise UserError(f"config.json: {name} is {_short(value)}; it must be true or false.")
        return value

    def each(self, name: str) -> list[Any]:
        value = self.raw.get(name)
        if value is not None and (not isinstance(value, list) or len(value) > 100_000):
            raise UserError(f"config.json: {name} must be a list with an entry a layer.")
        return value or []


def _gpt2(fields: _Fields) -> Decoder:
    width, heads = fields.number("n_embd"), fields.number("n_head")
    if heads < 1 or width % heads:
        raise UserError(f"config.json: n_embd {width} does not divide into {heads} heads.")
    return Decoder(
        width=width, layers=fields.number("n_layer"), heads=heads, kv_heads=heads, head_dim=width // heads,
        ffn=fields.number("n_inner", 4 * width), vocabulary=fields.number("vocab_size"),
        sequence=fields.number("n_positions", 1024), tied=fields.flag("tie_word_embeddings", True), norm_bias=True,
        qkv_bias=True, out_bias=True, mlp_bias=True,
    )  # fmt: skip


# What a family does that its config.json does not say.
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "mixtral": {},
    "phi3": {},
    "qwen2": {"qkv_bias": True},
    "qwen2_moe": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "qwen3_moe": {"qk_norm": True},
    "gemma": {"tied": True},
    "gemma2": {"tied": True, "norms": 4},
    "gemma3_text": {"tied": True, "norms": 4, "qk_norm": True},
    "gpt_neox": {"norm": "layer", "norm_bias": True, "qkv_bias": True, "out_bias": True, "mlp_bias": True,
                 "gated": False},
}  # fmt: skip


# Fields that a family's files leave out where they are as its library has them.
_LEFT_OUT: dict[str, dict[str, int]] = {
    "gemma3_text": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208},
}


def _llama_like(fields: _Fields, kind: str) -> Decoder:
    """Llama and what shares its fields."""
    family = _FAMILIES.get(kind, {})
    fields = _Fields({**_LEFT_OUT.get(kind, {}), **fields.raw})
    width, heads = fields.number("hidden_size"), fields.number("num_attention_heads")
    layers = fields.number("num_hidden_layers")
    if heads < 1 or ("head_dim" not in fields.raw and width % heads):
        raise UserError(f"config.json: hidden_size {width} does not divide into {heads} heads.")
    attention_bias = fields.flag("attention_bias", False)
    experts = fields.number("num_local_experts", fields.number("num_experts", 1)) or 1
    ffn = dense = fields.number("intermediate_size")
    dense_layers = 0
    if experts > 1:
        ffn = fields.number("moe_intermediate_size", dense)
        step = fields.number("decoder_sparse_step", 1) or 1
        only_dense = {layer for layer in fields.each("mlp_only_layers") if isinstance(layer, int)}
        dense_layers = sum(1 for i in range(min(layers, _MOST_LAYERS)) if i in only_dense or (i + 1) % step)
    values: dict[str, Any] = {
        "width": width,
        "layers": layers,
        "heads": heads,
        "kv_heads": fields.number("num_key_value_heads", heads),
        "head_dim": fields.number("head_dim", width // heads),
        "ffn": ffn,
        "vocabulary": fields.number("vocab_size"),
        "sequence": fields.number("max_position_embeddings", 2048),
        "gated": True,
        "tied": fields.flag("tie_word_embeddings", bool(family.get("tied", False))),
        "norm": "rms",
        "positions": "rope",
        "qkv_bias": attention_bias or bool(family.get("qkv_bias", False)),
        "out_bias": attention_bias,
        "mlp_bias": fields.flag("mlp_bias", False),
        "experts": experts,
        "active_experts": fields.number("num_experts_per_tok", 1) if experts > 1 else 1,
        "shared_ffn": fields.number("shared_expert_intermediate_size", 0),
        "dense_layers": dense_layers,
        "dense_ffn": dense if dense_layers else 0,
        "note": f"sequence {fields.number('max_position_embeddings', 2048):,} is the longest its config.json allows."
        if kind in _FAMILIES
        else f"{_short(kind)} is not a family known here; counted as a Llama with its fields.",
    }
    values.update({k: v for k, v in family.items() if k not in ("tied", "qkv_bias")})
    values.update(_windows(fields, kind, layers))
    return Decoder(**values)


def _windows(fields: _Fields, kind: str, layers: int) -> dict[str, int]:
    """How far back attention looks, and in how many layers."""
    window = fields.number("sliding_window", 0)
    if not window or (kind.startswith("qwen") and not fields.flag("use_sliding_window", False)):
        return {}
    types = fields.each("layer_types")
    if types:
        windowed = sum(1 for each in types[:layers] if each == "sliding_attention")
    elif kind.startswith("qwen"):
        windowed = max(0, layers - fields.number("max_window_layers", 0))
    elif kind == "gemma2":
        windowed = layers - layers // 2
    elif kind == "gemma3_text":
        windowed = layers - layers // (fields.number("sliding_window_pattern", 6) or 6)
    else:
        windowed = layers
    return {"window": window, "windowed_layers": windowed}
