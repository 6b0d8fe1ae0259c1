"""Programmatic dependent launch in Triton; `pdl.py` has the rule for kernels that call these.

Where PDL is false, and under the interpreter, they do nothing.
"""

import triton
import triton.language as tl

from tilewright.runtime import dispatch

_INTERPRETED = tl.constexpr(dispatch.INTERPRETED)


@triton.jit
def let_next_begin(PDL: tl.constexpr):
    """Allow the next kernel of the chain to begin once all programs have come here."""
    if PDL:
        if not _INTERPRETED:
            tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Wait until the kernel before has ended and its results are to be seen."""
    if PDL:
        if not _INTERPRETED:
            tl.extra.cuda.gdc_wait()


@triton.jit
def prefetch_rows(rows, stride, size, count, ROWS: tl.constexpr, PDL: tl.constexpr):
    """Have the first `size` bytes of `count` rows brought into L2, nothing where that is not above 0.

    ROWS is the most that `count` may be. Where the first row begins, the distance to the next, in bytes, and the size
    are multiples of 16. Each row is one instruction of one thread: threads of a warp take turns with it, so rows are
    spread over the warps.
    """
    if PDL:
        if not _INTERPRETED:
            THREADS: tl.constexpr = tl.extra.cuda.num_threads()
            tl.static_assert(ROWS <= THREADS)
            thread = tl.arange(0, THREADS)
            row = thread // (THREADS // ROWS)
            address = rows.to(tl.int64) + row * stride
            is_mine = (thread % (THREADS // ROWS) == 0) & (row < count)
            tl.inline_asm_elementwise(
                """{
                .reg .pred there;
                setp.gt.s32 there, $2, 0;
                @there cp.async.bulk.prefetch.L2.global [$1], $2;
                mov.b32 $0, 0;
                }""",
                "=r,l,r", [address, tl.where(is_mine, size, 0)], dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip


@triton.jit
def prefetch_vector(vector, SIZE: tl.constexpr, PDL: tl.constexpr):
    """Have a parameter of SIZE elements brought into L2, which begins at a multiple of 16 bytes, or is None."""
    if PDL:
        if vector is not None:
            BYTES: tl.constexpr = SIZE * vector.dtype.element_ty.primitive_bitwidth // 8
            prefetch_rows(vector, 0, BYTES // 16 * 16, 1, 1, PDL)
