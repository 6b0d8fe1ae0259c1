"""A whole multi-head self-attention layer in one call: projections, scores, mask, softmax, weighted sum, output.

    q, k, v = x Wqkv^T + bqkv                   for each token, cut into heads
    P       = softmax(q k^T / sqrt(head_dim))   over the keys that a query may see
    context = P v
    out     = context Wout^T + bout

    dcontext = dout Wout,  dWout = dout^T context,  dbout = sum of dout
    dP = dcontext v^T,  dS = P (dP - sum of P dP) / sqrt(head_dim)
    dq = dS k,  dk = dS^T q,  dv = P^T dcontext
    dx = dqkv Wqkv,  dWqkv = dqkv^T x,  dbqkv = sum of dqkv

For small layers, where the host's time for a dozen ops and their autograd nodes is more than the work itself. So it is
C++ (`extension.cpp`, `runtime/extension.py`) with one autograd node: on a CPU BLAS, and vectorised loops between
(`cpu.cpp`), on a GPU one kernel between two matmuls of cuBLAS (`cuda.cpp`, `cuda.cu`). That makes three launches
forward; matmuls inside of the kernel would save one or two, and would have to reach what cuBLAS does. Long sequences
are left to PyTorch's own ops.

The matmuls are those of the BLAS that PyTorch uses. With other numbers of threads it may sum in another order, as it
does for `torch.nn.functional.linear`; all else gives the same bits with any number of threads.

Saved for backward: x, q, k, v, context, and the logarithm of the sum of exponentials for each query and head.

Floor: x, the weights and the output once through memory; 8 tokens width^2 FLOPs for the projections and
4 tokens sequence width for scores and sum; backward has twice as many, and recomputes the scores.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from tilewright.plan.cost import self_attention as cost
from tilewright.runtime import dispatch, paths
from tilewright.runtime.extension import Extension, vector_options

__all__ = ["cost", "reference", "self_attention"]

Tensor = torch.Tensor

_NAME = "self_attention"
_FOLDER = Path(__file__).parent
CPU = Extension(_NAME, {_FOLDER / "extension.cpp": ("-O1",), _FOLDER / "cpu.cpp": vector_options()})
CUDA = Extension(f"{_NAME}_cuda", {_FOLDER / "cuda.cpp": ("-O1",), _FOLDER / "cuda.cu": ()}, cuda=True)
EXTENSIONS = {"cpu": (CPU,), "cuda": (CPU, CUDA)}  # the first has the autograd node
DTYPES = {"cpu": (torch.float32, torch.float64), "cuda": (torch.float32, torch.bfloat16, torch.float16)}
# Tokens of a sequence: up to which the C++ is no slower than PyTorch's flash attention on a CPU, and that its kernel on
# a GPU can take.
LONGEST = {"cpu": 64, "cuda": 64}
WIDEST = {"cpu": 2**31 // 3, "cuda": 128}  # elements of a head


def reference(
    x: Tensor,
    qkv_weight: Tensor,
    qkv_bias: Tensor | None,
    out_weight: Tensor,
    out_bias: Tensor | None,
    heads: int,
    *,
    causal: bool = False,
    key_mask: Tensor | None = None,
) -> Tensor:
    """The layer in plain PyTorch: the definition."""
    context = attend(F.linear(x, qkv_weight, qkv_bias), heads, causal=causal, key_mask=key_mask)
    return F.linear(context, out_weight, out_bias)


def attend(qkv: Tensor, heads: int, *, causal: bool = False, key_mask: Tensor | None = None) -> Tensor:
    """What is between the projections, in plain PyTorch: (batch, sequence, width) of the packed (..., 3 width)."""
    batch, sequence, width = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    q, k, v = qkv.view(batch, sequence, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
    if key_mask is None:
        context = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    else:
        allowed = key_mask[:, None, None, :]
        if causal:
            allowed = allowed & torch.ones(sequence, sequence, dtype=torch.bool, device=qkv.device).tril()
        # A query that sees no key attends to all instead, and its result is taken out: NaN would spoil the gradients.
        sees = allowed.any(-1, keepdim=True)
        context = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed | ~sees) * sees
    return context.transpose(1, 2).reshape(batch, sequence, width)


def self_attention(
    x: Tensor,
    qkv_weight: Tensor,
    qkv_bias: Tensor | None,
    out_weight: Tensor,
    out_bias: Tensor | None,
    heads: int,
    *,
    causal: bool = False,
    key_mask: Tensor | None = None,
) -> Tensor:
    """Multi-head self-attention, the whole layer, for short sequences in one call of C++.

    Args:
        x: ``(batch, sequence, width)``. float32 or float64 on a CPU, float32, bfloat16 or float16 on a GPU run in C++;
            all else, and long sequences, by PyTorch's own ops.
        qkv_weight: ``(3 width, width)``, of queries, keys and values, one below the other.
        qkv_bias: ``(3 width,)`` or None.
        out_weight: ``(width, width)``.
        out_bias: ``(width,)`` or None.
        heads: how many; a divisor of the width.
        causal: a token sees itself and those before it.
        key_mask: ``(batch, sequence)``, bool: True where a token may be seen. A query that sees none gets a context
            of 0.

    Returns:
        ``(batch, sequence, width)``.

    >>> import torch
    >>> x = torch.randn(2, 5, 16)
    >>> layer = torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)
    >>> out = self_attention(x, layer[0].weight, layer[0].bias, layer[1].weight, layer[1].bias, 4, causal=True)
    >>> out.shape
    torch.Size([2, 5, 16])
    """
    tensors = x, qkv_weight, qkv_bias, out_weight, out_bias
    _check(*tensors, heads, key_mask)
    ran, why = _choose(x, (*tensors, key_mask), heads)
    paths.note(_NAME, ran, why)
    if ran == paths.KERNEL:
        return torch.ops.tilewright.self_attention(*tensors, heads, causal, key_mask)
    return reference(*tensors, heads, causal=causal, key_mask=key_mask)


def _choose(x: Tensor, tensors: tuple[Tensor | None, ...], heads: int) -> tuple[str, str]:
    """How a call runs, and why not in C++."""
    device = x.device.type
    if torch._C._are_functorch_transforms_active():
        return paths.REFERENCE, dispatch.why_no_kernel(x)
    if dispatch.is_traced(*tensors):
        return paths.PYTORCH, "a compiler, a dispatch mode or a tensor subclass must see its ops"
    if device not in DTYPES:
        return paths.REFERENCE, f"there is no C++ for {device}"
    if torch.is_autocast_enabled(device):
        return paths.PYTORCH, "autocast chooses the dtype of each op"
    if x.dtype not in DTYPES[device]:
        return paths.PYTORCH, f"there is no C++ for {x.dtype} on {device}"
    if x.shape[1] > LONGEST[device]:
        return paths.PYTORCH, f"the C++ is for at most {LONGEST[device]} tokens of a sequence"
    if x.shape[2] // heads > WIDEST[device]:
        return paths.PYTORCH, f"a head has more than {WIDEST[device]} elements"
    if device == "cuda" and _shared_bytes(x.shape[1], x.shape[2] // heads) > dispatch.shared_memory(x.device):
        return paths.PYTORCH, "a head does not fit into this GPU's shared memory"
    for extension in EXTENSIONS[device]:
        why = extension.why_missing()
        if why:
            return paths.PYTORCH, why
    return paths.KERNEL, ""


def _shared_bytes(sequence: int, head_dim: int) -> int:
    """What backward's kernel takes: four matrices of a head, padded, and two of scores."""
    columns = next(each for each in (8, 16, 32, 64, 128) if head_dim <= each)
    return 4 * (4 * sequence * (columns + 1) + 2 * sequence * (sequence + 1))


def _check(
    x: Any, qkv_weight: Any, qkv_bias: Any, out_weight: Any, out_bias: Any, heads: Any, key_mask: Any
) -> None:  # fmt: skip
    dispatch.check_tensor(_NAME, "x", x)
    if x.ndim != 3:
        raise ValueError(f"{_NAME}: x has shape {tuple(x.shape)}, but (batch, sequence, width) is needed.")
    batch, sequence, width = x.shape
    if not isinstance(heads, int) or heads < 1 or width % heads or not width:
        raise ValueError(f"{_NAME}: heads is {heads!r}; give a divisor of the width, {width}.")
    shapes = {"qkv_weight": (3 * width, width), "qkv_bias": (3 * width,), "out_weight": (width, width),
              "out_bias": (width,)}  # fmt: skip
    mixes = torch.is_autocast_enabled(x.device.type)
    given = zip(shapes.items(), (qkv_weight, qkv_bias, out_weight, out_bias), strict=True)
    for (name, shape), tensor in given:
        if tensor is None and name.endswith("bias"):
            continue
        dispatch.check_tensor(_NAME, name, tensor)
        dispatch.check_tensor(_NAME, name, tensor, torch.Size(shape), x)
        if tensor.dtype != x.dtype and not mixes:
            raise TypeError(f"{_NAME}: {name} is {tensor.dtype}, but x is {x.dtype}; convert one of them.")
    if key_mask is None:
        return
    if not isinstance(key_mask, Tensor) or key_mask.dtype != torch.bool:
        kind = key_mask.dtype if isinstance(key_mask, Tensor) else type(key_mask).__name__
        raise TypeError(f"{_NAME}: key_mask is {kind}; give a bool tensor, True where a token may be seen.")
    if key_mask.shape != (batch, sequence) or key_mask.device != x.device:
        raise ValueError(
            f"{_NAME}: key_mask has shape {tuple(key_mask.shape)} on {key_mask.device}, but {(batch, sequence)} on "
            f"{x.device} is needed."
        )
