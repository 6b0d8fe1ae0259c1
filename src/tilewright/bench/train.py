"""What each lever of `tilewright train` gives: whole training steps on one GPU, every case by the real loop.

Within a group all cases train the same model on the same batch with the same data, and are compared with the first:
what a user has without Tilewright, the standard block under torch.compile, or, where levers are compared, none of them.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
from collections.abc import Callable
from typing import Any

import torch

from tilewright.bench.protocol import head, sentence
from tilewright.train.configuration import read
from tilewright.train.loop import Shown, train

Cases = dict[str, tuple[str, ...]]  # label, overrides
STANDARD = ("model.gpt_block=standard",)
OPTIMIZED = ("model.gpt_block=optimized", "model.loss=linear_fused")
COMPILED = ("compile=default",)
GRAPHS = ("cuda_graphs=true",)
STREAM = ("model.residual=bf16",)
SELECTIVE = ("model.recompute=selective",)

PLAIN: Cases = {"standard, compile": STANDARD + COMPILED, "standard, eager": STANDARD}
BLOCKS: Cases = {
    **PLAIN,
    # The peer with the same levers, where they are PyTorch's too.
    "standard, compile, graphs": STANDARD + COMPILED + GRAPHS,
    "standard, compile, graphs, bf16 residual": STANDARD + COMPILED + GRAPHS + STREAM,
    "optimized, eager": OPTIMIZED,
    "optimized, graphs": OPTIMIZED + GRAPHS,
    "optimized, graphs, bf16 residual": OPTIMIZED + GRAPHS + STREAM,
    "optimized, graphs, bf16 residual, mlp recompute": (*OPTIMIZED, *GRAPHS, *STREAM, "model.mlp=recompute"),
}
LEVERS: Cases = {
    "optimized": OPTIMIZED,
    "selective": OPTIMIZED + SELECTIVE,
    "mlp recompute": (*OPTIMIZED, "model.mlp=recompute"),
    "residual bf16": OPTIMIZED + STREAM,
    "full recompute": (*OPTIMIZED, "model.recompute=full"),
    "budget 20 GiB": (*OPTIMIZED, "model.recompute=budget", "model.recompute_budget=20"),
    "cuda graphs": OPTIMIZED + GRAPHS,
    "loss fused": ("model.gpt_block=optimized", "model.loss=fused"),
    "loss plain": ("model.gpt_block=optimized", "model.loss=plain"),
    "micro batch 4": (*OPTIMIZED, "micro_batch=4"),
    "adamw_8bit": (*OPTIMIZED, "optimizer.name=adamw_8bit"),
    "adamw_bf16": (*OPTIMIZED, "optimizer.name=adamw_bf16"),
    "bf16_kahan": (*OPTIMIZED, "precision=bf16_kahan"),
    "bf16_stochastic": (*OPTIMIZED, "precision=bf16_stochastic"),
    "lion": (*OPTIMIZED, "optimizer.name=lion"),
    "adafactor": (*OPTIMIZED, "optimizer.name=adafactor"),
    "sgd": (*OPTIMIZED, "optimizer.name=sgd"),
    "attention flash": (*OPTIMIZED, "model.attention=flash"),
    "compile": OPTIMIZED + COMPILED,
}
LARGE: Cases = {
    "8-bit, kahan, selective": (*OPTIMIZED, *SELECTIVE, "precision=bf16_kahan", "optimizer.name=adamw_8bit"),
}


def _group(preset: str, batch: int, dropout: float, cases: Cases) -> list[dict[str, Any]]:
    shared = (
        f"model.preset={preset}", f"micro_batch={batch}", f"global_batch={batch}", f"model.dropout={dropout}",
        "data.kind=synthetic", "checkpoint.final=false", "schedule.warmup=0", "optimizer.learning_rate=1e-4",
    )  # fmt: skip
    name = f"{preset}, batch {batch}, dropout {dropout:g}"
    return [{"group": name, "case": label, "overrides": [*shared, *levers]} for label, levers in cases.items()]


CASES = [
    *_group("125m", 32, 0.0, BLOCKS),
    *_group("1b", 16, 0.0, BLOCKS),
    *_group("7b", 8, 0.0, LARGE),
    *_group("350m", 16, 0.0, LEVERS),
    *_group("125m", 32, 0.1, BLOCKS),
    *_group("1b", 16, 0.1, BLOCKS),
]


def run(
    quick: bool, jobs: int, progress: Callable[[str], None], save: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Train each case for a few steps; `results/<gpu>/train.json` holds the whole. `jobs` is of no use here."""
    result = head("train")
    result["cases"] = []
    for case in CASES[:3] if quick else CASES:
        try:
            measured = _measure(case["overrides"])
            line = (
                f"{measured['tokens_per_second']:,.0f} tokens/s, MFU {measured['mfu']:.1%}, "
                f"{measured['peak_allocated'] / 2**30:.1f} GiB"
            )
        except Exception as error:
            measured = {"error": sentence(error)}
            line = measured["error"]
        result["cases"].append({**case, **measured})
        progress(f"{case['group']}, {case['case']}: {line}")
        save(result)
        gc.collect()
        torch.compiler.reset()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
    return result


def _measure(overrides: list[str], warm: int = 4, steps: int = 10) -> dict[str, Any]:
    found: list[Any] = []
    torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        configuration = read(None, [*overrides, f"steps={warm + steps}", f"out={folder}"])
        train(configuration.train, Shown(step=lambda figures, _: found.append(figures)))
    steady = found[warm:]
    middle = sorted(steady, key=lambda figures: figures.seconds)[len(steady) // 2]
    return {
        "first_step_seconds": found[0].seconds,
        "step_seconds": [figures.seconds for figures in steady],
        "spread": statistics.pstdev(figures.seconds for figures in steady) / middle.seconds,
        "tokens_per_second": middle.tokens_per_second,
        "mfu": middle.mfu,
        "hfu": middle.hfu,
        "convention": middle.convention,
        "peak_allocated": max(figures.memory_allocated or 0 for figures in found),
        "losses": [figures.loss for figures in found],
    }
