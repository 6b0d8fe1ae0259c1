"""Tensors that autograd would keep, and backward makes again instead.

`torch.utils.checkpoint` runs a whole region again, and to leave products out of it watches every op of the region: for
the host that is twice the work of training. Here a tensor that a cheap op has made, and the product behind it saves, is
given up by name, and only that op runs again.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


def forgetting(given_up: Callable[[Tensor], bool], again: Callable[[], Tensor]) -> saved_tensors_hooks:
    """Where ops save a tensor that `given_up` is true of, keep nothing; `again` makes it when backward asks.

    >>> x = torch.randn(3, requires_grad=True)
    >>> y = x.exp()
    >>> with forgetting(is_memory_of(y), lambda: x.exp()):
    ...     z = y.square()
    >>> del y
    >>> torch.autograd.grad(z.sum(), x)[0].allclose(2 * (2 * x).exp())
    True
    """
    kinds = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cuda", "cpu")]

    def pack(kept: Tensor) -> Tensor | torch.Size:
        return kept.shape if given_up(kept) else kept

    def unpack(kept: Tensor | torch.Size) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        (gpu, gpu_on, gpu_dtype), (cpu, cpu_on, cpu_dtype) = kinds  # backward knows nothing of forward's autocast
        with torch.no_grad(), torch.autocast(gpu, gpu_dtype, gpu_on), torch.autocast(cpu, cpu_dtype, cpu_on):
            return again().view(kept)

    return saved_tensors_hooks(pack, unpack)


def is_memory_of(tensor: Tensor) -> Callable[[Tensor], bool]:
    """Whether another tensor is this one, or a view of it; does not keep it alive."""
    place = tensor.untyped_storage()._cdata
    return lambda other: other.untyped_storage()._cdata == place


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
