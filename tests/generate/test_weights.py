"""Weights quantized as they are loaded."""

import pytest
import torch

from tilewright.errors import UserError
from tilewright.generate import Generator, from_gpt
from tilewright.generate.weights import narrow
from tilewright.models import GPT
from tilewright.nn.quantized_linear import QuantizedLinear
from tilewright.plan.gpt import LLAMA, GPTConfig


def make(width=64):
    torch.manual_seed(0)
    return from_gpt(GPT(GPTConfig(width=width, layers=2, heads=4, ffn=128, vocabulary=50, sequence=32, **LLAMA)))


@pytest.mark.parametrize(("name", "head"), [("int8", torch.int8), ("fp8", torch.float8_e4m3fn), ("int4", torch.int8)])
def test_all_matmuls_are_quantized_and_the_embedding_stays(name, head):
    plain, model = make(), narrow(make(), name)
    layers = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    assert len(layers) == 9 and model.head.weight.dtype == head and model.token.weight.dtype == torch.float32
    assert torch.equal(model.token.weight, plain.token.weight) and not any(p.requires_grad for p in model.parameters())
    assert len(Generator(model).generate([[1, 2]], max_tokens=4)[0].tokens) == 4


def test_what_cannot_be_quantized_is_one_sentence():
    for model, name, sentence in (
        (narrow(make(), "int8"), "int8", "quantized already"), (make(), "int3", "choose int8, fp8, int4"),
        (make(40), "int4", "64 divides and a matmul has 40"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=sentence):
            narrow(model, name)
