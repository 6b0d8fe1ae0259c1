"""Tiny models of transformers with random weights, saved as it saves them."""

import pytest
import torch

SHAPE = dict(
    vocab_size=96, hidden_size=32, intermediate_size=56, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=160, bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
MODELS = {
    "llama": ("Llama", {}),
    "llama3, tied": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama, biases, linear": ("Llama", {
        "attention_bias": True, "mlp_bias": True, "head_dim": 12,
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
    }),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "gpt2": ("GPT2", None),
}  # fmt: skip
GPT2 = dict(
    vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=160, bos_token_id=None, eos_token_id=None
)  # fmt: skip


def tiny(name, **fields):
    """A model of transformers in evaluation mode, in float32."""
    transformers = pytest.importorskip("transformers", reason="is the other side of the comparison")
    kind, changes = MODELS[name]
    torch.manual_seed(0)
    given = {**(GPT2 if changes is None else {**SHAPE, **changes}), **fields}
    class_ = getattr(transformers, "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")
    model = class_(getattr(transformers, f"{kind}Config")(**given)).eval()
    with torch.no_grad():  # as they come, norms and biases are ones and zeros and would hide a mistake
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.15)
    return model


def theirs(model, prompt, tokens, **options):
    """What transformers' own generate gives, prompt left out."""
    ids = torch.tensor([prompt])
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, pad_token_id=0, **options
    )  # fmt: skip
    return found[0, len(prompt) :].tolist()
