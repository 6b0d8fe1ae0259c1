"""How long one site of each kind takes by itself, as it was and as it is: forward and backward, at its own shapes."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from tilewright.measure.clock import turns
from tilewright.optimize.backend import Captured
from tilewright.optimize.report import SiteTime
from tilewright.optimize.rewrite import Kind

_ROUNDS = 5
_LARGEST = 8e9  # bytes of a site's inputs; a larger one is not timed


def time_sites(captured: Captured, device: torch.device) -> list[SiteTime]:
    """Time every kind of site that was replaced, on random tensors of its own shapes."""
    found = []
    for name, kind in captured.kinds.items():
        count = sum(site.rule == name.rule and site.detail == name.detail for site in captured.sites)
        tensors = [each for each in kind.inputs if each is not None]
        if sum(torch.Size(each.shape).numel() * each.dtype.itemsize for each in tensors) > _LARGEST:
            continue
        given = _inputs(kind, device)
        present = [each for each in given if each is not None]
        runs = {
            "before": _step(functools.partial(kind.before, *present), present, kind, device),
            "after": _step(functools.partial(kind.target, *given, **kind.options), present, kind, device),
        }
        peaks = {name: _peak(run, device) for name, run in runs.items()}
        times: dict[str, list[float]] = {name: [] for name in runs}
        for order in turns(runs, _ROUNDS):
            for each in order:
                times[each].append(_timed(runs[each], device))
        before, after = (median(times[each]) for each in ("before", "after"))
        found.append(SiteTime(name.rule, name.detail, count, before, after, peaks["before"], peaks["after"]))
    return found


def _inputs(kind: Kind, device: torch.device) -> list[Tensor | None]:
    generator = torch.Generator(device).manual_seed(0)
    found = list[Tensor | None]()
    for each in kind.inputs:
        if each is None:
            found.append(None)
        elif each.dtype.is_floating_point:
            drawn = torch.randn(each.shape, generator=generator, device=device).to(each.dtype)
            found.append(drawn.requires_grad_(each.has_gradient))
        else:  # of targets and tokens, whose classes are not known here
            found.append(torch.randint(0, 2, each.shape, generator=generator, device=device).to(each.dtype))
    return found


def _step(run: Callable[[], Any], given: Sequence[Tensor], kind: Kind, device: torch.device) -> Callable[[], None]:
    leaves = [each for each in given if each.requires_grad]
    on = kind.autocast is not None

    def step() -> None:
        with torch.enable_grad(), torch.autocast(device.type, kind.autocast or torch.bfloat16, enabled=on):
            results = run()
        results = [results] if isinstance(results, Tensor) else list(results)
        roots = [each for each in results if each.requires_grad]
        if roots and leaves:
            torch.autograd.grad(roots, leaves, [torch.ones_like(each) for each in roots], allow_unused=True)

    return step


def _timed(step: Callable[[], None], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def _peak(step: Callable[[], None], device: torch.device) -> int | None:
    """Bytes at the peak beyond what is there before; also the warm-up."""
    step()
    if device.type != "cuda":
        return None
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device)) - before
