"""A KV cache of 8 bits: what a prompt, a step and a draft compute over it, its size, and its names."""

import pytest
import torch

from ops.contract import on_gpu
from tilewright.errors import UserError
from tilewright.generate import Generator, KVCache
from tilewright.generate.cache import FORMATS, bytes_of_token
from tilewright.models import GPT
from tilewright.plan.gpt import LLAMA, GPTConfig

PROMPT = [7, 3, 30, 11, 7, 3, 30]
EIGHT = ("int8", "fp8")


def make(kv_cache=None, device="cpu", dtype=torch.float32, width=32, **fields):
    torch.manual_seed(3)
    gpt = GPT(GPTConfig(width=width, layers=2, heads=4, vocabulary=50, sequence=64, **fields))
    with torch.no_grad():
        for parameter in gpt.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return Generator(gpt.to(device, dtype), kv_cache=kv_cache)


def logits(generator, pieces):
    """The logits of every token, of a text that comes in pieces: the first as a prompt."""
    model = generator.model
    cache = KVCache(model.config.shape, batch=1, context=16, dtype=generator.cache_dtype, device=model.device)
    cache.begin(torch.tensor([len(pieces[0])]))
    found = []
    with torch.no_grad():
        for number, piece in enumerate(pieces):
            found.append(model(torch.tensor([piece], device=model.device), cache)[0])
            if number:
                cache.advance(len(piece))
            else:
                cache.end_prompt()
    return torch.cat(found)


@pytest.mark.parametrize("fields", [{}, {**LLAMA, "kv_heads": 2}], ids=["learned positions", "turned, grouped"])
@pytest.mark.parametrize("kind", EIGHT)
def test_a_prompt_sees_the_same_keys_as_a_step_and_a_draft(kind, fields):
    generator, exact = make(kind, **fields), make(**fields)
    whole = logits(generator, [PROMPT])
    for pieces in ([PROMPT[:1], *([token] for token in PROMPT[1:])], [PROMPT[:2], PROMPT[2:5], PROMPT[5:]]):
        torch.testing.assert_close(logits(generator, pieces), whole, atol=2e-4, rtol=2e-4)
    truth = logits(exact, [PROMPT])
    error = ((whole - truth).norm() / truth.norm()).item()
    assert 1e-4 < error < (0.03 if kind == "int8" else 0.1), "rounded, and little"


@pytest.mark.parametrize("kind", EIGHT)
def test_drafts_and_batches_give_the_same_text(kind):
    generator = make(kind, **{**LLAMA, "kv_heads": 2})
    alone = generator.generate([PROMPT], max_tokens=40)
    steps = generator.metrics.bytes_read
    assert generator.generate([PROMPT], max_tokens=40, speculate=4) == alone
    assert generator.generate([PROMPT, PROMPT[:3]], max_tokens=40)[0] == alone[0]
    wide = make(**{**LLAMA, "kv_heads": 2})
    wide.generate([PROMPT], max_tokens=40)
    shape = wide.model.config.shape
    assert wide.metrics.bytes_read - steps == pytest.approx(
        39 * (7 + 20) * (bytes_of_token(shape, torch.float32) - bytes_of_token(shape, torch.int8))
    )


def test_the_memory_of_a_cache():
    shape = make().model.config.shape
    for name, size in (("fp32", 32), ("bf16", 16), ("int8", 12), ("fp8", 12)):  # a head of 8, its scale
        cache = KVCache(shape, batch=3, context=10, dtype=FORMATS[name])
        assert cache.bytes == 3 * 10 * bytes_of_token(shape, FORMATS[name]) == 3 * 10 * 2 * 2 * 4 * size


def test_a_cache_of_another_name_or_dtype_is_refused():
    for name, sentence in (("int4", "choose bf16, fp16"), ("bf16", "the model is in fp32; choose fp32, int8 or fp8")):
        with pytest.raises(UserError, match=sentence):
            make(name)
    assert make("fp32").cache_dtype == torch.float32


@on_gpu
@pytest.mark.parametrize("kind", EIGHT)
def test_a_graph_over_codes_gives_what_the_reference_does(kind):
    fields = {**LLAMA, "kv_heads": 2}
    cpu, gpu = make(kind, **fields), make(kind, "cuda", **fields)
    torch.testing.assert_close(logits(gpu, [PROMPT[:3], PROMPT[3:]]).cpu(), logits(cpu, [PROMPT]), atol=2e-2, rtol=2e-2)
    half = make(kind, "cuda", torch.bfloat16, width=256, **fields)
    text = half.generate([PROMPT, PROMPT[:2]], max_tokens=40)
    assert half.generate([PROMPT, PROMPT[:2]], max_tokens=40) == text
    alone = half.generate([PROMPT], max_tokens=40, speculate=4)
    assert half.generate([PROMPT], max_tokens=40, speculate=4) == alone
