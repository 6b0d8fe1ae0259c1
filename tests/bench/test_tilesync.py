"""Peers of the benchmark of tilesync compute what the graphs do."""

import pytest
import torch

from tilesync.graphs import tensors
from tilewright.bench import tilesync as bench
from tilewright.tilesync import compile


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
    inputs = tensors(graph)
    function, arguments = bench._as_pytorch_takes(case, inputs)
    y = function(*arguments)
    assert all(each.dtype == inputs["x"].dtype for each in arguments)
    if case["chain"] == "convolutions":
        y = y.permute(0, 2, 3, 1).flatten(0, 2)
    torch.testing.assert_close(y, compile(graph)(**inputs), rtol=1e-4, atol=1e-4)
    limit = bench._limits(case)["forward"]
    assert limit.flops > 0 and limit.bytes > 0


def test_labels_are_different():
    labels = [bench._label(case) for case in bench.cases(quick=False)]
    assert len(set(labels)) == len(labels) and len(list(bench.cases(quick=True))) == 3
