"""The time below which no decoding step and no prefill can go, and what to expect of a prefill.

A floor is what is read over the bandwidth, or what is computed over the peak.

Every sequence of the batch gets one token. The step reads the weights that its tokens meet (of a mixture of experts,
the expected number of distinct ones) and the whole cache, and computes each token's matmuls and its attention. The
floor is the longer of the two times, so no speed derived from it is above what the chip can do.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from tilewright.hardware import Accelerator
from tilewright.plan.decoder import Decoder
from tilewright.plan.flops import forward_flops, matmuls
from tilewright.plan.parallel import Cluster, machine
from tilewright.plan.serving_memory import WEIGHT_BYTES, cache_ranks, infer, kv_cache_bytes
from tilewright.plan.step import forward_seconds
from tilewright.plan.traffic import reductions
from tilewright.plan.training import Training

# Bytes of a weight that a step reads, where not all of those that are kept: the float32 copy of `mixed` is not.
_READ_BYTES = {**WEIGHT_BYTES, "mixed": 2.0}
# What matmuls with such weights may compute in. The fastest that the chip has counts, as a floor must.
_DTYPES = {
    "mixed": ("bf16", "fp16"), "fp32": ("fp32",), "bf16": ("bf16",), "fp16": ("fp16",), "fp8": ("fp8", "bf16", "fp16"),
    "int8": ("int8", "fp8", "bf16", "fp16"), "int4": ("int8", "fp8", "bf16", "fp16"),
}  # fmt: skip


@dataclass(frozen=True)
class Decode:
    """One decoding step of a batch, its floor in seconds."""

    seconds: float
    bound: str  # memory or arithmetic
    bytes: float  # that one GPU reads
    flops: float  # that one GPU computes
    dtype: str  # whose peak the arithmetic has
    experts_read: float  # distinct ones in a layer; 1 where there is no mixture


def decode(
    decoder: Decoder, batch: int, tokens: int, accelerator: Accelerator, *, weights: str = "bf16",
    kv_bytes: float = 2.0, tensor: int = 1,
) -> Decode:  # fmt: skip
    """The floor of a step in which each of `batch` sequences has `tokens` tokens.

    >>> from tilewright import hardware
    >>> from tilewright.plan.decoder import load
    >>> decode(load("7b"), 1, 1, hardware.find("H100-SXM5")).bound
    'memory'
    """
    infer(decoder, batch, tokens, weights=weights, kv_bytes=kv_bytes, tensor=tensor)  # its checks
    accelerator.first_on_record(_DTYPES[weights])
    dtype = max(_DTYPES[weights], key=lambda dtype: accelerator.peak_flops.get(dtype, 0.0))
    read = _READ_BYTES[weights] * decoder.parameters_read(batch) / tensor
    read += kv_cache_bytes(decoder, batch, tokens, kv_bytes) / cache_ranks(decoder, tensor)
    full = decoder.layers - decoder.windowed_layers
    seen = full * tokens + decoder.windowed_layers * min(tokens, decoder.window or tokens)
    of_matmuls = sum(matmul.flops_per_token for matmul in matmuls(decoder, 1))
    # Over latents, where there are some: a head's scores and its sum are taken in their space.
    each = decoder.kv_rank + decoder.latent if decoder.kv_rank else 2 * decoder.attention_dim
    flops = batch * (of_matmuls + 2 * decoder.heads * each * seen) / tensor
    memory, arithmetic = read / accelerator.bytes_per_second, flops / accelerator.peak_flops[dtype]
    bound = "memory" if memory >= arithmetic else "arithmetic"
    return Decode(max(memory, arithmetic), bound, read, flops, dtype, decoder.experts_read(batch))


@dataclass(frozen=True)
class Prefill:
    """The prompts of a batch, up to their first token: seconds as expected, and their floor."""

    seconds: float
    floor: float
    bound: str  # of the floor: memory or arithmetic
    flops: float  # that one GPU computes


def prefill(
    decoder: Decoder, batch: int, prompt: int, cluster: Cluster, *, weights: str = "bf16", kv_bytes: float = 2.0,
) -> Prefill:  # fmt: skip
    """What it takes to read `batch` prompts of `prompt` tokens at once, with all GPUs of `cluster` tensor parallel.

    Expected are forward's kernels at the rates of `plan.step`, in 16 bits or, with weights in fp8, in 8. The head sees
    the last token of a prompt only.

    >>> from tilewright import hardware
    >>> from tilewright.plan.decoder import load
    >>> found = prefill(load("7b"), 4, 2048, Cluster(hardware.find("H100-SXM5"), 1))
    >>> found.bound, found.floor < found.seconds
    ('arithmetic', True)
    """
    accelerator, tensor = cluster.accelerator, cluster.gpus
    infer(decoder, batch, prompt, weights=weights, kv_bytes=kv_bytes, tensor=tensor)  # its checks
    accelerator.first_on_record(_DTYPES[weights])
    dtype = max(_DTYPES[weights], key=lambda dtype: accelerator.peak_flops.get(dtype, 0.0))
    prompts = dataclasses.replace(decoder, sequence=prompt)
    head = 2 * decoder.head_weights
    flops = batch * (prompt * (forward_flops(prompts, causal=True) - head) + head) / tensor
    read = _READ_BYTES[weights] * decoder.parameters_read(batch * prompt) / tensor
    written = kv_cache_bytes(decoder, batch, prompt, kv_bytes) / cache_ranks(decoder, tensor)
    memory, arithmetic = (read + written) / accelerator.bytes_per_second, flops / accelerator.peak_flops[dtype]
    precision = {"fp32": "fp32", "fp8": "fp8"}.get(weights, "mixed")
    if precision == "fp8" and "fp8" not in accelerator.peak_flops:
        precision = "mixed"
    training = Training(micro_batch=batch, precision=precision, tensor=tensor, sequence_parallel=False)
    fused = dataclasses.replace(prompts, gpt_block="optimized", dropout=0.0)
    how, rates = machine(cluster, precision)
    seconds = forward_seconds(fused, training, how, rates) + decoder.layers * reductions(
        decoder, batch * prompt, training.compute_bytes, tensor, cluster.links
    )
    floor = max(memory, arithmetic)
    return Prefill(max(seconds, floor), floor, "memory" if memory >= arithmetic else "arithmetic", flops)
