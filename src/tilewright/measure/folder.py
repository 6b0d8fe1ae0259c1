"""Where results and compiled kernels are cached."""

from __future__ import annotations

import os
from pathlib import Path

OFF = ("off", "0")  # values of TILEWRIGHT_CACHE


def cache_root() -> Path | None:
    """Returns the user's cache folder, which need not exist, or None where the cache is off."""
    named = os.environ.get("TILEWRIGHT_CACHE")
    if named in OFF:
        return None
    if named:
        return Path(named)
    base = Path(os.environ.get("XDG_CACHE_HOME") or "")
    return (base if base.is_absolute() else Path.home() / ".cache") / "tilewright"
