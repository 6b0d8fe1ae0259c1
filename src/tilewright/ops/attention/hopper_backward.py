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
from typing import NamedTuple

import torch

from tilewright.measure import work
from tilewright.ops.attention.hopper_forward import DTYPES, HEADS, readable
from tilewright.plan.cost import attention as cost
from tilewright.plan.cost import mean_context
from tilewright.runtime import dispatch, hopper, nvrtc

SOURCE = Path(__file__).with_name("hopper_backward.cu")
NAME = "tilewright_attention_backward"
BOUNDED_WAITS = 0  # 1: a kernel that waits for more than two seconds traps, where it would hang; for tests
_KEYS = 128  # of a block
_THREADS = 384
_EVERYTHING = 2**29  # a window that leaves out nothing

Tensor = torch.Tensor


@dataclass(frozen=True)
class Config:
    """Of a kernel: columns of a head, queries of a tile, stages of the rings of queries and of gradients."""

    head_dim: int
    queries: int
    query_stages: int
    dout_stages: int
    half: bool

    @property
    def shared_bytes(self) -> int:
        keys, scores, sums = 2 * _KEYS * self.head_dim * 2, 2 * _KEYS * self.queries * 2, 2 * 64 * 64 * 4
        stages = self.query_stages + self.dout_stages
        return keys + scores + sums + stages * self.queries * (2 * self.head_dim + 4) + 8 * (2 * stages + 5)

    @property
    def macros(self) -> dict[str, int]:
        return {
            "HEAD": self.head_dim, "QUERIES": self.queries, "Q_STAGES": self.query_stages,
            "DO_STAGES": self.dout_stages, "HALF": int(self.half), "SHARED_BYTES": self.shared_bytes,
            "BOUNDED_WAITS": BOUNDED_WAITS,
        }  # fmt: skip


@functools.cache
def launch_config(head_dim: int, dtype: torch.dtype) -> Config:
    """Tiles as large as registers hold, and as many stages as there is shared memory for.

    >>> launch_config(64, torch.bfloat16).shared_bytes, launch_config(128, torch.bfloat16).shared_bytes
    (215672, 231048)
    """
    half = dtype == torch.float16
    return Config(64, 128, 3, 2, half) if head_dim == 64 else Config(128, 64, 3, 3, half)


class Span(NamedTuple):
    """Query i of n sees key j of m where ``i + m - n - left <= j <= i + m - n + right``; -1 is no limit."""

    left: int
    right: int
    scale: float


class _Sizes(ctypes.Structure):
    """`Sizes` of the kernel."""

    _names = "batch", "heads", "shared_by", "queries", "keys", "left", "right", "section"
    _fields_ = tuple((name, c_int) for name in _names)


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
def foresee(device: torch.device, head_dim: int, dtype: torch.dtype) -> None:
    """Begins to compile the kernels of backward."""
    compile_ahead(device, head_dim, dtype)
    from tilewright.ops.attention import kernels

    def rehearse() -> None:
        tile = launch_config(head_dim, dtype).queries
        rows = torch.empty((1, tile, 1, head_dim), dtype=dtype, device=device)
        sums = torch.empty(rows.shape, dtype=torch.float32, device=device)
        *_, counts = kernels.prepare(rows, rows, sums[..., 0].transpose(1, 2), tile, 1.0)
        kernels.finish(sums, counts, rows, tile, 1.0)

    dispatch.rehearse(rehearse)


@functools.cache
def _compiler_takes_it() -> bool:
    """NVRTC 12.8 and 12.9 crash the process on this source; 13.0 and 13.4 compile it."""
    return nvrtc.compiler_version() >= (13, 0)


def compile_ahead(device: torch.device, head_dim: int, dtype: torch.dtype = torch.bfloat16) -> None:
    """Begins to compile the kernel, where there is one."""
    if head_dim in HEADS and dtype in DTYPES and _compiler_takes_it():
        hopper.compile_ahead(device, SOURCE, launch_config(head_dim, dtype).macros)


def backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, causal: bool, left: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv, packed, for what `why_not` has nothing against."""
    from tilewright.ops.attention import kernels

    tile, span = launch_config(q.shape[3], q.dtype).queries, Span(left, 0 if causal else -1, scale)
    dq, dk, dv = (t.new_empty(t.shape) for t in (q, k, v))
    # A saved-tensor hook may have moved them, and a gradient may have any strides.
    q, k, v, dout, out = map(readable, (q, k, v, dout, out))
    starts, slope_starts, counts = kernels.prepare(out, dout, lse, tile, scale)
    sums = starts.new_empty(starts.numel() * q.shape[3])
    _start((q, k, v, dout), starts, slope_starts, (dk, dv), sums, counts, span)
    kernels.finish(sums, counts, dq, tile, scale)
    return dq, dk, dv


def _start(
    inputs: Sequence[Tensor], starts: Tensor, slope_starts: Tensor, gradients: Sequence[Tensor], sums: Tensor,
    counts: Tensor, span: Span,
) -> None:  # fmt: skip
    """Starts the kernel. Inputs are queries, keys, values and dout, and gradients those of keys and values."""
    q, k = inputs[:2]
    (batch, queries, heads, head_dim), (keys, key_heads) = q.shape, k.shape[1:3]
    config = launch_config(head_dim, q.dtype)
    kernel = _kernel(q.device, config)
    assert kernel is not None
    context = mean_context(queries, keys, span.left, span.right)
    flops = cost(batch, queries, heads, key_heads, head_dim, keys=keys, context=context, backward=True).flops
    blocks = -(-keys // _KEYS)
    left, right = (_EVERYTHING if side < 0 else min(side, _EVERYTHING) for side in span[:2])
    section = _section(batch * key_heads, blocks, span, dispatch.multiprocessors(q.device))
    sizes = _Sizes(batch, heads, heads // key_heads, queries, keys, left, right, section)
    with work.launching(NAME, (*inputs, starts, slope_starts, *gradients, sums), float(flops)):
        rows = config.queries, _KEYS, _KEYS, config.queries, _KEYS // 2, _KEYS // 2
        maps = [nvrtc.head_map(t, count) for t, count in zip((*inputs, *gradients), rows, strict=True)]
        addresses = [c_void_p(t.data_ptr()) for t in (starts, slope_starts, sums, counts)]
        kernel(batch * key_heads * blocks, (*maps, *addresses, sizes, c_float(span.scale)))


def _kernel(device: torch.device, config: Config) -> nvrtc.Kernel | None:
    if not _compiler_takes_it():
        return None
    loaded = hopper.kernels(device, SOURCE, (NAME,), _THREADS, config.shared_bytes, config.macros)
    return None if loaded is None else loaded[NAME]


def why_no_shape(q: Tensor, k: Tensor, v: Tensor, causal: bool, left: int, scale: float) -> str:
    """Say what keeps the kernel from calls like this one; nothing where it takes them on some Hopper.

    >>> q, k, v = torch.randn(3, 1, 16, 4, 64)
    >>> why_no_shape(q, k, v, True, -1, 0.125)
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
    return "" if is_alike and shares else "the kernel takes keys and values alike, in heads that divide the queries'"


def why_not(q: Tensor, k: Tensor, v: Tensor, causal: bool, left: int, scale: float) -> str:
    """Say what keeps `backward` from these; nothing where it takes them."""
    why = why_no_shape(q, k, v, causal, left, scale)
    if why or _kernel(q.device, launch_config(q.shape[3], q.dtype)) is not None:
        return why
    return "the kernel is for a Hopper, and needs NVRTC 13"
