"""What a run would do on a GPU that is not there: predicted by the plan from the GPU's datasheet, never measured.

A study without a GPU is a rehearsal. It begins with this prediction, and with the study that was recorded on an H200.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tilewright
from tilewright import hardware
from tilewright.errors import UserError
from tilewright.hardware import COPY_SHARE, Accelerator
from tilewright.plan.calibration import FITTED
from tilewright.plan.decoder import from_gpt
from tilewright.plan.traffic import LINK_SHARE
from tilewright.train.load_config import Configuration
from tilewright.tune.search.predict import misfit, predict
from tilewright.tune.search.search import Search
from tilewright.tune.search.space import Point, Space, open_space

DEFAULT_GPU = "H100-SXM5"
# Seconds of a launch and of the shortest kernel, as probes of H200 machines measured them: results/h200/tune_*.json.
_LAUNCH_SECONDS, _KERNEL_SECONDS = 14e-6, 1e-6
_RECORDED = {124e6: "tune_125m_max_autotune.json", 760e6: "tune_760m.json", 1.3e9: "tune_1b.json"}  # by parameters


def find_gpu(name: str | None) -> Accelerator:
    """The accelerator to predict for, which needs a rate for bfloat16, the precision of a run on a GPU."""
    gpu = hardware.find(name or DEFAULT_GPU)
    gpu.first_on_record(("bf16",))
    return gpu


def rehearsal(
    configurations: Mapping[str, Configuration], gpu: Accelerator, *, ranks: int = 1, **limits: Any
) -> dict[str, Any]:
    """What the plan predicts for runs on one GPU, or a rank on each of several, as `Answer.on_gpu` has it.

    Args:
        configurations: the runs, by what to call each.
        gpu: the accelerator.
        ranks: that share every run.
        limits: as `open_space` takes them.

    >>> from tilewright.train.load_config import read
    >>> run = read(None, ["model.preset=125m", "global_batch=32"])
    >>> found = rehearsal({"125m": run}, find_gpu(None))
    >>> [row["run"] for row in found["rows"]][:2], found["rows"][-1]["ratio"] > 1.3
    (['baseline', 'compile default'], True)
    """
    rows, parameters = [], 0
    for name, configuration in configurations.items():
        space = open_space(_on_any_device(configuration), device="cuda", ranks=ranks, **limits)
        rows += [{"model": name, **row} for row in _rows(space, machine_of(gpu, ranks))]
        parameters = from_gpt(space.start.model).parameters
    rates = f"{gpu.matmul('bf16').source}; {gpu.copy_source}"
    if ranks > 1 and gpu.link_bytes_per_second is not None:
        rates += f"; links of {gpu.link_bytes_per_second / 1e9:g} GB/s"
    return {
        "gpu": gpu.name, "ranks": ranks, "rates": rates, "rows": rows, "recorded": nearest_recorded(parameters),
    }  # fmt: skip


def machine_of(gpu: Accelerator, ranks: int = 1) -> dict[str, Any]:
    """What a probe would find on a machine with this GPU, or several, by its datasheet."""
    if ranks > 1 and gpu.link_bytes_per_second is None:
        raise UserError(f"The table has no link of {gpu.name} to predict {ranks} ranks by; choose another --gpu.")
    links = {
        "bytes_per_second": LINK_SHARE * (gpu.link_bytes_per_second or 0.0),
        "round_seconds": FITTED["round seconds"] / 3,
    }
    flops = {dtype: gpu.matmul(dtype).flops for dtype in ("bf16", "tf32", "fp32") if dtype in gpu.peak_flops}
    return {
        "device": "cuda", "host": {"cores": os.cpu_count() or 1}, "memory_bytes": gpu.usable_bytes,
        "copy_bytes_per_second": COPY_SHARE * gpu.bytes_per_second, "flops": {"tf32": flops["fp32"], **flops},
        "launch_seconds": _LAUNCH_SECONDS, "kernel_seconds": _KERNEL_SECONDS,
    } | ({"links": links} if ranks > 1 else {})  # fmt: skip


def _rows(space: Space, machine: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The baseline, torch.compile, and what the plan expects to be fastest."""
    search = Search(
        space,
        lambda point: predict(space.at(point), machine, space.ranks),
        lambda prediction: misfit(prediction, machine),
    )
    points: dict[str, Point] = {"baseline": space.baseline}
    compiled = {**space.baseline, "compile": "default"}
    if "default" in space.levers.get("compile", ()) and space.refusal(compiled) is None:
        points[space.label(compiled)] = compiled
    best = search.descend(space.baseline)
    if best != space.baseline:
        points.setdefault(space.label(best), best)
    rows, first = [], None
    for name, point in points.items():
        found = search.prediction(point)
        assert found is not None
        why = misfit(found, machine)
        speed = space.start.global_batch * space.start.model.sequence / found.seconds
        first = speed if name == "baseline" and why is None else first
        rows.append({
            "run": name, "tokens_per_second": speed if why is None else None, "seconds": found.seconds,
            "ratio": speed / first if first and why is None else None, "bytes": found.bytes,
        })  # fmt: skip
    return rows


def nearest_recorded(parameters: int) -> str:
    """The name of the study recorded on an H200 whose model is nearest in size."""
    return _RECORDED[min(_RECORDED, key=lambda count: abs(math.log(count / max(1, parameters))))]


def recorded_path(name: str) -> str:
    """Where a recorded study is, from here; nothing for a name that is none of them.

    >>> recorded_path("tune_1b.json").endswith("results/h200/tune_1b.json"), recorded_path("$(reboot)")
    (True, '')
    """
    if name not in _RECORDED.values():
        return ""
    here = Path(tilewright.__file__).parents[2] / "results/h200" / name
    return os.path.relpath(here) if here.is_file() else f"results/h200/{name}"


def _on_any_device(configuration: Configuration) -> Configuration:
    return Configuration(dataclasses.replace(configuration.train, device="auto"), configuration.origins)
