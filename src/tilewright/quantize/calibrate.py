"""Quantize by what a layer's inputs are: scales for weighted errors, and errors that later columns compensate.

    scales    each scale is searched for the least squared error of what its weights add to the outputs
    gptq      columns are rounded one after the other; the error of each is taken off those that are not yet rounded, as
              far as their inputs can stand for its input: the least squares of the layer's outputs, with H the second
              moments of its inputs

GPTQ (Frantar et al., 2023): with U the upper Cholesky factor of H^-1, column i errs by e = (w_i - q_i) / U[i, i], and
w_j loses e U[i, j] for every j > i. Act-order rounds the columns of the largest H[i, i] first. Here groups stay where
they are and get their scales before the first column is rounded, so no input has to be moved when the layer runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewright.quantize.formats import Format, Packed

METHODS = ("scales", "gptq")
_BLOCK = 128  # columns whose errors reach the rest of the matrix in one matmul; a multiple of every group
_DAMP = 0.01  # of the mean of H's diagonal, added to it
_MOST_DAMP = 1.0


def quantize_calibrated(
    weight: Tensor, kind: Format, moments: Tensor, method: str = "gptq", *, act_order: bool = False
) -> tuple[Packed, str]:
    """The tensors that stand for a ``(out, in)`` matrix, and a remark where its inputs allowed less than was asked.

    Args:
        weight: the matrix.
        kind: the format.
        moments: the mean of x x^T over the layer's inputs, ``(in, in)``.
        method: one of `METHODS`.
        act_order: GPTQ's order of columns: the most important first, instead of the first.

    >>> from tilewright.quantize.formats import Int4
    >>> weight, x = torch.randn(8, 64), torch.randn(200, 8) @ torch.randn(8, 64)
    >>> kind, error = Int4(group=32), lambda packed: ((kind.dequantize(packed) - weight) @ x.t()).norm()
    >>> packed, remark = quantize_calibrated(weight, kind, x.t() @ x / 200)
    >>> bool(error(packed) < 0.7 * error(kind.quantize(weight))), remark
    (True, '')
    """
    diagonal = moments.diagonal()
    if not bool(moments.isfinite().all()):
        return kind.quantize(weight), "its inputs have NaN or Inf: rounded to nearest"
    if not bool((diagonal > 0).any()):
        return kind.quantize(weight), "its inputs are all 0: rounded to nearest"
    if method == "scales":
        return kind.quantize(weight, moments), ""
    kind.refuse(weight)
    order = diagonal.argsort(descending=True) if act_order else None
    factor = _factor(moments if order is None else moments[order][:, order], diagonal)
    if factor is None:
        return kind.quantize(weight, diagonal), "its inputs' moments have no inverse: scales were searched instead"
    return _compensate(weight.detach().float().clone(), kind, factor, diagonal, order), ""


def _factor(moments: Tensor, diagonal: Tensor) -> Tensor | None:
    """The upper Cholesky factor of H^-1, of H with as much damping as it needs."""
    damp, mean = _DAMP, diagonal.mean()
    while damp <= _MOST_DAMP:
        damped = moments.clone()
        damped.diagonal().add_(damp * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not int(failed):
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not int(failed) and bool(upper.isfinite().all()):
                return upper
        damp *= 10
    return None


def _compensate(matrix: Tensor, kind: Format, factor: Tensor, importance: Tensor, order: Tensor | None) -> Packed:
    """Round column by column. Without an order a group's scales are fitted to what its weights have become."""
    columns = matrix.shape[1]
    group = kind.group_of(columns)
    scale, zero = kind.grid(matrix.unflatten(1, (-1, group)), importance.view(-1, group))
    group_of = torch.arange(columns, device=matrix.device) // group
    if order is not None:
        matrix, group_of = matrix[:, order], group_of[order]
    groups, codes = group_of.tolist(), []
    for first in range(0, columns, _BLOCK):
        block = matrix[:, first : first + _BLOCK]
        corner = factor[first : first + _BLOCK, first : first + _BLOCK]
        errors = torch.empty_like(block)
        for place in range(block.shape[1]):
            mine = groups[first + place]
            if order is None and group < columns and (first + place) % group == 0:
                fitted = kind.grid(block[:, None, place : place + group], importance.view(-1, group)[mine : mine + 1])
                scale[:, mine : mine + 1] = fitted[0]
                if zero is not None and fitted[1] is not None:
                    zero[:, mine : mine + 1] = fitted[1]
            its_scale, its_zero = scale[:, mine], None if zero is None else zero[:, mine]
            column = block[:, place]
            codes.append(kind.encode(column, its_scale, its_zero))
            error = (column - kind.decode(codes[-1], its_scale, its_zero)) / corner[place, place]
            block[:, place:] -= error[:, None] * corner[place, place:]
            errors[:, place] = error
        matrix[:, first + _BLOCK :] -= errors @ factor[first : first + _BLOCK, first + _BLOCK :]
    found = torch.stack(codes, 1)
    if order is not None:
        found = found[:, order.argsort()]
    return kind.pack(found, scale, zero)
