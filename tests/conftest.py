"""Without a GPU the Triton kernels themselves run here, under Triton's interpreter."""

import inspect
import os
import secrets
from importlib.metadata import PackageNotFoundError, version

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# What shapes are drawn from, others in every run; the workers of pytest-xdist inherit that of their parent.
os.environ.setdefault("TILEWRIGHT_SEED", str(secrets.randbelow(10**6)))
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
        _remember_types()
    for name in config.args:  # of which pytest-xdist says no more than that no tests ran
        if not config.option.pyargs and not os.path.exists(config.invocation_params.dir / name.split("::")[0]):
            pytest.exit(f"There is no {name.split('::')[0]}; give a file or a folder of tests.", 4)


def pytest_sessionstart(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        reporter.write_line(f"TILEWRIGHT_SEED={os.environ['TILEWRIGHT_SEED']}")  # a header is not shown with -q


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


def _remember_types() -> None:
    """Triton's interpreter makes every type anew for every value, and looks for builtins anew for every launch.

    Made once, they take a third of all its time less.
    """
    from triton.language import core
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):
        return
    make_type, make_tensor, unwrap = core.block_type.__init__, core.tensor.__init__, core._unwrap_if_constexpr
    find_dtype, is_builtin = interpreter._get_np_dtype, core.is_builtin
    types, dtypes, builtins = {}, {}, {}
    whole = {int, float, bool, str, type(None), core.dtype, core.block_type, core.tensor}

    def new_type(cls, element_ty, shape):
        if type(element_ty) is not core.dtype:  # what a pointer points to has more than a name
            return object.__new__(cls)
        key = element_ty.name, *[getattr(size, "value", size) for size in getattr(shape, "values", shape)]
        if key not in types:
            types[key] = object.__new__(cls)
        return types[key]

    def make_type_once(self, element_ty, shape):
        if "name" not in self.__dict__:
            make_type(self, element_ty, shape)

    def make_tensor_like_another(self, handle, type):
        like = type.__dict__.get("of_tensors")
        if like is None:
            make_tensor(self, handle, type)
            type.of_tensors = {name: value for name, value in self.__dict__.items() if name != "handle"}
        else:
            self.__dict__.update(like)
            self.handle = handle

    def find_dtype_once(of):
        scalar = of.element_ty if type(of) is core.block_type else of
        if type(scalar) is not core.dtype:
            return find_dtype(of)
        if scalar.name not in dtypes:
            dtypes[scalar.name] = find_dtype(of)
        return dtypes[scalar.name]

    def patch_builtins(package, builder, scope):
        if id(package) not in builtins:
            builtins[id(package)] = [each for each in inspect.getmembers(package) if is_builtin(each[1])]
        for name, member in builtins[id(package)]:
            interpreter._patch_attr(package, name, member, builder, scope)

    def unwrap_sooner(value):
        kind = type(value)
        return value.value if kind is core.constexpr else value if kind in whole else unwrap(value)

    core.block_type.__new__, core.block_type.__init__ = new_type, make_type_once
    core.tensor.__init__, core._unwrap_if_constexpr = make_tensor_like_another, unwrap_sooner
    interpreter._get_np_dtype, interpreter._patch_builtin = find_dtype_once, patch_builtins


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Whatever ran before it in the same process, a test draws the same numbers."""
    torch.manual_seed(0)
