"""16-bit copies of float32 parameters, kept up to date by whoever changes the parameters.

A product in 16 bits of a float32 weight needs a copy of the weight. To make one at every step is to read the weight
once more; the optimizer has the new value at hand, and writes the copy along. So a training loop offers that copies of
its parameters may be kept, and the first product that needs one makes it.

A copy counts while nobody else has written to its parameter, which torch knows from a count of writes; else it is made
anew. Writes through `parameter.data` are not in that count, nor are those of torch's fused optimizers: only who knows
that there are none may offer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


@dataclass
class _Kept:
    copy: Tensor | None = None
    version: int = -1  # of the parameter that the copy is of


_kept = WeakTensorKeyDictionary()


def offer(parameters: Iterable[Tensor]) -> None:
    """Let copies of these be kept, where they are in float32."""
    for parameter in parameters:
        if parameter.dtype == torch.float32:
            _kept.setdefault(parameter, _Kept())


def share(parameter: Tensor, alias: Tensor) -> None:
    """Let another tensor of the same memory have the copy of a parameter."""
    kept = _kept.get(parameter)
    if kept is not None:
        _kept[alias] = kept


def of(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """A parameter in the dtype of products, without its graph: itself, the copy that is kept, or one made now."""
    if parameter.dtype is dtype:
        return parameter
    # What is made under inference mode could not be saved for a backward later.
    elsewhere = torch.compiler.is_compiling() or torch.is_inference_mode_enabled()
    kept = _kept.get(parameter) if dtype is torch.bfloat16 and not elsewhere else None
    if kept is None:
        return parameter.detach().to(dtype)
    if kept.copy is None:
        if parameter.is_cuda and torch.cuda.is_current_stream_capturing():  # memory of the graph's is not to be kept
            return parameter.detach().to(dtype)
        kept.copy = torch.empty_like(parameter, dtype=dtype, memory_format=torch.contiguous_format, requires_grad=False)
    _renew(parameter, kept)
    return kept.copy


def kept(parameter: Tensor) -> Tensor | None:
    """The copy that is kept of a parameter, if any, for whoever writes it along."""
    found = _kept.get(parameter)
    return None if found is None else found.copy


def written(parameters: Iterable[Tensor]) -> None:
    """Say that the copies of these have been written along."""
    for parameter in parameters:
        found = _kept.get(parameter)
        if found is not None:
            found.version = parameter._version


def renew(parameters: Iterable[Tensor]) -> None:
    """Make copies anew where somebody else has written to a parameter, for who reads them without asking: a graph."""
    for parameter in parameters:
        found = _kept.get(parameter)
        if found is not None and found.copy is not None:
            _renew(parameter, found)


@torch.no_grad()
def _renew(parameter: Tensor, kept: _Kept) -> None:
    if kept.version != parameter._version and kept.copy is not None:
        kept.copy.copy_(parameter)
        kept.version = parameter._version
