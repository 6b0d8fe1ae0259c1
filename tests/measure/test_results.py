import errno
import json
import os

import numpy as np
import pytest

from tilewright.errors import UserError
from tilewright.measure.results import write_json
from tilewright.train.tokens import write_tokens


def test_a_result_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "results" / "x.json"
    write_json(path, {"a": 1})
    assert json.loads(path.read_text()) == {"a": 1}
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1} and os.listdir(path.parent) == ["x.json"]


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_the_umask_is_respected(tmp_path, umask):
    before = os.umask(umask)
    try:
        write_json(tmp_path / "x.json", {})
        write_tokens(tmp_path / "x.tokens", [np.arange(3)], vocabulary=8)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o666 & ~umask}


def test_a_full_disk_is_one_sentence_and_leaves_the_old_file(tmp_path, monkeypatch):
    write_json(tmp_path / "x.json", {"a": 1})

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(UserError, match=r"Cannot write .*x\.json: No space left on device; make room and run again\."):
        write_json(tmp_path / "x.json", {"a": 2})
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": 1} and os.listdir(tmp_path) == ["x.json"]
