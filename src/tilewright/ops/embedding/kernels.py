"""The kernels of `embedding`, by how they move the data.

Forward: a program takes a tile of tokens by columns.

Backward: tokens come sorted by class. A program takes the next RUN of them, however many classes they are of, and loads
all their rows before it adds any up: what it has on its way covers the latency of memory, and a class with many tokens
takes many programs. A sum that begins and ends within the program is the gradient; of one that goes on beyond it the
part here is left to `join`, where the program in which it ends adds the parts up, in an order of their number alone.

Up to 2048 tokens find their places in that order by counting who comes before them, all at once: a sort has a pass and
several launches for each byte of its keys. Beyond, keys of 16 bits are half as many passes as those of 32.

Where one sequence has all tokens, its rows are the position's gradient: backward stores them as it comes by.

Sums are in COMPUTE: float32, or float64 for float64 input.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from tilewright.runtime import dispatch

_RUN = 16  # sorted tokens that a program of backward adds up
_COUNTED = 2048  # tokens up to which counting is the quicker sort
_RANKED, _AT_ONCE = 32, 256  # tokens that a program of it places, and compares with at a time
_SHORT_BIAS = 2**15 - 1  # a key of 16 bits is this much below its class, so that -1 is the lowest of them
_SHORT_CLASSES = 2**16 - 2  # for so many there are keys of 16 bits, with -1 and one beyond
_KEY_BIAS = tl.constexpr(_SHORT_BIAS)
_SUMMED = 1024  # elements of the position's gradient that a program adds up


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


@triton.jit(do_not_specialize=["count", "classes"])
def tilewright_embedding_rank(
    tokens, ordered, order, count: tl.int64, classes: tl.int64, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A stable sort: a token's place is how many are smaller, and how many before it are equal.

    Those outside of the table are -1 or `classes`.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mine = tl.load(tokens + row, row < count, 0).to(tl.int64)
    mine = tl.minimum(tl.maximum(mine, -1), classes).to(tl.int32)
    place = tl.zeros([ROWS], tl.int32)
    for first in range(0, count, BLOCK):
        other = first + tl.arange(0, BLOCK)
        theirs = tl.load(tokens + other, other < count, 0).to(tl.int64)
        theirs = tl.minimum(tl.maximum(theirs, -1), classes).to(tl.int32)
        equal = (theirs[None, :] == mine[:, None]) & (other[None, :] < row[:, None])
        before = ((theirs[None, :] < mine[:, None]) | equal) & (other < count)[None, :]
        place += tl.sum(before.to(tl.int32), 1)
    tl.store(ordered + place, mine, row < count)
    tl.store(order + place, row, row < count)


@triton.jit
def _owner(ordered, at, there):
    """The class of the token there; -1 where there is none."""
    key = tl.load(ordered + at, there, -1)
    if ordered.dtype.element_ty.primitive_bitwidth == 16:
        key = tl.where(there, key.to(tl.int32) + _KEY_BIAS, -1)
    return key


@triton.jit(do_not_specialize=["sequence", "batches"])
def tilewright_embedding_add_batch(
    dout, dposition, sequence: tl.int64, batches: tl.int64, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    DOUBLE: tl.constexpr,
):  # fmt: skip
    """dposition[s] = the sum of dout[b, s] over the batch."""
    elements = sequence * WIDTH
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float64 if DOUBLE else tl.float32)
    for batch in range(0, batches):
        total += tl.load(dout + batch * elements + at, at < elements, 0.0).to(total.dtype)
    tl.store(dposition + at, total.to(dposition.dtype.element_ty), at < elements)


@triton.jit(do_not_specialize=["tokens", "classes"])
def tilewright_embedding_backward(
    dout, ordered, order, dweight, heads, tails, dposition, tokens: tl.int64, classes: tl.int64,
    WIDTH: tl.constexpr, RUN: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, DOUBLE: tl.constexpr,
):  # fmt: skip
    """dweight[v] = the sum of dout[order[i]] over the i with ordered[i] == v, where program i // RUN sees all of them.

    Else heads[program] is the part of the sum that ends here, and tails[program] of the one that goes on. ADD: dweight
    is added to. dposition, where it is not None, gets the rows as they are.
    """
    COMPUTE: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    program = tl.program_id(0).to(tl.int64)
    first = program * RUN
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    before = _owner(ordered, first - 1, first > 0)
    owners, values, there, places = (), (), (), ()
    for i in tl.static_range(RUN + 1):
        owners = owners + (_owner(ordered, first + i, first + i < tokens),)
    for i in tl.static_range(RUN):  # all loads before the first store, behind which no load may move
        row = tl.load(order + first + i, first + i < tokens, 0)
        values = values + (tl.load(dout + row * WIDTH + column, inside, 0.0),)
        places = places + (row,)
        if ADD:
            owner = owners[i].to(tl.int64)
            whole = (owner != owners[i + 1]) & (owner != before) & (owner >= 0) & (owner < classes)
            there = there + (tl.load(dweight + owner * WIDTH + column, column < tl.where(whole, WIDTH, 0), 0.0),)
    total = tl.zeros([BLOCK], COMPUTE)
    for i in tl.static_range(RUN):
        owner = owners[i].to(tl.int64)
        total += values[i].to(COMPUTE)
        if dposition is not None:
            value = values[i].to(dposition.dtype.element_ty)
            tl.store(dposition + places[i] * WIDTH + column, value, column < tl.where(first + i < tokens, WIDTH, 0))
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
    owner = _owner(ordered, first, first < tokens).to(tl.int64)
    ends = _owner(ordered, first + RUN, first + RUN < tokens) != owner
    if ends & (owner >= 0) & (owner < classes) & (_owner(ordered, first - 1, first <= tokens) == owner):
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < WIDTH
        last = program - 1  # most sums begin here; of a class that many tokens are of they may begin far above
        total = tl.load(heads + program * WIDTH + column, inside, 0.0)
        total += tl.load(tails + last * WIDTH + column, inside, 0.0)
        more = _owner(ordered, last * RUN - 1, last > 0) == owner
        while more:
            at = last - 1 - tl.arange(0, ROWS)
            begun = (at >= 0) & (_owner(ordered, (at + 1) * RUN - 1, at >= 0) == owner)
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


@functools.cache
def _rank(device: torch.device, dtypes: tuple[Any, ...]) -> dispatch.Launch:
    return dispatch.Launch(tilewright_embedding_rank, device, (_RANKED, _AT_ONCE), 4)


@functools.cache
def _add_batch(device: torch.device, width: int, dtypes: tuple[Any, ...]) -> dispatch.Launch:
    constants = (width, _SUMMED, torch.float64 in dtypes)
    return dispatch.Launch(tilewright_embedding_add_batch, device, constants, 4)


def sort(tokens: torch.Tensor, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort packed `tokens`, stably: (keys in order, which tokens they are of). Others than classes are -1 or `classes`.

    A key is the class, or where it has 16 bits that much less than it.
    """
    count = len(tokens)
    if count <= _COUNTED and classes < 2**31 - 1:
        ordered, order = tokens.new_empty(count, dtype=torch.int32), tokens.new_empty(count, dtype=torch.int64)
        _rank(tokens.device, dispatch.dtypes((tokens,)))(
            (-(-count // _RANKED), 1), (tokens, ordered, order), (count, classes)
        )
        return ordered, order
    # Sorting goes by bytes of the key.
    keys = tokens.clamp(-1, classes)
    if classes <= _SHORT_CLASSES:
        keys = torch.sub(keys, _SHORT_BIAS, out=tokens.new_empty(count, dtype=torch.int16))
    elif classes < 2**31 - 1:
        keys = keys.to(torch.int32)
    ordered, order = torch.sort(keys, stable=True)
    return ordered, order


def add_batch(dout: torch.Tensor, batch: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    """The gradient of `length` positions, of packed `dout`, a row a token of `batch` sequences."""
    rows, width = dout.shape
    sequence = rows // batch if batch else 0
    dposition = _empty_positions(dout, sequence, length, dtype)
    if sequence * width:
        launch = _add_batch(dout.device, width, dispatch.dtypes((dout, dposition)))
        launch((-(-sequence * width // _SUMMED), 1), (dout, dposition), (sequence, batch))
    return dposition


def _empty_positions(dout: torch.Tensor, sequence: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory for the gradient of `length` positions, zeros for those behind the sequence."""
    dposition = dout.new_empty((length, dout.shape[1]), dtype=dtype)
    if sequence < length:
        dposition[sequence:].zero_()
    return dposition


def scatter(
    tokens: torch.Tensor, dout: torch.Tensor, classes: int, dtype: torch.dtype, out: torch.Tensor | None = None,
    positions: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """What each row of the table gets of packed `dout`, a row a token; tokens outside of it get nothing anywhere.

    Added to `out`, packed, where that is given. With `positions`, of which the first are the tokens', also what each
    of these gets.
    """
    width, add = dout.shape[1], out is not None
    dweight = dout.new_zeros((classes, width), dtype=dtype) if out is None else out
    if not dweight.numel() or not len(tokens):
        return dweight, None if positions is None else add_batch(dout, 1, positions, dtype)
    dposition = None if positions is None else _empty_positions(dout, len(tokens), positions, dtype)
    ordered, order = sort(tokens, classes)
    programs = -(-len(tokens) // _RUN)
    compute = torch.float64 if torch.float64 in (dout.dtype, dtype) else torch.float32
    heads, tails = (dout.new_empty((programs, width), dtype=compute) for _ in range(2))
    tensors = (dout, ordered, order, dweight, heads, tails, dposition)
    columns, main, join_up = _scatter(dout.device, width, add, dispatch.dtypes(tensors))
    main((programs, columns), tensors, (len(tokens), classes))
    if programs > 1:
        join_up((programs - 1, columns), (ordered, dweight, heads, tails), (len(tokens), classes))
    return dweight, dposition
