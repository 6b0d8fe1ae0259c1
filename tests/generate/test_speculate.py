"""Proposed tokens change how soon a text is there, and not its distribution."""

import itertools
import json

import pytest
import torch

from ops.contract import on_gpu
from tilewright.errors import UserError
from tilewright.generate import Generator, Tokenizer
from tilewright.generate.sampling import Sampling, draw, probabilities
from tilewright.generate.speculate import Lookup, accept
from tilewright.models import GPT
from tilewright.plan.gpt import LLAMA, GPTConfig
from tilewright.train.export import byte_tokenizer


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


def assert_texts_are_distributed(generator, prompt, draws, speculate):
    """Whole texts of three tokens of a vocabulary of three, against the product of the model's own probabilities."""
    sampling, forwards = Sampling(1.0), 0
    counts, expected = torch.zeros(2, 27, dtype=torch.float64)
    for seed in range(draws):
        (found,) = generator.generate([prompt], max_tokens=3, temperature=1.0, seed=seed, speculate=speculate)
        a, b, c = found.tokens
        counts[9 * a + 3 * b + c] += 1
        forwards += generator.metrics.steps
    for a, b in itertools.product(range(3), repeat=2):
        texts = [prompt, [*prompt, a], [*prompt, a, b]]
        one, two, three = (probabilities(_logits(generator, text), sampling).double() for text in texts)
        for c in range(3):
            expected[9 * a + 3 * b + c] = draws * one[a] * two[b] * three[c]
    assert chi_square(counts, expected) < 60  # 26 degrees of freedom: of 10,000 seeds 2 have more
    assert draws < forwards < 2 * draws, "some drafts are accepted, and some are refused"


def test_texts_have_the_models_distribution():
    assert_texts_are_distributed(make(3, noise=0.1), [1, 2, 1, 2, 0, 1, 2], 400, speculate=2)


def test_texts_with_a_draft_model_have_the_models_distribution():
    assert_texts_are_distributed(with_draft(3, noise=0.1, draft_noise=2.0), [1, 2, 0], 250, speculate=2)


def with_draft(vocabulary=20, noise=0.2, draft_noise=0.1, **options):
    """A generator whose drafts come from a model that is nearly its own: some are accepted, some are not."""
    model, draft = make(vocabulary, noise=noise), make(vocabulary, noise=noise)
    torch.manual_seed(5)
    for parameter in draft.model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=draft_noise * float(parameter.abs().mean()))
    return Generator(model.model, draft=draft.model, **options)


@pytest.mark.parametrize("speculate", [1, 4])
def test_a_draft_model_changes_no_greedy_token_and_saves_forwards(speculate):
    generator, forwards = with_draft(), 0
    for prompt in ([1, 2, 3, 1, 2], [7], [0, 4]):
        plain = generator.generate([prompt], max_tokens=60)
        assert generator.generate([prompt], max_tokens=60, speculate=speculate) == plain
        forwards += generator.metrics.steps
        whole = Generator(generator.model, draft=generator.model)  # always right
        assert whole.generate([prompt], max_tokens=60, speculate=speculate) == plain
        assert whole.metrics.steps == -(-59 // (speculate + 1))
    generator.set_context(40)
    assert generator.generate([[1, 2] * 7], max_tokens=26, speculate=9) == generator.generate(
        [[1, 2] * 7], max_tokens=26
    )


def test_tokens_accepted_from_a_draft_model_have_the_models_distribution():
    """Drawn from q and accepted or replaced: of many rows at once, whatever q is."""
    rows, vocabulary = 40_000, 4
    logits = torch.tensor([[0.3, -0.5, 1.0, 0.0], [2.0, 0.1, -1.0, 0.4], [0.0, 0.0, 0.9, -2.0]])
    other = torch.tensor([[1.0, 0.0, -1.0, 0.5], [-1.0, 0.5, 0.0, 0.4]])
    for sampling in (Sampling(1.0), Sampling(0.7, top_k=3)):
        shares, proposal = probabilities(logits, sampling), probabilities(other, sampling)
        generator = torch.Generator().manual_seed(1)
        many = proposal.expand(rows, -1, -1)
        draft = torch.stack([draw(many[:, place], generator) for place in range(2)], 1)
        accepted, token = accept(
            shares.expand(rows, -1, -1), draft, torch.full((rows,), 2), generator, proposal=many
        )  # fmt: skip
        ends = torch.cat((draft, token[:, None]), 1).scatter(1, accepted[:, None], token[:, None])
        for place in range(3):
            there = ends[accepted >= place, place]
            counts = torch.bincount(there, minlength=vocabulary).double()
            assert chi_square(counts, len(there) * shares[place].double()) < 25  # 3 degrees of freedom: 1.5e-5 more
        assert 0.2 < (accepted > 0).double().mean() < 0.95
        overlap = torch.minimum(shares[0], proposal[0]).sum()
        assert (accepted > 0).double().mean() == pytest.approx(float(overlap), abs=0.02)


def test_a_draft_model_with_fewer_rows_takes_tokens_that_it_has_not():
    """Models of one family have embeddings of several sizes, with rows behind the last token of the tokenizer."""
    model, draft = make(260), make(256)
    tokenizer = Tokenizer(json.dumps(byte_tokenizer()).encode(), 256)
    generator = Generator(model.model, tokenizer, draft=Generator(draft.model, tokenizer))
    plain = generator.generate([[258, 1, 259]], max_tokens=20)
    assert generator.generate([[258, 1, 259]], max_tokens=20, speculate=3) == plain


def test_a_draft_that_does_not_fit_is_refused():
    own, tokenizer = make(20), Tokenizer(json.dumps(byte_tokenizer()).encode(), 256)
    with pytest.raises(UserError, match="a vocabulary of 21 and the model one of 20"):
        Generator(own.model, draft=make(21).model)
    with pytest.raises(UserError, match="The draft is a str; read a folder by Generator.from_folder"):
        Generator(own.model, draft="path/to/smaller")
    changed = byte_tokenizer()
    names = changed["model"]["vocab"]
    names["a"], names["b"] = names["b"], names["a"]
    other = Generator(make(256).model, Tokenizer(json.dumps(changed).encode(), 256))
    with pytest.raises(UserError, match="tokenizer is not the model's") as error:
        Generator(make(260).model, tokenizer, draft=other)
    assert "\n" not in str(error.value)
    padded = Generator(make(260, 1).model, tokenizer, draft=Generator(make(256).model, tokenizer))  # the same tokens
    plain = padded.generate("ab", max_tokens=9)
    assert padded.generate("ab", max_tokens=9, speculate=3) == plain
    with pytest.raises(UserError, match="load both alike"):
        Generator(own.model, draft=make(20).model.bfloat16())
    short = GPT(GPTConfig(width=16, layers=1, heads=2, vocabulary=20, sequence=30, **LLAMA))
    assert Generator(own.model, draft=short).context == 30
    with pytest.raises(UserError, match="the draft model has positions for 2 to 30"):
        Generator(own.model, draft=short, context=64)


@on_gpu
def test_a_graph_of_a_draft_model_and_its_check_gives_the_greedy_text():
    model, draft = (with_draft().model, with_draft().draft)
    for kv_cache in (None, "int8"):
        generator = Generator(model.to("cuda"), draft=draft.to("cuda"), kv_cache=kv_cache)
        plain = generator.generate([[1, 2, 3]], max_tokens=60)
        assert generator.generate([[1, 2, 3]], max_tokens=60, speculate=4) == plain
        drawn = {"max_tokens": 30, "temperature": 1.0, "seed": 3, "speculate": 4}
        assert generator.generate([[1, 2, 3]], **drawn) == generator.generate([[1, 2, 3]], **drawn)


@on_gpu
def test_a_graph_reads_its_own_rotary_tables_after_others_were_made():
    model = make(20).model.to("cuda")
    first = Generator(model, context=64)
    plain = first.generate([[1, 2]], max_tokens=30)
    Generator(model, context=128).generate([[1, 2]], max_tokens=4)  # longer tables
    first.generate([[1, 2]], max_tokens=30, speculate=4)  # another graph over the same cache
    garbage = [torch.full((64, 8), float("nan"), device="cuda") for _ in range(64)]
    assert first.generate([[1, 2]], max_tokens=30) == plain and garbage


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
