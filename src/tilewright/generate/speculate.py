"""Several tokens a forward: a draft is proposed, and checked all at once.

A draft is what followed the last tokens earlier in the text, or is drawn from a smaller model. At batch 1 a forward of
five tokens reads the same weights as one of one token. Let a token be drawn from q by who proposes it (q is 1 where
nothing is drawn), and let the model give it p. It is accepted with probability min(1, p / q), and the first one refused
is replaced by a draw from what p has more than q, max(0, p - q): the tokens are distributed as if each had been drawn
from p by itself (Leviathan et al., 2023), and with temperature 0 they are the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tilewright.errors import UserError
from tilewright.generate.cache import KVCache
from tilewright.generate.decoder import Decoder
from tilewright.generate.sampling import Sampling, draw, probabilities
from tilewright.generate.step import Decoding, prefill
from tilewright.generate.text import Tokenizer

MOST = 15  # proposed tokens
_LONGEST = 3  # tokens that must have stood there before


class Lookup:
    """Proposes what followed the last tokens where they stood before, the longest match and of those the latest.

    >>> lookup = Lookup([1, 2, 3, 4, 1, 2])
    >>> lookup.propose(3), lookup.propose(1)
    ([3, 4, 1], [3])
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}  # where what follows some tokens begins
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> None:
        """Take the next token of the text."""
        for length in range(1, _LONGEST + 1):
            if length <= len(self._tokens):
                self._ends[tuple(self._tokens[-length:])] = len(self._tokens)
        self._tokens.append(token)

    def propose(self, most: int) -> list[int]:
        """Up to so many tokens; none where the last token is new."""
        for length in range(min(_LONGEST, len(self._tokens)), 0, -1):
            begin = self._ends.get(tuple(self._tokens[-length:]))
            if begin is not None:
                return self._tokens[begin : begin + most]
        return []


def accept(
    shares: Tensor, draft: Tensor, count: Tensor, generator: torch.Generator | None, proposal: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(how many tokens of a draft are accepted, the token behind them), of each row.

    Args:
        shares: ``(batch, tokens + 1, vocabulary)``: the probabilities of each proposed token, and of one more.
        draft: ``(batch, tokens)``, int64.
        count: ``(batch,)``: how many of the draft there are; what lies behind them is ignored.
        generator: of the shares' device.
        proposal: ``(batch, tokens, vocabulary)``: the probabilities that the draft was drawn with; left out, it was
            not drawn: each of its tokens has all of them.

    >>> shares = torch.eye(4)[torch.tensor([[2, 3, 1]])]  # the model is sure of 2, 3, 1
    >>> accept(shares, torch.tensor([[2, 0]]), torch.tensor([2]), None)
    (tensor([1]), tensor([3]))
    """
    tokens = draft.shape[1]
    chances = shares[:, :tokens].gather(-1, draft[..., None])[..., 0]
    if proposal is not None:
        chances = chances / proposal.gather(-1, draft[..., None])[..., 0]
    numbers = torch.empty_like(chances).uniform_(generator=generator)
    there = torch.arange(tokens, device=draft.device) < count[:, None]
    accepted = ((numbers < chances) & there).long().cumprod(-1).sum(-1)
    rest = _at(shares, accepted)
    if proposal is None:
        kept = rest.scatter(-1, torch.nn.functional.pad(draft, (0, 1)).gather(1, accepted[:, None]), 0.0)
    else:
        kept = (rest - _at(proposal, accepted.clamp_max(tokens - 1))).clamp_min(0.0)
        kept = torch.where(kept.sum(-1, keepdim=True) > 0, kept, rest)  # equal but for rounding
    return accepted, draw(torch.where((accepted < count)[:, None], kept, rest), generator)


def _at(shares: Tensor, place: Tensor) -> Tensor:
    """The shares (batch, vocabulary) at one place of each row."""
    return shares.gather(1, place[:, None, None].expand(-1, 1, shares.shape[-1]))[:, 0]


class Speculating:
    """Forwards of a token and a draft behind it, in one row; on a GPU one CUDA graph.

    `forwards` counts them; `drafted` those of a model that makes drafts.
    """

    def __init__(self, decoding: Decoding, most: int) -> None:
        shape = decoding.model.config.shape
        if not 1 <= most <= MOST or (most + 1) * shape.heads // shape.kv_heads > 128:
            raise UserError(f"speculate is {most}; propose 1 to {MOST} tokens, fewer where many heads share keys.")
        self.decoding, self.most, self.forwards, self.drafted = decoding, most, 0, 0
        device = decoding.model.device
        self._draft = torch.zeros(1, most, dtype=torch.int64, device=device)
        self._count = torch.zeros(1, dtype=torch.int64, device=device)
        self._found = torch.zeros(most + 2, dtype=torch.int64, device=device)  # accepted, the token behind, the draft
        self._proposal: Tensor | None = None  # what the draft was drawn with
        self._graph: torch.cuda.CUDAGraph | None = None

    def start(self, prompt: Sequence[int], seed: int) -> list[int]:
        """Begin with a prompt; its first token."""
        self.forwards = self.drafted = 0
        return self.decoding.start([prompt], seed).tolist()

    def step(self, most: int) -> list[int]:
        """The next token, and those of a draft of at most so many before it that are accepted."""
        self.forwards += 1
        count = self._propose(most)
        if not count:
            return self.decoding.step().tolist()
        self._count.fill_(count)
        if self._graph is not None:
            self._graph.replay()
        else:
            self._forward()
        accepted, token, *draft = self._found.tolist()
        return [*draft[:accepted], token]

    def _propose(self, most: int) -> int:
        """Make a draft, or see to it that the forward does; how many tokens it has."""
        raise NotImplementedError

    @torch.no_grad()
    def _forward(self) -> None:
        decoding = self.decoding
        tokens = torch.cat((decoding.tokens[:, None], self._draft), 1)
        shares = probabilities(decoding.forward(tokens, decoding.cache), decoding.sampling)
        accepted, token = accept(shares, self._draft, self._count, decoding.generator, self._proposal)
        decoding.cache.advance(accepted + 1)
        decoding.tokens.copy_(token)
        self._found.copy_(torch.cat((accepted, token, self._draft[0])))


class LookupSpeculating(Speculating):
    """Drafts are what followed the last tokens where they stood before."""

    def __init__(self, decoding: Decoding, most: int) -> None:
        super().__init__(decoding, most)
        self._lookup = Lookup(())
        if decoding.uses_graph:
            self._graph = decoding.capture(self._forward)

    def start(self, prompt: Sequence[int], seed: int) -> list[int]:
        return self._add(Lookup(prompt), super().start(prompt, seed))

    def step(self, most: int) -> list[int]:
        return self._add(self._lookup, super().step(most))

    def _add(self, lookup: Lookup, tokens: list[int]) -> list[int]:
        self._lookup = lookup
        for token in tokens:
            lookup.add(token)
        return tokens

    def _propose(self, most: int) -> int:
        draft = self._lookup.propose(min(most, self.most))
        if draft:
            self._draft.copy_(torch.tensor([[*draft, *[0] * (self.most - len(draft))]]))
        return len(draft)


class DraftSpeculating(Speculating):
    """Drafts are drawn from a smaller model with a cache of its own; drawing and checking them is one graph.

    The smaller model's cache ends before the last token but one, which its first forward takes with the last one: so
    it is the same forwards whether or not all of a draft was accepted.
    """

    def __init__(self, decoding: Decoding, most: int, model: Decoder, cache: KVCache) -> None:
        super().__init__(decoding, most)
        self._model, self._cache = model, cache
        vocabulary = decoding.model.config.shape.vocabulary
        self._largest = model.config.shape.vocabulary - 1  # token; the other model may have rows behind it
        self._proposal = torch.zeros(1, most, vocabulary, device=decoding.model.device)
        self._before = torch.zeros_like(decoding.tokens)  # the last token but one
        if decoding.uses_graph:
            self._graph = decoding.capture(self._forward, cache)
            self._tables = model.tables  # which the graph reads: others may make longer ones

    def start(self, prompt: Sequence[int], seed: int) -> list[int]:
        found = super().start(prompt, seed)
        self._before.fill_(prompt[-1])
        prefill(self._model, self._cache, [[min(token, self._largest) for token in prompt]], Sampling())
        self._cache.before.sub_(1)
        return found

    def _propose(self, most: int) -> int:
        if most > 0:
            self.drafted += self.most
        return max(0, min(most, self.most))

    @torch.no_grad()
    def _forward(self) -> None:
        """Draw a draft, check it, and leave the smaller model's cache where the other one's is, less one."""
        decoding, cache = self.decoding, self._cache
        assert self._proposal is not None
        tokens = torch.stack((self._before, decoding.tokens), 1)
        for place in range(self.most):
            logits = self._model(tokens.clamp_max(self._largest), cache)[:, -1]
            cache.advance(tokens.shape[1])
            shares = probabilities(_with_vocabulary(logits, self._proposal.shape[-1]), decoding.sampling)
            self._proposal[:, place] = shares
            self._draft[:, place] = draw(shares, decoding.generator)
            tokens = self._draft[:, place : place + 1]
        line = torch.cat(
            (decoding.tokens[:, None], self._draft), 1
        )  # whose last one that is accepted comes before next
        super()._forward()
        self._before.copy_(line.gather(1, self._found[:1, None])[:, 0])
        cache.before.copy_(decoding.cache.before - 1)


def _with_vocabulary(logits: Tensor, size: int) -> Tensor:
    """Logits of as many tokens: some models have rows behind the last token, and differ in how many."""
    return torch.nn.functional.pad(logits[..., :size], (0, max(0, size - logits.shape[-1])), value=-math.inf)


def refuse_draft(
    model: Decoder, tokenizer: Tokenizer | None, draft: Decoder, draft_tokenizer: Tokenizer | None
) -> None:  # fmt: skip
    """Raise where a smaller model cannot propose tokens to a larger one."""
    own, other = model.config.shape.vocabulary, draft.config.shape.vocabulary
    if tokenizer is not None and draft_tokenizer is not None:
        if not tokenizer.is_like(draft_tokenizer):
            raise UserError("The draft model's tokenizer is not the model's; give a draft of the same family.")
    elif own != other:
        raise UserError(
            f"The draft model has a vocabulary of {other:,} and the model one of {own:,}; give a draft with the same "
            "tokenizer."
        )
    if (draft.device, draft.dtype) != (model.device, model.dtype):
        raise UserError(
            f"The draft model is in {draft.dtype} on {draft.device} and the model in {model.dtype} on {model.device}; "
            "load both alike."
        )
