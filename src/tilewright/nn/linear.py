"""`ops.linear` as a module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tilewright.ops.linear import linear, linear_parts


class Linear(torch.nn.Linear):
    """``torch.nn.Linear`` whose products run by the quickest of cuBLASLt's algorithms; same parameters and names.

    With `bias_later` the bias is left to who takes the product, ``norm(linear(x), residual, x_bias=linear.late_bias)``
    with a `DropoutAddNorm`, which sums up its gradient in a pass that it makes anyway; so only where there will be a
    backward. The bias must be at hand there: leave this False where parameters are gathered module by module.

    >>> Linear(8, 16)(torch.randn(2, 3, 8)).shape
    torch.Size([2, 3, 16])
    """

    bias_later = False

    @property
    def late_bias(self) -> torch.Tensor | None:
        """What is still to be added to the product."""
        return self.bias if self.bias_later and torch.is_grad_enabled() else None

    def forward(self, input: torch.Tensor, sizes: Sequence[int] = ()) -> Any:
        """The product; of `sizes` features each, a tuple of its parts."""
        if sizes:
            return linear_parts(input, self.weight, self.bias, sizes)
        return linear(input, self.weight, self.bias if self.late_bias is None else None)
