"""Where torch's random generators stand, as tensors: what a run needs to draw the same numbers after a restart."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def random_state() -> dict[str, Tensor]:
    """The state of torch's generators, of the CPU and of this process's GPU, to be saved.

    >>> state = random_state()
    >>> drawn = torch.rand(3)
    >>> set_random_state(state)
    >>> torch.equal(torch.rand(3), drawn)
    True
    """
    if torch.cuda.is_initialized():
        cuda = torch.cuda.get_rng_state()
    else:  # what a GPU would have after the same torch.manual_seed: its seed, and nothing drawn
        cuda = torch.tensor([torch.initial_seed(), 0], dtype=torch.uint64).view(torch.uint8)
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def set_random_state(state: Mapping[str, Tensor]) -> None:
    """Go on drawing where `random_state` was taken."""
    torch.set_rng_state(state["cpu"].cpu())
    if torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"].cpu())
