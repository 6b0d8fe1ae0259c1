"""Whole decoding steps: the benchmark's cases, its limits, and every implementation once on a CPU."""

import pytest
import torch

from tilewright.bench import NAMES, decode
from tilewright.runtime import dispatch

TINY = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096, "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
def test_every_implementation_steps_on_a_cpu(monkeypatch):
    pytest.importorskip("transformers", reason="is the peer")
    monkeypatch.setattr(dispatch, "INTERPRETED", False)
    monkeypatch.setattr(decode, "_DEVICE", "cpu")
    monkeypatch.setattr(decode, "_ROOM", 2)
    monkeypatch.setitem(decode.MODELS, "tiny", TINY)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    for batch, weights, kv_cache in ((1, "bf16", "bf16"), (2, "bf16", "bf16"), (2, "int8", "int8"), (2, "int4", "fp8")):
        case = {"model": "tiny", "batch": batch, "context": 6, "weights": weights, "kv_cache": kv_cache}
        monkeypatch.setattr(decode, "why_no_pdl", lambda device, why="" if weights == "bf16" else "no": why)
        steps, failed = decode.prepare(case)
        assert not failed
        all_ways = {"tilewright", "tilewright, PDL", "transformers, compile"}
        names = all_ways if weights == "bf16" else {"tilewright"}
        gated = {name for name, step in steps["step"].items() if isinstance(step, decode.Checked)}
        assert gated == ({"tilewright", "tilewright, PDL", "tilewright, tilesync"} if decode._is_gated(case) else set())
        assert all(0 < steps["step"][name].distance < 0.05 for name in gated)
        assert set(steps["step"]) == names | ({"tilewright, tilesync"} if batch == 1 else set())
        for step in steps["step"].values():
            for _ in range(4):  # past the room that there is, where it begins anew
                step()


def test_both_models_have_as_many_weights(monkeypatch):
    transformers = pytest.importorskip("transformers", reason="is the peer")
    monkeypatch.setattr(decode, "_DEVICE", "cpu")
    monkeypatch.setitem(decode.MODELS, "tiny", TINY)
    decoder = decode._random_decoder("tiny")
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY))
    sizes = [sum({id(p): p.numel() for p in each.parameters()}.values()) for each in (decoder, theirs)]
    assert sizes[0] == sizes[1]


def test_one_text_as_tiles_has_bars():
    case = {"model": "Llama-3.2-1B", "batch": 1, "context": 256, "weights": "bf16", "kv_cache": "bf16"}
    speed, error = decode.bars(case)
    assert (speed.seconds, speed.ratio, speed.peers) == (720e-6, 1.0, ("tilewright, PDL",)) and error.is_about_errors
    (faster,) = decode.bars({**case, "weights": "int4"})
    assert (faster.ratio, faster.peers, faster.ours) == (1.0, ("tilewright, PDL",), ("tilewright, tilesync",))
    assert not decode.bars({**case, "batch": 8})


def test_limits_are_the_bytes_of_a_step():
    case = {"model": "Llama-3.1-8B", "batch": 1, "context": 256, "weights": "bf16", "kv_cache": "bf16"}
    (limit,) = decode.limits(case).values()
    assert limit.bytes / 4276e9 == pytest.approx(3.51e-3, rel=0.01)  # of an H200 at what it copies
    eight, four = (decode.limits({**case, "weights": each})["step"].bytes for each in ("int8", "int4"))
    assert eight == pytest.approx(limit.bytes / 2, rel=0.01) and four / 4276e9 == pytest.approx(0.96e-3, rel=0.03)
    labels = [decode.label(each) for each in decode.cases(quick=False)]
    assert len(set(labels)) == len(labels) == 2 * (3 * 4 + 3) and "decode" in NAMES
