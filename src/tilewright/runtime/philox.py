"""Dropout without a stored mask: a seed, and the same Philox draws in forward and backward.

The seed comes from torch's generator or, under `by_position`, from the place of the dropout in the model and from what
the caller says of the micro batch. Then a token is dropped alike wherever it is computed: on any rank, and again in
recompute.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tilewright.runtime import dispatch

_LOCK = threading.Lock()


def draw_seed(x: torch.Tensor, *, as_tensor: bool) -> int | torch.Tensor:
    """A 64-bit seed from torch's generator of the device of `x`, advancing it as torch's own dropout would.

    In eager CUDA the generator's state lives on the host: reading and advancing it there costs no kernel. Under
    graph capture, under a compiler (`as_tensor`) and on the CPU the seed is drawn as a tensor instead, so that every
    replay of a captured graph draws a new one.
    """
    if as_tensor or not x.is_cuda or torch._C._cuda_isCurrentStreamCapturing():
        return torch.randint(1 << 62, (1,), dtype=torch.int64, device=x.device)
    generator = torch.cuda.default_generators[x.device.index]
    with _LOCK:
        offset = generator.get_offset()
        generator.set_offset(offset + 4)  # offsets count in fours: one Philox call
    mixed = generator.initial_seed() * 0x9E3779B97F4A7C15 + offset * 0xD1342543DE82EF95
    return mixed >> 1 & (1 << 62) - 1


class Positions:
    """What dropout is drawn by under `by_position`: a seed of the micro batch, and the rows that this rank has.

    Args:
        device: of the seed's tensor, which captured and compiled graphs read; eager calls take the number.
        rows: which of a sequence's tokens lie here, in order, where a rank has a part of each; None: all of them.
        length: tokens of a whole sequence, where `rows` is given.
    """

    def __init__(self, device: torch.device, rows: torch.Tensor | None = None, length: int = 0) -> None:
        self.tensor = torch.zeros(1, dtype=torch.int64, device=device)
        self.number, self.rows, self.length = 0, rows, length

    def set(self, number: int) -> None:
        """Take another micro batch's seed, a number below 2**62."""
        self.number = number
        self.tensor.fill_(number)

    def of(self, number: int) -> Positions:
        """The same rows under the seed of another micro batch."""
        other = Positions(self.tensor.device, self.rows, self.length)
        other.set(number)
        return other


_positions: Positions | None = None
_SEEDS = (1 << 62) - 1
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # as a tensor of 64 bits takes it


@contextlib.contextmanager
def by_position(positions: Positions | None) -> Iterator[None]:
    """Draw the dropout of modules that know their place by position inside of the context; None: by the generator."""
    global _positions
    before, _positions = _positions, positions
    try:
        yield
    finally:
        _positions = before


def bound(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which draws as it would now, whenever it is called: recompute runs when other micro batches do."""
    positions = _positions
    if positions is None:
        return function

    def run(*inputs: Any) -> Any:
        with by_position(positions):
            return function(*inputs)

    return run


def seed_at(site: int | torch.Tensor | None, x: torch.Tensor) -> Any:
    """The seed of a dropout in this place of the model; None where torch's generator is to draw one."""
    if _positions is None or site is None:
        return None
    place = (site + 1) * _ODD & _SEEDS
    if dispatch.is_compiling() or (x.is_cuda and torch._C._cuda_isCurrentStreamCapturing()):
        return (_positions.tensor + place) & _SEEDS
    return _positions.number + place & _SEEDS


def has_part_of_rows() -> bool:
    """Whether this rank has a part of each sequence's tokens, which kernels that draw by row number do not know."""
    return _positions is not None and _positions.rows is not None


def dropout(x: torch.Tensor, p: float, seed: int | torch.Tensor) -> torch.Tensor:
    """Dropout of ``(batch, sequence, width)`` by the seed of `seed_at`, in PyTorch's ops."""
    p = quantised(p)
    rows = None
    if _positions is not None and _positions.rows is not None:
        first = torch.arange(len(x), device=x.device)[:, None] * _positions.length
        rows = (first + _positions.rows.to(x.device)).flatten()
    kernel = rows is None and dispatch.runs_kernel(x)
    mask = dropout_mask(x, seed, p, 0) if kernel else reference_mask(x, seed, p, 0, rows)
    return torch.where(mask, x / (1.0 - p), 0.0)


def words(seed: int | torch.Tensor, a: Any, b: Any, c: Any, d: Any) -> torch.Tensor:
    """Philox-4x32 with seven rounds in PyTorch's ops: the four words of each counter, the last dimension."""
    low, high = seed & _WORD, seed >> 32 & _WORD
    for _ in range(7):
        first, second = 0xD2511F53 * a, 0xCD9E8D57 * c  # modulo 2**64, which loses no bit
        a, c = (second >> 32 & _WORD) ^ b ^ low, (first >> 32 & _WORD) ^ d ^ high
        b, d = second & _WORD, first & _WORD
        low, high = (low + 0x9E3779B9) & _WORD, (high + 0xBB67AE85) & _WORD
    return torch.stack((a, b, c, d), -1)


_WORD = 0xFFFFFFFF


def reference_mask(
    x: torch.Tensor, seed: int | torch.Tensor, p: float, stream: int, rows: torch.Tensor | None = None
) -> torch.Tensor:
    """What `dropout_mask` draws, in PyTorch's ops; `rows`: the number of each row of `x`, where not 0, 1, 2 and so on.

    >>> x = torch.zeros(6, 10)
    >>> part = reference_mask(x[4:], 7, 0.5, 0, rows=torch.tensor([4, 5]))
    >>> torch.equal(part, reference_mask(x, 7, 0.5, 0)[4:])
    True
    """
    width = x.shape[-1]
    rows = torch.arange(x.numel() // max(1, width), device=x.device) if rows is None else rows
    element = rows[:, None] * width + torch.arange(0, width, 8 if width % 8 == 0 else 1, device=x.device)
    group = element >> 3
    zero = torch.zeros_like(group)
    found = words(seed, group & _WORD, group >> 32, zero + stream, zero)
    draws = torch.stack((found & 0xFFFF, found >> 16), -1).flatten(-2)  # eight of a group, in the kernel's order
    if width % 8:
        draws = draws.gather(-1, (element & 7)[..., None])
    return (draws >= drop_threshold(p)).view(x.shape)


def split_seed(seed: int | torch.Tensor | None, device: torch.device) -> tuple[torch.Tensor | None, int]:
    """A tensor and a number whose sum is the seed: kernels take both, so that one binary serves eager and captured."""
    if seed is None:
        return None, 0
    return (seed, 0) if isinstance(seed, torch.Tensor) else (_zero(device), seed)


@functools.cache
def _zero(device: torch.device) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int64, device=device)


def drop_threshold(p: float) -> int:
    """Draws are 16 bits wide; one below this drops its element. At the most, one in 65,536 elements is kept."""
    return min(round(p * 65536), 65535)


def quantised(p: float) -> float:
    """The probability that a draw can meet: p to the nearest multiple of 2**-16. Scaling by it keeps the mean exact.

    >>> quantised(0.5), quantised(0.0)
    (0.5, 0.0)
    """
    return drop_threshold(p) / 65536


@torch.library.custom_op("tilewright::dropout_mask", mutates_args=())
def _registered_mask(x: torch.Tensor, seed: torch.Tensor, p: float, stream: int) -> torch.Tensor:
    return _launch_mask(x, seed, p, stream)


@dispatch.fake_of(_registered_mask)
def _(x: torch.Tensor, seed: torch.Tensor, p: float, stream: int) -> torch.Tensor:
    return torch.empty(x.shape, dtype=torch.bool, device=x.device)


def _launch_mask(x: torch.Tensor, seed: int | torch.Tensor, p: float, stream: int) -> torch.Tensor:
    mask = torch.empty(x.shape, dtype=torch.bool, device=x.device)
    if x.numel():
        seed_tensor, seed_value = split_seed(seed, x.device)
        launch = _mask_launch(x.device, stream)
        launch((-(-x.numel() // _MASKED), 1), (mask, seed_tensor), (seed_value, x.numel(), drop_threshold(p)))
    return mask


_MASKED = 1024  # elements of a program


@functools.cache
def _mask_launch(device: torch.device, stream: int) -> dispatch.Launch:
    from tilewright.runtime import philox_kernels as kernels

    return dispatch.Launch(kernels.tilewright_philox_mask, device, (_MASKED, stream), 4)


def dropout_mask(x: torch.Tensor, seed: int | torch.Tensor | None, p: float, stream: int) -> torch.Tensor:
    """The elements of a tensor shaped like `x` that a kernel given this seed keeps."""
    if seed is None:
        return torch.ones(x.shape, dtype=torch.bool, device=x.device)
    if not dispatch.is_traced(x):
        return _launch_mask(x, seed, p, stream)
    given = seed if isinstance(seed, torch.Tensor) else torch.full((1,), seed, dtype=torch.int64, device=x.device)
    return _registered_mask(x, given, p, stream)
