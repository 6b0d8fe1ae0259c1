"""Dropout by position: the same elements whoever watches, and whichever way they are drawn."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ops.contract import DEVICE
from tilewright.runtime import philox

SEEDS = (7, (1 << 62) - 1)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_dispatch_mode_sees_the_same_dropout(seed):
    """Selective recompute is such a mode, and eager seeds are numbers."""
    x = torch.randn(2, 3, 16, device=DEVICE)
    expected = philox.dropout(x, 0.5, seed)
    with FlopCounterMode(display=False):
        found = philox.dropout(x, 0.5, seed)
    assert torch.equal(found, expected) and 0 < (found == 0).sum() < x.numel()
    assert torch.equal(philox.dropout(x, 0.5, torch.tensor([seed], device=DEVICE)), expected)
