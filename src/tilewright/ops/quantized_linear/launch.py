"""How `quantized_linear` is launched: which kernel, in tiles of which size.

Up to `MOST_ROWS` rows of x a kernel unpacks the weight on its way to the tensor cores. Beyond, where the matmul takes
longer than another pass over the weight, it is unpacked once and cuBLAS multiplies. From `FEW_ROWS` rows on neither is
as fast as cuBLAS with a weight of 16 bits: unpacking, and not the memory, is then what takes time.
"""

from __future__ import annotations

import functools
import math
from dataclasses import astuple, dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.ops.activation.op import activation_of
from tilewright.ops.quantized_linear import few_rows
from tilewright.ops.quantized_linear.reference import span_of
from tilewright.runtime import dispatch

MOST_ROWS = 192  # of which the kernel takes as long as unpacking and cuBLAS do
FEW_ROWS = 48  # up to which a packed weight is faster than one of 16 bits and cuBLAS
HALVES = (torch.bfloat16, torch.float16)
_BLOCK = 4096  # weights that a program unpacks
_JOINED = 1024  # columns of a program that adds splits up


class Inputs(NamedTuple):
    """A linear layer with a packed weight; x and the residual are of one dtype, of 16 bits. No activation is ""."""

    x: Tensor
    weight: Tensor
    scale: Tensor
    zero: Tensor | None
    bias: Tensor | None
    residual: Tensor | None
    activation: str


class Packed(NamedTuple):
    """A packed weight, to be unpacked to `dtype`."""

    weight: Tensor
    scale: Tensor
    zero: Tensor | None
    dtype: torch.dtype


@dataclass(frozen=True)
class Tiles:
    """What a program of a matmul takes; `kernels.py` says what the fields are. Of int4 `block_k` is the span.

    The slices, or the chunks, are a multiple of the warps.
    """

    block_n: int
    block_m: int
    block_k: int
    slices: int
    chunks: int = 1
    splits: int = 1
    stages: int = 4
    warps: int = 4

    @property
    def columns(self) -> int:
        return self.block_n * self.chunks


def tiles(rows: int, columns: int, inner: int, group: int | None, processors: int, zeros: bool = False) -> Tiles:
    """The tiles for this many rows of x and a weight of these sizes; `group` and `zeros` of int4.

    The choice is by times on an H200, with weights of 8192 x 8192 and 4096 x 14336.

    >>> tiles(1, 8192, 8192, None, 132)
    Tiles(block_n=32, block_m=8, block_k=128, slices=4, chunks=1, splits=1, stages=4, warps=4)
    >>> tiles(32, 4096, 14336, 128, 132).splits
    4
    """
    if rows <= 8:
        return _few_rows(columns, group, processors)
    if group is not None:
        return _int4_tiles(rows, columns, inner, span_of(group), processors, zeros)
    if rows <= 16:
        chosen = Tiles(32, 16, 256, slices=1, chunks=4)
        return _split(chosen, rows, columns, inner, processors)
    if rows <= 64:
        chosen = Tiles(32, 32, 128, slices=1, chunks=4)
        return _split(chosen, rows, columns, inner, processors, most_resident=2)
    return _split(Tiles(32, 64, 64, slices=1, chunks=4), rows, columns, inner, processors)


def _few_rows(columns: int, group: int | None, processors: int) -> Tiles:
    """Warps beside each other along the inner dimension: enough of them to have the memory busy."""
    if group is None:
        block_n = 32 if columns // 32 > processors else 16
        return Tiles(block_n, 8, 128, slices=4)
    warps = 4 if columns // 16 * 4 >= 12 * processors else 8
    return Tiles(16, 8, span_of(group), slices=warps * 128 // span_of(group), warps=warps)


def _int4_tiles(rows: int, columns: int, inner: int, span: int, processors: int, zeros: bool) -> Tiles:
    if rows <= 16 and columns // 32 > processors:
        return Tiles(32, 16, span, slices=512 // span)
    if rows <= 32 or (zeros and span == 128):  # zero points beside 64 rows and so long a span take all registers
        chosen = Tiles(32, 16 if rows <= 16 else 32, span, slices=1, chunks=4)
        return _split(chosen, rows, columns, inner, processors, most_resident=2)
    return _split(Tiles(32, 64, span, slices=1, chunks=4, stages=3), rows, columns, inner, processors)


def _split(chosen: Tiles, rows: int, columns: int, inner: int, processors: int, most_resident: int = 1) -> Tiles:
    """The tiles with the inner dimension split until each processor has a program.

    Into up to four splits it is split further while none has more than `most_resident`.
    """
    programs = -(-columns // chosen.columns) * -(-rows // chosen.block_m)
    wanted = max(min(8, processors // programs), min(4, most_resident * processors // programs))
    return replace(chosen, splits=max(1, min(wanted, inner // (4 * chosen.block_k))))


@functools.cache
def matmul_launch(
    device: torch.device, dtypes: tuple[Any, ...], unit: int, even: bool, chosen: Tiles, group: int | None,
    activation: str,
) -> dispatch.Launch:  # fmt: skip
    """The kernel for arguments of these dtypes: x, weight, scale, zero, bias, residual, y.

    `unit` divides the strides of x and, of 8 bits, of the weight. `even`: all splits have as many whole steps. `group`
    is that of int4.
    """
    from tilewright.ops.quantized_linear import kernels

    block_n, block_m, block_k, *batch, warps = astuple(chosen)
    if group:
        constants = (group, block_n, block_m, *batch, unit, even, activation)
        return dispatch.Launch(kernels.tilewright_quantized_linear_matmul_4bit, device, constants, warps, chained=True)
    constants = (dtypes[1] == torch.float8_e4m3fn, block_n, block_m, block_k, *batch, unit, even, activation)
    return dispatch.Launch(kernels.tilewright_quantized_linear_matmul_8bit, device, constants, warps, chained=True)


@functools.cache
def join_launch(device: torch.device, dtypes: tuple[Any, ...], splits: int, activation: str) -> dispatch.Launch:
    """The kernel for arguments of these dtypes: bias, residual, y."""
    from tilewright.ops.quantized_linear import kernels

    constants = splits, _JOINED, activation
    return dispatch.Launch(kernels.tilewright_quantized_linear_join, device, constants, 4, chained=True)


@functools.cache
def dequantize_launch(device: torch.device, dtypes: tuple[Any, ...], unit: int, group: int | None) -> dispatch.Launch:
    """The kernel for arguments of these dtypes: weight, scale, zero, matrix; `group` of int4."""
    from tilewright.ops.quantized_linear import kernels

    if group:
        constants: tuple[Any, ...] = (group, _BLOCK // span_of(group))
        return dispatch.Launch(kernels.tilewright_quantized_linear_dequantize_4bit, device, constants, 4)
    constants = (dtypes[0] == torch.float8_e4m3fn, unit, _BLOCK)
    return dispatch.Launch(kernels.tilewright_quantized_linear_dequantize_8bit, device, constants, 4)


def forward(inputs: Inputs) -> Tensor:
    """``activation(x @ weight^T + bias) + residual``."""
    x, weight, scale, residual = inputs.x, inputs.weight, inputs.scale, inputs.residual
    columns = len(weight)
    matrix = x.reshape(-1, x.shape[-1])
    added = None if residual is None else residual.reshape(-1, columns)
    if len(matrix) > MOST_ROWS:
        y = _unpack_and_multiply(inputs._replace(x=matrix, residual=added))
    else:
        y = matrix.new_empty(len(matrix), columns)
        if len(matrix):
            rows = inputs._replace(x=matrix, residual=added)
            if not (few_rows.IS_ON and _multiply_few_rows(rows, y)):
                processors = dispatch.multiprocessors(x.device)
                group, zeros = group_of(weight, scale), inputs.zero is not None
                chosen = tiles(len(matrix), columns, matrix.shape[1], group, processors, zeros)
                multiply(rows, y, chosen)
    return y.view(*x.shape[:-1], columns)


def _multiply_few_rows(inputs: Inputs, y: Tensor) -> bool:
    """Write the result to `y` by the kernel in CUDA C++, where it takes the call: whether it did."""
    weight, scale, zero, bias = dispatch.packed((inputs.weight, inputs.scale, inputs.zero, inputs.bias))
    x, residual = walkable(inputs.x), None if inputs.residual is None else walkable(inputs.residual)
    if inputs.activation or few_rows.why_not(x, weight, scale):
        return False
    group, processors = group_of(weight, scale), dispatch.multiprocessors(x.device)
    config = few_rows.choose(
        len(x), len(weight), x.shape[1], weight.dtype, x.dtype, group, zero is not None, processors
    )  # fmt: skip
    module = few_rows.load(x.device, config)
    if module is None:
        return False
    few_rows.multiply(module, config, x, weight, scale, zero, bias, residual, y)
    return True


def group_of(weight: Tensor, scale: Tensor) -> int | None:
    """How many weights of a row share a scale; None where all do."""
    return 2 * weight.shape[1] // len(scale) if weight.dtype == torch.uint8 else None


def multiply(inputs: Inputs, y: Tensor, chosen: Tiles) -> None:
    """Write the result of at least one row to `y`, in tiles of this size."""
    weight, scale, zero, bias = dispatch.packed((inputs.weight, inputs.scale, inputs.zero, inputs.bias))
    x, residual = walkable(inputs.x), None if inputs.residual is None else walkable(inputs.residual)
    (rows, inner), columns, splits = x.shape, len(weight), chosen.splits
    residual_row = 0 if residual is None else residual.stride(0)
    out = y if splits == 1 else torch.empty(splits, rows, columns, dtype=torch.float32, device=x.device)
    added = (bias, residual) if splits == 1 else (None, None)
    codes = weight.view(torch.uint8) if weight.dtype == torch.float8_e4m3fn else weight
    launch = matmul_launch(
        x.device, dispatch.dtypes((x, weight, scale, zero, *added, out)), math.gcd(16, inner, x.stride(0)),
        inner % (splits * chosen.slices * chosen.block_k) == 0, chosen, group_of(weight, scale),
        inputs.activation if splits == 1 else "",
    )  # fmt: skip
    grid = (-(-columns // chosen.columns), -(-rows // chosen.block_m) * splits)
    middle = (zero,) if weight.dtype == torch.uint8 else ()
    launch(grid, (x, codes, scale, *middle, *added, out), (rows, columns, inner, x.stride(0), residual_row))
    if splits > 1:
        join = join_launch(x.device, dispatch.dtypes((bias, residual, y)), splits, inputs.activation)
        join((-(-columns // _JOINED), rows), (out, bias, residual, y), (rows, columns, residual_row))


def walkable(matrix: Tensor) -> Tensor:
    """The matrix as a kernel can read it: elements of a row side by side, from a multiple of 16 bytes on."""
    if matrix.stride(1) == 1 and matrix.data_ptr() % 16 == 0 and not matrix.is_neg():
        return matrix
    return matrix.resolve_neg().clone(memory_format=torch.contiguous_format)


def _unpack_and_multiply(inputs: Inputs) -> Tensor:
    x, weight, scale, zero, bias, residual, activation = inputs
    matrix = dequantize(Packed(weight, scale, zero, x.dtype))
    if activation:
        y = activation_of(F.linear(x, matrix, None if bias is None else bias.to(x.dtype)), activation)
        return y if residual is None else y + residual
    if residual is None:
        return F.linear(x, matrix, None if bias is None else bias.to(x.dtype))
    if bias is None:
        return torch.addmm(residual, x, matrix.t())
    return torch.addmm((residual.float() + bias.float()).to(x.dtype), x, matrix.t())


def dequantize(inputs: Packed) -> Tensor:
    """The matrix that a packed weight stands for."""
    weight, scale, zero = dispatch.packed(inputs[:3])
    columns = len(weight)
    if weight.dtype == torch.uint8:
        inner = 2 * weight.shape[1]
        matrix = torch.empty(columns, inner, dtype=inputs.dtype, device=weight.device)
        tensors = (weight, scale, zero, matrix)
        launch = dequantize_launch(weight.device, dispatch.dtypes(tensors), 1, group_of(weight, scale))
        launch((columns, -(-inner // _BLOCK)), tensors, (columns, inner))
        return matrix
    inner = weight.shape[1]
    matrix = torch.empty(columns, inner, dtype=inputs.dtype, device=weight.device)
    types = dispatch.dtypes((weight, scale, None, matrix))
    codes = weight.view(torch.uint8) if weight.dtype == torch.float8_e4m3fn else weight
    launch = dequantize_launch(weight.device, types, math.gcd(16, inner), None)
    launch((columns, -(-inner // _BLOCK)), (codes, scale, matrix), (inner,))
    return matrix
