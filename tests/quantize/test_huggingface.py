"""Quantized models through transformers' own functions."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from generate.models import tiny
from tilewright.errors import UserError
from tilewright.generate import Generator, Plan, quantize_folder
from tilewright.nn import QuantizedLinear
from tilewright.quantize import Fp8, Int4, Int8, load

transformers = pytest.importorskip("transformers")


def read(folder, **more):
    from tilewright.quantize import TilewrightConfig  # noqa: F401  # which registers the method

    return transformers.AutoModelForCausalLM.from_pretrained(folder, **more).eval()


@pytest.fixture(scope="module")
def quantized(trained, text, tmp_path_factory):
    """A folder of ours, in 4 bits with a head of 8."""
    out = tmp_path_factory.mktemp("quantized") / "q"
    quantize_folder(trained, out, Plan(Int4(group=64, zeros=True), Int8()), samples=text[0][:8])
    return out


@torch.no_grad()
def test_a_folder_of_ours_is_the_same_model_to_transformers_to_load_and_to_generate(quantized, model, text):
    found, loaded = read(quantized), type(model)(model.config).eval()
    load(loaded, quantized)
    tokens = text[1][:4]
    logits = found(tokens).logits
    assert torch.equal(logits, loaded(tokens).logits)
    kinds = {module.weight.dtype for module in found.modules() if type(module) is QuantizedLinear}
    assert kinds == {torch.uint8, torch.int8} and not any(type(m) is torch.nn.Linear for m in found.modules())
    prompt = list(b"import os\n")
    ids = torch.tensor([prompt])
    truth = found.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, pad_token_id=0)
    (ours,) = Generator.from_folder(quantized, device="cpu").generate([prompt], max_tokens=24)
    assert ours.tokens == truth[0, len(prompt) :].tolist()


@pytest.mark.parametrize("kind", (Int8(), Fp8(), Int4(group=32)), ids=str)
def test_from_pretrained_quantizes_and_what_it_saves_is_read_again(kind, trained, tmp_path, text):
    from tilewright.quantize import TilewrightConfig

    first = read(trained, quantization_config=TilewrightConfig(kind, keep=["lm_head"]))
    assert type(first.lm_head) is torch.nn.Linear and type(first.model.layers[1].mlp.up_proj) is QuantizedLinear
    first.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert settings["quant_method"] == "tilewright" and len(settings["layers"]) == 14
    again = read(tmp_path)
    with torch.no_grad():
        assert torch.equal(again(text[1][:2]).logits, first(text[1][:2]).logits)
    (found,) = Generator.from_folder(tmp_path, device="cpu").generate([[1, 2, 3]], max_tokens=3)
    assert len(found.tokens) == 3


@pytest.mark.parametrize("name", ("llama3, tied", "gpt2", "qwen2", "qwen3", "llama, biases, linear"))
def test_every_family_comes_through_a_folder_with_its_head_tied_or_not(name, tmp_path):
    fields = {"hidden_size": 64, "intermediate_size": 128} if name != "gpt2" else {"n_embd": 64}
    fields |= {"head_dim": 64} if name == "llama, biases, linear" else {}
    model = tiny(name, **fields)
    model.save_pretrained(tmp_path / "m")
    tokens = torch.randint(96, (2, 24))
    report, quality = quantize_folder(
        tmp_path / "m", tmp_path / "q", Plan(Int8(), Int8()), samples=tokens, check=tokens
    )
    found = read(tmp_path / "q")
    with torch.no_grad():
        truth, logits = model(tokens).logits, found(tokens).logits
    assert (logits - truth).norm() < 0.05 * truth.norm() and type(found.get_output_embeddings()) is QuantizedLinear
    assert quality.divergence < 0.01 and len(report.quantized) == 9
    found.save_pretrained(tmp_path / "again")
    with torch.no_grad():
        assert torch.equal(read(tmp_path / "again")(tokens).logits, logits)
    prompt = tokens[:1, :8]
    follow = found.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False, pad_token_id=0
    )
    (ours,) = Generator.from_folder(tmp_path / "q", device="cpu").generate(prompt.tolist(), max_tokens=8)
    assert ours.tokens == follow[0, 8:].tolist()


@pytest.mark.parametrize(
    ("arguments", "options", "says"),
    [
        (("int4",), {}, "The format is 'int4'; give one such as"),
        ((Int8(),), {"keep": "lm_head"}, "keep is the string 'lm_head'; give a list"),
        ((Int8(),), {"keep": ["lm_haed"]}, "keep has 'lm_haed', which names no linear layer"),
    ],
)  # fmt: skip
def test_a_configuration_that_cannot_be_meant_is_one_sentence(arguments, options, says, tmp_path):
    from tilewright.quantize import TilewrightConfig

    tiny("llama").save_pretrained(tmp_path)
    with pytest.raises(UserError, match=says):
        read(tmp_path, quantization_config=TilewrightConfig(*arguments, **options))


def test_a_tied_head_that_is_packed_on_the_way_is_tied_no_more(tmp_path):
    from tilewright.quantize import TilewrightConfig

    tiny("llama3, tied").save_pretrained(tmp_path / "m")
    first = read(tmp_path / "m", quantization_config=TilewrightConfig(Int8()))
    first.save_pretrained(tmp_path / "q")
    tokens = torch.randint(96, (1, 9))
    again = read(tmp_path / "q")
    assert again.config.tie_word_embeddings is False and again.model.embed_tokens.weight.dtype == torch.float32
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, first(tokens).logits)


def rewrite(folder, change):
    """Change tensors, and take away what would see that."""
    (folder / "quantized.json").unlink()
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def settings(folder, change):
    config = json.loads((folder / "config.json").read_text())
    change(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))


DAMAGE = (
    (lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-9]), "by its size or"),
    (lambda f: rewrite(f, lambda t: t["lm_head.scale"].zero_()), "scale of lm_head is 0, NaN or Inf"),
    (lambda f: rewrite(f, lambda t: t.pop("lm_head.scale")), "scale of lm_head is not in the folder"),
    (lambda f: settings(f, lambda s: s.update(layers={})), "does not say which layers"),
    (lambda f: settings(f, lambda s: s["layers"]["lm_head"].update(format="int3")), "'int3', which is unknown"),
    (lambda f: settings(f, lambda s: s["layers"]["lm_head"].update(version=9)), "version 9 of int8"),
    (lambda f: settings(f, lambda s: s["layers"].update(nothing=s["layers"]["lm_head"])), "is no linear layer"),
    (lambda f: settings(f, lambda s: s.update(bits=4)), "has bits, unknown here"),
)


@pytest.mark.parametrize(("damage", "says"), DAMAGE, ids=[says for _, says in DAMAGE])
def test_a_damaged_folder_is_refused_in_one_sentence(damage, says, quantized, tmp_path):
    for path in quantized.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    damage(tmp_path)
    with pytest.raises(UserError, match=says) as caught:
        read(tmp_path)
    assert "\n" not in str(caught.value)
