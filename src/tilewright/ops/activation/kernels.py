"""The kernels of `activation`, by how they move the data.

A program takes one tile, loads of it what it needs in vectors of 16 bytes, and stores the result: nothing is kept,
nothing is shared. In backward with a bias as many programs as the device holds walk down the rows instead, each in its
own block of columns: the bias stays in registers, and so do the sums of its gradient, which each program writes once,
for the caller to add up in a fixed order. Rows may lie apart in memory: the two halves of one tensor are
read, and their gradients written, where they are. Where rows are contiguous and nothing is a row's own, all elements
are taken as rows of a length that suits (FLAT), whatever the width is; `left` of them are behind the last whole one.

Arithmetic is in COMPUTE, float32 or float64 for float64 input, and in powers of two; SIZE is the input's bytes.
"""

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tilewright.runtime import dispatch
from tilewright.runtime.activation_kernels import value_and_slope
from tilewright.runtime.pdl_kernels import let_next_begin, wait_for_previous


@triton.jit
def _at(row, column, stride, VECTOR: tl.constexpr):
    """Offsets of a tile. The compiler cannot see that a stride is whole vectors, and would load element by element."""
    return tl.multiple_of(row * stride, VECTOR)[:, None] + column[None, :]


@triton.jit
def _load_bias(bias, column, WIDTH: tl.constexpr, GATED: tl.constexpr, COMPUTE: tl.constexpr):
    """What is added to gate and up, as tiles of one row; what is not there is never used."""
    gate_bias = tl.zeros([1, column.shape[0]], COMPUTE)
    up_bias = gate_bias
    if bias is not None:
        inside = (column < WIDTH)[None, :]
        gate_bias = tl.load(bias + column[None, :], inside, 0.0).to(COMPUTE)
        if GATED:
            up_bias = tl.load(bias + WIDTH + column[None, :], inside, 0.0).to(COMPUTE)
    return gate_bias, up_bias


@triton.jit
def _load(
    gate, up, bias, gate_bias, up_bias, row, column, inside, gate_stride, up_stride,
    GATED: tl.constexpr, VECTOR: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Gate and up of a tile, with their bias; up is 1 where there is none."""
    z = tl.load(gate + _at(row, column, gate_stride, VECTOR), inside, 0.0).to(COMPUTE)
    y = 1.0
    if GATED:
        y = tl.load(up + _at(row, column, up_stride, VECTOR), inside, 0.0).to(COMPUTE)
    if bias is not None:
        z += gate_bias
        if GATED:
            y += up_bias
    return z, y


@triton.jit
def _forward_tile(
    gate, up, bias, out, gate_bias, up_bias, first, column, rows, width, gate_stride, up_stride,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, VECTOR: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    SIZE: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Stores the activation of a tile, of which `width` columns of `rows` rows exist."""
    row = first + tl.arange(0, ROWS)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    z, y = _load(
        gate, up, bias, gate_bias, up_bias, row, column, inside, gate_stride, up_stride, GATED, VECTOR, COMPUTE
    )  # fmt: skip
    value, _slope = value_and_slope(z, ACTIVATION, SIZE)
    tl.store(out + _at(row, column, WIDTH, VECTOR), (value * y).to(out.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["rows", "left", "gate_stride", "up_stride"])
def tilewright_activation_forward(
    gate, up, bias, out, rows: tl.int64, left: tl.int32, gate_stride: tl.int64, up_stride: tl.int64,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, ACTIVATION: tl.constexpr,
    GATED: tl.constexpr, PACKED: tl.constexpr, FLAT: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out = activation(gate + bias) * (up + bias). PACKED: up lies behind gate, WIDTH further on in each row."""
    let_next_begin(PDL)
    COMPUTE: tl.constexpr = tl.float64 if SIZE == 8 else tl.float32
    COLUMNS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    first = (tl.program_id(0) // COLUMNS).to(tl.int64) * ROWS
    column = tl.program_id(0) % COLUMNS * BLOCK + tl.arange(0, BLOCK)
    if PACKED:
        up = gate + WIDTH
    gate_bias, up_bias = _load_bias(bias, column, WIDTH, GATED, COMPUTE)
    wait_for_previous(PDL)
    if FLAT and first + ROWS > rows:  # a mask that cuts vectors, for this program alone
        _forward_tile(
            gate, up, bias, out, gate_bias, up_bias, first, column, rows + 1, left, gate_stride, up_stride,
            WIDTH, ROWS, VECTOR, ACTIVATION, GATED, SIZE, COMPUTE,
        )  # fmt: skip
    else:
        _forward_tile(
            gate, up, bias, out, gate_bias, up_bias, first, column, rows, WIDTH, gate_stride, up_stride,
            WIDTH, ROWS, VECTOR, ACTIVATION, GATED, SIZE, COMPUTE,
        )  # fmt: skip


@triton.jit
def _backward_tile(
    dout, gate, up, bias, dgate, dup, gate_bias, up_bias, first, column, rows, width, gate_stride, up_stride,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, VECTOR: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    PACKED: tl.constexpr, SIZE: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Stores the gradients of a tile and returns them."""
    row = first + tl.arange(0, ROWS)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    z, y = _load(
        gate, up, bias, gate_bias, up_bias, row, column, inside, gate_stride, up_stride, GATED, VECTOR, COMPUTE
    )  # fmt: skip
    # Zero beyond the last row, and so are the gradients: nothing there is added to the bias's.
    g = tl.load(dout + _at(row, column, WIDTH, VECTOR), inside, 0.0).to(COMPUTE)
    value, slope = value_and_slope(z, ACTIVATION, SIZE)
    gate_gradient = g * y * slope
    up_gradient = g * value
    at = _at(row, column, 2 * WIDTH if PACKED else WIDTH, VECTOR)
    if dgate is not None:
        tl.store(dgate + at, gate_gradient.to(dgate.dtype.element_ty), inside)
    if dup is not None:
        tl.store(dup + at, up_gradient.to(dup.dtype.element_ty), inside)
    return gate_gradient, up_gradient


@triton.jit(do_not_specialize=["rows", "left", "gate_stride", "up_stride"])
def tilewright_activation_backward(
    dout, gate, up, bias, dgate, dup, partials, rows: tl.int64, left: tl.int32, gate_stride: tl.int64,
    up_stride: tl.int64,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, ACTIVATION: tl.constexpr,
    GATED: tl.constexpr, PACKED: tl.constexpr, FLAT: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The gradients of gate and up, those that are not None, and the sums of both over a program's rows."""
    COMPUTE: tl.constexpr = tl.float64 if SIZE == 8 else tl.float32
    COLUMNS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    group = (tl.program_id(0) // COLUMNS).to(tl.int64)
    column = tl.program_id(0) % COLUMNS * BLOCK + tl.arange(0, BLOCK)
    if PACKED:
        up = gate + WIDTH
        if dgate is not None:
            dup = dgate + WIDTH
    gate_bias, up_bias = _load_bias(bias, column, WIDTH, GATED, COMPUTE)
    if FLAT and (group + 1) * ROWS > rows:  # a mask that cuts vectors, for this program alone
        _backward_tile(
            dout, gate, up, bias, dgate, dup, gate_bias, up_bias, group * ROWS, column, rows + 1, left, gate_stride,
            up_stride, WIDTH, ROWS, VECTOR, ACTIVATION, GATED, PACKED, SIZE, COMPUTE,
        )  # fmt: skip
    elif bias is None:
        _backward_tile(
            dout, gate, up, bias, dgate, dup, gate_bias, up_bias, group * ROWS, column, rows, WIDTH, gate_stride,
            up_stride, WIDTH, ROWS, VECTOR, ACTIVATION, GATED, PACKED, SIZE, COMPUTE,
        )  # fmt: skip
    else:
        gate_sums = tl.zeros([ROWS, BLOCK], COMPUTE)
        up_sums = tl.zeros([ROWS, BLOCK], COMPUTE)
        for start in tl.range(group * ROWS, rows, (tl.num_programs(0) // COLUMNS).to(tl.int64) * ROWS, num_stages=4):
            gate_gradient, up_gradient = _backward_tile(
                dout, gate, up, bias, dgate, dup, gate_bias, up_bias, start, column, rows, WIDTH, gate_stride,
                up_stride, WIDTH, ROWS, VECTOR, ACTIVATION, GATED, PACKED, SIZE, COMPUTE,
            )  # fmt: skip
            gate_sums += gate_gradient
            up_sums += up_gradient
        if partials is not None:
            if GATED:
                at = partials + group * (2 * WIDTH) + column
                tl.store(at + WIDTH, tl.sum(up_sums, 0), column < WIDTH)
            else:
                at = partials + group * WIDTH + column
            tl.store(at, tl.sum(gate_sums, 0), column < WIDTH)


class Plan(NamedTuple):
    """A kernel and how its programs share the rows."""

    launch: dispatch.Launch
    rows: int  # of a tile
    columns: int  # how many tiles lie side by side
    most: int | None  # the most groups of programs, one below the other; None: one for each tile

    def groups(self, rows: int, left: int) -> int:
        """How many groups of programs `rows` rows take, and what is left behind them."""
        tiles = -(-rows // self.rows) + (left > 0)
        return tiles if self.most is None else min(tiles, self.most)


@functools.cache
def plan(
    kernel: Any, device: torch.device, width: int, dtypes: tuple[Any, ...], vector: int, activation: str, gated: bool,
    needs: tuple[bool, ...], flat: bool,
) -> Plan:  # fmt: skip
    """How a kernel runs on a gate, up and bias of these dtypes, where `needs` says which gradients are absent."""
    walks = kernel is tilewright_activation_backward and dtypes[2] is not None
    if dtypes[2] is not None:
        tile, most_columns = (1024, 1024) if walks else (4096, 512)
    else:
        tile = most_columns = 512 if kernel is tilewright_activation_backward else 1024
    block = min(most_columns, max(16, 1 << (width - 1).bit_length()))
    while block > 32 and -(-width // block) * block * 15 > width * 16:  # lanes without a column idle
        block //= 2
    rows, columns = tile // block, -(-width // block)
    packed = gated and dtypes[1] is None
    constants = (width, rows, block, vector, activation, gated, packed, flat, dtypes[0].itemsize)
    most = max(1, dispatch.multiprocessors(device) * 4 // columns) if walks else None
    is_forward = kernel is tilewright_activation_forward
    return Plan(dispatch.Launch(kernel, device, constants, 4, chained=is_forward), rows, columns, most)
