"""Small models of transformers with weights trained on real text, a passage of a source of the standard library."""

import functools
import inspect
import textwrap

import torch

LENGTH, STEPS = 288, 140
KINDS = ("llama", "qwen2", "gpt2")


def passage():
    """Bytes of the beginning of `textwrap`."""
    return list(inspect.getsource(textwrap).encode()[400 : 400 + LENGTH])


@functools.cache
def train(kind):
    """A model in bfloat16 that knows the passage: the likeliest token is then the likeliest by far."""
    import transformers

    common = {"vocab_size": 256, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    shape = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": LENGTH, "tie_word_embeddings": False,
    }  # fmt: skip
    torch.manual_seed(1)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            n_embd=64,
            n_layer=2,
            n_head=4,
            n_positions=LENGTH,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            **common,
        )
        model = transformers.GPT2LMHeadModel(config)
    else:
        name = {"llama": "Llama", "qwen2": "Qwen2"}[kind]
        config = getattr(transformers, f"{name}Config")(**shape, **common)
        model = getattr(transformers, f"{name}ForCausalLM")(config)
    optimizer, batch = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.0), torch.tensor([passage()])
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=STEPS, pct_start=0.1)
    for _ in range(STEPS):
        loss = model(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    assert loss < 0.05
    return model.bfloat16().eval()
