"""Tilewright makes PyTorch transformers run at what the GPU can give, and proves it.

Importing the package loads nothing: a layer is imported when it is first named, so that `tilewright.plan` and
`tilewright.hardware` work on a machine without torch.
"""

import importlib
from types import ModuleType

__version__ = "0.1.0"

_LAYERS = (
    "hardware", "plan", "measure", "ops", "tilesync", "nn", "quantize", "models", "optimize", "generate", "parallel",
    "train", "bench", "tune", "cli",
)  # fmt: skip


def __getattr__(name: str) -> ModuleType:
    if name in _LAYERS:
        return importlib.import_module(f"tilewright.{name}")
    raise AttributeError(f"module 'tilewright' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAYERS])
