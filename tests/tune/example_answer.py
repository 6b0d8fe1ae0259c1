"""A whole answer of a study, for tests: every outcome, long errors, texts that want to be code. Made-up numbers."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from tilewright.measure.profile import CATEGORIES, Gap, Kernel, Piece, Spent, StepProfile
from tilewright.train.schema import Model, Train
from tilewright.tune.report.answer import Ablation, Answer
from tilewright.tune.search.space import Point, label
from tilewright.tune.store.proof import Layer, Proof
from tilewright.tune.store.record import OUTCOMES, Difference, Measurement, Prediction, Record

CANARY = "window.canary=1"
HOSTILE = f"</script><script>{CANARY}</script><img src=x onerror='{CANARY}'>\"'&amp;<!--\u202e\x00\x1b[31m\ud800"
_BEGAN = 1.8e9
_LONG = "RuntimeError: " + "the_quick_brown_kernel::launch<float, 128, true>" * 12

_GPU = {
    "micro_batch": [32, 16, 8, 4],
    "precision": ["bf16", "tf32", "fp32", "bf16_kahan"],
    "compile": ["none", "default", "reduce-overhead", "max-autotune"],
    "cuda_graphs": [False, True],
    "model.gpt_block": ["standard", "optimized"],
    "model.loss": ["plain", "fused", "linear_fused"],
    "model.recompute": ["none", "selective", "full"],
    "optimizer.name": ["adamw", "adamw_8bit"],
}
_CPU = {
    "micro_batch": [8, 4, 2, 1],
    "precision": ["fp32", "bf16"],
    "compile": ["none", "default"],
    "threads": [0, 2, 1],
    "model.gpt_block": ["standard", "optimized"],
    "model.loss": ["plain", "fused", "linear_fused"],
}
# How many times as fast a value makes a step, and how many times as much memory it takes.
_EFFECT: dict[tuple[str, Any], tuple[float, float]] = {
    ("model.gpt_block", "optimized"): (1.22, 0.84), ("model.loss", "fused"): (1.09, 0.8),
    ("model.loss", "linear_fused"): (1.07, 0.62), ("compile", "default"): (1.18, 0.9),
    ("compile", "max-autotune"): (1.2, 0.92), ("compile", "reduce-overhead"): (1.19, 1.05),
    ("cuda_graphs", True): (1.06, 1.02), ("model.recompute", "full"): (0.77, 0.4),
    ("model.recompute", "selective"): (0.94, 0.7), ("precision", "fp32"): (0.21, 1.6),
    ("precision", "tf32"): (0.55, 1.6), ("micro_batch", 16): (0.985, 0.6), ("micro_batch", 8): (0.93, 0.4),
    ("micro_batch", 4): (0.8, 0.3), ("optimizer.name", "adamw_8bit"): (1.01, 0.93), ("threads", 2): (1.04, 1.0),
    ("threads", 1): (0.6, 0.97),
}  # fmt: skip


def example(device: str = "cuda", *, hostile: bool = True) -> Answer:
    """The answer of a study on a GPU or a CPU."""
    return _Example(device, hostile).answer()


class _Example:
    def __init__(self, device: str, hostile: bool) -> None:
        self.gpu, self.hostile, self.random = device == "cuda", HOSTILE if hostile else "plain", random.Random(0)
        self.levers: dict[str, list[Any]] = _GPU if self.gpu else _CPU
        self.baseline = {name: values[0] for name, values in self.levers.items()}
        self.tokens = 32 * 2048 if self.gpu else 8 * 128
        self.step, self.bytes = (0.306, 61e9) if self.gpu else (0.212, 0.9e9)
        moved: Point = {"model.gpt_block": "optimized", "model.loss": "fused", "compile": "default"}
        self.best = {**self.baseline, **moved, **({"optimizer.name": "adamw_8bit"} if self.gpu else {"threads": 2})}

    def answer(self) -> Answer:
        records = self.records()
        best = next(record for record in records if record.point == self.best and record.outcome == "done")
        reference = records[0]
        assert best.tokens_per_second and reference.tokens_per_second
        times = best.tokens_per_second / reference.tokens_per_second
        return Answer(
            name=f"{'125m at 32 x 2048' if self.gpu else 'the embedded default'} {self.hostile}",
            machine=self.machine(), ceilings=self.ceilings(), start=self.start(), levers=self.levers, records=records,
            reference=reference, best=best, ablations=self.ablations(best), proof=self.proof(), work=self.work(),
            discarded={"more memory than there is": 112, f"cannot win {self.hostile}": 7}, budget=480.0, elapsed=431.7,
            sentences=[
                f"Set {label({k: v for k, v in self.best.items() if v != self.baseline[k]})}.",
                f"A step takes {best.measurement.seconds * 1e3:.0f} ms in place of "  # type: ignore[union-attr]
                f"{reference.measurement.seconds * 1e3:.0f} ms, so {times:.2f} times the tokens a second.",  # type: ignore[union-attr]
                "It costs a first step of 41 s while PyTorch compiles, and the loss stays within rounding; "
                f"café 漢字 {self.hostile}",
            ],
        )  # fmt: skip

    def work(self) -> list[dict[str, Any]]:
        """A matmul of 60 % of its ceiling, a norm of 80 % of the memory's, and something that nobody knows of."""
        rate, (dtype, peak) = self.ceilings()["copy_bytes_per_second"], ("bf16", self.ceilings()["flops"]["bf16"])
        names = ("op", "shapes", "dtype", "kernel", "category", "calls", "seconds", "flops", "bytes")
        rows = [
            ("aten::mm", "65536x768, 768x3072", dtype, "nvjet_sm90", "matmul", 12, 1e12 / peak / 0.6, 1e12, 1e7),
            ("tilewright_activation_forward", "9x4, 4", "", "forward", "fused", 24, 1e9 / rate / 0.8, 1e8, 1e9),
            (f"op {self.hostile}", self.hostile, "", self.hostile, "other", 1, 1e-3, 0.0, 0.0),
        ]  # fmt: skip
        return [dict(zip(names, row, strict=True)) for row in rows]

    def start(self) -> dict[str, Any]:
        model = Model(width=768, layers=12, heads=12, vocabulary=50368, sequence=2048, dropout=0.1)
        run = Train(global_batch=32 if self.gpu else 8, model=model if self.gpu else Model(), out="runs/<b>bold</b>")
        tree = dataclasses.asdict(run)
        for name, value in self.baseline.items():
            section, _, field = name.rpartition(".")
            (tree[section] if section else tree)[field] = value
        return tree

    def machine(self) -> dict[str, Any]:
        gpu = {"name": "NVIDIA H200", "capability": "9.0", "multiprocessors": 132, "memory_bytes": 150_000_000_000,
               "driver": f"580.1 {self.hostile}", "power_limit_watts": 700.0}  # fmt: skip
        return {"gpu": gpu if self.gpu else None, "torch": "2.13.0", "triton": "3.9.0", "python": "3.12.1",
                "tilewright": "0.1.0", "commit": None, "date": "2026-01-02T03:04:05+00:00"}  # fmt: skip

    def ceilings(self) -> dict[str, Any]:
        flops = {"fp32": 51e12, "tf32": 395e12, "bf16": 787e12} if self.gpu else {"fp32": 0.19e12, "bf16": 0.24e12}
        host = {"cpu": "Example CPU 9000 <x>", "cores": 2, "memory_bytes": 8e9}
        return {"host": host, "memory_bytes": 141e9 if self.gpu else 8e9, "flops": flops, "launch_seconds": 6e-6,
                "kernel_seconds": 2e-6, "copy_bytes_per_second": 4.1e12 if self.gpu else 14e9}  # fmt: skip

    def points(self) -> list[Point]:
        """The best, what differs from the start in one lever, and a few others."""
        found = [self.best]
        found += [{**self.baseline, name: value} for name, values in self.levers.items() for value in values[1:]]
        while len(found) < 40:
            found.append({name: self.random.choice(values) for name, values in self.levers.items()})
        return found

    def records(self) -> list[Record]:
        failures = [name for name in OUTCOMES if name != "done"]
        records = [self.record(self.baseline, "reference", "done", 0)]
        for index, point in enumerate(self.points()[:24], 1):
            if index % 6 == 0:
                records.append(self.record(self.baseline, "reference", "done", len(records)))
            outcome = failures.pop() if index % 2 == 0 and failures else "done"
            records.append(self.record(point, "search", outcome, len(records)))
        return records

    def record(self, point: Point, purpose: str, outcome: str, index: int) -> Record:
        began, fast, large = _BEGAN + 17.0 * index, 1.0, 1.0
        for item in point.items():
            more = _EFFECT.get(item, (1.0, 1.0)) if item not in self.baseline.items() else (1.0, 1.0)
            fast, large = fast * more[0], large * more[1]
        drift = 1.0 - 0.0012 * index
        seconds = self.step / fast
        prediction = self.prediction(seconds * self.random.uniform(0.86, 1.08), self.bytes * large)
        shared = dict(
            point=point, purpose=purpose, outcome=outcome, prediction=prediction, began=began, ended=began + 15
        )
        if outcome not in ("done", "stopped early"):
            error = {"error": _LONG, "crashed": f"its process died: SIGSEGV {self.hostile}"}.get(outcome)
            return Record(
                **shared, error=error or OUTCOMES[outcome], log=f"\x1b[31mwarning\x1b[0m {self.hostile}\n" * 60
            )
        seconds /= drift
        steps = [seconds * self.random.uniform(0.995, 1.006) for _ in range(12)]
        memory = {"weights": 5e8, "gradients": 5e8, "optimizer": 1e9} if self.gpu else {"weights": 3.2e6,
                  "gradients": 3.2e6, "optimizer": 6.4e6}  # fmt: skip
        whole = self.bytes * large
        if self.gpu:
            memory |= {"kept for backward": whole * 0.8, "temporary buffers": 8e7, "allocated": whole,
                       "fragmentation": whole * 0.03, "CUDA context": 6.1e8, "total": whole * 1.03 + 6.1e8}  # fmt: skip
        measurement = Measurement(
            self.tokens, steps, 41.0, 2e-5, [5.1, 4.9, 4.6], int(whole), {k: int(v) for k, v in memory.items()},
            self.profile(seconds).as_dict() if point == self.best else None, 0.43, 0.43,
        )  # fmt: skip
        return Record(**shared, measurement=measurement, drift=drift, cached=index == 7,
                      differences=self.differences(prediction, measurement))  # fmt: skip

    def prediction(self, seconds: float, whole: float) -> Prediction:
        shares = {"matmul": 0.52, "attention": 0.2, "fused": 0.1, "pointwise": 0.1, "optimizer": 0.04, "copy": 0.0,
                  "idle": 0.04}  # fmt: skip
        memory = {"weights": 5e8, "16-bit copies": 2.5e8, "optimizer": 1e9, "activations": whole * 0.7,
                  "logits and loss": whole * 0.25, "temporary buffers": 7.5e7, "fragmentation": whole * 0.02,
                  "CUDA context": 6.5e8} if self.gpu else {"weights": 3.2e6, "gradients": 3.2e6, "optimizer": 6.4e6,
                  "activations": 1.2e8, "process": 3.7e8}  # fmt: skip
        parts = {name: share * seconds for name, share in shares.items()}
        return Prediction(seconds, seconds * 0.7, parts, sum(memory.values()), memory)

    def profile(self, seconds: float) -> StepProfile:
        shares = (0.5, 0.19, 0.1, 0.08, 0.05, 0.0, 0.02, 0.01)
        spent = [
            Spent(name, share * seconds, 40.0, share / 0.95)
            for name, share in zip(CATEGORIES, shares, strict=True)
            if share
        ]
        names = [
            "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT",
            "triton_poi_fused_" + "add_mul_native_layer_norm_" * 9,
            "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>",
            "aten::mm",
            f"kernel {self.hostile}",
        ]
        kernels = [
            Kernel(f"{names[i % 5]}_{i}", seconds / 4 / (i + 1), 12.0 * (i % 4 + 1), 0.26 / (i + 1), CATEGORIES[i % 5])
            for i in range(24)
        ]
        phases = [
            Spent(name, share * seconds, 1.0, share)
            for name, share in (("backward", 0.6), ("forward", 0.3), ("optimizer", 0.05))
        ]
        pieces = [Piece(seconds / 40, ("idle", *CATEGORIES)[i % 7]) for i in range(40)]
        gaps = [Gap(seconds * 0.01 / (i + 1), names[i], names[4 - i]) for i in range(5)]
        return StepProfile("cuda" if self.gpu else "cpu", 3, seconds, 0.95 * seconds, 0.05 * seconds, 412.0, 9.0, gaps,
                           spent, phases, kernels, pieces)  # fmt: skip

    def differences(self, prediction: Prediction, measurement: Measurement) -> list[Difference]:
        matmul = prediction.parts["matmul"], 0.5 * measurement.seconds
        return [
            Difference("launch gaps", 0.0, 0.004, "s", f"the host launches too late {self.hostile}"),
            Difference("matmul", *matmul, "s", "matmuls reach 74 % of their roofline"),
            Difference("fragmentation", 2e7, 9e8, "B", "blocks that were cut and serve nothing else"),
        ]  # fmt: skip

    def ablations(self, best: Record) -> list[Ablation]:
        assert best.tokens_per_second is not None
        found = []
        for name, value in self.best.items():
            if value != self.baseline[name]:
                less = best.tokens_per_second / _EFFECT[name, value][0]
                found.append(Ablation(name, value, self.baseline[name], less * 0.99, int(self.bytes)))
        found.append(Ablation("model.mlp", "recompute", "auto", best.tokens_per_second * 1.03, int(self.bytes)))
        found.append(Ablation("model.recompute", "selective", "none", None, None, f"ran out of memory {self.hostile}"))
        return found

    def proof(self) -> Proof:
        layers = [Layer(f"blocks.{i} {self.hostile}", 2e-3 * 1.1**i, 2.2e-3 * 1.09**i, 5e-3 * 1.05**i, 5.1e-3 * 1.06**i)
                  for i in range(12)]  # fmt: skip
        losses = {name: [10.8 * 0.93**i + shift for i in range(8)]
                  for name, shift in (("float32", 0.0), ("standard", 0.01), ("best", 0.012))}  # fmt: skip
        return Proof("same within rounding", f"Every layer is as near to float32 as the standard block. {self.hostile}",
                     layers, losses)  # fmt: skip
