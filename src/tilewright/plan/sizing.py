"""Is this shape a bad one: what tiles, waves and alignment cost each matmul, and the nearest shapes that are good.

A GPU cuts a matmul into tiles and runs as many at once as it has multiprocessors. A tile that sticks out computes
padding (tile quantisation); a last round that is not full leaves multiprocessors idle (wave quantisation); rows that do
not begin on 16 bytes cannot be read at full width (alignment).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from tilewright.errors import UserError
from tilewright.hardware import Accelerator
from tilewright.plan.decoder import Decoder
from tilewright.plan.flops import Matmul, matmuls
from tilewright.plan.training import Training, check_parallel

TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.92), (64, 256, 0.85), (64, 128, 0.8), (64, 64, 0.65))
# What rows that do not begin on 16 bytes leave of the speed: SwiGLU at h = 4096 on an H100 ran at 272.7 TFLOPS with
# f = 10922 and at 398.4 with f = 10944.
MISALIGNED = 272.7 / 398.4


@dataclass(frozen=True)
class Fit:
    """How a matmul fills a GPU, each a share of 1."""

    tile: tuple[int, int]
    tiles: int
    waves: int
    tile_efficiency: float
    wave_efficiency: float
    alignment: float

    @property
    def efficiency(self) -> float:
        return self.tile_efficiency * self.wave_efficiency * self.alignment


def tiles_and_waves(m: int, n: int, tile: tuple[int, int], multiprocessors: int) -> tuple[int, int]:
    """How many tiles a matmul has and how many rounds they take.

    >>> [tiles_and_waves(8192, 14336, (128, 256), sms) for sms in (132, 148, 152)]
    [(3584, 28), (3584, 25), (3584, 24)]
    """
    tiles = -(-m // tile[0]) * -(-n // tile[1])
    return tiles, -(-tiles // multiprocessors)


def fit(m: int, n: int, k: int, multiprocessors: int, element_bytes: int = 2) -> Fit:
    """How well the best of the usual tiles does on (m x k) by (k x n)."""
    best = None
    for rows, columns, speed in TILES:
        tiles, waves = tiles_and_waves(m, n, (rows, columns), multiprocessors)
        padded = -(-m // rows) * rows * -(-n // columns) * columns
        tile_efficiency, wave_efficiency = m * n / padded, tiles / (waves * multiprocessors)
        aligned = all(size * element_bytes % 16 == 0 for size in (n, k))
        found = Fit((rows, columns), tiles, waves, tile_efficiency, wave_efficiency, 1.0 if aligned else MISALIGNED)
        if best is None or found.efficiency * speed > best[0]:
            best = (found.efficiency * speed, found)
    assert best is not None
    return best[1]


# Of a matmul's time, what a tile takes beside its multiplications, as if each of its sums were so much longer; and what
# is left of the speed where few tiles are made more by splitting their sums.
TILE_ENDS = 24
SPLIT = 0.97
_LEAST_SPLIT = 1024  # terms of a sum that is still split


@functools.lru_cache(maxsize=1 << 14)
def reached(m: int, n: int, k: int, multiprocessors: int) -> float:
    """The share of a matmul's rate that (m x k) by (k x n) reaches, by the tile and the split of its sums that do best.

    >>> round(reached(8192, 8192, 8192, 132), 2), round(reached(512, 512, 512, 132), 2)
    (0.97, 0.3)
    """
    best = 0.0
    for rows, columns, speed in TILES:
        tiles, _ = tiles_and_waves(m, n, (rows, columns), multiprocessors)
        whole = m * n / (tiles * rows * columns)
        for parts in (1, 2, 4, 8, 16):
            if parts > 1 and (k < parts * _LEAST_SPLIT or tiles > 2 * multiprocessors):
                break
            waves = -(-tiles * parts // multiprocessors)
            terms = k / parts
            full = tiles * parts / (waves * multiprocessors) * terms / (terms + TILE_ENDS)
            best = max(best, speed * whole * full * (SPLIT if parts > 1 else 1.0))
    return best * (1.0 if n % 8 == 0 and k % 8 == 0 else MISALIGNED)


@dataclass(frozen=True)
class Finding:
    """One thing about a shape: what it is, what it costs, what would be better."""

    what: str
    value: str
    good: bool
    cost: float | None  # share of the time of what it concerns; None where it depends
    advice: str


def _nearest(value: int, step: int) -> str:
    below, above = value // step * step, -(-value // step) * step
    return f"{above:,}" if below == 0 else f"{below:,} or {above:,}"


def lint(decoder: Decoder, accelerator: Accelerator, *, micro_batch: int = 1, tensor: int = 1) -> list[Finding]:
    """Everything about the model's shape that a GPU minds, bad ones first, the costliest of them first."""
    if accelerator.multiprocessors is None:
        raise UserError(f"The table has no number of multiprocessors for {accelerator.name}.")
    check_parallel(decoder, Training(tensor=tensor))
    tokens = micro_batch * decoder.sequence
    findings = []

    def divisible(what: str, value: int, step: int, why: str) -> None:
        bad = value % step
        cost = None if not bad else (1 - MISALIGNED if value % 8 else 0.0)
        findings.append(Finding(what, f"{value:,}", not bad, cost, f"{why}: {_nearest(value, step)}" if bad else why))

    if decoder.head:
        divisible("vocabulary v", decoder.vocabulary, 64 * tensor, f"a multiple of {64 * tensor}")
    divisible("head width h/a", decoder.head_dim, 64, "a multiple of 64")
    divisible("width h/t", decoder.width // tensor, 64, "a multiple of 64")
    divisible("tokens b·s", tokens, 64, "a multiple of 64")
    if decoder.experts == 1:
        divisible("feed-forward f/t", decoder.ffn // tensor, 64, "a multiple of 64")
    else:
        divisible("feed-forward f", decoder.ffn, 64, "a multiple of 64")
    whole = micro_batch * decoder.heads % tensor == 0
    findings.append(Finding("(b·a)/t", f"{micro_batch * decoder.heads / tensor:g}", whole, None, "a whole number"))
    findings += [_matmul(matmul, accelerator.multiprocessors) for matmul in matmuls(decoder, tokens, tensor)]
    return sorted(findings, key=lambda finding: (finding.good, -(finding.cost or 0.0)))


def _matmul(matmul: Matmul, multiprocessors: int) -> Finding:
    found = fit(matmul.m, matmul.n, matmul.k, multiprocessors)
    lost = 1 - found.efficiency
    value = f"{matmul.m} x {matmul.n} x {matmul.k}"
    shape = (
        f"tiles of {found.tile[0]} x {found.tile[1]}: {found.tiles:,} in {found.waves} waves; tile "
        f"{found.tile_efficiency:.0%}, wave {found.wave_efficiency:.0%}"
    )
    if found.alignment < 1:
        shape += f", not on 16 bytes: {found.alignment:.0%}"
    better = better_sizes(matmul, multiprocessors) if lost > 0.1 else []
    if better:
        shape += f"; better n: {' or '.join(f'{n:,} (+{gain:.0%})' for n, gain in better)}"
    return Finding(f"{matmul.name} matmul", value, lost <= 0.1, lost, shape)


def better_sizes(matmul: Matmul, multiprocessors: int, reach: float = 0.1) -> list[tuple[int, float]]:
    """The nearest widths below and above, within `reach`, that are done faster a column, and by how much."""
    now = fit(matmul.m, matmul.n, matmul.k, multiprocessors).efficiency
    found = []
    steps = min(1024, int(reach * matmul.n) // 64)
    for direction, first in ((-1, matmul.n // 64), (1, matmul.n // 64 + 1)):
        for n in (64 * (first + direction * i) for i in range(steps + 1)):
            gain = fit(matmul.m, n, matmul.k, multiprocessors).efficiency / now - 1 if n > 0 else 0.0
            if gain > 0.05 and n != matmul.n:
                found.append((n, gain))
                break
    return found
