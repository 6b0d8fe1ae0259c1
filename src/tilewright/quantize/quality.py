"""What quantizing costs a language model: both models read the same text, and what they predict is compared."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.errors import UserError
from tilewright.quantize.samples import evaluation

_ROWS = 256  # of logits that become float32 at a time


@dataclass(frozen=True)
class Quality:
    """How near the predictions of a quantized model are to those of the model it was.

    Attributes:
        tokens: how many predictions were compared.
        perplexity, quantized_perplexity: of either model on the text.
        divergence: the mean Kullback-Leibler divergence of the quantized model's probabilities from the model's, in
            nats a token; 0 where they agree. It shows damage earlier than the perplexity, which errors can also lower.
        largest_divergence: that of the worst token.
        agreement: how often both find the same token the most likely one, from 0 to 1.

    >>> print(Quality(2048, 12.0, 12.06, 0.002, 0.03, 0.985))
    2,048 tokens: perplexity 12.000 to 12.060 (+0.50%), divergence 0.0020 nats (at most 0.0300), same first choice 98.5%
    """

    tokens: int
    perplexity: float
    quantized_perplexity: float
    divergence: float
    largest_divergence: float
    agreement: float

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        change = self.quantized_perplexity / self.perplexity - 1
        return (
            f"{self.tokens:,} tokens: perplexity {self.perplexity:.3f} to {self.quantized_perplexity:.3f} "
            f"({change:+.2%}), divergence {self.divergence:.4f} nats (at most {self.largest_divergence:.4f}), "
            f"same first choice {self.agreement:.1%}"
        )


def check_quality(model: torch.nn.Module, quantized: torch.nn.Module, tokens: Tensor) -> Quality:
    """Let two language models predict each token of a text from those before it, and compare the predictions.

    Args:
        model: the model as it was. Called with ``(1, length)`` tokens, it returns logits of ``(1, length,
            vocabulary)``, or a tuple that begins with them, or an object with ``logits``, as Hugging Face's do.
        quantized: a copy of it that `quantize_` has changed; it may be on another device.
        tokens: ``(windows, length)`` of integers: text of the kind that the model is used on, a few thousand tokens.

    Neither model keeps gradients, and both are as they were in the end.

    >>> import copy
    >>> from tilewright.quantize import Int8, quantize_
    >>> model = torch.nn.Sequential(torch.nn.Embedding(50, 32), torch.nn.Linear(32, 50))
    >>> quantized = copy.deepcopy(model)
    >>> report = quantize_(quantized, Int8())
    >>> quality = check_quality(model, quantized, torch.randint(50, (2, 16)))
    >>> quality.tokens, quality.divergence < 1e-3
    (30, True)
    """
    _check_tokens(tokens, model)
    comparison = Comparison()
    with torch.no_grad(), evaluation(model), evaluation(quantized):
        for window in tokens:
            truth, found = _logits(model, window, "The model"), _logits(quantized, window, "The quantized model")
            comparison.add(truth, found, window)
    return comparison.quality()


class Comparison:
    """The sums that a `Quality` is made of."""

    def __init__(self) -> None:
        self._tokens = 0
        self._entropy = self._quantized_entropy = self._divergence = self._worst = self._same = 0.0

    def add(self, truth: Tensor, found: Tensor, window: Tensor) -> None:
        """Take both models' logits ``(length, vocabulary)`` of a window of tokens, a few rows at a time."""
        if truth.shape != found.shape:
            raise UserError(
                f"The model has logits of {tuple(truth.shape)} and the quantized one of {tuple(found.shape)}; give a "
                "copy of the same model."
            )
        if any(bool((each.isnan() | (each == math.inf)).any()) for each in (truth, found)):
            raise UserError("A model's logits are NaN or Inf; give a model and a dtype that do not overflow.")
        following = window[1:].to(truth.device, torch.int64)
        for first in range(0, len(following), _ROWS):
            rows = slice(first, min(first + _ROWS, len(following)))
            self._add(
                truth[rows].float().log_softmax(-1), found[rows].to(truth.device).float().log_softmax(-1),
                following[rows],
            )  # fmt: skip

    def _add(self, truth: Tensor, found: Tensor, following: Tensor) -> None:
        each = _divergence(truth, found)
        self._tokens += len(following)
        self._entropy += F.nll_loss(truth, following, reduction="sum").item()
        self._quantized_entropy += F.nll_loss(found, following, reduction="sum").item()
        self._divergence += each.sum().item()
        self._worst = max(self._worst, each.max().item())
        self._same += (truth.argmax(-1) == found.argmax(-1)).sum().item()

    def quality(self) -> Quality:
        """Return the quality over all that was added."""
        count = self._tokens
        perplexities = _exp(self._entropy / count), _exp(self._quantized_entropy / count)
        return Quality(count, *perplexities, self._divergence / count, self._worst, self._same / count)


def _check_tokens(tokens: Any, model: torch.nn.Module) -> None:
    if not isinstance(tokens, Tensor) or tokens.dtype not in (torch.int64, torch.int32):
        kind = tokens.dtype if isinstance(tokens, Tensor) else type(tokens).__name__
        raise UserError(f"The tokens are {kind}; give a tensor of int64, as a tokenizer makes it.")
    if tokens.ndim != 2 or not len(tokens) or tokens.shape[1] < 2:
        raise UserError(
            f"The tokens have shape {tuple(tokens.shape)}; give (windows, length), with at least 2 tokens a window."
        )
    rows = [each.num_embeddings for each in model.modules() if isinstance(each, torch.nn.Embedding)]
    if rows and not 0 <= int(tokens.min()) <= int(tokens.max()) < max(rows):  # no model says so itself on a GPU
        raise UserError(f"A token is not one of the {max(rows)} that the model has embeddings for; use its tokenizer.")


def _logits(model: torch.nn.Module, window: Tensor, name: str) -> Tensor:
    """Return the logits of a window, (length, vocabulary)."""
    tensor = next((t for t in (*model.parameters(), *model.buffers())), window)
    result = model(window[None].to(tensor.device))
    logits = getattr(result, "logits", result[0] if isinstance(result, tuple) else result)
    if not isinstance(logits, Tensor) or logits.ndim != 3 or logits.shape[:2] != (1, len(window)):
        kind = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else f"type {type(logits).__name__}"
        raise UserError(f"{name} returns logits of {kind}, but (1, {len(window)}, vocabulary) is needed.")
    if int(window.max()) >= logits.shape[2] or int(window.min()) < 0:
        raise UserError(f"A token is not one of the {logits.shape[2]} that {name.lower()} knows; use its tokenizer.")
    if bool(logits.isnan().any()):
        raise UserError(f"{name} returns NaN as a logit; look at its layers with inputs= of quantize_.")
    return logits[0]


def _divergence(truth: Tensor, found: Tensor) -> Tensor:
    """Return the KL divergence of each row of log-probabilities; what is impossible in truth adds nothing."""
    possible = truth > -math.inf
    terms = torch.where(possible, truth.exp() * (truth - found), 0.0)
    return terms.sum(-1, dtype=torch.float64).clamp(min=0)  # below it by rounding alone


def _exp(entropy: float) -> float:
    return math.exp(entropy) if entropy < 700 else math.inf
