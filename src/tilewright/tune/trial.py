"""One training run under one setting, in a process of its own.

A kernel that fails can poison the whole CUDA context of its process, and peak memory is a property of a process: so
the study starts `python -m tilewright.tune.trial` for each trial, writes the `Trial` as JSON to its standard input and
reads one JSON object a line from its standard output: `{"event": "step", ...}` while it runs, `{"event": "result",
...}` at the end.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tilewright.measure.corpus import corpus
from tilewright.plan.gpt import GPTConfig


@dataclass(frozen=True)
class Trial:
    """Everything a run depends on; two equal trials do the same work."""

    model: GPTConfig
    compile: bool
    device: str
    precision: str  # "bf16": autocast; "fp32"
    batch: int
    check_batch: int  # a smaller one for the loss curve, which also runs in float32
    check_steps: int  # 0: no loss curve
    warmup_steps: int
    steps: int  # timed; 0: the loss curve alone
    learning_rate: float = 3e-4
    seed: int = 0

    @property
    def total_steps(self) -> int:
        return self.check_steps + (self.warmup_steps + self.steps if self.steps else 0)


@dataclass(frozen=True)
class Result:
    """What a trial gave, or why it gave nothing."""

    losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    tokens_per_step: int = 0
    first_step_seconds: float = 0.0
    peak_memory_bytes: int = 0
    error: str | None = None

    @property
    def tokens_per_second(self) -> float | None:
        return self.tokens_per_step / statistics.median(self.step_seconds) if self.step_seconds else None


def run(trial: Trial, report: Callable[[dict[str, Any]], None]) -> Result:
    """Train twice from the same weights: without dropout for the loss curve, then for speed as configured."""
    import torch

    from tilewright.models import GPT

    device = torch.device(trial.device)
    config = trial.model
    text = torch.frombuffer(bytearray(corpus(1 << 21)), dtype=torch.uint8)

    def batches(size: int, steps: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(trial.seed)
        starts = torch.randint(len(text) - config.sequence - 1, (steps, size), generator=generator)
        offsets = torch.arange(config.sequence + 1)
        return [text[row[:, None] + offsets].long().to(device) for row in starts]

    def train(dropout: float, data: list[torch.Tensor]) -> tuple[list[float], list[float]]:
        torch.manual_seed(trial.seed)
        with device:
            model = GPT(dataclasses.replace(config, dropout=dropout))
        optimizer = torch.optim.AdamW(model.parameters(), lr=trial.learning_rate, fused=True)
        autocast = torch.autocast(device.type, torch.bfloat16, enabled=trial.precision == "bf16")
        forward = torch.compile(model) if trial.compile else model
        losses, seconds = [], []
        for step, tokens in enumerate(data, 1):
            # The rate grows from nothing: a curve that jumps about would magnify rounding and show little else.
            for group in optimizer.param_groups:
                group["lr"] = trial.learning_rate * step / len(data)
            began = time.perf_counter()
            with autocast:
                loss = forward(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(float(loss.detach()))  # waits for the device
            if not math.isfinite(losses[-1]):
                raise FloatingPointError(f"the loss is {losses[-1]} after {len(losses)} steps.")
            seconds.append(time.perf_counter() - began)
            report({"event": "step", "loss": losses[-1], "seconds": seconds[-1]})
        return losses, seconds

    losses, check_seconds = train(0.0, batches(trial.check_batch, trial.check_steps))
    first = check_seconds[0] if check_seconds else 0.0
    timed: list[float] = []
    if trial.steps:
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        torch.compiler.reset()
        _, seconds = train(config.dropout, batches(trial.batch, trial.warmup_steps + trial.steps))
        first, timed = seconds[0], seconds[trial.warmup_steps :]
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated()
    else:
        peak = peak_host_bytes()
    return Result(losses, timed, trial.batch * config.sequence, first, peak)


def peak_host_bytes() -> int:
    """The most memory this process has had at once."""
    status = Path("/proc/self/status")
    if status.exists():  # on Linux the figure below is inherited from the parent where that had more
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


def main() -> None:
    """Read a trial from standard input, run it, write events to what was standard output."""
    # Nothing that a library, a driver or a child process prints may pass for an event: they get standard error.
    events = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    raw = json.load(sys.stdin)
    trial = Trial(**{**raw, "model": GPTConfig(**raw["model"])})

    def report(event: dict[str, Any]) -> None:
        events.write(json.dumps(event) + "\n")
        events.flush()

    try:
        result = run(trial, report)
    except Exception as error:
        result = Result(error=explain(error))
    report({"event": "result", **dataclasses.asdict(result)})


def explain(error: Exception) -> str:
    """One sentence for what went wrong, and what to do where that is known."""
    text = str(error).strip() or type(error).__name__
    kind = type(error).__name__
    if "out of memory" in text.lower():
        return "out of memory: choose a smaller --batch or --preset."
    if "InvalidCxxCompiler" in kind or "InvalidCxxCompiler" in text or "No working C++ compiler" in text:
        return "torch.compile found no C++ compiler: install g++ or set CXX."
    if "Cannot find a working triton" in text or "TritonMissing" in kind:
        return "torch.compile found no Triton: pip install 'triton>=3.6'."
    return f"{kind}: {text.splitlines()[0]}"[:300]


if __name__ == "__main__":
    main()
