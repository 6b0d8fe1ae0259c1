"""What all tests of generation share."""

import pytest

from tilewright.runtime import dispatch


@pytest.fixture(autouse=True)
def _as_on_a_cpu(monkeypatch):
    """Run the ops as a user's CPU does, not under Triton's interpreter, which is slow and has tests of its own."""
    monkeypatch.setattr(dispatch, "INTERPRETED", False)
