"""The backend `hopper`: forward in CUDA C++, and backward by the first of three that takes the call.

Backward is our own in CUDA C++ (`hopper_backward.py`: causal, heads of 64), cuDNN's, which adds in no fixed order and
has no window, or our Triton kernels'. All of them take what forward saves: out, and a logarithm for each query.

`auto` takes it where `backends.py` says so.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend

from tilewright.ops.attention import hopper_backward, hopper_forward, triton_op
from tilewright.ops.attention.arguments import NAME, ONCE, Inputs, Tensor
from tilewright.runtime import dispatch, register

HOST_BOUND = 2**28  # pairs of a query and a key up to which an eager host may lose what the device saves
_DEVICES = ("cuda",)
_RAGGED = "TORCH_CUDNN_SDPA_AVOID_RECOMPILE"


class Call(NamedTuple):
    """Attention as the kernels take it; a query sees `left` keys before its own, or all for -1."""

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool
    left: int
    scale: float

    @property
    def window(self) -> int | None:
        return None if self.left < 0 else self.left + 1


class Gradient(NamedTuple):
    """What the gradients of q, k and v follow from."""

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool
    left: int
    scale: float
    out: Tensor
    lse: Tensor
    dout: Tensor


def _forward(call: Call) -> tuple[Tensor, Tensor]:
    """(out, log-sum-exp)."""
    return hopper_forward.forward(call.q, call.k, call.v, call.causal, call.window, call.scale)


def _fake_forward(call: Call) -> tuple[Tensor, Tensor]:
    q = call.q
    return q.new_empty(q.shape), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)


def _backward(gradient: Gradient) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv."""
    q, k, v, causal, left, scale, out, lse, dout = gradient
    if not q.numel() or not k.numel():
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    if not hopper_backward.why_not(q, k, v, causal, left, scale):
        return hopper_backward.backward(q, k, v, out, lse, dout)
    if left < 0 and q.shape[1] == k.shape[1] and _may_take_cudnns():
        return _backward_by_cudnn(gradient)
    tokens, keys, right = q.shape[1], k.shape[1], 0 if causal else -1
    whole = (q, k, v, None, None, None, None, None, tokens, keys, left, right, scale, 0.0, 0.0)
    dq, dk, dv, _ = triton_op.backward(triton_op.Gradient(*whole, out, lse, dout, None, [True, True, True, False]))
    assert dq is not None and dk is not None and dv is not None
    return dq, dk, dv


def _may_take_cudnns() -> bool:
    """Not where sums must have a fixed order, nor where PyTorch's cuDNN wants the logarithm in another one."""
    return not torch.are_deterministic_algorithms_enabled() and os.environ.get(_RAGGED) != "1"


def _backward_by_cudnn(gradient: Gradient) -> tuple[Tensor, Tensor, Tensor]:
    """PyTorch looks a graph of cuDNN's up by the strides of q, k and v alone.

    Its own forward orders the dimensions of `out` as those of q. Ours is packed: q must have the order of that.
    """
    q = hopper_forward.readable(gradient.q)
    if not q.stride(0) >= q.stride(1) >= q.stride(2):
        q = q.contiguous()
    k, v = map(hopper_forward.readable, (gradient.k, gradient.v))
    out, dout = (x.resolve_neg().contiguous() for x in (gradient.out, gradient.dout))
    q, k, v, out, dout = (x.transpose(1, 2) for x in (q, k, v, out, dout))
    draws = torch.empty(0, dtype=torch.int64, device=q.device)  # of a dropout that there is not
    found = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        dout, q, k, v, out, gradient.lse.unsqueeze(-1), draws, draws, None, None, None, q.shape[2], k.shape[2], 0.0,
        gradient.causal, scale=gradient.scale,
    )  # fmt: skip
    dq, dk, dv = (x.transpose(1, 2) for x in found)
    return dq, dk, dv


def _fake_backward(gradient: Gradient) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (x.new_empty(x.shape) for x in gradient[:3])
    return dq, dk, dv


def _backward_packed(gradient: Gradient) -> tuple[Tensor, Tensor, Tensor]:
    """As compilers are told they lie."""
    dq, dk, dv = (x.contiguous() for x in _backward(gradient))
    return dq, dk, dv


def _save(ctx: Any, call: Call, output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*call[:3], *output)
    ctx.options = call[3:]
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, backward: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():
        raise RuntimeError(ONCE)
    if dout is None:
        return ()
    q, k, v, out, lse = ctx.saved_tensors
    return tuple(backward(Gradient._make((q, k, v, *ctx.options, out, lse, dout))))


_OP = register.Op(f"{NAME}_hopper", _forward, _fake_forward)
_BACKWARD = register.Op(f"{NAME}_hopper_backward", _backward_packed, _fake_backward)
_eager = _OP.differentiate(_save, _differentiate, _BACKWARD)


def _call(inputs: Inputs) -> Call:
    return Call(*inputs[:3], inputs.right == 0, inputs.left, inputs.scale)


def why_not(inputs: Inputs) -> str:
    """Say why the kernels cannot take the call; nothing where they can."""
    q, kind = inputs.q, inputs.q.device.type
    if kind not in _DEVICES or not dispatch.runs_kernel(q):
        return dispatch.why_no_kernel(q)
    if inputs.right > 0:
        return "the kernel has no window behind a query"
    call = _call(inputs)
    return hopper_forward.why_not(call.q, call.k, call.v, call.causal, call.window, call.scale)


def is_host_bound(inputs: Inputs) -> bool:
    """Whether an eager call is so small that the host may take longer than the device."""
    q, k = inputs[:2]
    if q.numel() // q.shape[3] * k.shape[1] > HOST_BOUND or dispatch.kernels_are_forced():
        return False
    return not (dispatch.is_traced(*inputs[:3]) or (q.is_cuda and torch.cuda.is_current_stream_capturing()))


def has_own_backward(inputs: Inputs) -> bool:
    """Whether backward, if there is one, is our own in CUDA C++."""
    return not _has_backward(inputs) or not hopper_backward.why_no_shape(*_call(inputs))


def _has_backward(inputs: Inputs) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in inputs[:3])


def is_cudnns(inputs: Inputs) -> bool:
    """Whether PyTorch itself would take cuDNN's forward: what is preferred or forbidden stays so."""
    q, k, v = (t.transpose(1, 2) for t in inputs[:3])
    gqa, causal = q.shape[1] != k.shape[1], inputs.right == 0
    return torch._fused_sdp_choice(q, k, v, None, 0.0, causal, enable_gqa=gqa) == SDPBackend.CUDNN_ATTENTION.value


def run(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """(out, log-sum-exp), of which only the first has a gradient."""
    call = _call(inputs)
    if dispatch.is_traced(*call[:3]):
        out, lse = _OP.call_registered(call)
        return out, lse
    if _has_backward(inputs) and not hopper_backward.why_no_shape(*call):
        hopper_backward.foresee(call.q.device, *call.q.shape[2:])
    out, lse = _eager(*call)
    return out, lse
