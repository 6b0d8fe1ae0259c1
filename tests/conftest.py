"""Without a GPU the Triton kernels themselves run here, under Triton's interpreter."""

import os
import secrets
import time
import zlib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

import interpreter

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Inductor would compile a program for each vector extension of the processor, to see whether the compiler knows it: in
# every folder of its cache, of which many tests have one of their own, 15 seconds of a core.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# What shapes are drawn from, others in every run; the workers of pytest-xdist inherit that of their parent.
os.environ.setdefault("TILEWRIGHT_SEED", str(secrets.randbelow(10**6)))
torch.set_num_threads(1)
_BEGAN = time.monotonic()
# The same tree, the same examples: --hypothesis-profile=default looks for others.
# Nor does a busy machine make one fail: no example has a time limit.
settings.register_profile("repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repeatable")


def _release(package: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in version(package).split("+")[0].split(".")[:2])
    except PackageNotFoundError:
        pytest.exit(f"The tests run Triton kernels and {package} is missing: pip install 'tilewright[test]'.", 4)


# For --fast. These start processes, compile or wait:
SLOW = (
    "tests/bench/test_shapes", "tests/cli/test_commands", "tests/cli/test_output_lost", "tests/cli/test_train",
    "tests/cli/test_tune", "tests/cli/test_export", "tests/cli/test_import",
    "tests/measure/test_compile_cache", "tests/measure/test_profile", "tests/measure/test_work",
    "tests/nn/test_self_attention", "tests/ops/test_attention_hopper", "tests/ops/test_compile_kernels",
    "tests/ops/test_self_attention", "tests/parallel/test_faults", "tests/runtime/test_extension",
    "tests/runtime/test_hopper", "tests/tilesync/test_persistent",
    "tests/train/test_checkpoint", "tests/train/test_data",
    "tests/train/test_loop", "tests/train/test_profile", "tests/train/test_resume", "tests/train/test_world",
    "tests/tune/proof/test_prove", "tests/tune/report/test_page", "tests/tune/store/test_ledger",
    "tests/tune/test_faults", "tests/tune/test_meshes", "tests/tune/test_study", "tests/tune/worker/test_forkserver",
    "tests/tune/worker/test_process", "tests/tune/worker/test_ranks", "tests/tune/worker/test_trial",
)  # fmt: skip
# These run kernels under the interpreter, of which there are thousands of cases: so many of them are drawn by the seed.
SAMPLED = ("tests/ops/", "tests/runtime/", "tests/nn/", "tests/models/", "tests/optim/", "tests/train/test_optimizers")
ONE_IN = 30
OF_GPUS = ("needs a GPU", "needs a Hopper")  # how the reason begins why a machine without one skips a test
ENOUGH = 120.0  # seconds after which no other test begins, so that the last ones end within three minutes


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="leave out what takes long, and draw a few kernel tests")
    parser.addoption("--gpu-alone", action="store_true", help="leave out what is tested without a GPU as well")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    path = str(collection_path.relative_to(config.rootpath)) if collection_path.is_relative_to(config.rootpath) else ""
    return True if config.getoption("--fast") and path.startswith(SLOW) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--fast"):
        parts: tuple[list[pytest.Item], list[pytest.Item]] = [], []
        for item in items:
            number = zlib.crc32(f"{os.environ['TILEWRIGHT_SEED']} {item.nodeid}".encode())
            parts[item.nodeid.startswith(SAMPLED) and number % ONE_IN > 0].append(item)
        items[:] = parts[0]
        config.hook.pytest_deselected(items=parts[1])

    if config.getoption("--gpu-alone"):
        left_out = [item for item in items if not _needs_gpu(item)]
        items[:] = [item for item in items if _needs_gpu(item)]
        config.hook.pytest_deselected(items=left_out)


def _needs_gpu(item: pytest.Item) -> bool:
    return any(str(mark.kwargs.get("reason", "")).startswith(OF_GPUS) for mark in item.iter_markers("skipif"))


@pytest.hookimpl(trylast=True)
def pytest_runtest_logfinish() -> None:
    """A kernel that traps takes the GPU from its process. A worker of pytest-xdist ends then, and another goes on."""
    if "PYTEST_XDIST_WORKER" in os.environ and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            os._exit(1)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.config.getoption("--fast") and time.monotonic() - _BEGAN > ENOUGH:
        pytest.skip("three minutes are nearly over; `make test` runs everything")


def pytest_configure(config: pytest.Config) -> None:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if _release("triton") < (3, 7) and interpreted and _release("numpy") >= (2, 4):
        pytest.exit("The interpreter of Triton 3.6 does not work with NumPy 2.4 or later: pip install 'numpy<2.4'.", 4)
    if interpreted:
        interpreter.quicken()
    for name in config.args:  # of which pytest-xdist says no more than that no tests ran
        if not config.option.pyargs and not os.path.exists(config.invocation_params.dir / name.split("::")[0]):
            pytest.exit(f"There is no {name.split('::')[0]}; give a file or a folder of tests.", 4)


def pytest_sessionstart(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        reporter.write_line(f"TILEWRIGHT_SEED={os.environ['TILEWRIGHT_SEED']}")  # a header is not shown with -q
        if session.config.getoption("--fast"):
            reporter.write_line(f"--fast: without what takes long, and one in {ONE_IN} of the kernel tests")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """For `-n auto`: one more than there are cores, since some tests wait for processes of their own."""
    return min(16, len(os.sched_getaffinity(0)) + 1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Whatever ran before it in the same process, a test draws the same numbers."""
    torch.manual_seed(0)
