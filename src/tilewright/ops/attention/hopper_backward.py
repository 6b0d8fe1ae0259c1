"""Backward of attention on a Hopper: what `hopper_backward.cu` takes, its launch configs, and how it is started.

    S = scale q k^T,  P = softmax of S under the mask
    dP = dout v^T,  dS = P (dP - delta),  delta = sum of out dout
    dq = scale dS k,  dk = scale dS^T q,  dv = P^T dout

It runs between two small kernels: the first sums up out dout, the last rounds dq, which is added up in float32. The
order of every sum is always the same. Triton neither puts matmuls of registers beside each other as it does nor adds to
memory by TMA.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import c_float, c_int, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from tilewright.measure import work
from tilewright.ops.attention.hopper_forward import DTYPES, HEADS, Starts, readable
from tilewright.plan.cost import attention as cost
from tilewright.plan.cost import mean_context
from tilewright.runtime import dispatch, hopper, nvrtc

if TYPE_CHECKING:
    from tilewright.ops.attention.packed_kernels import Tiles

SOURCE = Path(__file__).with_name("hopper_backward.cu")
NAME = "tilewright_attention_backward"
BOUNDED_WAITS = nvrtc.BOUNDED_WAITS
_KEYS = 128  # of a block
_THREADS = 384
_EVERYTHING = 2**29  # a window that leaves out nothing

Tensor = torch.Tensor


@dataclass(frozen=True)
class Config:
    """The launch config: columns of a head, queries of a tile, stages of the rings of queries and of gradients."""

    head_dim: int
    queries: int
    query_stages: int
    dout_stages: int
    half: bool
    packed: bool = False

    @property
    def shared_bytes(self) -> int:
        keys, scores, sums = 2 * _KEYS * self.head_dim * 2, 2 * _KEYS * self.queries * 2, 2 * 64 * 64 * 4
        stages = self.query_stages + self.dout_stages
        return keys + scores + sums + stages * self.queries * (2 * self.head_dim + 4) + 8 * (2 * stages + 5)

    @property
    def macros(self) -> dict[str, int]:
        return {
            "HEAD": self.head_dim, "QUERIES": self.queries, "Q_STAGES": self.query_stages,
            "DO_STAGES": self.dout_stages, "PACKED": int(self.packed), "HALF": int(self.half),
            "SHARED_BYTES": self.shared_bytes, "BOUNDED_WAITS": BOUNDED_WAITS,
        }  # fmt: skip


@functools.cache
def launch_config(head_dim: int, dtype: torch.dtype, packed: bool = False) -> Config:
    """Tiles as large as registers hold, and as many stages as there is shared memory for.

    >>> launch_config(64, torch.bfloat16).shared_bytes, launch_config(128, torch.bfloat16).shared_bytes
    (215672, 231048)
    """
    half = dtype == torch.float16
    return Config(64, 128, 3, 2, half, packed) if head_dim == 64 else Config(128, 64, 3, 3, half, packed)


class Span(NamedTuple):
    """Query i of n sees key j of m where ``i + m - n - left <= j <= i + m - n + right``; -1 is no limit."""

    left: int
    right: int
    scale: float


class _Sizes(ctypes.Structure):
    """`Sizes` of the kernel."""

    _names = "batch", "heads", "shared_by", "queries", "keys", "left", "right", "section", "tiles"
    _fields_ = (*((name, c_int) for name in _names), ("blocks", c_void_p))


def _section(heads: int, blocks: int, span: Span, processors: int) -> int:
    """Blocks of a head that begin with the last keys, before those of the keys in front of them begin.

    Under a causal mask the first keys have the longest walks: a grid that begins with these ends evenly, if sections
    are short beside all that a processor does. Long ones read less from memory. `heads` are those of keys, of all
    batches.

    >>> causal = Span(-1, 0, 0.125)
    >>> _section(64, 32, causal, 132), _section(128, 32, causal, 132), _section(16, 128, Span(99, 0, 0.125), 132)
    (8, 15, 128)
    """
    if span.left >= 0:
        return blocks
    return min(blocks, max(8, heads * blocks // (2 * processors) if span.right >= 0 else 0))


@functools.cache
def foresee(device: torch.device, head_dim: int, dtype: torch.dtype, packed: bool = False) -> None:
    """Begins to compile the kernels of backward."""
    compile_ahead(device, head_dim, dtype, packed)
    from tilewright.ops.attention import kernels, packed_kernels

    def rehearse() -> None:
        tile, tiles = launch_config(head_dim, dtype).queries, None
        rows = torch.empty((1, tile, 1, head_dim), dtype=dtype, device=device)
        sums = torch.empty(rows.shape, dtype=torch.float32, device=device)
        if packed:
            starts = torch.empty(2, dtype=torch.int32, device=device)
            tiles = packed_kernels.make_tiles(starts, starts, tile, tile, _KEYS, 1)
        *_, counts = kernels.prepare(rows, rows, sums[..., 0].transpose(1, 2), tile, 1.0, tiles)
        kernels.finish(sums, counts, rows, tile, 1.0, tiles)

    dispatch.rehearse(rehearse)


@functools.cache
def _compiler_takes_it() -> bool:
    """NVRTC 12.8 and 12.9 crash the process on this source; 13.0 and 13.4 compile it."""
    return nvrtc.compiler_version() >= (13, 0)


def compile_ahead(
    device: torch.device, head_dim: int, dtype: torch.dtype = torch.bfloat16, packed: bool = False
) -> None:
    """Begins to compile the kernel, where there is one."""
    if head_dim in HEADS and dtype in DTYPES and _compiler_takes_it():
        hopper.compile_ahead(device, SOURCE, launch_config(head_dim, dtype, packed).macros)


def backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, causal: bool, left: int, scale: float,
    starts: Starts | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk and dv, packed, for what `why_not` has nothing against.

    `starts` are where packed sequences begin in a batch of 1, of queries and of keys. Tokens of none get 0.
    """
    from tilewright.ops.attention import kernels, packed_kernels

    tile, span = launch_config(q.shape[3], q.dtype).queries, Span(left, 0 if causal else -1, scale)
    dq, dk, dv = (t.new_empty(t.shape) for t in (q, k, v))
    # A saved-tensor hook may have moved them, and a gradient may have any strides.
    q, k, v, dout, out = map(readable, (q, k, v, dout, out))
    section, tiles = _section_of(q, k, span, starts), None
    if starts is not None:
        tiles = packed_kernels.make_tiles(*starts, q.shape[1], k.shape[1], _KEYS, section)
    begins, slope_begins, counts = kernels.prepare(out, dout, lse, tile, scale, tiles)
    sums = begins.new_empty(begins.numel() * q.shape[3])
    _start((q, k, v, dout), begins, slope_begins, (dk, dv), sums, counts, span, section, tiles)
    kernels.finish(sums, counts, dq, tile, scale, tiles)
    return dq, dk, dv


def _section_of(q: Tensor, k: Tensor, span: Span, starts: Starts | None) -> int:
    """Blocks of a section of a head; of packed sequences, whose lengths the host does not know, of the mean one."""
    sequences = k.shape[0] if starts is None else max(1, len(starts[0]) - 1)
    blocks = -(-k.shape[1] // (_KEYS * (sequences if starts is not None else 1)))
    section = _section(sequences * k.shape[2], blocks, span, dispatch.multiprocessors(q.device))
    if starts is None:
        return section
    return _EVERYTHING if span.left >= 0 else max(8, section)


def _start(
    inputs: Sequence[Tensor], starts: Tensor, slope_starts: Tensor, gradients: Sequence[Tensor], sums: Tensor,
    counts: Tensor, span: Span, section: int, tiles: Tiles | None,
) -> None:  # fmt: skip
    """Starts the kernel. Inputs are queries, keys, values and dout, and gradients those of keys and values."""
    from tilewright.ops.attention import kernels

    q, k = inputs[:2]
    (batch, queries, heads, head_dim), (keys, key_heads) = q.shape, k.shape[1:3]
    config = launch_config(head_dim, q.dtype, tiles is not None)
    kernel = _kernel(q.device, config)
    assert kernel is not None
    sequences = 1 if tiles is None else max(1, len(tiles.bounds) - 3)  # of whose lengths the host knows the mean alone
    context = mean_context(-(-queries // sequences), -(-keys // sequences), span.left, span.right)
    flops = cost(batch, queries, heads, key_heads, head_dim, keys=keys, context=context, backward=True).flops
    blocks, table = (batch * -(-keys // _KEYS), None) if tiles is None else (tiles.most, tiles.table.data_ptr())
    left, right = (_EVERYTHING if side < 0 else min(side, _EVERYTHING) for side in span[:2])
    padded = kernels.count_tiles(queries, config.queries, tiles)
    sizes = _Sizes(batch, heads, heads // key_heads, queries, keys, left, right, section, padded, table)
    with work.launching(NAME, (*inputs, starts, slope_starts, *gradients, sums), float(flops)):
        rows = config.queries, _KEYS, _KEYS, config.queries, _KEYS // 2, _KEYS // 2
        map_of = nvrtc.head_map if tiles is None else nvrtc.packed_head_map
        maps = [map_of(t, count) for t, count in zip((*inputs, *gradients), rows, strict=True)]
        addresses = [c_void_p(t.data_ptr()) for t in (starts, slope_starts, sums, counts)]
        kernel(blocks * key_heads, (*maps, *addresses, sizes, c_float(span.scale)))


def _kernel(device: torch.device, config: Config) -> nvrtc.Kernel | None:
    if not _compiler_takes_it():
        return None
    loaded = hopper.kernels(device, SOURCE, (NAME,), _THREADS, config.shared_bytes, config.macros)
    return None if loaded is None else loaded[NAME]


def why_not(q: Tensor, k: Tensor, v: Tensor, causal: bool, left: int, scale: float, packed: bool = False) -> str:
    """Say what keeps `backward` from these; nothing where it takes them.

    >>> q, k, v = torch.randn(3, 1, 16, 4, 64)
    >>> why_not(q, k, v, True, -1, 0.125)
    'the kernel takes bfloat16 and float16, and heads of 64 or 128'
    """
    if q.dtype not in DTYPES or q.shape[3] not in HEADS:
        return "the kernel takes bfloat16 and float16, and heads of 64 or 128"
    if not 0.0 < scale < float("inf"):
        return "the scale is no positive number"
    if q.shape[1] == 0 or k.shape[1] == 0:
        return "there is nothing to compute"
    is_alike = q.dtype == k.dtype == v.dtype and k.shape == v.shape and q.shape[::3] == k.shape[::3]
    shares = k.shape[2] > 0 and q.shape[2] % k.shape[2] == 0
    if not is_alike or not shares:
        return "the kernel takes keys and values alike, in heads that divide the queries'"
    if _kernel(q.device, launch_config(q.shape[3], q.dtype, packed)) is None:
        return "the kernel is for a Hopper, and needs NVRTC 13"
    return ""
