import json
from pathlib import Path

import pytest

from tilewright.bench import against, protocol, rope
from tilewright.errors import UserError


def result(**medians):
    rows = {
        name: {"median": m, "low": m, "high": m * 1.01, "seats": [m], "limit_share": 1e-4 / m}
        for name, m in medians.items()
    }
    return {"benchmark": "rope", "cases": [{"dtype": "bf16", "rows": 4, "forward": {"implementations": rows}}]}


@pytest.fixture
def run(monkeypatch):
    """Compare with a result what `bench rope` is made to measure."""
    said = []

    def compare(path, name="rope", **measured):
        monkeypatch.setattr(rope, "run", lambda ask: result(**measured))
        return against.run(name, path, protocol.Ask(said.append, print)), said

    return compare


def test_only_what_is_slower_than_noise_is_named_and_peers_are_not(run, tmp_path):
    (tmp_path / "rope.json").write_text(
        json.dumps(result(**{"tilewright": 1e-3, "tilewright-inplace": 1e-3, "eager": 1}))
    )
    measured = {"tilewright": 1.02e-3, "tilewright-inplace": 1.1e-3, "eager": 9}
    for path, name in ((tmp_path / "rope.json", "rope"), (tmp_path, "rope"), (tmp_path, "all")):
        changes, said = run(path, name, **measured)
        assert [(change.implementation, change.is_slower) for change in changes] == [
            ("tilewright-inplace", True), ("tilewright", False)
        ]  # fmt: skip
        assert said[-2].startswith("rope: 1 of 2 figures slower") and "1000.0 to 1100.0 us" in said[-1]


def test_a_wide_spread_is_no_slowness(run, tmp_path):
    before = result(tilewright=1e-3)
    before["cases"][0]["forward"]["implementations"]["tilewright"]["high"] = 1.2e-3
    (tmp_path / "rope.json").write_text(json.dumps(before))
    changes, _ = run(tmp_path, tilewright=1.15e-3)
    assert not changes[0].is_slower


def test_peers_are_left_out_and_come_back():
    makers = {name: lambda: {"forward": lambda: None} for name in ("tilewright", "tilewright-inplace", "eager")}
    with protocol.only_ours():
        steps, _ = protocol.build(makers)
    assert list(steps["forward"]) == ["tilewright", "tilewright-inplace"]
    assert list(protocol.build(makers)[0]["forward"]) == list(makers)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("rope", None, "Cannot compare"), ("rope", "[", "Cannot compare"), ("rope", "{}", "Cannot compare"),
        ("rope", json.dumps({"benchmark": "linear", "cases": []}), "of 'linear'"),
        ("train", "{}", "which train is not"), ("all", None, "no result of a benchmark"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_one_sentence(name, content, words, run, tmp_path):
    if content is not None:
        (tmp_path / f"{name}.json").write_text(content)
    with pytest.raises(UserError, match=words):
        run(tmp_path, name)


def test_all_wants_a_folder(run):
    with pytest.raises(UserError, match="is none"):
        run(Path("results.json"), "all")
