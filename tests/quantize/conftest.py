"""A small Llama, trained here on Python's own sources for a few seconds, that all tests of quality share."""

import fcntl
import json

import pytest
import torch

from tilewright.measure.corpus import corpus
from tilewright.runtime import dispatch
from tilewright.train.export import byte_tokenizer

STEPS, BATCH, LENGTH = 120, 8, 64
SHAPE = dict(
    vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _as_on_a_cpu(monkeypatch):
    """Run the ops as a user's CPU does, not under Triton's interpreter, which is slow and has tests of its own."""
    monkeypatch.setattr(dispatch, "INTERPRETED", False)


def _train(folder):
    transformers = pytest.importorskip("transformers", reason="trains a Llama of its own")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))
    text = torch.tensor(list(corpus(1 << 18)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = 6e-3 * min(1.0, (step + 1) / 10) * (1 - step / STEPS)
        starts = torch.randint(len(text) - LENGTH, (BATCH,)).tolist()
        tokens = torch.stack([text[start : start + LENGTH] for start in starts])
        logits = model(tokens).logits[:, :-1]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval().save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """The folder of the trained model; trained once, however many processes run tests."""
    folder = tmp_path_factory.getbasetemp().parent / "trained-llama"
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "tokenizer.json").exists():
            folder.mkdir(exist_ok=True)
            _train(folder)
    return folder


@pytest.fixture(scope="session")
def model(trained):
    """The trained model; a test that changes it makes a copy."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(trained).eval()


@pytest.fixture(scope="session")
def text():
    """(windows to calibrate on, windows to measure on) of 64 tokens, of other places of the same sources."""
    bytes_ = torch.tensor(list(corpus((1 << 18) + 64 * 48)))
    return bytes_[: 64 * 48].view(48, 64), bytes_[1 << 18 :].view(48, 64)
