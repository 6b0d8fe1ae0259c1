"""The matmuls of linear_cross_entropy: logits, and the gradients of x and of the weight.

A matmul over, or into, a number of classes that is no multiple of a vector is up to 8 times as slow. So the whole
vectors of classes are one matmul, and the few behind them another.
"""

from __future__ import annotations

import torch

from tilewright.ops.linear.padding import VECTOR
from tilewright.runtime import cublaslt

Tensor = torch.Tensor

_MANY_TILES = 132 * 128 * 256  # elements: a tile for each processor of an H200


def _matmul(left: Tensor, right: Tensor, out: Tensor, *, add: bool = False) -> None:
    """out (+)= left @ right, in float32 where `out` is, whatever the operands are."""
    # For a sum over tokens, of a transposed `left`, and where there are few tiles and the sum must be split for all
    # processors to have one, torch's own choice of algorithm is the best there is.
    suits = left.is_contiguous() and out.is_contiguous() and out.numel() >= _MANY_TILES
    if suits and not add and out.dtype == left.dtype and cublaslt.matmul(left, right, out):
        return
    if out.dtype == left.dtype:
        torch.addmm(out, left, right, out=out) if add else torch.mm(left, right, out=out)
    elif left.is_cuda:
        if add:
            torch.addmm(out, left, right, out_dtype=out.dtype, out=out)
        else:
            torch.mm(left, right, out_dtype=out.dtype, out=out)
    else:
        result = left.to(out.dtype) @ right.to(out.dtype)
        out.add_(result) if add else out.copy_(result)


def _aligned(classes: int) -> list[slice]:
    """All classes in whole vectors, and the few behind them."""
    whole = classes // VECTOR * VECTOR
    return [part for part in (slice(0, whole), slice(whole, classes)) if part.stop > part.start]


def logits(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out = x @ weight^T + bias."""
    for part in _aligned(len(weight)):
        if bias is None:
            _matmul(x, weight[part].t(), out[:, part])
        else:
            torch.addmm(bias[part], x, weight[part].t(), out=out[:, part])


def gradient_of_x(z: Tensor, weight: Tensor, out: Tensor) -> None:
    """out = z @ weight. The few classes behind the whole vectors come first: rounded between, they are small."""
    for number, part in enumerate(reversed(_aligned(len(weight)))):
        _matmul(z[:, part], weight[part], out, add=number > 0)


def gradient_of_weight(z: Tensor, x: Tensor, out: Tensor, *, add: bool = False) -> None:
    """out (+)= z^T @ x."""
    for part in _aligned(len(out)):
        _matmul(z[:, part].t(), x, out[part], add=add)
