"""Whole models that others have quantized, in transformers' modules and in our decoder."""

import copy
import json

import pytest
import torch

from quantize.foreign import SETTINGS, write_foreign
from tilewright.errors import UserError
from tilewright.generate import Generator
from tilewright.generate.quantized import SideBySide
from tilewright.nn import QuantizedLinear
from tilewright.quantize import load


@pytest.fixture(scope="module", params=SETTINGS)
def foreign(request, model, tmp_path_factory):
    """(kind, folder, the model with the weights that the folder stands for)."""
    folder, dequantized = tmp_path_factory.mktemp("foreign") / "model", copy.deepcopy(model)
    write_foreign(folder, dequantized, request.param)
    return request.param, folder, dequantized


def on_meta(model):
    with torch.device("meta"):
        return type(model)(model.config).eval()


def test_a_model_takes_the_folder_s_weights(foreign, text):
    kind, folder, dequantized = foreign
    other = on_meta(dequantized)
    load(other, folder)
    tokens = text[1][:4, :32]
    with torch.no_grad():
        # transformers makes its tables of positions at the first use of a model with values; here they are taken over
        other.model.rotary_emb = dequantized.model.rotary_emb
        found, truth = other(tokens).logits, dequantized(tokens).logits
    assert torch.allclose(found, truth, atol=2e-4), kind
    kinds = {type(module) for module in other.modules() if hasattr(module, "in_features")}
    assert kinds == {QuantizedLinear, torch.nn.Linear}, "the head stays"
    layer = other.model.layers[0].mlp.down_proj
    assert (layer.order is not None) == ("order" in kind)
    assert torch.allclose(layer.dequantize(), dequantized.model.layers[0].mlp.down_proj.weight, atol=1e-6)


def test_our_decoder_generates_what_the_dequantized_model_does(foreign):
    kind, folder, dequantized = foreign
    generator = Generator.from_folder(folder, device="cpu")
    layer = generator.model.blocks[0].attention.qkv
    assert type(layer) is (SideBySide if kind == "gptq, own orders" else QuantizedLinear)
    prompt = list(b"def __init__(self, ")
    (found,) = generator.generate([prompt], max_tokens=24)
    tokens = torch.tensor([prompt])
    truth = dequantized.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=24, do_sample=False, pad_token_id=0
    )
    assert found.tokens == truth[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c: c.update(format="int-quantized"), "pack-quantized can be read"),
        (lambda c: c.update(config_groups={}), "pack-quantized can be read"),
        (lambda c: c.update(sparsity_config={"format": "sparse-24-bitmask"}), "sparse weights"),
        (lambda c: c["config_groups"]["group_0"].update(input_activations={"num_bits": 8}), "quantized activations"),
        (lambda c: c["config_groups"]["group_0"]["weights"].update(num_bits=8), "of 8 bits"),
        (lambda c: c["config_groups"]["group_0"]["weights"].update(strategy="tensor"), "by group or channel"),
        (lambda c: c["config_groups"].update(group_0=3), "by group or channel"),
        (lambda c: c.update(quant_method="bitsandbytes"), "quantized by 'bitsandbytes'"),
    ],
)
def test_what_is_quantized_in_another_way_is_refused_and_changes_nothing(change, says, model, tmp_path):
    write_foreign(tmp_path, copy.deepcopy(model), "compressed-tensors")
    config = json.loads((tmp_path / "config.json").read_text())
    change(config["quantization_config"])
    (tmp_path / "config.json").write_text(json.dumps(config))
    other = copy.deepcopy(model)
    for read in (lambda: load(other, tmp_path), lambda: Generator.from_folder(tmp_path, device="cpu")):
        with pytest.raises(UserError, match=says) as caught:
            read()
        assert "\n" not in str(caught.value)
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True))
