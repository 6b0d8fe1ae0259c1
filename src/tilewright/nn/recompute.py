"""Tensors that autograd would save, and backward computes again instead.

`torch.utils.checkpoint` runs a whole region again, and to leave matmuls out of it watches every op of the region: for
the host that is twice the work of training. Here a tensor that a cheap op has made, and the matmul behind it saves, is
given up by name, and only that op runs again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from tilewright.runtime.dispatch import forcing_kernels, kernels_are_forced


class _Layout(NamedTuple):
    """What is left of a tensor that was given up."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: Any
    dtype: torch.dtype


class _Kept(NamedTuple):
    """A tensor that stays, and its version: PyTorch itself checks none under hooks."""

    tensor: Tensor
    version: int


def _check_version(tensor: Tensor, version: int) -> None:
    if tensor._version != version:
        raise RuntimeError(
            f"A tensor of shape {tuple(tensor.shape)} that backward needs has been modified by an inplace operation: "
            f"it is at version {tensor._version}, expected version {version}; write to a copy, or after backward."
        )


def if_unchanged(again: Callable[[], Tensor], *inputs: Tensor | None) -> Callable[[], Tensor]:
    """`again`, which raises where one of its inputs has been written to since."""
    versions = [(each, each._version) for each in inputs if each is not None]

    def checked() -> Tensor:
        for tensor, version in versions:
            _check_version(tensor, version)
        return again()

    return checked


def forgetting(given_up: Callable[[Tensor], bool], again: Callable[[], Tensor]) -> saved_tensors_hooks:
    """Where ops save a tensor that `given_up` is true of, keep nothing; `again` makes it when backward asks.

    What is saved may be a view, a transpose say; `again` makes the whole tensor, contiguous as it was.

    >>> x = torch.randn(3, requires_grad=True)
    >>> y = x.exp()
    >>> with forgetting(is_memory_of(y), lambda: x.exp()):
    ...     z = y.square()
    >>> del y
    >>> torch.autograd.grad(z.sum(), x)[0].allclose(2 * (2 * x).exp())
    True
    """
    forced = kernels_are_forced()
    kinds = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cuda", "cpu")]

    def pack(saved: Tensor) -> _Kept | _Layout:
        if not given_up(saved):
            return _Kept(saved, saved._version)
        return _Layout(saved.size(), saved.stride(), saved.storage_offset(), saved.dtype)

    def unpack(saved: _Kept | _Layout) -> Tensor:
        if isinstance(saved, _Kept):
            _check_version(*saved)
            return saved.tensor
        (gpu, gpu_on, gpu_dtype), (cpu, cpu_on, cpu_dtype) = kinds  # backward knows nothing of forward's autocast
        autocast = torch.autocast(gpu, gpu_dtype, gpu_on), torch.autocast(cpu, cpu_dtype, cpu_on)
        with torch.no_grad(), autocast[0], autocast[1], forcing_kernels(forced):
            made = again()
        if made.dtype != saved.dtype:
            raise RuntimeError(f"recompute: a {saved.dtype} tensor was saved, and {made.dtype} is what is made again.")
        return made.contiguous().as_strided(saved.size, saved.stride, saved.offset)

    return saved_tensors_hooks(pack, unpack)


def is_memory_of(tensor: Tensor) -> Callable[[Tensor], bool]:
    """Whether another tensor is this one, or a view of it, and this one is as it was: nobody has written to it since.
    Does not keep it alive."""
    alive, version, storage = weakref.ref(tensor), tensor._version, tensor.untyped_storage()._cdata
    whole = tensor.is_contiguous() and tensor.storage_offset() == 0

    def test(other: Tensor) -> bool:
        known = alive()
        if known is None or known._version != version or other.dtype != known.dtype:
            return False
        return whole and other.untyped_storage()._cdata == storage

    return test


class Shared:
    """Several results of one computation: made when one is asked for, gone with the one that is asked for last."""

    def __init__(self, make: Callable[[], tuple[Tensor, ...]]) -> None:
        self.make = make
        self.results: tuple[Tensor, ...] = ()

    def take(self, index: int, last: bool = False) -> Tensor:
        if not self.results:
            self.results = self.make()
        result = self.results[index]
        if last:
            self.results = ()
        return result
