"""Encoders (BERT and its kin), and encoders with a decoder (T5)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tilewright.errors import UserError
from tilewright.plan.huggingface.config import (
    BIASES,
    LAYER_NORM,
    Config,
    learned_positions,
    shorten,
    size_fields,
)


def _bert(config: Config, offset: int = 0, pooler: bool = True, dropout: str = "hidden_dropout_prob") -> dict[str, Any]:
    config.refuse("is_decoder", True)
    config.refuse("position_embedding_type", "relative_key", "relative_key_query")
    size = size_fields(config, "")
    rows = config.number("max_position_embeddings", 512)
    if rows <= offset:
        raise UserError(f"config.json: max_position_embeddings is {rows}; it must be more than {offset}.")
    return {
        **size, **LAYER_NORM, **BIASES, **learned_positions(rows - offset, offset), "kv_heads": size["heads"],
        "ffn": config.number("intermediate_size"), "causal": False, "head": False,
        "embedding_norm": True, "final_norm": False, "pooler": pooler, "dropout": config.share(dropout, 0.1),
        "token_types": config.number("type_vocab_size", 2) if pooler else 0,
        "note": f"an encoder{' and its pooler' if pooler else ''}; a head for a task comes on top.",
    }  # fmt: skip


def _distilbert(config: Config) -> dict[str, Any]:
    names = {"hidden_size": "dim", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers",
             "intermediate_size": "hidden_dim"}  # fmt: skip
    return _bert(config.renamed(**names), pooler=False, dropout="dropout")


def _roberta(config: Config) -> dict[str, Any]:
    return _bert(config, offset=config.number("pad_token_id", 1) + 1)  # positions begin behind that of padding


def _t5(config: Config, activation: str = "gated-gelu", every_layer: bool = False) -> dict[str, Any]:
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


ARCHITECTURES: dict[str, Callable[[Config], dict[str, Any]]] = {
    "bert": _bert, "roberta": _roberta, "xlm-roberta": _roberta, "distilbert": _distilbert,
    "t5": functools.partial(_t5, activation="relu"), "mt5": _t5, "umt5": functools.partial(_t5, every_layer=True),
}  # fmt: skip
