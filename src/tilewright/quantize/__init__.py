"""Weights of 8 and 4 bits: `quantize_` a model in place, `save` and `load` it."""

from tilewright.quantize.apply import quantize_
from tilewright.quantize.formats import Format, Fp8, Int4, Int8
from tilewright.quantize.report import Report
from tilewright.quantize.store import load, save

__all__ = ["Format", "Fp8", "Int4", "Int8", "Report", "load", "quantize_", "save"]
