"""The examples of docs/your_model.md run as they stand."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from tilewright.runtime import dispatch

PAGE = (Path(__file__).parents[2] / "docs" / "your_model.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"## ([^\n]+)\n+```python\n(.*?)```", PAGE, re.DOTALL)
FIRST = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("title, code", [("first", FIRST[1]), *EXAMPLES])
def test_an_example_runs(title: str, code: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(dispatch, "INTERPRETED", False)
    for package in ("transformers", "peft", "accelerate"):
        if package in code or (package == "accelerate" and "Trainer" in code):
            pytest.importorskip(package)
    torch._dynamo.reset()
    (tmp_path / "example.py").write_text(code)
    runpy.run_path(str(tmp_path / "example.py"), run_name="example")
    if title == "first":
        assert "10 sites changed" in capsys.readouterr().out


def test_there_are_five_examples_and_each_rule_has_a_row() -> None:
    from tilewright.optimize.rules import ALL

    alone = "Only the attention of a Hugging Face model"
    assert [title for title, _ in EXAMPLES] == ["A plain loop", "Hugging Face's Trainer", alone, "LoRA", "Inference"]
    assert all(f"| `{name}` |" in PAGE for name in ALL)
