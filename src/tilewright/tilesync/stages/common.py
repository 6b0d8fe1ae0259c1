"""What stages share: activations, the dtype that they compute in, grids."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.tilesync.graph import GraphError, Tile
from tilewright.tilesync.policies import Policy

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
}
MOST_FEW_ROWS, FEW_COLUMNS = 32, 16  # of a tile of few rows: its rows at most, and the weight's rows in a group
L2_SHARE = 0.3  # of memory's time for a byte that is read again and again, and so lies in L2
Sync = Mapping[str, Policy] | None


def widen(x: Tensor) -> Tensor:
    """Convert to what stages compute in."""
    return x if x.dtype == torch.float64 else x.float()


def tiles(sizes: Sequence[int], tile: Sequence[int]) -> Tile:
    """Return the grid of tiles that covers so much."""
    return tuple(-(-size // step) for size, step in zip(sizes, tile, strict=True))


def check_activation(stage: str, name: str) -> str:
    """Return the name of an activation that exists."""
    if name not in ACTIVATIONS:
        raise GraphError(f"Stage {stage}: activation {name!r} is unknown; take one of {', '.join(ACTIVATIONS)}.")
    return name
