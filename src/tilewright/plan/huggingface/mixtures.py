"""Mixtures of experts with names of their own: DeepSeek, and the text decoder of Llama 4."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilewright.errors import UserError
from tilewright.plan.huggingface.config import (
    MOST_LAYERS,
    Config,
    length_fields,
    size_fields,
)


def _deepseek(config: Config, version: int) -> dict[str, Any]:
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
        **length_fields(config.number("max_position_embeddings", 4096 if version == 3 else 2048)),
        "experts": config.number("n_routed_experts", 256 if version == 3 else 64),
        "active_experts": config.number("num_experts_per_tok", 8 if version == 3 else None), "ffn": expert,
        "shared_ffn": expert * config.number("n_shared_experts", 1 if version == 3 else 2), "shared_gate": False,
        "dense_layers": min(layers, dense), "dense_ffn": config.number("intermediate_size") if dense else 0,
        "gated": True, "tied": config.flag("tie_word_embeddings", False), "norm": "rms", "positions": "rope",
        "qkv_bias": biased, "out_bias": biased,
    }  # fmt: skip


def _deepseek_v2(config: Config) -> dict[str, Any]:
    found = _deepseek(config, 2)
    if found["qkv_bias"] and not found["q_rank"]:
        config.refuse("attention_bias", True)
    config.refuse("mlp_bias", True)
    return found


def _deepseek_v3(config: Config) -> dict[str, Any]:
    return _deepseek(config, 3)


def _llama4(config: Config) -> dict[str, Any]:
    size = size_fields(config)
    layers, chunk = size["layers"], config.number("attention_chunk_size", 8192)
    step, every = config.number("interleave_moe_layer_step", 1), config.number("no_rope_layer_interval", 4)
    if step < 1 or every < 1:
        raise UserError("config.json: interleave_moe_layer_step and no_rope_layer_interval must be at least 1.")
    sparse = config.each("moe_layers") or range(step - 1, min(layers, MOST_LAYERS), step)
    types = config.each("layer_types")
    rotated = config.each("no_rope_layers") or [(i + 1) % every != 0 for i in range(min(layers, MOST_LAYERS))]
    chunked = sum(kind == "chunked_attention" for kind in types) if types else sum(map(bool, rotated))
    dense, ffn = layers - len(sparse), config.number("intermediate_size")
    biased = config.flag("attention_bias", False)
    return {
        **size, "kv_heads": config.number("num_key_value_heads", 8), "gated": True, "norm": "rms", "positions": "rope",
        **length_fields(config.number("max_position_embeddings", 131072)), "ffn": ffn, "shared_ffn": ffn,
        "shared_gate": False, "experts": config.number("num_local_experts", 16), "dense_layers": dense,
        "active_experts": config.number("num_experts_per_tok", 1),
        "dense_ffn": config.number("intermediate_size_mlp", 16384) if dense else 0,
        "tied": config.flag("tie_word_embeddings", False), "window": chunk if chunked else 0,
        "windowed_layers": chunked if chunk else 0, "chunked": bool(chunk and chunked), "qkv_bias": biased,
        "out_bias": biased,
    }  # fmt: skip


ARCHITECTURES: dict[str, Callable[[Config], dict[str, Any]]] = {
    "deepseek_v2": _deepseek_v2, "deepseek_v3": _deepseek_v3, "llama4_text": _llama4,
}  # fmt: skip
