"""Causal `attention` on a Hopper: cuDNN's forward, and a backward in CUDA C++.

    S = scale q k^T,  P = softmax of S under the mask,  out = P v
    dP = dout v^T,  dS = P (dP - delta),  delta = sum of out dout
    dq = scale dS k,  dk = scale dS^T q,  dv = P^T dout

Forward is cuDNN's, as torch has it. Backward is a kernel in CUDA C++ (`hopper.cu`), for Triton neither puts
matmuls of registers beside each other as that does nor adds to memory by TMA. It runs between two small ones:
the first sums up out dout, the last rounds dq, which is added up in float32. The order of every sum is always the same.

This is for heads of 64 in bfloat16, as many of keys as of queries, and sequences of a multiple of 128 tokens. `auto`
takes it where PyTorch would take cuDNN's forward, and where it is large enough to pay.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from ctypes import c_float, c_int, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from tilewright.measure import work
from tilewright.ops.attention.arguments import ONCE, Inputs
from tilewright.plan.cost import attention as cost
from tilewright.runtime import dispatch, hopper, nvrtc

SOURCE = Path(__file__).with_name("hopper.cu")
NAME = "tilewright_attention_backward"
_THREADS, _SHARED_BYTES = 384, 215_672
MACROS = {"SHARED_BYTES": _SHARED_BYTES}
HEAD, BLOCK = 64, 128  # columns of a head; queries, or keys, of a tile
HOST_BOUND = 2**28  # pairs of a query and a key up to which an eager host may lose what the device saves
_DEVICES = ("cuda",)

Tensor = torch.Tensor


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = _forward(q, k, v)
        _foresee_backward(q.device, *q.shape[2:])
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(ONCE)
        q, k, v, out, lse = ctx.saved_tensors
        return _backward(q, k, v, out, lse, dout)


def _forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The result, and a logarithm for each query: (batch, heads, sequence, 1)."""
    by_head = [t.transpose(1, 2) for t in (q, k, v)]
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(*by_head, None, True, 0.0, True, False)
    return out.transpose(1, 2), lse


@functools.cache
def _foresee_backward(device: torch.device, heads: int, width: int) -> None:
    """Begins to compile the small kernels of backward."""
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
    """Begins to compile the kernel of backward, where there is one."""
    if _compiler_takes_it():
        hopper.compile_ahead(device, SOURCE, MACROS)


def _backward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    from tilewright.ops.attention import kernels

    _, sequence, heads, width = q.shape
    scale = width**-0.5
    dq, dk, dv = (q.new_empty(q.shape) for _ in range(3))
    # Whoever saved tensors for us may have put them elsewhere, and a gradient may lie anyhow.
    inputs = [_rows(t if _lies_in_rows(t) else dispatch.packed((t,))[0]) for t in (q, k, v, dout, out)]
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


def _lies_in_rows(t: Tensor) -> bool:
    """Whether `_rows` is what it says."""
    batch, sequence, heads, width = t.shape
    side_by_side = t.stride(3) == 1 and t.stride(2) == width and t.data_ptr() % 16 == 0 and not t.is_neg()
    apart = t.stride(1) >= heads * width and t.stride(1) % 8 == 0
    return side_by_side and apart and (batch == 1 or t.stride(0) == sequence * t.stride(1))


def _kernel(device: torch.device) -> nvrtc.Kernel | None:
    if not _compiler_takes_it():
        return None
    loaded = hopper.kernels(device, SOURCE, (NAME,), _THREADS, _SHARED_BYTES, MACROS)
    return None if loaded is None else loaded[NAME]


def why_not(inputs: Inputs) -> str:
    """Say why the kernels cannot take the call; nothing where they can."""
    q, parts = inputs.q, inputs[:3]
    kind = q.device.type
    if kind not in _DEVICES or not dispatch.runs_kernel(q):
        return dispatch.why_no_kernel(q)
    if dispatch.is_traced(*parts):
        return "a compiler, a dispatch mode or a tensor subclass sees PyTorch's own ops"
    if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) != q.dtype:
        return "autocast has another dtype than the queries"
    if q.dtype != torch.bfloat16 or q.shape[3] != HEAD or q.shape[1] % BLOCK:
        return f"the kernel takes bfloat16, heads of {HEAD} and sequences of a multiple of {BLOCK}"
    if not all(t.shape == q.shape and t.dtype == q.dtype and t.device == q.device for t in parts):
        return "the kernel takes keys and values of the queries' shape and dtype"
    if not all(map(_lies_in_rows, parts)):
        return "a token's heads do not lie side by side in memory"
    return "the kernel is for a Hopper, and needs NVRTC" if _kernel(q.device) is None else ""


def why_unwise(inputs: Inputs) -> str:
    """Say why `auto` leaves a call to PyTorch that the kernels might take; nothing where it does not."""
    q, k, v = inputs[:3]
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in (q, k, v)):
        return "there is no backward, and forward is PyTorch's"
    if q.numel() // q.shape[3] * q.shape[1] <= HOST_BOUND:
        return f"up to {HOST_BOUND:,} scores PyTorch's own ops take less of the host's time"
    return ""


def is_cudnns(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether PyTorch itself would take cuDNN's forward: what is preferred or forbidden stays so."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return torch._fused_sdp_choice(q, k, v, None, 0.0, True) == SDPBackend.CUDNN_ATTENTION.value


_eager = dispatch.eager(_Function)


def run(inputs: Inputs) -> tuple[Tensor, None]:
    """(out, None)."""
    return _eager(*inputs[:3]), None
