"""Our attention by its name in transformers, against sdpa and eager: windows, soft-caps, padding, caches."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest
import torch
from torch import nn

from tilewright import ops
from tilewright.errors import UserError
from tilewright.optimize import attention_interface as interface
from tilewright.optimize.huggingface import register_attention
from tilewright.runtime import dispatch

transformers = pytest.importorskip("transformers")

RELEASE = tuple(int(part) for part in version("transformers").split(".")[:2])
TINY = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "attn_implementation": "sdpa",
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", "LlamaConfig", {}),
    "Mistral": ("MistralForCausalLM", "MistralConfig", {"sliding_window": 5}),
    "Gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {"sliding_window": 5, "attn_logit_softcapping": 2.0,
                                                     "attn_implementation": "eager"}),
    "Gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig",
               {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}),
}  # fmt: skip
LENGTH = 11
PADDINGS = {
    "none": [[1] * LENGTH] * 3,
    "behind": [[1] * LENGTH, [1] * 4 + [0] * 7, [1] + [0] * 10],
    "in front": [[0] * 3 + [1] * 8, [1] * LENGTH, [0] * 10 + [1]],
    "on both sides": [[0] * 3 + [1] * 6 + [0] * 2, [1] * LENGTH, [1] * LENGTH],
    "with a hole": [[1] * 4 + [0] * 2 + [1] * 5, [1] * LENGTH, [1] * LENGTH],
}


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    transformers.logging.set_verbosity_error()
    register_attention()


@pytest.fixture(autouse=True)
def _by_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernels compute is for the tests of the op."""
    monkeypatch.setattr(dispatch, "INTERPRETED", False)


def _build(name: str) -> nn.Module:
    kind, config, more = MODELS[name]
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, kind)(getattr(transformers, config)(**{**TINY, **more}))
    return model if name == "Gemma2" else model.double()  # whose eager softmax is in float32


def _grads(model: nn.Module, **given: Any) -> list[torch.Tensor]:
    """Logits of tokens, not of padding, and the gradients of their sum in squares."""
    seen = given.get("attention_mask")
    logits = model(**given, use_cache=False).logits
    logits = logits if seen is None else logits[seen.bool()]
    model.zero_grad()
    logits.square().sum().backward()
    return [logits.detach(), *(each.grad.clone() for each in model.parameters() if each.grad is not None)]


def _assert_same(model: nn.Module, **given: Any) -> None:
    expected = _grads(model, **given)
    model.set_attn_implementation("tilewright")
    unit = 1e-9 if expected[0].dtype == torch.float64 else 1e-4
    for found, truth in zip(_grads(model, **given), expected, strict=True):
        torch.testing.assert_close(found, truth, rtol=unit, atol=unit * float(truth.abs().max()))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("padding", PADDINGS)
def test_a_model_computes_what_it_did(name: str, padding: str) -> None:
    """In float64: whatever is masked is masked alike."""
    tokens = torch.randint(3, 64, (3, LENGTH))
    _assert_same(_build(name), input_ids=tokens, attention_mask=torch.tensor(PADDINGS[padding]))


@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_packed_positions_stay_apart(name: str) -> None:
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6]])
    _assert_same(_build(name), input_ids=torch.randint(3, 64, (1, LENGTH)), position_ids=positions)


def test_a_mask_of_the_users_own_is_taken_as_it_is() -> None:
    seen = (torch.rand(2, 1, LENGTH, LENGTH) < 0.7) | torch.eye(LENGTH, dtype=torch.bool)
    model, tokens = _build("Llama"), torch.randint(3, 64, (2, LENGTH))
    truth = model(input_ids=tokens, attention_mask=seen).logits
    model.set_attn_implementation("tilewright")
    torch.testing.assert_close(model(input_ids=tokens, attention_mask=seen).logits, truth)


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma3"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_what_is_generated_is_the_same(name: str, cache: str) -> None:
    model = _build(name).eval()
    tokens, seen = torch.randint(3, 64, (2, 7)), torch.tensor([[1] * 7, [0] * 3 + [1] * 4])
    told = {"attention_mask": seen, "max_new_tokens": 6, "do_sample": False, "cache_implementation": cache}
    told |= {"disable_compile": True}
    truth = model.generate(tokens, **told)
    model.set_attn_implementation("tilewright")
    if (name, cache) == ("Mistral", "static") and RELEASE < (5, 23):
        with pytest.raises(UserError, match=r"from transformers 5\.23 on; update it"):
            model.generate(tokens, **told)
        return
    assert torch.equal(model.generate(tokens, **told), truth)


def test_the_kernels_are_told_of_windows_and_of_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """By Triton's interpreter, in float32."""
    if torch.cuda.is_available():
        pytest.skip("these tensors are on the CPU, and beside a GPU nothing interprets kernels")
    monkeypatch.setattr(dispatch, "INTERPRETED", True)
    model, tokens = _build("Gemma2").float(), torch.randint(3, 64, (2, LENGTH))
    seen = torch.tensor([[1] * LENGTH, [0] * 7 + [1] * 4])
    truth = model(input_ids=tokens, attention_mask=seen).logits
    model.set_attn_implementation("tilewright")
    with ops.explain() as paths:
        found = model(input_ids=tokens, attention_mask=seen).logits
    assert [path.ran for path in paths if path.op == "attention"] == ["triton"] * len(list(paths))
    torch.testing.assert_close(found[seen.bool()], truth[seen.bool()], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "packing"), [("Llama", "cpu"), ("Llama", "cuda"), ("Mistral", "cpu")])
@pytest.mark.parametrize("padding", PADDINGS)
def test_a_padded_model_computes_what_it_did_where_nobody_may_wait(
    name: str, packing: str, padding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a captured graph, by packed sequences and by hidden keys. In float64, gradients too."""
    monkeypatch.setattr(interface, "_is_captured", lambda padding: True)
    monkeypatch.setattr(interface, "_PACKING", (packing,))
    tokens = torch.randint(3, 64, (3, LENGTH))
    _assert_same(_build(name), input_ids=tokens, attention_mask=torch.tensor(PADDINGS[padding]))


def test_a_compiler_sees_it_whole() -> None:
    """Once for whatever is padded."""
    for name in ("Mistral", "Llama"):
        torch._dynamo.reset()
        model, tokens = _build(name), torch.randint(3, 64, (3, LENGTH))
        masks = [torch.tensor(PADDINGS[padding]) for padding in ("none", "in front", "with a hole")]
        truths = [model(input_ids=tokens, attention_mask=seen, use_cache=False).logits[seen.bool()] for seen in masks]
        model.set_attn_implementation("tilewright")
        with torch._dynamo.config.patch(error_on_recompile=True):
            compiled = torch.compile(model, fullgraph=True, backend="eager")
            for seen, truth in zip(masks, truths, strict=True):
                found = compiled(input_ids=tokens, attention_mask=seen, use_cache=False).logits[seen.bool()]
                torch.testing.assert_close(found, truth)


def test_a_plain_mask_is_no_matrix() -> None:
    given = {"batch_size": 3, "q_length": 4, "kv_length": 4, "q_offset": 0, "kv_offset": 0}
    told = {**given, "allow_is_causal_skip": True}
    assert interface.make_mask(**told, local_size=3) == interface.Mask(2)
    padding = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]]).bool()
    padded = interface.make_mask(**told, attention_mask=padding)
    assert isinstance(padded, interface.Mask) and padded.starts is not None
    assert padded.starts.tolist() == [0, 1, 3, 4, 4, 8, 8, 8, 8, 12] and padded.starts.dtype == torch.int32
    chunked = transformers.LlamaConfig()
    chunked.attention_chunk_size = 2
    for other in ({**given}, {**told, "q_offset": 1}, {**told, "config": chunked, "local_size": 2}):
        assert not isinstance(interface.make_mask(**other), interface.Mask)


def test_what_it_does_not_know_is_one_sentence() -> None:
    q = torch.randn(1, 2, 3, 16)
    with pytest.raises(UserError, match="has no s_aux; load the model with attn_implementation='sdpa'"):
        interface.attend(nn.Module(), q, q, q, None, s_aux=q)
    for name in ("sdpa_fast", "eager", "", "my flash"):
        with pytest.raises(UserError, match="is no name for an attention"):
            register_attention(name)
