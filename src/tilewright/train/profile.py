"""A few steps of a real run under the profiler: where their time went, and their memory against the plan.

The steps are the run's own, with the batches and updates it would have made anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tilewright.measure.machine import describe
from tilewright.measure.memory import MemoryWatch, against_plan
from tilewright.measure.profile import profile_steps
from tilewright.measure.results import SCHEMA, write_json
from tilewright.plan.memory import Anatomy
from tilewright.train.engine import Engine

WARM = 3  # steps in which kernels are compiled and the allocator finds its blocks
STEPS = 3  # under the profiler
TAKES = WARM + 1 + 1 + STEPS  # one for memory, one in which the profiler itself warms up


def profile_run(
    engine: Engine, advance: Callable[[], None], predicted: Anatomy, folder: Path, trace: bool
) -> dict[str, Any]:
    """Take TAKES steps of a run by `advance`; write `profile.json`, which it returns, and `trace.json.gz` if wanted."""
    for _ in range(WARM):
        advance()
    memory = memory_of_a_step(engine, advance)
    rows = [] if engine.config.cuda_graphs else against_plan(memory, predicted)  # a replay allocates nothing
    path = folder / "trace.json.gz" if trace else None
    time = profile_steps(advance, steps=STEPS, trace=path)
    found = {
        "schema": SCHEMA, "command": "train profile", "machine": describe(), "time": time.as_dict(),
        "memory": [
            dict(zip(("part", "predicted", "measured", "difference"), row, strict=True))
            for row in rows
        ],
        "memory_measured": memory, "trace": str(path) if path else None,
    }  # fmt: skip
    write_json(folder / "profile.json", found)
    return found


def memory_of_a_step(engine: Engine, advance: Callable[[], None]) -> dict[str, int]:
    """Watch a step's memory by hooks; a replayed CUDA graph has no forward that calls one."""
    watch = MemoryWatch(engine.model, engine.optimizer)
    table: dict[str, int] = {}

    def after_optimizer(*_: Any) -> None:
        watch.after_optimizer()
        table.update(watch.table())  # here, because the loop starts the count of the peak anew after each step

    hooks = (
        engine.forward.register_forward_pre_hook(lambda *_: watch.before_forward()),
        engine.forward.register_forward_hook(lambda *_: watch.after_forward()),
        engine.optimizer.register_step_pre_hook(lambda *_: watch.after_backward()),
        engine.optimizer.register_step_post_hook(after_optimizer),
    )
    try:
        advance()
    finally:
        for hook in hooks:
            hook.remove()
    return table
