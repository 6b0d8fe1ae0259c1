"""Time the products of a model, each beside its neighbours in size, on the GPU of this machine."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

from tilewright.errors import UserError
from tilewright.plan.flops import Product


@dataclass(frozen=True)
class Timed:
    """A product as measured; `of_best` is its speed over that of the fastest neighbour."""

    name: str
    shape: str
    flops: float  # a second
    of_best: float


def measure_products(found: Iterable[Product]) -> list[Timed]:
    """Every distinct product, with its width as it is, and down and up to the next multiples of 64, 128 and 256."""
    import torch

    from tilewright.measure.clock import interleaved_event_time

    if not torch.cuda.is_available():
        raise UserError("--measure needs a CUDA GPU and PyTorch sees none; leave it out, or see `tilewright doctor`.")
    results = []
    for product in found:
        widths = {product.n}
        for step in (64, 128, 256):
            widths |= {max(step, product.n // step * step), -(-product.n // step) * step}
        left = torch.randn(product.m, product.k, device="cuda", dtype=torch.bfloat16)
        rights = {n: torch.randn(product.k, n, device="cuda", dtype=torch.bfloat16) for n in sorted(widths)}
        timings, _ = interleaved_event_time(
            {str(n): functools.partial(torch.mm, left, right) for n, right in rights.items()}
        )
        rates = {n: 2 * product.m * int(n) * product.k / t.median for n, t in timings.items()}
        best = max(rates.values())
        for n, rate in rates.items():
            mark = "" if int(n) == product.n else ", neighbour"
            results.append(Timed(product.name + mark, f"{product.m} x {n} x {product.k}", rate, rate / best))
    return results
