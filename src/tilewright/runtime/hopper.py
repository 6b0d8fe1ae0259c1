"""When kernels in CUDA C++ for Hopper are available, and how those of the GEMM, `cuda/gemm.cuh`, are started.

An op adds its source of such kernels by `add_gemms`. Each is compiled by itself, some two seconds each. The first one
that is wanted starts the others in the background: a model that needs one soon needs them all. `compile_ahead` starts
them earlier.
"""

from __future__ import annotations

import ctypes
import functools
import re
import warnings
from pathlib import Path
from typing import Any

import torch

from tilewright.runtime import dispatch, nvrtc

COLUMNS = 192  # of a tile; one of two neighbours loads half of what both need
PAIR_ROWS = 256  # of the tiles of two neighbours
STEP = 64  # of the inner dimension
MOST_SUMS = 8192  # columns whose sums a block has room for
_THREADS, _SHARED_BYTES = 384, 231_520
MACROS = {
    "SHARED_BYTES": _SHARED_BYTES,
    "PAIR_ROWS": PAIR_ROWS,
    "COLUMNS": COLUMNS,
    "BOUNDED_WAITS": nvrtc.BOUNDED_WAITS,
}
_ONLY = re.compile(r"defined\(ONLY_(\w+)\)")  # around each kernel of a source: its name in capitals

Kernels = dict[str, nvrtc.Kernel]
_loaded: dict[tuple[Any, ...], Kernels | None] = {}  # None where there are none, and never will be
_sources: list[Path] = []  # of kernels of the GEMM
_rare: list[str] = []  # words in names of those that are compiled when they are first wanted


def add_gemms(source: Path, rare: tuple[str, ...] = ()) -> None:
    """Add a source whose kernels `ready` and `start` know from then on, by the names of its ONLY_ macros.

    Those with a word of `rare` in their names are not compiled ahead.
    """
    _sources.append(source)
    _rare.extend(rare)


def gemms() -> dict[str, Path]:
    """Return the kernels of the GEMM that ops have added, and the source of each."""
    return {name.lower(): source for source in _sources for name in _ONLY.findall(source.read_text(encoding="utf-8"))}


@functools.cache
def gemm(name: str) -> tuple[Path, dict[str, int]]:
    """Return the source of a kernel, and the macros that leave it alone there."""
    return gemms()[name], {**MACROS, "ONLY": 1, f"ONLY_{name.upper()}": 1}


def kernels(
    device: torch.device, source: Path, names: tuple[str, ...], threads: int, shared_bytes: int, macros: dict[str, int]
) -> Kernels | None:
    """Those of a source, for blocks of so many threads and bytes of shared memory.

    None where the device is no Hopper, where NVRTC is not to be found or does not take them, or not now.
    """
    key = device, source, *macros.items()
    if key in _loaded:
        return _loaded[key]
    if device.type != "cuda" or device.index is None:
        return None
    if not is_hopper(device):
        _loaded[key] = None
    elif not torch.cuda.is_current_stream_capturing():  # for what is captured must not load anything
        try:
            module = nvrtc.Module(source, device.index, macros)
            _loaded[key] = {name: module.kernel(name, threads, shared_bytes) for name in names}
        except RuntimeError as error:
            if isinstance(error, nvrtc.CompileError):
                _loaded[key] = None
            warnings.warn(f"The kernels for Hopper are not to be had, slower ones do their work: {error}", stacklevel=4)
    return _loaded.get(key)


def is_hopper(device: torch.device) -> bool:
    """Return whether a GPU runs kernels for Hopper, and something can compile them."""
    return torch.cuda.get_device_capability(device) == (9, 0) and nvrtc.can_compile()


def compile_ahead(device: torch.device, source: Path | None = None, macros: dict[str, int] | None = None) -> None:
    """Begins to compile in the background: a source with its macros, or the kernels of the GEMM."""
    if device.type != "cuda" or device.index is None or not is_hopper(device):
        return
    if source is not None:
        nvrtc.compile_ahead(source, device.index, macros or {})
        return
    for name in gemms():
        if not any(word in name for word in _rare):
            compile_ahead(device, *gemm(name))


@functools.cache
def _key(name: str) -> tuple[Any, ...]:
    """What `kernels` knows a kernel of the GEMM by, but for the device."""
    source, macros = gemm(name)
    return source, *macros.items()


def _kernel(device: torch.device, name: str) -> nvrtc.Kernel | None:
    key = device, *_key(name)
    if key in _loaded:
        loaded = _loaded[key]
    else:
        source, macros = gemm(name)
        compile_ahead(device, source, macros)
        compile_ahead(device)
        loaded = kernels(device, source, (name,), _THREADS, _SHARED_BYTES, macros)
    return None if loaded is None else loaded[name]


def ready(device: torch.device, *names: str) -> bool:
    """Whether these kernels of the GEMM can run there, or all of them."""
    names = names or tuple(gemms())
    for name in names[1:]:  # while the first is waited for
        if (device, *_key(name)) not in _loaded:
            compile_ahead(device, *gemm(name))
    return all(_kernel(device, name) is not None for name in names)


def start(
    kernel: str, maps: tuple[Any, ...], vector: torch.Tensor | None, sizes: tuple[int, int, int],
    device: torch.device, *more: int,
) -> None:  # fmt: skip
    """`maps` are the kernel's, in its order; sizes are rows, columns and the inner dimension."""
    loaded = _kernel(device, kernel)
    assert loaded is not None
    address = ctypes.c_void_p(None if vector is None else vector.data_ptr())
    loaded(blocks(sizes, device), (*maps, address, *map(ctypes.c_int, (*sizes, *more))))


def blocks(sizes: tuple[int, int, int], device: torch.device) -> int:
    """That share the tiles."""
    return min(dispatch.multiprocessors(device) // 2, -(-sizes[0] // PAIR_ROWS) * -(-sizes[1] // COLUMNS)) * 2


def busy_share(rows: int, columns: int, device: torch.device) -> float:
    """Return which share of what the processors could compute in as many waves of tiles is wanted."""
    pairs = max(1, dispatch.multiprocessors(device) // 2)
    tiles = -(-rows // PAIR_ROWS) * -(-columns // COLUMNS)
    return rows * columns / (-(-tiles // pairs) * pairs * PAIR_ROWS * COLUMNS)
