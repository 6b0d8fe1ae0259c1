"""Matrices of another size: cut off, or with zeros behind, in one pass that also rounds to another dtype.

cuBLAS takes several times as long where a size is no multiple of 8, so such a matmul runs on copies with zeros behind
them. `torch.nn.functional.pad` writes the zeros first and the matrix after, `.to()` is one more pass.

Floor: read the smaller of the two matrices, write the larger.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F

from tilewright.runtime import dispatch

VECTOR = 8  # elements of 16 bits: 16 bytes
_ELEMENTS = 2048  # of a tile
Tensor = torch.Tensor


def round_up(size: int) -> int:
    """Return the next multiple of 8.

    >>> round_up(9), round_up(8)
    (16, 8)
    """
    return -(-size // VECTOR) * VECTOR


def resize_matrix(x: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Return a matrix of another size and dtype, without a graph: cut off, or with zeros behind.

    >>> resize_matrix(torch.ones(1, 3), 2, 2, torch.float32)
    tensor([[1., 1.],
            [0., 0.]])
    """
    if x.shape == (rows, columns):
        return x.detach().to(dtype).contiguous()
    if not dispatch.runs_kernel(x) or not x.numel() or not rows * columns:
        return F.pad(x.detach(), (0, columns - x.shape[1], 0, rows - x.shape[0])).to(dtype)
    out = x.new_empty((rows, columns), dtype=dtype)
    (matrix,) = dispatch.packed((x.detach(),))
    launch, tile_rows, bands = _resize_launch(x.device, x.dtype, dtype, x.shape[1], columns)
    launch((bands * -(-rows // tile_rows), 1), (matrix, out), (len(x), rows))
    return out


@functools.cache
def _resize_launch(
    device: torch.device, source: torch.dtype, target: torch.dtype, columns_in: int, columns: int
) -> tuple[dispatch.Launch, int, int]:
    """(the launch, rows of a tile, tiles beside each other)."""
    from tilewright.ops.linear.kernels import tilewright_linear_resize

    block = min(512, max(16, 1 << (columns - 1).bit_length()))
    constants = (columns_in, columns, _ELEMENTS // block, block)
    return dispatch.Launch(tilewright_linear_resize, device, constants, 4), _ELEMENTS // block, -(-columns // block)


class _Resize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: int, columns: int) -> Tensor:
        ctx.size = x.shape
        return resize_matrix(x, rows, columns, x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return _Resize.apply(gradient, *ctx.size), None, None  # type: ignore[no-untyped-call]


def pad(x: Tensor, *dimensions: int) -> Tensor:
    """Return the tensor with zeros behind it in these dimensions, up to the next multiple of 8.

    >>> pad(torch.ones(3, 9), 1).shape
    torch.Size([3, 16])
    """
    shape = [round_up(size) if i in [d % x.ndim for d in dimensions] else size for i, size in enumerate(x.shape)]
    return resize(x, shape)


def resize(x: Tensor, shape: list[int]) -> Tensor:
    """Return the tensor with another first and last size, or only another last one: cut off, or with zeros behind."""
    if list(x.shape) == shape:
        return x
    columns = shape[-1]
    if x.ndim == 2:
        return _Resize.apply(x, shape[0], columns)  # type: ignore[no-any-return, no-untyped-call]
    matrix = x.reshape(-1, x.shape[-1])
    return _Resize.apply(matrix, len(matrix), columns).view(shape)  # type: ignore[no-any-return, no-untyped-call]
