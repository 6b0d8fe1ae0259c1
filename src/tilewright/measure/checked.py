"""Reads dataclasses from JSON that anybody may have written.

Every value has the type its field declares, and every number is finite and of a size that can be computed with. What
does not fit is a `UserError` that names the field. Text may hold anything: the code that shows it makes it safe.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from tilewright.errors import UserError
from tilewright.measure.markup import clean

_MOST, _TINIEST = 1e30, 1e-200  # no quantity of a study is larger, or nearer to 0
_DEPTH = 16  # of values whose shape nobody declares


@dataclass(frozen=True)
class Between:
    """Bounds of a number; `or_zero` allows 0 below the least."""

    least: float
    most: float
    or_zero: bool = False


@dataclass(frozen=True)
class Like:
    """A dictionary that holds the fields of a dataclass, `package.module:Class`, and perhaps others."""

    kind: str


@dataclass(frozen=True)
class One:
    """A single value: text, a number, true, false or nothing."""


Seconds = Annotated[float, Between(1e-12, 1e12)]
Amount = Annotated[float, Between(1e-18, _MOST, or_zero=True)]
Count = Annotated[int, Between(0, 1e18)]
Scalar = Annotated[Any, One()]
Point = dict[str, Scalar]


def read(kind: Any, tree: Any, where: str = "") -> Any:
    """A dataclass from a tree of JSON; fields that it does not know are left out.

    >>> from tilewright.tune.store.record import Difference
    >>> tree = {"part": "idle", "predicted": 1, "measured": 2.0, "unit": "s", "why": "gaps", "new": 0}
    >>> read(Difference, tree).more
    1.0
    >>> read(Difference, {**tree, "why": 7}, "differences[0]")
    Traceback (most recent call last):
    tilewright.errors.UserError: differences[0].why is 7; it must be text.
    """
    if not isinstance(tree, Mapping):
        _refuse(tree, where, "an object")
    hints, found = _hints(kind), {}
    for item in dataclasses.fields(kind):
        place = f"{where}.{item.name}" if where else item.name
        if item.name in tree:
            found[item.name] = _value(hints[item.name], tree[item.name], place)
        elif item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
            raise UserError(f"{place} is missing.")
    return kind(**found)


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def _value(hint: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _annotated(arguments[0], arguments[1], value, where)
    if origin in (types.UnionType, typing.Union):  # of one type and None
        (inner,) = (one for one in arguments if one is not type(None))
        return None if value is None else _value(inner, value, where)
    if origin is list:
        if not isinstance(value, list):
            _refuse(value, where, "a list")
        return [_value(arguments[0], each, f"{where}[{i}]") for i, each in enumerate(value)]
    if origin is dict:
        if not isinstance(value, Mapping):
            _refuse(value, where, "an object")
        return {name: _value(arguments[1], each, f"{where}.{clean(name, 40)}") for name, each in value.items()}
    if dataclasses.is_dataclass(hint):
        return read(hint, value, where)
    if hint is Any:
        return _anything(value, where, _DEPTH)
    return _single(hint, value, where)


def _annotated(hint: Any, rule: Any, value: Any, where: str) -> Any:
    if isinstance(rule, Like):
        module, _, name = rule.kind.partition(":")
        known = read(getattr(importlib.import_module(module), name), value, where)
        found = dataclasses.asdict(known)
        return {name: found.get(name, each) for name, each in _anything(value, where, _DEPTH).items()}
    if isinstance(rule, One):
        return _anything(value, where, 0)
    found = _value(hint, value, where)
    if not (rule.least <= found <= rule.most or (rule.or_zero and found == 0)):
        _refuse(value, where, f"a number from {rule.least:g} to {rule.most:g}")
    return found


def _single(hint: Any, value: Any, where: str) -> Any:
    if hint is str:
        if not isinstance(value, str):
            _refuse(value, where, "text")
        return value
    if hint is bool:
        if not isinstance(value, bool):
            _refuse(value, where, "true or false")
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        _refuse(value, where, "a number")
    size = abs(value)
    if not (size <= _MOST and math.isfinite(value)) or 0 < size < _TINIEST:
        _refuse(value, where, "a number of a size that can be measured")
    return value


def _anything(value: Any, where: str, depth: int) -> Any:
    """A value whose shape nobody declares."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float):
        return _single(float, value, where)
    if depth == 0 or not isinstance(value, list | Mapping):
        _refuse(value, where, "a single value" if depth == 0 else "a value of JSON")
    if isinstance(value, list):
        return [_anything(each, f"{where}[{i}]", depth - 1) for i, each in enumerate(value)]
    return {name: _anything(each, f"{where}.{clean(name, 40)}", depth - 1) for name, each in value.items()}


def _refuse(value: Any, where: str, wanted: str) -> typing.NoReturn:
    if isinstance(value, list | Mapping):
        shown = "a list" if isinstance(value, list) else "an object"
    elif isinstance(value, int) and abs(value) > _MOST:
        shown = f"a number of {value.bit_length()} bits"
    else:
        shown = repr(clean(value, 40)) if isinstance(value, str) else str(value)
    raise UserError(f"{where or 'the whole'} is {shown}; it must be {wanted}.")
