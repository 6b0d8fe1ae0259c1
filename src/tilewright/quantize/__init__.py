"""Weights of 8 and 4 bits: `quantize_` a model in place, check what it costs, `save` and `load` it."""

from tilewright.quantize.apply import quantize_
from tilewright.quantize.folder import read_folder
from tilewright.quantize.formats import Format, Fp8, Int4, Int8
from tilewright.quantize.quality import Quality, check_quality
from tilewright.quantize.report import Report
from tilewright.quantize.store import load, save

__all__ = [
    "Format", "Fp8", "Int4", "Int8", "Quality", "Report", "check_quality", "load", "quantize_", "read_folder", "save",
]  # fmt: skip
