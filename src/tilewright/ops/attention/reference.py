"""`attention` in plain PyTorch: the definition."""

from __future__ import annotations

from typing import Any

import torch

from tilewright.ops.attention.arguments import Inputs, Tensor, Window, read
from tilewright.runtime import dispatch


def reference(
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
    keep: Tensor | None = None,
) -> Any:
    """`attention`, all scores in memory, in float32 or, for float64, in that.

    `keep` says which weights dropout keeps, as (batch, heads, queries, keys) or, packed, as (heads, tokens,
    max_seqlen_k); left out, torch draws it.

    >>> q, k, v = torch.randn(3, 1, 4, 2, 8)
    >>> torch.allclose(reference(q, k, v)[:, 0], v[:, 0])
    True
    """
    inputs = read(
        q, k, v, causal, window, scale, softcap, alibi, bias, p, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        return_lse,
    )  # fmt: skip
    return unpack(inputs, compute(inputs, keep))


def unpack(inputs: Inputs, outputs: tuple[Tensor, Tensor | None]) -> Any:
    """What a caller gets of (out, lse)."""
    out, lse = outputs
    if inputs.q_starts is not None:
        out, lse = out.squeeze(0), None if lse is None else lse.squeeze(0)
    return (out, lse) if inputs.wants_lse else out


def compute(inputs: Inputs, keep: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(out, log-sum-exp of the scores); of packed sequences on a CPU, one after the other."""
    if inputs.alibi is not None:
        inputs = inputs._replace(alibi=inputs.alibi[:, :, None])  # for every query
    if inputs.q_starts is None:
        queries, keys = inputs.q.shape[1], inputs.k.shape[1]
        return _compute(inputs, keep, _ahead(inputs, queries, keys))
    if inputs.q.device.type != "cpu" or dispatch.is_traced(*inputs[:7]):
        return _compute_together(inputs, keep)
    assert inputs.k_starts is not None
    # New tensors that each sequence is put into: what lies between and behind them is 0.
    out = inputs.q.new_zeros(*inputs.q.shape[:3], inputs.v.shape[3])
    lse = inputs.q.new_full((1, *inputs.q.shape[2:0:-1]), -torch.inf, dtype=dispatch.compute_dtype(inputs.q))
    starts, others = inputs.q_starts.tolist(), inputs.k_starts.tolist()
    for index in range(len(starts) - 1):
        rows, columns = slice(*starts[index : index + 2]), slice(*others[index : index + 2])
        queries, keys = rows.stop - rows.start, columns.stop - columns.start
        one = inputs._replace(
            q=inputs.q[:, rows], k=inputs.k[:, columns], v=inputs.v[:, columns],
            alibi=None if inputs.alibi is None else inputs.alibi[index if len(inputs.alibi) > 1 else 0][None],
        )  # fmt: skip
        kept = None if keep is None else keep[None, :, rows, :keys]
        part, part_lse = _compute(one, kept, _ahead(inputs, queries, keys))
        out = out.slice_scatter(part, 1, rows.start, rows.stop)
        lse = lse.slice_scatter(part_lse, 2, rows.start, rows.stop)
    return out, lse


def _ahead(inputs: Inputs, queries: int, keys: int) -> Tensor:
    """How many keys each one lies behind the query; negative: before it."""
    device = inputs.q.device
    return torch.arange(keys, device=device) - torch.arange(queries, device=device)[:, None] - (keys - queries)


def _compute_together(inputs: Inputs, keep: Tensor | None) -> tuple[Tensor, Tensor]:
    """Packed sequences in one matrix of scores: nobody waits for their lengths to be read."""
    assert inputs.q_starts is not None and inputs.k_starts is not None
    sequence, row, queries = _place_tokens(inputs.q_starts, inputs.q.shape[1])
    other, column, keys = _place_tokens(inputs.k_starts, inputs.k.shape[1])
    ahead = column - row[:, None] - (keys - queries[:, None])
    together = (sequence[:, None] == other) & (queries > 0)[:, None] & (keys > 0)
    alibi = inputs.alibi
    if alibi is not None and len(alibi) > 1:
        alibi = alibi[sequence, :, 0].T[None]
    if keep is not None:
        at = column.clamp(0, keep.shape[2] - 1).expand(keep.shape[0], len(row), -1)
        keep = keep.gather(2, at)[None]
    return _compute(inputs._replace(alibi=alibi), keep, ahead, together)


def _place_tokens(starts: Tensor, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return each token's sequence, its place in it, and that sequence's length: 0 for a token of no sequence."""
    token = torch.arange(tokens, device=starts.device)
    sequence = torch.bucketize(token, starts, right=True) - 1
    is_there = (sequence >= 0) & (sequence < len(starts) - 1)
    sequence = sequence.clamp(0, max(0, len(starts) - 2))
    lengths = starts.diff()[sequence] if len(starts) > 1 else torch.zeros_like(token)
    return sequence, token - starts[sequence], lengths * is_there


def _compute(
    inputs: Inputs, keep: Tensor | None, ahead: Tensor, together: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(out, log-sum-exp); `together` says which queries and keys are of one sequence, where not all are."""
    dtype = dispatch.compute_dtype(inputs.q)
    q, k, v = (x.to(dtype).transpose(1, 2) for x in inputs[:3])
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * inputs.scale
    if inputs.softcap:
        scores = inputs.softcap * (scores / inputs.softcap).tanh()
    if inputs.alibi is not None:
        scores = scores - inputs.alibi[..., None].to(dtype) * ahead.abs()
    if inputs.bias is not None:
        is_mask = inputs.bias.dtype == torch.bool
        scores = scores.masked_fill(~inputs.bias, -torch.inf) if is_mask else scores + inputs.bias.to(dtype)
    if inputs.left >= 0:
        scores = scores.masked_fill(ahead < -inputs.left, -torch.inf)
    if inputs.right >= 0:
        scores = scores.masked_fill(ahead > inputs.right, -torch.inf)
    if together is not None:
        scores = scores.masked_fill(~together, -torch.inf)
    # A query that sees nothing has weights of 0 and no gradient, where softmax would give what is not a number.
    blind = (scores == -torch.inf).all(-1, keepdim=True)
    scores = scores.masked_fill(blind, 0.0)
    weights = scores.softmax(-1).masked_fill(blind, 0.0)
    if inputs.p:
        keep = torch.rand_like(weights) >= inputs.p if keep is None else keep
        weights = weights * keep / (1.0 - inputs.p)
    lse = scores.logsumexp(-1) if k.shape[2] else scores.sum(-1)
    lse = lse.masked_fill(blind.squeeze(-1), -torch.inf)
    return (weights @ v).transpose(1, 2).to(inputs.q.dtype), lse
