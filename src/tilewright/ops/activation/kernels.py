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
from tilewright.runtime.pdl_kernels import let_next_begin, wait_for_previous

_LOG2E = tl.constexpr(1.4426950408889634)
_SQRT_HALF = tl.constexpr(0.7071067811865476)
_DENSITY = tl.constexpr(0.3989422804014327)  # of the normal distribution at 0: 1 / sqrt(2 pi)
_TANH = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi)
_CUBIC = tl.constexpr(0.07135481627260025)  # 0.044715 times that


@triton.jit
def _reciprocal(x, SIZE: tl.constexpr):
    """1 / x for x >= 1: a division takes eight instructions, which 2-byte input has not the time for, nor the use."""
    if SIZE == 2:
        root = tl.rsqrt(x)
        result = root * root
    else:
        result = 1.0 / x
    return result


@triton.jit
def _sigmoid(z, TANH: tl.constexpr, SIZE: tl.constexpr):
    """z sigmoid(v) and its derivative, where v is z (SiLU), or 2 sqrt(2 / pi) (z + 0.044715 z^3): since sigmoid(2 u) is
    (1 + tanh(u)) / 2, that is the GELU by tanh."""
    if TANH:
        # Beyond 100 the sigmoid is 0 or 1, and a bound on z^2 keeps what multiplies that 0 finite.
        square = tl.minimum(z * z, 1e4)
        power = z * (-_LOG2E * _TANH - _LOG2E * _CUBIC * square)
        rate = _TANH + 3.0 * _CUBIC * square
    else:
        power = z * -_LOG2E
        rate = 1.0
    odds = tl.exp2(power)
    share = _reciprocal(1.0 + odds, SIZE)
    value = z * share
    # 1 - share, without the cancellation near 1; infinite odds times a share of 0 are no number.
    rest = tl.minimum(odds, 3e38) * share
    return value, share + value * rest * rate


@triton.jit
def _gelu(z, SIZE: tl.constexpr):
    """z Phi(z) and its derivative, where Phi is the normal distribution.

    In float32, Phi(-a) = exp(-a^2 / 2) P(1 / (1 + a / 4)) for a >= 0, with P fitted to 3e-8 of Phi: no
    branches as in erf, and the exponential is the density that the derivative needs.
    """
    if SIZE == 8:
        share = 0.5 + 0.5 * tl.erf(z * _SQRT_HALF)
        value = z * share
        bell = tl.exp2(z * z * (-0.5 * _LOG2E))
    else:
        distance = tl.minimum(tl.abs(z), 100.0)  # where Phi has long been 0 or 1
        bell = tl.exp2(distance * distance * (-0.5 * _LOG2E))
        t = _reciprocal(1.0 + 0.25 * distance, SIZE)
        p = 0.37506569016050123 - 0.0985788030617431 * t
        p = 0.3534818610361963 + t * (-0.33398548917354687 + t * p)
        p = 0.1284594409559957 + t * (-0.02040840618894091 + t * p)
        below = bell * (0.00023631722778313935 + t * (0.09572937277321934 + t * p))
        share = tl.where(z < 0.0, below, 1.0 - below)
        value = tl.maximum(z, 0.0, tl.PropagateNan.ALL) - distance * below
    return value, share + z * (bell * _DENSITY)


@triton.jit
def _activate(z, ACTIVATION: tl.constexpr, SIZE: tl.constexpr):
    """The activation of z and its derivative there."""
    if ACTIVATION == "gelu":
        pair = _gelu(z, SIZE)
    else:
        pair = _sigmoid(z, ACTIVATION == "gelu_tanh", SIZE)
    return pair


@triton.jit
def activate(z, ACTIVATION: tl.constexpr, SIZE: tl.constexpr):
    """The activation of z, for epilogues of other kernels; z itself where ACTIVATION is empty."""
    if ACTIVATION != "":
        z, _slope = _activate(z, ACTIVATION, SIZE)
    return z


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
    value, _slope = _activate(z, ACTIVATION, SIZE)
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
    value, slope = _activate(z, ACTIVATION, SIZE)
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
