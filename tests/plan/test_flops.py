import csv
from pathlib import Path

import pytest

from tilewright import hardware
from tilewright.errors import UserError
from tilewright.plan.decoder import Decoder, from_config, from_gpt, load
from tilewright.plan.flops import DEFAULT, check_possible, conventions, forward_flops, utilisation
from tilewright.plan.gpt import GPTConfig

ROWS = list(csv.DictReader((Path(__file__).parents[2] / "results/published/llm_foundry.csv").open()))


def gpt(width, layers, heads, vocabulary, sequence):
    return from_gpt(GPTConfig(width, layers, heads, vocabulary, sequence))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['model']}-{row['gpus']}-{row['gpu']}-{row['seq_len']}")
def test_every_published_run_of_llm_foundry(row):
    model = gpt(int(row["d_model"]), int(row["n_layers"]), 1, int(row["vocab"]), int(row["seq_len"]))
    assert model.parameters == int(row["n_params"])
    chip = hardware.find("H100-SXM5" if row["gpu"].startswith("h100") else "A100-SXM4-80GB")
    peak = chip.peak_flops["fp8" if "fp8" in row["precision"] else "bf16"]
    recompute = "full" if row["act_ckpt"] == "True" else "none"
    result = utilisation(model, float(row["tok_s"]), int(row["gpus"]), peak, recompute=recompute)[DEFAULT]
    assert 100 * result.mfu == pytest.approx(float(row["mfu"]), abs=0.01)
    assert 100 * result.hfu == pytest.approx(float(row["hfu"]), abs=0.01)


@pytest.mark.parametrize(
    ("heads", "width", "layers", "gpus", "batch", "seconds", "mfu", "hfu"),
    [
        (64, 6144, 48, 8, 4, 1.10, 41.5, 43.7),
        (96, 12288, 96, 64, 64, 13.75, 51.4, 52.8),
        (128, 20480, 105, 280, 280, 37.83, 56.0, 57.0),
        (160, 25600, 128, 512, 512, 71.49, 56.3, 57.0),
    ],
)
def test_megatrons_models_with_selective_recompute(heads, width, layers, gpus, batch, seconds, mfu, hfu):
    model = gpt(width, layers, heads, 51200, 2048)
    result = utilisation(model, batch * 2048 / seconds, gpus, 312e12, recompute="selective")["matmuls"]
    assert 100 * result.mfu == pytest.approx(mfu, abs=0.2)
    assert 100 * result.hfu == pytest.approx(hfu, abs=0.2)


def test_palm():
    model = Decoder(
        width=18432, layers=118, heads=48, kv_heads=1, head_dim=256, ffn=73728, vocabulary=256000, sequence=2048,
        gated=True, positions="rope",
    )  # fmt: skip
    result = utilisation(model, 238_300, 6144, 275e12)[DEFAULT]
    assert 100 * result.mfu == pytest.approx(46.2, abs=0.05)


def test_bloom():
    model = gpt(14336, 70, 112, 250880, 2048)
    result = utilisation(model, 2048 * 2048 / 105, 384, 312e12, recompute="full")["matmuls"]
    assert result.hardware_flops / 1e12 == pytest.approx(149.3, abs=0.05)


def test_the_formula_of_the_literature_is_the_sum_over_matmuls():
    h, layers, v, s = 1024, 24, 50368, 2048
    model = gpt(h, layers, 16, v, s)
    assert 3 * forward_flops(model) * s == pytest.approx(
        72 * layers * s * h * h * (1 + s / (6 * h) + v / (12 * h * layers))
    )
    full = conventions(model)["matmuls"].hardware["full"] * s
    assert full == pytest.approx(96 * s * layers * h * h * (1 + s / (6 * h) + v / (16 * layers * h)))


def test_causal_attention_is_half_and_experts_count_where_active():
    model = load("1b")
    both = conventions(model)
    assert both[DEFAULT].model - both["6N + causal attention"].model == 6 * 24 * 2048 * 2048
    assert both[DEFAULT].macs() * 2 == both[DEFAULT].model
    moe = Decoder(64, 2, 4, 4, 16, 128, 256, 32, gated=True, tied=False, positions="rope", experts=8, active_experts=2)
    dense = Decoder(64, 2, 4, 4, 16, 256, 256, 32, gated=True, tied=False, positions="rope")
    router = 2 * 2 * 64 * 8
    assert forward_flops(moe) == forward_flops(dense) + router


def test_heads_that_are_wider_than_the_model_count_as_they_are():
    model = from_config({
        "model_type": "gemma", "hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "head_dim": 256,
        "intermediate_size": 24576, "vocab_size": 256000, "max_position_embeddings": 8192,
    })  # fmt: skip
    assert conventions(model)[DEFAULT].model == 6 * model.parameters + 12 * 28 * 16 * 256 * 8192


@pytest.mark.parametrize(
    ("share", "gpus", "message"),
    [(1.5, 8, "fp8"), (1.9, 8, "counted twice"), (7.0, 1, "--gpus"), (3.0, 8, "another one"), (1.1, 8, "sequence")],
)
def test_more_than_everything_names_the_likely_mistake(share, gpus, message):
    chip, model = hardware.find("H100-SXM5"), load("7b")
    peak = chip.peak_flops["bf16"]
    whole = gpus * peak / conventions(model)["matmuls, causal"].model
    with pytest.raises(UserError, match=message):
        check_possible(utilisation(model, share * whole, gpus, peak), model, gpus, "bf16", chip)
    check_possible(utilisation(model, 0.99 * whole, gpus, peak), model, gpus, "bf16", chip)


def test_recompute_counts_against_the_peak_and_the_mask_for_the_run():
    model, peak = load("7b", ["sequence=131072"]), 989.5e12
    found = conventions(model)
    long = 0.95 * peak / found["matmuls, causal"].model
    assert utilisation(model, long, 1, peak)[DEFAULT].mfu > 1  # as counted without the mask; still possible
    check_possible(utilisation(model, long, 1, peak), model, 1, "bf16", None)
    with pytest.raises(UserError, match="cannot be"):
        check_possible(utilisation(model, long, 1, peak, recompute="full"), model, 1, "bf16", None)


def test_a_window_is_not_halved_by_the_mask():
    model = Decoder(64, 4, 4, 4, 16, 128, 256, 4096, window=512, windowed_layers=4)
    seen = [min(i + 1, 512) for i in range(4096)]  # one by one
    assert model.context(causal=True) == pytest.approx(sum(seen) / 4096, rel=0.001)
    assert model.context() == 512
    mixed = Decoder(64, 4, 4, 4, 16, 128, 256, 4096, window=512, windowed_layers=3)
    assert mixed.context(causal=True) == pytest.approx((3 * (512 - 32) + 2048) / 4)


def test_dense_layers_of_a_mixture_are_counted():
    moe = Decoder(64, 4, 4, 4, 16, 128, 256, 32, experts=4, active_experts=2, dense_layers=2)
    dense = Decoder(64, 4, 4, 4, 16, 128, 256, 32)
    extra = 2 * (2 * 64 * 4 + 2 * 2 * 64 * 128)  # in two layers a router and one more expert
    assert forward_flops(moe) == forward_flops(dense) + extra
