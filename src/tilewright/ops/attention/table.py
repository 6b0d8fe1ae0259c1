"""Which backend of `attention` was measured to be the fastest, by GPU, dtype, head_dim, mask and length.

The package brings `measured.json`. What `tilewright bench attention --learn` measures goes to the user's cache, and
comes first. Both are a JSON object that names a backend for each key, such as

    {"NVIDIA H200 / bfloat16 / 64 / causal / 2048": "hopper"}

where the length is a power of two and stands for all down to the one below it; of packed sequences, for the longest.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import NamedTuple

import torch

from tilewright.runtime import disk_cache
from tilewright.runtime.log import log

PACKAGED = Path(__file__).with_name("measured.json")
_SHORTEST, _LONGEST = 512, 2**20


class Key(NamedTuple):
    """What a measurement is of."""

    gpu: str
    dtype: torch.dtype
    head_dim: int
    causal: bool
    length: int
    packed: bool = False

    def __str__(self) -> str:
        """
        >>> str(Key("NVIDIA H200", torch.bfloat16, 64, True, 1500))
        'NVIDIA H200 / bfloat16 / 64 / causal / 2048'
        >>> str(Key("NVIDIA H200", torch.bfloat16, 64, True, 1500, packed=True))
        'NVIDIA H200 / bfloat16 / 64 / causal packed / 2048'
        """
        mask, dtype = "causal" if self.causal else "full", str(self.dtype).removeprefix("torch.")
        mask += " packed" if self.packed else ""
        return f"{self.gpu} / {dtype} / {self.head_dim} / {mask} / {bucket(self.length)}"


def bucket(length: int) -> int:
    """The power of two that stands for a length.

    >>> bucket(512), bucket(513), bucket(3)
    (512, 1024, 512)
    """
    return min(_LONGEST, max(_SHORTEST, 1 << (length - 1).bit_length()))


@functools.cache
def gpu_name(device: torch.device) -> str:
    """The name of a GPU, as its driver gives it."""
    return torch.cuda.get_device_name(device)


def find(key: Key) -> str:
    """The fastest backend, or nothing."""
    measured = _read()
    return measured.get(str(key), "") if measured else ""


def learn(measured: dict[Key, str]) -> None:
    """Add measurements to the user's cache; all processes that start later know them."""
    own = _read_own()
    own.update((str(key), backend) for key, backend in measured.items())
    disk_cache.put(_entry(), json.dumps(own, sort_keys=True).encode())
    _read.cache_clear()


@functools.cache
def _read() -> dict[str, str]:
    return _parse(PACKAGED.read_bytes()) | _read_own()


def _read_own() -> dict[str, str]:
    return _parse(disk_cache.get(_entry()) or b"{}")


def _entry() -> str:
    return disk_cache.make_key("attention backends", 1)


def _parse(text: bytes) -> dict[str, str]:
    try:
        return {str(key): str(backend) for key, backend in json.loads(text).items()}
    except (AttributeError, ValueError) as error:
        log.warning("The measurements of attention's backends cannot be read and are left out: %s", error)
        return {}
