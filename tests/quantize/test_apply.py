import gc

import pytest
import torch

from tilewright.errors import UserError
from tilewright.measure.numerics import relative_error
from tilewright.models import GPT
from tilewright.nn import QuantizedLinear
from tilewright.plan.gpt import LLAMA, GPTConfig
from tilewright.quantize import Fp8, Int4, Int8, quantize_

KINDS = ((Int8(), 0.02), (Fp8(), 0.06), (Int4(group=64, search=True), 0.25))


def mlp(width=64):
    return torch.nn.Sequential(torch.nn.Linear(width, 128), torch.nn.GELU(), torch.nn.Linear(128, width, bias=False))


@pytest.mark.parametrize(("kind", "allowed"), KINDS, ids=str)
def test_a_gpt_is_quantized_and_still_the_same_model_nearly(kind, allowed):
    torch.manual_seed(0)
    model = GPT(GPTConfig(width=64, layers=2, heads=2, vocabulary=96, sequence=16, **LLAMA)).eval()
    tokens = torch.randint(96, (2, 16))
    before = model(tokens)
    report = quantize_(model, kind, inputs=tokens)
    assert relative_error(model(tokens), before) < allowed
    assert not any(type(module) is torch.nn.Linear for module in model.modules())
    assert report.bytes_after < report.bytes_before and not report.left_out
    assert all(0 < layer.output_error < allowed and 0 < layer.weight_error < allowed for layer in report.layers)
    assert f"{len(report.layers)} layers quantized" in str(report) and report.as_dict()["format"] == kind.name


def test_a_hugging_face_conv1d_is_a_linear_layer_with_its_weight_the_other_way_round():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=64, n_layer=1, n_head=2)
    model = transformers.GPT2LMHeadModel(config).eval()
    tokens = torch.randint(64, (1, 12))
    before = model(tokens).logits
    report = quantize_(model)
    assert report.layers[0].name == "transformer.h.0.attn.c_attn" and len(report.layers) == 5
    assert (report.layers[0].outputs, report.layers[0].inputs) == (192, 64)
    assert relative_error(model(tokens).logits, before) < 0.02
    (note,) = report.notes
    assert note.startswith("lm_head shared its weight with transformer.wte.weight, which stays")
    assert type(model.lm_head) is QuantizedLinear and model.transformer.wte.weight.dtype == torch.float32


def test_layers_are_chosen_by_a_filter_and_left_out_by_an_error_and_by_hooks():
    model, seen = mlp(), []
    model[2].register_forward_hook(lambda *_: seen.append(1))
    report = quantize_(model, Int8(), lambda module, name: isinstance(module, torch.nn.Linear))
    assert [layer.name for layer in report.left_out] == ["2"] and "hooks" in report.left_out[0].left_out
    assert type(model[0]) is QuantizedLinear and type(model[2]) is torch.nn.Linear
    model = mlp()
    weight = model[0].weight
    report = quantize_(model, Int4(group=64), inputs=torch.randn(5, 64), most_error=1e-3)
    assert not report.quantized and model[0].weight is weight and report.bytes_after == report.bytes_before
    assert "above most_error=0.001" in str(report)


def test_layers_that_share_a_weight_or_are_the_same_module_share_the_packed_one():
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(8, 8), "b": torch.nn.Linear(8, 8)})
    model["b"].weight, model["c"] = model["a"].weight, model["a"]
    report = quantize_(model)
    assert model["c"] is model["a"] is not model["b"] and model["a"].weight is model["b"].weight
    assert model["a"].bias is not model["b"].bias and len(report.layers) == 2 and not report.notes


def test_biases_modes_and_gradients_stay():
    model = mlp().eval()
    bias = model[0].bias
    quantize_(model, Fp8())
    assert model[0].bias is bias and not model[0].training
    x = torch.randn(3, 64, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None and bias.grad is not None
    assert {name for name, _ in model.named_parameters()} == {"0.bias"}
    assert set(model.state_dict()) == {"0.weight", "0.scale", "0.bias", "2.weight", "2.scale"}


@pytest.mark.parametrize("kind", (Int8(), Fp8(), Int4(group=64, zeros=True)), ids=str)
def test_packed_tensors_keep_their_dtypes_when_the_model_is_converted(kind):
    model = mlp()
    quantize_(model, kind)
    before = {name: tensor.clone() for name, tensor in model[2].state_dict().items()}
    model.half().to(torch.bfloat16)
    assert model[0].bias.dtype == torch.bfloat16
    for name, tensor in model[2].state_dict().items():
        assert tensor.dtype == before[name].dtype and torch.equal(
            tensor.view(torch.uint8), before[name].view(torch.uint8)
        )


def test_old_weights_go_one_by_one_the_largest_first(monkeypatch):
    model = torch.nn.Sequential(*(torch.nn.Linear(32, out, bias=False) for out in (16, 64, 32)))
    alive, quantize = [], Int8.quantize

    def watch(self, weight):
        gc.collect()
        alive.append((len(weight), sum(type(module) is torch.nn.Linear for module in model)))
        return quantize(self, weight)

    monkeypatch.setattr(Int8, "quantize", watch)
    report = quantize_(model)
    assert alive == [(64, 3), (32, 2), (16, 1)] and [layer.name for layer in report.layers] == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("spoil", "kind", "says"),
    [
        (lambda model: model[2].weight.data[0].fill_(float("nan")), Int8(), "The weight of 2 has NaN or Inf"),
        (lambda model: None, Int4(), "The weight of 0 has 64 inputs, no multiple of 128"),
        (lambda model: model[2].to("meta"), Fp8(), "The weight of 2 has no values"),
        (lambda model: None, "int8", "The format is 'int8'"),
    ],
)
def test_what_cannot_be_quantized_is_refused_and_the_model_stays_as_it_was(spoil, kind, says):
    model = mlp()
    spoil(model)
    before = {name: (parameter, parameter._version) for name, parameter in model.named_parameters()}
    with pytest.raises(UserError, match=says):
        quantize_(model, kind)
    after = {name: (parameter, parameter._version) for name, parameter in model.named_parameters()}
    assert before.keys() == after.keys() and all(before[name][0] is after[name][0] for name in before)
    assert [type(module) for module in model] == [torch.nn.Linear, torch.nn.GELU, torch.nn.Linear]


def test_a_folder_is_no_model():
    with pytest.raises(UserError, match="The model is 'path/to/llama'; give a torch.nn.Module, or use quantize_folder"):
        quantize_("path/to/llama", Int8())


def test_an_error_of_the_model_itself_leaves_no_hook_and_no_change():
    model = mlp().train()
    with pytest.raises(RuntimeError):
        quantize_(model, inputs=torch.randn(2, 63))
    assert all(not module._forward_pre_hooks and module.training for module in model)
    assert type(model[0]) is torch.nn.Linear
    for bad in (torch.nn.GELU(), torch.nn.Linear(4, 4)):
        with pytest.raises(UserError, match="linear layer"):
            quantize_(bad)
    with pytest.raises(UserError, match="most_error is 0"):
        quantize_(model, most_error=0)


def test_a_weight_that_was_tied_again_is_named():
    model = mlp()
    quantize_(model)
    model[0].weight = torch.nn.Parameter(torch.randn(128, 64))
    with pytest.raises(TypeError, match="as after tie_weights"):
        model(torch.randn(2, 64))


def test_a_state_dict_of_another_format_is_refused_and_changes_nothing():
    torch.manual_seed(0)
    plain, x = mlp(), torch.randn(4, 64)
    states = [plain.state_dict()]
    for kind in (Fp8(), Int8()):
        model = mlp()
        quantize_(model, kind)
        states.append(model.state_dict())
    before = model(x)
    for state in states[:2]:
        for strict in (True, False):
            with pytest.raises(RuntimeError, match="of another format, or not quantized"):
                model.load_state_dict(state, strict=strict)
    model.load_state_dict(states[2])
    assert torch.equal(model(x), before)


def test_layers_whose_parents_read_their_weights_stay():
    model = torch.nn.TransformerEncoderLayer(64, 2, 128, batch_first=True).eval()
    report = quantize_(torch.nn.Sequential(model), Int8())
    assert not report.bytes_after < report.bytes_before
    assert all("reads its weight instead of calling it" in layer.left_out for layer in report.left_out)
    with torch.no_grad():
        assert model(torch.randn(2, 5, 64)).isfinite().all()


def test_an_error_that_is_no_number_leaves_a_layer_out():
    x = torch.randn(4, 64)
    x[0, 0] = torch.inf
    report = quantize_(mlp(), Int4(group=64), inputs=x, most_error=1e-6)
    assert len(report.left_out) == 2
