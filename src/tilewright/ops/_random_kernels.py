"""The random draws of every kernel with dropout."""

import triton
import triton.language as tl

ROUNDS = tl.constexpr(7)  # the fewest rounds of Philox-4x32 that pass BigCrush


@triton.jit
def load_seed(seed_tensor, seed):
    """The sum of the two parts that `split_seed` makes; 0 where there is no dropout and so no tensor."""
    if seed_tensor is not None:
        return tl.load(seed_tensor) + seed
    else:
        return seed


@triton.jit
def keep_mask(seed, row, first_column, threshold, STREAM: tl.constexpr, COLUMNS: tl.constexpr):
    """Which of the elements [row, first_column ... first_column + COLUMNS) survive, as a [len(row), COLUMNS] tile.

    One Philox call gives 128 bits, eight draws of 16. Its counter is (column // 8, row, row >> 32, STREAM): no two
    elements of any tensor share a draw. `tl.join` puts the eight draws of a call side by side in one thread, which
    is also where a 16-byte load of eight elements puts them, so nothing moves between threads.
    """
    group = (first_column // 8 + tl.arange(0, COLUMNS // 8)).to(tl.uint32)[None, :]
    row_low = row.to(tl.uint32)[:, None] + group * 0
    row_high = (row >> 32).to(tl.uint32)[:, None] + group * 0
    a, b, c, d = tl.philox(seed, group + row_low * 0, row_low, row_high, row_low * 0 + STREAM, ROUNDS)
    words = tl.join(tl.join(a, c), tl.join(b, d))
    draws = tl.join(words & 0xFFFF, words >> 16)
    return tl.reshape(draws, [row.shape[0], COLUMNS]) >= threshold


@triton.jit(do_not_specialize=["seed", "rows", "threshold"])
def mask(
    out, seed_tensor, seed: tl.int64, rows: tl.int64, threshold: tl.int32,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, STREAM: tl.constexpr,
):  # fmt: skip
    seed = load_seed(seed_tensor, seed)
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    for first_column in range(0, WIDTH, BLOCK):
        column = first_column + tl.arange(0, BLOCK)[None, :]
        keep = keep_mask(seed, row, first_column, threshold, STREAM, BLOCK)
        tl.store(out + row[:, None] * WIDTH + column, keep, column < WIDTH)
