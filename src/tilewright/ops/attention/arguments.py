"""What a call of `attention` asks for: its arguments by name, and what is refused before any launch."""

from __future__ import annotations

import itertools
import math
import operator
import os
from typing import Any, NamedTuple

import torch

from tilewright.runtime import dispatch
from tilewright.runtime.philox import quantised

NAME = "attention"
ONCE = (
    f"{NAME} has no second derivative: leave out create_graph=True, or use backend='math' or torch's "
    "scaled_dot_product_attention."
)
LARGEST = 2**29  # tokens of a sequence, and of a window
_ORDER = "(batch, sequence, heads, head_dim)"
_PACKED_ORDER = "(tokens, heads, head_dim)"

Tensor = torch.Tensor
Window = int | tuple[int | None, int | None] | None


class Inputs(NamedTuple):
    """A call, as every backend gets it. Of packed sequences the tensors have a batch of 1.

    Query i of n sees key j of m where ``i + m - n - left <= j <= i + m - n + right``; -1 is no limit.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None  # (batch or 1, heads or 1, queries or 1, keys or 1), or of booleans
    alibi: Tensor | None  # (batch or 1, heads), float32
    q_starts: Tensor | None
    k_starts: Tensor | None
    seed: Tensor | int | None  # of dropout, where the backend draws by Philox
    longest_q: int  # tokens of every sequence, or of the longest that is packed
    longest_k: int
    left: int
    right: int
    scale: float
    softcap: float  # 0: none
    p: float
    wants_lse: bool = False


def read(
    q: Any, k: Any, v: Any, causal: bool, window: Any, scale: Any, softcap: Any, alibi: Any, bias: Any, p: Any,
    cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any, max_seqlen_k: Any, return_lse: bool,
) -> Inputs:  # fmt: skip
    """The arguments of `attention`, checked."""
    packed = cu_seqlens_q is not None
    _check_tensors(q, k, v, 3 if packed else 4)
    if packed:
        cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
        max_seqlen_k = max_seqlen_q if max_seqlen_k is None else max_seqlen_k
        _check_packed(q, k, bias, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
        longest_q, longest_k = max_seqlen_q, max_seqlen_k
        sequences = cu_seqlens_q.shape[0] - 1
    else:
        if not cu_seqlens_k is max_seqlen_q is max_seqlen_k is None:
            raise ValueError(f"{NAME}: cu_seqlens_k, max_seqlen_q and max_seqlen_k need cu_seqlens_q.")
        longest_q, longest_k, sequences = q.shape[1], k.shape[1], q.shape[0]
    left, right = _read_window(window, causal)
    if left >= 0 and left >= longest_k - 1:
        left = -1  # the last query sees the first key, and so do all before it
    if longest_q == 1 and not packed:
        right = -1  # the one query is the last: no key is behind it
    head_dim = operator.index(q.shape[3])  # a number to kernels, also where a compiler has sizes as symbols
    scale = head_dim**-0.5 if scale is None else _check_number("scale", scale, 0.0, inclusive=False)
    softcap = _check_number("softcap", softcap, 0.0, inclusive=True)
    dispatch.check_probability(NAME, p)
    if bias is not None:
        bias = _check_bias(bias, (q.shape[0], q.shape[2], longest_q, longest_k), q)
    if alibi is not None:
        alibi = _check_alibi(alibi, sequences, q)
    return Inputs(
        q, k, v, bias, alibi, cu_seqlens_q, cu_seqlens_k, None, longest_q, longest_k, left, right, scale, softcap,
        quantised(p), return_lse,
    )  # fmt: skip


def _check_tensors(q: Any, k: Any, v: Any, ndim: int) -> None:
    order = _PACKED_ORDER if ndim == 3 else _ORDER
    for name, x in (("q", q), ("k", k), ("v", v)):
        dispatch.check_tensor(NAME, name, x)
        if x.ndim != ndim:
            raise ValueError(f"{NAME}: {name} has shape {tuple(x.shape)}, but {order} is needed.")
        if x.device != q.device:
            raise ValueError(f"{NAME}: {name} is on {x.device}, but q on {q.device}; move one of them.")
        if x.dtype != q.dtype and not _is_autocast(q):
            raise TypeError(f"{NAME}: {name} is {x.dtype}, but q is {q.dtype}; convert one of them.")
    if k.shape[:-1] != v.shape[:-1] or k.shape[:-3] != q.shape[:-3] or k.shape[-1] != q.shape[-1]:
        raise ValueError(
            f"{NAME}: q has shape {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)}; {order} of k and v must "
            "be equal, and differ from that of q in tokens and heads alone."
        )
    heads, kv_heads, width = q.shape[-2], k.shape[-2], q.shape[-1]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"{NAME}: q has {heads} heads and k {kv_heads}; the first must be a multiple of the second.")
    if width == 0 or v.shape[-1] == 0:
        raise ValueError(f"{NAME}: head_dim is 0; it must be at least 1.")


def _is_autocast(x: Tensor) -> bool:
    return x.dtype != torch.float64 and x.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(x.device.type)


def cast(inputs: Inputs) -> Inputs:
    """The call in the dtype that autocast computes in, as PyTorch's own attention has it."""
    q, k, v = inputs[:3]
    if not _is_autocast(q):
        return inputs
    dtype = torch.get_autocast_dtype(q.device.type)
    return inputs._replace(q=q.to(dtype), k=k.to(dtype), v=v.to(dtype))


def _check_packed(
    q: Tensor, k: Tensor, bias: Any, starts_q: Any, starts_k: Any, longest_q: Any, longest_k: Any
) -> None:
    for end, starts, longest, x in (("q", starts_q, longest_q, q), ("k", starts_k, longest_k, k)):
        name = f"cu_seqlens_{end}"
        if not isinstance(starts, Tensor) or starts.dtype != torch.int32:
            kind = starts.dtype if isinstance(starts, Tensor) else type(starts).__name__
            raise TypeError(f"{NAME}: {name} is {kind}; give an int32 tensor.")
        if starts.ndim != 1 or len(starts) < 1 or len(starts) != len(starts_q):
            raise ValueError(
                f"{NAME}: {name} has shape {tuple(starts.shape)}, but ({len(starts_q) if starts_q.ndim else 1},) is "
                "needed: where each sequence begins, and where the last one ends."
            )
        if starts.device != x.device:
            raise ValueError(f"{NAME}: {name} is on {starts.device}, but q on {x.device}; move one of them.")
        if not isinstance(longest, (int, torch.SymInt)) or isinstance(longest, bool) or not 0 <= longest <= LARGEST:
            raise ValueError(f"{NAME}: max_seqlen_{end} is {longest!r}; give the tokens of the longest sequence.")
        is_read = starts.device.type == "cpu" or os.environ.get("TILEWRIGHT_DEBUG") == "1"
        if is_read and not dispatch.is_compiling():
            _check_starts(name, starts.tolist(), int(longest), x.shape[0])
    if bias is not None:
        raise ValueError(f"{NAME}: a bias does not go with packed sequences; pad them, or leave out cu_seqlens_q.")


def _check_starts(name: str, starts: list[int], longest: int, tokens: int) -> None:
    if starts[0] < 0 or starts[-1] > tokens:
        raise ValueError(f"{NAME}: {name} goes from {starts[0]} to {starts[-1]}, but there are {tokens} tokens.")
    for first, end in itertools.pairwise(starts):
        if end < first:
            raise ValueError(f"{NAME}: {name} falls from {first} to {end}; it must not decrease.")
        if end - first > longest:
            raise ValueError(
                f"{NAME}: {name} has a sequence of {end - first} tokens; its longest is said to be {longest}."
            )


def _read_window(window: Any, causal: bool) -> tuple[int, int]:
    sides = window if isinstance(window, tuple) and len(window) == 2 else (window, window)
    for side in sides:
        if side is not None and (not isinstance(side, int) or isinstance(side, bool) or side < 0):
            raise ValueError(f"{NAME}: window is {window!r}; give how many keys a query sees before it, or a pair of "
                             "numbers before and behind it, of at least 0.")  # fmt: skip
    left, right = (-1 if side is None else min(side, LARGEST) for side in sides)
    return left, 0 if causal else right


def _check_number(name: str, value: Any, least: float, inclusive: bool) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not least <= value < math.inf or (value == least and not inclusive):
        raise ValueError(
            f"{NAME}: {name} is {value!r}; give a finite number {'of at least' if inclusive else 'above'} 0."
        )
    return value.__float__()  # which makes a number of a compiler's symbol, where float() keeps that


def _check_bias(bias: Any, shape: tuple[int, ...], q: Tensor) -> Tensor:
    """The bias with four dimensions."""
    if not isinstance(bias, Tensor) or bias.dtype not in (*dispatch.FLOATS, torch.bool):
        kind = bias.dtype if isinstance(bias, Tensor) else type(bias).__name__
        raise TypeError(f"{NAME}: bias is {kind}; give a tensor of floating-point numbers or of booleans.")
    if bias.device != q.device:
        raise ValueError(f"{NAME}: bias is on {bias.device}, but q on {q.device}; move one of them.")
    sizes = (1,) * (4 - bias.ndim) + tuple(bias.shape)
    if len(sizes) != 4 or any(size not in (1, whole) for size, whole in zip(sizes, shape, strict=True)):
        raise ValueError(
            f"{NAME}: bias has shape {tuple(bias.shape)}, but (batch, heads, queries, keys) = {shape} is needed, or "
            "what broadcasts to it."
        )
    return bias.reshape(sizes)


def _check_alibi(alibi: Any, sequences: int, q: Tensor) -> Tensor:
    """The slopes with two dimensions."""
    if not isinstance(alibi, Tensor) or alibi.dtype not in (torch.float32, torch.float64):
        kind = alibi.dtype if isinstance(alibi, Tensor) else type(alibi).__name__
        raise TypeError(f"{NAME}: alibi is {kind}; give its slopes as a float32 tensor.")
    if alibi.shape not in ((q.shape[2],), (1, q.shape[2]), (sequences, q.shape[2])):
        raise ValueError(
            f"{NAME}: alibi has shape {tuple(alibi.shape)}, but ({q.shape[2]},), a slope for each head, or "
            f"({sequences}, {q.shape[2]}) is needed."
        )
    if alibi.device != q.device:
        raise ValueError(f"{NAME}: alibi is on {alibi.device}, but q on {q.device}; move one of them.")
    if alibi.requires_grad:
        raise ValueError(f"{NAME}: alibi requires a gradient and gets none; detach it.")
    return alibi.reshape(-1, q.shape[2])
