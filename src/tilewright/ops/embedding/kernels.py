"""The kernels of `embedding`, by how they move the data.

Forward: a program takes a tile of tokens by columns.

Backward: tokens come sorted by class. A program takes the next RUN of them, however many classes they are of, and loads
all their rows before it adds any up: what it has on its way covers the latency of memory, and a class with many tokens
takes many programs. A sum that begins and ends within the program is the gradient; of one that goes on beyond it the
part here is left to `join`, where the program in which it ends adds the parts up, in an order of their number alone.

Sums are in COMPUTE: float32, or float64 for float64 input.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from tilewright.runtime import dispatch

_RUN = 16  # sorted tokens that a program of backward adds up


@triton.jit(do_not_specialize=["rows", "sequence", "classes"])
def tilewright_embedding_forward(
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


@triton.jit(do_not_specialize=["tokens", "classes"])
def tilewright_embedding_backward(
    dout, ordered, order, dweight, heads, tails, tokens: tl.int64, classes: tl.int64,
    WIDTH: tl.constexpr, RUN: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, DOUBLE: tl.constexpr,
):  # fmt: skip
    """dweight[v] = the sum of dout[order[i]] over the i with ordered[i] == v, where program i // RUN sees all of them.

    Else heads[program] is the part of the sum that ends here, and tails[program] of the one that goes on. ADD: dweight
    is added to.
    """
    COMPUTE: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    program = tl.program_id(0).to(tl.int64)
    first = program * RUN
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    before = tl.load(ordered + first - 1, first > 0, -1)
    owners, values, there = (), (), ()
    for i in tl.static_range(RUN + 1):
        owners = owners + (tl.load(ordered + first + i, first + i < tokens, -1),)
    for i in tl.static_range(RUN):  # all loads before the first store, behind which no load may move
        row = tl.load(order + first + i, first + i < tokens, 0)
        values = values + (tl.load(dout + row * WIDTH + column, inside, 0.0),)
        if ADD:
            owner = owners[i].to(tl.int64)
            whole = (owner != owners[i + 1]) & (owner != before) & (owner >= 0) & (owner < classes)
            there = there + (tl.load(dweight + owner * WIDTH + column, column < tl.where(whole, WIDTH, 0), 0.0),)
    total = tl.zeros([BLOCK], COMPUTE)
    for i in tl.static_range(RUN):
        owner = owners[i].to(tl.int64)
        total += values[i].to(COMPUTE)
        ends = owner != owners[i + 1]
        if ends & (owner >= 0) & (owner < classes):  # a class, and no token outside of the table or beyond the last
            if owner == before:
                tl.store(heads + program * WIDTH + column, total, inside)
            else:
                gradient = total + there[i].to(COMPUTE) if ADD else total
                tl.store(dweight + owner * WIDTH + column, gradient.to(dweight.dtype.element_ty), inside)
        total = tl.where(ends, 0.0, total)
    if owners[RUN - 1] == owners[RUN]:
        tl.store(tails + program * WIDTH + column, total, inside)


@triton.jit(do_not_specialize=["tokens", "classes"])
def tilewright_embedding_join(
    ordered, dweight, heads, tails, tokens: tl.int64, classes: tl.int64,
    WIDTH: tl.constexpr, RUN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """The sum of a class that began in an earlier program of backward and ends in this one."""
    program = tl.program_id(0).to(tl.int64) + 1
    first = program * RUN
    owner = tl.load(ordered + first).to(tl.int64)
    ends = first + RUN >= tokens
    if not ends:
        ends = tl.load(ordered + first + RUN) != owner
    if ends & (owner >= 0) & (owner < classes) & (tl.load(ordered + first - 1) == owner):
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < WIDTH
        last = program - 1  # most sums begin here; of a class that many tokens are of they may begin far above
        total = tl.load(heads + program * WIDTH + column, inside, 0.0)
        total += tl.load(tails + last * WIDTH + column, inside, 0.0)
        more = tl.load(ordered + last * RUN - 1, last > 0, -1) == owner
        while more:
            at = last - 1 - tl.arange(0, ROWS)
            begun = (at >= 0) & (tl.load(ordered + (at + 1) * RUN - 1, at >= 0, -1) == owner)
            rows = tl.load(tails + at[:, None] * WIDTH + column[None, :], begun[:, None] & inside[None, :], 0.0)
            total += tl.sum(rows, 0)
            last -= ROWS
            more = tl.sum(begun.to(tl.int32), 0) == ROWS
        if ADD:
            total += tl.load(dweight + owner * WIDTH + column, inside, 0.0).to(total.dtype)
        tl.store(dweight + owner * WIDTH + column, total.to(dweight.dtype.element_ty), column < WIDTH)


def _block(width: int) -> int:
    """Columns of a tile."""
    block = min(256, max(16, triton.next_power_of_2(width)))
    while block > 128 and -(-width // block) * block * 5 > width * 6:  # lanes without a column idle
        block //= 2
    return block


@functools.cache
def _gather(device: torch.device, width: int, dtypes: tuple[Any, ...]) -> tuple[int, int, dispatch.Launch]:
    """(rows of a tile, tiles side by side, the launch)."""
    block = _block(width)
    rows = 2048 // block
    double = any(dtype == torch.float64 for dtype in dtypes)
    return (
        rows,
        -(-width // block),
        dispatch.Launch(tilewright_embedding_forward, device, (width, rows, block, double), 4),
    )


@functools.cache
def _scatter(
    device: torch.device, width: int, add: bool, dtypes: tuple[Any, ...]
) -> tuple[int, dispatch.Launch, dispatch.Launch]:
    """(tiles side by side, the launches of backward and join)."""
    block = _block(width)
    constants = (width, _RUN, block, add, torch.float64 in dtypes)
    main = dispatch.Launch(
        tilewright_embedding_backward, device, constants, 1 + add, [3] if add else []
    )  # what is there takes registers
    # The longest of all sums is what join takes: of a class that every tenth token is, parts of hundreds of programs.
    joins = dispatch.Launch(
        tilewright_embedding_join, device, (width, _RUN, 4096 // block, block, add), 4, [1] if add else []
    )
    return -(-width // block), main, joins


def gather(
    tokens: torch.Tensor, weight: torch.Tensor, position: torch.Tensor | None, dtype: torch.dtype, shape: torch.Size
) -> torch.Tensor:
    """The rows of the table for packed `tokens`, which had this shape."""
    classes, width = weight.shape
    out = weight.new_empty((*shape, width), dtype=dtype)
    tensors = (tokens, weight, position, out)
    rows, columns, launch = _gather(weight.device, width, dispatch.dtypes(tensors))
    if out.numel():
        launch((-(-len(tokens) // rows), columns), tensors, (len(tokens), shape[-1], classes))
    return out


def scatter(
    tokens: torch.Tensor, dout: torch.Tensor, classes: int, dtype: torch.dtype, out: torch.Tensor | None = None
) -> torch.Tensor:
    """What each row of the table gets of packed `dout`, a row a token; tokens outside of it get nothing anywhere.

    Added to `out`, packed, where that is given.
    """
    width, add = dout.shape[1], out is not None
    dweight = dout.new_zeros((classes, width), dtype=dtype) if out is None else out
    if not dweight.numel() or not len(tokens):
        return dweight
    # Sorting goes by bytes of the key: half of them are none of a table's.
    keys = tokens.clamp(-1, classes).to(torch.int32) if classes < 2**31 - 1 else tokens
    ordered, order = torch.sort(keys, stable=True)
    programs = -(-len(tokens) // _RUN)
    compute = torch.float64 if torch.float64 in (dout.dtype, dtype) else torch.float32
    heads, tails = (dout.new_empty((programs, width), dtype=compute) for _ in range(2))
    tensors = (dout, ordered, order, dweight, heads, tails)
    columns, main, join_up = _scatter(dout.device, width, add, dispatch.dtypes(tensors))
    main((programs, columns), tensors, (len(tokens), classes))
    if programs > 1:
        join_up((programs - 1, columns), (ordered, dweight, heads, tails), (len(tokens), classes))
    return dweight
