"""What can be changed about a training run without changing the model."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from tilewright.errors import UserError
from tilewright.plan.gpt import GPT_BLOCKS


@dataclass(frozen=True)
class Setting:
    """One point of the space."""

    gpt_block: str
    compile: bool

    def __str__(self) -> str:
        return f"{self.gpt_block}, {'compile' if self.compile else 'eager'}"


MODES = {"all": (False, True), "eager": (False,), "compile": (True,)}


def settings(mode: str = "all") -> list[Setting]:
    """Every combination known today, or those of one mode; what a user has without Tilewright comes first.

    >>> [str(setting) for setting in settings()]
    ['standard, eager', 'standard, compile', 'optimized, eager', 'optimized, compile']
    """
    if mode not in MODES:
        raise UserError(f"mode is {mode!r}; choose {', '.join(MODES)}.")
    return [Setting(*point) for point in itertools.product(GPT_BLOCKS, MODES[mode])]
