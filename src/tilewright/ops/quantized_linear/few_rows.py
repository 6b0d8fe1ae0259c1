"""`quantized_linear` of up to 32 rows in CUDA C++ (`few_rows.cu`): what it takes, its launch config, its launch.

It compiles, and is right in an emulator; on a GPU it has not run. So `IS_ON` is false, and the Triton kernels do the
work, until `tests/ops/test_quantized_linear_few_rows.py` has passed and `bench quantized_linear` has compared the two.
"""

from __future__ import annotations

import ctypes
import functools
import math
from ctypes import c_int, c_longlong
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.ops.quantized_linear.reference import span_of
from tilewright.runtime import hopper, nvrtc, pdl

IS_ON = False
MOST_ROWS = 32
OUTPUTS = 128  # of a block
THREADS = 256
_SOURCE = Path(__file__).with_suffix(".cu")
_FORMATS = {torch.int8: 0, torch.float8_e4m3fn: 1, torch.uint8: 2, torch.bfloat16: 3, torch.float16: 3}
_KINDS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_SHARED_BYTES = 227 * 1024  # that a block may have
_MOST_NUMBERS = 8 * 96 * 1024  # of x, in eight parts


class Sizes(ctypes.Structure):
    """The struct of sizes that the kernel takes."""

    _fields_ = (
        ("rows", c_int), ("columns", c_int), ("inner", c_int), ("scale", c_int), ("bias", c_int),
        ("x_row", c_longlong), ("residual_row", c_longlong),
    )  # fmt: skip


class Config(NamedTuple):
    """What the kernel is compiled for."""

    format: int
    group: int  # of int4
    zeros: bool
    half: bool  # float16, not bfloat16
    tiles: int  # of 8 rows of x
    cluster: int  # blocks that divide the inputs
    depth: int  # steps on their way
    blocks: int  # on a processor, which bounds the registers

    @property
    def step(self) -> int:
        """Inputs of a step."""
        return {2: span_of(self.group), 3: 32}.get(self.format, 64)

    @property
    def macros(self) -> dict[str, int]:
        return {name.upper(): int(value) for name, value in self._asdict().items()}

    def shared_bytes(self, rows: int, inner: int) -> int:
        """Return the shared memory of a block: its part of x, and its accumulators."""
        step = self.step
        steps = math.ceil(math.ceil(inner / step) / self.cluster)
        pad = 16 if step // (16 if self.format == 2 else 8) == 8 else 64
        return rows * (steps * step * 2 + pad) + 8 * self.tiles * OUTPUTS * 4


def choose(
    rows: int, columns: int, inner: int, weight: torch.dtype, dtype: torch.dtype, group: int | None, zeros: bool,
    processors: int,
) -> Config:  # fmt: skip
    """Return the launch config for these sizes.

    The inputs are divided among so many blocks that each processor has two or three of them.

    >>> choose(1, 8192, 8192, torch.int8, torch.bfloat16, None, False, 132).cluster
    8
    >>> choose(32, 57344, 8192, torch.uint8, torch.bfloat16, 128, False, 132)[4:]
    (4, 8, 4, 2)
    """
    tiles = next(count for count in (1, 2, 4) if rows <= 8 * count)
    blocks = 3 if tiles == 1 else 2
    config = Config(_FORMATS[weight], group or 128, zeros, dtype == torch.float16, tiles, 1, 4, blocks)
    steps = -(-inner // config.step)
    while config.cluster < 8 and steps >= 4 * config.cluster:
        is_full = -(-columns // OUTPUTS) * config.cluster >= 3 * processors
        if is_full and config.shared_bytes(rows, inner) <= _SHARED_BYTES // 2:
            break
        config = config._replace(cluster=2 * config.cluster)
    return config


def why_not(x: Tensor, weight: Tensor, scale: Tensor) -> str:
    """Say why the kernel does not take a matrix of rows; nothing where it does."""
    rows, inner = x.shape
    if rows > MOST_ROWS:
        return f"it takes {MOST_ROWS} rows at most"
    if inner % 16 or x.stride(0) % 8:
        return "the inputs are no multiple of 16, or the rows of x no multiple of 8 apart"
    if rows * inner > _MOST_NUMBERS:
        return "its part of x does not fit in shared memory"
    if weight.dtype == torch.uint8 and scale.dtype != torch.bfloat16:
        return "it takes scales of int4 in bfloat16"
    if x.dtype not in (torch.bfloat16, torch.float16) or (
        weight.dtype in (torch.bfloat16, torch.float16) and weight.dtype != x.dtype
    ):
        return "x is not of 16 bits, or the weight of 16 others"
    return ""


_modules: dict[tuple[torch.device, Config], nvrtc.Module | None] = {}


def load(device: torch.device, config: Config) -> nvrtc.Module | None:
    """Return the compiled kernel; None where there is none to be had, or not now."""
    key = device, config
    if key not in _modules and not torch.cuda.is_current_stream_capturing():
        _modules[key] = nvrtc.Module(_SOURCE, device.index, config.macros) if hopper.is_hopper(device) else None
    return _modules.get(key)


@functools.cache
def _kernel(module: nvrtc.Module, shared_bytes: int) -> nvrtc.Kernel:
    return module.kernel("tilewright_quantized_linear_few_rows", THREADS, shared_bytes)


def arguments(
    x: Tensor, weight: Tensor, scale: Tensor | None, zero: Tensor | None, bias: Tensor | None, residual: Tensor | None,
    y: Tensor,
) -> list[Any]:  # fmt: skip
    """Return what the kernel is given: addresses, and the sizes."""
    (rows, inner), columns = x.shape, len(weight)
    kinds = [0 if t is None else _KINDS[t.dtype] for t in (scale, bias)]
    sizes = Sizes(rows, columns, inner, *kinds, x.stride(0), 0 if residual is None else residual.stride(0))
    tensors = weight, scale, zero, x, bias, residual, y
    return [*(ctypes.c_void_p(None if t is None else t.data_ptr()) for t in tensors), sizes]


def multiply(
    module: nvrtc.Module, config: Config, x: Tensor, weight: Tensor, scale: Tensor | None, zero: Tensor | None,
    bias: Tensor | None, residual: Tensor | None, y: Tensor,
) -> None:  # fmt: skip
    """Write ``x @ W^T + bias + residual`` to `y`."""
    (rows, inner), columns = x.shape, len(weight)
    kernel = _kernel(module, config.shared_bytes(rows, inner))
    with pdl.launching(x.device) as is_early:
        given = arguments(x, weight, scale, zero, bias, residual, y)
        kernel(-(-columns // OUTPUTS) * config.cluster, given, begins_early=is_early)
