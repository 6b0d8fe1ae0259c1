"""The kernel of `optim.update`: one pass over parameters, their gradients and their states.

A program takes a tile of four blocks of 256 elements, one block a warp and eight elements a thread: the largest
magnitude of a block, which scales its 8-bit codes, is found without leaving the warp, and eight draws of 16 bits are
one call of Philox. Which tensor the tile is of, and where that lies, a table says. How a state is stored is read off
its pointer: float32 as it is, bfloat16 stochastically rounded, int8 and uint8 as codes with a float32 scale a block.
Arithmetic is in float32.

Whatever changes from step to step without the host knowing comes by pointer: the step counter, the scale of the
gradients, and `found_inf`, which masks every load and store.
"""

import torch
import triton
import triton.language as tl

from tilewright.optim.states import BLOCK, TILE
from tilewright.runtime.philox_kernels import ROUNDS

TYPES = {
    None: None, torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.int8: tl.int8, torch.uint8: tl.uint8
}  # fmt: skip
_BLOCK, _ROWS = tl.constexpr(BLOCK), tl.constexpr(TILE // BLOCK)
_SLOTS = tl.constexpr(11)  # of a row: its first program, eight addresses, the seed, the number of elements


@triton.jit
def _draws(seed, first, step, STREAM: tl.constexpr):
    """16 random bits for each element of a tile. Philox counts (element // 8, its high word, step, STREAM)."""
    row, column = tl.arange(0, _ROWS)[:, None], tl.arange(0, _BLOCK // 8)[None, :]
    group = first // 8 + row * (_BLOCK // 8) + column
    low, high = group.to(tl.uint32), (group >> 32).to(tl.uint32)
    a, b, c, d = tl.philox(seed, low, high, low * 0 + step, low * 0 + STREAM, ROUNDS)
    words = tl.join(tl.join(a, c), tl.join(b, d))
    return tl.reshape(tl.join(words & 0xFFFF, words >> 16), [_ROWS, _BLOCK])


@triton.jit
def _cut(x, up):
    """x in bfloat16: `up` is added to the 16 bits that bfloat16 has not, and those are cut off. Not a number stays."""
    bits = x.to(tl.uint32, bitcast=True)
    cut = ((bits + up) >> 16 << 16).to(tl.float32, bitcast=True)
    return tl.where(x == x, cut, x).to(tl.bfloat16)


@triton.jit
def _nearest(x):
    """x in bfloat16, to nearest, ties to even."""
    return _cut(x, 0x7FFF + ((x.to(tl.uint32, bitcast=True) >> 16) & 1))


@triton.jit
def _share(code, TYPE: tl.constexpr):
    """What a code without its sign stands for, as a share of the largest in its block."""
    if TYPE == tl.int8:
        share = code * (1.0 / 127.0)
    else:
        share = code * (1.0 / 255.0)
        share = share * share
    return share * share


@triton.jit
def _load_state(state, scale, at, inside, block, blocks):
    """A state in float32."""
    TYPE: tl.constexpr = state.dtype.element_ty
    x = tl.load(state + at, inside, 0.0).to(tl.float32)
    if TYPE == tl.int8 or TYPE == tl.uint8:
        share = _share(tl.abs(x), TYPE) * tl.load(scale + block, block < blocks, 0.0)[:, None]
        x = tl.where(x < 0.0, -share, share)
    return x


@triton.jit
def _store_state(state, scale, x, at, inside, block, blocks, seed, first, step, STREAM: tl.constexpr):
    TYPE: tl.constexpr = state.dtype.element_ty
    if TYPE == tl.float32:
        tl.store(state + at, x, inside)
    else:
        draws = _draws(seed, first, step, STREAM)
        if TYPE == tl.bfloat16:
            tl.store(state + at, _cut(x, draws), inside)
        else:
            size = tl.abs(x)
            largest = tl.max(size, 1)
            tl.store(scale + block, largest, block < blocks)
            share = size / tl.where(largest > 0.0, largest, 1.0)[:, None]
            root = tl.sqrt(share)
            if TYPE == tl.uint8:
                root = tl.sqrt(root) * 255.0
                low = tl.minimum(tl.floor(root), 254.0)
            else:
                low = tl.minimum(tl.floor(root * 127.0), 126.0)
            # Between the two neighbours by a probability that is linear in what they stand for: the mean is x.
            below, above = _share(low, TYPE), _share(low + 1.0, TYPE)
            code = tl.where(draws.to(tl.float32) < (share - below) / (above - below) * 65536.0, low + 1.0, low)
            if TYPE == tl.uint8:
                code = tl.where(x > 0.0, tl.maximum(code, 1.0), 0.0)
            else:
                code = tl.where(x < 0.0, -code, code)
            tl.store(state + at, code.to(tl.int32).to(TYPE), inside)


@triton.jit
def _correction(step, log_beta):
    """1 - beta ** step. Near 1 the power would lose the digits that count, so there it is a series."""
    y = step * log_beta
    series = 1.0 + y * 0.125
    series = 1.0 + y * (1.0 / 7.0) * series
    series = 1.0 + y * (1.0 / 6.0) * series
    series = 1.0 + y * 0.2 * series
    series = 1.0 + y * 0.25 * series
    series = 1.0 + y * (1.0 / 3.0) * series
    series = 1.0 + y * 0.5 * series
    return tl.where(y > -0.5, -y * series, 1.0 - tl.exp(y))


@triton.jit
def _pointer(row, SLOT: tl.constexpr, TYPE: tl.constexpr):
    """What lies in a slot of a row of the table."""
    return tl.multiple_of(tl.load(row + SLOT).to(tl.pointer_type(TYPE)), 16)


@triton.jit
def tilewright_optimizer_update(
    table, owners, lr_tensor, grad_scale, found_inf,
    lr: tl.float32, weight_decay: tl.float32, beta1: tl.float32, beta2: tl.float32, rest1: tl.float32,
    rest2: tl.float32, log_beta1: tl.float32, log_beta2: tl.float32, epsilon: tl.float32,
    RULE: tl.constexpr, STOCHASTIC: tl.constexpr, EVEN: tl.constexpr,
    PARAMETER: tl.constexpr, GRADIENT: tl.constexpr, MEAN: tl.constexpr, SQUARE: tl.constexpr,
    MEAN_SCALE: tl.constexpr, SQUARE_SCALE: tl.constexpr, COMPENSATION: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """`rest` is 1 - beta; `lr_tensor`, where there is one, stands for lr; EVEN says that 8 divides all numbers of
    elements. The other constants are the dtypes of the tensors whose addresses are in the table."""
    row = table + tl.load(owners + tl.program_id(0)).to(tl.int64) * _SLOTS
    first = (tl.program_id(0) - tl.load(row)) * (_ROWS * _BLOCK)
    parameter, gradient, step = _pointer(row, 1, PARAMETER), _pointer(row, 2, GRADIENT), _pointer(row, 8, STEP)
    mean = None if MEAN is None else _pointer(row, 3, MEAN)
    square = None if SQUARE is None else _pointer(row, 4, SQUARE)
    mean_scale = None if MEAN_SCALE is None else _pointer(row, 5, MEAN_SCALE)
    square_scale = None if SQUARE_SCALE is None else _pointer(row, 6, SQUARE_SCALE)
    compensation = None if COMPENSATION is None else _pointer(row, 7, COMPENSATION)
    seed, elements = tl.load(row + 9), tl.load(row + 10)
    at = first + tl.arange(0, _ROWS)[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    block = first // _BLOCK + tl.arange(0, _ROWS)
    if found_inf is not None:
        elements = tl.where(tl.load(found_inf) == 0.0, elements, 0)
    if EVEN:  # eight elements are then inside together, or none is: one access, not eight
        elements = elements // 8 * 8  # which says so to the compiler; of an argument as it is it forgets a hint
    inside, blocks = at < elements, (elements + _BLOCK - 1) // _BLOCK
    if lr_tensor is not None:
        lr = tl.load(lr_tensor)

    p = tl.load(parameter + at, inside, 0.0).to(tl.float32)
    g = tl.load(gradient + at, inside, 0.0).to(tl.float32)
    count = tl.load(step)
    if compensation is not None:
        p += tl.load(compensation + at, inside, 0.0).to(tl.float32)
    if grad_scale is not None:
        g *= 1.0 / tl.load(grad_scale)
    drawn = count.to(tl.int32).to(tl.uint32)

    if RULE == "sgd":
        g += weight_decay * p
    else:
        p *= 1.0 - lr * weight_decay
    if RULE == "given":
        p -= g
    else:
        m = _load_state(mean, mean_scale, at, inside, block, blocks)
        if RULE == "adamw":
            v = _load_state(square, square_scale, at, inside, block, blocks)
            m = beta1 * m + rest1 * g
            v = beta2 * v + rest2 * g * g
            root = tl.sqrt(v) * (1.0 / tl.sqrt(_correction(count, log_beta2)))
            p -= lr / _correction(count, log_beta1) * (m / (root + epsilon))
            _store_state(square, square_scale, v, at, inside, block, blocks, seed, first, drawn, 2)
        elif RULE == "lion":
            mixed = beta1 * m + rest1 * g
            p -= tl.where(mixed > 0.0, lr, tl.where(mixed < 0.0, -lr, mixed))  # 0 and not a number stay
            m = beta2 * m + rest2 * g
        else:
            m = beta1 * m + g
            p -= lr * m
        _store_state(mean, mean_scale, m, at, inside, block, blocks, seed, first, drawn, 1)

    if PARAMETER == tl.float32:
        tl.store(parameter + at, p, inside)
    elif STOCHASTIC:
        tl.store(parameter + at, _cut(p, _draws(seed, first, drawn, 0)), inside)
    else:
        rounded = _nearest(p)
        tl.store(parameter + at, rounded, inside)
        if compensation is not None:
            tl.store(compensation + at, _nearest(p - rounded.to(tl.float32)), inside)
