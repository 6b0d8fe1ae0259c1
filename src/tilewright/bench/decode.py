"""Whole decoding steps of Llamas of 1 and 8 billion parameters, beside torch.compile of transformers' model.

A step puts one token into each row of a cache and takes the likeliest next one. Ours is the step of `Generator`: one
CUDA graph, with attention and the choice of the token inside; where the GPU has PDL (`runtime/pdl.py`), once more
with it; of one text once more as one graph of tiles that wait for each other (``decode="tilesync"``), with lines that
say whether it reaches its bars. The peer is `LlamaForCausalLM` with its StaticCache under ``mode="reduce-overhead"``,
the choice of the token inside as well; it reads bf16 alone. Weights are random: a step reads the same bytes whatever
they are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from tilewright.bench.bars import Bar
from tilewright.bench.protocol import Ask, Case, Checked, Pass, Prepared, build, run_cases
from tilewright.generate import Decoder, Decoding, KVCache, Sampling
from tilewright.generate.cache import FORMATS, bytes_of_token
from tilewright.generate.config import of_huggingface
from tilewright.generate.weights import narrow
from tilewright.measure.numerics import relative_error
from tilewright.plan.cost import Cost
from tilewright.runtime.pdl import why_not as why_no_pdl

_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Llama-3.2-1B": {
        "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 16384,
        "tie_word_embeddings": True, "rope_parameters": _LLAMA3,
    },
    "Llama-3.1-8B": {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 16384,
        "tie_word_embeddings": False, "rope_parameters": _LLAMA3,
    },
}  # fmt: skip
BATCHES = (1, 8, 32)
WEIGHTS = ("bf16", "int8", "fp8", "int4")
CONTEXT, LONG = 256, 8192
_ROOM = 256  # steps that a cache has room for beyond the context, before it begins anew: theirs attends to all of it
_BITS = {"bf16": 16.0, "int8": 8.0, "fp8": 8.0, "int4": 4.0}
_DEVICE = "cuda"


def cases(quick: bool) -> Iterator[Case]:
    """Every case measured: formats at a short context, and those of the cache where it is most of the bytes."""
    for model in list(MODELS)[:1] if quick else MODELS:
        for batch in BATCHES[:1] if quick else BATCHES:
            for weights in WEIGHTS:
                yield {"model": model, "batch": batch, "context": CONTEXT, "weights": weights, "kv_cache": "bf16"}
        for kv_cache in () if quick else ("bf16", "int8", "fp8"):
            yield {"model": model, "batch": BATCHES[-1], "context": LONG, "weights": "bf16", "kv_cache": kv_cache}


def prepare(case: Case) -> Prepared:
    """Our step in the formats of a case and, in bf16, the peer's; of one text, also ours as tiles."""
    makers: dict[str, Callable[[], dict[str, Pass]]] = {"tilewright": partial(_ours, case)}
    if not why_no_pdl(torch.device(_DEVICE)):
        makers["tilewright, PDL"] = partial(_ours, case, pdl=True)
    if case["batch"] == 1 and case["kv_cache"] == "bf16":
        makers["tilewright, tilesync"] = partial(_ours, case, decode="tilesync")
    if case["weights"] == case["kv_cache"] == "bf16":
        makers["transformers, compile"] = partial(_theirs, case)
    return build(makers)


def _ours(case: Case, pdl: bool = False, decode: str = "graph") -> dict[str, Pass]:
    decoder = _random_decoder(case["model"])
    if case["weights"] != "bf16":
        narrow(decoder, case["weights"])
    room = case["context"] + _ROOM
    cache = KVCache(
        decoder.config.shape, batch=case["batch"], context=room, device=_DEVICE, dtype=FORMATS[case["kv_cache"]]
    )
    decoding = Decoding(decoder, cache, Sampling(), pdl=pdl, decode=decode)
    run: Pass = _Turns(decoding.step, lambda: cache.before.fill_(case["context"]))
    return {"step": Checked(run, _distance(decoding, case)) if _is_gated(case) else run}


def _is_gated(case: Case) -> bool:
    return case["batch"] == 1 and case["weights"] == case["kv_cache"] == "bf16"


@torch.no_grad()
def _distance(decoding: Decoding, case: Case) -> float:
    """Return the relative error of a step's logits to those of the same weights in float32."""
    model, size = decoding.model, case["context"] + 1
    tokens = torch.randint(model.config.shape.vocabulary, (1, size), device=_DEVICE)
    decoding.start(tokens[:, :-1].tolist())
    logits = decoding.forward(tokens[:, -1:], decoding.cache)
    exact = copy.deepcopy(model).float()
    cache = KVCache(exact.config.shape, batch=1, context=size, device=_DEVICE, dtype=torch.float32)
    cache.begin(torch.tensor([size], device=_DEVICE))
    truth = exact(tokens, cache, last=torch.tensor([size - 1], device=_DEVICE))
    return relative_error(logits[:, -1], truth[:, -1])


class _Turns:
    """Steps that begin anew, outside of what is timed nearly always, before the cache is full."""

    def __init__(self, step: Callable[[], object], begin: Callable[[], object]) -> None:
        self._step, self._begin, self._count = step, begin, 0

    def __call__(self) -> object:
        if self._count % _ROOM == 0:
            self._begin()
        self._count += 1
        return self._step()


def _random_decoder(name: str) -> Decoder:
    """A decoder in bf16 whose weights come to be on the device."""
    raw = {**MODELS[name], "model_type": "llama", "rms_norm_eps": 1e-5}
    with torch.device("meta"):
        decoder = Decoder(of_huggingface(raw)).bfloat16().requires_grad_(False).eval()
    decoder = decoder.to_empty(device=_DEVICE)
    for parameter in decoder.parameters():
        parameter.normal_(std=0.02) if parameter.ndim > 1 else parameter.fill_(1.0)
    if decoder.config.shape.tied:
        decoder.head.weight = decoder.token.weight
    return decoder


@torch.no_grad()
def _theirs(case: Case) -> dict[str, Pass]:
    import transformers

    config = transformers.LlamaConfig(**MODELS[case["model"]], dtype=torch.bfloat16)
    with torch.device(_DEVICE):
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="sdpa", dtype=torch.bfloat16
        ).eval()
    room, batch = case["context"] + _ROOM, case["batch"]
    cache: Any = transformers.StaticCache(config=config, max_cache_len=room)
    tokens = torch.zeros(batch, 1, dtype=torch.int64, device=_DEVICE)
    whole = torch.zeros(batch, case["context"], dtype=torch.int64, device=_DEVICE)
    model(whole, past_key_values=cache, use_cache=True, logits_to_keep=1)  # which makes the cache and fills it

    def step(tokens: torch.Tensor) -> torch.Tensor:
        return model(tokens, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)

    compiled = torch.compile(step, mode="reduce-overhead", fullgraph=True)

    def run() -> None:
        with torch.no_grad():
            tokens.copy_(compiled(tokens))

    def begin() -> None:
        for layer in cache.layers:
            layer.cumulative_length.fill_(case["context"])

    return {"step": _Turns(run, begin)}


def limits(case: Case) -> dict[str, Cost]:
    """The bytes of a step: all weights but the embedding, of which it reads a row, and keys and values once."""
    shape = of_huggingface({**MODELS[case["model"]], "model_type": "llama"}).shape
    body = shape.layers * (shape.attention_weights + shape.mlp_weights(shape.ffn))
    head_bits = max(8.0, _BITS[case["weights"]])
    weights = body * _BITS[case["weights"]] / 8 + shape.head_weights * head_bits / 8
    keys = case["batch"] * case["context"] * bytes_of_token(shape, FORMATS[case["kv_cache"]])
    flops = 2 * case["batch"] * (body + shape.head_weights)
    flops += 4 * case["batch"] * case["context"] * shape.layers * shape.heads * shape.head_dim
    return {"step": Cost(flops, int(weights + keys), 0)}


def bars(case: Case) -> list[Bar]:
    """What one text's step as tiles is to reach: a Llama of 1B in 720 us and no further from float32 than our graph."""
    if (case["model"], case["batch"], case["kv_cache"]) != ("Llama-3.2-1B", 1, "bf16"):
        return []
    ours, graph = ("tilewright, tilesync",), ("tilewright, PDL",)
    if case["weights"] == "bf16":
        return [Bar(ours, graph, 1.0, seconds=720e-6), Bar(ours, ("tilewright",), is_about_errors=True)]
    return [Bar(ours, graph, 1.0)]


def label(case: Case) -> str:
    """What a case is called."""
    return f"{case['model']}, {case['batch']} x {case['context']}, {case['weights']}, {case['kv_cache']} cache"


def run(ask: Ask) -> Case:
    """Measure every case, by events around steps: they are graphs themselves."""
    return run_cases(
        "decode", cases(ask.quick), prepare, limits, label, peers=("transformers",), ask=ask,
        from_graph=lambda case, step: False, bars=bars,
    )  # fmt: skip
