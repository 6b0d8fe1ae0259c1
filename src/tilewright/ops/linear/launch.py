"""The matmuls of `linear` and their gradients, which `linear_parts` and `gelu_mlp` share."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from tilewright.measure import work
from tilewright.runtime import cublaslt, dispatch, hopper, nvrtc

_TILE = 192  # rows and columns of a tile of the weight's gradient
_SHORT = 2048  # inner dimension up to which a bias is better added by a kernel of ours, as far as was measured

hopper.add_gemms(Path(__file__).with_name("hopper.cu"))

Tensor = torch.Tensor


class Inputs(NamedTuple):
    """A linear layer: `weight` is the parameter, which gets the gradient, `cast` what it is in the matmuls' dtype."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    cast: Tensor


class Gradient(NamedTuple):
    """What backward takes. `full`: which gradients, of weight and bias, are in float32; `needs`: of x, weight, bias."""

    dy: Tensor
    x: Tensor
    cast: Tensor
    full: Sequence[bool]
    needs: Sequence[bool]


def as_matrix(x: Tensor) -> Tensor:
    """Return tokens by features, as the library takes them."""
    return dispatch.packed((x if x.ndim == 2 else x.reshape(-1, x.shape[-1]),))[0]


def forward(inputs: Inputs) -> Tensor:
    """Launch x @ cast^T + bias."""
    x, _, bias, cast = inputs
    tokens, matrix = as_matrix(x), as_matrix(cast)
    y = tokens.new_empty((*x.shape[:-1], matrix.shape[0]))  # in its own shape: a view would hide whose memory it is
    out = y.view(tokens.shape[0], matrix.shape[0])
    short = x.shape[-1] <= _SHORT and x.dtype == torch.bfloat16 and x.numel() > 0
    if bias is not None and short and hopper.ready(x.device, "tilewright_linear_matmul_biased"):
        matmul_with_bias(tokens, matrix, bias, out)
        return y
    vector = None if bias is None else dispatch.packed((bias.to(x.dtype),))[0]
    if not cublaslt.matmul(tokens, matrix.t(), out, vector):
        y = F.linear(tokens.view(x.shape), matrix, vector)
    return y


def matmul_with_bias(tokens: Tensor, matrix: Tensor, bias: Tensor, out: Tensor) -> None:
    """Writes tokens @ matrix^T + bias to `out`, on a Hopper."""
    (rows, inner), columns = tokens.shape, matrix.shape[0]
    (vector,) = dispatch.packed((bias.detach().float(),))
    with work.launching(
        "tilewright_linear_matmul_biased", (tokens, matrix, vector, out), 2.0 * tokens.numel() * columns
    ):
        maps = (
            nvrtc.tensor_map(tokens, 64, 128), nvrtc.tensor_map(matrix, 64, hopper.COLUMNS // 2),
            nvrtc.tensor_map(out, 32, 128),
        )  # fmt: skip
        hopper.start("tilewright_linear_matmul_biased", maps, vector, (rows, columns, inner), tokens.device)


def backward(inputs: Gradient) -> list[Tensor | None]:
    """Launch the gradients of x, weight and bias, those that are needed."""
    dy, x, cast, full, needs = inputs
    rows, dx, dweight, dbias = as_matrix(dy), None, None, None
    if needs[0]:
        matrix = as_matrix(cast)
        dx = rows.new_empty((rows.shape[0], matrix.shape[1]))
        if not cublaslt.matmul(rows, matrix, dx):
            dx = torch.mm(rows, matrix)
        dx = dx.view(x.shape)
    if needs[1]:
        transposed = rows.t()
        split = split_point(*cast.shape, dispatch.multiprocessors(x.device))
        dweight = gradient_of_weight([transposed[:split], transposed[split:]] if split else [transposed], x, full[0])
    if needs[2]:
        dbias = _sum_rows(rows).to(torch.float32 if full[1] else rows.dtype)
    return [dx, dweight, dbias]


def add_matmul(dx: Tensor, dy: Tensor, cast: Tensor) -> None:
    """Add dy @ cast to dx within the matmul."""
    rows, matrix = as_matrix(dy), as_matrix(cast)
    sums = dx.view(len(rows), matrix.shape[1])
    torch.addmm(sums, rows, matrix, out=sums)


def _sum_rows(rows: Tensor) -> Tensor:
    """Over the rows, in float32."""
    if not dispatch.runs_kernel(rows):
        return rows.sum(0, dtype=torch.float32)
    from tilewright.ops.linear.kernels import sum_rows

    return sum_rows(rows)


def pack_parts(parts: Sequence[Tensor | None], like: Sequence[int], sums: bool) -> tuple[Tensor, Tensor | None]:
    """Gradients beside each other in one matrix, of which `like` are the widths, and its sum over the rows."""
    some = next(part for part in parts if part is not None)
    shape = some.shape[:-1]
    matrices = [
        as_matrix(some.new_zeros((*shape, width)) if part is None else part)
        for part, width in zip(parts, like, strict=True)
    ]
    if not sums or len(parts) != 3 or not dispatch.runs_kernel(some):
        packed = torch.cat(matrices, 1)
        return packed, _sum_rows(packed) if sums else None
    from tilewright.ops.linear.kernels import pack_and_sum

    return pack_and_sum(matrices)


def gradient_of_weight(dy: Sequence[Tensor], x: Tensor, full: bool) -> Tensor:
    """One matmul for each of `dy`, below each other."""
    tokens = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    features = [len(rows) for rows in dy]
    out = tokens.new_empty((sum(features), tokens.shape[1]), dtype=torch.float32 if full else x.dtype)
    for rows, part in zip(dy, out.split(features), strict=True):
        if not full:
            torch.mm(rows, tokens, out=part)
        elif x.is_cuda:
            torch.mm(rows, tokens, out_dtype=torch.float32, out=part)
        else:
            torch.mm(rows.float(), tokens.float(), out=part)
    return out


def takes_parts(parts: Sequence[Tensor | None], cast: Tensor) -> bool:
    """Whether a kernel takes the gradients of the parts as they are."""
    sizes = [part.shape[-1] for part in parts if part is not None and part.shape[-1] % hopper.STEP == 0]
    if not len(sizes) == len(parts) == 3 or sum(sizes) > hopper.MOST_SUMS:
        return False
    return cast.dtype == torch.bfloat16 and hopper.ready(cast.device, "tilewright_linear_matmul_parts_gradient")


def gradient_of_parts(parts: Sequence[Tensor], matrix: Tensor, sums: bool) -> tuple[Any, Tensor | None]:
    """[parts] @ matrix, and the sums of the parts over their rows, in float32."""
    (inner, columns), rows = matrix.shape, parts[0].shape[0]
    second, third = parts[0].shape[1], parts[0].shape[1] + parts[1].shape[1]
    sizes, device = (rows, columns, inner), matrix.device
    dx, partials = matrix.new_empty((rows, columns)), None
    if sums:
        partials = dx.new_empty((hopper.blocks(sizes, device), inner), dtype=torch.float32)
    with work.launching(
        "tilewright_linear_matmul_parts_gradient", (*parts, matrix, dx, partials), 2.0 * dx.numel() * inner
    ):
        maps = (
            *[nvrtc.tensor_map(part, hopper.STEP, 128) for part in parts],
            nvrtc.tensor_map(matrix, 64, 32), nvrtc.tensor_map(dx, 32, 128),
        )  # fmt: skip
        hopper.start("tilewright_linear_matmul_parts_gradient", maps, partials, sizes, device, second, third)
    if partials is None:
        return dx, None
    from tilewright.ops.linear.kernels import add_up

    return dx, add_up(partials)


@functools.cache
def split_point(rows: int, columns: int, processors: int) -> int:
    """Return the rows after which a sum over many tokens is better split into two matmuls; 0 where one is as good.

    The library cuts so few tiles along the tokens, by a power of two. Three squares of 768 are 48 tiles of 192, and 96
    processors of 132 then have one; two squares and one square are 32 and 16, and 128 have one each time.

    >>> split_point(2304, 768, 132), split_point(3072, 768, 132), split_point(6144, 2048, 132)
    (1536, 0, 0)
    """
    square = (columns // _TILE) ** 2
    if rows != 3 * columns or columns % _TILE or 3 * square > processors:
        return 0

    def time(tiles: int) -> float:
        return 2.0 ** (1 - (processors // tiles).bit_length())

    return 2 * columns if time(2 * square) + time(square) < 0.85 * time(3 * square) else 0
