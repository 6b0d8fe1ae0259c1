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
def keep_mask(seed, start, threshold, STREAM: tl.constexpr, COLUMNS: tl.constexpr):
    """Which elements survive, as a [len(start), COLUMNS] tile: those of a tensor from each `start` on, in memory order.

    One Philox call gives 128 bits, eight draws of 16, for the eight elements of a vector; `start` is a multiple of 8.
    The counter is (vector, vector >> 32, STREAM, 0): no two elements of any tensor share a draw. `tl.join` puts the
    eight draws of a call side by side in one thread, which is also where a 16-byte load of eight elements puts them, so
    nothing moves between threads.
    """
    vector = (start // 8)[:, None] + tl.arange(0, COLUMNS // 8)[None, :]
    low = vector.to(tl.uint32)
    a, b, c, d = tl.philox(seed, low, (vector >> 32).to(tl.uint32), low * 0 + STREAM, low * 0, ROUNDS)
    words = tl.join(tl.join(a, c), tl.join(b, d))
    draws = tl.join(words & 0xFFFF, words >> 16)
    return tl.reshape(draws, [start.shape[0], COLUMNS]) >= threshold


@triton.jit(do_not_specialize=["seed", "count", "threshold"])
def tilewright_philox_mask(
    out, seed_tensor, seed: tl.int64, count: tl.int64, threshold: tl.int32, BLOCK: tl.constexpr, STREAM: tl.constexpr
):
    """Which elements of a tensor of `count` survive."""
    seed = load_seed(seed_tensor, seed)
    start = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, 1)
    at = start[:, None] + tl.arange(0, BLOCK)[None, :]
    tl.store(out + at, keep_mask(seed, start, threshold, STREAM, BLOCK), at < count)
