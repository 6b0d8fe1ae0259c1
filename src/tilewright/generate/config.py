"""What a decoder is, from a Hugging Face `config.json` or one of our own GPTs.

A config.json may come from a stranger. It is read as data, and a variant that the decoder does not compute exactly is
refused by the name of its field.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tilewright.errors import UserError
from tilewright.plan.decoder import Decoder as Shape
from tilewright.plan.decoder import from_config, from_gpt
from tilewright.plan.gpt import GPTConfig
from tilewright.plan.huggingface.config import shorten

FAMILIES = ("llama", "qwen2", "qwen3", "gpt2")
MOST_POSITIONS = 1 << 28  # times the size of a head: two million with heads of 128
_ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
}  # fmt: skip
_GPT_ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh"}  # others keep their name


@dataclass(frozen=True)
class Llama3Scaling:
    """How Llama 3.1 stretches rotary positions: long wavelengths by a factor, short ones not, those between in part."""

    factor: float
    low_frequency: float
    high_frequency: float
    original: float  # positions of the model before it was stretched


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of a decoder and what of it changes no size.

    >>> from tilewright.plan.gpt import GPTConfig
    >>> of_gpt(GPTConfig(width=64, layers=2, heads=4)).shape.head_dim
    16
    """

    shape: Shape
    activation: str = "silu"  # or "gelu", "gelu_tanh"
    epsilon: float = 1e-5  # of every norm
    rope_base: float = 10000.0
    rope_factor: float = 1.0  # by which every position is divided
    rope_llama3: Llama3Scaling | None = None


def of_gpt(config: GPTConfig) -> DecoderConfig:
    """The decoder that computes what a GPT of ours does."""
    if config.experts:
        raise UserError("generate does not run a model with experts yet; take one without, or evaluate it in training.")
    return DecoderConfig(
        from_gpt(config), _GPT_ACTIVATIONS.get(config.activation, config.activation), config.norm_epsilon,
        config.rope_base,
    )  # fmt: skip


def of_huggingface(raw: dict[str, Any]) -> DecoderConfig:
    """The decoder that a parsed config.json describes.

    >>> raw = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 9}
    >>> of_huggingface(raw).activation
    'gelu_tanh'
    """
    kind = raw.get("model_type")
    if kind not in FAMILIES:
        raise UserError(
            f"config.json: model_type is {shorten(kind)}, which generate does not know; it runs {', '.join(FAMILIES)}."
        )
    if raw.get("auto_map"):
        raise UserError(
            "config.json names code of its own (auto_map), which is never run; save the model with transformers' own "
            "class."
        )
    if kind == "gpt2":
        return _gpt2(raw)
    shape = from_config(raw)
    if shape.windowed_layers and shape.window < shape.longest:
        raise UserError("config.json: use_sliding_window is true, and generate attends to all tokens; set it to false.")
    if shape.head_dim % 2:
        raise UserError(f"config.json: a head of {shape.head_dim} cannot be rotated; head_dim must be even.")
    base, factor, llama3 = _rope(raw)
    return DecoderConfig(
        shape, _activation(raw, "hidden_act", "silu"), _real(raw, "rms_norm_eps", 1e-6, 1.0), base, factor, llama3
    )  # fmt: skip


def _gpt2(raw: dict[str, Any]) -> DecoderConfig:
    defaults = {"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}
    shape = from_config({**defaults, **raw})
    for name, value in (("scale_attn_weights", True), ("scale_attn_by_inverse_layer_idx", False)):
        if raw.get(name, value) is not value:
            raise UserError(f"config.json: {name} is {shorten(raw[name])}; generate runs a gpt2 where it is {value}.")
    return DecoderConfig(
        shape, _activation(raw, "activation_function", "gelu_new"), _real(raw, "layer_norm_epsilon", 1e-5, 1.0)
    )  # fmt: skip


def _rope(raw: dict[str, Any]) -> tuple[float, float, Llama3Scaling | None]:
    """(base, linear factor, Llama 3's scaling); refuse any other way of stretching positions."""
    found = {name: raw[name] for name in ("rope_parameters", "rope_scaling") if raw.get(name) is not None}
    for name, value in found.items():
        if not isinstance(value, dict):
            raise UserError(f"config.json: {name} is {shorten(value)}; it must be an object or null.")
    rope: dict[str, Any] = {**found.get("rope_scaling", {}), **found.get("rope_parameters", {})}
    if raw.get("partial_rotary_factor", 1.0) != 1.0 or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError("config.json: partial_rotary_factor is not 1, and generate rotates whole heads.")
    base = _real({"rope_theta": rope.get("rope_theta", raw.get("rope_theta"))}, "rope_theta", 10000.0, 1e15)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return base, 1.0, None
    if kind == "linear":
        return base, _real(rope, "factor", None, 1e6), None
    if kind == "llama3":
        numbers = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        scaling = Llama3Scaling(*(_real(rope, name, None, 1e12) for name in numbers))
        if scaling.low_frequency >= scaling.high_frequency:
            raise UserError("config.json: low_freq_factor must be below high_freq_factor.")
        return base, 1.0, scaling
    raise UserError(f"config.json: rope_type is {shorten(kind)}; generate knows default, linear and llama3.")


def inverse_frequencies(config: DecoderConfig) -> list[float]:
    """The angle that a position turns each pair of a head by, as the model was trained with.

    >>> from tilewright.plan.gpt import LLAMA, GPTConfig
    >>> inverse_frequencies(of_gpt(GPTConfig(width=8, layers=1, heads=2, **LLAMA)))
    [1.0, 0.01]
    """
    size, scaling = config.shape.head_dim, config.rope_llama3
    plain = [config.rope_base ** (-i / size) / config.rope_factor for i in range(0, size, 2)]
    if scaling is None:
        return plain
    stretched = []
    for frequency in plain:
        turns = scaling.original * frequency / (2 * math.pi)  # within the positions before it was stretched
        share = (turns - scaling.low_frequency) / (scaling.high_frequency - scaling.low_frequency)
        share = min(1.0, max(0.0, share))  # of the frequency that is kept
        stretched.append((1 - share) * frequency / scaling.factor + share * frequency)
    return stretched


def _activation(raw: dict[str, Any], name: str, default: str) -> str:
    value = default if raw.get(name) is None else raw[name]
    if not isinstance(value, str) or value not in _ACTIVATIONS:
        raise UserError(f"config.json: {name} is {shorten(value)}; it must be one of {', '.join(_ACTIVATIONS)}.")
    return _ACTIVATIONS[value]


def _real(raw: dict[str, Any], name: str, default: float | None, below: float) -> float:
    value: Any = default if raw.get(name) is None else raw[name]
    if type(value) not in (int, float) or not 0.0 < value < below:  # which no NaN is
        raise UserError(f"config.json: {name} is {shorten(value)}; it must be a number above 0 and below {below:g}.")
    return float(value)
