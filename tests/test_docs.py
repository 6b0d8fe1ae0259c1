import importlib.util
import json
from pathlib import Path

import pytest

from tilewright.bench import attention as attention_bench
from tilewright.bench import self_attention as self_attention_bench

ROOT = Path(__file__).parent.parent
STEPS = ("forward", "backward", "forward_backward")
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


def test_pictures_follow_their_results_and_a_result_that_is_missing_is_named(tmp_path, monkeypatch):
    def speed(result):
        points = [generate.Point(x, y) for x, y in result["speed"]]
        return generate.Plot("speed", "width", "GB/s", [generate.Panel("all", [generate.Line("ours", points)])])

    monkeypatch.setattr(generate, "ROOT", tmp_path)
    monkeypatch.setitem(generate.PLOTS, "speed", speed)
    monkeypatch.setattr("sys.argv", ["generate.py"])
    text = "<!-- plot: speed a.json -->\nold\n<!-- end -->\n<!-- table: rope results/rope.json -->\n<!-- end -->\n"
    (tmp_path / "docs" / "plots").mkdir(parents=True)
    (tmp_path / "a.json").write_text(json.dumps({"speed": [(1, 2.0), (4, 8.0)]}))
    (tmp_path / "docs" / "page.md").write_text(text)
    (tmp_path / "README.md").write_text(text)
    unused, picture = (tmp_path / "docs" / "plots" / f"{name}.svg" for name in ("unused", "speed"))
    unused.write_text("<svg/>")
    assert generate.main() == 0
    assert "![speed: GB/s by width](plots/speed.svg)" in (tmp_path / "docs" / "page.md").read_text()
    assert "](docs/plots/speed.svg)" in (tmp_path / "README.md").read_text()
    assert "Not measured yet: `tilewright bench rope --out results/rope.json`." in (tmp_path / "README.md").read_text()
    assert picture.read_text().startswith("<svg") and not unused.exists()
    monkeypatch.setattr("sys.argv", ["generate.py", "--check"])
    assert generate.main() == 0
    (tmp_path / "a.json").write_text(json.dumps({"speed": [(1, 2.0), (4, 9.0)]}))
    before = picture.read_text()
    assert generate.main() == 1 and picture.read_text() == before
    picture.unlink()
    assert generate.main() == 1


def test_pictures_of_attention_take_what_the_benchmarks_write():
    """Of head sizes and masks that the committed result does not have yet."""
    cell = {"median": 1e-3, "low": 0.9e-3, "high": 1.2e-3}
    steps = {step: {"flops": 1e11, "implementations": {"tilewright": cell, "cudnn": cell}} for step in STEPS}
    machine = {"gpu": {"name": "NVIDIA H200"}, "torch": "2.11.0+cu130", "date": "2026-11-17"}
    cases = [
        {**case, **steps} for case in attention_bench.cases(quick=False) if case["head_dim"] < 256 or case["causal"]
    ]
    for make in (generate.attention_by_length, generate.attention_time_by_length):
        plot = make({"machine": machine, "cases": cases})
        assert [panel.title for panel in plot.panels][:3] == ["forward, 64", "backward, 64", "forward, 128"]
        assert {len(line.points) for panel in plot.panels for line in panel.lines} == {
            len(attention_bench.LENGTHS) - 1  # the longest has twice the tokens
        }
        assert generate.draw(plot).startswith("<svg")
    cases = [{**case, **steps} for case in self_attention_bench.cases(quick=False)]
    for machine_of in (machine, {**machine, "gpu": None, "cpu": "Some CPU"}):
        result = {"machine": machine_of, "cases": cases}
        by_width, by_sequence = generate.self_attention_by_width(result), generate.self_attention_by_sequence(result)
        assert [len(plot.panels[0].lines[0].points) for plot in (by_width, by_sequence)] == [5, 3]
        assert (generate.draw(by_width).startswith("<svg") and "Some CPU" in by_width.note) or machine_of["gpu"]


def test_every_picture_is_up_to_date_and_names_what_it_compares():
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")]
    pictures = {name: svg for page in pages for name, svg in generate.pictures(page).items()}
    assert set(pictures) == {path.stem for path in (ROOT / "docs" / "plots").iterdir()}
    named = {match["name"] for page in pages for match in generate.BLOCK.finditer(page) if match["kind"] == "plot"}
    assert named == set(generate.PLOTS) and {"attention_by_length", "dropout_add_norm_by_width"} <= set(pictures)
    for name, svg in pictures.items():
        assert (ROOT / "docs" / "plots" / f"{name}.svg").read_text(encoding="utf-8") == svg
        assert ">Tilewright</text>" in svg and "NVIDIA H200" in svg
