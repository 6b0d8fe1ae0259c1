"""The formats by name, as files name them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tilewright.errors import UserError
from tilewright.quantize.formats.base import Format
from tilewright.quantize.formats.fp8 import Fp8
from tilewright.quantize.formats.int4 import Int4
from tilewright.quantize.formats.int8 import Int8

FORMATS: dict[str, type[Format]] = {kind.name: kind for kind in (Int8, Fp8, Int4)}


def format_of(options: Any, name: str = "the layer") -> Format:
    """The format that `Format.options` described; raise where it is unknown.

    >>> format_of(Int4(group=64).options())
    Int4(search=False, group=64, zeros=False)
    """
    found = options.get("format") if isinstance(options, Mapping) else options
    if not isinstance(options, Mapping) or not isinstance(found, str) or found not in FORMATS:
        raise UserError(f"{name} has the format {str(found)[:40]!r}, which is unknown; known are {', '.join(FORMATS)}.")
    kind = FORMATS[found]
    if options.get("version") != kind.version:
        raise UserError(
            f"{name} has version {str(options.get('version'))[:40]} of {kind.name}, and this Tilewright reads "
            f"{kind.version}; quantize the model again."
        )
    given = {key: value for key, value in options.items() if key not in ("format", "version")}
    fields = {field.name for field in dataclasses.fields(kind)} - {"search"}  # which a reader need not know
    if set(given) != fields:
        raise UserError(f"{name} does not say {', '.join(sorted(fields ^ set(given)))} of {kind.name}; write it again.")
    return kind(**given)
