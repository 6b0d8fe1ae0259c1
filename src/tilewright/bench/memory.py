"""What training a GPT really takes of the GPU's memory, by part: what `plan memory` predicts is checked against it."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import torch

from tilewright.bench.protocol import Ask, head, sentence
from tilewright.models import GPT
from tilewright.plan.gpt import preset

CASES: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("125m", 8, {}),
    ("125m", 32, {"gpt_block": "optimized", "dropout": 0.1}),
    ("350m", 16, {"dropout": 0.1}),
    ("350m", 16, {"gpt_block": "optimized", "recompute": "full"}),
    ("760m", 8, {"gpt_block": "optimized"}),
    ("760m", 16, {"recompute": "full", "dropout": 0.1}),
    ("1b", 16, {"dropout": 0.1}),
    ("1b", 16, {"gpt_block": "optimized"}),
    ("3b", 4, {"gpt_block": "optimized", "dropout": 0.1}),
    ("3b", 8, {"recompute": "full"}),
)


def _label(case: tuple[str, int, dict[str, Any]]) -> str:
    name, batch, options = case
    return ", ".join([name, f"batch {batch}", *(f"{option} {value}" for option, value in options.items())])


def run(ask: Ask) -> dict[str, Any]:
    """Train each case for a few steps; `results/<gpu>/memory.json` holds the whole."""
    cases = ask.chosen(CASES[:2] if ask.quick else CASES, _label)
    result = head("memory", ask)
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    result["context_bytes"] = _device_used() - torch.cuda.memory_reserved()
    result["cases"] = []
    for name, batch, options in cases:
        case = {"preset": name, "batch": batch, **options}
        try:
            measured = _train(name, batch, options)
            line = f"{measured['peak_allocated'] / 2**30:.2f} GiB allocated, {measured['device_used'] / 2**30:.2f} used"
        except (RuntimeError, torch.OutOfMemoryError) as error:
            measured = {"error": sentence(error)}
            line = measured["error"]
        result["cases"].append({**case, **measured})
        ask.progress(f"{_label((name, batch, options))}: {line}")
        ask.save(result)
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
    return result


def _device_used() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


def _train(name: str, batch: int, options: dict[str, Any], steps: int = 3) -> dict[str, Any]:
    """bf16 autocast over float32 parameters, fused AdamW: the loop of `tilewright tune`."""
    config = preset(name, **options)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.device("cuda"):
        model = GPT(config)
        tokens = torch.randint(config.vocabulary, (batch, config.sequence + 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    parameters = torch.cuda.memory_allocated() - before
    states = after_forward = after_backward = 0
    for _ in range(steps):
        static = torch.cuda.memory_allocated()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(tokens[:, :-1], tokens[:, 1:])
        after_forward = torch.cuda.memory_allocated() - static
        loss.backward()
        after_backward = torch.cuda.memory_allocated() - static
        held = torch.cuda.memory_allocated()
        optimizer.step()
        states = max(states, torch.cuda.memory_allocated() - held)
        optimizer.zero_grad(set_to_none=True)
        del loss
    torch.cuda.synchronize()
    return {
        "model": dataclasses.asdict(config),
        "parameters": parameters,
        "optimizer": states,
        "activations": after_forward,
        "gradients": after_backward,
        "peak_allocated": torch.cuda.max_memory_allocated(),
        "peak_reserved": torch.cuda.max_memory_reserved(),
        "device_used": _device_used(),
    }
