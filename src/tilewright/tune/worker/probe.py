"""What a machine can do, measured.

    copy      bytes a second, read and written
    flops     of a matmul in each precision
    launch    what an op costs its host
    kernel    the shortest time between two pieces of work on the device

A prediction divides by the first two, and counts launches and kernels by the others.
"""

from __future__ import annotations

import functools
import gc
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tilewright.measure import clock
from tilewright.measure.ceilings import measure_ceilings
from tilewright.measure.machine import describe, host_memory_bytes
from tilewright.train.engine import device_of
from tilewright.train.load_config import from_dict
from tilewright.train.schema import Train
from tilewright.tune.own_model import check_step, load

_LINKS = 200  # of a chain of small ops


def probe(job: dict[str, Any], say: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """What this machine can do, measured in about `seconds`; with a user's own model also what its batch is like."""
    device = device_of(Train(device=job["device"]))
    found: dict[str, Any] = {"machine": describe(), "host": _host(), "device": device.type}
    if job.get("own_model"):
        say({"event": "alive", "what": f"calling {job['own_model']}"})
        run = from_dict(job["configuration"])
        own = load(job["own_model"], job["path"], seed=run.seed)
        found["own_model"] = own.facts()
        say({"event": "alive", "what": "its first step"})
        check_step(own, run)
        del own
        gc.collect()  # its memory is wanted for the matmuls
        if device.type == "cuda":
            torch.cuda.empty_cache()
    say({"event": "alive", "what": "measuring"})
    return found | (_cuda(device) if device.type == "cuda" else _cpu(job["seconds"]))


def _host() -> dict[str, Any]:
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "cpu": next(named, platform.processor() or platform.machine()), "cores": os.cpu_count() or 1,
        "memory_bytes": host_memory_bytes(),
    }  # fmt: skip


def _cuda(device: torch.device) -> dict[str, Any]:
    size, flops = 8192, {}
    with torch.cuda.device(device):
        ceilings = measure_ceilings()
        a, b = (torch.randn(size, size, device=device) for _ in range(2))
        for name, mode in (("fp32", "highest"), ("tf32", "high")):
            torch.set_float32_matmul_precision(mode)
            times, errors = clock.interleaved_event_time({name: lambda: a @ b})
            _raise(errors)
            flops[name] = 2 * size**3 / times[name].median
        small = torch.zeros(1, device=device)
        launches = clock.interleaved_wall_time({"chain": functools.partial(_chain, device)}, calls=3)
        with torch.cuda.stream(torch.cuda.Stream()):
            kernels, errors = clock.interleaved_graph_time({"add": lambda: small.add_(1)}, calls=100)
        _raise(errors)
        return {
            "memory_bytes": torch.cuda.get_device_properties(device).total_memory,
            "copy_bytes_per_second": ceilings.copy_bytes_per_second, "flops": {**flops, "bf16": ceilings.bf16_flops},
            "launch_seconds": launches["chain"].median / (2 * _LINKS), "kernel_seconds": kernels["add"].median,
        }  # fmt: skip


def _raise(errors: dict[str, Exception]) -> None:
    for error in errors.values():
        raise error


def _chain(device: torch.device) -> None:
    """2 x _LINKS launches as a training step has them: with autograd's notes in forward, and its calls in backward."""
    value = torch.ones(1, device=device, requires_grad=True)
    for _ in range(_LINKS):
        value = value * 1.5
    value.backward()


def _cpu(seconds: float) -> dict[str, Any]:
    count = 2**25
    source, target, small = torch.rand(count), torch.empty(count), torch.zeros(1)
    took = functools.partial(_took, seconds=seconds / 5)
    return {
        "memory_bytes": _host()["memory_bytes"],
        "copy_bytes_per_second": 2 * source.nbytes / took(lambda: target.copy_(source)),
        "flops": {
            name: _matmul_rate(lambda size, dtype=dtype: torch.randn(size, size).to(dtype), seconds / 5)  # type: ignore[misc]
            for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))
        },
        "launch_seconds": took(functools.partial(_chain, torch.device("cpu"))) / (2 * _LINKS),
        "kernel_seconds": took(lambda: [small.add_(1) for _ in range(_LINKS)]) / _LINKS,
    }


def _matmul_rate(make: Callable[[int], Any], seconds: float) -> float:
    """FLOPs a second, of as large a matmul as there is time for: a processor without instructions for bfloat16 takes
    seconds where others take milliseconds."""
    for size in (128, 256, 512, 1024):
        a, b = make(size), make(size)
        _ = a @ b
        began = time.perf_counter()
        _ = a @ b
        if 8 * (time.perf_counter() - began) > seconds:  # the next size has eight times the work
            break
    return 2 * size**3 / _took(lambda: a @ b, seconds)


def _took(function: Callable[[], object], seconds: float) -> float:
    """The median of as many calls as there is time for, three at least, after one to warm up."""
    function()
    found: list[float] = []
    end = time.perf_counter() + seconds
    while len(found) < 3 or time.perf_counter() < end:
        began = time.perf_counter()
        function()
        found.append(time.perf_counter() - began)
    return statistics.median(found)
