"""What each lever of `tilewright train` gives: whole training steps on one GPU, every case by the real loop.

Within a group all cases train the same model on the same batch with the same data, and are compared with one of them:
what a user has without Tilewright, the standard block under torch.compile, or, where levers are compared, none of them.
Where that decides, it is run once more at the end, and shows how far the machine has drifted.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
from typing import Any

import torch

from tilewright.bench.protocol import Ask, head, sentence
from tilewright.train.load_config import read
from tilewright.train.loop import train
from tilewright.train.shown import Shown

Cases = dict[str, tuple[str, ...]]  # label, overrides
STANDARD = ("model.gpt_block=standard",)
OPTIMIZED = ("model.gpt_block=optimized", "model.loss=fused")
COMPILED = ("compile=default",)
GRAPHS = ("cuda_graphs=true",)
STREAM = ("model.residual=bf16",)
SELECTIVE = ("model.recompute=selective",)
LEAN = ("model.gpt_block=optimized", "model.loss=linear_fused")  # less memory, in a little more time

BLOCKS: Cases = {
    "standard, compile": STANDARD + COMPILED,
    "standard, eager": STANDARD,
    "optimized, eager": OPTIMIZED,
    "optimized, graphs": OPTIMIZED + GRAPHS,
    "optimized, graphs, bf16 residual": OPTIMIZED + GRAPHS + STREAM,
    "optimized, linear_fused, graphs, bf16 residual": LEAN + GRAPHS + STREAM,
    "optimized, linear_fused, graphs, bf16 residual, mlp recompute": (*LEAN, *GRAPHS, *STREAM, "model.mlp=recompute"),
    "standard, compile, again": STANDARD + COMPILED,
}
PEERS: Cases = {  # the standard block with the same levers, where they are PyTorch's too
    "standard, compile, graphs": STANDARD + COMPILED + GRAPHS,
    "standard, compile, graphs, bf16 residual": STANDARD + COMPILED + GRAPHS + STREAM,
}
LEVERS: Cases = {
    "optimized, linear_fused": LEAN,
    "selective": LEAN + SELECTIVE,
    "mlp recompute": (*LEAN, "model.mlp=recompute"),
    "mlp tilesync": (*LEAN, "model.mlp=tilesync"),
    "residual bf16": LEAN + STREAM,
    "full recompute": (*LEAN, "model.recompute=full"),
    "budget 20 GiB": (*LEAN, "model.recompute=budget", "model.recompute_budget=20"),
    "cuda graphs": LEAN + GRAPHS,
    "loss fused": OPTIMIZED,
    "loss plain": ("model.gpt_block=optimized", "model.loss=plain"),
    "micro batch 4": (*LEAN, "micro_batch=4"),
    "no clipping": (*LEAN, "optimizer.clip=0"),
    "constant schedule": (*LEAN, "schedule.name=constant"),
    "adamw_8bit": (*LEAN, "optimizer.name=adamw_8bit"),
    "adamw_bf16": (*LEAN, "optimizer.name=adamw_bf16"),
    "bf16_kahan": (*LEAN, "precision=bf16_kahan"),
    "bf16_stochastic": (*LEAN, "precision=bf16_stochastic"),
    "tf32": (*LEAN, "precision=tf32"),
    "fp32": (*LEAN, "precision=fp32"),
    "lion": (*LEAN, "optimizer.name=lion"),
    "adafactor": (*LEAN, "optimizer.name=adafactor"),
    "sgd": (*LEAN, "optimizer.name=sgd"),
    "attention flash": (*LEAN, "model.attention=flash"),
    "attention cudnn": (*LEAN, "model.attention=cudnn"),
    "attention efficient": (*LEAN, "model.attention=efficient"),
    "compile": LEAN + COMPILED,
    "compile reduce-overhead": (*LEAN, "compile=reduce-overhead"),
    "compile max-autotune": (*LEAN, "compile=max-autotune"),
    "compile max-autotune-no-cudagraphs": (*LEAN, "compile=max-autotune-no-cudagraphs"),
}
LARGE: Cases = {
    "8-bit, kahan, selective": (*LEAN, *SELECTIVE, "precision=bf16_kahan", "optimizer.name=adamw_8bit"),
}
# Steps before those that are measured, and those: some three seconds each. A second after dense work begins a GPU
# comes to its power limit, and slows down by a tenth for a few steps before it settles.
STEPS = {"125m": (24, 24), "350m": (14, 14), "1b": (6, 10), "7b": (4, 6)}


def _group(preset: str, batch: int, dropout: float, cases: Cases, among: Cases | None = None) -> list[dict[str, Any]]:
    """Cases of one model, to be compared with the first of them, or of those they are among."""
    against = next(iter(among or cases))
    shared = (
        f"model.preset={preset}", f"micro_batch={batch}", f"global_batch={batch}", f"model.dropout={dropout}",
        "data.kind=synthetic", "checkpoint.final=false", "schedule.warmup=0", "optimizer.learning_rate=1e-4",
    )  # fmt: skip
    name = f"{preset}, batch {batch}, dropout {dropout:g}"
    return [
        {
            "group": name, "case": label, "against": against, "overrides": [*shared, *levers],
            "steps": (3, 5) if "precision=fp32" in levers else STEPS[preset],  # ten times as long, each of them
        }
        for label, levers in cases.items()
    ]  # fmt: skip


CASES = [
    *_group("125m", 32, 0.0, BLOCKS),
    *_group("1b", 16, 0.0, BLOCKS),
    *_group("125m", 32, 0.1, BLOCKS),
    *_group("1b", 16, 0.1, BLOCKS),
    *_group("7b", 8, 0.0, LARGE),
    *_group("350m", 16, 0.0, LEVERS),
    *_group("125m", 32, 0.0, PEERS, among=BLOCKS),
    *_group("1b", 16, 0.0, PEERS, among=BLOCKS),
]


def run(ask: Ask) -> dict[str, Any]:
    """Train each case for a few steps; `results/<gpu>/train*.json` hold the whole."""
    cases = ask.chosen(CASES[:3] if ask.quick else CASES, lambda case: f"{case['group']}, {case['case']}")
    result = head("train", ask)
    result["cases"] = []
    for case in cases:
        try:
            measured = _measure(case["overrides"], *case["steps"])
            line = (
                f"{measured['tokens_per_second']:,.0f} tokens/s, MFU {measured['mfu']:.1%}, "
                f"{measured['peak_allocated'] / 2**30:.1f} GiB"
            )
        except Exception as error:
            measured = {"error": sentence(error)}
            line = measured["error"]
        result["cases"].append({**case, **measured})
        ask.progress(f"{case['group']}, {case['case']}: {line}")
        ask.save(result)
        gc.collect()
        torch.compiler.reset()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
    return result


def _measure(overrides: list[str], warm: int, steps: int) -> dict[str, Any]:
    found: list[Any] = []
    torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        configuration = read(None, [*overrides, f"steps={warm + steps}", f"out={folder}"])
        ended = train(configuration.train, Shown(step=lambda metrics, _: found.append(metrics)))
    if ended.stopped:  # a run takes a signal for its own end; it was meant for all of them
        raise KeyboardInterrupt
    steady = found[warm:]
    middle = sorted(steady, key=lambda metrics: metrics.seconds)[len(steady) // 2]
    return {
        "first_step_seconds": found[0].seconds,
        "step_seconds": [metrics.seconds for metrics in steady],
        "spread": statistics.pstdev(metrics.seconds for metrics in steady) / middle.seconds,
        "tokens_per_second": middle.tokens_per_second,
        "mfu": middle.mfu,
        "hfu": middle.hfu,
        "convention": middle.convention,
        "peak_allocated": max(metrics.memory_allocated or 0 for metrics in found),
        "losses": [metrics.loss for metrics in found],
    }
