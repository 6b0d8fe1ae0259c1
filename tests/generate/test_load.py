"""Folders that are damaged, foreign or hostile: one sentence each."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from generate.models import LLAMA3, tiny
from tilewright.errors import UserError
from tilewright.generate import Generator, load_huggingface
from tilewright.train.export import byte_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    tiny("llama").save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "model")
    return tmp_path / "model"


def refused(folder):
    with pytest.raises(UserError) as error:
        load_huggingface(folder)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400
    return str(error.value)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model_type": "mamba"}, "'mamba', which generate does not know; it runs llama, qwen2, qwen3, gpt2"),
        ({"model_type": None}, "model_type is None"), ({"auto_map": {"AutoModel": "x.Y"}}, "code of its own"),
        ({"quantization_config": {"bits": 4}}, "no tensor is named qweight"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"), ({"rms_norm_eps": "x"}, "rms_norm_eps"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_type is 'yarn'"),
        ({"rope_parameters": {**LLAMA3, "high_freq_factor": 1.0}}, "low_freq_factor must be below"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor is None"), ({"rope_parameters": 3}, "must be an object"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rotates whole heads"),
        ({"num_hidden_layers": 3}, "lacks 'model.layers.2"), ({"num_hidden_layers": 1}, "config.json has no place"),
        ({"num_hidden_layers": 50000}, "calls for 50000 layers"), ({"hidden_size": 64}, "config.json calls for"),
        ({"num_key_value_heads": 3}, "4 heads do not divide into 3"), ({"vocab_size": 2**40}, "config.json calls for"),
        ({"max_position_embeddings": 2**40}, "positions, which is no model's"), ({"head_dim": 7}, "must be even"),
        ({"attention_bias": True}, "lacks 'model.layers.0.self_attn.q_proj.bias'"),
        ({"tie_word_embeddings": True}, "lm_head.weight of its own"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)  # fmt: skip
def test_a_config_that_cannot_be_computed_is_refused_by_its_field(folder, changes, sentence):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    assert sentence in refused(folder)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"device": "gpu"}, "device is 'gpu'; choose cuda or cpu"), ({"device": "meta"}, "device is 'meta'"),
        ({"dtype": "bf16"}, "dtype is 'bf16'; choose torch.bfloat16"), ({"dtype": torch.int8}, "dtype is torch.int8"),
    ],
    ids=str,
)  # fmt: skip
def test_a_device_or_dtype_that_cannot_be_is_refused(folder, options, sentence):
    with pytest.raises(UserError, match=sentence) as error:
        load_huggingface(folder, **options)
    assert "\n" not in str(error.value)


def test_sliding_windows_are_refused(tmp_path):
    tiny("qwen2", use_sliding_window=True, sliding_window=16, max_window_layers=0).save_pretrained(tmp_path)
    assert "use_sliding_window is true" in refused(tmp_path)


def test_damaged_weights_are_refused(folder, tmp_path):
    path = folder / "model.safetensors"
    whole, tensors = path.read_bytes(), {name: tensor.clone() for name, tensor in load_file(path).items()}
    path.write_bytes(whole[:-100])
    assert "no whole safetensors file" in refused(folder)
    path.write_bytes(b"")
    assert "no whole safetensors file" in refused(folder)
    for changes, sentence in (
        ({"model.norm.weight": None}, "lacks 'model.norm.weight'"), ({"other": torch.ones(2)}, "has 'other'"),
        ({"model.norm.weight": torch.ones(3)}, "has shape (3,)"),
        ({"model.norm.weight": torch.ones(32, dtype=torch.bfloat16)}, "tensors of BF16 and F32"),
        ({"model.norm.weight": torch.ones(32, dtype=torch.int8)}, "is I8"),
    ):  # fmt: skip
        changed = {name: tensor for name, tensor in {**tensors, **changes}.items() if tensor is not None}
        save_file(changed, path)
        assert sentence in refused(folder)
    path.unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    assert "a pickle, which can run code and is not read" in refused(folder)
    assert "not a folder" in refused(tmp_path / "nothing")
    (folder / "config.json").unlink()
    assert "no config.json" in refused(folder)


def test_the_end_of_text_is_the_folders_and_a_foreign_tokenizer_is_refused(folder):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    generator = Generator.from_folder(folder, device="cpu")
    assert generator.stop_tokens == {7, 9} and generator.tokenizer is None
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 96}))
    with pytest.raises(UserError, match="eos_token_id is no token"):
        Generator.from_folder(folder, device="cpu")
    (folder / "generation_config.json").unlink()
    (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))  # of 256 tokens, and the model has 96
    with pytest.raises(UserError, match="it is not this model's"):
        Generator.from_folder(folder, device="cpu")
