"""Attention: causal or not, with windows, soft-cap, ALiBi, a bias, dropout, shared keys and packed sequences.

    S = softcap(scale q k^T) + bias - alibi |distance|,  P = softmax of S where a key is visible
    out = dropout(P) v,  lse = log of the sum of exp(S)

    dP = dropout(dout v^T),  dS = P (dP - delta),  delta = sum of out dout - dlse
    dbias = dS,  dq = scale dS' k,  dk = scale dS'^T q,  dv = dropout(P)^T dout,  dS' = dS softcap'(scale q k^T)

Several backends compute it; `backends.py` says what each takes and which one `auto` picks. Our own are the Triton
kernels (`forward_kernels.py`, `backward_kernels.py`), which take everything, and on a Hopper a forward and a backward
in CUDA C++ (`hopper.py`). In both backwards every sum has a fixed order; in cuDNN's, behind our forward, it has not.

Saved for backward: q, k, v, out, a float32 for each query and head, and the seed of dropout.

Floor: 2 x batch x heads x queries x visible keys x head_dim FLOPs for each matmul, of which forward has two and
backward five. The Triton backward computes two of them twice, since it adds without atomics.
"""

from __future__ import annotations

from typing import Any

import torch

from tilewright.ops.attention import backends
from tilewright.ops.attention.arguments import NAME, Window, cast, read
from tilewright.ops.attention.reference import reference, unpack
from tilewright.plan.cost import attention as cost
from tilewright.runtime import dispatch, paths

__all__ = ["attention", "cost", "reference"]

Tensor = torch.Tensor


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    window: Window = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi: Tensor | None = None,
    bias: Tensor | None = None,
    p: float = 0.0,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: bool = False,
    backend: str = backends.AUTO,
) -> Any:
    """Scaled dot-product attention, causal unless said otherwise.

    Args:
        q: ``(batch, sequence, heads, head_dim)``; packed, ``(tokens, heads, head_dim)``.
        k, v: the same, of any number of tokens, or with fewer heads, each of which serves several of `q`.
        causal: a query sees no key behind it. With n queries and m keys the last query is at the last key, as in
            FlashAttention: query i sees keys up to ``i + m - n``.
        window: how many keys a query sees before it, and where it is not causal as many behind it; or a pair (before,
            behind) of numbers or None for all. Its own is not counted.
        scale: of the scores; default: ``head_dim ** -0.5``.
        softcap: if above 0, scaled scores s become ``softcap * tanh(s / softcap)``.
        alibi: slopes, float32, ``(heads,)`` or ``(batch, heads)``; a score less slope times distance. No gradient.
        bias: added to the scores; what broadcasts to ``(batch, heads, queries, keys)``, in any floating-point dtype. It
            gets a gradient. Booleans instead hide the keys that are False.
        p: probability in [0, 1) that a weight is dropped, rounded to a multiple of 2**-16. The mask is drawn again, not
            stored, for backward. There is no training flag: pass 0 to evaluate.
        cu_seqlens_q, cu_seqlens_k: int32 on the device of q, where each packed sequence begins and the last one ends;
            that of keys may be left out if it is the same. Nothing waits for them to be read. Tokens of no sequence
            get 0. Numbers out of place give wrong results, never a wrong address; with ``TILEWRIGHT_DEBUG=1``, and on
            a CPU, they are an error.
        max_seqlen_q, max_seqlen_k: at least the tokens of the longest sequence; needed with cu_seqlens_q.
        return_lse: also return the logarithm of the sum of exponentials of the scores, float32,
            ``(batch, heads, sequence)`` or, packed, ``(heads, tokens)``; -inf for a query that sees no key.
        backend: ``"auto"``, ``"hopper"``, ``"triton"``, ``"cudnn"``, ``"flash"``, ``"efficient"`` or ``"math"``, the
            definition. One that was named and cannot take the call is an error. `tilewright.ops.explain()` says which
            one ``"auto"`` takes, and why.

    Returns: the shape of `q`, or a pair of that and the log-sum-exp. A query that sees no key gets 0.

    >>> import torch
    >>> q, k, v = torch.randn(3, 2, 16, 4, 8)
    >>> attention(q, k, v).shape
    torch.Size([2, 16, 4, 8])
    >>> first = attention(q, k, v, window=0, softcap=30.0)  # each query sees its own key alone
    >>> torch.allclose(first, v, atol=1e-6)
    True
    """
    inputs = read(
        q, k, v, causal, window, scale, softcap, alibi, bias, p, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        return_lse,
    )  # fmt: skip
    if dispatch.runs_kernel(q):
        inputs = cast(inputs)
    chosen, ran, why = backends.choose(inputs, backend)
    paths.note(NAME, ran, why)
    return unpack(inputs, chosen.run(inputs))
