"""Token and position embeddings: one pass, rounded once.

    out[..., s, :] = weight[tokens[..., s]] + position[s]                                rounded to dtype
    dweight[v]     = sum of dout over the tokens that are v                              in float32
    dposition[s]   = sum of dout over all but the sequence                               in float32

PyTorch takes three ops and four passes over the result for the first line, and widens dout before it adds any of it up.
Here tokens are sorted in backward, and the rows of one token lie side by side: each is read once and added up in
float32, in an order that is the same on every run.

A table that is the output layer's weight too gets two gradients. `tied_embedding` hands the table on to the matmul
that reads it, and adds its own sums to the rows of the gradient that comes back: no second gradient is made, which
would be zeros but for the rows that have tokens, to be added to the first.

Saved for backward: the tokens.

Floor: forward reads a row of the table and writes one of the result for each token; backward reads dout twice, once for
each table, and writes both tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tilewright.plan.cost import embedding as cost
from tilewright.runtime import dispatch, paths, register

__all__ = ["cost", "embedding", "reference", "tied_embedding"]

_NAME = "embedding"
HOST_BOUND = 4 * 2**20  # elements of the result up to which PyTorch's own ops run an eager call,
_FEW = 1024  # of so many tokens at most: their kernel for a few reads all tokens for each column
_TIED = 65536  # the same where the table's other gradient would have to be added

Tensor = torch.Tensor


def reference(
    tokens: Tensor, weight: Tensor, position: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Token and position embeddings in plain PyTorch: the definition."""
    x = torch.nn.functional.embedding(tokens, weight)
    if position is not None:
        length = tokens.shape[-1]
        x = x + (position if len(position) == length else position[:length])
    return x if dtype is None else x.to(dtype)


class Inputs(NamedTuple):
    """The arguments of a look-up."""

    tokens: Tensor
    weight: Tensor
    position: Tensor | None
    dtype: torch.dtype


def _launch(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """The embeddings, the weight for whom it is tied to, and the tokens in one row."""
    from tilewright.ops.embedding import kernels

    tokens, weight, position, dtype = inputs
    flat, table, places = dispatch.packed((tokens.reshape(-1), weight, position))
    return kernels.gather(flat, table, places, dtype, tokens.shape), weight, flat


def _save(ctx: Any, inputs: Inputs, output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, _, flat = output
    ctx.save_for_backward(flat)
    ctx.tables = [None if t is None else (t.shape, t.dtype) for t in (inputs.weight, inputs.position)]
    ctx.set_materialize_grads(False)


def _foresee(ctx: Any, inputs: Inputs, output: tuple[Tensor, Tensor, Tensor]) -> None:
    from tilewright.ops.embedding import kernels

    out, weight, flat = output
    _, needs_weight, needs_position, _ = ctx.needs_input_grad
    some = out.reshape(-1, out.shape[-1])[:32]
    together = needs_weight and needs_position and len(flat) == out.shape[-2]  # one pass, where the batch is 1
    if needs_weight:  # as of a table that is tied
        (table,) = dispatch.packed((weight,))
        kernels.scatter(flat[:32], some, len(weight), weight.dtype, table, len(some) if together else None)
    if needs_position and not together:
        kernels.add_batch(some, 1, len(some), weight.dtype)


def _differentiate(ctx: Any, _: Any, dout: Any, dtied: Any) -> Sequence[Tensor | None]:
    from tilewright.ops.embedding import kernels

    register.refuse_second_derivative(_NAME, "torch.nn.functional.embedding")
    if dout is None:
        return None, dtied
    (tokens,) = ctx.saved_tensors
    of_weight, of_position = ctx.tables
    _, needs_weight, needs_position, _ = ctx.needs_input_grad
    dweight = dposition = None
    (classes, width), dtype = of_weight
    (rows,) = dispatch.packed((dout.reshape(-1, width),))
    length = of_position[0][0] if needs_position else None
    batch = len(tokens) // max(1, dout.shape[-2])
    if needs_weight:
        together = length if batch == 1 else None
        dweight, dposition = kernels.scatter(tokens, rows, classes, dtype, dispatch.packed((dtied,))[0], together)
    if length is not None and dposition is None:
        dposition = kernels.add_batch(rows, batch, length, dtype)
    return None, dweight, dposition


_eager = register.make_eager(_launch, _save, _differentiate, foresee=_foresee, outputs=2)


def embedding(
    tokens: Tensor, weight: Tensor, position: Tensor | None = None, *, dtype: torch.dtype | None = None
) -> Tensor:
    """``weight[tokens] + position[:sequence]``, rounded to `dtype` once.

    Args:
        tokens: ``(..., sequence)``, int64 or int32. A token outside of the table gives NaN where kernels run, and
            PyTorch's error elsewhere.
        weight: ``(vocabulary, width)``.
        position: ``(at least sequence, width)``, of the weight's dtype; None for none.
        dtype: of the result; left out, the weight's.

    Under ``torch.compile`` and for few tokens this is plain PyTorch.

    >>> import torch
    >>> weight, position = torch.randn(10, 4), torch.randn(6, 4)
    >>> embedding(torch.tensor([[1, 2, 3]]), weight, position).shape
    torch.Size([1, 3, 4])
    """
    _check(tokens, weight, position, dtype)
    most = min(_FEW, HOST_BOUND // max(1, weight.shape[1]))
    return _look_up(tokens, weight, position, dtype, most)[0]


def tied_embedding(
    tokens: Tensor, weight: Tensor, position: Tensor | None = None, *, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """`embedding`, and the weight, to be used in one matmul and nowhere else: the gradient that comes back for it is
    written to.

    So that gradient must be nobody else's, as those of `torch.nn.functional.linear` and of this package are. Of a sum,
    `weight + low_rank` say, it is the other summand's too; which is why this is not for everybody.

    >>> import torch
    >>> weight = torch.randn(10, 4)
    >>> x, head = tied_embedding(torch.tensor([[1, 2, 3]]), weight)
    >>> torch.nn.functional.linear(x, head).shape
    torch.Size([1, 3, 10])
    """
    _check(tokens, weight, position, dtype)
    return _look_up(tokens, weight, position, dtype, min(_TIED, HOST_BOUND) // max(1, weight.shape[1]))


def _look_up(
    tokens: Tensor, weight: Tensor, position: Tensor | None, dtype: torch.dtype | None, most: int
) -> tuple[Tensor, Tensor]:
    """The embeddings and the table; up to `most` tokens of an eager call are left to PyTorch's own ops."""
    if dispatch.is_host_bound(tokens, most, weight, position):
        ran, why = paths.PYTORCH, paths.why_host_bound(most)
    elif not dispatch.runs_kernel(weight):
        ran, why = paths.REFERENCE, dispatch.why_no_kernel(weight)
    elif dispatch.is_traced(tokens, weight, position):
        ran, why = paths.REFERENCE, "a compiler, a dispatch mode or a tensor subclass sees PyTorch's own ops"
    else:
        ran, why = paths.KERNEL, ""
    paths.note(_NAME, ran, why)
    if ran != paths.KERNEL:
        return reference(tokens, weight, position, dtype), weight
    x, alias = _eager(tokens, weight, position, dtype or weight.dtype)
    if not weight.requires_grad:  # the alias would have a gradient for the position's sake
        return x, weight
    return x, alias


def _check(tokens: Any, weight: Any, position: Any, dtype: Any) -> None:
    dispatch.check_tensor(_NAME, "weight", weight)
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        raise ValueError(f"{_NAME}: weight must be a matrix, vocabulary by width.")
    if not isinstance(tokens, Tensor) or tokens.dtype not in (torch.int64, torch.int32) or not tokens.ndim:
        raise TypeError(f"{_NAME}: tokens must be an int64 or int32 tensor of at least one dimension.")
    if tokens.device != weight.device:
        raise ValueError(f"{_NAME}: tokens are on {tokens.device}, but weight is on {weight.device}; move one of them.")
    if dtype is not None and dtype not in dispatch.FLOATS:
        raise TypeError(f"{_NAME}: dtype is {dtype}; choose a floating-point one.")
    if position is None:
        return
    dispatch.check_tensor(_NAME, "position", position, torch.Size((len(position), weight.shape[1])), weight)
    if position.dtype != weight.dtype:
        raise TypeError(f"{_NAME}: position is {position.dtype}, but weight is {weight.dtype}; convert one of them.")
    if len(position) < tokens.shape[-1]:
        raise ValueError(f"{_NAME}: {tokens.shape[-1]} tokens are more than the {len(position)} positions.")
