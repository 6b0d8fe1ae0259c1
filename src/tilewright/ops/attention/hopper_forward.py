"""Forward of attention on a Hopper: what `hopper_forward.cu` takes, its launch configs, and how it is started."""

from __future__ import annotations

import ctypes
import functools
import operator
from ctypes import c_float, c_int, c_void_p
from dataclasses import dataclass
from pathlib import Path

import torch

from tilewright.measure import work
from tilewright.plan.cost import attention as cost
from tilewright.runtime import dispatch, hopper, nvrtc

SOURCE = Path(__file__).with_name("hopper_forward.cu")
NAME = "tilewright_attention_forward"
HEADS = (64, 128)  # columns of a head
DTYPES = (torch.bfloat16, torch.float16)
BOUNDED_WAITS = nvrtc.BOUNDED_WAITS
_ROWS = 64  # queries of a warpgroup
_L2_BYTES = 32 << 20  # of keys and values that blocks read at the same time
_EVERYTHING = 2**30  # a window that leaves out nothing

Starts = tuple[torch.Tensor, torch.Tensor]  # where packed sequences of queries and of keys begin, and the last one ends


@dataclass(frozen=True)
class Config:
    """The launch config: columns of a head, consumer warpgroups, keys of a tile, stages of the key and value rings."""

    head_dim: int
    groups: int
    keys: int
    stages: int
    causal: bool
    half: bool
    packed: bool = False

    @property
    def rows(self) -> int:
        return _ROWS * self.groups

    @property
    def threads(self) -> int:
        return 128 * (self.groups + 1)

    @property
    def shared_bytes(self) -> int:
        rows = _ROWS * self.groups + 2 * self.stages * self.keys
        return rows * self.head_dim * 2 + 8 * (2 * self.groups + 4 * self.stages)

    @property
    def macros(self) -> dict[str, int]:
        return {
            "HEAD": self.head_dim, "GROUPS": self.groups, "KEYS": self.keys, "STAGES": self.stages,
            "CAUSAL": int(self.causal), "PACKED": int(self.packed), "HALF": int(self.half),
            "SHARED_BYTES": self.shared_bytes, "BOUNDED_WAITS": BOUNDED_WAITS,
        }  # fmt: skip


@functools.cache
def launch_config(head_dim: int, causal: bool, dtype: torch.dtype, packed: bool = False) -> Config:
    """Tiles as large as registers and shared memory hold; under a causal mask smaller ones, of which less is masked.

    >>> launch_config(128, True, torch.bfloat16).shared_bytes
    229504
    """
    half = dtype == torch.float16
    if head_dim == 64:
        return Config(64, 3, 128, 4, causal, half, packed)
    return Config(128, 2, 128, 3, causal, half, packed) if causal else Config(128, 2, 176, 2, causal, half, packed)


class _Sizes(ctypes.Structure):
    """`Sizes` of the kernel."""

    _numbers = "batch", "heads", "shared_by", "queries", "keys", "window", "section"
    _fields_ = (*((name, c_int) for name in _numbers), ("tiles", c_void_p))


def _sizes(q: torch.Tensor, k: torch.Tensor, window: int | None, tiles: torch.Tensor | None) -> _Sizes:
    batch, queries, heads, head_dim = q.shape
    keys, key_heads = k.shape[1:3]
    shared_by = heads // key_heads
    at_once = max(1, _L2_BYTES // (keys * head_dim * 4))  # heads of keys and values
    window = _EVERYTHING if window is None else min(window, _EVERYTHING)
    section, address = min(batch * heads, at_once * shared_by), None if tiles is None else tiles.data_ptr()
    return _Sizes(batch, heads, shared_by, queries, keys, window, section, address)


def compile_ahead(device: torch.device, head_dim: int, causal: bool, dtype: torch.dtype, packed: bool = False) -> None:
    """Begins to compile the kernel, if there is one."""
    if head_dim in HEADS and dtype in DTYPES and _compiler_takes_it():
        hopper.compile_ahead(device, SOURCE, launch_config(head_dim, causal, dtype, packed).macros)


@functools.cache
def _compiler_takes_it() -> bool:
    """NVRTC before 13.0 has not been tried, and crashes the process on the source of backward."""
    return nvrtc.compiler_version() >= (13, 0)


def _kernel(device: torch.device, config: Config) -> nvrtc.Kernel | None:
    if not _compiler_takes_it():
        return None
    loaded = hopper.kernels(device, SOURCE, (NAME,), config.threads, config.shared_bytes, config.macros)
    return None if loaded is None else loaded[NAME]


def is_there(
    device: torch.device, head_dim: int = HEADS[-1], causal: bool = True, dtype: torch.dtype = torch.bfloat16,
    packed: bool = False,
) -> bool:  # fmt: skip
    """Whether the kernel can run on a device: a Hopper, with NVRTC 13. It is compiled to find out."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    with torch.utils._python_dispatch._disable_current_modes():  # of a compiler, which has memory without addresses
        return _kernel(device, launch_config(head_dim, causal, dtype, packed)) is not None


is_there._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compiler's mark; that imports Dynamo


def why_not(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, window: int | None = None,
    scale: float | None = None, packed: bool = False,
) -> str:  # fmt: skip
    """Say what keeps `forward` from these; nothing where it takes them.

    >>> q, k, v = torch.randn(3, 1, 16, 4, 64)
    >>> why_not(q, k, v, causal=True)
    'the kernel takes bfloat16 and float16, and heads of 64 or 128'
    """
    parts = q, k, v
    if not all(t.ndim == 4 and t.dtype in DTYPES and t.shape[3] in HEADS for t in parts):
        return "the kernel takes bfloat16 and float16, and heads of 64 or 128"
    alike = all(t.device == q.device and t.dtype == q.dtype and t.shape[0] == q.shape[0] for t in (k, v))
    if not alike or k.shape != v.shape or k.shape[3] != q.shape[3]:
        return "queries, keys and values differ in device, dtype, batch or head_dim, or keys and values in shape"
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        return "the query heads are no multiple of the key heads"
    if window is not None and (not causal or window < 1):
        return "a window needs a causal mask and at least one key"
    if scale is not None and not 0.0 < scale < float("inf"):
        return "the scale is no positive number"
    if not is_there(q.device, operator.index(q.shape[3]), causal, q.dtype, packed):  # a number, where sizes are symbols
        return "the kernel is for a Hopper, and needs NVRTC 13"
    return ""


def _lies_well(t: torch.Tensor) -> bool:
    """Whether TMA can read it as it lies."""
    strides = [stride for size, stride in zip(t.shape[:3], t.stride()[:3], strict=True) if size > 1]
    apart = all(0 < stride < 2**38 and stride % 8 == 0 for stride in strides)
    return t.stride(3) == 1 and apart and t.data_ptr() % 16 == 0 and not t.is_neg()


def readable(t: torch.Tensor) -> torch.Tensor:
    """The tensor as TMA can read it: itself, or a copy."""
    return t if _lies_well(t) else t.resolve_neg().clone(memory_format=torch.contiguous_format)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, window: int | None = None,
    scale: float | None = None, starts: Starts | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The result, packed as (batch, queries, heads, head_dim), and a natural logarithm, (batch, heads, queries).

    For what `why_not` has nothing against. Where there are more or fewer keys than queries, the last query sees the
    last key under a causal mask; `window` is how many keys a query sees at most, its own among them. A query that sees
    none has 0 and -inf. `starts` are where packed sequences begin in a batch of 1, of queries and of keys: tokens of
    none have 0 and -inf, too, and so have all where `starts` are out of place.
    """
    batch, queries, heads, head_dim = q.shape
    out = q.new_empty(q.shape)
    lse = q.new_empty((batch, heads, queries), dtype=torch.float32)
    if k.shape[1] == 0:
        return out.zero_(), lse.fill_(-torch.inf)
    if out.numel() == 0:
        return out, lse
    config = launch_config(head_dim, causal, q.dtype, starts is not None)
    kernel = _kernel(q.device, config)
    assert kernel is not None
    q, k, v = map(readable, (q, k, v))
    table, tiles, count = None, -(-queries // config.rows) * batch * heads, 1
    if starts is not None:
        from tilewright.ops.attention.packed_kernels import make_tiles

        made = make_tiles(*starts, queries, k.shape[1], config.rows)
        table, tiles, count = made.table, made.most * heads, max(1, len(starts[0]) - 1)
    # Of packed sequences the host knows the mean length alone.
    context = _context(-(-queries // count), -(-k.shape[1] // count), causal, window)
    flops = cost(batch, queries, heads, k.shape[2], head_dim, context=context).flops
    with work.launching(NAME, (q, k, v, out, lse), float(flops)):
        map_of = nvrtc.head_map if starts is None else nvrtc.packed_head_map
        maps = map_of(q, _ROWS), map_of(k, config.keys), map_of(v, config.keys)
        addresses = c_void_p(out.data_ptr()), c_void_p(lse.data_ptr())
        numbers = _sizes(q, k, window, table), c_float(head_dim**-0.5 if scale is None else scale)
        kernel(min(tiles, dispatch.multiprocessors(q.device)), (*maps, *addresses, *numbers))
    return out, lse


def _context(queries: int, keys: int, causal: bool, window: int | None) -> float:
    """Keys that a query sees in the mean, give or take those before a window is full.

    >>> _context(4, 6, True, None), _context(6, 4, True, None), _context(4, 4, False, None)
    (4.5, 1.6666666666666667, 4.0)
    """
    if not causal:
        return float(keys)
    seeing = min(queries, keys)  # queries that see any
    mean = (keys - (seeing - 1) / 2) * seeing / queries
    return mean if window is None else min(mean, window * seeing / queries)
