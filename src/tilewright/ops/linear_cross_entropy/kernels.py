"""The matmul that adds itself to a sum of 16 bits, for the weight's gradient of `linear_cross_entropy`.

The sum over chunks of tokens has to be kept between them. In the gradient's own bfloat16 it would lose a bit each time
it is rounded; in float32 it would be a buffer twice as large as the gradient. So between chunks the gradient's memory
holds float16, three bits finer than bfloat16, with a power of two for each stretch of numbers that brings their largest
near the end of float16's range. (What is 2^29 times smaller than the largest of its stretch has fewer bits.) The
matmul and the addition are in float32, and the last chunk leaves the gradient in its own dtype.

On a Hopper that is `hopper.cu`: a stretch is 192 classes of a column, its scale a bfloat16. Elsewhere it is
the kernel below: a stretch is a block of columns of a class, its scale a float32. Nobody else reads a sum before the
last chunk, so here it lies in the order in which the threads have it.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from tilewright.measure import work
from tilewright.runtime import dispatch, hopper, nvrtc

_WIDEN = tl.constexpr(dispatch.INTERPRETED)  # Triton's interpreter multiplies bfloat16 as if it were whole numbers


@triton.jit
def _to_memory(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A tile in the order in which the tensor cores leave it to the threads: eight numbers a thread, thread by thread.

    In a tile of 16-bit numbers as it is, a thread has pairs, which would go through shared memory to become vectors.
    """
    x = tl.reshape(x, [ROWS // 16, 2, 8, COLUMNS // 32, 4, 4, 2])  # warp, half, row, four eights, eight, column, pair
    return tl.reshape(tl.permute(x, (0, 2, 5, 1, 3, 4, 6)), [ROWS * 2, COLUMNS // 16, 8])


@triton.jit
def _from_memory(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The inverse of `_to_memory`."""
    x = tl.reshape(x, [ROWS // 16, 8, 4, 2, COLUMNS // 32, 4, 2])
    return tl.reshape(tl.permute(x, (0, 3, 1, 4, 5, 2, 6)), [ROWS, COLUMNS])


@triton.jit
def _kept_offsets(columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Where those vectors of eight lie: in the tile's own rows and columns, one after the other."""
    vector = tl.arange(0, ROWS * 2)[:, None] + tl.arange(0, COLUMNS // 16)[None, :] * (ROWS * 2)
    at = (vector // (COLUMNS // 8)).to(tl.int64) * columns + vector % (COLUMNS // 8) * 8
    return at[:, :, None] + tl.arange(0, 8)[None, None, :]


@triton.jit
def tilewright_linear_cross_entropy_matmul_add(
    left, right, total, scales, rows: tl.int32, columns: tl.int32, inner: tl.int32,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_INNER: tl.constexpr, TOGETHER: tl.constexpr,
    STAGES: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """total (rows x columns) += left^T @ right; `left` (inner x rows) and `right` (inner x columns) are descriptors.

    Programs stay and take tile after tile; tiles next to each other in time share their operands in L2.
    """
    across = tl.cdiv(columns, BLOCK_COLUMNS)
    down = tl.cdiv(rows, BLOCK_ROWS)
    # One loop with the one inside, so that a tile's first loads overlap the end of the last one; not around a barrier.
    for number in tl.range(tl.program_id(0), down * across, tl.num_programs(0), flatten=not LAST):
        band = number // (TOGETHER * across) * TOGETHER
        height = tl.minimum(down - band, TOGETHER)
        within = number % (TOGETHER * across)
        tile_row = band + within % height
        tile_column = within // height
        accumulator = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
        for first in tl.range(0, inner, BLOCK_INNER, num_stages=STAGES):
            a = left.load([first, tile_row * BLOCK_ROWS])
            b = right.load([first, tile_column * BLOCK_COLUMNS])
            if _WIDEN:
                a = a.to(tl.float32)
                b = b.to(tl.float32)
            accumulator = tl.dot(tl.trans(a), b, accumulator)
        row = tile_row * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        corner = total + (tile_row * BLOCK_ROWS).to(tl.int64) * columns + tile_column * BLOCK_COLUMNS
        at_scale = scales + tile_column * rows + row
        kept = corner + _kept_offsets(columns, BLOCK_ROWS, BLOCK_COLUMNS)
        if not FIRST:
            old = _from_memory(tl.load(kept), BLOCK_ROWS, BLOCK_COLUMNS)
            accumulator += old.to(tl.float16, bitcast=True).to(tl.float32) * tl.load(at_scale)[:, None]
        if LAST:
            tl.debug_barrier()  # every thread has loaded its part of the sum, which lies where others store now
            result = accumulator.to(tl.bfloat16).to(tl.int16, bitcast=True)
            column = tl.arange(0, BLOCK_COLUMNS)
            tl.store(corner + tl.arange(0, BLOCK_ROWS)[:, None].to(tl.int64) * columns + column[None, :], result)
        else:
            largest = tl.maximum(tl.max(tl.abs(accumulator), 1), 1e-30)
            scale = tl.exp2(tl.ceil(tl.log2(largest)) - 15.0)  # the largest comes to lie just below 2^15
            tl.store(at_scale, scale)
            new = (accumulator * (1.0 / scale)[:, None]).to(tl.float16).to(tl.int16, bitcast=True)
            tl.store(kept, _to_memory(new, BLOCK_ROWS, BLOCK_COLUMNS))


@functools.cache
def _shape(device: torch.device) -> tuple[int, int, int, int, int]:
    """(rows, columns and inner of a block, stages, warps)."""
    if dispatch.INTERPRETED:
        return 16, 32, 16, 1, 4
    return (128, 256, 64, 4, 8) if dispatch.shared_memory(device) >= 229_440 else (128, 128, 64, 3, 8)


def scales(total: torch.Tensor) -> tuple[tuple[int, int], torch.dtype] | None:
    """Shape and dtype of the scales of such a sum; None where there is no kernel for it."""
    rows, columns = total.shape
    if columns % 8 == 0 and hopper.ready(total.device, "tilewright_linear_cross_entropy_matmul_add"):
        return (-(-rows // hopper.COLUMNS), columns), torch.bfloat16
    block_rows, block_columns, *_ = _shape(total.device)
    if rows % block_rows or columns % block_columns:
        return None
    return (columns // block_columns, rows), torch.float32


def launch(
    left: torch.Tensor, right: torch.Tensor, total: torch.Tensor, scales: torch.Tensor, first: bool, last: bool
) -> None:
    """total += left^T @ right, a bfloat16 matrix after the last time; the first time it is set."""
    (rows, columns), inner = total.shape, left.shape[0]
    tensors, changed = (left, right, total, scales), () if first else (2,)
    flops = 2.0 * rows * columns * inner
    with work.launching("tilewright_linear_cross_entropy_matmul_add", tensors, flops, changed):
        if scales.dtype == torch.bfloat16:
            maps = (nvrtc.tensor_map(right, 64, 64), nvrtc.tensor_map(left, 64, 32), nvrtc.tensor_map(total, 64, 64))
            sizes = (columns, rows, inner)  # of the transpose, whose tiles fill usual widths
            hopper.start("tilewright_linear_cross_entropy_matmul_add", maps, scales, sizes, total.device, first, last)
        else:
            _launch(left, right, total, scales, first, last)


def _launch(
    left: torch.Tensor, right: torch.Tensor, total: torch.Tensor, scales: torch.Tensor, first: bool, last: bool
) -> None:
    from triton.tools.tensor_descriptor import TensorDescriptor

    block_rows, block_columns, block_inner, stages, warps = _shape(total.device)
    (rows, columns), inner = total.shape, left.shape[0]
    tiles = -(-rows // block_rows) * -(-columns // block_columns)
    constants: tuple[Any, ...] = (block_rows, block_columns, block_inner, 8, stages, first, last)
    tilewright_linear_cross_entropy_matmul_add[(min(tiles, dispatch.multiprocessors(total.device)),)](
        TensorDescriptor(left, list(left.shape), list(left.stride()), [block_inner, block_rows]),
        TensorDescriptor(right, list(right.shape), list(right.stride()), [block_inner, block_columns]),
        total.view(torch.int16), scales, rows, columns, inner, *constants, num_warps=warps,
    )  # fmt: skip
