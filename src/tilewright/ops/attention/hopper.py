"""The backend `hopper`: forward and backward in CUDA C++ (`hopper_forward.py`, `hopper_backward.py`).

Where the kernel of backward is not to be had, as in a captured graph that needs it first, the Triton kernels do its
work. They take what forward saves, too: out, and a logarithm for each query.

`auto` takes it where `backends.py` says so.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend

from tilewright.ops.attention import hopper_backward, hopper_forward, triton_op
from tilewright.ops.attention.arguments import NAME, ONCE, Inputs, Tensor
from tilewright.runtime import dispatch, register

HOST_BOUND = 2**28  # pairs of a query and a key up to which an eager host may lose what the device saves
_DEVICES = ("cuda",)


class Call(NamedTuple):
    """Attention as the kernels take it; a query sees `left` keys before its own, or all for -1."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_starts: Tensor | None
    k_starts: Tensor | None
    longest_q: int  # tokens of every sequence, or of the longest that is packed
    longest_k: int
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
    q_starts: Tensor | None
    k_starts: Tensor | None
    longest_q: int
    longest_k: int
    causal: bool
    left: int
    scale: float
    out: Tensor
    lse: Tensor
    dout: Tensor


def _forward(call: Call) -> tuple[Tensor, Tensor]:
    """(out, log-sum-exp)."""
    return hopper_forward.forward(*call[:3], call.causal, call.window, call.scale, _starts(call))


def _starts(call: Call | Gradient) -> hopper_forward.Starts | None:
    return None if call.q_starts is None or call.k_starts is None else (call.q_starts, call.k_starts)


def _fake_forward(call: Call) -> tuple[Tensor, Tensor]:
    q = call.q
    return q.new_empty(q.shape), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)


def _backward(gradient: Gradient) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv."""
    q, k, v, q_starts, k_starts, longest_q, longest_k, causal, left, scale, out, lse, dout = gradient
    if not q.numel() or not k.numel():
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    starts = _starts(gradient)
    if not hopper_backward.why_not(q, k, v, causal, left, scale, starts is not None):
        return hopper_backward.backward(q, k, v, out, lse, dout, causal, left, scale, starts)
    numbers = longest_q, longest_k, left, 0 if causal else -1, scale, 0.0, 0.0
    whole = (q, k, v, None, None, q_starts, k_starts, None, *numbers)
    dq, dk, dv, _ = triton_op.backward(triton_op.Gradient(*whole, out, lse, dout, None, [True, True, True, False]))
    assert dq is not None and dk is not None and dv is not None
    return dq, dk, dv


def _fake_backward(gradient: Gradient) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (x.new_empty(x.shape) for x in gradient[:3])
    return dq, dk, dv


def _backward_packed(gradient: Gradient) -> tuple[Tensor, Tensor, Tensor]:
    """Run backward and return gradients in the layout that the fake function promises."""
    dq, dk, dv = (x.contiguous() for x in _backward(gradient))
    return dq, dk, dv


def _save(ctx: Any, call: Call, output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*call[:5], *output)
    ctx.options = call[5:]
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, backward: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():
        raise RuntimeError(ONCE)
    if dout is None:
        return ()
    *given, out, lse = ctx.saved_tensors
    return tuple(backward(Gradient._make((*given, *ctx.options, out, lse, dout))))


_OP = register.Op(f"{NAME}_hopper", _forward, _fake_forward)
_BACKWARD = register.Op(f"{NAME}_hopper_backward", _backward_packed, _fake_backward)
_eager = _OP.differentiate(_save, _differentiate, _BACKWARD)


def _call(inputs: Inputs) -> Call:
    starts = inputs.q_starts, inputs.k_starts
    longest = inputs.longest_q, inputs.longest_k
    return Call(*inputs[:3], *starts, *longest, inputs.right == 0, inputs.left, inputs.scale)


def why_not(inputs: Inputs) -> str:
    """Say why the kernels cannot take the call; nothing where they can."""
    q, kind = inputs.q, inputs.q.device.type
    if kind not in _DEVICES or not dispatch.runs_kernel(q):
        return dispatch.why_no_kernel(q)
    if inputs.right > 0:
        return "the kernel has no window behind a query"
    call = _call(inputs)
    return hopper_forward.why_not(*call[:3], call.causal, call.window, call.scale, call.q_starts is not None)


def is_host_bound(inputs: Inputs) -> bool:
    """Whether an eager call is so small that the host may take longer than the device."""
    q, k = inputs[:2]
    if q.numel() // q.shape[3] * k.shape[1] > HOST_BOUND or dispatch.kernels_are_forced():
        return False
    return not (dispatch.is_traced(*inputs[:3]) or (q.is_cuda and torch.cuda.is_current_stream_capturing()))


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
    if _has_backward(inputs):
        hopper_backward.foresee(call.q.device, call.q.shape[3], call.q.dtype, call.q_starts is not None)
    out, lse = _eager(*call)
    return out, lse
