"""The example of docs/generate.md runs as it stands."""

import re
import runpy
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "generate.md").read_text(encoding="utf-8")


def test_the_example_runs(tmp_path, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "example.py").write_text(code)
    runpy.run_path(str(tmp_path / "example.py"), run_name="example")
    assert len(capsys.readouterr().out.splitlines()) == 6


def test_every_option_of_the_command_is_named():
    from tilewright.cli.generate import generate

    for name in generate.__annotations__.keys() - {"folder", "prompt", "as_json", "return"}:
        assert f"--{name.replace('_', '-')}" in PAGE
