"""Make a model somebody else wrote faster: capture its graph, replace what a rule knows, prove each replacement.

The package is also the function of its name: `tilewright.optimize(model)`, see `optimize.api`.
"""

import sys
from types import ModuleType
from typing import Any

from tilewright.optimize.api import optimize, optimized
from tilewright.optimize.backend import tilewright_backend
from tilewright.optimize.report import Report
from tilewright.optimize.trainer import TilewrightCallback

__all__ = ["Report", "TilewrightCallback", "optimize", "optimized", "tilewright_backend"]


class _Callable(ModuleType):
    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return optimize(*arguments, **options)


sys.modules[__name__].__class__ = _Callable
