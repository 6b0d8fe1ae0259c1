"""Time the matmuls of a model, each beside its neighbours in size, on the GPU of this machine."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

from tilewright.errors import UserError
from tilewright.plan.flops import Matmul


@dataclass(frozen=True)
class Timed:
    """A matmul as measured; `of_best` is its speed over that of the fastest neighbour."""

    name: str
    shape: str
    flops: float  # a second
    of_best: float


def measure_matmuls(found: Iterable[Matmul]) -> list[Timed]:
    """Every distinct matmul, with its width as it is, and down and up to the next multiples of 64, 128 and 256."""
    import torch

    from tilewright.measure.clock import interleaved_event_time

    if not torch.cuda.is_available():
        raise UserError("--measure needs a CUDA GPU and PyTorch sees none; leave it out, or see `tilewright doctor`.")
    results = []
    for matmul in found:
        widths = {matmul.n}
        for step in (64, 128, 256):
            widths |= {max(step, matmul.n // step * step), -(-matmul.n // step) * step}
        left = torch.randn(matmul.m, matmul.k, device="cuda", dtype=torch.bfloat16)
        rights = {n: torch.randn(matmul.k, n, device="cuda", dtype=torch.bfloat16) for n in sorted(widths)}
        timings, _ = interleaved_event_time(
            {str(n): functools.partial(torch.mm, left, right) for n, right in rights.items()}
        )
        rates = {n: 2 * matmul.m * int(n) * matmul.k / t.median for n, t in timings.items()}
        best = max(rates.values())
        for n, rate in rates.items():
            mark = "" if int(n) == matmul.n else ", neighbour"
            results.append(Timed(matmul.name + mark, f"{matmul.m} x {n} x {matmul.k}", rate, rate / best))
    return results
