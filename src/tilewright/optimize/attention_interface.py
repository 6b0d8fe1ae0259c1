"""`ops.attention` as Hugging Face's models call it: an attention function and the mask that goes with it.

A model asks for its mask once, and hands what it gets to every layer. A causal mask or a sliding window is a `Mask`
here, which says so and holds no matrix. Of a padded batch each row becomes up to three packed sequences, what is padded
in front, the tokens, and what is padded behind: nothing is copied, and tokens see tokens alone.

That, and whether anything is padded at all, is read from the device once a forward, as `sdpa` reads it. Where nobody
may wait, under a compiler or in a captured graph, the tokens of a row are gathered in front of what is padded, which
does for padding anywhere; under a window, which counts what is padded, too, and on a CPU, the padded keys are hidden
instead. Any other mask is the matrix that `sdpa` has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tilewright.errors import UserError
from tilewright.ops.attention.op import attention

_PACKING = ("cuda",)  # devices with kernels that do not compute what is padded


@dataclass(frozen=True)
class Mask:
    """A query sees no key behind its own, and `before` ahead of it, or all; `starts` are of packed sequences.

    `order` says which token each of the packed ones is, and `back` which of those each token is; None: as they are.
    `keys` are those that are no padding, where no sequence says so.
    """

    before: int | None
    starts: Tensor | None = None
    given: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    order: Tensor | None = None
    back: Tensor | None = None
    keys: Tensor | None = None

    def contiguous(self) -> Tensor:
        """The matrix: `generate` asks for it where it makes masks ahead, for a cache of fixed size."""
        return _matrix(self.given)

    @property
    def ndim(self) -> int:
        """Asked for by transformers before 5.23, which would make a mask of this one and lose its padding."""
        raise UserError(
            "Attention by tilewright generates with a cache of fixed size from transformers 5.23 on; update it."
        )


def _matrix(given: Mapping[str, Any]) -> Tensor:
    from transformers.masking_utils import sdpa_mask

    made: Any = sdpa_mask(**{**given, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
    return made  # type: ignore[no-any-return]


def make_mask(**given: Any) -> Mask | Tensor | None:
    """The mask of a model, from what transformers tells `AttentionMaskInterface`: what `sdpa` has, or a `Mask`."""
    from transformers.masking_utils import sdpa_mask

    if not _is_plain(given):
        return sdpa_mask(**given)
    before = None if given.get("local_size") is None else int(given["local_size"]) - 1
    padding = given.get("attention_mask")
    if padding is None:
        return Mask(before, None, given)
    if given["q_length"] != given["kv_length"] or padding.shape[1] != given["kv_length"]:
        return _matrix(given)
    padding = padding.bool()
    if _is_captured(padding):
        is_packed = before is None and padding.device.type in _PACKING
        return _gather(padding, given) if is_packed else Mask(before, None, given, keys=padding)
    if type(padding) is not Tensor:
        return _matrix(given)
    changes = torch.nn.functional.pad(padding, (1, 1)).diff(dim=1).sum(1)  # 2 where the tokens of a row are one run
    is_whole, is_run = torch.stack((padding.all(), (changes <= 2).all())).tolist()
    if is_whole:
        return Mask(before, None, given)
    return Mask(before, _starts(padding), given) if is_run else _matrix(given)


def _is_plain(given: Mapping[str, Any]) -> bool:
    """Whether a mask is causal or a window, but for its padding, and the last query is at the last key.

    It is not with a static cache, nor for packed or blockwise sequences, an overlay of the model's own, an encoder, or
    chunks, which are local as windows are.
    """
    sizes = [given.get(name) for name in ("q_length", "kv_length", "q_offset", "kv_offset")]
    if not all(isinstance(size, int) for size in sizes) or not given.get("allow_is_causal_skip", False):
        return False
    is_aligned = given["q_offset"] + given["q_length"] == given["kv_offset"] + given["kv_length"]
    is_chunk = getattr(given.get("config"), "attention_chunk_size", None) is not None
    return is_aligned and not (is_chunk and given.get("local_size") is not None)


def _is_captured(padding: Tensor) -> bool:
    """Whether nobody may wait for the padding to be read."""
    capturing = padding.is_cuda and torch.cuda.is_current_stream_capturing()
    return torch.compiler.is_compiling() or capturing


def _starts(padding: Tensor) -> Tensor:
    """Where sequences begin in the rows of a batch, one behind the other: of padding, of tokens, of padding."""
    rows, columns = padding.shape
    count = padding.sum(1)
    first = padding.int().argmax(1)  # 0 of a row without tokens
    begin = torch.arange(rows, device=padding.device) * columns
    starts = torch.stack((begin, begin + first, begin + first + count), 1).flatten()
    return torch.nn.functional.pad(starts, (0, 1), value=rows * columns).int()


def _gather(padding: Tensor, given: Mapping[str, Any]) -> Mask:
    """The tokens of each row in their order, then what is padded: two sequences a row."""
    rows, columns = padding.shape
    begin = torch.arange(rows, device=padding.device)[:, None] * columns
    tokens = padding.cumsum(1)
    count = tokens[:, -1:]
    place = torch.where(padding, tokens - 1, count + (~padding).cumsum(1) - 1)
    back = (begin + place).flatten()
    order = torch.empty_like(back).scatter(0, back, torch.arange(rows * columns, device=padding.device))
    starts = torch.cat((begin, begin + count), 1).flatten()
    starts = torch.nn.functional.pad(starts, (0, 1), value=rows * columns).int()
    return Mask(None, starts, given, order, back)


def attend(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Mask | Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None, softcap: float | None = None,
    **more: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """The attention function of transformers' `AttentionInterface`: tensors heads first in, tokens first out."""
    for name in ("s_aux", "position_bias", "cache"):
        if more.get(name) is not None:
            raise UserError(
                f"The attention of tilewright has no {name}; load the model with attn_implementation='sdpa'."
            )
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    options: dict[str, Any] = {"scale": scaling, "p": dropout, "softcap": softcap or 0.0}
    if not isinstance(attention_mask, Mask):
        if attention_mask is None:
            asked = is_causal if is_causal is not None else getattr(module, "is_causal", True)
            options["causal"] = bool(asked) and q.shape[1] == k.shape[1]
        else:
            options |= {"causal": False, "bias": attention_mask[..., : k.shape[1]]}
        return attention(q, k, v, **options), None
    mask, longest = attention_mask, q.shape[1]
    options["window"] = mask.before
    if mask.starts is None:
        bias = None if mask.keys is None else mask.keys[:, None, None]
        return attention(q, k, v, bias=bias, **options), None
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    if mask.order is not None:
        packed = [x.index_select(0, mask.order) for x in packed]
    out = attention(*packed, cu_seqlens_q=mask.starts, max_seqlen_q=longest, **options)
    out = out if mask.back is None else out.index_select(0, mask.back)
    return out.unflatten(0, (-1, longest)), None
