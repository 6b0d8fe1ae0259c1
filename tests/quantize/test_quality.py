import copy
import math

import pytest
import torch

from tilewright.errors import UserError
from tilewright.models import GPT
from tilewright.plan.gpt import LLAMA, GPTConfig
from tilewright.quantize import Int4, Int8, check_quality, quantize_
from tilewright.quantize.quality import Comparison


class Fixed(torch.nn.Module):
    """Answers any window with the same logits."""

    def __init__(self, logits, wrap=lambda logits: logits):
        super().__init__()
        self.logits, self.wrap = torch.nn.Buffer(logits), wrap

    def forward(self, tokens):
        return self.wrap(self.logits[None, : tokens.shape[1]])


def test_the_numbers_are_those_of_their_definitions(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr("tilewright.quantize.quality._ROWS", 3)  # more than one chunk, and the last not full
    tokens = torch.randint(7, (2, 12))
    logits, others = torch.randn(12, 7), torch.randn(12, 7)
    logits[:, 6] = others[:, 6] = -math.inf  # as of a padded vocabulary
    tokens[tokens == 6] = 0
    quality = check_quality(Fixed(logits), Fixed(others, lambda logits: (logits, None)), tokens)
    truth, found = logits[:-1].double().softmax(-1), others[:-1].double().softmax(-1)
    first, second = (
        math.exp(-sum(p[i, window[i + 1]].log().item() for window in tokens for i in range(11)) / 22)
        for p in (truth, found)
    )
    each = (truth[:, :6] * (truth[:, :6] / found[:, :6]).log()).sum(-1)
    same = (truth.argmax(-1) == found.argmax(-1)).double().mean().item()
    assert quality.tokens == 22
    assert (quality.perplexity, quality.quantized_perplexity) == pytest.approx((first, second), rel=1e-5)
    assert (quality.divergence, quality.largest_divergence) == pytest.approx(
        (each.mean().item(), each.max().item()), rel=1e-5
    )
    assert quality.agreement == pytest.approx(same) and 0 < same < 1
    assert "22 tokens" in str(quality) and quality.as_dict()["tokens"] == 22


def test_logits_that_overflow_are_one_sentence():
    for bad in (math.nan, math.inf):
        with pytest.raises(UserError, match="logits are NaN or Inf"):
            Comparison().add(torch.zeros(4, 5), torch.full((4, 5), bad), torch.zeros(4, dtype=torch.int64))


def test_fewer_bits_are_further_from_the_model_and_the_model_from_itself_is_not():
    torch.manual_seed(0)
    model = GPT(GPTConfig(width=64, layers=2, heads=2, vocabulary=96, sequence=16, **LLAMA)).train()
    tokens, found = torch.randint(96, (2, 16)), []
    for kind in (Int8(), Int4(group=64)):
        quantized = copy.deepcopy(model)
        quantize_(quantized, kind)
        found.append(check_quality(model, quantized, tokens))
    same = check_quality(model, model, tokens)
    assert same.divergence < 1e-7 and same.agreement == 1 and same.perplexity == same.quantized_perplexity
    assert 0 < found[0].divergence < found[1].divergence < 0.5 and found[0].perplexity == same.perplexity
    assert all(module.training for module in model.modules()), "the models are as they were"
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("model", "tokens", "says"),
    [
        (Fixed(torch.zeros(4, 5)), torch.zeros(1, 4), "The tokens are torch.float32"),
        (Fixed(torch.zeros(4, 5)), "text", "The tokens are str"),
        (Fixed(torch.zeros(4, 5)), torch.zeros(4, dtype=torch.int64), r"shape \(4,\)"),
        (Fixed(torch.zeros(4, 5)), torch.zeros(2, 1, dtype=torch.int64), r"at least 2 tokens"),
        (Fixed(torch.zeros(4, 5)), torch.full((1, 4), 5), "not one of the 5"),
        (torch.nn.Embedding(5, 5), torch.full((1, 4), 5), "not one of the 5 that the model has embeddings for"),
        (torch.nn.Embedding(5, 5), torch.full((1, 4), -1), "not one of the 5 that the model has embeddings for"),
        (Fixed(torch.zeros(4, 6)), torch.full((1, 4), 4), "give a copy of the same model"),
        (Fixed(torch.full((4, 5), math.nan)), torch.zeros(1, 4, dtype=torch.int64), "model returns NaN"),
        (Fixed(torch.zeros(3, 5)), torch.zeros(1, 4, dtype=torch.int64), r"\(1, 4, vocabulary\) is needed"),
        (Fixed(torch.zeros(4, 5), lambda logits: "no"), torch.zeros(1, 4, dtype=torch.int64), "of type str"),
    ],
)
def test_what_cannot_be_compared_is_one_sentence(model, tokens, says):
    with pytest.raises(UserError, match=says) as caught:
        check_quality(model, Fixed(torch.zeros(4, 5)), tokens)
    assert "\n" not in str(caught.value)
