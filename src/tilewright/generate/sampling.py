"""How the next token is chosen from logits: the likeliest, or drawn from a part of them.

    p       = softmax(logits / temperature)
    top_k   keeps the k likeliest tokens
    top_p   keeps the fewest likeliest tokens whose probabilities, of those kept so far, sum up to p or more
    min_p   keeps tokens of at least min_p times the probability of the likeliest

Each filter works on what the one before it has kept; the likeliest token always stays, and ties with the last one kept
by top_k stay with it. What is kept is drawn from in proportion to its probability.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """The settings; as they come, the likeliest token is taken.

    >>> Sampling(temperature=0.8, top_k=50).is_greedy
    False
    """

    temperature: float = 0.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p"):
            if type(getattr(self, name)) not in (int, float):
                raise UserError(f"{name} is {getattr(self, name)!r}; give a number.")
        if not 0.0 <= self.temperature < math.inf:
            raise UserError(f"temperature is {self.temperature}; give 0 for the likeliest token, or a number above 0.")
        if type(self.top_k) is not int or self.top_k < 0:
            raise UserError(f"top_k is {self.top_k}; give how many tokens to keep, or 0 for all.")
        if not 0.0 < self.top_p <= 1.0:
            raise UserError(f"top_p is {self.top_p}; it must be above 0 and at most 1.")
        if not 0.0 <= self.min_p <= 1.0:
            raise UserError(f"min_p is {self.min_p}; it must lie in 0 to 1.")
        if type(self.seed) is not int or not 0 <= self.seed < 2**63:
            raise UserError(f"seed is {self.seed}; it must be a whole number from 0 to 2^63.")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """The probabilities that tokens are drawn with, in float32; for greedy settings all of it is at the likeliest.

    >>> logits = torch.tensor([0.5, 0.3, 0.2]).log()
    >>> probabilities(logits, Sampling(temperature=1.0, top_p=0.75))
    tensor([0.6250, 0.3750, 0.0000])
    """
    logits = logits.float()
    if sampling.is_greedy:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    # Less the greatest, so that no temperature makes one infinite; one that float32 has not is its smallest number.
    smallest = torch.finfo(torch.float32).tiny
    logits = (logits - logits.amax(-1, keepdim=True)) / max(sampling.temperature, smallest)
    if 0 < sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k, -1).values[..., -1:]
        logits = logits.masked_fill(logits < least, -math.inf)
    if sampling.top_p < 1.0:
        ordered, places = logits.sort(dim=-1, descending=True, stable=True)
        shares = ordered.softmax(-1)
        before = shares.cumsum(-1) - shares  # of likelier tokens
        kept = torch.empty_like(before, dtype=torch.bool).scatter_(
            -1, places, (before == 0) | (before < sampling.top_p)
        )
        logits = logits.masked_fill(~kept, -math.inf)
    if sampling.min_p > 0.0:
        least = logits.max(-1, keepdim=True).values + math.log(sampling.min_p)
        logits = logits.masked_fill(logits < least, -math.inf)
    return logits.softmax(-1)


def sample(logits: Tensor, sampling: Sampling, generator: torch.Generator | None) -> Tensor:
    """One token of each row, int64, chosen on the device and without a word to the host."""
    if sampling.is_greedy:
        return likeliest(logits)
    return draw(probabilities(logits, sampling), generator)


def likeliest(scores: Tensor) -> Tensor:
    """The argmax of each row, of equal ones the first: by parts, for a reduction of a single row is a single program.

    >>> likeliest(torch.tensor([[1.0, 3.0, 2.0, 3.0]]))
    tensor([1])
    """
    size = scores.shape[-1]
    parts = next(each for each in range(math.isqrt(size), 0, -1) if size % each == 0)
    highest, places = scores.unflatten(-1, (parts, size // parts)).max(-1)
    best = highest.argmax(-1, keepdim=True)
    return (places.gather(-1, best) + best * (size // parts))[..., 0]


def draw(shares: Tensor, generator: torch.Generator | None) -> Tensor:
    """A token of each row, in proportion to its share: of exponential times with these rates, the first."""
    times = torch.empty_like(shares).exponential_(1.0, generator=generator)
    return likeliest(shares / times.clamp_min(torch.finfo(times.dtype).tiny))
