"""Without a GPU the Triton kernels themselves run here, under Triton's interpreter."""

import os
from importlib.metadata import PackageNotFoundError, version

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
torch.set_num_threads(1)
# The same tree, the same examples: --hypothesis-profile=default looks for others.
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")


def _release(package: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in version(package).split("+")[0].split(".")[:2])
    except PackageNotFoundError:
        pytest.exit(f"The tests run Triton kernels and {package} is missing: pip install 'tilewright[test]'.", 4)


def pytest_configure(config: pytest.Config) -> None:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if _release("triton") < (3, 7) and interpreted and _release("numpy") >= (2, 4):
        pytest.exit("The interpreter of Triton 3.6 does not work with NumPy 2.4 or later: pip install 'numpy<2.4'.", 4)
    if interpreted:
        _patch_once_a_launch()
    for name in config.args:  # of which pytest-xdist says no more than that no tests ran
        if not config.option.pyargs and not os.path.exists(config.invocation_params.dir / name.split("::")[0]):
            pytest.exit(f"There is no {name.split('::')[0]}; give a file or a folder of tests.", 4)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """For `-n auto`: one more than there are cores, since some tests wait for processes of their own."""
    return min(16, len(os.sched_getaffinity(0)) + 1)


def _patch_once_a_launch() -> None:
    """Triton's interpreter puts its own functions in place at every call that a kernel makes: a third of all its time.

    Once a launch, and once more where a function sees the language by its other name, does the same.
    """
    from triton import language
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):
        return
    patch, patched = interpreter._patch_lang, set()

    def patch_once(function):
        langs = {id(value) for value in function.__globals__.values() if value is language or value is language.core}
        if langs <= patched:
            return interpreter._LangPatchScope()
        scope, outermost = patch(function), not patched
        patched.update(langs)
        if outermost:
            restore = scope.restore
            scope.restore = lambda: (patched.clear(), restore())
        return scope

    interpreter._patch_lang = patch_once


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Whatever ran before it in the same process, a test draws the same numbers."""
    torch.manual_seed(0)
