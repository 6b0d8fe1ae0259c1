"""Text to train on that every machine has."""

from __future__ import annotations

import os
from pathlib import Path


def corpus(length: int) -> bytes:
    """Real text that every machine has: the sources of Python's standard library, in alphabetical order."""
    text = bytearray()
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= length:
            break
    return bytes(text[:length])
