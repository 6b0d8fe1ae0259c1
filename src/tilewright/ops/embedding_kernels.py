"""The kernels of `embedding`, by how they move the data.

Forward: a program takes a tile of tokens by columns. Backward: a program takes one row of the table, or a part of it,
and walks over the tokens of that class, which sorting has put side by side, a tile of them at a time.

Sums are in COMPUTE: float32, or float64 for float64 input.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from tilewright.ops import _op


@triton.jit(do_not_specialize=["rows", "sequence", "classes"])
def forward(
    tokens, weight, position, out, rows: tl.int64, sequence: tl.int64, classes: tl.int64,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, DOUBLE: tl.constexpr,
):  # fmt: skip
    """out = weight[tokens] + position[row % sequence]"""
    COMPUTE: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    token = tl.load(tokens + row, row < rows, -1).to(tl.int64)
    known = (token >= 0) & (token < classes)
    value = tl.load(weight + token[:, None] * WIDTH + column[None, :], inside & known[:, None], float("nan"))
    value = value.to(COMPUTE)
    if position is not None:
        place = row % sequence
        value += tl.load(position + place[:, None] * WIDTH + column[None, :], inside, 0.0).to(COMPUTE)
    tl.store(out + row[:, None] * WIDTH + column[None, :], value.to(out.dtype.element_ty), inside)


@triton.jit
def backward(
    dout, order, starts, dweight, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, DOUBLE: tl.constexpr
):
    """dweight[v] = the sum of dout[order[i]] for i from starts[v] to starts[v + 1]"""
    COMPUTE: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    index = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first, last = tl.load(starts + index), tl.load(starts + index + 1)
    total = tl.zeros([ROWS, BLOCK], COMPUTE)
    for start in range(first, last, ROWS):
        at = start + tl.arange(0, ROWS)
        row = tl.load(order + at, at < last, 0)
        inside = (at < last)[:, None] & (column < WIDTH)[None, :]
        total += tl.load(dout + row[:, None] * WIDTH + column[None, :], inside, 0.0).to(COMPUTE)
    tl.store(dweight + index * WIDTH + column, tl.sum(total, 0).to(dweight.dtype.element_ty), column < WIDTH)


@functools.cache
def _launch(kernel: Any, device: torch.device, width: int, dtypes: tuple[Any, ...]) -> tuple[int, int, _op.Launch]:
    """(rows of a tile, tiles side by side, the launch)."""
    block = min(256, max(16, triton.next_power_of_2(width)))
    while block > 64 and -(-width // block) * block * 5 > width * 6:  # lanes without a column idle
        block //= 2
    rows = 2048 // block
    double = any(dtype == torch.float64 for dtype in dtypes)
    return rows, -(-width // block), _op.Launch(kernel, device, (width, rows, block, double), 4)


def gather(
    tokens: torch.Tensor, weight: torch.Tensor, position: torch.Tensor | None, dtype: torch.dtype, shape: torch.Size
) -> torch.Tensor:
    """The rows of the table for packed `tokens`, which had this shape."""
    classes, width = weight.shape
    out = weight.new_empty((*shape, width), dtype=dtype)
    tensors = (tokens, weight, position, out)
    rows, columns, launch = _launch(forward, weight.device, width, _op.dtypes(tensors))
    if out.numel():
        launch((-(-len(tokens) // rows), columns), tensors, (len(tokens), shape[-1], classes))
    return out


def scatter(tokens: torch.Tensor, dout: torch.Tensor, classes: int, dtype: torch.dtype) -> torch.Tensor:
    """What each row of the table gets of packed `dout`, a row a token; tokens outside of it get nothing anywhere."""
    width = dout.shape[1]
    dweight = dout.new_empty((classes, width), dtype=dtype)
    if not dweight.numel():
        return dweight
    ordered, order = torch.sort(tokens, stable=True)
    starts = torch.searchsorted(ordered, torch.arange(classes + 1, dtype=tokens.dtype, device=tokens.device))
    tensors = (dout, order, starts, dweight)
    _, columns, launch = _launch(backward, dout.device, width, _op.dtypes(tensors))
    launch((classes, columns), tensors, ())
    return dweight
