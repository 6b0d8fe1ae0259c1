"""The shape that a Hugging Face `config.json` describes, as fields of a `Decoder`.

A config.json is untrusted and read as data: nothing of it is imported, called or evaluated. An architecture that is not
listed here is refused, because a wrong guess gives a wrong count. Where a file leaves a field out, the field has the
default of that architecture's class in `transformers`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tilewright.errors import UserError

LARGEST_NUMBER = 1 << 40
_LARGEST_FILE = 1 << 20  # bytes of a config.json; real ones have a few thousand
_MOST_LAYERS = 100_000


def shorten(value: object) -> str:
    """The value as an error message shows it."""
    text = repr(value)
    return text if len(text) <= 40 else text[:40] + "..."


def read_json(path: Path) -> dict[str, Any]:
    """The parsed object of a file of bounded size."""
    try:
        if path.exists() and not path.is_file():
            raise UserError(f"{path} is no file; copy it again.")
        with path.open("rb") as file:
            text = file.read(_LARGEST_FILE + 1)
        if len(text) > _LARGEST_FILE:
            raise UserError(f"{path} has more than {_LARGEST_FILE:,} bytes; a config.json has a few thousand.")
        raw = json.loads(text)
    except UserError:  # which is a ValueError
        raise
    except OSError as error:
        raise UserError(f"Cannot read {shorten(str(path))}: {error.strerror}.") from None
    except (ValueError, RecursionError):
        raise UserError(f"{path} is not JSON that a model could have written; copy it again.") from None
    if not isinstance(raw, dict):
        raise UserError(f"{path} holds no JSON object; copy it again.")
    return raw


def decoder_fields(raw: dict[str, Any]) -> dict[str, Any]:
    """The fields of a `Decoder` from a parsed config.json."""
    outer, note = raw.get("model_type"), ""
    text = raw.get("text_config")
    if isinstance(text, dict) and "hidden_size" not in raw:  # the decoder of a multimodal model
        raw = {"model_type": outer, "tie_word_embeddings": raw.get("tie_word_embeddings"), **text}
        note = f"of {shorten(outer)} only the text decoder is counted, not what encodes images or sound."
    kind = raw.get("model_type")
    if not isinstance(kind, str):
        raise UserError("config.json has no model_type; it names the architecture, such as llama.")
    if kind in _LLAMAS:
        found = _llama_like(_Config({**_LLAMAS[kind].left_out, **raw}), _LLAMAS[kind])
    elif kind in _OTHERS:
        found = _OTHERS[kind](_Config(raw))
    else:
        raise UserError(f"plan does not know the architecture {shorten(kind)}; docs/plan.md lists those it counts.")
    return {"note": note, **found} if note else found


class _Config:
    """Typed access to a configuration that may hold anything."""

    def __init__(self, raw: dict[str, Any]) -> None:
        self.raw = raw

    def number(self, name: str, default: int | None = None) -> int:
        value = self.raw.get(name)
        if value is None:
            if default is None:
                raise UserError(f"config.json lacks {name}, a whole number.")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LARGEST_NUMBER:
            raise UserError(f"config.json: {name} is {shorten(value)}; it must be a whole number from 0 to 2^40.")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.raw.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise UserError(f"config.json: {name} is {shorten(value)}; it must be true or false.")
        return value

    def share(self, name: str, default: float) -> float:
        value = self.raw.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
            raise UserError(f"config.json: {name} is {shorten(value)}; it must be a number in [0, 1).")
        return float(value)

    def each(self, name: str) -> list[Any]:
        value = self.raw.get(name)
        if value is not None and (not isinstance(value, list) or len(value) > _MOST_LAYERS):
            raise UserError(f"config.json: {name} must be a list with an entry a layer.")
        return value or []

    def renamed(self, **names: str) -> _Config:
        """The same with fields also under the names that other architectures give them."""
        return _Config({**{new: self.raw[old] for new, old in names.items() if old in self.raw}, **self.raw})

    def refuse(self, name: str, *values: Any) -> None:
        """Refuse a variant of an architecture that nobody counts here."""
        if self.raw.get(name) in values:
            kind = shorten(self.raw.get("model_type"))
            raise UserError(f"plan does not count a {kind} with {name} {shorten(self.raw[name])}.")


def _size(config: _Config, head_dim: str = "head_dim") -> dict[str, int]:
    """Width, layers and heads."""
    width, heads = config.number("hidden_size"), config.number("num_attention_heads")
    given = config.raw.get(head_dim) is not None
    if heads < 1 or (not given and width % heads):
        raise UserError(f"config.json: hidden_size {width} does not divide into {heads} heads.")
    return {
        "width": width, "layers": config.number("num_hidden_layers"), "heads": heads,
        "head_dim": config.number(head_dim, width // heads), "vocabulary": config.number("vocab_size"),
    }  # fmt: skip


def _length(tokens: int) -> dict[str, int]:
    return {"sequence": tokens, "longest": tokens}


# Llama and what shares the names of its fields.


@dataclass(frozen=True)
class _Family:
    fixed: dict[str, Any] = field(default_factory=dict)  # fields of a Decoder that no config.json changes
    attention_bias: str = ""  # what the config's `attention_bias` is about: "all" or "qkv"; "": it is not read
    mlp_bias: bool = False  # whether the config's `mlp_bias` is read
    tied: bool = False  # where the file does not say
    experts: bool = False
    dropout: str = ""  # the field with that of a branch
    window: int = 0  # 1: where there is a window, all layers have it; n: all but every n-th
    left_out: dict[str, Any] = field(default_factory=dict)
    more: Callable[[_Config], dict[str, Any]] = lambda config: {}


_LAYER_NORM = {"norm": "layer", "norm_bias": True}
_BIASES = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
_WIDE_QK_NORM = {"qk_norm": True, "wide_qk_norm": True}
_QWEN_WINDOW = {"max_window_layers": 28}


def _phi(config: _Config) -> dict[str, Any]:
    config.refuse("qk_layernorm", True)
    return {}


def _starcoder2(config: _Config) -> dict[str, Any]:
    return dict.fromkeys(_BIASES, config.flag("use_bias", True))


def _cohere(config: _Config) -> dict[str, Any]:
    return _WIDE_QK_NORM if config.flag("use_qk_norm", False) else {}


def _stablelm(config: _Config) -> dict[str, Any]:
    return {
        "norms": 1 if config.flag("use_parallel_residual", False) else 2,
        "qkv_bias": config.flag("use_qkv_bias", False),
        **(_WIDE_QK_NORM if config.flag("qk_layernorm", False) else {}),
    }


def _gpt_neox(config: _Config) -> dict[str, Any]:
    return {"kv_heads": config.number("num_attention_heads")}


_LLAMAS: dict[str, _Family] = {
    "llama": _Family(attention_bias="all", mlp_bias=True),
    "granite": _Family(attention_bias="all", mlp_bias=True),
    "smollm3": _Family(attention_bias="all", mlp_bias=True, tied=True, window=1,
                       left_out={"num_key_value_heads": 4, "use_sliding_window": False}),
    "mistral": _Family(window=1, left_out={"num_key_value_heads": 8, "sliding_window": 4096}),
    "mixtral": _Family(window=1, experts=True, left_out={"num_key_value_heads": 8}),
    "granitemoe": _Family(attention_bias="all", experts=True),
    "olmoe": _Family(_WIDE_QK_NORM, attention_bias="all", experts=True),
    "gpt_oss": _Family({"mlp_bias": True, "sinks": True, "router_bias": True}, attention_bias="all", experts=True,
                       window=2,
                       left_out={"num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128,
                                 "attention_bias": True}),
    "phi3": _Family(window=1, dropout="resid_pdrop"),
    "qwen2": _Family({"qkv_bias": True}, window=1,
                     left_out={"num_key_value_heads": 32, "use_sliding_window": False, **_QWEN_WINDOW}),
    "qwen2_moe": _Family({"qkv_bias": True}, experts=True, window=1,
                         left_out={"num_key_value_heads": 16, "use_sliding_window": False, **_QWEN_WINDOW,
                                   "shared_expert_intermediate_size": 5632, "moe_intermediate_size": 1408}),
    "qwen3": _Family({"qk_norm": True}, attention_bias="all", window=1,
                     left_out={"num_key_value_heads": 32, "head_dim": 128, "use_sliding_window": False,
                               **_QWEN_WINDOW}),
    "qwen3_moe": _Family({"qk_norm": True}, attention_bias="all", experts=True, window=1,
                         left_out={"num_key_value_heads": 4, "use_sliding_window": False,
                                   "moe_intermediate_size": 768}),
    "gemma": _Family(attention_bias="all", tied=True, left_out={"num_key_value_heads": 16, "head_dim": 256}),
    "gemma2": _Family({"norms": 4}, attention_bias="all", tied=True, window=2,
                      left_out={"num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096}),
    "gemma3_text": _Family({"norms": 4, "qk_norm": True}, attention_bias="all", tied=True, window=6,
                           left_out={"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
                                     "vocab_size": 262208, "sliding_window": 4096}),
    "glm": _Family(attention_bias="qkv", left_out={"num_key_value_heads": 2, "head_dim": 128, "attention_bias": True}),
    "glm4": _Family({"norms": 4}, attention_bias="qkv",
                    left_out={"num_key_value_heads": 2, "head_dim": 128, "attention_bias": True}),
    "olmo": _Family({"norm": "layer", "norm_weight": False}, attention_bias="all"),
    "olmo2": _Family(_WIDE_QK_NORM, attention_bias="all"),
    "olmo3": _Family(_WIDE_QK_NORM, attention_bias="all", window=4, left_out={"sliding_window": 4096}),
    "cohere": _Family({"norm": "layer", "norms": 1}, attention_bias="all", tied=True, more=_cohere),
    "cohere2": _Family({"norm": "layer", "norms": 1}, attention_bias="all", tied=True, window=4,
                       left_out={"sliding_window": 4096}),
    "phi": _Family({**_LAYER_NORM, **_BIASES, "gated": False, "norms": 1, "head_bias": True}, more=_phi,
                   dropout="resid_pdrop"),
    "starcoder2": _Family({**_LAYER_NORM, "gated": False}, tied=True, window=1, more=_starcoder2,
                          dropout="residual_dropout", left_out={"num_key_value_heads": 2}),
    "stablelm": _Family(_LAYER_NORM, more=_stablelm, dropout="hidden_dropout"),
    "gpt_neox": _Family({**_LAYER_NORM, "gated": False, "mlp_bias": True}, attention_bias="all", more=_gpt_neox,
                        dropout="hidden_dropout",
                        left_out={"attention_bias": True}),
}  # fmt: skip


def _llama_like(config: _Config, family: _Family) -> dict[str, Any]:
    """Llama and what shares its fields."""
    size = _size(config)
    for name in ("kv_lora_rank", "n_routed_experts", *(() if family.experts else ("num_local_experts", "num_experts"))):
        value = config.raw.get(name)
        if value is not None and value not in (0, 1):
            kind = shorten(config.raw["model_type"])
            raise UserError(f"{kind} has no {name}; config.json gives {shorten(value)}: another architecture.")
    values: dict[str, Any] = {
        **size,
        "kv_heads": config.number("num_key_value_heads", size["heads"]),
        "ffn": config.number("intermediate_size"),
        **_length(config.number("max_position_embeddings", 2048)),
        "gated": True,
        "tied": config.flag("tie_word_embeddings", family.tied),
        "norm": "rms",
        "positions": "rope",
        "mlp_bias": family.mlp_bias and config.flag("mlp_bias", False),
        "dropout": config.share(family.dropout, 0.0) if family.dropout else 0.0,
    }
    if family.attention_bias:
        biased = config.flag("attention_bias", False)
        values |= {"qkv_bias": biased, "out_bias": biased and family.attention_bias == "all"}
    if family.experts:
        values |= _experts(config, size["layers"])
    if family.window and (config.flag("use_sliding_window", False) or "use_sliding_window" not in family.left_out):
        values |= _windows(config, family.window, size["layers"])
    return values | family.fixed | family.more(config)


def _experts(config: _Config, layers: int) -> dict[str, int]:
    """Of a mixture: experts, their width, and layers without."""
    config = config.renamed(num_experts="num_local_experts")
    experts = config.number("num_experts")
    if experts < 2:
        raise UserError(f"config.json: a mixture of {experts} experts is none; it must have at least 2.")
    dense = config.number("intermediate_size")
    step = config.number("decoder_sparse_step", 1) or 1
    only_dense = {layer for layer in config.each("mlp_only_layers") if isinstance(layer, int)}
    dense_layers = sum(1 for i in range(min(layers, _MOST_LAYERS)) if i in only_dense or (i + 1) % step)
    return {
        "experts": experts, "active_experts": config.number("num_experts_per_tok"),
        "ffn": config.number("moe_intermediate_size", dense),
        "shared_ffn": config.number("shared_expert_intermediate_size", 0),
        "dense_layers": dense_layers, "dense_ffn": dense if dense_layers else 0,
    }  # fmt: skip


def _windows(config: _Config, period: int, layers: int) -> dict[str, int]:
    """How far back attention looks, and in how many layers."""
    window = config.number("sliding_window", 0)
    if not window:
        return {}
    types = config.each("layer_types")
    if types:
        windowed = sum(1 for each in types[:layers] if each == "sliding_attention")
    elif "max_window_layers" in config.raw:
        windowed = max(0, layers - config.number("max_window_layers", 0))
    else:
        period = config.number("sliding_window_pattern", period) if period > 1 else period
        windowed = layers if period < 2 else layers - layers // period
    return {"window": window, "windowed_layers": windowed}


# Architectures with names of their own.


def _learned(tokens: int, offset: int = 0) -> dict[str, Any]:
    return {**_length(tokens), "positions": "learned", "position_rows": tokens + offset}


def _gpt2_names(config: _Config) -> _Config:
    config.refuse("add_cross_attention", True)
    return config.renamed(hidden_size="n_embd", num_attention_heads="n_head", num_hidden_layers="n_layer")


def _gpt2(config: _Config) -> dict[str, Any]:
    config = _gpt2_names(config)
    size = _size(config, "")
    return {
        **size, **_LAYER_NORM, **_BIASES, **_learned(config.number("n_positions", 1024)), "kv_heads": size["heads"],
        "ffn": config.number("n_inner", 4 * size["width"]), "tied": config.flag("tie_word_embeddings", True),
        "dropout": config.share("resid_pdrop", 0.1),
    }  # fmt: skip


def _gpt_bigcode(config: _Config) -> dict[str, Any]:
    found = _gpt2(config)
    return {**found, "kv_heads": 1 if config.flag("multi_query", True) else found["heads"]}


def _gptj(config: _Config) -> dict[str, Any]:
    config = _gpt2_names(config)
    size = _size(config, "")
    return {
        **size, **_LAYER_NORM, **_length(config.number("n_positions", 2048)), "kv_heads": size["heads"], "norms": 1,
        "ffn": config.number("n_inner", 4 * size["width"]), "tied": config.flag("tie_word_embeddings", False),
        "positions": "rope", "mlp_bias": True, "head_bias": True, "dropout": config.share("resid_pdrop", 0.0),
    }  # fmt: skip


def _opt(config: _Config) -> dict[str, Any]:
    size = _size(config, "")
    if config.number("word_embed_proj_dim", size["width"]) != size["width"]:
        config.refuse("word_embed_proj_dim", config.raw["word_embed_proj_dim"])
    config.refuse("layer_norm_elementwise_affine", False)
    before = config.flag("do_layer_norm_before", True)
    return {
        **size, **_LAYER_NORM, **dict.fromkeys(_BIASES, config.flag("enable_bias", True)), "kv_heads": size["heads"],
        "ffn": config.number("ffn_dim"), "tied": config.flag("tie_word_embeddings", True),
        "final_norm": before and not config.flag("_remove_final_layer_norm", False),
        **_learned(config.number("max_position_embeddings", 2048), 2), "dropout": config.share("dropout", 0.1),
    }  # fmt: skip


def _falcon(config: _Config) -> dict[str, Any]:
    config = config.renamed(hidden_size="n_embed", num_attention_heads="n_head", num_hidden_layers="n_layer",
                            num_kv_heads="n_head_kv")  # fmt: skip
    size, new = _size(config, ""), config.flag("new_decoder_architecture", False)
    kv_heads = 1 if config.flag("multi_query", True) else size["heads"]
    norms = 1 if config.flag("parallel_attn", True) else 2
    if new:
        kv_heads, norms = config.number("num_kv_heads", size["heads"]), config.number("num_ln_in_parallel_attn", 2)
    return {
        **size, **_LAYER_NORM, **dict.fromkeys(_BIASES, config.flag("bias", False)), "kv_heads": kv_heads,
        "norms": 1 if norms == 1 else 2, "ffn": config.number("ffn_hidden_size", 4 * size["width"]),
        "tied": config.flag("tie_word_embeddings", True), **_length(config.number("max_position_embeddings", 2048)),
        "positions": "none" if config.flag("alibi", False) else "rope", "dropout": config.share("hidden_dropout", 0.0),
    }  # fmt: skip


def _deepseek(config: _Config, version: int) -> dict[str, Any]:
    width, heads, layers = (config.number(name) for name in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    rope, dense = (
        config.number("qk_rope_head_dim", 64),
        config.number("first_k_dense_replace", 3 if version == 3 else 0),
    )
    expert = config.number("moe_intermediate_size", 2048 if version == 3 else 1407)
    biased = config.flag("attention_bias", False)
    if config.number("moe_layer_freq", 1) != 1:
        config.refuse("moe_layer_freq", config.raw["moe_layer_freq"])
    given = "q_lora_rank" in config.raw and config.raw["q_lora_rank"] is None  # null: queries of the width
    q_rank = 0 if given else config.number("q_lora_rank", 1536)
    return {
        "width": width, "layers": layers, "heads": heads, "kv_heads": heads, "vocabulary": config.number("vocab_size"),
        "head_dim": config.number("qk_nope_head_dim", 128) + rope, "rope_dim": rope, "q_rank": q_rank,
        "kv_rank": config.number("kv_lora_rank", 512), "value_dim": config.number("v_head_dim", 128),
        **_length(config.number("max_position_embeddings", 4096 if version == 3 else 2048)),
        "experts": config.number("n_routed_experts", 256 if version == 3 else 64),
        "active_experts": config.number("num_experts_per_tok", 8 if version == 3 else None), "ffn": expert,
        "shared_ffn": expert * config.number("n_shared_experts", 1 if version == 3 else 2), "shared_gate": False,
        "dense_layers": min(layers, dense), "dense_ffn": config.number("intermediate_size") if dense else 0,
        "gated": True, "tied": config.flag("tie_word_embeddings", False), "norm": "rms", "positions": "rope",
        "qkv_bias": biased, "out_bias": biased,
    }  # fmt: skip


def _deepseek_v2(config: _Config) -> dict[str, Any]:
    found = _deepseek(config, 2)
    if found["qkv_bias"] and not found["q_rank"]:
        config.refuse("attention_bias", True)
    config.refuse("mlp_bias", True)
    return found


def _deepseek_v3(config: _Config) -> dict[str, Any]:
    return _deepseek(config, 3)


def _llama4(config: _Config) -> dict[str, Any]:
    size = _size(config)
    layers, chunk = size["layers"], config.number("attention_chunk_size", 8192)
    step, every = config.number("interleave_moe_layer_step", 1), config.number("no_rope_layer_interval", 4)
    if step < 1 or every < 1:
        raise UserError("config.json: interleave_moe_layer_step and no_rope_layer_interval must be at least 1.")
    sparse = config.each("moe_layers") or range(step - 1, min(layers, _MOST_LAYERS), step)
    types = config.each("layer_types")
    rotated = config.each("no_rope_layers") or [(i + 1) % every != 0 for i in range(min(layers, _MOST_LAYERS))]
    chunked = sum(kind == "chunked_attention" for kind in types) if types else sum(map(bool, rotated))
    dense, ffn = layers - len(sparse), config.number("intermediate_size")
    biased = config.flag("attention_bias", False)
    return {
        **size, "kv_heads": config.number("num_key_value_heads", 8), "gated": True, "norm": "rms", "positions": "rope",
        **_length(config.number("max_position_embeddings", 131072)), "ffn": ffn, "shared_ffn": ffn,
        "shared_gate": False, "experts": config.number("num_local_experts", 16), "dense_layers": dense,
        "active_experts": config.number("num_experts_per_tok", 1),
        "dense_ffn": config.number("intermediate_size_mlp", 16384) if dense else 0,
        "tied": config.flag("tie_word_embeddings", False), "window": chunk if chunked else 0,
        "windowed_layers": chunked if chunk else 0, "chunked": bool(chunk and chunked), "qkv_bias": biased,
        "out_bias": biased,
    }  # fmt: skip


def _bloom(config: _Config) -> dict[str, Any]:
    config = config.renamed(hidden_size="n_embed", num_attention_heads="n_head", num_hidden_layers="n_layer")
    size = _size(config, "")
    return {
        **size, **_LAYER_NORM, **_BIASES, **_length(config.number("seq_length", 2048)), "kv_heads": size["heads"],
        "ffn": 4 * size["width"], "tied": config.flag("tie_word_embeddings", True), "positions": "none",
        "dropout": config.share("hidden_dropout", 0.0),
        "embedding_norm": True,
    }  # fmt: skip


def _mpt(config: _Config) -> dict[str, Any]:
    config = config.renamed(hidden_size="d_model", num_attention_heads="n_heads", num_hidden_layers="n_layers")
    config.refuse("no_bias", False)
    attention = config.raw.get("attn_config") or {}
    if not isinstance(attention, dict):
        raise UserError("config.json: attn_config must be an object.")
    for name, common in (("attn_type", "multihead_attention"), ("qk_ln", False), ("alibi", True)):
        if attention.get(name, common) != common:
            raise UserError(f"plan does not count an 'mpt' with {name} {shorten(attention[name])}.")
    if config.number("expansion_ratio", 4) != 4:
        config.refuse("expansion_ratio", config.raw["expansion_ratio"])
    size = _size(config, "")
    return {
        **size, **_length(config.number("max_seq_len", 2048)), "kv_heads": size["heads"], "positions": "none",
        "ffn": 4 * size["width"], "tied": config.flag("tie_word_embeddings", True),
    }  # fmt: skip


def _bert(
    config: _Config, offset: int = 0, pooler: bool = True, dropout: str = "hidden_dropout_prob"
) -> dict[str, Any]:
    config.refuse("is_decoder", True)
    config.refuse("position_embedding_type", "relative_key", "relative_key_query")
    size = _size(config, "")
    rows = config.number("max_position_embeddings", 512)
    if rows <= offset:
        raise UserError(f"config.json: max_position_embeddings is {rows}; it must be more than {offset}.")
    return {
        **size, **_LAYER_NORM, **_BIASES, **_learned(rows - offset, offset), "kv_heads": size["heads"],
        "ffn": config.number("intermediate_size"), "causal": False, "head": False,
        "embedding_norm": True, "final_norm": False, "pooler": pooler, "dropout": config.share(dropout, 0.1),
        "token_types": config.number("type_vocab_size", 2) if pooler else 0,
        "note": f"an encoder{' and its pooler' if pooler else ''}; a head for a task comes on top.",
    }  # fmt: skip


def _distilbert(config: _Config) -> dict[str, Any]:
    names = {"hidden_size": "dim", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers",
             "intermediate_size": "hidden_dim"}  # fmt: skip
    return _bert(config.renamed(**names), pooler=False, dropout="dropout")


def _roberta(config: _Config) -> dict[str, Any]:
    return _bert(config, offset=config.number("pad_token_id", 1) + 1)  # positions begin behind that of padding


def _t5(config: _Config, activation: str = "gated-gelu", every_layer: bool = False) -> dict[str, Any]:
    """An encoder and a decoder. In both, scores get a number by distance and head, from one table or one a layer."""
    activation = config.raw.get("feed_forward_proj", activation)
    if not isinstance(activation, str):
        raise UserError(f"config.json: feed_forward_proj is {shorten(activation)}; it must be a name such as relu.")
    heads, layers = config.number("num_heads"), config.number("num_layers")
    decoder = config.number("num_decoder_layers", layers)
    tables = layers + decoder if every_layer else 2
    if not decoder or not layers:
        raise UserError("config.json: num_layers and num_decoder_layers must be at least 1.")
    return {
        "width": config.number("d_model"), "layers": layers + decoder, "cross_layers": decoder, "heads": heads,
        "kv_heads": heads, "head_dim": config.number("d_kv", 64), "ffn": config.number("d_ff"),
        "vocabulary": config.number("vocab_size"), "sequence": config.number("n_positions", 512), "norm": "rms",
        "positions": "none", "gated": activation.startswith("gated-"), "tied": config.flag("tie_word_embeddings", True),
        "score_biases": tables * config.number("relative_attention_num_buckets", 32) * heads,
        "dropout": config.share("dropout_rate", 0.1),
        "note": "an encoder and a decoder; a token is one of the source and one of the target, both of one length.",
    }  # fmt: skip


_OTHERS: dict[str, Callable[[_Config], dict[str, Any]]] = {
    "gpt2": _gpt2, "gpt_bigcode": _gpt_bigcode, "gptj": _gptj, "codegen": _gptj, "opt": _opt, "falcon": _falcon,
    "deepseek_v2": _deepseek_v2, "deepseek_v3": _deepseek_v3, "llama4_text": _llama4,
    "bloom": _bloom, "mpt": _mpt, "bert": _bert, "roberta": _roberta, "xlm-roberta": _roberta,
    "distilbert": _distilbert, "t5": functools.partial(_t5, activation="relu"), "mt5": _t5,
    "umt5": functools.partial(_t5, every_layer=True),
}  # fmt: skip
KNOWN = (*_LLAMAS, *_OTHERS)
