"""Weights of 8 and 4 bits: `quantize_` a model in place, check what it costs, `save` and `load` it."""

from typing import Any

from tilewright.quantize.apply import quantize_
from tilewright.quantize.folder import read_folder
from tilewright.quantize.formats import Format, Fp8, Int4, Int8
from tilewright.quantize.huggingface import config_class
from tilewright.quantize.quality import Quality, check_quality
from tilewright.quantize.report import Report
from tilewright.quantize.store import load, save

__all__ = [
    "Format", "Fp8", "Int4", "Int8", "Quality", "Report", "TilewrightConfig", "check_quality", "load", "quantize_",
    "read_folder", "save",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """`TilewrightConfig`, which needs transformers: it is imported when it is first asked for."""
    if name != "TilewrightConfig":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return config_class()
    except ModuleNotFoundError as error:
        raise ImportError("TilewrightConfig needs transformers: pip install 'tilewright[hf]'.") from error
