"""attention against PyTorch's backends, FlexAttention and FlashAttention 3, in one run with the GPU's own ceilings.

`--learn` adds the fastest backend of each plain case to the table that `attention` picks from, in the user's cache.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from tilewright.bench.protocol import OURS, Ask, Case, Prepared, build, forward_backward, run_cases
from tilewright.ops.attention import table
from tilewright.ops.attention.op import attention, cost
from tilewright.plan.cost import Cost, mean_context

TOKENS, WIDTH = 16384, 2048  # of a plain case: batch x sequence, heads x head_dim
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
PACKED = (512, 3000, 1, 1200, 4096, 700, 2048, 4827)  # the tokens of packed sequences
PACKED_LONGEST = (512, 1024, 2048, 4096, 8192)  # of sequences of four lengths, for the table
BACKENDS = ("cudnn", "flash", "triton", "hopper")
PEERS = ("torch", "flash_attn_3")


def cases(quick: bool) -> Iterator[Case]:
    """Plain attention, then shared heads of keys, a window and packed sequences."""
    lengths = (2048,) if quick else LENGTHS
    for head_dim in (64, 128) if quick else (64, 128, 256):
        for sequence in lengths:
            for causal in (True,) if quick else (True, False):
                yield _case(max(1, TOKENS // sequence), sequence, WIDTH // head_dim, head_dim, causal=causal)
    for head_dim in (64, 128):
        yield _case(4, 4096, 32, head_dim, kv_heads=8)
        yield _case(2, 8192, 32, head_dim, kv_heads=8, window=1023)
        yield _case(1, sum(PACKED), 32, head_dim, kv_heads=8, packed=list(PACKED))
        if quick:
            return
        yield _case(1, sum(PACKED), 32, head_dim, kv_heads=8, packed=list(PACKED), window=1023)
        for longest in PACKED_LONGEST:
            mixed = [longest, longest // 2, longest // 4, longest // 4] * (TOKENS // (2 * longest))
            yield _case(1, TOKENS, 32, head_dim, kv_heads=8, packed=mixed)
        yield _case(1, TOKENS, 32, head_dim, kv_heads=8, packed=[2048] * 8)  # as the plain case of that length


def _case(
    batch: int, sequence: int, heads: int, head_dim: int, *, kv_heads: int = 0, causal: bool = True,
    window: int | None = None, packed: list[int] | None = None,
) -> Case:  # fmt: skip
    return {
        "dtype": "bf16", "batch": batch, "sequence": sequence, "heads": heads, "kv_heads": kv_heads or heads,
        "head_dim": head_dim, "causal": causal, "window": window, "packed": packed,
    }  # fmt: skip


def prepare(case: Case) -> Prepared:
    """Forward and backward of each implementation, on the same inputs, which lie as one matmul leaves them."""
    batch, sequence, heads, kv_heads, head_dim = (
        case[name] for name in ("batch", "sequence", "heads", "kv_heads", "head_dim")
    )
    whole = torch.randn(batch, sequence, heads + 2 * kv_heads, head_dim, device="cuda", dtype=torch.bfloat16)
    inputs = [part.requires_grad_() for part in whole.split([heads, kv_heads, kv_heads], 2)]
    options: dict[str, Any] = {"causal": case["causal"], "window": case["window"]}
    if case["packed"]:
        inputs = [part.squeeze(0).detach().requires_grad_() for part in inputs]
        options |= {"cu_seqlens_q": _starts(case["packed"]), "max_seqlen_q": max(case["packed"])}
    functions: dict[str, Callable[..., Any]] = {OURS: partial(attention, **options)}
    for name in BACKENDS:
        label = f"{OURS}-{name}" if name in ("triton", "hopper") else name
        functions[label] = partial(attention, backend=name, **options)
    functions |= {"flex": partial(_flex, case), "fa3": partial(_flash_attention_3, case)}
    if case["packed"]:
        functions["flash"] = partial(_packed_flash, case)
    return build({name: partial(forward_backward, function, inputs) for name, function in functions.items()})


def _starts(lengths: list[int]) -> torch.Tensor:
    ends = torch.tensor([0, *lengths], device="cuda").cumsum(0)
    return ends.to(torch.int32)


def _window(case: Case) -> tuple[int, int]:
    return (-1 if case["window"] is None else case["window"], 0 if case["causal"] else -1)


def _packed_flash(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    from torch.nn.attention.varlen import varlen_attn

    starts, longest, shared = _starts(case["packed"]), max(case["packed"]), q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(shared, 1) for x in (k, v))  # its GQA is not in torch 2.11
    return varlen_attn(q, k, v, starts, starts, longest, longest, window_size=_window(case))


def _flash_attention_3(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    flash = importlib.import_module("flash_attn_interface")
    if case["packed"]:
        starts, longest = _starts(case["packed"]), max(case["packed"])
        out = flash.flash_attn_varlen_func(q, k, v, starts, starts, longest, longest, causal=True)
    else:
        out = flash.flash_attn_func(q, k, v, causal=case["causal"], window_size=_window(case))
    return out[0] if isinstance(out, tuple) else out


_masks: dict[str, Any] = {}  # FlexAttention's, each made once


def _flex(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    window, name = case["window"], f"{case['sequence']} {case['causal']} {case['window']} {case['packed']}"
    ids = torch.repeat_interleave(torch.tensor(case["packed"], device="cuda")) if case["packed"] else None

    def sees(batch: Any, head: Any, query: Any, key: Any) -> Any:
        seen = query >= key
        if window is not None:
            seen = seen & (query - key <= window)
        return seen if ids is None else seen & (ids[query] == ids[key])

    if case["causal"] and name not in _masks:
        _masks[name] = create_block_mask(sees, None, None, case["sequence"], case["sequence"], device="cuda")
    by_head = [(x.unsqueeze(0) if case["packed"] else x).transpose(1, 2) for x in (q, k, v)]
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    out: Any = compiled(*by_head, block_mask=_masks.get(name), enable_gqa=q.shape[-2] != k.shape[-2]).transpose(1, 2)
    return out.squeeze(0) if case["packed"] else out


def _limits(case: Case) -> dict[str, Cost]:
    lengths = case["packed"] or [case["sequence"]]
    right = 0 if case["causal"] else -1
    window = -1 if case["window"] is None else case["window"]
    limits = {}
    for step in ("forward", "backward"):
        costs = [
            cost(case["batch"], length, case["heads"], case["kv_heads"], case["head_dim"],
                 context=mean_context(length, length, window, right), backward=step == "backward")
            for length in lengths
        ]  # fmt: skip
        parts = ("flops", "bytes_read", "bytes_written")
        limits[step] = Cost(*(sum(getattr(each, part) for each in costs) for part in parts))
    return limits


def _label(case: Case) -> str:
    heads = (
        f"{case['heads']} heads" if case["heads"] == case["kv_heads"] else f"{case['heads']}/{case['kv_heads']} heads"
    )
    kind = "causal" if case["causal"] else "full"
    if case["packed"]:
        kind = f"{len(case['packed'])} packed of {min(case['packed'])} to {max(case['packed'])}"
    window = "" if case["window"] is None else f", window {case['window']}"
    return f"{case['batch']} x {case['sequence']} tokens, {heads} of {case['head_dim']}, {kind}{window}"


def _add_tflops(result: dict[str, Any]) -> None:
    """TFLOPS of every implementation, beside its share of the limit."""
    for case in result["cases"]:
        for step in ("forward", "backward"):
            for row in case[step]["implementations"].values():
                if "median" in row:
                    row["tflops"] = round(case[step]["flops"] / row["median"] / 1e12, 1)


def find_fastest(case: Case) -> str:
    """The backend with the least time for forward and backward of a measured case; nothing if none has both."""
    times = {}
    for name in ("triton", "hopper") if case["packed"] else BACKENDS:  # no other takes packed sequences
        label = f"{OURS}-{name}" if name in ("triton", "hopper") else name
        rows = [case[step]["implementations"].get(label, {}) for step in ("forward", "backward")]
        if all("median" in row for row in rows):
            times[name] = sum(row["median"] for row in rows)
    return min(times, key=lambda name: times[name]) if times else ""


def _learn(result: dict[str, Any]) -> dict[table.Key, str]:
    """Keep the fastest backend of each case without a window in the user's cache, and return them."""
    found: dict[table.Key, str] = {}
    for case in result["cases"]:
        if case["window"] is None and (fastest := find_fastest(case)):
            gpu, longest = torch.cuda.get_device_name(), max(case["packed"] or [case["sequence"]])
            key = table.Key(gpu, torch.bfloat16, case["head_dim"], case["causal"], longest, bool(case["packed"]))
            found.setdefault(key, fastest)
    table.learn(found)
    return found


def run(ask: Ask) -> Case:
    """Measure every case."""

    def save(result: dict[str, Any]) -> None:
        _add_tflops(result)
        case = result["cases"][-1]
        for step in ("forward", "backward"):
            rows = case[step]["implementations"]
            ask.progress(
                f"  {step} TFLOPS: " + ", ".join(f"{n} {r['tflops']}" for n, r in rows.items() if "tflops" in r)
            )
        ask.save(result)

    told = dataclasses.replace(ask, save=save)
    result = run_cases("attention", cases(ask.quick), prepare, _limits, _label, peers=PEERS, ask=told)
    if ask.learn:
        learned = {str(key): name for key, name in _learn(result).items()}
        ask.progress("attention picks its backends by these measurements from now on, which measured.json can take:")
        ask.progress(json.dumps(learned, indent=2))
    return result
