"""Causal self-attention with a backward of its own.

    S = scale q k^T,  P = softmax of S under the mask,  out = P v
    dP = dout v^T,  dS = P (dP - delta),  delta = sum of out dout
    dq = scale dS k,  dk = scale dS^T q,  dv = P^T dout

Forward is cuDNN's, as torch has it. Backward is a kernel in CUDA C++ (`attention_hopper.cu`), for Triton neither puts
products of registers beside each other as that does nor adds to memory by bulk copies. It runs between two small ones:
the first sums up out dout, the last rounds dq, which is added up in float32. The order of every sum is always the same.

This is for heads of 64 in bfloat16 on a Hopper, as many of keys as of queries, and sequences of a multiple of 128
tokens; everything else is PyTorch's, and so is what takes the host longer to start than the device to run.

Saved for backward: q, k, v, out, and a float32 for each query and head.

Floor: batch x heads x sequence^2 x head_dim FLOPs for each product, of which forward has two and backward five.
"""

from __future__ import annotations

from ctypes import c_float, c_int, c_void_p
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from tilewright.measure import work
from tilewright.ops import _cuda, _hopper, _op
from tilewright.plan.cost import attention as cost

__all__ = ["attention", "cost", "reference"]

SOURCE = Path(__file__).with_name("attention_hopper.cu")
NAME = "attention_backward"
_THREADS, _SHARED_BYTES = 384, 215_672
MACROS = {"SHARED_BYTES": _SHARED_BYTES}
HEAD, BLOCK = 64, 128  # columns of a head; queries, or keys, of a tile
HOST_BOUND = 2**28  # pairs of a query and a key up to which an eager call is the host's time alone
_ONCE = "attention has no second derivative: leave out create_graph=True, or use torch's scaled_dot_product_attention."

Tensor = torch.Tensor


def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention in plain PyTorch: the definition."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        by_head = [t.transpose(1, 2) for t in (q, k, v)]
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(*by_head, None, True, 0.0, True, False)
        out = out.transpose(1, 2)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(_ONCE)
        q, k, v, out, lse = ctx.saved_tensors
        return _backward(q, k, v, out, lse, dout)


def _backward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    from tilewright.ops import attention_kernels as kernels

    batch, sequence, heads, width = q.shape
    scale, flops = width**-0.5, float(cost(batch, sequence, heads, heads, width, backward=True).flops)
    dq, dk, dv = (q.new_empty(q.shape) for _ in range(3))
    queries, keys, values, dkeys, dvalues, dqueries = map(_rows, (q, k, v, dk, dv, dq))
    out_rows, dout_rows = (_rows(t if _lies_in_rows(t) else t.contiguous()) for t in (out, dout))
    starts, slope_starts, counts = kernels.prepare(out_rows, dout_rows, lse, heads, sequence, scale)
    sums = torch.empty_like(dq, dtype=torch.float32)
    kernel = _kernel(q.device)
    assert kernel is not None
    with work.launching(f"tilewright::{NAME}", (q, k, v, dout_rows, starts, slope_starts, dk, dv, sums), flops):
        maps = [_cuda.tensor_map(rows, HEAD, BLOCK) for rows in (queries, keys, values, dout_rows)]
        maps += [_cuda.tensor_map(rows, HEAD, BLOCK // 2) for rows in (dkeys, dvalues)]
        addresses = [c_void_p(t.data_ptr()) for t in (starts, slope_starts, sums, counts)]
        numbers = c_int(sequence), c_int(heads), c_float(scale)
        kernel(batch * heads * (sequence // BLOCK), (*maps, *addresses, *numbers))
    kernels.finish(sums, dqueries, heads, sequence, scale)
    return dq, dk, dv


def _rows(t: Tensor) -> Tensor:
    """Tokens of all batches by the columns of all heads, as bulk copies take them."""
    batch, sequence, heads, width = t.shape
    return t.as_strided((batch * sequence, heads * width), (t.stride(1), 1))


def _lies_in_rows(t: Tensor) -> bool:
    """Whether `_rows` is what it says."""
    batch, sequence, _, width = t.shape
    side_by_side = t.stride(3) == 1 and t.stride(2) == width and t.stride(1) % 8 == 0 and t.data_ptr() % 16 == 0
    return side_by_side and (batch == 1 or t.stride(0) == sequence * t.stride(1))


def _kernel(device: torch.device) -> _cuda.Kernel | None:
    loaded = _hopper.kernels(device, SOURCE, (NAME,), _THREADS, _SHARED_BYTES, MACROS)
    return None if loaded is None else loaded[NAME]


def _fits(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether there will be a backward, and the kernel takes it."""
    if not q.is_cuda or _op.is_traced(q, k, v) or not _op.runs_kernel(q) or not torch.is_grad_enabled():
        return False
    if q.dtype != torch.bfloat16 or q.ndim != 4 or q.shape[3] != HEAD or q.shape[1] % BLOCK:
        return False
    if q.numel() // HEAD * q.shape[1] <= HOST_BOUND:
        return False
    parts = (q, k, v)
    if not all(t.shape == q.shape and t.dtype == q.dtype and t.is_cuda and _lies_in_rows(t) for t in parts):
        return False
    if not any(t.requires_grad for t in parts) or _kernel(q.device) is None:
        return False
    by_head: list[Any] = [t.transpose(1, 2) for t in parts]
    asked = torch.backends.cuda.SDPAParams(*by_head, None, 0.0, True, False)  # type: ignore[call-arg]
    return torch.backends.cuda.can_use_cudnn_attention(asked)


_eager = _op.eager(_Function)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention.

    Args:
        q: ``(batch, sequence, heads, head_dim)``.
        k, v: the same, or with fewer heads, each of which serves several of `q`.

    Returns: the shape of `q`.

    >>> import torch
    >>> q, k, v = torch.randn(3, 2, 16, 4, 8)
    >>> attention(q, k, v).shape
    torch.Size([2, 16, 4, 8])
    """
    return _eager(q, k, v) if _fits(q, k, v) else reference(q, k, v)
