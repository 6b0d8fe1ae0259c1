"""Ops in a chain of launches compute what they do alone, to the bit, and a decode step is made of such launches."""

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ops.contract import DEVICE
from ops.ptx import order
from tilewright.generate import KVCache, Sampling
from tilewright.generate.config import of_gpt
from tilewright.generate.decoder import Decoder
from tilewright.generate.load import from_gpt
from tilewright.generate.step import prefill
from tilewright.generate.weights import narrow
from tilewright.measure import work
from tilewright.models import GPT
from tilewright.ops import bias_gelu, dropout_add_norm, few_rows_linear, swiglu
from tilewright.ops.quantized_linear import few_rows
from tilewright.ops.quantized_linear.launch import Inputs, Tiles, multiply
from tilewright.plan.gpt import LLAMA, GPTConfig
from tilewright.runtime import dispatch, pdl

BF = torch.bfloat16
pytestmark = pytest.mark.skipif(
    DEVICE == "cuda" and bool(pdl.why_not(torch.device("cuda", 0))), reason="the GPU has no PDL"
)


def randn(*shape, dtype=BF):
    return torch.randn(shape, device=DEVICE).to(dtype)


@pytest.fixture
def in_chain(monkeypatch):
    """A function that calls another one in a chain; `in_chain.names` are the kernels that took part, `others` those
    that did not."""

    def call(function, *arguments, **options):
        with pdl.chaining(pdl.Chain()):
            return function(*arguments, **options)

    call.names, call.others = [], []
    start, start_chained = dispatch.Launch.__call__, dispatch.ChainedLaunch._start

    def note(self, *arguments):
        if pdl.active() is not None and not self.is_chained:
            call.others.append(self.name)
        return start(self, *arguments)

    def note_chained(self, *arguments):
        assert self.constants[-1] is True
        call.names.append(self.name)
        return start_chained(self, *arguments)

    monkeypatch.setattr(dispatch.Launch, "__call__", note)
    monkeypatch.setattr(dispatch.ChainedLaunch, "_start", note_chained)
    return call


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("width", [64, 200, 4096])
def test_few_rows(rows, width, in_chain):
    x, weight, bias = randn(rows, width), randn(5, width), randn(5)
    assert torch.equal(in_chain(few_rows_linear, x, weight, bias), few_rows_linear(x, weight, bias))
    assert in_chain.names == ["tilewright_few_rows_linear_matmul"]


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn, torch.uint8])
@pytest.mark.parametrize("splits", [1, 3])
def test_packed_weights(kind, splits, in_chain):
    """Also where a split has nothing to do, and rows of the weight end within a step."""
    inner, columns, group = 192, 40, 32
    if kind == torch.uint8:
        weight = torch.randint(256, (columns, inner // 2), dtype=kind, device=DEVICE)
        scale, zero = randn(inner // group, columns), torch.randint(16, (inner // group, columns), device=DEVICE)
        inputs = Inputs(randn(2, inner), weight, scale, zero.to(kind), randn(columns), None, "silu")
    else:
        weight = torch.randint(-100, 100, (columns, inner), device=DEVICE).to(kind)
        inputs = Inputs(randn(2, inner), weight, randn(columns), None, randn(columns), randn(2, columns), "gelu")
    chosen = Tiles(16, 16, 64, slices=1, chunks=4, splits=splits, stages=3)
    results = [randn(2, columns) for _ in range(2)]
    multiply(inputs, results[0], chosen)
    in_chain(multiply, inputs, results[1], chosen)
    assert torch.equal(*results) and len(in_chain.names) == (1 if splits == 1 else 2) and not in_chain.others


@pytest.mark.parametrize("width", [7, 96, 1024, 17000])
def test_norms(width, in_chain):
    x, residual, weight, bias = randn(2, width), randn(2, width), randn(width), randn(width)
    for options in ({"norm": "rms"}, {"norm": "layer", "bias": bias}):
        both = [
            call(dropout_add_norm, x, residual, weight, prenorm=True, **options)
            for call in (in_chain, lambda function, *a, **k: function(*a, **k))
        ]
        assert all(map(torch.equal, *both))
    assert len(in_chain.names) == 2


def test_activations(in_chain):
    gate, bias = randn(3, 96), randn(96)
    assert torch.equal(in_chain(swiglu, gate), swiglu(gate))
    assert torch.equal(in_chain(bias_gelu, gate, bias), bias_gelu(gate, bias))
    assert in_chain.names == ["tilewright_activation_forward"] * 2


@torch.no_grad()
@pytest.mark.parametrize(
    ("weights", "kv_cache", "changes"),
    [
        ("", BF, {}), ("int8", torch.int8, {}), ("int4", torch.float8_e4m3fn, {}),
        ("", BF, {"norm": "layer", "bias": True, "position": "learned"}),
    ],
    ids=["bf16", "int8", "int4", "like GPT-2"],
)  # fmt: skip
def test_a_decode_step_is_a_chain_of_kernels(weights, kv_cache, changes, in_chain):
    """Of ours there is none but those that keep the rule; logits and cache are the same to the bit."""
    torch.manual_seed(3)
    fields = {"width": 64, "layers": 1, "heads": 2, "vocabulary": 16, "sequence": 40, "ffn": 64, **LLAMA, "kv_heads": 1}
    model = from_gpt(GPT(GPTConfig(**{**fields, **changes})).to(DEVICE, BF), device=DEVICE)
    if weights:
        narrow(model, weights)
    found = []
    for call in (in_chain, lambda function, *a: function(*a)):
        cache = KVCache(model.config.shape, batch=2, context=36, device=DEVICE, dtype=kv_cache)
        tokens, logits = prefill(model, cache, [[3, 1, 4], [1, 5]], Sampling()), []
        for _ in range(2):
            with dispatch.forcing_kernels():
                logits.append(call(model, tokens[:, None], cache))
            cache.advance(1)
            tokens = logits[-1][:, -1].argmax(-1)
        found.append([*logits, *cache.keys, *cache.values])
    for one, two in zip(*found, strict=True):
        assert torch.equal(one.view(torch.uint8), two.view(torch.uint8))
    assert not in_chain.others and not any(logit.isnan().any() for logit in found[0][:2])
    wanted = {"dropout_add_norm_forward", "decode_attention_append", "decode_attention_split", "decode_attention_join"}
    wanted |= {"quantized_linear_matmul_8bit" if weights else "few_rows_linear_matmul", "activation_forward"}
    assert {f"tilewright_{name}" for name in wanted} <= set(in_chain.names)


@torch.no_grad()
@pytest.mark.parametrize(
    ("weights", "changes", "fields"),
    [
        ("", {}, {}), ("int4", {}, {}), ("", {"qk_norm": True}, {}), ("int8", {"qk_norm": True}, {}),
        ("", {}, {"norm": "layer", "bias": True, "position": "learned", "activation": "gelu"}),
        ("int8", {}, {"norm": "layer", "bias": True, "position": "learned", "activation": "gelu_tanh"}),
    ],
    ids=["llama", "llama int4", "qwen3", "qwen3 int8", "gpt-2", "gpt-2 int8"],
)  # fmt: skip
def test_no_kernel_but_ours_is_between_those_of_a_decode_step(weights, changes, fields, monkeypatch):
    """A copy or an activation of PyTorch's would make a full dependency, twice in a layer."""
    llama = {"width": 64, "layers": 2, "heads": 2, "vocabulary": 16, "sequence": 40, "ffn": 64, **LLAMA, "kv_heads": 1}
    config = of_gpt(GPTConfig(**{**llama, **fields}))
    model = Decoder(replace(config, shape=replace(config.shape, **changes))).to(DEVICE, BF).requires_grad_(False)
    if weights:
        narrow(model, weights)
    cache = KVCache(model.config.shape, batch=2, context=36, device=DEVICE, dtype=BF)
    tokens = prefill(model, cache, [[3, 1, 4], [1, 5]], Sampling())
    with dispatch.forcing_kernels(), pdl.chaining(pdl.Chain()), work.Watch() as watch:
        monkeypatch.setattr(work, "watching", watch)
        model(tokens[:, None], cache)
    names = [asked.op for asked in watch.asked]
    first = next(place for place, name in enumerate(names) if name.startswith("tilewright_"))
    assert not [name for name in names[first:] if not name.startswith("tilewright_")]
    assert len(names) - first > 2 * 8 and all("tilewright" not in name for name in names[:first])


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc here to compile it with")
@pytest.mark.parametrize(("weight", "fetched"), [(torch.int8, {"weight"}), (torch.uint8, {"weight", "scale", "zero"})])
def test_the_kernel_in_cuda_c_reads_parameters_alone_before_it_waits(weight, fetched, tmp_path):
    config = few_rows.choose(4, 8192, 8192, weight, BF, 128, weight == torch.uint8, 132)
    macros = [f"-D{name}={value}" for name, value in config.macros.items()]
    headers, code = Path(pdl.__file__).with_name("cuda"), tmp_path / "few_rows.ptx"
    command = ["nvcc", "-ptx", "-arch=sm_90a", "-std=c++17", f"-I{headers}", *macros, "-o", str(code)]
    subprocess.run([*command, str(few_rows._SOURCE)], check=True, capture_output=True)
    found = order(code.read_text(), ["weight", "scale", "zero", "x", "bias", "residual", "y", None])
    assert found.triggers < found.before[0].line
    assert all(access.instruction.startswith("ld.global") for access in found.before)
    assert frozenset().union(*(access.tensors for access in found.before)) == fetched
    assert {"x", "y"} <= frozenset().union(*(access.tensors for access in found.after))
