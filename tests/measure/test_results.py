import json
import os

import pytest

from tilewright.measure.results import write_json


def test_a_result_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "results" / "x.json"
    write_json(path, {"a": 1})
    assert json.loads(path.read_text()) == {"a": 1}
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1} and os.listdir(path.parent) == ["x.json"]
