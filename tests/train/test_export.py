import dataclasses
import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tilewright.errors import UserError
from tilewright.models import GPT
from tilewright.plan.gpt import LLAMA, GPTConfig
from tilewright.train.checkpoint import Checkpoints
from tilewright.train.export import export_huggingface, export_safetensors, load_model

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SHAPE = dict(width=48, layers=2, heads=4, vocabulary=61, sequence=24)
MODELS = {
    "gpt2": {}, "gpt2, erf, narrow": {"activation": "gelu", "ffn": 56, "dropout": 0.1},
    "llama": LLAMA, "llama, grouped": {**LLAMA, "kv_heads": 2, "ffn": 80}, "llama, biases": {**LLAMA, "bias": True},
    "llama, geglu": {**LLAMA, "activation": "geglu"}, "llama, geglu_tanh": {**LLAMA, "activation": "geglu_tanh"},
}  # fmt: skip


def gpt(**fields):
    torch.manual_seed(0)
    model = GPT(GPTConfig(**{**SHAPE, **fields})).eval()
    with torch.no_grad():  # as they come, norms and biases are ones and zeros and would hide a mistake
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_transformers_gives_the_same_logits(tmp_path, name):
    transformers = pytest.importorskip("transformers", reason="shows that transformers loads it, and is not installed")
    model = gpt(**MODELS[name])
    export_huggingface(model, tmp_path / "out")
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert type(theirs).__name__ == ("GPT2LMHeadModel" if name.startswith("gpt2") else "LlamaForCausalLM")
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    assert sum(parameter.numel() for parameter in theirs.parameters()) == model.config.parameters
    tokens = torch.randint(61, (3, 24))
    with torch.no_grad():
        truth, ours = model.double()(tokens), gpt(**MODELS[name])(tokens)
        found = theirs.eval()(tokens).logits
    # As near to the float64 logits as our own float32 ones are, or nearly so.
    assert (found - truth).abs().max() <= 4 * (ours - truth).abs().max() + 1e-6


@pytest.mark.parametrize("name", MODELS)
def test_every_weight_is_exported_once_and_no_pickle_with_it(tmp_path, name):
    model = gpt(**MODELS[name])
    export_huggingface(model, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]  # nothing half done beside it
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert sum(weight.numel() for weight in weights.values()) == model.config.parameters
    total = sum(parameter.double().sum() for parameter in model.parameters())
    assert torch.isclose(sum(weight.double().sum() for weight in weights.values()), total, rtol=1e-12)
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"bias": False}, "position 'learned' and bias False: GPT-2"),
        ({"norm": "rms"}, "position 'learned' and norm 'rms': GPT-2"),
        ({"activation": "swiglu"}, "position 'learned' and activation 'swiglu': GPT-2"),
        ({"kv_heads": 2}, "position 'learned' and kv_heads 2: GPT-2"),
        ({**LLAMA, "norm": "layer"}, "position 'rope' and norm 'layer': Llama"),
        ({**LLAMA, "activation": "gelu"}, "position 'rope' and activation 'gelu': Llama"),
    ],
)
def test_what_transformers_has_not_is_refused_by_the_field(tmp_path, fields, sentence):
    with pytest.raises(UserError, match=sentence):
        export_huggingface(gpt(**fields), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_folder_with_something_in_it_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="not empty; choose another folder"):
        export_huggingface(gpt(), tmp_path)
    with pytest.raises(UserError, match="Cannot write .*notes.txt/model.safetensors"):
        export_safetensors(gpt(), tmp_path / "notes.txt" / "model.safetensors")


def test_weights_alone_load_into_the_same_model_and_a_tied_one_is_there_once(tmp_path):
    model = gpt()
    export_safetensors(model, tmp_path / "new" / "model.safetensors")
    other = GPT(model.config)
    other.load_state_dict(load_file(tmp_path / "new" / "model.safetensors"))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    tied = torch.nn.Sequential(torch.nn.Embedding(7, 3), torch.nn.Linear(3, 7, bias=False))
    tied[1].weight = tied[0].weight
    export_safetensors(tied, tmp_path / "tied.safetensors")
    assert len(load_file(tmp_path / "tied.safetensors")) == 1


@pytest.mark.parametrize("fields", [{}, LLAMA])
def test_the_model_of_a_run_comes_back_in_its_own_dtype(tmp_path, fields):
    model = gpt(**fields).bfloat16()
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", keep=1, asynchronous=False)
    facts = {"configuration": {"model": {**dataclasses.asdict(model.config), "preset": ""}}}
    checkpoints.save(3, {"model": model.state_dict()}, facts)
    tokens = torch.randint(61, (2, 9))
    for source in ("run", "run/checkpoints", "run/checkpoints/step-00000003"):
        loaded = load_model(tmp_path / source)
        assert loaded.token.weight.dtype == torch.bfloat16 and torch.equal(loaded(tokens), model(tokens))
    export_huggingface(loaded, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    for wrong, sentence in (({}, "does not say which GPT"), (facts, "are not of the GPT it names")):
        checkpoints.save(4, {"model": {"weight": torch.ones(1)}}, wrong)
        with pytest.raises(UserError, match=sentence):
            load_model(tmp_path / "run")
    with pytest.raises(UserError, match="There is no checkpoint"):
        load_model(tmp_path / "elsewhere")


@pytest.mark.parametrize(
    "forged",
    [
        {"layers": 10**9}, {"sequence": 10**12}, {"width": 10**12, "heads": 1}, {"width": 2**62}, {"width": 48.5},
        {"width": "x"}, {"layers": True}, {"width": -48}, {"layers": []}, {"gpt_block": "os.system"}, {"norm": {}},
        {"vocabulary": 10**400}, {"dropout": None}, {"kv_heads": 10**9},
    ],
    ids=str,
)  # fmt: skip
def test_a_forged_shape_is_refused_before_anything_is_built(tmp_path, forged):
    model = gpt(**LLAMA)
    checkpoints = Checkpoints(tmp_path, keep=1, asynchronous=False)
    checkpoints.save(1, {"model": model.state_dict()}, {
        "configuration": {"model": {**dataclasses.asdict(model.config), **forged}}
    })  # fmt: skip
    with pytest.raises(UserError, match="does not say which GPT|are not of the GPT it names") as found:
        load_model(tmp_path)
    assert "\n" not in str(found.value)
