"""A captured step whose kernels begin while the one before them ends: where it is on, what is said of it, and on a GPU
that the numbers are those of a graph whose kernels wait."""

import contextlib
import logging
from types import SimpleNamespace

import pytest
import torch

from ops.contract import DEVICE, on_gpu
from tilewright.generate import Generator, KVCache, Sampling
from tilewright.generate import step as steps
from tilewright.generate.load import from_gpt
from tilewright.generate.step import Decoding
from tilewright.generate.weights import narrow
from tilewright.models import GPT
from tilewright.ops import explain
from tilewright.plan.gpt import LLAMA, GPTConfig
from tilewright.runtime import paths, pdl

REPLAYS = 200


def decoder(device="cpu", dtype=torch.float32, **changes):
    torch.manual_seed(1)
    fields = {"width": 32, "layers": 1, "heads": 2, "vocabulary": 16, "sequence": 16, **LLAMA, **changes}
    return from_gpt(GPT(GPTConfig(**fields)).to(device, dtype), device=device)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """What a capture calls of CUDA does nothing."""
    for name in ("device", "stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: contextlib.nullcontext())
    for name in ("Stream", "current_stream", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, lambda: SimpleNamespace(wait_stream=lambda other: None))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


@pytest.mark.parametrize("why", ["", "the GPU has compute capability 8.9, and PDL needs 9.0"], ids=["hopper", "older"])
def test_the_whole_capture_is_a_chain_and_nothing_else_is(why, as_on_a_gpu, monkeypatch):
    monkeypatch.setattr(steps, "why_not", lambda device: why)
    model = decoder()
    for wanted in (True, False):
        cache, active = KVCache(model.config.shape, batch=1, context=8), []
        with explain() as found:
            decoding = Decoding(model, cache, Sampling(), graph=False, pdl=wanted)
            decoding.capture(lambda: active.append(pdl.active()))  # noqa: B023
            decoding.start([[1, 2]])
        assert len(active) == 3 and len(set(active)) == 1, "kernels are compiled by the steps before the capture"
        assert (active[0] is not None) == (wanted and not why) and pdl.active() is None
        (path,) = (path for path in found if path.op == "decode_one_token")
        said = "0 of 0 launches of ours begin" if active[0] else f"no PDL: {why if wanted else 'it is off'}"
        assert path.ran == "CUDA graph" and path.why.startswith(said)


def test_the_log_of_paths_says_it(as_on_a_gpu, monkeypatch, caplog):
    monkeypatch.setattr(paths, "_listeners", [paths._logged])
    monkeypatch.setattr(paths._logged, "calls", type(paths._logged.calls)())
    model = decoder()
    with caplog.at_level(logging.INFO, "tilewright"):
        cache = KVCache(model.config.shape, batch=1, context=8)
        Decoding(model, cache, Sampling(), graph=False, pdl=True).capture(lambda: None)
    assert "decode_one_token: CUDA graph (no PDL: PDL is for CUDA)" in caplog.messages


def test_a_generator_passes_it_on(monkeypatch):
    given = []
    make = Decoding.__init__
    monkeypatch.setattr(Decoding, "__init__", lambda self, *a, **k: given.append(k["pdl"]) or make(self, *a, **k))
    for options in ({}, {"pdl": True}):
        Generator(decoder(), **options).generate([[1, 2]], max_tokens=2)
    assert given == [False, True]


@on_gpu
@pytest.mark.parametrize(
    ("weights", "kv_cache", "batch", "changes"),
    [
        ("", torch.bfloat16, 1, {}), ("", torch.bfloat16, 4, {}), ("int8", torch.int8, 1, {}),
        ("fp8", torch.float8_e4m3fn, 2, {}), ("int4", torch.bfloat16, 1, {}),
        ("", torch.bfloat16, 1, {"norm": "layer", "bias": True, "position": "learned"}),
    ],
    ids=["bf16", "batch 4", "int8", "fp8", "int4", "like GPT-2"],
)  # fmt: skip
def test_every_replay_has_the_bits_of_a_graph_whose_kernels_wait(weights, kv_cache, batch, changes):
    """All keys and values of 200 steps, and their tokens: a kernel that reads too early, or whose memory is written too
    early, gives others."""
    fields = {"width": 1024, "layers": 6, "heads": 16, "kv_heads": 4, "ffn": 2816, "vocabulary": 4096, "sequence": 256}
    model, found = decoder("cuda", torch.bfloat16, **{**fields, **changes}), []
    if weights:
        narrow(model, weights)
    prompts = [[7 * row + 1, 5, 9][: 1 + row % 3] for row in range(batch)]
    for wanted in (False, True):
        cache = KVCache(model.config.shape, batch=batch, context=256, device=DEVICE, dtype=kv_cache)
        with explain() as noted:
            decoding = Decoding(model, cache, Sampling(), pdl=wanted)
        (path,) = (path for path in noted if path.op == "decode_one_token")
        if wanted and not pdl.why_not(model.device):
            early, captured = int(path.why.split()[0]), int(path.why.split()[2])
            assert captured / 2 < early < captured, path.why
        tokens = [decoding.start(prompts).clone()]
        for _ in range(REPLAYS):
            tokens.append(decoding.step().clone())
        found.append([torch.stack(tokens), *(each.view(torch.uint8) for each in (*cache.keys, *cache.values))])
    assert all(map(torch.equal, *found))
