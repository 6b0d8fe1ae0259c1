"""Every field of a run by its dotted name, what others call it, and the JSON Schema of all."""

from __future__ import annotations

import dataclasses
import functools
import typing
from dataclasses import dataclass
from typing import Any

from tilewright.plan.gpt import PRESETS
from tilewright.plan.lever import Lever
from tilewright.train.schema import Train, choices_of, lever_of

# A whole number, with k, M, G or T behind it where it is large, and a reference to another field.
WHOLE = r"([+-]?[0-9][0-9_]{0,30}(?:\.[0-9]{1,30})?(?:[eE]\+?[0-9]{1,2})?)([kKmMgGbBtT]?)"
REFERENCE = r"\$\{([A-Za-z_][A-Za-z0-9_.]*)\}"

# A GPT's shape has no metadata of its own: what each field does, and its least value.
_MODEL: dict[str, tuple[str, int | None]] = {
    "width": ("Numbers a token is between blocks.", 1),
    "layers": ("Blocks.", 1),
    "heads": ("Attention heads of a block.", 1),
    "vocabulary": ("Tokens there are.", 1),
    "sequence": ("Tokens of a sequence.", 1),
    "dropout": ("Share of activations set to 0 while training.", 0),
    "gpt_block": ("PyTorch's own ops, or fused ones.", None),
    "recompute": (
        "What backward computes again: selective, all but matmuls and attention; full, a whole block; "
        "budget, as little as recompute_budget allows.",
        None,
    ),
    "recompute_budget": ("For budget: the most memory in GiB that blocks may keep for backward.", 0),
    "attention": (
        "Who computes it; hopper, triton: kernels of ours; auto: PyTorch, under optimized the quickest.",
        None,
    ),
    "residual": ("Dtype of the stream between blocks; auto: float32, or bfloat16 beside bfloat16 weights.", None),
    "mlp": (
        "auto: as gpt_block has it. recompute: fused, and the activation computed again in backward. tilesync: forward "
        "by tiles that wait for each other, on a Hopper.",
        None,
    ),
    "loss": ("fused: one pass over the logits; linear_fused: never all logits at once.", None),
    "norm": ("LayerNorm or RMSNorm.", None),
    "activation": ("Of the MLP; those named glu are gated.", None),
    "position": ("A table of positions, or rotated queries and keys.", None),
    "bias": ("Whether linear layers and norms have one.", None),
    "kv_heads": ("Heads of keys and values; 0: as many as of queries.", 0),
    "ffn": ("Inner width of an MLP; 0: 4 times the width or, gated, 8 / 3 of it.", 0),
    "tied": ("Whether the output layer is the embedding's weight.", None),
    "norm_epsilon": ("Added to what a norm takes the root of.", 0),
    "experts": ("MLPs of a block, of which a token takes experts_per_token; 0: one, that all take.", 0),
    "experts_per_token": ("Experts that each token takes.", 1),
    "balance_rate": ("What a step moves the router's choice towards experts with few tokens by; 0: nothing.", 0),
    "rope_base": ("Of the wavelengths of rotary positions, also called theta.", 0),
}


@dataclass(frozen=True)
class Field:
    """A field of a run, by its dotted name."""

    name: str
    kind: type
    default: Any
    help: str
    choices: tuple[str, ...] | None
    minimum: float | None
    lever: Lever | None


@functools.cache
def sections() -> dict[str, type]:
    """The parts of a run that have fields of their own."""
    hints: dict[str, type] = typing.get_type_hints(Train)
    return {name: kind for name, kind in hints.items() if dataclasses.is_dataclass(kind)}


@functools.cache
def fields() -> dict[str, Field]:
    """Every field of a run.

    >>> fields()["optimizer.clip"].default
    1.0
    """
    found = {}
    defaults = dataclasses.asdict(Train())
    for section, kind in (("", Train), *sections().items()):
        hints = typing.get_type_hints(kind)
        for item in dataclasses.fields(kind):
            if item.name in sections() and kind is Train:
                continue
            name = f"{section}.{item.name}" if section else item.name
            told, minimum = _MODEL[item.name] if section == "model" and not item.metadata else (None, None)
            found[name] = Field(
                name,
                typing.get_origin(hints[item.name]) or hints[item.name],
                defaults[section][item.name] if section else defaults[item.name],
                told or item.metadata["help"],
                ("", *PRESETS) if name == "model.preset" else choices_of(kind, item.name),
                minimum if told else item.metadata.get("minimum"),
                lever_of(kind, item.name),
            )
    return found


def json_schema() -> dict[str, Any]:
    """JSON Schema of a configuration file, for editors and validators."""
    base = "Another file, from this one's folder, whose values hold where this file has none."
    properties: dict[str, Any] = {"base": {"type": "string", "pattern": r"\.ya?ml$", "description": base}}
    whole = _object("A training run of Tilewright.", properties)
    for name, kind in sections().items():
        properties[name] = _object((kind.__doc__ or "").splitlines()[0], {})
        properties[name]["type"] = ["object", "null"]  # a section whose fields are all commented out
    for field in fields().values():
        section, _, name = field.name.rpartition(".")
        place = properties[section]["properties"] if section else properties
        place[name] = {"description": field.help, "default": field.default, **_types(field)}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **whole}


def _object(description: str, properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "description": description, "additionalProperties": False, "properties": properties}


def _types(field: Field) -> dict[str, Any]:
    if field.kind is list:
        return {"type": "array", "items": {"type": "string"}}
    if field.kind is str and not field.choices:
        return {"type": "string"}
    typed: dict[str, Any] = {"type": {int: "integer", float: "number", bool: "boolean", str: "string"}[field.kind]}
    if field.choices:
        typed["enum"] = list(field.choices)
    if field.minimum is not None:
        typed["minimum"] = field.minimum
    text = f"^{WHOLE}$|{REFERENCE}" if field.kind is int else REFERENCE
    return {"anyOf": [typed, {"type": "string", "pattern": text}]}


# What others call a field.
_ALIASES = {
    "lr": "optimizer.learning_rate", "wd": "optimizer.weight_decay", "batch": "global_batch",
    "batch_size": "global_batch", "bs": "global_batch", "micro_batch_size": "micro_batch", "grad_accum": "accumulation",
    "gradient_accumulation_steps": "accumulation", "gradient_accumulation": "accumulation", "max_steps": "steps",
    "iterations": "steps", "seq_len": "model.sequence", "seq_length": "model.sequence", "context": "model.sequence",
    "block_size": "model.sequence", "vocab_size": "model.vocabulary", "vocab": "model.vocabulary",
    "n_layer": "model.layers", "num_layers": "model.layers", "n_head": "model.heads", "n_embd": "model.width",
    "rope_theta": "model.rope_base", "rms_norm_eps": "model.norm_epsilon", "layer_norm_epsilon": "model.norm_epsilon",
    "tie_word_embeddings": "model.tied", "hidden_size": "model.width", "d_model": "model.width",
    "output": "out", "output_dir": "out", "out_dir": "out",
    "dtype": "precision", "max_grad_norm": "optimizer.clip", "grad_clip": "optimizer.clip",
}  # fmt: skip


def find_field(name: str) -> str | None:
    """The field that somebody means by the last part of its name, or by what others call it.

    >>> find_field("lr"), find_field("steps"), find_field("learning_rate"), find_field("nonsense")
    ('optimizer.learning_rate', 'steps', 'optimizer.learning_rate', None)
    """
    last = name.rpartition(".")[2].lower().replace("-", "_")
    if name in fields() or last in _ALIASES:
        return name if name in fields() else _ALIASES[last]
    ending = [each for each in fields() if each.rpartition(".")[2] == last]
    return ending[0] if len(ending) == 1 else None
