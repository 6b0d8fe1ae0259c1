import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
specification = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
generate = importlib.util.module_from_spec(specification)
specification.loader.exec_module(generate)


def test_a_table_is_made_from_its_file_and_replaces_what_stood_there(tmp_path, monkeypatch):
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    monkeypatch.setitem(generate.TABLES, "speed", lambda result: f"{result['speed']}\n")
    (tmp_path / "a.json").write_text(json.dumps({"speed": 7}))
    text = "before\n<!-- table: speed a.json -->\nold\n<!-- end -->\nafter\n"
    fresh = generate.render(text)
    assert fresh == text.replace("old", "7") == generate.render(fresh)


def test_what_a_benchmark_has_yet_to_measure_says_how_and_a_wrong_name_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    fresh = generate.render("<!-- table: rope results/h200/rope.json -->\nold\n<!-- end -->\n")
    assert "Not measured yet: `tilewright bench rope --out results/h200/rope.json`." in fresh and "old" not in fresh
    with pytest.raises(FileNotFoundError):
        generate.render("<!-- table: rope results/h200/ropes.json -->\nold\n<!-- end -->\n")


def test_a_table_without_an_end_is_refused(tmp_path):
    with pytest.raises(ValueError, match="end"):
        generate.render("<!-- table: rope a.json -->\nold\n")


def test_the_documents_are_up_to_date_and_have_their_tables():
    for name in ("README.md", "docs/ops.md", "docs/plan.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert "<!-- table: " in text and generate.render(text) == text


def test_a_peer_that_is_quicker_is_named_if_by_more_than_the_same_code_differs():
    def case(ours, second, peer, name):
        cells = {
            "tilewright": {"median": ours, "seats": [ours, second]}, "tilewright-64MiB": {"median": 0.1},
            "eager": {"median": peer, "seats": [peer, peer]}, "broken": {"error": "it is"},
        }  # fmt: skip
        return {"name": name, "forward": {"implementations": cells}}

    def said(*cases):
        return generate._compared(list(cases), ["forward"], lambda case: case["name"])

    level = [case(1.0, 1.01, 1.2, f"level {i}") for i in range(20)]
    assert "Of 40 pairs" in said(*level) and "ahead of the quickest peer in 20 of 20 measurements" in said(*level)
    near = case(1.0, 1.0, 0.995, "near")
    assert "no more than 1.0%" in said(*level, near) and "and behind in 0." in said(*level, near)
    assert "in 20 of 21 measurements, and behind in 1: far forward (0.970)." in said(
        *level, case(1.0, 1.0, 0.97, "far")
    )
    for one in level:
        del (
            one["forward"]["implementations"]["tilewright"]["seats"],
            one["forward"]["implementations"]["eager"]["seats"],
        )
    assert said(*level) == ""
