"""Parameters in 16 bits beside their float32: copies that whoever changes a parameter keeps up to date.

Under autocast a product needs its weight in 16 bits. To round it anew takes six bytes an element, for every micro
batch. A copy that is kept is written by `ops.optimizer` in the pass that writes the parameter, for two, and read by
`ops.linear` and `ops.linear_cross_entropy`.

A copy knows of which version of its parameter it is. One that is out of date, because a checkpoint was loaded say, is
made anew when it is asked for. A replayed CUDA graph asks for nothing: who replays one has to ask in its place. What
goes behind autograd's back, through `parameter.data`, has no version and is not seen: so nothing is kept unasked.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_NAME = "_tilewright_rounded"


@dataclass
class _Copy:
    tensor: torch.Tensor
    version: int = -1  # of the parameter
    address: int = 0  # where that was


def keep(parameter: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> None:
    """From now on keep a copy of a parameter, for as long as the parameter lives.

    >>> weight = torch.nn.Parameter(torch.tensor([1.0, 1.001]))
    >>> keep(weight)
    >>> rounded(weight, torch.bfloat16) is rounded(weight, torch.bfloat16)
    True
    """
    setattr(parameter, _NAME, _Copy(torch.empty_like(parameter, dtype=dtype, requires_grad=False)))


def kept(parameter: torch.Tensor) -> torch.Tensor | None:
    """The copy of a parameter, up to date; None where none is kept, or where it has the place of another tensor."""
    copy: _Copy | None = getattr(parameter, _NAME, None)
    if copy is None or copy.tensor.shape != parameter.shape or copy.tensor.device != parameter.device:
        return None
    if copy.version != parameter._version or copy.address != parameter.data_ptr():
        with torch.no_grad():
            copy.tensor.copy_(parameter)
        copy.version, copy.address = parameter._version, parameter.data_ptr()
    return copy.tensor


def written(parameter: torch.Tensor) -> None:
    """Say that a parameter and its copy have just been changed, alike and in place."""
    copy: _Copy = getattr(parameter, _NAME)
    torch.autograd.graph.increment_version((parameter, copy.tensor))
    copy.version, copy.address = parameter._version, parameter.data_ptr()


def rounded(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A parameter in a dtype, without a graph: itself, its copy, or a new tensor."""
    if parameter.dtype is dtype:
        return parameter
    copy = None if torch.compiler.is_compiling() else kept(parameter)
    return copy if copy is not None and copy.dtype is dtype else parameter.detach().to(dtype)
