import sys

import pytest

from tilewright.cli.main import main
from tilewright.runtime import dispatch


@pytest.fixture
def tilewright(monkeypatch, capsys):
    """A command in this process: its exit code, and what it printed to both streams, 80 columns wide."""
    monkeypatch.setattr(dispatch, "INTERPRETED", False)
    monkeypatch.setenv("COLUMNS", "80")

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["tilewright", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        found = capsys.readouterr()
        return ended.value.code, found.out, found.err

    return call
