"""How close is close enough: tolerances derived from dtype and reduction length, not picked."""

from __future__ import annotations

import torch


def ulp(dtype: torch.dtype) -> float:
    """The relative spacing of numbers of this dtype.

    >>> ulp(torch.bfloat16)
    0.0078125
    """
    return torch.finfo(dtype).eps


def tolerance(dtype: torch.dtype, reduced: int = 1, *, compute: torch.dtype = torch.float32) -> float:
    """The largest relative error to expect of a result in `dtype` from a sum of `reduced` terms in `compute`.

    A few roundings to `dtype` itself, and the rounding errors of the sum, which grow as the square root of its length.

    >>> tolerance(torch.bfloat16, 4096) < 0.02 and tolerance(torch.float32, 4096) < 5e-5
    True
    """
    accumulate = compute if dtype != torch.float64 else torch.float64
    return 2.0 * ulp(dtype) + 4.0 * ulp(accumulate) * max(1, reduced) ** 0.5


def relative_error(actual: torch.Tensor, truth: torch.Tensor) -> float:
    """||actual - truth|| / ||truth||, in float64. NaN where either is not finite.

    >>> relative_error(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.0]))
    0.0
    """
    truth = truth.detach().double()
    difference, size = (actual.detach().double() - truth).norm().item(), truth.norm().item()
    return difference / size if size > 0 else difference
