"""What a kernel's PTX does before and after it waits for the kernel in front of it, by which tensors an address is made
of: registers are followed from the arguments on, in the order of the text."""

from __future__ import annotations

import re
from typing import NamedTuple

_REGISTER = re.compile(r"%[a-z]+\d+")
_ACCESS = re.compile(r"\b(ld\.global|st\.global|prefetch|cp\.async\S*global|cp\.async\.bulk|atom|red\.)")
_WAIT, _TRIGGER = "griddepcontrol.wait", "griddepcontrol.launch_dependents"


class Access(NamedTuple):
    """An instruction that goes to global memory, and the tensors that its address comes from."""

    line: int
    instruction: str
    tensors: frozenset[str]


class Order(NamedTuple):
    """Accesses before the wait and after it, and whether nothing but straight-line code leads to it."""

    before: list[Access]
    after: list[Access]
    is_straight: bool
    triggers: int  # at this line, the wait at the other
    waits: int


def order(ptx: str, arguments: list[str | None]) -> Order:
    """Follow the arguments of a kernel, whose names they are, into its accesses."""
    body = [line.split("//")[0] for line in ptx[ptx.index("{\n", ptx.index(".entry")) :].splitlines()]
    (waits,) = (number for number, line in enumerate(body) if _WAIT in line)
    (triggers,) = (number for number, line in enumerate(body) if _TRIGGER in line)
    made_of: dict[str, frozenset[str]] = {}
    accesses = []
    for number, line in enumerate(body):
        text = re.sub(r"^\s*@!?%?\w+\s+", "", line).strip()
        if not text or text.startswith("."):
            continue
        parameter = re.search(r"ld\.param\S*\s+(%\w+), \[\w+_param_(\d+)\]", text)
        if parameter:
            name = arguments[int(parameter[2])] if int(parameter[2]) < len(arguments) else None
            made_of[parameter[1]] = frozenset(() if name is None else (name,))
            continue
        address = re.findall(r"\[([^\]]*)\]", text)
        registers = _REGISTER.findall(text)
        if _ACCESS.search(text) and address:
            place = address[-1] if text.startswith("cp.async.") and ".shared" in text else address[0]
            tensors = frozenset[str]().union(*(made_of.get(r, frozenset()) for r in _REGISTER.findall(place)))
            accesses.append(Access(number, text, tensors))
        elif registers:  # of a value that is loaded from elsewhere, too, it does no harm to know too much
            made_of[registers[0]] = frozenset[str]().union(*(made_of.get(r, frozenset()) for r in registers[1:]))
    early = [line for line in body[:waits] if re.search(r"\bbra\b|\bret\b|\bexit\b|^\$L", line)]
    before, after = ([a for a in accesses if (a.line < waits) == is_before] for is_before in (True, False))
    return Order(before, after, not early, triggers, waits)
