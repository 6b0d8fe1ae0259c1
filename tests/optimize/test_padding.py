"""Padded batches of Hugging Face's models: no mask in memory, and every row as it was, whatever the loss sees."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tilewright.ops.attention.reference import reference
from tilewright.optimize import api, optimized
from tilewright.optimize.rules import mask as mask_rule
from tilewright.runtime import dispatch

transformers = pytest.importorskip("transformers")

LENGTH = 11
PADDINGS = [
    torch.tensor([[1] * LENGTH, [1] * 4 + [0] * 7, [0] * 3 + [1] * 8]),
    torch.tensor([[0] * 10 + [1], [1] * LENGTH, [0] * 2 + [1] * 5 + [0] * 4]),
]
TINY = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False,
}  # fmt: skip
CASES = [
    ("LlamaForCausalLM", {}, "none", "causal, padding, 2 queries a key"),
    ("MistralForCausalLM", {"sliding_window": 5}, "aot_eager", "window of 5, padding, 2 queries a key"),
    ("BertForMaskedLM", {}, "none", "nothing hidden, padding"),
    ("MistralForCausalLM", {"sliding_window": 5, "checkpointed": True}, "none",
     "window of 5, padding, 2 queries a key"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _by_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where our kernels would run, their definition does."""
    if torch.cuda.is_available():
        pytest.skip("these tensors are on the CPU, and beside a GPU nothing interprets kernels")
    monkeypatch.setattr(dispatch, "INTERPRETED", True)
    monkeypatch.setattr(mask_rule, "attention", reference)
    monkeypatch.setattr(api, "MODES", (*api.MODES, "aot_eager"))
    transformers.logging.set_verbosity_error()
    torch._dynamo.reset()


def _step(model: nn.Module, tokens: Tensor, seen: Tensor) -> list[Tensor]:
    """The logits and gradients of a loss that sees padding, too."""
    out = model(input_ids=tokens, attention_mask=seen, labels=tokens)
    model.zero_grad()
    out.loss.backward()
    return [out.logits.detach(), *(each.grad.clone() for each in model.parameters() if each.grad is not None)]


@pytest.mark.parametrize(("kind", "options", "compile", "detail"), CASES)
def test_a_padded_batch_is_what_it_was(kind: str, options: dict[str, Any], compile: str, detail: str) -> None:
    torch.manual_seed(0)
    config = kind.split("For")[0] + "Config"
    more = {name: value for name, value in options.items() if name != "checkpointed"}
    model = getattr(transformers, kind)(getattr(transformers, config)(**TINY, **more)).bfloat16().train()
    if options.get("checkpointed"):
        model.gradient_checkpointing_enable()
    plain, double = copy.deepcopy(model), copy.deepcopy(model).double()
    tokens = torch.randint(3, 64, (3, LENGTH))
    with optimized(model, rules=["mask"], compile=compile) as report:
        for seen in PADDINGS:
            steps = (_step(each, tokens, seen) for each in (model, plain, double))
            for ours, theirs, true in zip(*steps, strict=True):
                assert (ours - true).norm() <= 2 * (theirs - true).norm() + 2**-8 * true.norm()
    assert [site.detail for site in report.changed] == [detail], f"{report}"
    assert len(report.captured.graphs) == 1 and not report.captured.failures
