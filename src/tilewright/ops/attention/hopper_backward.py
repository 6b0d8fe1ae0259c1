"""Backward of causal attention on a Hopper: what `hopper_backward.cu` takes, and how it is started.

    S = scale q k^T,  P = softmax of S under the mask
    dP = dout v^T,  dS = P (dP - delta),  delta = sum of out dout
    dq = scale dS k,  dk = scale dS^T q,  dv = P^T dout

It runs between two small kernels: the first sums up out dout, the last rounds dq, which is added up in float32. The
order of every sum is always the same. Triton neither puts matmuls of registers beside each other as it does nor adds to
memory by TMA.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from ctypes import c_float, c_int, c_void_p
from pathlib import Path

import torch

from tilewright.measure import work
from tilewright.plan.cost import attention as cost
from tilewright.runtime import dispatch, hopper, nvrtc

SOURCE = Path(__file__).with_name("hopper_backward.cu")
NAME = "tilewright_attention_backward"
_THREADS, _SHARED_BYTES = 384, 215_672
MACROS = {"SHARED_BYTES": _SHARED_BYTES}
HEAD, BLOCK = 64, 128  # columns of a head; queries, or keys, of a tile

Tensor = torch.Tensor


@functools.cache
def foresee(device: torch.device, heads: int, width: int) -> None:
    """Begins to compile the kernels of backward."""
    compile_ahead(device)
    from tilewright.ops.attention import kernels

    def rehearse() -> None:
        rows = torch.empty((BLOCK, heads * width), dtype=torch.bfloat16, device=device)
        sums = torch.empty(BLOCK * heads * width, dtype=torch.float32, device=device)
        kernels.prepare(rows, rows, sums[: BLOCK * heads], heads, BLOCK, 1.0)
        kernels.finish(sums, rows, heads, BLOCK, 1.0)

    dispatch.rehearse(rehearse)


@functools.cache
def _compiler_takes_it() -> bool:
    """NVRTC 12.8 and 12.9 crash the process on this source; 13.0 and 13.4 compile it."""
    return nvrtc.compiler_version() >= (13, 0)


def compile_ahead(device: torch.device) -> None:
    """Begins to compile the kernel, where there is one."""
    if _compiler_takes_it():
        hopper.compile_ahead(device, SOURCE, MACROS)


def backward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv, for what `why_not` has nothing against."""
    from tilewright.ops.attention import kernels

    _, sequence, heads, width = q.shape
    scale = width**-0.5
    dq, dk, dv = (q.new_empty(q.shape) for _ in range(3))
    # A saved-tensor hook may have moved them, and a gradient may have any strides.
    inputs = [_rows(t if lies_in_rows(t) else dispatch.packed((t,))[0]) for t in (q, k, v, dout, out)]
    starts, slope_starts, counts = kernels.prepare(inputs[4], inputs[3], lse, heads, sequence, scale)
    sums = torch.empty_like(dq, dtype=torch.float32)
    _start(inputs[:4], starts, slope_starts, (_rows(dk), _rows(dv)), sums, counts, q.shape)
    kernels.finish(sums, _rows(dq), heads, sequence, scale)
    return dq, dk, dv


def _start(
    inputs: Sequence[Tensor], starts: Tensor, slope_starts: Tensor, gradients: Sequence[Tensor], sums: Tensor,
    counts: Tensor, shape: torch.Size,
) -> None:  # fmt: skip
    """Starts the kernel. Inputs, queries, keys, values and dout, and gradients, of keys and values, are rows."""
    batch, sequence, heads, width = shape
    flops = float(cost(batch, sequence, heads, heads, width, backward=True).flops)
    kernel = _kernel(sums.device)
    assert kernel is not None
    with work.launching(NAME, (*inputs, starts, slope_starts, *gradients, sums), flops):
        maps = [nvrtc.tensor_map(rows, HEAD, BLOCK) for rows in inputs]
        maps += [nvrtc.tensor_map(rows, HEAD, BLOCK // 2) for rows in gradients]
        addresses = [c_void_p(t.data_ptr()) for t in (starts, slope_starts, sums, counts)]
        numbers = c_int(sequence), c_int(heads), c_float(width**-0.5)
        kernel(batch * heads * (sequence // BLOCK), (*maps, *addresses, *numbers))


def _rows(t: Tensor) -> Tensor:
    """Tokens of all batches by the columns of all heads, as TMA takes them."""
    batch, sequence, heads, width = t.shape
    return t.as_strided((batch * sequence, heads * width), (t.stride(1), 1))


def lies_in_rows(t: Tensor) -> bool:
    """Whether `_rows` is what it says."""
    batch, sequence, heads, width = t.shape
    aligned = dispatch.is_traced(t) or t.data_ptr() % 16 == 0
    side_by_side = t.stride(3) == 1 and t.stride(2) == width and aligned and not t.is_neg()
    apart = t.stride(1) >= heads * width and t.stride(1) % 8 == 0
    return side_by_side and apart and (batch == 1 or t.stride(0) == sequence * t.stride(1))


def _kernel(device: torch.device) -> nvrtc.Kernel | None:
    if not _compiler_takes_it():
        return None
    loaded = hopper.kernels(device, SOURCE, (NAME,), _THREADS, _SHARED_BYTES, MACROS)
    return None if loaded is None else loaded[NAME]


def why_no_shape(q: Tensor, k: Tensor, v: Tensor, causal: bool, left: int, scale: float) -> str:
    """Say what keeps the kernel from calls like this one; nothing where it takes them on some Hopper."""
    if not causal or left >= 0 or scale != HEAD**-0.5:
        return "the kernel has a causal mask, no window, and the usual scale"
    if q.dtype != torch.bfloat16 or q.shape[3] != HEAD or q.shape[1] % BLOCK or q.shape[1] == 0:
        return f"the kernel takes bfloat16, heads of {HEAD} and sequences of a multiple of {BLOCK}"
    return "" if q.shape == k.shape == v.shape else "the kernel takes keys and values of the queries' shape"


def why_not(q: Tensor, k: Tensor, v: Tensor, causal: bool, left: int, scale: float) -> str:
    """Say what keeps `backward` from these; nothing where it takes them."""
    why = why_no_shape(q, k, v, causal, left, scale)
    return why or ("the kernel is for a Hopper, and needs NVRTC 13" if _kernel(q.device) is None else "")
