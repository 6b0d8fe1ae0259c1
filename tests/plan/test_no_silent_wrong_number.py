"""Figures that a plan once got wrong without a word: each test failed before its fix."""

import dataclasses
import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tilewright import hardware
from tilewright.cli.main import app
from tilewright.errors import UserError
from tilewright.plan import memory
from tilewright.plan.decode import decode
from tilewright.plan.decoder import Decoder, from_config, load
from tilewright.plan.flops import forward_flops
from tilewright.plan.parallel import Cluster, estimate, search
from tilewright.plan.roofline import rates, roofline, step_ops
from tilewright.plan.serving_memory import WEIGHT_BYTES, kv_cache_bytes
from tilewright.plan.sizing import lint
from tilewright.plan.training import PRECISIONS, Training

H100 = hardware.find("H100-SXM5")
GPUS = [gpu for gpu in hardware.table().values() if "bf16" in gpu.peak_flops]
MIXTRAL = {
    "model_type": "mixtral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32000, "num_local_experts": 8,
    "num_experts_per_tok": 2, "max_position_embeddings": 32768,
}  # fmt: skip


def run(*arguments):
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


def data(*arguments):
    result = run(*arguments, "--json")
    assert result.exit_code == 0, (result.output, result.exception)
    return json.loads(result.stdout)


@st.composite
def models(draw):
    """A decoder of any kind: grouped heads, experts, dense layers among them, windows, tied or not."""
    kv_heads = draw(st.sampled_from((1, 2, 3, 4, 8)))
    layers = draw(st.integers(1, 130))
    experts = draw(st.sampled_from((1, 1, 4, 8, 60)))
    sparse = experts > 1
    return Decoder(
        width=64 * draw(st.integers(1, 64)), layers=layers, heads=kv_heads * draw(st.sampled_from((1, 2, 7, 8))),
        kv_heads=kv_heads, head_dim=draw(st.sampled_from((32, 64, 128))), ffn=32 * draw(st.integers(1, 200)),
        vocabulary=draw(st.integers(100, 300_000)), sequence=draw(st.sampled_from((128, 1024, 4096, 32768))),
        gated=draw(st.booleans()), tied=draw(st.booleans()), norm="rms", positions="rope", experts=experts,
        active_experts=draw(st.integers(1, min(4, experts))), shared_ffn=draw(st.sampled_from((0, 64))) * sparse,
        dense_layers=draw(st.integers(0, layers)) * sparse, dense_ffn=draw(st.sampled_from((0, 512))) * sparse,
        window=draw(st.sampled_from((0, 100, 4096))), windowed_layers=draw(st.integers(0, layers)),
    )  # fmt: skip


# Precision


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_every_precision_is_planned_at_its_own_rate(gpu):
    model, how = load("1b"), Cluster(gpu, 8, link=100e9)
    for precision, dtype in (
        ("bf16", "bf16"),
        ("mixed", "bf16"),
        ("bf16_kahan", "bf16"),
        ("fp32", "fp32"),
        ("tf32", "tf32"),
    ):
        training = Training(precision=precision, data=8)
        if dtype not in gpu.peak_flops:
            with pytest.raises(UserError, match=f"no {dtype} rate for {gpu.name}"):
                estimate(model, training, how)
            continue
        plan = estimate(model, training, how)
        best = gpu.best_flops if dtype == "bf16" and gpu.best_flops else 0.75 * gpu.peak_flops[dtype]
        flops = 6 * model.parameters + 12 * model.layers * model.width * model.sequence
        matmuls = plan.parts["matmul"] + plan.parts["attention"]  # the mask, and the look-up of embeddings, are less
        assert 0.85 * flops * model.sequence / best < matmuls < 4 * flops * model.sequence / best
        assert plan.mfu == pytest.approx(8 * model.sequence * flops / plan.seconds / (8 * gpu.peak_flops[dtype]))
        assert rates(gpu, training)[0].flops == gpu.peak_flops[dtype]


def test_float32_travels_in_four_bytes():
    model = load("1b")
    for how in ({"tensor": 8}, {"pipeline": 4, "accumulation": 8}, {"data": 8, "zero": 3}):
        wide, narrow = (
            estimate(model, Training(precision=precision, **how), Cluster(H100, 8, link=1e6, network=1e6))
            for precision in ("fp32", "bf16_kahan")
        )
        for field in ("tensor_traffic", "pipeline_traffic"):
            assert getattr(wide, field) == pytest.approx(2 * getattr(narrow, field), rel=1e-4)  # but for latencies
        if "data" in how:
            assert wide.data_traffic == pytest.approx(2 * narrow.data_traffic, rel=1e-3)


def test_sixteen_bits_on_a_v100_are_fp16_and_said_so():
    found = data("parallel", "125m", "--gpu", "V100-SXM2", "--gpus", 8, "--global-batch", 64)
    assert found["matmul"]["dtype"] == "fp16"
    with pytest.raises(UserError, match="no bf16 rate for V100-SXM2; it has fp16, fp32"):
        estimate(load("1b"), Training(precision="bf16"), Cluster(hardware.find("V100-SXM2"), 1))


def test_tf32_takes_the_memory_of_float32_and_the_time_of_tf32():
    model = load("1b")
    fp32, tf32 = (Training(precision=precision, micro_batch=4) for precision in ("fp32", "tf32"))
    assert memory.train(model, tf32).total == memory.train(model, fp32).total
    slow, fast = (sum(f.seconds for f in roofline(model, t, H100)) for t in (fp32, tf32))
    assert fast < slow


# Measured, or assumed


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_an_unmeasured_matmul_is_never_called_measured(gpu):
    base = ("--gpu", gpu.name, "--json")
    plans = json.loads(run("parallel", "125m", "--gpus", 8, "--global-batch", 64, "--link", 50, *base).stdout)
    floor = json.loads(run("roofline", "125m", "--achievable", *base).stdout)
    text = run("parallel", "125m", "--gpus", 8, "--global-batch", 64, "--link", 50, "--gpu", gpu.name).stdout
    measured = gpu.best_flops is not None
    for found in (plans["matmul"], floor["matmul"]):
        assert found["measured"] == measured
        assert ("assumed 75 % of the datasheet" in found["source"]) != measured
        expected = gpu.best_flops if measured else 0.75 * gpu.peak_flops["bf16"]
        assert found["flops"] == pytest.approx(expected)
    assert ("assumed 75 % of the datasheet" in " ".join(text.split())) != measured


def test_a_float32_matmul_is_assumed_where_only_bf16_was_measured():
    rate, _ = rates(H100, Training(precision="fp32"), achievable=True)
    assert not rate.measured and rate.flops == 0.75 * H100.peak_flops["fp32"]


@pytest.mark.parametrize(
    ("gpu", "gib"), [("T4", 14.75), ("A10", 22.1), ("L4", 22.1), ("L40S", 44.5), ("A100-SXM4-40GB", 39.4)]
)
def test_ecc_that_lies_in_the_memory_itself_takes_its_share(gpu, gib):
    assert hardware.find(gpu).usable_bytes / 2**30 == pytest.approx(gib, rel=0.015)  # as torch reports it


def test_what_a_row_of_the_table_warns_of_is_shown():
    assert "two dies" in run("train", "125m", "--gpu", "MI250X").stdout
    assert "17 or 34 GB; 34 GB are planned" in " ".join(run("train", "125m", "--gpu", "V100-SXM2").stdout.split())


# Serving


@settings(deadline=None, max_examples=200)
@given(model=models(), batch=st.sampled_from((1, 2, 7, 64, 1000, 10**5)), tokens=st.sampled_from((1, 100, 4096, 10**5)),
       gpu=st.sampled_from(list(hardware.table().values())), weights=st.sampled_from(list(WEIGHT_BYTES)),
       kv_bytes=st.sampled_from((0.5, 1.0, 2.0, 4.0)), share=st.sampled_from((1, 2, 4, 8)))  # fmt: skip
def test_no_decoding_speed_is_above_what_the_chip_can_do(model, batch, tokens, gpu, weights, kv_bytes, share):
    try:
        found = decode(model, batch, tokens, gpu, weights=weights, kv_bytes=kv_bytes, tensor=share)
    except UserError:
        return
    speed = batch / found.seconds
    # By itself: a token's matmuls, and two more over every cached token that a layer sees.
    seen = model.windowed_layers * min(tokens, model.window or tokens) + (model.layers - model.windowed_layers) * tokens
    inside = 4 * model.heads * model.head_dim * seen
    matmuls = forward_flops(dataclasses.replace(model, sequence=1, window=0, windowed_layers=0))
    flops = matmuls - 4 * model.layers * model.heads * model.head_dim + inside
    assert speed * flops <= share * max(gpu.peak_flops.values()) * (1 + 1e-9)
    assert speed * flops <= share * gpu.peak_flops[found.dtype] * (1 + 1e-9)
    cache = kv_cache_bytes(model, batch, tokens, kv_bytes) / min(share, model.kv_heads)
    one_expert = WEIGHT_BYTES[weights] * model.parameters_read(1) / share / (3 if weights == "mixed" else 1)
    assert one_expert + cache <= found.seconds * gpu.bytes_per_second * (1 + 1e-9)


def test_a_batch_reads_the_experts_that_its_tokens_draw():
    model = from_config(MIXTRAL)
    rng = random.Random(0)
    for batch in (1, 2, 3, 8, 64):
        drawn = [len({expert for _ in range(batch) for expert in rng.sample(range(8), 2)}) for _ in range(4000)]
        assert model.experts_read(batch) == pytest.approx(sum(drawn) / len(drawn), rel=0.02)
    assert model.parameters_read(1) == model.active_parameters - 32000 * 4096  # of the embedding only rows are read
    assert model.parameters_read(10**6) == model.parameters - 32000 * 4096


def test_serving_a_mixture_keeps_every_expert_and_reads_those_drawn(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL))
    found = data("serve", tmp_path, "--batch", 64, "--tokens", 1024, "--gpu", "H200-SXM")
    model = from_config(MIXTRAL)
    assert found["parts"][0]["bytes"] == 2 * model.parameters
    experts = 8 * (1 - (6 / 8) ** 64)
    read = 2 * (model.active_parameters - 32000 * 4096 + (experts - 2) * 32 * 3 * 4096 * 14336)
    cache = kv_cache_bytes(model, 64, 1024)
    assert found["decode_floor_seconds"] == pytest.approx((read + cache) / 4.8e12)
    assert found["experts_read"] == pytest.approx(experts)


def test_a_large_batch_is_bound_by_arithmetic_and_said_so():
    found = data("serve", "1b", "--batch", 100_000, "--tokens", 16, "--gpu", "H100-SXM5", "--kv-bytes", 0.001)
    assert found["bound"] == "arithmetic"
    assert found["tokens_per_second"] * 2 * (load("1b").parameters - 2048 * 2048) < 989.5e12


def test_a_float32_copy_in_the_optimizer_is_not_read_to_decode():
    kept, read = (decode(load("1b"), 1, 1, H100, weights=weights).seconds for weights in ("mixed", "bf16"))
    assert kept == read


def test_a_sequence_longer_than_its_learned_positions_is_refused(tmp_path):
    gpt2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}
    (tmp_path / "config.json").write_text(json.dumps(gpt2))
    assert "1,024" in str(run("serve", tmp_path, "--tokens", "4096").exception)
    assert "1,024" in str(run("train", tmp_path, "sequence=2048").exception)
    assert data("train", tmp_path, "sequence=512")["model"]["parameters"] == 124_439_808  # the table stays
    found = data("serve", tmp_path, "--gpu", "A10")  # of itself no longer than the model allows
    assert found["tokens"] == 1024


# Many GPUs


@settings(deadline=None, max_examples=60)
@given(model=models(), node=st.sampled_from((1, 2, 4, 8)), nodes=st.integers(1, 12),
       batch=st.sampled_from((1, 6, 64, 240)), precision=st.sampled_from(PRECISIONS))  # fmt: skip
def test_every_split_that_is_advised_can_be_trained(model, node, nodes, batch, precision):
    cluster = Cluster(H100, node * nodes, node=node)
    try:
        plans = search(model, cluster, batch, 100, Training(precision=precision, loss="fused"))
    except UserError:
        return
    for plan in plans:
        how = plan.training
        assert how.tensor * how.pipeline * how.data * how.context == how.ranks == cluster.gpus
        assert memory.train(model, how).total == plan.memory <= cluster.capacity


LLAMA_405B = Decoder(16384, 126, 128, 8, 128, 53248, 128256, 8192, gated=True, tied=False, norm="rms", positions="rope")


def test_the_advice_for_126_layers_is_taken_by_plan_train(tmp_path):
    config = {
        "model_type": "llama", "hidden_size": 16384, "num_hidden_layers": 126, "num_attention_heads": 128,
        "num_key_value_heads": 8, "intermediate_size": 53248, "vocab_size": 128256, "max_position_embeddings": 8192,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = data("parallel", tmp_path, "--gpu", "H100-SXM5", "--gpus", 16384, "--global-batch", 2048, "--keep", 20)
    assert any(plan["training"]["pipeline"] == 16 for plan in found["plans"])
    for plan in found["plans"]:
        how, arguments = plan["training"], []
        for name in ("micro_batch", "precision", "optimizer", "recompute", "attention", "loss", "accumulation", "data",
                     "zero", "tensor", "pipeline", "interleave"):  # fmt: skip
            arguments += [f"--{name.replace('_', '-')}", how[name]]
        if how["sequence_parallel"]:
            arguments.append("--sequence-parallel")
        assert data("train", tmp_path, *arguments)["total"] == pytest.approx(plan["memory"])


def test_an_uneven_stage_is_counted_as_the_fullest():
    seven, eight = (dataclasses.replace(LLAMA_405B, layers=layers) for layers in (16 * 7, 16 * 8))
    how = Training(pipeline=16, accumulation=16, precision="mixed", loss="fused", tensor=8)
    assert memory.train(seven, how).total < memory.train(LLAMA_405B, how).total
    assert memory.train(LLAMA_405B, how).total == pytest.approx(memory.train(eight, how).total, rel=1e-6)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"pipeline": 127}, "126 layers do not fill 127 pipeline stages"),
        ({"pipeline": 16, "interleave": 8}, "126 layers do not fill 16 pipeline stages of 8 pieces"),
        ({"interleave": 2}, "pipeline"),
        ({"pipeline": 2, "interleave": 2, "accumulation": 3}, "multiple of 2"),
        ({"tensor": 3}, "tensor parallel 3"),
    ],
)
def test_the_impossible_is_one_sentence(how, message):
    with pytest.raises(UserError, match=message) as caught:
        memory.train(LLAMA_405B, Training(**how))
    assert "\n" not in str(caught.value)


# What else a probe found


def test_key_value_heads_that_do_not_divide_are_refused():
    model = Decoder(768, 12, 12, 6, 64, 3072, 50304, 1024)
    with pytest.raises(UserError, match="6 key-value heads"):
        memory.train(model, Training(tensor=4))
    moe = Decoder(64, 4, 8, 8, 16, 128, 256, 32, experts=4, active_experts=2, shared_ffn=100, dense_layers=1)
    with pytest.raises(UserError, match="100 columns"):
        memory.train(moe, Training(tensor=8))


def test_key_value_heads_are_repeated_where_there_are_fewer_than_ranks():
    model = Decoder(1024, 4, 16, 2, 64, 4096, 1000, 128, positions="rope")
    keys = 2 * 2 * 64  # bytes of one head's keys and values: 8 ranks and 2 both have one head
    norms = 2 * (4 * 1024 + 2 * 1024 + 8)  # on every rank
    split = {ranks: memory.layer_activation_bytes(model, Training(tensor=ranks)) - norms - keys for ranks in (2, 8)}
    assert 8 * split[8] == pytest.approx(2 * split[2])
    qkv = next(op for op in step_ops(model, Training(tensor=8)) if op.name.startswith("qkv"))
    assert qkv.cost.flops == 2 * 128 * (16 * 64 // 8 + 2 * 64) * 1024


def test_a_vocabulary_is_padded_to_whole_ranks():
    found = [op for op in step_ops(load("1b", ["vocabulary=50257"]), Training(tensor=8)) if "logits" in op.name]
    assert found[0].cost.flops == 2 * 2048 * math.ceil(50257 / 8) * 2048


def test_dense_layers_of_a_mixture_have_their_own_activations():
    moe = Decoder(64, 4, 4, 4, 16, 128, 256, 512, gated=True, experts=4, active_experts=2, dense_layers=3,
                  dense_ffn=1024)  # fmt: skip
    moved = sum(op.cost.flops * op.calls for op in step_ops(moe, Training()) if "activation, forward" in op.name)
    assert moved == 10 * 512 * (3 * 1024 + 1 * 2 * 128)


def test_an_experts_formula_gives_the_figure_beside_it(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL))
    text = run("flops", tmp_path, "--explain").stdout
    for row in (line.split("│") for line in text.splitlines() if line.startswith("│ expert")):
        figure, formula = row[3].strip().replace(",", ""), row[5].strip()
        assert math.prod(map(int, formula.split(" x "))) / 1e6 == pytest.approx(float(figure), abs=0.05)


@settings(deadline=None, max_examples=200)
@given(model=models(), tokens=st.integers(1, 300))
def test_the_matmuls_of_a_step_are_the_models_flops(model, tokens):
    model = dataclasses.replace(model, sequence=tokens)
    ops = [op for op in step_ops(model, Training()) if op.tensor_cores and "attention" not in op.name]
    expected = tokens * 3 * (forward_flops(model) - 4 * model.layers * model.heads * model.head_dim * model.context())
    found = sum(op.cost.flops * op.calls for op in ops)
    # Whole tokens an expert: as many as a token more for each expert that works.
    spare = 1 + min(model.experts, tokens * model.active_experts) / (tokens * model.active_experts)
    assert expected * (1 - 1e-9) <= found <= spare * expected


def test_few_tokens_cannot_meet_every_expert():
    model = from_config(MIXTRAL)
    met = [op for op in step_ops(dataclasses.replace(model, sequence=1), Training()) if "expert up" in op.name]
    assert met[0].calls == 32 * 2


BERT = dict(
    model_type="bert", hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072,
    vocab_size=30522, max_position_embeddings=512,
)  # fmt: skip


def test_what_follows_from_a_changed_width_follows(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(BERT))
    wide = load(str(tmp_path), ["width=1024", "heads=16", "kv_heads=16"])
    assert wide.parameters == from_config({**BERT, "hidden_size": 1024, "num_attention_heads": 16}).parameters


def test_dropout_is_the_config_files():
    assert from_config(BERT).dropout == 0.1 and from_config({**BERT, "hidden_dropout_prob": 0.0}).dropout == 0.0
    for bad in (1.5, -1, "0.1", True, float("nan")):
        with pytest.raises(UserError, match="hidden_dropout_prob"):
            from_config({**BERT, "hidden_dropout_prob": bad})


def test_the_fullest_stage_of_a_mixture_has_experts_in_every_layer():
    moe = Decoder(64, 8, 4, 4, 16, 128, 256, 32, gated=True, positions="rope", experts=8, active_experts=2,
                  dense_layers=4, dense_ffn=16)  # fmt: skip
    all_sparse = dataclasses.replace(moe, dense_layers=0, dense_ffn=0)
    how = Training(pipeline=2, accumulation=2)
    assert memory.train(moe, how)["weights"] == pytest.approx(memory.train(all_sparse, how)["weights"], rel=0.01)
    assert sum(moe.fullest_stage(n) for n in (8,)) == moe.parameters - moe.embedding_parameters


def test_an_encoder_without_logits_has_no_vocabulary_to_pad():
    bert = Decoder(768, 12, 12, 12, 64, 3072, 30522, 512, causal=False, head=False)
    assert not any("vocabulary" in finding.what for finding in lint(bert, H100, micro_batch=32))


def test_a_mixtures_fields_need_a_mixture():
    for field in ("shared_ffn", "dense_layers", "dense_ffn"):
        with pytest.raises(UserError, match="experts of at least 2"):
            Decoder(64, 8, 4, 4, 16, 128, 256, 32, **{field: 8})
    with pytest.raises(UserError, match="at least 2"):
        from_config({**MIXTRAL, "num_local_experts": 1})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("mfu", "1b", "--tokens-per-second", "9", "--peak-tflops", "9", "--dtype", "fp17"), "--dtype"),
        (("mfu", "1b", "--tokens-per-second", "9", "--seconds", "2", "--gpu", "H100-SXM5"), "not both"),
        (("parallel", "1b", "--gpus", "8", "--global-batch", "8", "--gpu", "MI250X", "--precision", "tf32"),
         "no tf32 rate"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(arguments, message):
    result = run(*arguments)
    assert isinstance(result.exception, UserError), result.output
    assert message in str(result.exception) and "\n" not in str(result.exception)
