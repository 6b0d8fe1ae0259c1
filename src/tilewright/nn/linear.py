"""`ops.linear` as a module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tilewright.ops.linear import linear, linear_parts


def is_unheard(module: torch.nn.Module) -> bool:
    """Whether nobody listens to what goes in and comes out, or has put another `forward` in its place: then it need not
    run by itself."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return not hooks and "forward" not in module.__dict__


class Linear(torch.nn.Linear):
    """``torch.nn.Linear`` whose products run by the quickest of cuBLASLt's algorithms; same parameters and names.

    >>> Linear(8, 16)(torch.randn(2, 3, 8)).shape
    torch.Size([2, 3, 16])
    """

    def forward(self, input: torch.Tensor, sizes: Sequence[int] = (), *, with_bias: bool = True) -> Any:
        """The product; of `sizes` features each, a tuple of its parts.

        Without the bias it is for the caller to add: `DropoutAddNorm` takes it as `x_bias`, and sums up its gradient in
        a pass that it makes anyway.
        """
        bias = self.bias if with_bias else None
        return linear_parts(input, self.weight, bias, sizes) if sizes else linear(input, self.weight, bias)
