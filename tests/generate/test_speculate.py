"""Proposed tokens change how soon a text is there, and not its distribution."""

import itertools

import pytest
import torch

from tilewright.errors import UserError
from tilewright.generate import Generator
from tilewright.generate.sampling import Sampling, probabilities
from tilewright.generate.speculate import Lookup, accept
from tilewright.models import GPT
from tilewright.plan.gpt import LLAMA, GPTConfig


def make(vocabulary, seed=0, noise=0.2):
    torch.manual_seed(seed)
    gpt = GPT(GPTConfig(width=16, layers=1, heads=2, vocabulary=vocabulary, sequence=128, **LLAMA))
    with torch.no_grad():
        for parameter in gpt.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=noise)
    return Generator(gpt)


def chi_square(counts, expected):
    there = expected > 0
    assert counts[~there].sum() == 0
    return float(((counts - expected)[there] ** 2 / expected[there]).sum())


@pytest.mark.parametrize("speculate", [1, 4, 15])
def test_greedy_tokens_are_the_same_and_take_fewer_forwards(speculate):
    gained = 0
    for seed in range(4):
        generator, prompt = make(20, seed), [1, 2, 3, 1, 2]
        plain = generator.generate([prompt], max_tokens=60)
        assert generator.metrics.steps == 59
        assert generator.generate([prompt], max_tokens=60, speculate=speculate) == plain
        gained += 59 - generator.metrics.steps
        end = plain[0].tokens[30]
        cut = generator.generate([prompt], max_tokens=60, stop_tokens=[end])
        assert generator.generate([prompt], max_tokens=60, stop_tokens=[end], speculate=speculate) == cut
    assert gained > 40, "greedy texts of tiny models repeat themselves"


def test_a_draft_stays_within_the_cache():
    generator = make(20)
    generator.set_context(40)
    prompt = [1, 2, 3] * 5
    plain = generator.generate([prompt], max_tokens=25)
    assert generator.generate([prompt], max_tokens=25, speculate=9) == plain


def test_accepted_and_replaced_tokens_have_the_models_distribution():
    """Of many rows at once: what comes out is distributed as the shares, whatever was proposed."""
    rows, vocabulary = 60_000, 4
    logits = torch.tensor([[0.3, -0.5, 1.0, 0.0], [2.0, 0.1, -1.0, 0.4], [0.0, 0.0, 0.9, -2.0]])
    for sampling in (Sampling(1.0), Sampling(0.8, top_p=0.9)):
        shares = probabilities(logits, sampling)
        generator = torch.Generator().manual_seed(1)
        for draft, count in itertools.product(([2, 0], [1, 3]), (0, 1, 2)):
            accepted, token = accept(
                shares.expand(rows, -1, -1),
                torch.tensor([draft]).expand(rows, -1),
                torch.full((rows,), count),
                generator,
            )
            first = torch.where(accepted > 0, draft[0], token)
            counts = torch.bincount(first, minlength=vocabulary).double()
            assert chi_square(counts, rows * shares[0].double()) < 25  # 3 degrees of freedom
            assert int(accepted.max()) <= count
            went_on = accepted > 0
            if count and went_on.any():  # given the first, the second
                second = torch.where(accepted > 1, draft[1], token)[went_on]
                counts = torch.bincount(second, minlength=vocabulary).double()
                assert chi_square(counts, len(second) * shares[1].double()) < 25
                third = token[accepted > 1]
                counts = torch.bincount(third, minlength=vocabulary).double()
                assert chi_square(counts, len(third) * shares[2].double()) < 25 if len(third) else True


def test_texts_have_the_models_distribution():
    """Whole texts of a tiny vocabulary, against the product of the model's own probabilities."""
    generator, prompt, draws = make(3, noise=0.1), [1, 2, 1, 2, 0, 1, 2], 400
    sampling = Sampling(1.0)
    counts = torch.zeros(27, dtype=torch.float64)
    for seed in range(draws):
        (found,) = generator.generate([prompt], max_tokens=3, temperature=1.0, seed=seed, speculate=2)
        a, b, c = found.tokens
        counts[9 * a + 3 * b + c] += 1
    expected = torch.zeros(27, dtype=torch.float64)
    for a, b in itertools.product(range(3), repeat=2):
        texts = [prompt, [*prompt, a], [*prompt, a, b]]
        one, two, three = (probabilities(_logits(generator, text), sampling).double() for text in texts)
        for c in range(3):
            expected[9 * a + 3 * b + c] = draws * one[a] * two[b] * three[c]
    assert chi_square(counts, expected) < 60  # 26 degrees of freedom: of 10,000 seeds 2 have more


def _logits(generator, text):
    from tilewright.generate import KVCache

    cache = KVCache(generator.model.config.shape, batch=1, context=32)
    cache.begin(torch.tensor([len(text)]))
    with torch.no_grad():
        return generator.model(torch.tensor([text]), cache)[0, -1]


def test_the_longest_and_latest_match_is_proposed():
    assert Lookup([1, 2, 3, 9, 2, 3, 8, 1, 2, 3]).propose(2) == [9, 2]  # three tokens, though two are later
    assert Lookup([5, 6, 5, 7, 5]).propose(9) == [7, 5]
    assert Lookup([1, 2, 3]).propose(4) == [] == Lookup([]).propose(4)


def test_bad_input_is_one_sentence():
    generator = make(20)
    with pytest.raises(UserError, match="one prompt at a time"):
        generator.generate([[1], [2]], max_tokens=4, speculate=2)
    for wrong in (-1, 16):
        with pytest.raises(UserError, match=f"speculate is {wrong}"):
            generator.generate([[1]], max_tokens=4, speculate=wrong)
