"""What joins the ranks of this machine, measured: bytes a second of a ring, and the seconds of a round."""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist

_LARGE = {"cuda": 256 * 2**20, "cpu": 16 * 2**20}  # bytes gathered
_TIMES = {"cuda": 20, "cpu": 5}
_SMALL = 1024


def measure_links(device: torch.device) -> dict[str, float]:
    """What an all-gather reaches, on all ranks at once.

    Returns:
        `bytes_per_second` that each rank sends, and `round_seconds`, a third of what `plan.traffic` calls a round.
    """
    ranks = dist.get_world_size()
    small, large = _gather_seconds(_SMALL, device), _gather_seconds(_LARGE[device.type], device)
    sent = _LARGE[device.type] * (ranks - 1) / ranks
    return {"bytes_per_second": sent / max(large - small, 0.1 * large), "round_seconds": small / (ranks - 1)}


def _gather_seconds(size: int, device: torch.device) -> float:
    """The median seconds of an all-gather of so many bytes in all."""
    ranks, found = dist.get_world_size(), list[float]()
    part = torch.zeros(size // ranks, dtype=torch.uint8, device=device)
    whole = torch.zeros(ranks * part.numel(), dtype=torch.uint8, device=device)
    for _ in range(3 + _TIMES[device.type]):
        _synchronize(device)
        began = time.perf_counter()
        dist.all_gather_into_tensor(whole, part)
        _synchronize(device)
        found.append(time.perf_counter() - began)
    return statistics.median(found[3:])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
