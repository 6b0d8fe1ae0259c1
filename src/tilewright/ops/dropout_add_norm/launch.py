"""How the kernels of `dropout_add_norm` are cut for a width, as measured on an H200; `results/` has what it gives."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from tilewright.ops.dropout_add_norm import backward_kernels, kernels
from tilewright.runtime import dispatch

_WIDEST_ROW = 16384  # columns that one program of forward holds in registers
_WIDEST_TILE = 8192  # and one of backward


def _power_of_two(n: int) -> int:
    """The smallest power of two that is not below `n`."""
    return 1 << (n - 1).bit_length()


def _chunks(width: int, widest_block: int, narrowest_block: int = 1024) -> tuple[int, int]:
    """(block, chunks): the fewest chunks that cover `width` with at most a fifth more lanes than columns."""
    block = min(widest_block, _power_of_two(width))
    while block > narrowest_block and -(-width // block) * block * 5 > width * 6:
        block //= 2
    return block, -(-width // block)


def _span(width: int) -> tuple[int, int]:
    """Lanes that a row takes, and how many programs with its neighbours: rows of whole vectors take as many as columns.

    Others begin anywhere in a vector of 8, and rows of the same shift are 8 apart.
    """
    return (width, 1) if width % 8 == 0 else (width + 7, 8)


def _forward_apart(span: int, rms: bool, stored: int) -> tuple[int, int, int]:
    """Rows, block and warps of forward for rows of more than 256 lanes that begin anywhere in a vector.

    Their masks take registers: tiles are short.
    """
    if span <= 640:
        return 4, 128, 4
    if span <= 1024:
        return 2, 256, 4
    if span <= 2560:
        return 1, 512, 2
    if span > 9216:
        return 1, 2048, 16 if rms or stored > 2 else 4
    chunks = -(-span // 1024)
    return 1, 1024, 8 if chunks in (6, 7) or (rms and chunks > 4) else 4


def _backward_apart(span: int, rms: bool, element: int) -> tuple[int, int, int, int]:
    """Rows, block, warps and programs a processor of backward for rows of up to 2048 lanes, in float32 3072, that
    begin anywhere.

    Elements of 4 bytes take twice the registers: with one warp a program, 907 columns in float32 spilled 1,216 bytes a
    thread, and forward and backward of 16 million numbers took 1,339 us instead of 153.
    """
    if element > 2 and span > 384:
        return (1, 512, 4, 2) if span <= 1536 else (1, 1024, 8, 1)
    if span <= 128:
        block = max(16, _power_of_two(span))
        return 2048 // block, block, 8, 4
    if span <= 256:
        return 1 + rms, 256, 1, 8
    if span <= 384:
        return 2, 128, 1, 8
    if span <= 512:
        return 1, 512, 1, 4 + 4 * rms
    if span <= 1024 and rms:
        return 1, 512, 1, 8
    return (1, 512, 2, 4) if span <= 1536 else (1, 1024, 4, 2)


class Tile(NamedTuple):
    """What a program holds at a time: `chunks` blocks of so many rows; and how many programs a processor gets."""

    rows: int
    block: int
    chunks: int
    warps: int
    programs: int = 1


def _narrow_forward(span: int) -> Tile | None:
    """Three blocks where the power of two above has a quarter of its lanes idle: 80 columns take 96 lanes, not 128."""
    whole = _power_of_two(span)
    if not 32 < span <= 256 or span * 4 > whole * 3:
        return None
    return Tile(8, whole // 4, 3, whole // 64)


def _narrow_backward(span: int, element: int, apart: bool, more: bool) -> Tile | None:
    """Tiles without idle lanes and without spills, of rows of few columns; None where the rules for wider rows are it.

    Backward of 80 columns in 16 bits had 128 lanes by 32 rows in four warps, which spilled 376 bytes a thread, and took
    274 us where this takes 102. `more`: there are sums for layerscale or a bias of x, which take registers too.
    """
    block, chunks = _chunks(span, 512, 16)
    if not 1 < chunks <= 5 or chunks & (chunks - 1) == 0:
        block, chunks = max(16, _power_of_two(span)), 1
    lanes = block * chunks
    if chunks == 1:
        # A row in one warp or two; with as many programs as registers hold, some load while others compute.
        if span > (512 if apart and element > 2 else 256) or (apart and (element == 2 or span <= 384)):
            return None
        return Tile((512 if more and element == 2 else 1024) // lanes, block, 1, 1 if element == 2 else 2, 8)
    if span > (512 if element == 2 and not apart else 256):
        return None
    small = element > 2 or apart
    rows = 1 << ((1280 if small else 3072) // lanes).bit_length() - 1
    return Tile(max(1, rows // 2) if more else rows, block, chunks, 4, 4 if small else 2)


@functools.cache
def forward_launch(
    device: torch.device, width: int, dtypes: tuple[Any, ...], rms: bool, zero_centered: bool, dropout: bool
) -> tuple[int, int, dispatch.Launch]:
    """How many rows a program takes, of how many programs the number is a multiple, and the kernel."""
    span, together = _span(width)
    flags = (rms, zero_centered, dropout, dtypes[0] == torch.float64)
    stored = (dtypes[-1] or dtypes[0]).itemsize  # without a residual_out the sum is x
    element = max(dtypes[0].itemsize, stored)
    # The order of a sum over a row, that is block and warps, depends on norm, width and the sum's dtype alone: so
    # `norm(residual_out)` has the bits of `out` whatever else went into it. When the weights are loaded changes nothing
    # but the time.
    if width > _WIDEST_ROW or width * element > 4 * _WIDEST_ROW:
        block, warps = (2048, 4) if stored == 2 else (4096, 8)
        kernel = kernels.tilewright_dropout_add_norm_wide_forward
        return 1, 1, dispatch.Launch(kernel, device, (width, block, *flags), warps, chained=True)
    block = max(16, _power_of_two(span))
    rows, full = max(1, 1024 // block), element > 2
    middle = stored == 2 and 512 < width <= 1024  # tiles of 256: 768 columns are three of them, with no lane idle
    narrow = _narrow_forward(span)
    if narrow is not None:
        (rows, block, _, warps, _), early = narrow, False
    elif together > 1 and span > 256:
        (rows, block, warps), early = _forward_apart(span, rms, stored), False
    elif rms and block > 8192:
        block, warps, early = 4096 if stored == 2 else block, 16, stored > 2 or width > 12288
    elif rms and middle and width < 1024:
        rows, block, warps, early = 4, 256, 4, True
    elif rms:
        warps = 32 if stored == 2 and width == 8192 else max(4, block // 512)
        early = block < 8192 and (full or not dropout)
    elif middle:
        block, warps, early = 256, 2, True
    elif block == 8192:
        block, warps, early = 2048, 8, True
    else:
        warps = 2 if block <= 1024 else max(4, block // 1024)
        early = full or (1024 < block < 8192 and not dropout)
    chunks = -(-span // block)
    constants = (width, block, chunks, rows, early, *flags)
    kernel = kernels.tilewright_dropout_add_norm_forward
    return rows, together, dispatch.Launch(kernel, device, constants, warps, chained=True)


class BackwardPlan(NamedTuple):
    """The kernels of backward for one width, and how many programs, rows and slices they take."""

    programs: int  # at the most
    together: int  # of which their number is a multiple
    band: int  # columns of partial sums that a program adds up
    rows: int
    slices: int
    row_sums: dispatch.Launch | None
    main: dispatch.Launch
    add_partials: dispatch.Launch


@functools.cache
def backward_plan(
    device: torch.device, width: int, dtypes: tuple[Any, ...], compute: torch.dtype,
    x_dtype: torch.dtype, needs: tuple[bool, ...], rms: bool, zero_centered: bool, dropout: bool,
) -> BackwardPlan:  # fmt: skip
    """How backward runs for these dtypes of its inputs, on this device."""
    element = max(dtypes[0].itemsize, dtypes[2].itemsize)
    # What a program has on its way, a column: the gradients, the sum, x and its bias, and layerscale.
    of_x = (None, None) if dtypes[3] is None else (dtypes[3], dtypes[7])
    loaded = sum(dtype.itemsize for dtype in (*dtypes[:3], *of_x, dtypes[5]) if dtype is not None)
    programs = dispatch.multiprocessors(device)
    rows, chunks, slices, stages = 1, 1, 1, 3
    given_width, (width, together) = width, _span(width)  # from here on, the lanes that a row takes
    more = any(t is not None for t in of_x)
    narrow = _narrow_backward(width, element, together > 1, more)
    if narrow is not None:
        rows, block, chunks, warps, most = narrow
        programs = most * programs
    elif needs[7] and 512 < width <= 2048 and (together == 1 or element == 2):
        # With one more sum a column there are registers for one row, or two: then few warps a program and many
        # programs, so that one computes while others load, and no lane idle.
        block, chunks = _chunks(width, 2048, 256 if width <= 1024 else 512)
        if block == 1024:
            rows, warps, programs = 2, 4, 2 * programs
        else:
            warps, programs = (2, 6 * programs) if width <= 1024 else (4, 3 * programs)
    elif together > 1 and width <= (2048 if element == 2 else 3072):
        rows, block, warps, most = _backward_apart(width, rms, element)
        chunks, programs = -(-width // block), most * programs
    elif width <= 2048:
        block = max(16, _power_of_two(width))
        rows = max(2, min((2048 if width <= 512 else 4096) // block, _power_of_two(6144 // element // width + 1) // 2))
        warps, stages, programs = (8, 4, programs) if block == 2048 else (4, 3, 2 * programs)
    elif width <= _WIDEST_TILE and (together == 1 or element == 2 or width <= 6144):
        block, chunks = _chunks(width, 2048)
        masked = together > 1 or width % block > 0  # in which case fewer registers are left
        if chunks > 5 or (masked and chunks > 4) or (together > 1 and element > 2):
            block, chunks = 2048, -(-width // 2048)
        warps, programs = block // 256, programs * 2048 // block
        stages = 4 if block == 2048 and chunks <= 3 else 3
    elif width <= 2 * _WIDEST_TILE and (together > 1 or width <= 8704):
        # Half a row with masks leaves no registers, and half a row little above 4096 columns many lanes idle.
        block, slices, warps = 1024, -(-width // 1024), 4
        programs = 4 * programs // slices
    elif 12288 < width <= 2 * _WIDEST_TILE and rms and (element == 2 or not dropout):
        block, warps, stages = 2 * _WIDEST_TILE, 32, 1
    elif width <= 2 * _WIDEST_TILE:
        slices, block, warps, programs = 2, 2048, 8, programs // 2
        chunks = -(-width // (slices * block))
        loaded += dtypes[0].itemsize + dtypes[2].itemsize + (0 if dtypes[6] is None else dtypes[6].itemsize)
    else:
        block, slices, warps = 2048, -(-width // 2048), 8
        programs = 4 * programs // slices
    while stages > 1 and (stages - 1) * rows * block * chunks * loaded + 2048 > dispatch.shared_memory(device):
        stages -= 1
    added = (256, 16) if width <= 2048 else (32, 64)  # partial sums at a time, and columns: few would be few programs
    double = compute == torch.float64
    constants = (given_width, rows, block, chunks, slices == 2, stages, rms, zero_centered, dropout, double)
    sums = (given_width, 4096, rms, zero_centered, double)
    return BackwardPlan(
        max(1, programs // together) * together,
        together,
        added[1],
        rows,
        slices,
        dispatch.Launch(backward_kernels.tilewright_dropout_add_norm_row_sums, device, sums, 8) if slices > 2 else None,
        dispatch.Launch(backward_kernels.tilewright_dropout_add_norm_backward, device, constants, warps),
        dispatch.Launch(backward_kernels.tilewright_dropout_add_norm_add_partials, device, (given_width, *added), 4),
    )
