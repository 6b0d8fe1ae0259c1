"""A profile is of the run's own steps: it changes nothing that the run computes."""

import gzip
import json

import pytest

from tilewright.train.profile import TAKES
from train.tiny import as_on_a_cpu, tiny, trained  # noqa: F401

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"), pytest.mark.usefixtures("as_on_a_cpu")
]  # fmt: skip


@pytest.mark.parametrize("compile", ["none", "default"])
def test_a_profiled_run_computes_what_it_would_have_and_says_where_the_step_went(tmp_path, compile):
    changes = {
        "steps": TAKES + 1,
        "model": {"dropout": 0.1, "layers": 1},
        "compile": compile,
        "micro_batch": 2,
        "accumulation": 2,
    }
    plain = trained(tiny(tmp_path / "plain", **changes))
    found = []
    profiled = trained(tiny(tmp_path / "run", **changes, profile=True), profile=found.append)
    assert [(one.step, one.loss, one.gradient_norm) for one in profiled] == [
        (one.step, one.loss, one.gradient_norm) for one in plain
    ]
    assert len(found) == 1 and json.loads((tmp_path / "run/profile/profile.json").read_text()) == found[0]
    time = found[0]["time"]
    assert time["steps"] == 3 and 0 < time["busy_seconds"] <= time["seconds"]
    assert {"forward", "backward", "optimizer"} <= {phase["name"] for phase in time["phases"]}
    trace = json.loads(gzip.decompress((tmp_path / "run/profile/trace.json.gz").read_bytes()), strict=False)
    names = [event.get("name") for event in trace["traceEvents"]]
    assert names.count("tilewright.forward") == 3 * 2 and names.count("tilewright.optimizer") == 3
    measured = found[0]["memory_measured"]
    parameters = tiny("x", **changes).model.parameters
    assert measured["weights"] == measured["gradients"] == 4 * parameters
    assert {row["part"]: row["difference"] for row in found[0]["memory"]}["weights"] == 0


def test_too_few_steps_for_a_profile_are_said_and_taken_all_the_same(tmp_path):
    said = []
    assert len(trained(tiny(tmp_path, steps=4, profile=True), say=said.append)) == 4
    assert len(said) == 1 and f"takes {TAKES} steps" in said[0]
    assert not (tmp_path / "profile").exists()
