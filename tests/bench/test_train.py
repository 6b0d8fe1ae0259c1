from types import SimpleNamespace

import pytest

from tilewright.bench import train


def test_a_signal_ends_the_benchmark_and_not_one_case_of_it(monkeypatch):
    monkeypatch.setattr(train.torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(train, "train", lambda config, shown: SimpleNamespace(stopped=True))
    with pytest.raises(KeyboardInterrupt):
        train._measure(["data.kind=synthetic"], 1, 1)
