"""Dropout without a stored mask: a seed from torch's generator, and the same Philox draws in forward and backward."""

from __future__ import annotations

import functools
import threading

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
    return (_registered_mask if dispatch.is_traced(x) else _launch_mask)(x, seed, p, stream)
