"""What a lever is: a field of a run that changes how it runs, and not the model that is trained.

A lever is declared once, beside its field (`plan/gpt.py`, `train/schema.py`), and `tilewright tune` finds it there. So
a new attention backend is a new word among a field's choices, and a new kind of lever is a new field: the search needs
no change for either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

# How far a value moves the numbers, from nothing but the order of additions to another rule of learning.
NUMERICS = {
    "same": "the same arithmetic, added up in another order",
    "rounding": "matmuls or activations in fewer bits",
    "state": "weights or optimizer states in fewer bits",
    "rule": "another rule of learning",
}


@dataclass(frozen=True)
class Lever:
    """What a search may put into a field.

    Args:
        values: where not all of the field's choices; for a number, a function of the run that lists them.
        numerics: of the values that do more than "same", what they do.
        devices: of the values that only one kind of device has, which: "cuda" or "cpu". "" stands for all of them.

    >>> Lever(numerics={"bf16": "rounding"}).moves("bf16"), Lever().moves("flash")
    ('rounding', 'same')
    """

    values: tuple[Any, ...] | Callable[[Any], tuple[Any, ...]] | None = None
    numerics: Mapping[Any, str] = field(default_factory=dict)
    devices: Mapping[Any, str] = field(default_factory=dict)

    def moves(self, value: Any) -> str:
        """How far a value moves the numbers: a word of NUMERICS."""
        return self.numerics.get(value, "same")

    def runs_on(self, value: Any, device: str) -> bool:
        return self.devices.get(value, self.devices.get("", device)) == device
