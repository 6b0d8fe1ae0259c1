"""The search: a space of levers, a trial for each point, a study of them all, an answer.

The package is also the function of its name: `tilewright.tune(...)` runs a study, see `tune.api`.
"""

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    def __call__(self, *arguments: Any, **options: Any) -> Any:
        from tilewright.tune.api import tune

        return tune(*arguments, **options)


sys.modules[__name__].__class__ = _Callable
