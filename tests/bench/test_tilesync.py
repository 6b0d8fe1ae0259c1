"""Peers of the benchmark of tilesync compute what the graphs do."""

from types import SimpleNamespace

import pytest
import torch

from tilesync.graphs import tensors
from tilewright.bench import tilesync as bench
from tilewright.measure.numerics import relative_error
from tilewright.tilesync import compile


def cache_length(case):
    """What is filled of a cache, behind which the new tokens end it."""
    attends = case["chain"] == "attention"
    return {"length": torch.tensor([case["context"] - case["rows"]], dtype=torch.int32)} if attends else {}


@pytest.mark.parametrize(
    "case",
    [
        {"chain": "llama", "rows": 3, "width": 64, "inner": 24}, {"chain": "gpt3", "rows": 3, "width": 64, "inner": 24},
        {"chain": "llama", "rows": 3, "width": 128, "inner": 128, "weights": "int4"},
        {"chain": "llama", "rows": 3, "width": 64, "inner": 32, "weights": "fp8"},
        {"chain": "attention", "rows": 2, "width": 64, "heads": 4, "key_heads": 2, "context": 9},
        {"chain": "convolutions", "rows": 2, "side": 6, "channels": 8},
    ],
    ids=lambda case: case["chain"] + case.get("weights", ""),
)  # fmt: skip
def test_the_peers_compute_the_same(case):
    graph = bench.graph_of(case)
    inputs = tensors(graph) | cache_length(case)
    function, arguments = bench._as_pytorch_takes(case, inputs)
    y = function(*arguments)
    assert all(each.dtype == inputs["x"].dtype for each in arguments)
    if case["chain"] == "convolutions":
        y = y.permute(0, 2, 3, 1).flatten(0, 2)
    torch.testing.assert_close(y, compile(graph).run(list(inputs.values()))[0], rtol=1e-4, atol=1e-4)
    limit = bench._limits(case)["forward"]
    assert limit.flops > 0 and limit.bytes > 0


def test_labels_are_different():
    labels = [bench._label(case) for case in bench.cases(quick=False)]
    assert len(set(labels)) == len(labels) and len(list(bench.cases(quick=True))) == 3


def test_every_case_has_the_bars_that_it_is_to_reach():
    """Ratios by rows; what is idle in a serial schedule is given, as is which case has how much."""
    best, slow = ("cublas", "compile-max"), ("tilewright-pdl",)
    for (chain, rows), wanted in {
        ("llama", 1): [(best, 1.2), (slow, 1.03)], ("llama", 64): [(best, 1.2), (slow, 1.03)],
        ("llama", 128): [(best, 1.1)], ("llama", 256): [(best, 1.1)], ("llama", 384): [],
        ("gpt3", 1): [(best, 1.1)], ("gpt3", 64): [(best, 1.1)], ("gpt3", 128): [(best, 1.05)],
        ("gpt3", 384): [(best, 1.05)], ("attention", 4): [(("cublas",), 1.2)],
        ("convolutions", 1): [(("tilewright-serial",), 1.0)],
    }.items():  # fmt: skip
        *speed, error = bench._bars({"chain": chain, "rows": rows})
        assert [(bar.peers, bar.ratio) for bar in speed] == wanted, (chain, rows)
        assert error.is_about_errors and error.peers == ("cublas",)
    assert bench._bars({"chain": "llama", "rows": 1, "weights": "int4"}) == []


@pytest.mark.parametrize(("idle", "halves"), [(0.1, []), (0.2, [1 / 0.9])])
def test_many_rows_are_to_save_half_of_what_is_idle(monkeypatch, idle, halves):
    monkeypatch.setattr(bench, "graph_of", lambda case: None)
    monkeypatch.setattr(bench.tilesync, "check", lambda graph: None)
    monkeypatch.setattr(bench, "predict", lambda program: SimpleNamespace(tail=idle))
    never_slower, *saved, _ = bench._bars({"chain": "llama", "rows": 512})
    assert (never_slower.ratio, never_slower.ours) == (0.99, ("tilewright",))
    assert [bar.ratio for bar in saved] == pytest.approx(halves)
    assert all(bar.peers == ("tilewright-serial",) and "tilewright-persistent" in bar.ours for bar in saved)


@pytest.mark.parametrize("chain", ["llama", "gpt3", "attention", "convolutions"])
def test_a_peer_is_as_near_to_float64_as_it_computes(chain):
    case = {"chain": chain, "rows": 2, "width": 64, "inner": 24, "heads": 4, "key_heads": 2, "context": 9, "side": 6,
            "channels": 8}  # fmt: skip
    graph = bench.graph_of(case)
    inputs = {name: x.bfloat16() for name, x in tensors(graph).items()} | cache_length(case)
    function, arguments = bench._as_pytorch_takes(case, inputs)
    truth = bench._exact(case, inputs)
    assert truth.dtype == torch.float64
    theirs, ours = bench._as_graphs_have(case, function(*arguments)), compile(graph).run(list(inputs.values()))[0]
    assert all(0 < relative_error(y, truth) < 0.02 for y in (theirs, ours))
