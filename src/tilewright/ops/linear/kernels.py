"""The sum of a matrix over its rows, for the bias gradient of `linear`: one read at the memory's speed, in fixed order;
and of three matrices, which one pass also puts beside each other.

Of n programs below each other, each takes a band of columns and every n-th tile of rows, and leaves one partial sum a
column; those are then added up by the same kernel, in narrow bands.

And the copy of a matrix in another size, for `padding.py`.
"""

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from tilewright.runtime import dispatch

_ROWS = 16
_NARROW = 32  # columns of a band of partial sums


@triton.jit
def _band(
    x, copy, partials, rows, band, COLUMNS: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The sums of one band of `x`, and a copy of it, both from column FIRST of a matrix WIDTH wide."""
    column = band * BLOCK + tl.arange(0, BLOCK)
    inside = column < COLUMNS  # a constant, from which the compiler sees whole vectors
    program, programs = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in tl.range(program * ROWS, rows, programs * ROWS, num_stages=3):
        row = first + tl.arange(0, ROWS)
        here = (row < rows)[:, None] & inside[None, :]
        value = tl.load(x + row[:, None] * COLUMNS + column[None, :], here, 0.0)
        if copy is not None:
            tl.store(copy + row[:, None] * WIDTH + FIRST + column[None, :], value, here)
        total += value.to(tl.float32)
    tl.store(partials + program * WIDTH + FIRST + column, tl.sum(total, 0), inside)


@triton.jit(do_not_specialize=["rows"])
def tilewright_linear_column_sums(
    x, partials, rows: tl.int64, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    _band(x, None, partials, rows, tl.program_id(0), COLUMNS, 0, COLUMNS, ROWS, BLOCK)


@triton.jit(do_not_specialize=["rows"])
def tilewright_linear_pack_columns(
    q, k, v, packed, partials, rows: tl.int64, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    band = tl.program_id(0)
    to_k: tl.constexpr = (Q + BLOCK - 1) // BLOCK
    to_v: tl.constexpr = to_k + (K + BLOCK - 1) // BLOCK
    if band < to_k:
        _band(q, packed, partials, rows, band, Q, 0, Q + K + V, ROWS, BLOCK)
    elif band < to_v:
        _band(k, packed, partials, rows, band - to_k, K, Q, Q + K + V, ROWS, BLOCK)
    else:
        _band(v, packed, partials, rows, band - to_v, V, Q + K, Q + K + V, ROWS, BLOCK)


@triton.jit(do_not_specialize=["rows_in", "rows"])
def tilewright_linear_resize(
    x, out, rows_in: tl.int64, rows: tl.int64, COLUMNS_IN: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write one tile of `out`: what `x` has there, else zeros. Constants let the compiler see whole vectors."""
    bands: tl.constexpr = (COLUMNS + BLOCK - 1) // BLOCK
    column = tl.program_id(0) % bands * BLOCK + tl.arange(0, BLOCK)
    top = (tl.program_id(0) // bands).to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)
    there = (row < rows_in - top)[:, None] & (column < COLUMNS_IN)[None, :]
    value = tl.load(x + top * COLUMNS_IN + (row[:, None] * COLUMNS_IN + column[None, :]), there, 0.0)
    inside = (row < rows - top)[:, None] & (column < COLUMNS)[None, :]
    place = out + top * COLUMNS + (row[:, None] * COLUMNS + column[None, :])
    tl.store(place, value.to(out.dtype.element_ty), inside)


@functools.cache
def _launch(device: torch.device, columns: tuple[int, ...], dtype: torch.dtype) -> tuple[int, int, dispatch.Launch]:
    """(bands of columns, programs a band, the launch)."""
    block = min(256, max(16, 1 << (max(columns) - 1).bit_length()))
    bands = sum(-(-each // block) for each in columns)
    programs = max(1, 4 * dispatch.multiprocessors(device) // bands)
    kernel = tilewright_linear_column_sums if len(columns) == 1 else tilewright_linear_pack_columns
    return bands, programs, dispatch.Launch(kernel, device, (*columns, _ROWS, block), 4)


@functools.cache
def _add_up(device: torch.device, columns: int) -> dispatch.Launch:
    return dispatch.Launch(tilewright_linear_column_sums, device, (columns, 64, _NARROW), 4)


def foresee_add_up(device: torch.device, columns: int) -> None:
    """Begins to compile `add_up` of so many columns."""
    launch = _add_up(device, columns)
    if launch.is_new:
        launch.compile_ahead((torch.float32, torch.float32), (1,))


def add_up(partials: torch.Tensor) -> torch.Tensor:
    """The sum of some hundreds of rows of float32."""
    total = partials.new_empty(partials.shape[1])
    launch = _add_up(partials.device, partials.shape[1])
    launch((-(-partials.shape[1] // _NARROW), 1), (partials, total), (partials.shape[0],))
    return total


def sum_rows(x: torch.Tensor) -> torch.Tensor:
    """The sum of a packed matrix over its rows, in float32."""
    bands, programs, launch = _launch(x.device, (x.shape[1],), x.dtype)
    partials = x.new_empty((programs, x.shape[1]), dtype=torch.float32)
    launch((bands, programs), (x, partials), (x.shape[0],))
    return add_up(partials)


def pack_and_sum(parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Three packed matrices beside each other in one, and its sum over the rows, in float32."""
    columns = tuple(part.shape[1] for part in parts)
    bands, programs, launch = _launch(parts[0].device, columns, parts[0].dtype)
    packed = parts[0].new_empty((parts[0].shape[0], sum(columns)))
    partials = packed.new_empty((programs, packed.shape[1]), dtype=torch.float32)
    launch((bands, programs), (*parts, packed, partials), (packed.shape[0],))
    return packed, add_up(partials)
