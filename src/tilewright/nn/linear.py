"""`ops.linear` as a module."""

from __future__ import annotations

import torch

from tilewright.ops.linear.op import linear


class Linear(torch.nn.Linear):
    """``torch.nn.Linear`` whose matmuls run by the quickest of cuBLASLt's algorithms; same parameters and names.

    >>> Linear(8, 16)(torch.randn(2, 3, 8)).shape
    torch.Size([2, 3, 16])
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return linear(input, self.weight, self.bias)
