"""Steps as one graph of tiles give the text that steps by layers do, or are refused."""

import logging

import pytest
import torch

from ops.contract import DEVICE, on_hopper
from tilewright.errors import UserError
from tilewright.generate import Generator, KVCache, Sampling
from tilewright.generate.quantized import SideBySide
from tilewright.generate.step import Decoding, decode_one_token, prefill
from tilewright.generate.tiles import TiledDecoder, why_not
from tilewright.generate.weights import narrow
from tilewright.models import GPT
from tilewright.plan.gpt import LLAMA, GPTConfig

SHAPE = {"width": 32, "layers": 2, "heads": 4, "vocabulary": 64, "sequence": 48, **LLAMA, "kv_heads": 2}


def gpt(**changes):
    torch.manual_seed(1)
    model = GPT(GPTConfig(**{**SHAPE, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_and_cache_are_those_of_the_layers(dtype):
    model = Generator(gpt().to(dtype)).model
    caches = [KVCache(model.config.shape, batch=1, context=12, dtype=dtype) for _ in range(2)]
    tiled, tokens = TiledDecoder(model, caches[1]), torch.tensor([7])
    for cache in caches:
        prefill(model, cache, [[3, 1, 4]], Sampling())
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.1}
    for _ in range(9):  # to the cache's end
        logits, ours = (run(tokens[:, None], cache) for run, cache in zip((model, tiled), caches, strict=True))
        torch.testing.assert_close(ours, logits, **close)
        for mine, theirs in zip(caches[1].keys + caches[1].values, caches[0].keys + caches[0].values, strict=True):
            torch.testing.assert_close(mine, theirs, **close)
        for cache in caches:
            cache.advance(1)
        tokens = logits[:, -1].argmax(-1)
    assert caches[1].before.tolist() == [12]


@on_hopper
def test_on_a_hopper_steps_are_as_near_to_float32_as_those_of_the_layers():
    """By kernels, eagerly and in a graph; every matmul has many tiles."""
    wide = {"width": 256, "heads": 4, "vocabulary": 96}
    exact, model = Generator(gpt(**wide)).model, Generator(gpt(**wide).to(DEVICE, torch.bfloat16)).model
    caches = [
        KVCache(each.config.shape, batch=1, context=20, dtype=each.dtype, device=each.device)
        for each in (exact, model, model)
    ]
    runs, token = (exact, model, TiledDecoder(model, caches[2])), 7
    with torch.no_grad():
        for each, cache in zip((exact, model, model), caches, strict=True):
            prefill(each, cache, [[3, 1, 4]], Sampling())
        for _ in range(17):  # to the cache's end
            truth, plain, tiled = (
                run(torch.tensor([[token]], device=cache.before.device), cache).cpu().double()
                for run, cache in zip(runs, caches, strict=True)
            )
            assert (tiled - truth).norm() <= 2 * (plain - truth).norm() + 0.01 * truth.norm()
            for cache in caches:
                cache.advance(1)
            token = int(truth[0, -1].argmax())
    generator = Generator(model, context=40, decode="tilesync")
    text = generator.generate([[1, 2, 3]], max_tokens=30)
    assert generator.generate([[1, 2, 3]], max_tokens=30) == text and len(text[0].tokens) == 30


def test_a_text_is_the_same_and_the_fallback_is_said(caplog):
    texts = []
    for decode in ("graph", "tilesync"):
        generator = Generator(gpt(), context=40, decode=decode)
        with caplog.at_level(logging.WARNING, "tilewright"):
            texts.append([generator.generate([[1, 2, 3]], max_tokens=30, temperature=t, seed=5) for t in (0.0, 1.0)])
    assert texts[0] == texts[1] and texts[0][0] != texts[0][1]
    said = [each.message for each in caplog.records if "decode is tilesync" in each.message]
    assert said and all("stage by stage in plain PyTorch" in sentence for sentence in said)


@pytest.mark.parametrize("weights", ["int8", "fp8", "int4"])
def test_64_tokens_of_quantized_weights_are_those_of_the_layers(weights):
    texts = []
    for decode in ("graph", "tilesync"):
        generator = Generator(gpt(width=64, layers=1, sequence=80), context=72, decode=decode)
        out = generator.model.blocks[0].attention.out
        narrow(generator.model, weights)
        if weights == "int4":  # one matmul stays as it was, as a quantized folder may have it
            generator.model.blocks[0].attention.out = out
        texts.append(generator.generate([[1, 2, 3]], max_tokens=64))
    assert texts[0] == texts[1] and len(set(texts[0][0].tokens)) > 4


@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        ({"norm": "layer"}, {}, "no model but one of RMSNorm"), ({"bias": True}, {}, "without biases"),
        ({"activation": "geglu"}, {}, "a SwiGLU MLP"), ({"position": "learned"}, {}, "rotary positions"),
        ({}, {"kv_cache": "int8"}, "no cache of 8 bits"), ({}, {"compile": True}, "leave compile out"),
        ({}, {"decode": "tiles"}, "decode is 'tiles'; choose graph or tilesync"),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value),
)  # fmt: skip
def test_what_does_not_fit_is_refused(changes, options, words):
    with pytest.raises(UserError, match=words):
        Generator(gpt(**changes), **{"decode": "tilesync", **options}).generate([[1, 2]], max_tokens=2)


def test_batches_drafts_and_changed_layers_are_refused():
    generator = Generator(gpt(width=64), decode="tilesync")
    with pytest.raises(UserError, match="one text at a time, and there are 2; choose graph"):
        generator.generate([[1, 2], [3]], max_tokens=2)
    with pytest.raises(UserError, match="leave speculate out"):
        generator.generate([[1, 2]], max_tokens=2, speculate=2)
    handle = generator.model.blocks[1].mlp.register_forward_hook(lambda *_: None)
    assert "blocks.1.mlp is hooked or replaced" in why_not(generator.model, 1, torch.float32)
    handle.remove()
    assert not why_not(generator.model, 1, torch.float32)
    narrow(generator.model, "int8")
    assert not why_not(generator.model, 1, torch.float32)
    qkv, mlp = generator.model.blocks[0].attention.qkv, generator.model.blocks[0].mlp
    qkv.order = torch.arange(64)
    assert "blocks.0.attention.qkv was quantized with act-order" in why_not(generator.model, 1, torch.float32)
    qkv.order, mlp.up = None, SideBySide([mlp.up, mlp.up])
    assert "those of blocks.0.mlp.up have several" in why_not(generator.model, 1, torch.float32)


def test_a_step_is_decode_one_tokens(monkeypatch):
    """The lever is what `Decoding` calls: without it nothing is a graph of tiles."""
    model, calls = Generator(gpt()).model, []
    call = TiledDecoder.__call__
    monkeypatch.setattr(TiledDecoder, "__call__", lambda self, *inputs: calls.append(1) or call(self, *inputs))
    for decode in ("graph", "tilesync"):
        decoding = Decoding(model, KVCache(model.config.shape, batch=1, context=8), Sampling(), decode=decode)
        decoding.start([[1, 2]])
        decoding.step()
        assert decoding.is_tiled == bool(calls)
    assert calls == [1] and decode_one_token(decoding.forward, decoding.cache, torch.tensor([1]), Sampling()).ndim == 1
