"""Folders that are quantized block by block: what is in memory, what is written, and what is refused."""

import json
import os
import resource
import signal

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from generate.models import SHAPE, tiny
from ops.contract import on_gpu
from tilewright.errors import UserError
from tilewright.generate import Generator, Plan, quantize_folder
from tilewright.quantize import Int4, Int8, load, read_folder


def save(folder, name="llama", **fields):
    model = tiny(name, **{"hidden_size": 64, "intermediate_size": 128, **fields})
    model.save_pretrained(folder)
    return model


def tokens(count=2):
    return torch.randint(96, (count, 24))


def anonymous_bytes():
    """Of this process, without files that are mapped."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))


def test_a_block_at_a_time_is_in_memory(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    shape = dict(hidden_size=512, intermediate_size=1024, num_hidden_layers=8)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SHAPE, **shape}))
    values = {name: torch.rand(tensor.shape) for name, tensor in model.state_dict().items()}
    (tmp_path / "m").mkdir()
    save_file(values, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    model.config.save_pretrained(tmp_path / "m")
    del values
    size, seen = (tmp_path / "m" / "model.safetensors").stat().st_size, []
    monkeypatch.setattr("tilewright.generate.folder_writer.FolderWriter.__init__.__defaults__", (4 << 20,))
    before = anonymous_bytes()
    report, _ = quantize_folder(
        tmp_path / "m", tmp_path / "q", Plan(Int8(), Int8()), samples=tokens(),
        progress=lambda *_: seen.append(anonymous_bytes() - before),
    )  # fmt: skip
    assert size > 70e6 and max(seen) < 0.75 * size, (size, seen)
    assert report.bytes_after < 0.3 * report.bytes_before and len(report.quantized) == 4 * 8 + 1
    index = json.loads((tmp_path / "q" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 5
    assert sorted(index["weight_map"].values())[-1].startswith("model-000")
    assert len(list(read_folder(tmp_path / "q"))) == 7 * 8 + 1
    Generator.from_folder(tmp_path / "q", device="cpu")


def test_what_stays_is_bit_by_bit_what_it_was(tmp_path):
    save(tmp_path / "m").to(torch.bfloat16).save_pretrained(tmp_path / "m")
    (tmp_path / "m" / "tokenizer_config.json").write_text("{}")
    plan = Plan(Int4(group=64), None, keep=("*.o_proj", "model.layers.1.mlp.*"))
    report, _ = quantize_folder(tmp_path / "m", tmp_path / "q", plan, samples=tokens())
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in "mq")
    packed = {name for name, _ in read_folder(tmp_path / "q")}
    assert len(packed) == 9 and not any("o_proj" in name or "layers.1.mlp" in name for name in packed)
    for name, tensor in before.items():
        if name.removesuffix(".weight") not in packed:
            assert torch.equal(tensor, after[name]) and tensor.dtype == after[name].dtype
    assert (tmp_path / "q" / "tokenizer_config.json").exists()
    sizes = {layer.name: (layer.bytes_before, layer.bytes_after) for layer in report.layers}
    assert sizes["model.layers.0.mlp.down_proj"] == (64 * 128 * 2, 64 * 128 // 2 + 64 * 2 * 2)
    assert report.bytes_before == sum(tensor.nbytes for tensor in before.values())
    assert report.bytes_after == sum(tensor.nbytes for tensor in after.values())


def test_layers_that_would_hurt_are_left_out_and_named(tmp_path):
    model = save(tmp_path / "m")
    with torch.no_grad():  # one weight so large that the others of its group become 0
        model.model.layers[1].mlp.down_proj.weight[:, ::64] = 200.0
    model.save_pretrained(tmp_path / "m")
    report, quality = quantize_folder(
        tmp_path / "m", tmp_path / "q", Plan(Int4(group=64), Int8(), most_error=0.2), check=tokens()
    )
    assert quality.tokens == 46 and not [layer for layer in report.layers if layer.output_error is not None]
    report, _ = quantize_folder(
        tmp_path / "m", tmp_path / "r", Plan(Int4(group=64), Int8(), most_error=0.01), samples=tokens()
    )
    assert report.left_out and all("above most_error=0.01" in layer.left_out for layer in report.left_out)
    names = {name for name, _ in read_folder(tmp_path / "r")}
    assert not names & {layer.name for layer in report.left_out} and "lm_head" in names
    loaded = tiny("llama", hidden_size=64, intermediate_size=128)
    load(loaded, tmp_path / "r")


def damaged(tmp_path, change):
    save(tmp_path / "m")
    path = tmp_path / "m" / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


BAD = (
    (lambda t: t["model.layers.1.mlp.up_proj.weight"][0].fill_(float("nan")), Int8(), {},
     r"The weight of model\.layers\.1\.mlp\.gate_proj, up_proj has NaN or Inf"),
    (lambda t: t["lm_head.weight"][0].fill_(float("inf")), Int8(), {}, "The weight of lm_head has NaN or Inf"),
    (lambda t: None, Int4(), {}, r"q_proj, k_proj, v_proj has 64 inputs, no multiple of 128, .* choose group=64"),
    (lambda t: None, Int8(), {"keep": ("*",)}, "No layer was quantized"),
    (lambda t: None, Int8(), {"most_error": 1e-9}, "No layer was quantized"),
    (lambda t: t.pop("model.norm.weight"), Int8(), {}, "lacks 'model.norm.weight'"),
)  # fmt: skip


@pytest.mark.parametrize(("change", "config", "options", "says"), BAD, ids=[says for *_, says in BAD])
def test_what_cannot_be_quantized_is_one_sentence_and_leaves_nothing(change, config, options, says, tmp_path):
    damaged(tmp_path, change)
    with pytest.raises(UserError, match=says) as caught:
        quantize_folder(tmp_path / "m", tmp_path / "q", Plan(config, config, **options), samples=tokens())
    assert "\n" not in str(caught.value) and sorted(os.listdir(tmp_path)) == ["m"]


def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path):
    """A limit on the size of files stands for a disk that is full."""
    save(tmp_path / "m")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, before[1]))
    try:
        with pytest.raises(UserError, match="Cannot write") as caught:
            quantize_folder(tmp_path / "m", tmp_path / "q", Plan(Int8(), Int8()))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert "\n" not in str(caught.value) and sorted(os.listdir(tmp_path)) == ["m"]


def test_other_folders_are_refused(tmp_path):
    save(tmp_path / "m")
    quantize_folder(tmp_path / "m", tmp_path / "q", Plan(Int8(), None))
    for source, out, says in (
        ("q", "r", "is quantized already"), ("m", "q", "not empty"), ("nothing", "r", "is not a folder"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=says):
            quantize_folder(tmp_path / source, tmp_path / out, Plan(Int8(), None))
    assert sorted(os.listdir(tmp_path)) == ["m", "q"]


def test_an_interrupt_leaves_nothing_and_what_a_kill_leaves_is_removed_by_the_next(tmp_path):
    save(tmp_path / "m")

    def stop(label, done, total):
        if done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_folder(tmp_path / "m", tmp_path / "q", Plan(Int8(), Int8()), progress=stop)
    assert sorted(os.listdir(tmp_path)) == ["m"]
    child = os.fork()
    if not child:
        try:
            quantize_folder(
                tmp_path / "m", tmp_path / "q", Plan(Int8(), Int8()),
                progress=lambda _, done, total: os.kill(os.getpid(), signal.SIGKILL) if done == total - 1 else None,
            )  # fmt: skip
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    left = sorted(os.listdir(tmp_path))
    assert len(left) == 2 and left[0].startswith(".q-") and left[1] == "m", "no half folder has the name"
    quantize_folder(tmp_path / "m", tmp_path / "q", Plan(Int8(), Int8()))
    assert sorted(os.listdir(tmp_path)) == ["m", "q"]
    with safe_open(tmp_path / "q" / "model.safetensors", "pt") as file:
        assert json.loads(file.metadata()["tilewright"]) == {"int8": 1}


@on_gpu
def test_a_gpu_makes_what_a_cpu_does(tmp_path):
    """Codes may differ where a weight lies between two numbers; what the model says may not, beyond 16 bits."""
    save(tmp_path / "m").to(torch.bfloat16).save_pretrained(tmp_path / "m")
    found, words = {}, tokens(4)
    for device in ("cpu", "cuda"):
        plan = Plan(Int4(group=64), Int8(), calibrate="gptq", act_order=True)
        found[device] = quantize_folder(
            tmp_path / "m", tmp_path / device, plan, samples=words, check=words, device=device
        )
    (report, quality), (other, others) = found.values()
    for one, two in zip(report.layers, other.layers, strict=True):
        assert two.output_error < 1.3 * one.output_error + 0.01, (one, two)
    assert others.divergence < 2 * quality.divergence + 1e-3
    Generator.from_folder(tmp_path / "cuda").generate([[1, 2, 3]], max_tokens=4)


def test_a_quantized_folder_decodes_the_same_by_tiles(tmp_path):
    """One kind of layers stays in 16 bits."""
    pytest.importorskip("transformers")
    save(tmp_path / "m")
    plan = Plan(Int4(group=64, zeros=True), Int8(), keep=("*.down_proj",))
    quantize_folder(tmp_path / "m", tmp_path / "q", plan)
    texts = [
        Generator.from_folder(tmp_path / "q", device="cpu", decode=decode)
        .generate([[1, 2, 3]], max_tokens=24)[0]
        .tokens
        for decode in ("graph", "tilesync")
    ]
    assert texts[0] == texts[1]
