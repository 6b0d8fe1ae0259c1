import contextlib
import copy
import importlib
import weakref
from pathlib import Path

import pytest
import torch

from ops.contract import on_gpu
from tilewright import ops
from tilewright.bench import NAMES, dropout_add_norm, protocol
from tilewright.bench.bars import Bar
from tilewright.errors import UserError
from tilewright.measure.ceilings import Ceilings
from tilewright.plan.cost import Cost


def test_every_width_norm_and_dropout_is_measured():
    cases = list(dropout_add_norm.cases(quick=False))
    assert {(c["norm"], c["p"]) for c in cases} == {("layer", 0.1), ("layer", 0.0), ("rms", 0.1), ("rms", 0.0)}
    assert {c["dtype"] for c in cases} == {"bf16", "fp16", "fp32"}
    assert max(c["width"] for c in cases) == 65536


@on_gpu
def test_an_impossible_figure_is_an_error_and_a_failing_peer_shows_its_error():
    x = torch.randn(2**24, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        measured = protocol.measure_case(
            {"copy": lambda: x.clone()}, Cost(0, 10**12, 0), Ceilings(4e12, 1e15), from_graph=True
        )
    assert "the measurement is wrong" in measured["implementations"]["copy"]["error"]

    def broken():
        raise ValueError("no such kernel")

    functions = {"copy": lambda: x.clone(), "broken": broken}
    with torch.cuda.stream(torch.cuda.Stream()):
        measured = protocol.measure_case(functions, Cost(0, x.nbytes, x.nbytes), Ceilings(1e14, 1e15), from_graph=True)
    assert measured["implementations"]["broken"] == {"error": "ValueError: no such kernel"}
    assert measured["implementations"]["copy"]["median"] > 0


def test_a_case_has_none_of_the_memory_of_the_one_before(monkeypatch):
    """A decoder and its cache may fill more than half of a GPU."""
    earlier = []

    class Weights:
        def __call__(self):
            return None

    def prepare(case):
        assert not any(weights() for weights in earlier)
        weights = Weights()
        earlier.append(weakref.ref(weights))
        return {"step": {"tilewright": weights}}, {}

    measured = {"implementations": {"tilewright": {"median": 1.0, "limit_share": 0.5}}}
    monkeypatch.setattr(protocol, "head", lambda *_: {})
    monkeypatch.setattr(protocol, "measure_ceilings", lambda: Ceilings(1e12, 1e14))
    monkeypatch.setattr(protocol, "measure_case", lambda *_, **how: copy.deepcopy(measured))
    monkeypatch.setattr(protocol, "_peak", lambda run: 7)
    monkeypatch.setattr(protocol, "_line", lambda *_: "")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    limits, cases = {"step": Cost(1, 1, 1)}, [{"size": size} for size in range(3)]
    found = protocol.run_cases(
        "some", cases, prepare, lambda case: limits, str, peers=(), ask=protocol.Ask(print, print), with_memory=True
    )
    assert [case["step"]["implementations"]["tilewright"]["peak_bytes"] for case in found["cases"]] == [7] * 3


def test_what_a_case_is_to_reach_is_a_line_and_in_the_result(monkeypatch):
    rows = {"tilewright": {"median": 10e-6}, "peer": {"median": 11e-6}, "slow": {"median": 30e-6}}
    monkeypatch.setattr(protocol, "head", lambda *_: {})
    monkeypatch.setattr(protocol, "measure_ceilings", lambda: Ceilings(1e12, 1e14))
    monkeypatch.setattr(protocol, "measure_case", lambda *_, **how: {"implementations": copy.deepcopy(rows)})
    monkeypatch.setattr(protocol, "_line", lambda *_: "a case")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    run, said = protocol.Checked(lambda: None, 0.004), []
    steps = {"tilewright": run, "peer": protocol.Checked(run, 0.003), "slow": run}
    wanted = [
        Bar(("tilewright", "gone"), ("peer", "slow"), 1.2), Bar(("tilewright",), ("peer",), 1.1, seconds=9e-6),
        Bar(("tilewright",), ("slow",), 2.0, seconds=20e-6), Bar(("tilewright",), ("slow", "gone"), 1.0),
        Bar(("tilewright",), ("peer",), is_about_errors=True), Bar(("tilewright",), ("slow",), is_about_errors=True),
        Bar(("gone",), ("slow",), 1.0), Bar(("tilewright",), seconds=10e-6),
    ]  # fmt: skip
    given = [{}], lambda case: ({"step": dict(steps)}, {}), lambda case: {"step": Cost(1, 1, 1)}, str
    ask = protocol.Ask(said.append, lambda result: None)
    found = protocol.run_cases("some", *given, peers=(), ask=ask, bars=lambda case: wanted)
    assert [bar["passed"] for bar in found["cases"][0]["bars"]] == [False, False, True, None, False, True, None, True]
    assert said[2:] == [
        "  miss: tilewright 1.10x of 1.20x peer", "  miss: tilewright 1.10x of 1.10x peer, 10.0 of 9.0 us",
        "  pass: tilewright 3.00x of 2.00x slow, 10.0 of 20.0 us", "  open: gone was not measured",
        "  miss: tilewright is 0.004 from float64, peer 0.003", "  pass: tilewright is 0.004 from float64, slow 0.004",
        "  open: gone was not measured", "  pass: tilewright, 10.0 of 10.0 us",
        "3 of 8 bars passed, 3 missed, 2 open",
    ]  # fmt: skip
    with protocol.only_ours():
        assert "bars" not in protocol.run_cases("some", *given, peers=(), ask=ask, bars=lambda case: wanted)["cases"][0]


OPS = sorted(path.parent.name for path in Path(ops.__file__).parent.glob("*/op.py"))


@pytest.mark.parametrize("name", [*OPS, "optimizer"])
def test_every_op_has_a_cost_a_reference_a_benchmark_and_a_place_in_the_docs(name):
    op = importlib.import_module("tilewright.optim.update" if name == "optimizer" else f"tilewright.ops.{name}.op")
    assert callable(op.cost) and callable(op.reference) and name in NAMES
    module = importlib.import_module(f"tilewright.bench.{name}")
    assert 0 < len(list(module.cases(quick=True))) <= len(list(module.cases(quick=False)))
    text = (Path(__file__).parents[2] / "docs" / "ops.md").read_text(encoding="utf-8")
    folder = "optim/update" if name == "optimizer" else f"ops/{name}/op"
    assert f"](../src/tilewright/{folder}.py)" in text and f"<!-- table: {name} results/h200/{name}.json -->" in text


def test_a_part_of_the_cases_is_chosen_by_label_and_a_wrong_one_names_some():
    def ask(only):
        return protocol.Ask(print, print, only=only).chosen(dropout_add_norm.cases(False), dropout_add_norm._label)

    assert ask("") == list(dropout_add_norm.cases(False))
    assert {(c["dtype"], c["norm"]) for c in ask("fp32 rms")} == {("fp32", "rms")}
    with pytest.raises(UserError, match="'fp8'.*bf16 layer p=0.1"):
        ask("fp8")
