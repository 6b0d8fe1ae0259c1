"""What DDP and FSDP2 cost on one rank: the comparison, and on a CPU the whole of it for a model that takes no time."""

import json
from pathlib import Path

import pytest
import torch.distributed as dist

from ranks import run_ranks
from tilewright.bench import wrappers
from tilewright.bench.protocol import Ask
from tilewright.errors import UserError
from tilewright.runtime import dispatch

TINY = (
    "model.width=16", "model.layers=1", "model.heads=2", "model.sequence=16", "model.vocabulary=64", "micro_batch=1",
    "global_batch=1", "device=cpu",
)  # fmt: skip


def _rank(rank, folder):
    dist.destroy_process_group()
    dispatch.INTERPRETED = False
    wrappers._MODEL["cpu"] = wrappers._MODEL["cuda"] = TINY
    lines, saved = [], []
    result = wrappers.run(Ask(lines.append, lambda found: saved.append(json.dumps(found)), quick=True))
    assert json.loads(saved[-1]) == result
    (Path(folder) / "result.json").write_text(json.dumps({"lines": lines, **result}))


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
def test_every_case_trains_and_is_compared(tmp_path):
    run_ranks(_rank, 1, str(tmp_path))
    result = json.loads((tmp_path / "result.json").read_text())
    assert [case["case"] for case in result["cases"]] == list(wrappers.CASES)
    for case in result["cases"]:
        assert len(case["step_seconds"]) == wrappers._QUICK[1] and min(case["step_seconds"]) > 0, case
    wrapped = ["DDP", "FSDP2, zero 2", "FSDP2, zero 3"]
    assert list(result["overheads"]) == wrapped
    for name, line in zip(wrapped, result["lines"][-3:], strict=True):
        assert line.startswith(f"{name}: ") and "spread" in line


def test_the_spread_is_the_drift_or_what_the_steps_differ_by():
    even = {"plain": [1.0] * 9, "DDP": [1.5] * 9, "plain, again": [1.0] * 9}
    assert wrappers.overheads(even) == {"DDP": {"percent": 50.0, "spread": 0.0}}
    drifted = wrappers.overheads(even | {"plain, again": [1.2] * 9})["DDP"]
    assert drifted["spread"] == pytest.approx(100 * 0.2 / 1.1, abs=0.01)
    scattered = wrappers.overheads(even | {"DDP": [1.0, 1.5, 2.0] * 3})["DDP"]
    assert scattered["percent"] == 50.0 and scattered["spread"] > 10


def test_a_case_that_failed_is_not_compared():
    assert wrappers.overheads({"plain": [1.0], "DDP": [], "plain, again": [1.0]}) == {}
    assert wrappers.overheads({"plain": [], "DDP": [1.0], "plain, again": [1.0]}) == {}


def test_a_part_of_the_cases_compares_nothing():
    with pytest.raises(UserError, match="leave out --only"):
        wrappers.run(Ask(print, print, only="DDP"))
