import json

import pytest
from typer.testing import CliRunner

from tilewright.cli.config import app
from tilewright.errors import UserError
from tilewright.train.fields import fields, json_schema
from tilewright.train.load_config import read


def run(*arguments):
    return CliRunner().invoke(app, arguments)


def test_show_has_a_line_for_every_field_with_its_value_and_origin(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text("model:\n  preset: 125m\nout: runs/" + 100 * "x" + "\n")
    result = run("show", "steps=1k", "c.yaml", "data.paths=[a, b c]")
    assert result.exit_code == 0, result.output
    heading, *lines = result.stdout.splitlines()
    found = {line.split()[0]: line for line in lines}
    assert list(found) == list(fields()) and heading.split() == ["field", "value", "set", "by"]
    assert found["out"].split()[1:] == ["runs/" + 100 * "x", "c.yaml:3"]
    assert found["model.width"].split()[1:] == ["768", "preset", "125m"]
    assert found["steps"].split()[1:] == ["1000", "command", "line"]
    assert '["a", "b c"]' in found["data.paths"] and found["seed"].split()[1:] == ["0", "default"]
    assert len({line.index(line.split()[2]) for line in (found["seed"], found["steps"], found["out"])}) == 1


def test_show_as_json_is_the_configuration(tmp_path):
    result = run("show", "model.gpt_block=optimized", "--json")
    found = json.loads(result.stdout)
    expected = read(None, ["model.gpt_block=optimized"])
    assert found["schema"] == 1 and found["config"] == expected.as_dict() and found["origins"] == expected.origins


def test_a_terminal_sees_a_table_with_every_name_whole(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    text = run("show", "out=" + 100 * "x").stdout
    assert "┃" in text and all(name in text for name in fields()) and text.count("x") >= 100


def test_a_mistake_is_a_sentence(tmp_path):
    assert "did you mean steps?" in str(run("show", "stps=3").exception)
    two = run("show", "a.yaml", "b.yaml").exception
    assert isinstance(two, UserError) and "two configurations" in str(two)


def test_the_schema_is_printed_or_written(tmp_path):
    assert json.loads(run("schema").stdout) == json_schema()
    file = tmp_path / "schema.json"
    assert run("schema", "--out", str(file)).exit_code == 0
    assert json.loads(file.read_text()) == json_schema()


@pytest.mark.parametrize("command", ["show", "schema"])
def test_help_has_an_example(command):
    assert f"tilewright config {command}" in run(command, "--help").stdout
