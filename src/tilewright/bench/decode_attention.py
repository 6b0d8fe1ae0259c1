"""decode_attention against PyTorch's scaled_dot_product_attention, in one run with the GPU's own ceilings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle

import torch
import torch.nn.functional as F

from tilewright.bench.protocol import Ask, Case, Pass, Prepared, build, run_cases
from tilewright.ops.decode_attention.eight_bits import quantize
from tilewright.ops.decode_attention.op import cost, decode_attention
from tilewright.plan.cost import Cost

HEADS = ((32, 8, 128), (32, 8, 64), (32, 32, 128), (64, 8, 128))  # of queries, of keys, and the size of each
SIZES = ((1, 256), (1, 4096), (1, 32768), (8, 2048), (32, 2048))  # batch and context
_FAR = 3 * 10**8  # bytes after which a cache has left L2

_CACHES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}

Implementation = Callable[..., torch.Tensor]


def _implementations(case: Case) -> dict[str, Implementation]:
    """Ours over a cache twice as long as the context; the others, to their advantage, over the context alone."""
    lengths = torch.full((case["batch"],), case["context"], dtype=torch.int32, device="cuda")
    if case.get("cache"):  # codes and their scales, which no peer reads
        return {"tilewright": lambda q, k, v, *scales: decode_attention(q, k, v, lengths, k_scale=scales[0],
                                                                        v_scale=scales[1])}  # fmt: skip

    def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return decode_attention(q, k, v, lengths)

    def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        there = case["context"]
        grouped = case["heads"] != case["kv_heads"]
        return F.scaled_dot_product_attention(
            q.transpose(1, 2), k[:, :, :there], v[:, :, :there], enable_gqa=grouped
        )  # fmt: skip

    def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Spelled out, for Inductor to fuse."""
        there, size = case["context"], case["head_dim"]
        queries = q[:, 0].unflatten(1, (case["kv_heads"], -1))
        scores = (queries @ k[:, :, :there].transpose(-1, -2)).float() * size**-0.5
        return scores.softmax(-1).to(q.dtype) @ v[:, :, :there]

    return {"tilewright": ours, "sdpa": sdpa, "compile": torch.compile(plain, dynamic=False)}


def cases(quick: bool) -> Iterator[Case]:
    """Every case measured."""
    for heads, kv_heads, head_dim in HEADS[:1] if quick else HEADS:
        for batch, context in SIZES[:2] if quick else SIZES:
            case = {
                "dtype": "bf16", "batch": batch, "context": context, "heads": heads, "kv_heads": kv_heads,
                "head_dim": head_dim,
            }  # fmt: skip
            yield case
            yield from ({**case, "cache": cache} for cache in _CACHES)


def prepare(case: Case) -> Prepared:
    """Each implementation on caches that take turns, so that none of them is in L2."""
    batch, size = case["batch"], case["head_dim"]
    shape = batch, case["kv_heads"], 2 * case["context"], size
    q = torch.randn(batch, 1, case["heads"], size, device="cuda", dtype=torch.bfloat16)
    count = max(2, min(64, _FAR // (2 * torch.Size(shape).numel())))
    caches = [[torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2)] for _ in range(count)]
    if case.get("cache"):
        coded = ([quantize(x, _CACHES[case["cache"]]) for x in pair] for pair in caches)
        caches = [[keys[0], values[0], keys[1], values[1]] for keys, values in coded]
    return build({name: partial(_pass, function, q, caches) for name, function in _implementations(case).items()})


def _pass(function: Implementation, q: torch.Tensor, caches: list[list[torch.Tensor]]) -> dict[str, Pass]:
    turns = cycle(caches)
    return {"forward": lambda: function(q, *next(turns))}


def _limits(case: Case) -> dict[str, Cost]:
    sizes = case["batch"], 1, case["heads"], case["kv_heads"], case["head_dim"], case["context"]
    return {"forward": cost(*sizes, cache_bytes=1 if case.get("cache") else 2)}


def _label(case: Case) -> str:
    heads = f"{case['heads']}/{case['kv_heads']} heads of {case['head_dim']}"
    return f"{case['batch']} x {case['context']}, {heads}" + (f", {case['cache']}" if case.get("cache") else "")


def run(ask: Ask) -> Case:
    """Measure every case."""
    return run_cases("decode_attention", cases(ask.quick), prepare, _limits, _label, peers=(), ask=ask)
