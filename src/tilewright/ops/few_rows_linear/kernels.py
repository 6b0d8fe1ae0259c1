"""The kernel of `few_rows_linear`, by how it moves the data.

A program has one feature, a row of the weight: there are far more programs than multiprocessors, and loads of 16 bytes
follow each other through all of it. It goes through BLOCK columns at a time, multiplies them with those of every row
of x, which are in L1 or L2, and keeps as many float32 sums a row as threads have columns; only at the end do threads
exchange them. Nobody else sums a feature: the same bits on every run. An activation is computed from the float32 sum.

In a chain (`runtime/pdl.py`) the first BLOCK columns of the weight are loaded before the wait.
"""

import functools

import torch
import triton
import triton.language as tl

from tilewright.runtime import dispatch
from tilewright.runtime.activation_kernels import activate
from tilewright.runtime.pdl_kernels import let_next_begin, wait_for_previous

_THREAD = 16  # columns that a thread loads at a time


@triton.jit
def _load_weights(weight, at, WIDTH: tl.constexpr, WHOLE: tl.constexpr):
    """A tile of the feature's weights, as float32."""
    if WHOLE:
        return tl.load(weight + at, eviction_policy="evict_first").to(tl.float32)
    else:
        return tl.load(weight + at, at < WIDTH, 0.0, eviction_policy="evict_first").to(tl.float32)


@triton.jit
def _load_values(x, row, at, ROWS: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr):
    """The same columns of every row of x, as float32."""
    if WHOLE:
        return tl.load(x + row * WIDTH + at).to(tl.float32)
    else:
        return tl.load(x + row * WIDTH + at, (row < ROWS) & (at < WIDTH), 0.0).to(tl.float32)


@triton.jit(do_not_specialize=["features"])
def tilewright_few_rows_linear_matmul(
    x, weight, bias, out, features: tl.int64,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One feature of all rows."""
    WHOLE: tl.constexpr = WIDTH % BLOCK == 0 and ROWS == PADDED
    FIRST: tl.constexpr = BLOCK if PDL else 0
    let_next_begin(PDL)
    feature = tl.program_id(0).to(tl.int64)
    row, column = tl.arange(0, PADDED)[:, None], tl.arange(0, BLOCK)[None, :]
    total = tl.zeros([PADDED, BLOCK], tl.float32)
    weight += feature * WIDTH
    if PDL:
        weights = _load_weights(weight, column, WIDTH, WHOLE)
        wait_for_previous(PDL)
        total += weights * _load_values(x, row, column, ROWS, WIDTH, WHOLE)
    for start in tl.range(FIRST, WIDTH, BLOCK):
        at = start + column
        weights = _load_weights(weight, at, WIDTH, WHOLE)
        total += weights * _load_values(x, row, at, ROWS, WIDTH, WHOLE)
    y = tl.sum(total, 1)
    if bias is not None:
        y += tl.load(bias + feature).to(tl.float32)
    y = activate(y, ACTIVATION, out.dtype.element_ty.primitive_bitwidth // 8)
    row = tl.arange(0, PADDED)
    tl.store(out + row * features + feature, y.to(out.dtype.element_ty), row < ROWS)


@functools.cache
def launch(
    device: torch.device, dtypes: tuple[torch.dtype | None, ...], aligned: bool, rows: int, width: int,
    activation: str = "",
) -> dispatch.Launch:  # fmt: skip
    """The kernel for dtypes and sizes; `aligned` says whether the weight begins at a multiple of 16 bytes."""
    padded = triton.next_power_of_2(rows)
    block = min(2048 // max(1, padded // 4), max(32, triton.next_power_of_2(width)))
    warps = max(1, min(4, block // _THREAD // 32))
    constants = rows, width, padded, block, activation
    return dispatch.Launch(tilewright_few_rows_linear_matmul, device, constants, warps, chained=True)
