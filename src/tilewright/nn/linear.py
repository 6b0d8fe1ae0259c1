"""`ops.linear` as a module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tilewright.ops.linear import linear, linear_parts


class Linear(torch.nn.Linear):
    """``torch.nn.Linear`` whose products run by the quickest of cuBLASLt's algorithms; same parameters and names.

    >>> Linear(8, 16)(torch.randn(2, 3, 8)).shape
    torch.Size([2, 3, 16])
    """

    def forward(self, input: torch.Tensor, sizes: Sequence[int] = ()) -> Any:
        """The product; of `sizes` features each, a tuple of its parts."""
        if sizes:
            return linear_parts(input, self.weight, self.bias, sizes)
        return linear(input, self.weight, self.bias)
