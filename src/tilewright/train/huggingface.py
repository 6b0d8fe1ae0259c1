"""GPT-2 and Llama as Hugging Face has them: the fields of `config.json` and the names of tensors, both ways.

transformers has two of the models that `models.gpt` can be. GPT-2: LayerNorm, GELU, learned positions, biases
everywhere. Llama: RMSNorm, a gated MLP, rotary positions in halves, biases or none. Whatever mixes the two has no
equivalent there, and much of what transformers can do has none here; both are refused by the name of the field.

A config.json may come from a stranger. It is read as data: nothing of it is imported, called or evaluated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tilewright.errors import UserError
from tilewright.plan.gpt import GPTConfig
from tilewright.plan.huggingface.config import LARGEST_NUMBER, shorten

ACTIVATIONS = {
    "gelu_tanh": "gelu_new", "gelu": "gelu", "swiglu": "silu", "geglu_tanh": "gelu_pytorch_tanh", "geglu": "gelu",
}  # fmt: skip
_GELUS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
_GATES = {"silu": "swiglu", "gelu_pytorch_tanh": "geglu_tanh", "gelu_new": "geglu_tanh", "gelu": "geglu"}


@dataclass(frozen=True)
class Part:
    """Which part of the model's state a tensor of theirs is: a parameter, or some rows of it."""

    name: str
    rows: slice | None = None
    transposed: bool = False  # their matmul takes (in, out), as the first GPT-2's did, where torch's takes (out, in)

    def of(self, state: Mapping[str, Tensor]) -> Tensor:
        """Their tensor, a view of ours."""
        tensor = state[self.name] if self.rows is None else state[self.name][self.rows]
        return tensor.t() if self.transposed else tensor


def parts(config: GPTConfig) -> dict[str, Part]:
    """Every tensor of theirs by name; those that make up one of ours follow each other.

    >>> from tilewright.plan.gpt import LLAMA
    >>> found = parts(GPTConfig(width=8, layers=1, heads=2, **LLAMA))
    >>> found["model.layers.0.self_attn.k_proj.weight"]
    Part(name='blocks.0.attention.qkv.weight', rows=slice(8, 16, None), transposed=False)
    """
    found = _llama_parts(config) if config.position == "rope" else _gpt2_parts(config)
    return found if config.tied else {**found, "lm_head.weight": Part("head.weight")}


def prefix_of(config: GPTConfig) -> str:
    """Return the prefix of every name but the head's; a model saved without its head has none."""
    return "model." if config.position == "rope" else "transformer."


def _gpt2_parts(config: GPTConfig) -> dict[str, Part]:
    found = {
        "transformer.wte.weight": Part("token.weight"), "transformer.wpe.weight": Part("position.weight"),
        "transformer.ln_f.weight": Part("norm.weight"), "transformer.ln_f.bias": Part("norm.bias"),
    }  # fmt: skip
    names = {
        "norm1": "ln_1", "attention.qkv": "attn.c_attn", "attention.out": "attn.c_proj", "norm2": "ln_2",
        "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj",
    }  # fmt: skip
    for layer in range(config.layers):
        for ours, theirs in names.items():
            for kind in ("weight", "bias"):
                matrix = kind == "weight" and not ours.startswith("norm")
                found[f"transformer.h.{layer}.{theirs}.{kind}"] = Part(
                    f"blocks.{layer}.{ours}.{kind}", transposed=matrix
                )
    return found


def _llama_parts(config: GPTConfig) -> dict[str, Part]:
    found = {"model.embed_tokens.weight": Part("token.weight"), "model.norm.weight": Part("norm.weight")}
    names = {
        "attention.out": "self_attn.o_proj", "mlp.gate_proj": "mlp.gate_proj", "mlp.up_proj": "mlp.up_proj",
        "mlp.down_proj": "mlp.down_proj",
    }  # fmt: skip
    first, second = config.width, config.width + config.key_heads * config.head_dim
    last = second + config.key_heads * config.head_dim
    rows = {"q_proj": slice(0, first), "k_proj": slice(first, second), "v_proj": slice(second, last)}
    for layer in range(config.layers):
        ours, theirs = f"blocks.{layer}", f"model.layers.{layer}"
        found[f"{theirs}.input_layernorm.weight"] = Part(f"{ours}.norm1.weight")
        found[f"{theirs}.post_attention_layernorm.weight"] = Part(f"{ours}.norm2.weight")
        for kind in ("weight", "bias") if config.bias else ("weight",):
            for their, some in rows.items():
                found[f"{theirs}.self_attn.{their}.{kind}"] = Part(f"{ours}.attention.qkv.{kind}", some)
            for our, their in names.items():
                found[f"{theirs}.{their}.{kind}"] = Part(f"{ours}.{our}.{kind}")
    return found


def to_json(config: GPTConfig) -> dict[str, Any]:
    """The config.json of a model; refuse one that transformers has not, and name the field.

    >>> to_json(GPTConfig(width=8, layers=1, heads=2))["architectures"]
    ['GPT2LMHeadModel']
    """
    if config.experts:
        raise UserError("A model with experts is not written for transformers yet; export as safetensors instead.")
    if config.position == "rope":
        family, needed, write = "Llama", {"norm": "rms", "gated": True}, _llama_json
    else:
        family, needed = "GPT-2", {"norm": "layer", "gated": False, "bias": True, "key_heads": config.heads}
        write = _gpt2_json
    for name, value in needed.items():
        if getattr(config, name) != value:
            field = {"gated": "activation", "key_heads": "kv_heads"}.get(name, name)
            raise UserError(
                f"transformers has no model with position {config.position!r} and {field} "
                f"{getattr(config, field)!r}: {family} comes nearest; export as safetensors instead."
            )
    return {**write(config), "tie_word_embeddings": config.tied, "bos_token_id": None, "eos_token_id": None}


def _gpt2_json(config: GPTConfig) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": config.vocabulary,
        "n_positions": config.sequence, "n_embd": config.width, "n_layer": config.layers, "n_head": config.heads,
        "n_inner": config.ffn_width, "activation_function": ACTIVATIONS[config.activation],
        "layer_norm_epsilon": config.norm_epsilon, "embd_pdrop": config.dropout, "resid_pdrop": config.dropout,
        "attn_pdrop": 0.0,
    }  # fmt: skip


def _llama_json(config: GPTConfig) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": config.vocabulary,
        "max_position_embeddings": config.sequence, "hidden_size": config.width, "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads, "num_key_value_heads": config.key_heads, "head_dim": config.head_dim,
        "intermediate_size": config.ffn_width, "hidden_act": ACTIVATIONS[config.activation],
        "rms_norm_eps": config.norm_epsilon, "rope_theta": config.rope_base, "attention_bias": config.bias,
        "mlp_bias": config.bias,
    }  # fmt: skip


# Reading one. A field that is left out has the default of its class in transformers.


def from_json(raw: dict[str, Any]) -> tuple[GPTConfig, list[str]]:
    """The model that a config.json describes, and sentences about what of it a training here leaves out.

    >>> from_json({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "attn_pdrop": 0.0})[0].norm_epsilon
    1e-05
    """
    kind = raw.get("model_type")
    if kind not in ("gpt2", "llama"):
        raise UserError(f"config.json: model_type is {shorten(kind)}; import reads gpt2 and llama, give one of those.")
    if raw.get("auto_map"):
        raise UserError(
            f"config.json names code of its own (auto_map), which is never run; where the model is a plain {kind} "
            "without it, save it anew with transformers' own class."
        )
    if raw.get("quantization_config"):
        raise UserError("config.json has a quantization_config; save the model with weights that are not quantised.")
    fields, notes = _gpt2_fields(raw) if kind == "gpt2" else _llama_fields(raw)
    try:
        return GPTConfig(**fields), notes
    except UserError as error:
        raise UserError(f"config.json: {error}") from None


def _gpt2_fields(raw: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    _require(raw, "scale_attn_weights", True)
    _require(raw, "scale_attn_by_inverse_layer_idx", False)
    _require(raw, "add_cross_attention", False)
    width, dropout = _number(raw, "n_embd", 768), _real(raw, "resid_pdrop", 0.1, least=0.0, below=1.0)
    others = {name: _real(raw, name, 0.1, least=0.0, below=1.0) for name in ("embd_pdrop", "attn_pdrop")}
    notes = []
    if others["attn_pdrop"]:
        notes.append(f"Attention has no dropout here: training leaves out attn_pdrop {others['attn_pdrop']:g}.")
    if others["embd_pdrop"] != dropout:
        notes.append(f"A GPT has one dropout here: model.dropout is {dropout:g}, as resid_pdrop.")
    return {
        "width": width, "layers": _number(raw, "n_layer", 12), "heads": _number(raw, "n_head", 12),
        "vocabulary": _number(raw, "vocab_size", 50257), "sequence": _number(raw, "n_positions", 1024),
        "ffn": _number(raw, "n_inner", 4 * width), "dropout": dropout, "norm": "layer", "position": "learned",
        "activation": _word(raw, "activation_function", "gelu_new", _GELUS), "bias": True,
        "tied": _flag(raw, "tie_word_embeddings", True),
        "norm_epsilon": _real(raw, "layer_norm_epsilon", 1e-5, least=0.0, below=1.0),
    }, notes  # fmt: skip


def _llama_fields(raw: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    width, heads = _number(raw, "hidden_size", 4096), _number(raw, "num_attention_heads", 32)
    if _number(raw, "head_dim", max(1, width // heads)) * heads != width:
        raise UserError(
            f"config.json: {heads} heads of head_dim {raw.get('head_dim', width // heads)} are not as wide as "
            f"hidden_size {width}, which a GPT of Tilewright requires; give another model."
        )
    bias = _flag(raw, "attention_bias", False)
    if _flag(raw, "mlp_bias", False) != bias:
        raise UserError(
            f"config.json: attention_bias is {bias} and mlp_bias is not, and a GPT of Tilewright has biases everywhere "
            "or nowhere; give another model."
        )
    dropout = _real(raw, "attention_dropout", 0.0, least=0.0, below=1.0)
    note = f"Attention has no dropout here: training leaves out attention_dropout {dropout:g}."
    return {
        "width": width, "layers": _number(raw, "num_hidden_layers", 32), "heads": heads,
        "kv_heads": _number(raw, "num_key_value_heads", heads), "vocabulary": _number(raw, "vocab_size", 32000),
        "sequence": _number(raw, "max_position_embeddings", 2048), "ffn": _number(raw, "intermediate_size", 11008),
        "norm": "rms", "position": "rope", "activation": _word(raw, "hidden_act", "silu", _GATES), "bias": bias,
        "tied": _flag(raw, "tie_word_embeddings", False), "rope_base": _rope_base(raw),
        "norm_epsilon": _real(raw, "rms_norm_eps", 1e-6, least=0.0, below=1.0),
    }, [note] if dropout else []  # fmt: skip


def _rope_base(raw: dict[str, Any]) -> float:
    """The base of plain rotary positions; refuse every way of stretching them."""
    bases = {_real(raw, "rope_theta", 10000.0, least=1.0, below=1e15)} if raw.get("rope_theta") is not None else set()
    for name in ("rope_scaling", "rope_parameters"):
        rope = raw.get(name)
        if rope is None:
            continue
        if not isinstance(rope, dict):
            raise UserError(f"config.json: {name} is {shorten(rope)}; it must be an object or null.")
        kinds = [rope[key] for key in ("rope_type", "type") if rope.get(key) is not None]
        others = sorted(rope.keys() - {"rope_type", "type", "rope_theta", "partial_rotary_factor"})
        stretched = next((kind for kind in kinds if kind != "default"), others[0] if others else None)
        if stretched is not None:
            raise UserError(
                f"config.json: {name} has {shorten(stretched)}, and a GPT of Tilewright has plain rotary positions "
                "only; give a model with rope_type default."
            )
        _require(rope, "partial_rotary_factor", 1.0)
        if rope.get("rope_theta") is not None:
            bases.add(_real(rope, "rope_theta", 10000.0, least=1.0, below=1e15))
    _require(raw, "partial_rotary_factor", 1.0)
    if len(bases) > 1:
        raise UserError("config.json has two values of rope_theta; leave the one that the model was trained with.")
    return bases.pop() if bases else 10000.0


def _number(raw: dict[str, Any], name: str, default: int) -> int:
    value = raw.get(name)
    if value is None:
        return default
    if type(value) is not int or not 1 <= value <= LARGEST_NUMBER:
        raise UserError(f"config.json: {name} is {shorten(value)}; it must be a whole number from 1 to 2^40.")
    return value


def _real(raw: dict[str, Any], name: str, default: float, *, least: float, below: float) -> float:
    value = raw.get(name)
    if value is None:
        return default
    if type(value) not in (int, float) or not least <= value < below:  # which no NaN is
        raise UserError(
            f"config.json: {name} is {shorten(value)}; it must be a number from {least:g} to below {below:g}."
        )
    return float(value)


def _flag(raw: dict[str, Any], name: str, default: bool) -> bool:
    value = raw.get(name)
    if value is not None and type(value) is not bool:
        raise UserError(f"config.json: {name} is {shorten(value)}; it must be true or false.")
    return default if value is None else value


def _word(raw: dict[str, Any], name: str, default: str, words: dict[str, str]) -> str:
    value = default if raw.get(name) is None else raw[name]
    if not isinstance(value, str) or value not in words:
        raise UserError(
            f"config.json: {name} is {shorten(value)}, which a GPT of Tilewright has not; it must be one of "
            f"{', '.join(words)}."
        )
    return words[value]


def _require(raw: dict[str, Any], name: str, value: Any) -> None:
    """Refuse a variant that is computed in another way."""
    found = raw.get(name)
    if found is not None and (found != value or isinstance(found, bool) != isinstance(value, bool)):
        raise UserError(
            f"config.json: {name} is {shorten(found)}, which a GPT of Tilewright has not; give a model where it is "
            f"{str(value).lower()}."
        )
