"""How `quantized_linear` is launched: which kernel, in tiles of which size.

Up to `MOST_ROWS` rows of x a kernel unpacks the weight on its way to the tensor cores. Beyond, where the matmul takes
longer than another pass over the weight, it is unpacked once and cuBLAS multiplies.
"""

from __future__ import annotations

import functools
import math
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.ops.quantized_linear.reference import span_of
from tilewright.runtime import dispatch

MOST_ROWS = 256
HALVES = (torch.bfloat16, torch.float16)
_BLOCK = 4096  # weights that a program unpacks


class Inputs(NamedTuple):
    """A linear layer with a packed weight; x and the residual are of one dtype, of 16 bits."""

    x: Tensor
    weight: Tensor
    scale: Tensor
    zero: Tensor | None
    bias: Tensor | None
    residual: Tensor | None


class Packed(NamedTuple):
    """A packed weight, to be unpacked to `dtype`."""

    weight: Tensor
    scale: Tensor
    zero: Tensor | None
    dtype: torch.dtype


@dataclass(frozen=True)
class Tiles:
    """What a program of a matmul takes: outputs, rows of x, and `slices` of `block_k` weights of a row a step.

    For int4 a slice is a span. The slices are a multiple of the warps.
    """

    block_n: int
    block_m: int
    block_k: int
    slices: int
    stages: int
    warps: int


def tiles(rows: int, group: int | None) -> Tiles:
    """The tiles for this many rows of x; `group` of int4.

    >>> tiles(1, None), tiles(40, 64).block_m
    (Tiles(block_n=16, block_m=8, block_k=128, slices=4, stages=4, warps=4), 32)
    """
    block_m = next((size for size in (8, 16) if rows <= size), 32)
    block_n = {8: 16, 16: 32}.get(block_m, 64)
    if group is None:
        return Tiles(block_n, block_m, 128 if block_m <= 16 else 64, 4, 4, 4)
    span = span_of(group)
    slices = (512 if block_m <= 16 else 256) // span
    return Tiles(32 if block_m == 8 else block_n, block_m, span, max(4, slices), 4, 4)


@functools.cache
def matmul_launch(
    device: torch.device, dtypes: tuple[Any, ...], unit: int, even: bool, chosen: Tiles, group: int | None
) -> dispatch.Launch:
    """The kernel for arguments of these dtypes: x, weight, scale, zero, bias, residual.

    `unit` divides the strides of x and, of 8 bits, of the weight. `even`: the steps fit into the inner dimension.
    `group` is that of int4.
    """
    from tilewright.ops.quantized_linear import kernels

    block_n, block_m, block_k, slices, stages, warps = astuple(chosen)
    if group:
        constants = (group, block_n, block_m, slices, stages, unit, even)
        return dispatch.Launch(kernels.tilewright_quantized_linear_matmul_4bit, device, constants, warps)
    constants = (dtypes[1] == torch.float8_e4m3fn, block_n, block_m, block_k, slices, stages, unit, even)
    return dispatch.Launch(kernels.tilewright_quantized_linear_matmul_8bit, device, constants, warps)


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
    """``x @ weight^T + bias + residual``."""
    x, weight, scale, zero, bias, residual = inputs
    columns = len(weight)
    matrix = x.reshape(-1, x.shape[-1])
    added = None if residual is None else residual.reshape(-1, columns)
    if len(matrix) > MOST_ROWS:
        y = _unpack_and_multiply(inputs._replace(x=matrix, residual=added))
    else:
        y = matrix.new_empty(len(matrix), columns)
        if len(matrix):
            multiply(inputs._replace(x=matrix, residual=added), y, tiles(len(matrix), group_of(weight, scale)))
    return y.view(*x.shape[:-1], columns)


def group_of(weight: Tensor, scale: Tensor) -> int | None:
    """How many weights of a row share a scale; None where all do."""
    return 2 * weight.shape[1] // len(scale) if weight.dtype == torch.uint8 else None


def multiply(inputs: Inputs, y: Tensor, chosen: Tiles) -> None:
    """Write the result of at least one row to `y`, in tiles of this size."""
    weight, scale, zero, bias = dispatch.packed((inputs.weight, inputs.scale, inputs.zero, inputs.bias))
    x, residual = walkable(inputs.x), None if inputs.residual is None else walkable(inputs.residual)
    rows, inner = x.shape
    columns = len(weight)
    even = inner % (chosen.slices * chosen.block_k) == 0
    unit = math.gcd(16, inner, x.stride(0))
    tensors = [x, weight, scale, zero, bias, residual, y]
    types = dispatch.dtypes(tensors)
    if weight.dtype == torch.float8_e4m3fn:
        tensors[1] = weight.view(torch.uint8)
    if weight.dtype != torch.uint8:
        del tensors[3]
    launch = matmul_launch(x.device, types, unit, even, chosen, group_of(weight, scale))
    grid = (-(-columns // chosen.block_n), -(-rows // chosen.block_m))
    launch(grid, tensors, (rows, columns, inner, x.stride(0), 0 if residual is None else residual.stride(0)))


def walkable(matrix: Tensor) -> Tensor:
    """The matrix as a kernel can read it: elements of a row side by side, from a multiple of 16 bytes on."""
    if matrix.stride(1) == 1 and matrix.data_ptr() % 16 == 0 and not matrix.is_neg():
        return matrix
    return matrix.resolve_neg().clone(memory_format=torch.contiguous_format)


def _unpack_and_multiply(inputs: Inputs) -> Tensor:
    x, weight, scale, zero, bias, residual = inputs
    matrix = dequantize(Packed(weight, scale, zero, x.dtype))
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
