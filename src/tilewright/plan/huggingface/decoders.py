"""Decoders of one stack with names of their own: GPT-2 and its kin, OPT, Falcon, BLOOM and MPT."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilewright.errors import UserError
from tilewright.plan.huggingface.config import (
    BIASES,
    LAYER_NORM,
    Config,
    learned_positions,
    length_fields,
    shorten,
    size_fields,
)


def _gpt2_names(config: Config) -> Config:
    config.refuse("add_cross_attention", True)
    return config.renamed(hidden_size="n_embd", num_attention_heads="n_head", num_hidden_layers="n_layer")


def _gpt2(config: Config) -> dict[str, Any]:
    config = _gpt2_names(config)
    size = size_fields(config, "")
    return {
        **size, **LAYER_NORM, **BIASES, **learned_positions(config.number("n_positions", 1024)),
        "kv_heads": size["heads"], "ffn": config.number("n_inner", 4 * size["width"]),
        "tied": config.flag("tie_word_embeddings", True), "dropout": config.share("resid_pdrop", 0.1),
    }  # fmt: skip


def _gpt_bigcode(config: Config) -> dict[str, Any]:
    found = _gpt2(config)
    return {**found, "kv_heads": 1 if config.flag("multi_query", True) else found["heads"]}


def _gptj(config: Config) -> dict[str, Any]:
    config = _gpt2_names(config)
    size = size_fields(config, "")
    return {
        **size, **LAYER_NORM, **length_fields(config.number("n_positions", 2048)), "kv_heads": size["heads"],
        "norms": 1, "ffn": config.number("n_inner", 4 * size["width"]),
        "tied": config.flag("tie_word_embeddings", False), "positions": "rope", "mlp_bias": True, "head_bias": True,
        "dropout": config.share("resid_pdrop", 0.0),
    }  # fmt: skip


def _opt(config: Config) -> dict[str, Any]:
    size = size_fields(config, "")
    if config.number("word_embed_proj_dim", size["width"]) != size["width"]:
        config.refuse("word_embed_proj_dim", config.raw["word_embed_proj_dim"])
    config.refuse("layer_norm_elementwise_affine", False)
    before = config.flag("do_layer_norm_before", True)
    return {
        **size, **LAYER_NORM, **dict.fromkeys(BIASES, config.flag("enable_bias", True)), "kv_heads": size["heads"],
        "ffn": config.number("ffn_dim"), "tied": config.flag("tie_word_embeddings", True),
        "final_norm": before and not config.flag("_remove_final_layer_norm", False),
        **learned_positions(config.number("max_position_embeddings", 2048), 2), "dropout": config.share("dropout", 0.1),
    }  # fmt: skip


def _falcon(config: Config) -> dict[str, Any]:
    config = config.renamed(hidden_size="n_embed", num_attention_heads="n_head", num_hidden_layers="n_layer",
                            num_kv_heads="n_head_kv")  # fmt: skip
    size, new = size_fields(config, ""), config.flag("new_decoder_architecture", False)
    kv_heads = 1 if config.flag("multi_query", True) else size["heads"]
    norms = 1 if config.flag("parallel_attn", True) else 2
    if new:
        kv_heads, norms = config.number("num_kv_heads", size["heads"]), config.number("num_ln_in_parallel_attn", 2)
    return {
        **size, **LAYER_NORM, **dict.fromkeys(BIASES, config.flag("bias", False)), "kv_heads": kv_heads,
        "norms": 1 if norms == 1 else 2, "ffn": config.number("ffn_hidden_size", 4 * size["width"]),
        "tied": config.flag("tie_word_embeddings", True),
        **length_fields(config.number("max_position_embeddings", 2048)),
        "positions": "none" if config.flag("alibi", False) else "rope", "dropout": config.share("hidden_dropout", 0.0),
    }  # fmt: skip


def _bloom(config: Config) -> dict[str, Any]:
    config = config.renamed(hidden_size="n_embed", num_attention_heads="n_head", num_hidden_layers="n_layer")
    size = size_fields(config, "")
    return {
        **size, **LAYER_NORM, **BIASES, **length_fields(config.number("seq_length", 2048)), "kv_heads": size["heads"],
        "ffn": 4 * size["width"], "tied": config.flag("tie_word_embeddings", True), "positions": "none",
        "dropout": config.share("hidden_dropout", 0.0),
        "embedding_norm": True,
    }  # fmt: skip


def _mpt(config: Config) -> dict[str, Any]:
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
    size = size_fields(config, "")
    return {
        **size, **length_fields(config.number("max_seq_len", 2048)), "kv_heads": size["heads"], "positions": "none",
        "ffn": 4 * size["width"], "tied": config.flag("tie_word_embeddings", True),
    }  # fmt: skip


ARCHITECTURES: dict[str, Callable[[Config], dict[str, Any]]] = {
    "gpt2": _gpt2, "gpt_bigcode": _gpt_bigcode, "gptj": _gptj, "codegen": _gptj, "opt": _opt, "falcon": _falcon,
    "bloom": _bloom, "mpt": _mpt,
}  # fmt: skip
