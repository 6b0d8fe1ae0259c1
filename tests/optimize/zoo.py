"""Tiny models with random weights, of every family that users bring, and what a training step of each is.

`python tests/optimize/zoo.py` writes how many sites each rule changes in each, for the table in the docs.
"""

from __future__ import annotations

import copy
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

LAYERS, VOCABULARY = 2, 64
RECORD = Path(__file__).parents[2] / "results" / "optimize_sites.json"
_DECODER = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "attention_dropout": 0.0,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "use_cache": False,
}  # fmt: skip
_ENCODER = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


def _hf(model: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        torch.manual_seed(0)
        transformers.logging.set_verbosity_error()
        return getattr(transformers, model)(getattr(transformers, config)(**options))

    return build


class NanoGPT(nn.Module):
    """A GPT as many write it: tied head, -1 for what is not trained on, no bias."""

    def __init__(self, width: int = 32, heads: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(64, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(NanoBlock(width, heads, dropout) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        positions = torch.arange(inputs.shape[1], device=inputs.device)
        x = self.drop(self.tokens(inputs) + self.positions(positions))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits, None
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss


class NanoBlock(nn.Module):
    """Attention and MLP, each behind its norm."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, sequence, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).split(width, dim=2)
        q, k, v = (each.view(batch, sequence, self.heads, -1).transpose(1, 2) for each in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(y.transpose(1, 2).contiguous().view(batch, sequence, width)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class Unplanned(nn.Module):
    """A model nobody planned for: norms spelled out in two ways, a rope by halves, a soft cap, a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        width = 24
        self.embed = nn.Parameter(torch.randn(VOCABULARY, width) * 0.2)
        self.scale, self.shift = nn.Parameter(torch.rand(width) + 0.5), nn.Parameter(torch.randn(width) * 0.1)
        self.gain = nn.Parameter(torch.rand(width) * 0.1)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gate_up, self.down = nn.Linear(width, 80, bias=False), nn.Linear(40, width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed[ids]
        centered = x - x.mean(-1, keepdim=True)
        h = centered / (centered.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * self.scale + self.shift
        batch, sequence, width = h.shape
        q, k, v = (each.view(batch, sequence, 3, 8) for each in self.qkv(h).chunk(3, -1))
        angle = torch.outer(torch.arange(sequence).float(), 100.0 ** -(torch.arange(4) / 4)).to(x.dtype)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        q, k = (self._turn(each, cos, sin).transpose(1, 2) for each in (q, k))
        scores = (q @ k.mT / math.sqrt(8)).masked_fill(torch.ones(sequence, sequence).triu(1).bool(), -math.inf)
        y = (scores.softmax(-1) @ v.transpose(1, 2)).transpose(1, 2).reshape(batch, sequence, width)
        x = self.out(y) + x
        h = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-4) * (1 + self.gain)
        gate, up = self.gate_up(h).chunk(2, dim=-1)
        x = x + self.down(gate * torch.sigmoid(gate) * up)
        logits = 5.0 * torch.tanh(self.head(x) / 5.0)
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), ids[:, 1:].reshape(-1), label_smoothing=0.1)
        return {"loss": loss}

    @staticmethod
    def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        one, two = x.chunk(2, dim=-1)
        return torch.cat((one * cos - two * sin, two * cos + one * sin), dim=-1)


def _unplanned() -> nn.Module:
    torch.manual_seed(0)
    return Unplanned()


def _nano() -> nn.Module:
    torch.manual_seed(0)
    return NanoGPT()


def _ids(columns: int = 10, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (2, columns), generator=torch.Generator().manual_seed(seed))


def _language(model: nn.Module) -> Any:
    labels = _ids().clone()
    labels[0, :3] = -100
    return model(input_ids=_ids(), labels=labels).loss


def _nano_loss(model: nn.Module) -> Any:
    targets = _ids(seed=2).clone()
    targets[0, :3] = -1
    return model(_ids(), targets)[1]


def _vision_loss(model: nn.Module) -> Any:
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    return model(pixel_values=pixels.to(next(model.parameters()).dtype), labels=torch.tensor([1, 2])).loss


def _whisper_loss(model: nn.Module) -> Any:
    sound = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(1))
    return model(input_features=sound.to(next(model.parameters()).dtype), labels=_ids()).loss


_VIT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "image_size": 16,
    "patch_size": 4, "num_labels": 5, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
_MODERN = {**_ENCODER, "pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2}
_WHISPER = {
    "vocab_size": VOCABULARY, "num_mel_bins": 8, "encoder_layers": 1, "decoder_layers": 1, "d_model": 32,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "max_source_positions": 16, "max_target_positions": 32, "dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip

# The name, how it is built, and the loss of one training step.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any]]] = {
    "Llama": (_hf("LlamaForCausalLM", "LlamaConfig", **_DECODER), _language),
    "Mistral": (_hf("MistralForCausalLM", "MistralConfig", **_DECODER), _language),
    "Qwen2": (_hf("Qwen2ForCausalLM", "Qwen2Config", **_DECODER), _language),
    "Qwen3": (_hf("Qwen3ForCausalLM", "Qwen3Config", **_DECODER, head_dim=8), _language),
    "Gemma2": (_hf("Gemma2ForCausalLM", "Gemma2Config", **_DECODER, head_dim=8), _language),
    "Gemma3": (_hf("Gemma3ForCausalLM", "Gemma3TextConfig", **_DECODER, head_dim=8), _language),
    "Phi-3": (_hf("Phi3ForCausalLM", "Phi3Config", **_DECODER), _language),
    "GPT-2": (
        _hf("GPT2LMHeadModel", "GPT2Config", vocab_size=VOCABULARY, n_embd=32, n_layer=LAYERS, n_head=4, n_positions=64,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2), _language,
    ),
    "GPT-NeoX": (_hf("GPTNeoXForCausalLM", "GPTNeoXConfig", **_ENCODER, bos_token_id=1, eos_token_id=2), _language),
    "BERT": (_hf("BertForMaskedLM", "BertConfig", **_ENCODER), _language),
    "ModernBERT": (_hf("ModernBertForMaskedLM", "ModernBertConfig", **_MODERN), _language),
    "ViT": (_hf("ViTForImageClassification", "ViTConfig", **_VIT), _vision_loss),
    "T5": (
        _hf("T5ForConditionalGeneration", "T5Config", vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=1,
            num_heads=4, dropout_rate=0.0, decoder_start_token_id=0), _language,
    ),
    "Whisper": (_hf("WhisperForConditionalGeneration", "WhisperConfig", **_WHISPER), _whisper_loss),
    "nanoGPT": (_nano, _nano_loss),
    "unplanned": (_unplanned, lambda model: model(_ids())["loss"]),
}  # fmt: skip


def step(model: nn.Module, loss_of: Callable[[nn.Module], Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of a training step, in float64."""
    model.zero_grad()
    loss = loss_of(model)
    loss.backward()
    found = {name: each.grad.double() for name, each in model.named_parameters() if each.grad is not None}
    return loss.detach().double(), found


def oracle(model: nn.Module, loss_of: Callable[[nn.Module], Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The same in float64 throughout."""
    return step(copy.deepcopy(model).double(), loss_of)


def sites(name: str) -> dict[str, int]:
    """How many sites each rule changes in a model."""
    from tilewright.optimize import optimized
    from tilewright.optimize.rewrite import count

    build, loss_of = MODELS[name]
    model = build().train()
    with optimized(model) as report:
        loss_of(model)
        return count(report.sites)


if __name__ == "__main__":
    found = {name: sites(name) for name in (sys.argv[1:] or MODELS)}
    print(json.dumps(found, indent=2))
    if not sys.argv[1:]:
        RECORD.write_text(json.dumps(found, indent=2) + "\n")
