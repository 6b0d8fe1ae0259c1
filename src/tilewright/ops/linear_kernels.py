"""The sum of a matrix over its rows, for the bias gradient of `linear`: one read at the memory's speed, in fixed order.

A program takes a band of columns and every so manieth tile of rows, and leaves one partial sum a column; torch adds the
few partial sums up.
"""

import functools

import torch
import triton
import triton.language as tl

from tilewright.ops import _op


@triton.jit(do_not_specialize=["rows"])
def column_sums(x, partials, rows: tl.int64, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < COLUMNS  # a constant, from which the compiler sees whole vectors
    program, programs = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in tl.range(program * ROWS, rows, programs * ROWS, num_stages=3):
        row = first + tl.arange(0, ROWS)
        at = row[:, None] * COLUMNS + column[None, :]
        total += tl.load(x + at, (row < rows)[:, None] & inside[None, :], 0.0).to(tl.float32)
    tl.store(partials + program * COLUMNS + column, tl.sum(total, 0), inside)


@functools.cache
def _launch(device: torch.device, columns: int, dtype: torch.dtype) -> tuple[int, int, _op.Launch]:
    """(bands of columns, programs a band, the launch)."""
    block = min(256, max(16, 1 << (columns - 1).bit_length()))
    bands = -(-columns // block)
    programs = max(1, 4 * _op.multiprocessors(device) // bands)
    return bands, programs, _op.Launch(column_sums, device, (columns, 16, block), 4)


def sum_rows(x: torch.Tensor) -> torch.Tensor:
    """The sum of a packed matrix over its rows, in float32."""
    bands, programs, launch = _launch(x.device, x.shape[1], x.dtype)
    partials = x.new_empty((programs, x.shape[1]), dtype=torch.float32)
    launch((bands, programs), (x, partials), (x.shape[0],))
    return partials.sum(0)
