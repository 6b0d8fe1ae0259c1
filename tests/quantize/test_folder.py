"""Layers of GPTQ, AWQ and compressed-tensors, packed here code by code, as their formats say."""

import json

import pytest
import torch
from safetensors.torch import save_file

from quantize.foreign import definition, numbers, pack
from tilewright.errors import UserError
from tilewright.ops import int4_linear
from tilewright.quantize import read_folder
from tilewright.quantize.formats.awq import ORDER, read_awq
from tilewright.quantize.formats.compressed import read_compressed
from tilewright.quantize.formats.gptq import read_gptq


def check(read, truth):
    """The packed layer is the definition, its inputs in the order that it says, in the kernel too."""
    order = torch.arange(truth.shape[1]) if read.order is None else read.order
    assert torch.equal(read.format.dequantize(read.packed, torch.float64), truth[:, order])
    x = torch.randn(3, truth.shape[1], dtype=torch.float64)
    y = int4_linear(x[:, order], read.packed["weight"], read.packed["scale"], read.packed.get("zero"))
    assert torch.allclose(y, x @ truth.t())


@pytest.mark.parametrize("v2", (False, True))
@pytest.mark.parametrize(("inputs", "group"), ((256, 64), (256, 32), (256, 128), (256, 256), (64, 64)))
def test_a_gptq_layer_is_read(inputs, group, v2):
    codes, zero, scale = numbers(inputs, group=group)
    tensors = {"qweight": pack(codes, 0), "qzeros": pack(zero if v2 else (zero - 1) & 15, 1), "scales": scale}
    index = torch.arange(inputs) // group
    for extra in ({}, {"g_idx": index.int()}):
        read = read_gptq(tensors | extra, v2=v2)
        assert read.order is None and read.format.group == min(group, 128) and read.format.zeros
        check(read, definition(codes, zero, scale, index))


def test_act_order_brings_the_inputs_of_a_group_together():
    codes, zero, scale = numbers()
    index = (torch.arange(256) // 64)[torch.randperm(256)]
    tensors = {"qweight": pack(codes, 0), "qzeros": pack(zero, 1), "scales": scale, "g_idx": index.int()}
    read = read_gptq(tensors, v2=True)
    assert read.order.sort().values.tolist() == list(range(256)) != read.order.tolist()
    check(read, definition(codes, zero, scale, index))


@pytest.mark.parametrize(("inputs", "group"), ((256, 64), (192, 32), (256, 128)))
def test_an_awq_layer_is_read(inputs, group):
    codes, zero, scale = numbers(inputs, group=group)
    read = read_awq({"qweight": pack(codes, 1, ORDER), "qzeros": pack(zero, 1, ORDER), "scales": scale})
    assert read.order is None and read.format.group == group
    check(read, definition(codes, zero, scale, torch.arange(inputs) // group))


def test_a_symmetric_layer_has_no_zero_points():
    codes, zero, scale = numbers(zeros=False)
    read = read_gptq({"qweight": pack(codes, 0), "qzeros": pack(zero - 1, 1), "scales": scale})
    assert not read.format.zeros and set(read.packed) == {"weight", "scale"}
    check(read, definition(codes, zero, scale, torch.arange(256) // 64))


@pytest.mark.parametrize("zeros", ("none", "packed", "int8"))
@pytest.mark.parametrize(("inputs", "outputs", "group"), ((256, 24, 64), (128, 21, 32), (256, 16, 256)))
def test_a_layer_of_compressed_tensors_is_read(inputs, outputs, group, zeros):
    codes, zero, scale = numbers(inputs, outputs, group, zeros != "none")
    for index in (None, torch.full((inputs,), -1), torch.arange(inputs).flip(0) // group):
        tensors = {
            "weight_packed": pack(codes, 0).t().contiguous(), "weight_scale": scale.t().contiguous(),
            "weight_shape": torch.tensor([outputs, inputs]), "weight_g_idx": None if index is None else index.int(),
        }  # fmt: skip
        filled = torch.nn.functional.pad(zero, (0, -outputs % 8))  # to whole words
        stored = {"packed": pack(filled, 1).t().contiguous(), "int8": (zero.t() - 8).to(torch.int8), "none": None}
        read = read_compressed({**tensors, "weight_zero_point": stored[zeros]})
        has_order = index is not None and bool((index >= 0).all()) and group < inputs
        assert (read.order is not None) == has_order and read.format.zeros == (zeros != "none")
        check(read, definition(codes, zero, scale, index if has_order else torch.arange(inputs) // group))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"weight_packed": None}, "weight_packed of layer is missing"),
        ({"weight_shape": torch.tensor([16, 400])}, "is not of 16 x 400"),
        ({"weight_shape": torch.tensor([1, 2, 3])}, "weight_shape of layer is"),
        ({"weight_shape": torch.tensor([-16, 256])}, "weight_shape of layer is"),
        ({"weight_scale": torch.zeros(16, 4)}, "scale of layer is 0, NaN or Inf"),
        ({"weight_zero_point": torch.zeros(2, 3, dtype=torch.int32)}, "do not go together"),
        ({"weight_zero_point": torch.full((16, 4), 100, dtype=torch.int8)}, "above 15"),
        ({"weight_g_idx": torch.zeros(256, dtype=torch.int32)}, "weight_g_idx of layer does not give each"),
    ],
)
def test_what_is_no_layer_of_compressed_tensors_is_refused(change, says):
    codes, _, scale = numbers(256, 16, 64)
    tensors = {
        "weight_packed": pack(codes, 0).t().contiguous(), "weight_scale": scale.t().contiguous(),
        "weight_shape": torch.tensor([16, 256]),
    }  # fmt: skip
    with pytest.raises(UserError, match=says) as caught:
        read_compressed({**tensors, **change}, name="layer")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"qweight": None}, "qweight of layer is missing"),
        ({"qweight": torch.zeros(32, 24)}, "qweight of layer is torch.float32"),
        ({"qzeros": torch.zeros(4, 2, dtype=torch.int32)}, "do not go together"),
        ({"scales": torch.zeros(4, 24).half()}, "scale of layer is 0, NaN or Inf"),
        ({"scales": torch.full((4, 24), float("nan")).half()}, "scale of layer is 0, NaN or Inf"),
        ({"scales": torch.ones(3, 24).half(), "qzeros": torch.zeros(3, 3, dtype=torch.int32)}, "do not go together"),
        ({"scales": torch.ones(16, 24).half(), "qzeros": torch.zeros(16, 3, dtype=torch.int32)}, "groups of 16"),
        ({"g_idx": torch.zeros(256, dtype=torch.int32)}, "g_idx of layer does not give each of 4 groups"),
        ({"g_idx": torch.arange(256, dtype=torch.int32)}, "g_idx of layer"),
        ({"g_idx": -torch.arange(256, dtype=torch.int32)}, "g_idx of layer"),
        ({"g_idx": torch.zeros(3, dtype=torch.int32)}, "g_idx of layer"),
    ],
)
def test_what_is_not_such_a_layer_is_refused_in_one_sentence(change, says):
    codes, zero, scale = numbers()
    tensors = {"qweight": pack(codes, 0), "qzeros": pack(zero, 1), "scales": scale} | change
    with pytest.raises(UserError, match=says) as caught:
        read_gptq({key: tensor for key, tensor in tensors.items() if tensor is not None}, name="layer")
    assert "\n" not in str(caught.value)


def write(folder, tensors, **settings):
    """A folder of two layers, in two files, and something else."""
    for place, name in enumerate(("model.layers.0.q", "model.layers.1.q")):
        layer = {f"{name}.{key}": tensor.contiguous() for key, tensor in tensors.items()}
        save_file(layer | {f"norm.{place}": torch.ones(3)}, folder / f"model-{place}.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": settings}))


def test_the_layers_of_a_folder_are_read_by_what_its_config_says(tmp_path):
    codes, zero, scale = numbers()
    truth = definition(codes, zero, scale, torch.arange(256) // 64)
    for settings, stored, dimension, order in (
        ({"quant_method": "awq", "version": "GEMM"}, zero, 1, ORDER),
        ({"quant_method": "gptq", "checkpoint_format": "gptq_v2"}, zero, 0, range(8)),
        ({"quant_method": "gptq"}, (zero - 1) & 15, 0, range(8)),
    ):
        tensors = {"qweight": pack(codes, dimension, order), "qzeros": pack(stored, 1, order), "scales": scale}
        write(tmp_path, tensors, bits=4, **settings)
        layers = dict(read_folder(tmp_path))
        assert list(layers) == ["model.layers.0.q", "model.layers.1.q"]
        for read in layers.values():
            check(read, truth)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "quantize_config.json").write_text('{"bits": 4, "group_size": 64}')
    for read in dict(read_folder(tmp_path)).values():  # an older folder
        check(read, truth)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("{", "is not JSON"),
        ("{}", "no quantization_config"),
        ('{"quantization_config": {"quant_method": "gptq", "bits": 3}}', "weights of 3 bits"),
        ('{"quantization_config": {"quant_method": "awq", "bits": 4, "version": "gemv"}}', "by 'awq' as 'gemv'"),
        ('{"quantization_config": {"quant_method": "hqq", "bits": 4}}', "by 'hqq'"),
        ('{"quantization_config": {"quant_method": ["gptq"], "bits": 4}}', "can be read"),
        ('{"quantization_config": {"quant_method": "gptq", "bits": 4}}', "no whole safetensors file"),
    ],
)
def test_other_folders_are_refused_in_one_sentence(config, says, tmp_path):
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0nonsense")
    with pytest.raises(UserError, match=says) as caught:
        dict(read_folder(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_folder_without_such_layers_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "gptq", "bits": 4}}')
    with pytest.raises(UserError, match="no model.safetensors"):
        dict(read_folder(tmp_path))
    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="no tensor is named qweight"):
        dict(read_folder(tmp_path))
