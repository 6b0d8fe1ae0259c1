"""What this GPU gives at its best, measured: the denominators of every "% of limit"."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from tilewright.measure.clock import interleaved_event_time


@dataclass(frozen=True)
class Ceilings:
    """Bytes a second of a 2 GiB copy (read plus written) and FLOP/s of an 8192^3 bfloat16 matmul."""

    copy_bytes_per_second: float
    bf16_flops: float


def measure_copy() -> float | None:
    """Bytes a second of a copy, read plus written, on the current CUDA device; None where there is no memory for it."""
    for size in (2**31, 2**29):
        try:
            source = torch.randn(size // 4, device="cuda")
            target = torch.empty_like(source)
        except torch.OutOfMemoryError:
            continue
        times, _ = interleaved_event_time({"copy": partial(target.copy_, source)}, seconds=0.1)
        return 2 * source.nbytes / times["copy"].median
    return None


def measure_ceilings() -> Ceilings:
    """Measure both on the current CUDA device, on random data."""
    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times, _ = interleaved_event_time({"copy": lambda: target.copy_(source), "matmul": lambda: a @ b}, seconds=0.3)
    return Ceilings(2 * source.nbytes / times["copy"].median, 2 * 8192**3 / times["matmul"].median)
