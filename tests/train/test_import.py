import dataclasses
import json
import pickle
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tilewright.errors import UserError
from tilewright.models import GPT
from tilewright.plan.gpt import LEVERS, LLAMA, GPTConfig
from tilewright.train.checkpoint import Checkpoints
from tilewright.train.export import export_huggingface, load_model
from tilewright.train.import_ import import_huggingface, import_run
from tilewright.train.load_config import read as read_configuration
from train.tiny import as_on_a_cpu, trained  # noqa: F401

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SHAPE = dict(width=48, layers=2, heads=4, vocabulary=61, sequence=24)
OURS = {
    "gpt2": {}, "gpt2, erf, narrow": {"activation": "gelu", "ffn": 56, "dropout": 0.1, "norm_epsilon": 1e-3},
    "gpt2, untied": {"tied": False}, "llama": LLAMA,
    "llama, grouped": {**LLAMA, "kv_heads": 2, "ffn": 80, "rope_base": 500.0, "norm_epsilon": 1e-6},
    "llama, untied, biases": {**LLAMA, "bias": True, "tied": False}, "llama, geglu": {**LLAMA, "activation": "geglu"},
}  # fmt: skip
GPT2 = dict(n_embd=48, n_layer=2, n_head=4, vocab_size=61, n_positions=24)
LLAMAS = dict(
    hidden_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=61, max_position_embeddings=24,
    intermediate_size=80,
)  # fmt: skip
THEIRS = {
    "gpt2": ("GPT2", GPT2),
    "gpt2, erf": ("GPT2", {**GPT2, "activation_function": "gelu", "layer_norm_epsilon": 1e-3, "n_inner": 56}),
    "gpt2, tanh, untied": ("GPT2", {**GPT2, "activation_function": "gelu_pytorch_tanh", "tie_word_embeddings": False}),
    "llama": ("Llama", LLAMAS),
    "llama, tied": ("Llama", {**LLAMAS, "tie_word_embeddings": True, "head_dim": 12, "rms_norm_eps": 1e-5}),
    "llama, grouped, base": ("Llama", {
        **LLAMAS, "num_key_value_heads": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    }),
    "llama, biases, gelu": ("Llama", {
        **LLAMAS, "attention_bias": True, "mlp_bias": True, "hidden_act": "gelu_pytorch_tanh", "rms_norm_eps": 1e-2,
    }),
}  # fmt: skip


def gpt(**fields):
    torch.manual_seed(0)
    model = GPT(GPTConfig(**{**SHAPE, **fields})).eval()
    with torch.no_grad():  # as they come, norms and biases are ones and zeros and would hide a mistake
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


@pytest.fixture
def folder(tmp_path):
    export_huggingface(gpt(**LLAMA), tmp_path / "hf")
    return tmp_path / "hf"


def change(folder, **fields):
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, **fields}))


def equal(one, other):
    one, other = (load_file(folder / "model.safetensors") for folder in (one, other))
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def shard(folder):
    """The same in two files and an index."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(sorted(weights))}
    for file in set(places.values()):
        save_file({name: weights[name] for name in weights if places[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return places


@pytest.mark.parametrize("name", THEIRS)
@pytest.mark.parametrize("shards", ["whole", "shards"])
def test_logits_are_those_of_transformers_and_an_export_is_the_same_bit_for_bit(tmp_path, name, shards):
    transformers = pytest.importorskip("transformers", reason="makes the models, and is not installed")
    family, fields = THEIRS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**fields, bos_token_id=None, eos_token_id=None)
    theirs = getattr(transformers, f"{family}{'LMHeadModel' if family == 'GPT2' else 'ForCausalLM'}")(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="30KB" if shards == "shards" else "1GB")
    assert (tmp_path / "hf/model.safetensors.index.json").exists() == (shards == "shards")
    model = import_huggingface(tmp_path / "hf").eval()
    tokens = torch.randint(61, (3, 24))
    with torch.no_grad():
        expected = theirs(tokens).logits
        torch.testing.assert_close(model(tokens), expected, rtol=0, atol=1e-5 * expected.abs().max().item())
    assert model.config.parameters == sum(parameter.numel() for parameter in theirs.parameters())
    export_huggingface(model, tmp_path / "again")
    theirs.save_pretrained(tmp_path / "whole")
    assert equal(tmp_path / "again", tmp_path / "whole")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again").eval()
    with torch.no_grad():
        torch.testing.assert_close(again(tokens).logits, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OURS)
def test_an_export_comes_back_bit_for_bit(tmp_path, name, dtype):
    model = gpt(**OURS[name]).to(dtype)
    export_huggingface(model, tmp_path / "hf")
    found = import_huggingface(tmp_path / "hf").eval()
    ours, back = model.state_dict(), found.state_dict()
    assert ours.keys() == back.keys() and all(torch.equal(ours[key], back[key]) for key in ours)
    plain = dataclasses.replace(model.config, kv_heads=model.config.key_heads, ffn=model.config.ffn_width)
    assert dataclasses.replace(found.config, kv_heads=found.config.key_heads) == plain
    tokens = torch.randint(61, (2, 24))
    assert torch.equal(found(tokens), model(tokens))
    export_huggingface(found, tmp_path / "again")
    assert equal(tmp_path / "hf", tmp_path / "again")
    assert (tmp_path / "hf/config.json").read_text() == (tmp_path / "again/config.json").read_text()
    shard(tmp_path / "hf")
    assert torch.equal(import_huggingface(tmp_path / "hf").eval()(tokens), model(tokens))


def test_a_folder_written_by_hand(tmp_path):
    """A GPT-2 as the first one was saved: no prefix, the table of the mask, the head twice; and transposed weights."""
    torch.manual_seed(1)
    width, shapes = 4, {"wte.weight": (5, 4), "wpe.weight": (3, 4), "ln_f.weight": (4,), "ln_f.bias": (4,)}
    for name, rows, columns in (
        ("attn.c_attn", 4, 12),
        ("attn.c_proj", 4, 4),
        ("mlp.c_fc", 4, 16),
        ("mlp.c_proj", 16, 4),
    ):
        shapes |= {f"h.0.{name}.weight": (rows, columns), f"h.0.{name}.bias": (columns,)}
    shapes |= {f"h.0.{name}.{kind}": (4,) for name in ("ln_1", "ln_2") for kind in ("weight", "bias")}
    weights = {name: torch.randn(shape) for name, shape in shapes.items()}
    tables = {"h.0.attn.bias": torch.ones(1, 1, 3, 3).tril(), "lm_head.weight": weights["wte.weight"].clone()}
    save_file({**weights, **tables}, tmp_path / "model.safetensors")
    raw = {"model_type": "gpt2", "n_embd": width, "n_layer": 1, "n_head": 1, "vocab_size": 5, "n_positions": 3}
    (tmp_path / "config.json").write_text(json.dumps(raw))

    def norm(x, name):
        return torch.layer_norm(x, (width,), weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-5)

    def matmul(x, name):
        return x @ weights[f"h.0.{name}.weight"] + weights[f"h.0.{name}.bias"]

    tokens = torch.tensor([[4, 0, 2]])
    x = weights["wte.weight"][tokens] + weights["wpe.weight"]
    q, k, v = matmul(norm(x, "h.0.ln_1"), "attn.c_attn").split(width, -1)
    scores = (q @ k.mT / width**0.5).masked_fill(torch.ones(3, 3).triu(1).bool(), -torch.inf)
    x = x + matmul(scores.softmax(-1) @ v, "attn.c_proj")
    inner = matmul(norm(x, "h.0.ln_2"), "mlp.c_fc")
    x = x + matmul(torch.nn.functional.gelu(inner, approximate="tanh"), "mlp.c_proj")
    expected = norm(x, "ln_f") @ weights["wte.weight"].T
    torch.testing.assert_close(import_huggingface(tmp_path).eval()(tokens), expected)
    tables["lm_head.weight"][0, 0] += 1
    save_file({**weights, **tables}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="lm_head.weight of its own"):
        import_huggingface(tmp_path)


@pytest.mark.parametrize("name", ["gpt2, untied", "llama, grouped"])
@pytest.mark.usefixtures("as_on_a_cpu")
def test_training_begins_with_what_was_imported(tmp_path, name):
    model = gpt(**OURS[name])
    export_huggingface(model, tmp_path / "hf")
    found = import_run(tmp_path / "hf", tmp_path / "run")
    assert "has no tokenizer.json" in found.notes[-1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "run"]
    back = load_model(tmp_path / "run").state_dict()
    assert all(torch.equal(back[key], value) for key, value in model.state_dict().items())
    changes = [
        "steps=3", "device=cpu", "data.kind=synthetic", "data.workers=0", "micro_batch=2", "schedule.warmup=0",
        "optimizer.learning_rate=1e-9", "optimizer.weight_decay=0",
    ]  # fmt: skip
    given = read_configuration(tmp_path / "run/config.yaml", [*changes, "model.dropout=0"]).train
    assert all(getattr(given.model, field) == value for field, value in vars(found.model.config).items()
               if field not in (*LEVERS, "dropout"))  # fmt: skip
    said = []
    (first, *_) = losses = [one.loss for one in trained(given, say=said.append)]
    assert any("weights that were imported" in text for text in said) and len(losses) == 3
    assert (tmp_path / "run/checkpoints/step-00000003").exists()
    # With this rate the weights stay where they are: a run of the other dtypes, optimizers and blocks begins there too.
    for number, other in enumerate((["model.gpt_block=optimized"], ["optimizer.name=lion"], ["precision=bf16_kahan"])):
        branch = [f"out={tmp_path}/{number}", f"checkpoint.resume={tmp_path}/run/checkpoints/step-00000000"]
        given = read_configuration(tmp_path / "run/config.yaml", [*changes, "model.dropout=0", *branch, *other]).train
        assert trained(given)[0].loss == pytest.approx(first, abs=0.05 if "kahan" in other[0] else 1e-4)
    wrong = [*changes, f"out={tmp_path}/wrong", branch[1], "model.norm_epsilon=0.1"]
    with pytest.raises(UserError, match="model.norm_epsilon is 0.1 and the checkpoint's"):
        trained(read_configuration(tmp_path / "run/config.yaml", wrong).train)
    shorter = [*changes, f"out={tmp_path}/shorter", branch[1], "model.sequence=8"]
    given = read_configuration(tmp_path / "run/config.yaml", shorter).train
    if name.startswith("gpt2"):
        with pytest.raises(UserError, match="position.weight as"):
            trained(given)
    else:
        assert trained(given)[0].step == 1
        longer = read_configuration(
            tmp_path / "run/config.yaml", [*shorter[:-1], f"out={tmp_path}/l", "model.sequence=48"]
        )
        with pytest.raises(UserError, match="model.sequence is 48"):
            trained(longer.train)


def test_a_checkpoint_of_before_the_new_fields_is_read(tmp_path):
    model = gpt(**LLAMA)
    fields = {name: value for name, value in dataclasses.asdict(model.config).items()
              if name not in ("tied", "norm_epsilon", "rope_base")}  # fmt: skip
    checkpoints = Checkpoints(tmp_path / "run/checkpoints", keep=1, asynchronous=False)
    checkpoints.save(1, {"model": model.state_dict()}, {"configuration": {"model": fields}})
    assert load_model(tmp_path / "run").config == model.config


def test_the_tokenizer_comes_along_and_a_false_one_is_refused(folder, tmp_path):
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE"}}))
    assert import_run(folder, tmp_path / "run").notes == []
    given = read_configuration(tmp_path / "run/config.yaml", []).train
    assert (given.data.kind, given.data.tokenizer) == ("text", str(tmp_path / "run/tokenizer.json"))
    for content in ("[]", "{}", "{", "[" * 100_000):
        (folder / "tokenizer.json").write_text(content)
        with pytest.raises(UserError, match="is no tokenizer"):
            import_run(folder, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_dropout_that_is_left_out_is_said(tmp_path):
    export_huggingface(gpt(dropout=0.1), tmp_path / "gpt2")
    change(tmp_path / "gpt2", attn_pdrop=0.2, embd_pdrop=0.3)
    notes = import_run(tmp_path / "gpt2", tmp_path / "run").notes
    assert "attn_pdrop 0.2" in notes[0] and "model.dropout is 0.1" in notes[1]


NAN, INF = float("nan"), float("inf")
CONFIGS = [
    ({"model_type": "mamba"}, "model_type is 'mamba'; import reads gpt2 and llama"),
    ({"model_type": ["llama"]}, "model_type is"), ({"model_type": None}, "model_type is None"),
    ({"auto_map": {"AutoModelForCausalLM": "evil.Model"}}, "code of its own"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"hidden_size": -48}, "hidden_size is -48"), ({"hidden_size": 48.0}, "hidden_size is 48.0"),
    ({"hidden_size": True}, "hidden_size is True"), ({"hidden_size": NAN}, "hidden_size is nan"),
    ({"hidden_size": 10**30}, "hidden_size is 1000"), ({"hidden_size": 2**40}, "head_dim"),
    ({"hidden_size": 2**40, "head_dim": 2**38}, "config.json calls for"),
    ({"num_hidden_layers": 0}, "num_hidden_layers is 0"), ({"num_hidden_layers": 10**9}, "10+ layers"),
    ({"num_hidden_layers": 3}, "lacks 'model.layers.2.*more tensors"),
    ({"num_hidden_layers": 1}, "has 'model.layers.1.*more tensors"),
    ({"num_attention_heads": 5}, "head_dim"), ({"head_dim": 24}, "4 heads of head_dim 24 are not as wide"),
    ({"num_key_value_heads": 3}, "do not divide"), ({"num_key_value_heads": 2}, "has shape"),
    ({"vocab_size": 62}, "has shape"), ({"vocab_size": 2**40}, "has shape"), ({"intermediate_size": "x"}, "is 'x'"),
    ({"max_position_embeddings": 2**40}, "positions"), ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
    ({"hidden_act": []}, "hidden_act"), ({"rms_norm_eps": NAN}, "rms_norm_eps is nan"),
    ({"rms_norm_eps": 0}, "norm_epsilon is 0"), ({"rms_norm_eps": -1}, "rms_norm_eps is -1"),
    ({"rope_theta": INF}, "rope_theta is inf"), ({"rope_theta": "x"}, "rope_theta"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling has 'llama3'"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling has 'linear'"),
    ({"rope_scaling": {"rope_type": "default", "factor": 2.0}}, "rope_scaling has 'factor'"),
    ({"rope_parameters": {"rope_type": ["x"]}}, "rope_parameters has"), ({"rope_scaling": 2}, "rope_scaling is 2"),
    ({"rope_parameters": {"rope_theta": 7.0}}, "two values of rope_theta"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"), ({"mlp_bias": True}, "biases everywhere"),
    ({"attention_bias": 1}, "attention_bias is 1"), ({"tie_word_embeddings": False}, "lacks 'lm_head.weight'"),
    ({"attention_dropout": 1}, "attention_dropout is 1"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "sentence"), CONFIGS, ids=lambda value: str(value)[:40])
def test_a_configuration_that_cannot_be_is_refused(folder, tmp_path, fields, sentence):
    change(folder, **fields)
    refused(folder, tmp_path, sentence)


def refused(folder, tmp_path, sentence):
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(UserError, match=sentence) as found:
        import_run(folder, tmp_path / "run")
    assert "\n" not in str(found.value) and str(found.value).endswith(".")
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"scale_attn_weights": False}, "scale_attn_weights is False"), ({"n_head": 5}, "does not divide"),
        ({"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx is True"),
        ({"add_cross_attention": True}, "add_cross_attention"), ({"activation_function": "relu"}, "is 'relu'"),
        ({"layer_norm_epsilon": None, "n_embd": 0}, "n_embd is 0"), ({"resid_pdrop": 1.5}, "resid_pdrop is 1.5"),
    ],
)  # fmt: skip
def test_a_gpt2_that_computes_something_else_is_refused(tmp_path, fields, sentence):
    export_huggingface(gpt(), tmp_path / "hf")
    change(tmp_path / "hf", **fields)
    refused(tmp_path / "hf", tmp_path, sentence)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"[]", "no JSON object"), (b"{", "not JSON"), (b"\xff\xfe", "not JSON"), (b"[" * 100_000, "not JSON"),
        (b" " * (1 << 20) + b"{}", "has more than"), (b'{"model_type": ' + b"9" * 5000 + b"}", "not JSON"),
    ],
    ids=["list", "cut", "utf16", "deep", "huge", "digits"],
)  # fmt: skip
def test_a_config_json_that_is_none_is_refused(folder, tmp_path, content, sentence):
    (folder / "config.json").write_bytes(content)
    refused(folder, tmp_path, sentence)


class _Payload:
    def __reduce__(self):
        return Path.touch, (Path("ran"),)


def test_a_pickle_is_refused_by_name_and_not_read(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (folder / "model.safetensors").rename(tmp_path / "sound")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_Payload()))
    (folder / "modeling_evil.py").write_text("open('ran', 'w')")
    refused(folder, tmp_path, "pytorch_model.bin', a pickle")
    (folder / "pytorch_model.bin").rename(folder / "model.safetensors")
    refused(folder, tmp_path, "no whole safetensors file")
    (folder / "model.safetensors").unlink()
    refused(folder, tmp_path, "has no model.safetensors")
    assert not (tmp_path / "ran").exists()
    (folder / "config.json").unlink()
    refused(folder, tmp_path, "has no config.json")
    refused(tmp_path / "nowhere", tmp_path, "is not a folder")
    refused(tmp_path / "sound", tmp_path, "is not a folder")
    refused(tmp_path / ("x" * 5000), tmp_path, "Cannot read")


def test_damaged_safetensors_are_refused(folder, tmp_path):
    path = folder / "model.safetensors"
    sound = path.read_bytes()
    header = struct.unpack("<Q", sound[:8])[0]
    for content in (
        b"", sound[:4], sound[:100], sound[:-1], sound + b"\0", struct.pack("<Q", 2**60) + sound[8:],
        sound[:8] + b"[" * header + sound[8 + header :], struct.pack("<Q", 2) + b"{}",
    ):  # fmt: skip
        path.write_bytes(content)
        refused(folder, tmp_path, "no whole safetensors file|there are 0 tensors")


def test_other_tensors_than_the_model_has_are_refused(folder, tmp_path):
    path, name = folder / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    sound = load_file(path)
    for changed, sentence in (
        ({**sound, "model.extra": torch.ones(1)}, "has 'model.extra', for which"),
        ({**sound, "score.weight": torch.ones(1)}, "has 'score.weight', for which"),
        ({key: value for key, value in sound.items() if key != name}, f"lacks '{name}', which"),
        ({**sound, name: sound[name].t().contiguous()}, "has shape"), ({**sound, name: sound[name][None]}, "has shape"),
        ({**sound, name: sound[name].half()}, "tensors of F16 and F32"),
        ({**sound, name: sound[name].to(torch.int8)}, "is I8; save the model in one of"),
        ({"model.layers.0.self_attn.q_proj.bias": torch.ones(48), **sound}, "for which config.json has no place"),
    ):  # fmt: skip
        save_file(changed, path)
        refused(folder, tmp_path, sentence)
    save_file({**sound, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)}, path)
    import_huggingface(folder)  # a table of older versions


def test_an_index_that_cannot_be_is_refused(folder, tmp_path):
    places = shard(folder)
    index, first = folder / "model.safetensors.index.json", min(places)
    (tmp_path / "outside.safetensors").write_bytes((folder / places[first]).read_bytes())
    others = {name: file for name, file in places.items() if name != first}
    for changed, sentence in (
        ({**places, first: "../outside.safetensors"}, "names '../outside.safetensors', which is no"),
        ({**places, first: str(tmp_path / "outside.safetensors")}, "which is no safetensors file of the folder"),
        ({**places, first: "pytorch_model.bin"}, "which is no safetensors file"), ({**places, first: 7}, "names 7"),
        ({**places, first: "missing.safetensors"}, "There is no file .*missing.safetensors"),
        (others, "does not list"), ({**places, "model.extra": places[first]}, "lacks 'model.extra'"),
        ({}, "has no weight_map"), ([], "has no weight_map"), (None, "has no weight_map"),
    ):  # fmt: skip
        index.write_text(json.dumps({"weight_map": changed}))
        refused(folder, tmp_path, sentence)
    for content in ("[]", "{", '{"weight_map"'):
        index.write_text(content)
        refused(folder, tmp_path, "JSON")
    index.write_text(json.dumps({"weight_map": places}))
    second = next(file for file in places.values() if file != places[first])
    kept = load_file(folder / second)
    save_file({**kept, first: load_file(folder / places[first])[first]}, folder / second)
    refused(folder, tmp_path, "both have|does not list")
    (folder / second).write_bytes((folder / second).read_bytes()[:-5])
    refused(folder, tmp_path, "no whole safetensors file")


def test_a_run_is_not_written_over_and_a_failure_leaves_nothing(folder, tmp_path, monkeypatch):
    import_run(folder, tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(UserError, match="not empty; choose another folder"):
        import_run(folder, tmp_path / "run")
    assert before == {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    (tmp_path / "empty").mkdir()
    import_run(folder, tmp_path / "empty")
    with pytest.raises(UserError, match="Cannot write"):
        import_run(folder, folder / "config.json" / "run")
    with pytest.raises(UserError, match="choose another out"):
        import_run(folder, tmp_path / "${x}")

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Checkpoints, "_publish", full)
    with pytest.raises(UserError, match="No space left"):
        import_run(folder, tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "hf", "run"]
