"""Which machine, which versions: what stands at the head of every result."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import tilewright


def package_version(name: str) -> str | None:
    """The installed version of a package, or None."""
    import importlib.metadata  # slow to import, and planning does without

    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def host_memory_bytes() -> int:
    """The memory of this machine, or of the container it is in."""
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(memory, int(text)) if text.isdecimal() else memory


def gpu_facts(index: int = 0) -> dict[str, Any] | None:
    """Name, driver, memory, power limit and clocks of a CUDA device, or None where there is none."""
    import torch

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(index)
    facts: dict[str, Any] = {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
    }
    try:
        facts.update(_counters(str(properties.uuid)))
    except Exception as error:  # counters are a bonus: without them the rest still stands
        facts["counters"] = f"unavailable: {error}"
    return facts


def _counters(uuid: str) -> dict[str, Any]:
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    return {
        "driver": pynvml.nvmlSystemGetDriverVersion(),
        "power_limit_watts": pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3,
        "sm_clock_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
        "max_sm_clock_mhz": pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM),
    }


def commit() -> str | None:
    """The commit of the source tree this package runs from, with "+" where it has uncommitted changes.

    A tree that was copied without its history can be told its commit by TILEWRIGHT_COMMIT.
    """
    if "TILEWRIGHT_COMMIT" in os.environ:
        return os.environ["TILEWRIGHT_COMMIT"]
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return None
    try:
        head = _git(root, "rev-parse", "--short=12", "HEAD")
        dirty = _git(root, "status", "--porcelain", "--untracked-files=no", "--", "src")
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+" if dirty else "")


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def describe() -> dict[str, Any]:
    """The head of a result file."""
    import torch

    return {
        "gpu": gpu_facts(),
        "torch": torch.__version__,
        "triton": package_version("triton"),
        "python": platform.python_version(),
        "tilewright": tilewright.__version__,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
