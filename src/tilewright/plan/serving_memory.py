"""Where the memory of serving goes: weights, KV cache and activations in bytes, each with its formula."""

from __future__ import annotations

from tilewright.errors import UserError
from tilewright.plan.decoder import Decoder
from tilewright.plan.memory import CONTEXT_BYTES, LOOSE, Anatomy, Part

WEIGHT_BYTES = {"mixed": 6.0, "fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}
_WEIGHTS = "{} B a parameter, without scales; every expert of a mixture"


def kv_bytes_per_token(decoder: Decoder, element_bytes: float = 2.0) -> float:
    """2·L·k·d·bytes, or of latents, every layer; a windowed layer stops growing at its window.

    >>> from tilewright.plan.decoder import load
    >>> kv_bytes_per_token(load("7b"))
    524288.0
    """
    return decoder.layers * _cached(decoder) * element_bytes


def _cached(decoder: Decoder) -> int:
    """Numbers a token that a layer keeps: keys and values, or the latents they are made of."""
    return decoder.latent or 2 * decoder.kv_heads * decoder.head_dim


def cache_ranks(decoder: Decoder, tensor: int) -> int:
    """Tensor-parallel ranks that share the cache: by heads; every one keeps all latents."""
    return 1 if decoder.kv_rank else min(tensor, decoder.kv_heads)


def kv_cache_bytes(decoder: Decoder, batch: int, tokens: int, element_bytes: float = 2.0) -> float:
    """The cache of `batch` sequences of `tokens` tokens."""
    one = _cached(decoder) * element_bytes
    windowed = decoder.windowed_layers * min(tokens, decoder.window or tokens)
    return batch * one * (windowed + (decoder.layers - decoder.windowed_layers) * tokens)


def infer(
    decoder: Decoder, batch: int, tokens: int, *, weights: str = "bf16", kv_bytes: float = 2.0, tensor: int = 1
) -> Anatomy:
    """The memory of serving `batch` sequences of up to `tokens` tokens each."""
    if weights not in WEIGHT_BYTES:
        raise UserError(f"weights are {weights!r}; choose {', '.join(WEIGHT_BYTES)}.")
    if batch < 1 or tokens < 1 or tensor < 1 or not 0 < kv_bytes <= 8:
        raise UserError("batch, tokens and tensor must be at least 1, and a cached number 0 to 8 bytes.")
    if not decoder.causal:
        raise UserError("An encoder does not decode and has no cache; take `plan train` or `plan roofline`.")
    if decoder.cross_layers:
        raise UserError("An encoder with a decoder keeps two caches, which are not counted; take `plan train`.")
    decoder.check_length(tokens, "tokens")
    decoder.check_tensor(tensor)
    window = f", {decoder.windowed_layers} layers no further than {decoder.window:,}" if decoder.windowed_layers else ""
    widest = max(3 * decoder.width, (2 if decoder.gated else 1) * decoder.ffn) * 2
    parts = [
        Part("weights", WEIGHT_BYTES[weights] * decoder.parameters / tensor, _WEIGHTS.format(WEIGHT_BYTES[weights])),
        Part(
            "KV cache",
            kv_cache_bytes(decoder, batch, tokens, kv_bytes) / cache_ranks(decoder, tensor),
            f"{kv_bytes_per_token(decoder, kv_bytes):,.0f} B a token x {batch} x {tokens:,}{window}; over "
            f"{cache_ranks(decoder, tensor)} ranks",
        ),
        Part("activations", 2.0 * batch * (widest + 2 * decoder.vocabulary), "one token a sequence, logits in float32"),
    ]
    allocated = sum(part.bytes for part in parts)
    lost = LOOSE * allocated
    parts += [
        Part("fragmentation", lost, "2 % of the rest"),
        Part("CUDA context", CONTEXT_BYTES, "measured on an H200"),
    ]
    return Anatomy("decoding", parts, allocated, allocated + lost + CONTEXT_BYTES)
