import json
import math
import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tilewright.errors import UserError
from tilewright.models import GPT
from tilewright.plan.gpt import LLAMA, GPTConfig
from tilewright.quantize import Fp8, Int4, Int8, load, quantize_, save
from tilewright.quantize.facts import hash_of

CONFIG = GPTConfig(width=64, layers=1, heads=2, vocabulary=96, sequence=16, **LLAMA)


def model():
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.LayerNorm(128), torch.nn.Linear(128, 64, bias=False))


@pytest.fixture
def saved(tmp_path):
    original = model()
    save(original, tmp_path / "q", quantize_(original, Int4(group=32, zeros=True)))
    return original, tmp_path / "q"


@pytest.mark.parametrize("kind", (Int8(), Fp8(), Int4(group=64)), ids=str)
def test_a_gpt_comes_back_bit_by_bit(kind, tmp_path):
    original = GPT(CONFIG).eval()
    report = quantize_(original, kind)
    save(original, tmp_path / "q", report)
    other = GPT(CONFIG).eval()
    load(other, tmp_path / "q")
    tokens = torch.randint(96, (1, 16))
    assert torch.equal(other(tokens), original(tokens))
    facts = json.loads((tmp_path / "q" / "quantized.json").read_text())
    assert facts["report"] == json.loads(json.dumps(report.as_dict()))
    with safe_open(tmp_path / "q" / "model.safetensors", "pt") as file:
        assert json.loads(file.metadata()["tilewright"]) == {kind.name: 1}


def test_a_model_without_values_is_filled(saved):
    original, folder = saved
    with torch.device("meta"):
        other = model()
    load(other, folder)
    x = torch.randn(3, 64)
    assert torch.equal(other(x), original(x))


def test_a_tensor_with_several_names_is_stored_once_and_shared_again(tmp_path):
    def build():
        made = model()
        made.append(torch.nn.LayerNorm(128))
        made[3].weight = made[1].weight
        return made

    original, other = build(), build()
    quantize_(original)
    save(original, tmp_path / "q")
    assert json.loads((tmp_path / "q" / "quantized.json").read_text())["aliases"] == {"3.weight": "1.weight"}
    load(other, tmp_path / "q")
    assert other[3].weight is other[1].weight
    assert all(torch.equal(a, b) for a, b in zip(original.parameters(), other.parameters(), strict=True))


def rewrite(folder, change):
    """Change tensors and hide that from the hash, as somebody does who means to."""
    path = folder / "model.safetensors"
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata=metadata)
    said = {"bytes": path.stat().st_size, "sha256": hash_of(path)}
    edit(folder, lambda facts: facts["files"].update({path.name: said}))


def edit(folder, change):
    facts = json.loads((folder / "quantized.json").read_text())
    change(facts)
    (folder / "quantized.json").write_text(json.dumps(facts))


def truncate(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def flip(folder):
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def pipe(folder):
    """In the file's place, which nobody writes to."""
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    edit(folder, lambda facts: facts["files"]["model.safetensors"].update(bytes=0))


DAMAGE = (
    (truncate, "not the file that was written"),
    (flip, "not the file that was written"),
    (lambda folder: (folder / "model.safetensors").unlink(), "There is no file"),
    (lambda folder: (folder / "quantized.json").unlink(), "it has no quantized.json"),
    (lambda folder: (folder / "quantized.json").write_text("[" * 100_000), "is no JSON"),
    (lambda folder: (folder / "quantized.json").write_text("[]"), "is no JSON"),
    (lambda folder: edit(folder, lambda facts: facts["files"]["model.safetensors"].pop("sha256")), "not the file that"),
    (pipe, "not the file that was written"),
    (lambda folder: edit(folder, lambda facts: facts.update(schema=9)), "has schema 9"),
    (lambda folder: edit(folder, lambda facts: facts.update(layers=[])), "does not say which layers"),
    (lambda folder: edit(folder, lambda facts: facts["layers"]["0"].update(format="int3")), "has the formats"),
    (lambda folder: edit(folder, lambda facts: facts["layers"]["0"].update(version=2)), "version 2 of int4"),
    (lambda folder: edit(folder, lambda facts: facts["layers"]["0"].update(group=64)), "scale of 0 is"),
    (lambda folder: edit(folder, lambda facts: facts["layers"]["0"].update(zeros=False)), "tensors that int4 does not"),
    (
        lambda folder: edit(folder, lambda facts: facts["layers"].update({"9": facts["layers"]["0"]})),
        "lacks the weight of",
    ),
    (lambda folder: edit(folder, lambda facts: facts["aliases"].update({"a": "b"})), "that is not there"),
    (
        lambda folder: rewrite(folder, lambda tensors: tensors["0.scale"].view(-1)[:1].zero_()),
        "scale of 0 is 0, NaN or Inf",
    ),
    (lambda folder: rewrite(folder, lambda tensors: tensors["0.zero"].view(-1)[:1].fill_(99)), "above 15"),
    (lambda folder: rewrite(folder, lambda tensors: tensors.pop("1.bias")), "lacks '1.bias'"),
    (lambda folder: rewrite(folder, lambda tensors: tensors.update(more=torch.ones(1))), "has 'more'"),
    (lambda folder: rewrite(folder, lambda t: t.update({"1.bias": torch.ones(3)})), r"'1.bias' of .* has shape \(3,\)"),
)


@pytest.mark.parametrize(("damage", "says"), DAMAGE, ids=[says for _, says in DAMAGE])
def test_a_damaged_folder_is_refused_and_the_model_stays_as_it_was(damage, says, saved):
    _, folder = saved
    damage(folder)
    other = model()
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(UserError, match=says) as caught:
        load(other, folder)
    assert "\n" not in str(caught.value)
    after = other.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)


def test_the_error_of_a_layer_that_overflows_is_null_in_what_is_saved(tmp_path):
    class Overflow(torch.nn.Module):
        def forward(self, x):
            return x * math.nan

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), Overflow(), torch.nn.Linear(8, 8))
    save(model, tmp_path / "q", quantize_(model, Int8(), inputs=torch.randn(4, 8)))
    written = json.loads((tmp_path / "q" / "quantized.json").read_text())
    assert None in [layer["output_error"] for layer in written["report"]["layers"]]


def test_a_model_that_is_not_the_one_that_was_quantized_is_refused(saved):
    _, folder = saved
    for other, says in (
        (torch.nn.Sequential(torch.nn.Linear(64, 128)), "no linear layer of the model"),
        (torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.LayerNorm(96), torch.nn.Linear(96, 64)), "of 0 is"),
    ):
        with pytest.raises(UserError, match=says):
            load(other, folder)


def test_nothing_is_written_over_and_a_model_that_is_not_quantized_is_refused(saved):
    original, folder = saved
    with pytest.raises(UserError, match="not empty"):
        save(original, folder)
    with pytest.raises(UserError, match="no quantized layer"):
        save(model(), folder.parent / "other")
    assert not (folder.parent / "other").exists()
