"""Llama and the architectures that share the names of its fields, as one table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tilewright.errors import UserError
from tilewright.plan.huggingface.config import (
    BIASES,
    LAYER_NORM,
    MOST_LAYERS,
    Config,
    length_fields,
    shorten,
    size_fields,
)


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
    more: Callable[[Config], dict[str, Any]] = lambda config: {}


_WIDE_QK_NORM = {"qk_norm": True, "wide_qk_norm": True}
_QWEN_WINDOW = {"max_window_layers": 28}


def _phi(config: Config) -> dict[str, Any]:
    config.refuse("qk_layernorm", True)
    return {}


def _starcoder2(config: Config) -> dict[str, Any]:
    return dict.fromkeys(BIASES, config.flag("use_bias", True))


def _cohere(config: Config) -> dict[str, Any]:
    return _WIDE_QK_NORM if config.flag("use_qk_norm", False) else {}


def _stablelm(config: Config) -> dict[str, Any]:
    return {
        "norms": 1 if config.flag("use_parallel_residual", False) else 2,
        "qkv_bias": config.flag("use_qkv_bias", False),
        **(_WIDE_QK_NORM if config.flag("qk_layernorm", False) else {}),
    }


def _gpt_neox(config: Config) -> dict[str, Any]:
    return {"kv_heads": config.number("num_attention_heads")}


FAMILIES: dict[str, _Family] = {
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
    "phi": _Family({**LAYER_NORM, **BIASES, "gated": False, "norms": 1, "head_bias": True}, more=_phi,
                   dropout="resid_pdrop"),
    "starcoder2": _Family({**LAYER_NORM, "gated": False}, tied=True, window=1, more=_starcoder2,
                          dropout="residual_dropout", left_out={"num_key_value_heads": 2}),
    "stablelm": _Family(LAYER_NORM, more=_stablelm, dropout="hidden_dropout"),
    "gpt_neox": _Family({**LAYER_NORM, "gated": False, "mlp_bias": True}, attention_bias="all", more=_gpt_neox,
                        dropout="hidden_dropout",
                        left_out={"attention_bias": True}),
}  # fmt: skip


def llama_fields(config: Config, family: _Family) -> dict[str, Any]:
    """Llama and what shares its fields."""
    size = size_fields(config)
    for name in ("kv_lora_rank", "n_routed_experts", *(() if family.experts else ("num_local_experts", "num_experts"))):
        value = config.raw.get(name)
        if value is not None and value not in (0, 1):
            kind = shorten(config.raw["model_type"])
            raise UserError(f"{kind} has no {name}; config.json gives {shorten(value)}: another architecture.")
    values: dict[str, Any] = {
        **size,
        "kv_heads": config.number("num_key_value_heads", size["heads"]),
        "ffn": config.number("intermediate_size"),
        **length_fields(config.number("max_position_embeddings", 2048)),
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


def _experts(config: Config, layers: int) -> dict[str, int]:
    """Of a mixture: experts, their width, and layers without."""
    config = config.renamed(num_experts="num_local_experts")
    experts = config.number("num_experts")
    if experts < 2:
        raise UserError(f"config.json: a mixture of {experts} experts is none; it must have at least 2.")
    dense = config.number("intermediate_size")
    step = config.number("decoder_sparse_step", 1) or 1
    only_dense = {layer for layer in config.each("mlp_only_layers") if isinstance(layer, int)}
    dense_layers = sum(1 for i in range(min(layers, MOST_LAYERS)) if i in only_dense or (i + 1) % step)
    return {
        "experts": experts, "active_experts": config.number("num_experts_per_tok"),
        "ffn": config.number("moe_intermediate_size", dense),
        "shared_ffn": config.number("shared_expert_intermediate_size", 0),
        "dense_layers": dense_layers, "dense_ffn": dense if dense_layers else 0,
    }  # fmt: skip


def _windows(config: Config, period: int, layers: int) -> dict[str, int]:
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
