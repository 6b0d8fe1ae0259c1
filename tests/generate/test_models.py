"""Greedy tokens are those of transformers, for every architecture and way to save it."""

import pytest
import torch

from generate.models import MODELS, theirs, tiny
from tilewright import ops
from tilewright.generate import Decoder, Generator, KVCache, from_gpt, load_huggingface
from tilewright.generate.weights import narrow
from tilewright.models import GPT
from tilewright.plan.gpt import LLAMA, GPTConfig

pytestmark = pytest.mark.filterwarnings("ignore")
PROMPT = [5, 17, 3, 80, 41, 2, 9]


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_and_logits_are_those_of_transformers(name, tmp_path):
    model = tiny(name)
    model.save_pretrained(tmp_path)
    generator = Generator.from_folder(tmp_path, device="cpu")
    (ours,) = generator.generate([PROMPT], max_tokens=64)
    expected = theirs(model, PROMPT, 64)
    assert len(set(expected)) > 3, "a model that repeats itself shows nothing"
    assert ours.tokens == expected and ours.reason == "length"
    cache = KVCache(generator.model.config.shape, batch=1, context=16)
    cache.begin(torch.tensor([len(PROMPT)]))
    with torch.no_grad():
        truth = model.double()(torch.tensor([PROMPT])).logits
        logits, again = generator.model(torch.tensor([PROMPT]), cache), model.float()(torch.tensor([PROMPT])).logits
    assert (logits - truth).abs().max() <= 4 * (again - truth).abs().max() + 1e-6


@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "shards"])
def test_every_way_to_save_gives_the_same_model(sharded, tmp_path):
    model = tiny("qwen3")
    model.save_pretrained(tmp_path / "whole")
    kind = {"max_shard_size": "20KB"} if sharded else {}
    model.save_pretrained(tmp_path / "other", **kind)
    assert (len(list((tmp_path / "other").glob("*.safetensors"))) > 1) == sharded
    one, two = (load_huggingface(tmp_path / folder) for folder in ("whole", "other"))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    half = load_huggingface(tmp_path / "whole", dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16 and not any(p.requires_grad for p in half.parameters())


@pytest.mark.parametrize(
    "fields",
    [{}, LLAMA, {**LLAMA, "kv_heads": 2, "tied": False, "bias": True}, {"norm": "rms", "activation": "geglu"},
     {"activation": "gelu", "bias": False}],
    ids=["gpt2", "llama", "grouped, biases", "mixed", "no biases"],
)  # fmt: skip
def test_a_gpt_of_ours_goes_on_as_it_computes_without_a_cache(fields):
    torch.manual_seed(1)
    gpt = GPT(GPTConfig(width=32, layers=2, heads=4, vocabulary=50, sequence=48, **fields)).eval()
    with torch.no_grad():
        for parameter in gpt.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    prompt = [7, 3, 30, 11]
    expected = list(prompt)
    for _ in range(20):
        with torch.no_grad():
            expected.append(int(gpt(torch.tensor([expected]))[0, -1].argmax()))
    assert Generator(gpt).generate([prompt], max_tokens=20)[0].tokens == expected[4:]
    assert from_gpt(gpt, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_any_module_in_the_place_of_a_linear_runs(tmp_path):
    model = tiny("llama")
    model.save_pretrained(tmp_path)
    expected = Generator.from_folder(tmp_path, device="cpu").generate([PROMPT], max_tokens=8)[0].tokens
    decoder = load_huggingface(tmp_path)

    class Stored(torch.nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.register_buffer("packed", linear.weight.detach().clone())

        def forward(self, x):
            return x @ self.packed.t()

    for name, module in list(decoder.named_modules()):
        if isinstance(module, torch.nn.Linear):
            owner, _, last = name.rpartition(".")
            setattr(decoder.get_submodule(owner), last, Stored(module))
    assert isinstance(decoder, Decoder)
    assert Generator(decoder).generate([PROMPT], max_tokens=8)[0].tokens == expected


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
@pytest.mark.parametrize("weights", ["", "int8"])
def test_an_activation_is_part_of_the_layer_in_front_of_it_or_follows_one_that_is_hooked(activation, weights):
    torch.manual_seed(4)
    model = from_gpt(GPT(GPTConfig(width=64, layers=1, heads=4, vocabulary=50, sequence=16, activation=activation)))
    if weights:
        narrow(model, weights)
    mlp, x, seen = model.blocks[0].mlp, torch.randn(1, 2, 64, dtype=model.dtype), []
    fused = mlp(x)
    mlp.up.register_forward_hook(lambda module, inputs, output: seen.append(output))
    hooked = mlp(x)
    torch.testing.assert_close(fused, hooked)
    approximate = "tanh" if activation == "gelu_tanh" else "none"
    torch.testing.assert_close(mlp.down(torch.nn.functional.gelu(seen[0], approximate=approximate)), hooked)


def test_a_step_reads_plain_weights_by_itself_and_calls_a_hooked_layer():
    model = from_gpt(GPT(GPTConfig(width=32, layers=1, heads=4, vocabulary=50, sequence=16, **LLAMA)))
    cache, token, calls = KVCache(model.config.shape, batch=1, context=16), torch.tensor([[3]]), []
    cache.before.zero_()

    def step():
        with ops.explain() as paths:
            logits = model(token, cache)
        return logits, sum(count for path, count in paths.calls.items() if path.op == "few_rows_linear")

    plain, count = step()
    assert count == 5  # qkv, out, up, down, head
    model.blocks[0].mlp.up.register_forward_hook(lambda *_: calls.append(1))
    hooked, count = step()
    assert count == 4 and calls == [1]
    torch.testing.assert_close(hooked, plain)
