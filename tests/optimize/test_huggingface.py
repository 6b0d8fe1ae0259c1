"""A local Hugging Face folder becomes a model to tune; nothing of it is run, and every mistake is one sentence."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from tilewright.errors import UserError
from tilewright.optimize.huggingface import build
from tilewright.tune.model_name import with_arguments
from tilewright.tune.own_model import load

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def test_a_config_alone_has_random_weights_and_a_batch(folder: Path) -> None:
    model, batch = build(str(folder), batch=3, dtype="bf16")
    assert batch["input_ids"].shape == (3, 32) and model(**batch).loss.requires_grad
    assert next(model.parameters()).dtype == torch.bfloat16


def test_safetensors_are_read(folder: Path) -> None:
    first, _ = build(str(folder))
    first.save_pretrained(folder)
    second, batch = build(str(folder), sequence=8)
    assert batch["labels"].shape == (8, 8)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_a_folder_with_any_name_goes_through_the_models_text(folder: Path) -> None:
    odd = folder / "a,b=c:d é"
    odd.mkdir()
    (odd / "config.json").write_text(json.dumps(LLAMA))
    text = with_arguments("tilewright.optimize.huggingface:build", [f"folder={odd}", "batch=2", "sequence=4"])
    assert load(text).batch.rows == 2


class _Canary:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('a pickle ran')",)


def _with(**changes: Any) -> Any:
    return lambda folder: (folder / "config.json").write_text(json.dumps({**LLAMA, **changes}))


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "is no JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), "no JSON object"),
        (lambda folder: (folder / "config.json").write_text(" " * (1 << 20) + "{}"), "more than 1,048,576 bytes"),
        (_with(model_type="nonsense"), "no causal language model"),
        (_with(model_type=["llama"]), "no causal language model"),
        (_with(hidden_size=-1), "cannot build|is|must"),
        (_with(vocab_size=1 << 40), "GB of weights"),
        (_with(quantization_config={"bits": 4}), "quantised"),
        (lambda folder: (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_Canary())), "a pickle"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"nonsense"), "cannot build"),
    ],
)
def test_a_wrong_folder_is_a_sentence(folder: Path, spoil: Any, word: str) -> None:
    spoil(folder)
    with pytest.raises(UserError, match=word) as caught:
        build(str(folder))
    assert "\n" not in str(caught.value)


def test_code_of_the_folder_does_not_run(folder: Path) -> None:
    (folder / "evil.py").write_text("raise SystemExit('code of the folder ran')")
    (folder / "config.json").write_text(json.dumps({**LLAMA, "auto_map": {"AutoModelForCausalLM": "evil.Evil"}}))
    model, _ = build(str(folder), sequence=4)
    assert type(model).__name__ == "LlamaForCausalLM"


def test_what_is_no_folder_or_too_long_is_a_sentence(folder: Path) -> None:
    with pytest.raises(UserError, match="is no folder"):
        build(str(folder / "config.json"))
    with pytest.raises(UserError, match="at most 32 tokens"):
        build(str(folder), sequence=33)
    with pytest.raises(UserError, match="choose fp32, bf16, fp16"):
        build(str(folder), dtype="int4")
