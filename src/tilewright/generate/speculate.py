"""Several tokens a forward: what followed the last tokens earlier in the text is proposed, and checked all at once.

At batch 1 a forward of five tokens reads the same weights as one of one token. A proposed token is accepted with the
probability p that the model gives it, and the first one refused is replaced by a draw from p without it: the tokens are
distributed as if each had been drawn by itself, and with temperature 0 they are the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilewright.errors import UserError
from tilewright.generate.sampling import draw, probabilities
from tilewright.generate.step import Decoding
from tilewright.runtime import dispatch

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


def accept(shares: Tensor, draft: Tensor, count: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """(how many tokens of a draft are accepted, the token behind them), of each row.

    Args:
        shares: ``(batch, tokens + 1, vocabulary)``: the probabilities of each proposed token, and of one more.
        draft: ``(batch, tokens)``, int64.
        count: ``(batch,)``: how many of the draft there are; what lies behind them is ignored.
        generator: of the shares' device.

    >>> shares = torch.eye(4)[torch.tensor([[2, 3, 1]])]  # the model is sure of 2, 3, 1
    >>> accept(shares, torch.tensor([[2, 0]]), torch.tensor([2]), None)
    (tensor([1]), tensor([3]))
    """
    tokens = draft.shape[1]
    chances = shares[:, :tokens].gather(-1, draft[..., None])[..., 0]
    numbers = torch.empty_like(chances).uniform_(generator=generator)
    there = torch.arange(tokens, device=draft.device) < count[:, None]
    accepted = ((numbers < chances) & there).long().cumprod(-1).sum(-1)
    rest = shares.gather(1, accepted[:, None, None].expand(-1, 1, shares.shape[-1]))[:, 0]
    refused = torch.nn.functional.pad(draft, (0, 1)).gather(1, accepted[:, None])
    kept = rest.scatter(-1, refused, 0.0)
    return accepted, draw(torch.where((accepted < count)[:, None], kept, rest), generator)


class Speculating:
    """Forwards of a token and a draft behind it, in one row; on a GPU one CUDA graph. `forwards` counts them."""

    def __init__(self, decoding: Decoding, most: int) -> None:
        shape = decoding.model.config.shape
        if not 1 <= most <= MOST or (most + 1) * shape.heads // shape.kv_heads > 128:
            raise UserError(f"speculate is {most}; propose 1 to {MOST} tokens, fewer where many heads share keys.")
        self.decoding, self.most, self.forwards = decoding, most, 0
        device = decoding.model.device
        self._draft = torch.zeros(1, most, dtype=torch.int64, device=device)
        self._count = torch.zeros(1, dtype=torch.int64, device=device)
        self._found = torch.zeros(2, dtype=torch.int64, device=device)  # accepted tokens, and the one behind them
        self._graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            self._capture()

    @torch.no_grad()
    def _forward(self) -> None:
        decoding = self.decoding
        tokens = torch.cat((decoding.tokens[:, None], self._draft), 1)
        shares = probabilities(decoding.model(tokens, decoding.cache), decoding.sampling)
        accepted, token = accept(shares, self._draft, self._count, decoding.generator)
        decoding.cache.advance(accepted + 1)
        decoding.tokens.copy_(token)
        self._found.copy_(torch.cat((accepted, token)))

    def _capture(self) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        before = self.decoding.cache.before
        with torch.cuda.stream(side), dispatch.forcing_kernels():
            for _ in range(2):
                before.zero_()
                self._forward()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        before.zero_()
        self._graph = torch.cuda.CUDAGraph()
        if self.decoding.generator is not None:
            self._graph.register_generator_state(self.decoding.generator)
        with torch.cuda.graph(self._graph):
            self._forward()
        self._tables = self.decoding.model.tables  # which the graph reads: others may make longer ones

    def step(self, draft: Sequence[int]) -> list[int]:
        """Those tokens of a draft that are accepted, and one more."""
        self.forwards += 1
        if not draft:
            return self.decoding.step().tolist()
        padded = [*draft, *[0] * (self.most - len(draft))]
        self._draft.copy_(torch.tensor([padded]))
        self._count.fill_(len(draft))
        if self._graph is not None:
            self._graph.replay()
        else:
            self._forward()
        accepted, token = self._found.tolist()
        return [*draft[:accepted], token]
