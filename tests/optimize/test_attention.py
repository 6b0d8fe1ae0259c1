"""Attention without a mask by the kernels of a Hopper, and the windows of Hugging Face's models."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilewright.ops.attention.reference import reference
from tilewright.optimize import optimized
from tilewright.optimize.report import Report
from tilewright.optimize.rules import attention as rule
from tilewright.optimize.rules import mask as mask_rule
from tilewright.runtime import dispatch

BATCH, SEQUENCE = 3, 11


@pytest.fixture(autouse=True)
def _on_a_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as the rule is told; the definition computes."""
    monkeypatch.setattr(rule, "is_there", lambda *kind: True)
    monkeypatch.setattr(rule, "HOST_BOUND", -1)
    monkeypatch.setattr(rule, "FEWEST_KEYS", 0)
    monkeypatch.setattr(rule, "attention", reference)
    torch._dynamo.reset()


class _Attention(nn.Module):
    def __init__(self, heads: int = 4, key_heads: int = 4, head_dim: int = 64, repeats: bool = False, **given: Any):
        super().__init__()
        torch.manual_seed(0)
        self.heads, self.key_heads, self.head_dim, self.repeats, self.given = heads, key_heads, head_dim, repeats, given
        self.qkv = nn.Linear(24, (heads + 2 * key_heads) * head_dim)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = parts.split((self.heads, self.key_heads, self.key_heads), 1)
        if self.repeats:
            k, v = (each.repeat_interleave(self.heads // self.key_heads, 1) for each in (k, v))
        shared = {"enable_gqa": True} if k.shape[1] != self.heads else {}
        return F.scaled_dot_product_attention(q, k, v, **shared, **self.given)


def _grads(model: nn.Module, x: Tensor) -> list[Tensor]:
    out = model(x)
    model.zero_grad()
    (out * torch.linspace(-1, 1, out.numel()).to(out).view(out.shape)).sum().backward()
    return [out.detach(), *(each.grad.clone() for each in model.parameters() if each.grad is not None)]


def _details(report: Report, name: str = "attention") -> list[str]:
    return sorted(site.detail for site in report.changed if site.rule == name)


SITES = {
    "causal, heads of 64": _Attention(is_causal=True),
    "full, heads of 128": _Attention(head_dim=128, heads=2, key_heads=2),
    "causal, heads of 64, 2 queries a key": _Attention(key_heads=2, is_causal=True),
    "full, heads of 64, 4 queries a key": _Attention(key_heads=1, repeats=True, scale=0.3),
}


@pytest.mark.parametrize("detail", SITES)
def test_what_the_kernels_take_is_found(detail: str) -> None:
    model, x = copy.deepcopy(SITES[detail]).bfloat16(), torch.randn(BATCH, SEQUENCE, 24).bfloat16()
    true, theirs = _grads(copy.deepcopy(model).double(), x.double()), _grads(model, x)
    with optimized(model, rules=["attention"]) as report:
        found = _grads(model, x)
    assert _details(report) == [detail], f"{report}"
    for one, plain, truth in zip(found, theirs, true, strict=True):
        assert (one - truth).norm() <= 2 * (plain - truth).norm() + 2**-8 * truth.norm()


def test_under_autocast_the_kernels_take_what_is_cast() -> None:
    model, x = _Attention(is_causal=True), torch.randn(BATCH, SEQUENCE, 24)
    with torch.autocast("cpu", torch.bfloat16), optimized(model, rules=["attention"]) as report:
        model(x)
    assert _details(report) == ["causal, heads of 64"]
    with optimized(model, rules=["attention"]) as report:
        model(x)
    assert [site.declined for site in report.sites] == ["the kernels take bfloat16 or float16, and heads of 64 or 128"]


DECLINED = {
    "without a mask and dropout": lambda: _Attention(dropout_p=0.5),
    "heads of 64 or 128": lambda: _Attention(head_dim=32),
}


@pytest.mark.parametrize("why", DECLINED)
def test_what_they_do_not_take_is_left_with_a_reason(why: str) -> None:
    model = DECLINED[why]().bfloat16()
    with optimized(model, rules=["attention"]) as report:
        model(torch.randn(BATCH, SEQUENCE, 24).bfloat16())
    assert not report.changed and why in report.sites[0].declined


@pytest.mark.parametrize(("name", "value", "why"), [
    ("is_there", lambda *kind: False, "for a Hopper"), ("HOST_BOUND", 2**40, "not worth a kernel"),
    ("FEWEST_KEYS", SEQUENCE + 1, "not worth a kernel"),
])  # fmt: skip
def test_where_nothing_is_gained_it_stays(name: str, value: Any, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule, name, value)
    model = _Attention().bfloat16()
    with optimized(model, rules=["attention"]) as report:
        model(torch.randn(BATCH, SEQUENCE, 24).bfloat16())
    assert not report.changed and why in report.sites[0].declined


_TINY = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64, "sliding_window": 5, "use_cache": False,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODELS = {
    "Mistral": ("MistralForCausalLM", "MistralConfig", {}, ["window of 5, 4 queries a key"] * 2),
    "Gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {"layer_types": ["sliding_attention", "full_attention"]},
               ["causal, 4 queries a key", "window of 5, 4 queries a key"]),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_windows_of_hugging_faces_models_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(dispatch, "INTERPRETED", True)
    monkeypatch.setattr(mask_rule, "attention", reference)
    kind, config, more, expected = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config)(**_TINY, **more)).bfloat16()
    tokens = torch.randint(3, 64, (2, 13))
    truth = model(input_ids=tokens).logits
    with optimized(model, rules=["mask"]) as report:
        found = model(input_ids=tokens).logits
    assert _details(report, "mask") == expected, f"{report}"
    assert (found - truth).norm() <= 0.02 * truth.norm()
