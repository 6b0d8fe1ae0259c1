"""What each filter keeps, by its definition, and that tokens are drawn in proportion."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.generate.sampling import Sampling, likeliest, probabilities, sample


def by_definition(logits, sampling):
    """In Python, one token after the other from the likeliest on."""
    weights = {i: math.exp((x - max(logits)) / sampling.temperature) for i, x in enumerate(logits)}

    def shares(kept):
        return {i: weights[i] / sum(weights[j] for j in kept) for i in kept}

    kept = sorted(weights, key=lambda i: -weights[i])
    if sampling.top_k:
        kept = kept[: sampling.top_k]
    if sampling.top_p < 1.0:
        found, total, now = [], 0.0, shares(kept)
        for i in kept:
            if total >= sampling.top_p:
                break
            found.append(i)
            total += now[i]
        kept = found
    if sampling.min_p:
        now = shares(kept)
        kept = [i for i in kept if now[i] >= sampling.min_p * max(now.values())]
    now = shares(kept)
    return torch.tensor([now.get(i, 0.0) for i in range(len(logits))])


@given(
    seed=st.integers(0, 10**6), temperature=st.floats(0.2, 3.0), top_k=st.integers(0, 12), top_p=st.floats(0.05, 1.0),
    min_p=st.floats(0.0, 0.9),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_each_filter_keeps_what_its_definition_says(seed, temperature, top_k, top_p, min_p):
    logits = torch.randn(10, generator=torch.Generator().manual_seed(seed)) * 2
    sampling = Sampling(temperature, top_k, top_p, min_p)
    found, expected = probabilities(logits, sampling), by_definition(logits.tolist(), sampling)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)


def test_ties_the_likeliest_and_greedy():
    level = torch.zeros(4)
    assert probabilities(level, Sampling(1.0, top_k=2)).tolist() == [0.25] * 4
    assert probabilities(level, Sampling(1.0, top_p=0.4)).tolist() == [0.5, 0.5, 0.0, 0.0]
    sharp = torch.tensor([9.0, 0.0, 0.0])
    assert probabilities(sharp, Sampling(1.0, top_p=1e-9, min_p=1.0)).tolist() == [1.0, 0.0, 0.0]
    assert probabilities(sharp, Sampling()).tolist() == [1.0, 0.0, 0.0] == probabilities(sharp, Sampling(1e-4)).tolist()
    assert sample(torch.tensor([[0.0, 1.0], [3.0, 1.0]]), Sampling(), None).tolist() == [1, 0]


@pytest.mark.parametrize(
    "sampling",
    [Sampling(1.0), Sampling(0.7), Sampling(1.0, top_k=3), Sampling(1.3, top_p=0.8), Sampling(1.0, min_p=0.2)],
    ids=["plain", "cold", "top_k", "top_p", "min_p"],
)
def test_tokens_are_drawn_in_proportion(sampling):
    logits, draws = torch.tensor([1.0, 0.2, -0.5, 2.0, 0.0, -3.0]), 40_000
    shares = probabilities(logits, sampling).double()
    drawn = sample(logits.expand(draws, -1), sampling, torch.Generator().manual_seed(5))
    counts = torch.bincount(drawn, minlength=6).double()
    assert counts[shares == 0].sum() == 0
    expected = (draws * shares)[shares > 0]
    chi_square = ((counts[shares > 0] - expected) ** 2 / expected).sum()
    assert chi_square < 30  # of at most 5 degrees of freedom: one seed in 60,000 has more, and the seed is fixed


@pytest.mark.parametrize("size", [1, 7, 60, 128, 1001])
def test_the_likeliest_by_parts_is_the_argmax_and_the_first_of_equals(size):
    scores = torch.randint(5, (40, size)).float()
    best = likeliest(scores)
    assert torch.equal(best, (scores == scores.max(-1, keepdim=True).values).int().argmax(-1))
    scores[:, size // 2] = float("nan")
    assert (likeliest(scores) == size // 2).all()


@pytest.mark.parametrize("temperature", [1e-38, 5e-324, 1e-30])
def test_the_smallest_numbers_that_are_taken_leave_the_likeliest(temperature):
    logits = torch.tensor([1.0, 5.0, 20.0, 3.0])
    assert probabilities(logits, Sampling(temperature=temperature)).tolist() == [0, 0, 1, 0]
    assert probabilities(logits, Sampling(temperature=1.0, top_p=5e-324)).tolist() == [0, 0, 1, 0]
