"""What each rule gives in a run of a user's own model, all measured in one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from tilewright.measure.compile_cache import redirect_defaults
from tilewright.optimize.api import install
from tilewright.optimize.gain import measure_gains
from tilewright.optimize.rules import chosen
from tilewright.train.engine import device_of, restored_modes
from tilewright.train.load_config import from_dict
from tilewright.train.optimizers import PRECISIONS
from tilewright.train.world import World
from tilewright.tune.own_model import OwnEngine, load


def measure_rules(job: dict[str, Any], say: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """The gains of the rules of a run, and the names of those that there was no time for.

    A step is forward and backward of one micro batch in the run's precision. Where the run is compiled, Inductor
    compiles it in its default mode: it takes a fraction of the time, and the rules meet the same fusion.

    Args:
        job: the run, its model, and `within`, the seconds there are.
        say: is told of what takes a while.
    """
    run = from_dict(job["configuration"])
    device, mode = device_of(run), "none" if run.compile == "none" else "default"
    plain = dataclasses.replace(run, rules="none", compile="none", cuda_graphs=False)
    with restored_modes():
        say({"event": "alive", "what": f"calling {job['own_model']}"})
        own = load(job["own_model"], job["path"], seed=run.seed)
        engine = OwnEngine(plain, device, World(), [], own.module.to(device))
        micro = own.batch.split(run.micro_batch or own.batch.rows)[0].to(device, PRECISIONS[engine.precision][0])
        batch = dict(zip(micro.names, micro.tensors, strict=True)) if micro.names else tuple(micro.tensors)
        if mode != "none":
            redirect_defaults()
        say({"event": "alive", "what": "measuring its rules"})
        with torch.autocast(device.type, torch.bfloat16, enabled=engine.precision == "bf16"):
            gains, left = measure_gains(
                engine.model, batch, chosen(run.rules), mode,
                lambda kept: install(engine.model, kept, mode), job["within"],
            )  # fmt: skip
    return {"gains": [dataclasses.asdict(each) for each in gains], "not_measured": left}
