from types import SimpleNamespace

import pytest

from tilewright.bench import train
from tilewright.train.load_config import read
from tilewright.tune.search.space import open_space


def test_a_signal_ends_the_benchmark_and_not_one_case_of_it(monkeypatch):
    monkeypatch.setattr(train.torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(train, "train", lambda config, shown: SimpleNamespace(stopped=True))
    with pytest.raises(KeyboardInterrupt):
        train._measure(["data.kind=synthetic"], 1, 1)


def test_every_value_of_every_lever_is_measured():
    measured = {override for case in train.CASES for override in case["overrides"]}
    run = read(None, ["model.preset=350m", "global_batch=16"])
    levers = open_space(run, device="cuda", numerics="rule", search=["all"]).levers
    assert len(levers) > 8
    for name, (_own, *values) in levers.items():
        values = [4] if name == "micro_batch" else values
        missing = [value for value in values if f"{name}={str(value).lower()}" not in measured]
        assert not missing, f"{name}: {missing}"
    # Nor is anything left out that a study does not search, for it would be another training.
    assert {"optimizer.clip=0", "schedule.name=constant", "model.dropout=0.1"} <= measured
    for case in train.CASES:
        read(None, case["overrides"])
