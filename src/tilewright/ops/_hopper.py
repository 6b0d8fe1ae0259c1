"""When the kernels of `hopper_kernels.cu` are to be had, and how they are started."""

from __future__ import annotations

import ctypes
import warnings
from pathlib import Path
from typing import Any

import torch

from tilewright.ops import _cuda, _op

SOURCE = Path(__file__).with_name("hopper_kernels.cu")
COLUMNS = 192  # of a tile; one of two neighbours loads half of what both need
PAIR_ROWS = 256  # of the tiles of two neighbours
_THREADS, _SHARED_BYTES = 384, 231_520
MACROS = {"SHARED_BYTES": _SHARED_BYTES, "PAIR_ROWS": PAIR_ROWS, "COLUMNS": COLUMNS}
_NAMES = (
    "gelu_mlp_value", "gelu_mlp_lean_value", "gelu_mlp_gradient", "gelu_mlp_lean_gradient", "linear_cross_entropy_add",
)  # fmt: skip

_loaded: dict[int, dict[str, _cuda.Kernel] | None] = {}  # by device; None where there are none, and never will be


def _kernels(device: int) -> dict[str, _cuda.Kernel] | None:
    """None where the device is no Hopper, where NVRTC is not to be found or does not take them, or not now."""
    if device in _loaded:
        return _loaded[device]
    if torch.cuda.get_device_capability(device) != (9, 0) or not _cuda.can_compile():
        _loaded[device] = None
    elif not torch.cuda.is_current_stream_capturing():  # for what is captured must not load anything
        try:
            module = _cuda.Module(SOURCE, device, MACROS)
            _loaded[device] = {name: module.kernel(name, _THREADS, _SHARED_BYTES) for name in _NAMES}
        except RuntimeError as error:
            if isinstance(error, _cuda.CompileError):
                _loaded[device] = None
            warnings.warn(f"The kernels for Hopper are not to be had, slower ones do their work: {error}", stacklevel=4)
    return _loaded.get(device)


def ready(device: torch.device) -> bool:
    """Whether there are kernels for it."""
    return device.type == "cuda" and device.index is not None and _kernels(device.index) is not None


def start(
    kernel: str, maps: tuple[Any, ...], vector: torch.Tensor | None, sizes: tuple[int, int, int],
    device: torch.device, *flags: bool,
) -> None:  # fmt: skip
    """`maps` are the kernel's, in its order; sizes are rows, columns and the inner dimension."""
    kernels = _kernels(device.index)
    assert kernels is not None
    address = ctypes.c_void_p(None if vector is None else vector.data_ptr())
    programs = min(_op.multiprocessors(device) // 2, -(-sizes[0] // PAIR_ROWS) * -(-sizes[1] // COLUMNS)) * 2
    kernels[kernel](programs, (*maps, address, *map(ctypes.c_int, (*sizes, *flags))))
