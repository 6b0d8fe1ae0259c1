"""How the Triton kernels of `attention` are cut, by head_dim and dtype."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from tilewright.runtime import dispatch

_L2_BYTES = 16 * 2**20  # that the tiles which programs share may take, of the 40 MB and more of recent GPUs


class Config(NamedTuple):
    """BLOCK_M queries by BLOCK_N keys; `stages` tiles of the loop are on their way at once."""

    block_m: int
    block_n: int
    warps: int
    stages: int


class Flags(NamedTuple):
    """What a kernel is compiled for, beside the head_dim and the dtypes."""

    has_left: bool
    has_right: bool
    softcap: bool
    dropout: bool


_Table = dict[int, tuple[Config, ...]]

# By the width of a head, rounded up to a power of two. The first that fits into shared memory is taken.
FORWARD: _Table = {
    64: (Config(128, 64, 4, 3), Config(64, 64, 4, 2)),
    128: (Config(128, 64, 8, 3), Config(128, 64, 8, 2), Config(64, 32, 4, 2)),
    256: (Config(128, 32, 8, 2), Config(64, 32, 4, 2), Config(32, 32, 4, 1)),
}
KEYS: _Table = {
    64: (Config(64, 128, 8, 2), Config(32, 64, 4, 2)),
    128: (Config(64, 128, 8, 2), Config(32, 64, 4, 2)),
    256: (Config(32, 64, 8, 2), Config(32, 32, 4, 1)),
}
QUERIES: _Table = {
    64: (Config(128, 64, 8, 3), Config(64, 32, 4, 2)),
    128: (Config(128, 64, 8, 2), Config(64, 32, 4, 2)),
    256: (Config(64, 32, 8, 2), Config(32, 32, 4, 1)),
}
BIAS: _Table = {
    64: (Config(64, 64, 4, 1),),
    128: (Config(64, 64, 8, 1), Config(32, 32, 4, 1)),
    256: (Config(32, 32, 4, 1),),
}
# In float32 no tensor core takes part: operands are in registers.
WIDE: _Table = {64: (Config(32, 32, 4, 2),), 128: (Config(16, 32, 8, 1),), 256: (Config(16, 16, 8, 1),)}
_TABLES = {
    "forward": FORWARD, "keys": KEYS, "queries": QUERIES, "bias": BIAS,
}  # fmt: skip
_INTERPRETED = {"forward": Config(32, 16, 4, 1), "keys": Config(16, 32, 4, 1), "queries": Config(32, 16, 4, 1),
                "bias": Config(32, 16, 4, 1)}  # fmt: skip


def columns_of(head_dim: int) -> int:
    """Columns of a tile: the smallest power of two that holds a head."""
    return max(16, 1 << (head_dim - 1).bit_length())


@functools.cache
def choose_config(device: torch.device, part: str, head_dim: int, dtype: torch.dtype) -> Config:
    """The launch config of a kernel: forward, keys, queries or bias."""
    if dispatch.INTERPRETED:
        return _INTERPRETED[part]
    width = max(64, columns_of(head_dim))
    configs = WIDE[width] if dtype.itemsize > 2 else _TABLES[part][width]
    for config in configs:
        if _shared_bytes(config, part, columns_of(head_dim) * dtype.itemsize) <= dispatch.shared_memory(device):
            return config
    return configs[-1]


def _shared_bytes(config: Config, part: str, row: int) -> int:
    """Shared memory of a program: the tiles that it keeps, and those of the loop."""
    if part == "forward":
        return row * (config.block_m + 2 * config.stages * config.block_n)
    if part == "keys":
        return row * (2 * config.block_n + 2 * config.stages * config.block_m)
    return row * (2 * config.block_m + 2 * config.stages * config.block_n)


def heads_in_l2(tokens: int, head_dim: int, itemsize: int, heads: int) -> int:
    """How many of `heads` have two tensors of so many tokens in L2 together."""
    return max(1, min(heads, _L2_BYTES // max(1, 2 * tokens * head_dim * itemsize)))


@functools.cache
def launch(
    part: str, device: torch.device, dtypes: tuple[Any, ...], head_dim: int, flags: Flags
) -> tuple[Config, dispatch.Launch]:
    """(config, the kernel); `dtypes` are those of all its tensors."""
    from tilewright.ops.attention import backward_kernels, forward_kernels

    kernel: Any = {
        "forward": forward_kernels.tilewright_attention_forward,
        "keys": backward_kernels.tilewright_attention_key_gradients,
        "queries": backward_kernels.tilewright_attention_query_gradients,
        "bias": backward_kernels.tilewright_attention_bias_gradient,
    }[part]
    config = choose_config(device, part, head_dim, dtypes[0])
    unit = 16 // dtypes[0].itemsize
    constants = (head_dim, columns_of(head_dim), unit, config.block_m, config.block_n, config.stages, *flags)
    return config, dispatch.Launch(kernel, device, constants, config.warps)


DELTA_ROWS = 16


@functools.cache
def delta_launch(device: torch.device, dtypes: tuple[Any, ...], head_dim: int) -> dispatch.Launch:
    """The kernel that sums up out dout."""
    from tilewright.ops.attention import backward_kernels

    constants = (head_dim, columns_of(head_dim), 16 // dtypes[0].itemsize, DELTA_ROWS)
    return dispatch.Launch(backward_kernels.tilewright_attention_delta, device, constants, 4)
