"""How many floating-point operations a model takes, by every convention in use, and what share of a peak that is.

One multiply-accumulate is two FLOPs. People disagree on three things and none of them is wrong: whether attention is
counted under its causal mask, whether embeddings count as parameters, and whether the matmuls are counted one by one
or as 6N. So every figure names its convention.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tilewright.errors import UserError
from tilewright.hardware import Accelerator
from tilewright.plan.decoder import Decoder

RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class Matmul:
    """A matmul of a step: (m x k) by (k x n), `count` times; forward, for `m` tokens."""

    name: str
    m: int
    n: int
    k: int
    count: int = 1
    active: float = 1.0  # share of the `count` that a token meets

    @property
    def flops_per_token(self) -> float:
        return 2 * self.n * self.k * self.count * self.active


def matmuls(decoder: Decoder, tokens: int, tensor: int = 1, expert: int = 1) -> Iterator[Matmul]:
    """Every matmul with a weight of one forward pass over `tokens` tokens, on one of `tensor` ranks.

    Of `expert` ranks, each with as many tokens, those of `tensor` among them, every one has a part of the experts, and
    takes the tokens of all.

    >>> from tilewright.plan.decoder import load
    >>> [(p.name, p.n, p.k, p.count) for p in matmuls(load("125m"), 1)][2:]
    [('up', 3072, 768, 12), ('down', 768, 3072, 12), ('logits', 50368, 768, 1)]
    """
    h, layers = decoder.width, decoder.layers
    for name, columns, rows in decoder.projections(tensor):
        yield Matmul(name, tokens, columns, rows, decoder.attentions)
    ups = 2 if decoder.gated else 1
    sparse = layers - decoder.dense_layers
    if decoder.experts > 1:
        yield Matmul("router", -(-tokens // tensor), decoder.experts + decoder.expert_gates, h, sparse)
        taken = expert * tokens * decoder.active_experts
        met = min(decoder.experts // (tensor * expert), taken)  # that work here: few tokens cannot meet all
        seen = -(-taken // (tensor * expert * met))  # tokens that one of them sees
        active = decoder.active_experts / met
        yield Matmul("expert up", seen, ups * decoder.ffn, h, sparse * met, active)
        yield Matmul("expert down", seen, h, decoder.ffn, sparse * met, active)
        if decoder.shared_ffn:
            yield Matmul("shared up", tokens, ups * decoder.shared_ffn // tensor, h, sparse)
            yield Matmul("shared down", tokens, h, decoder.shared_ffn // tensor, sparse)
    dense = layers if decoder.experts == 1 else decoder.dense_layers
    if dense:
        ffn = decoder.ffn if decoder.experts == 1 else decoder.dense_ffn or decoder.ffn
        yield Matmul("up", tokens, ups * ffn // tensor, h, dense)
        yield Matmul("down", tokens, h, ffn // tensor, dense)
    if decoder.head:
        yield Matmul("logits", tokens, -(-decoder.vocabulary // tensor), h)  # padded to whole ranks


def attention_flops(decoder: Decoder, causal: bool = False) -> float:
    """Forward FLOPs a token of the two matmuls inside attention, all layers: 4·L·a·d·s, half of it under the mask.

    A decoder that attends to an encoder has 4·a·d·s more a layer: the mask is not about the source.
    """
    seen = decoder.layers * decoder.context(causal) + decoder.cross_layers * decoder.sequence
    return 4 * decoder.heads * decoder.attention_dim * seen


def forward_flops(decoder: Decoder, causal: bool = False) -> float:
    """Forward FLOPs a token, matmul by matmul."""
    return sum(p.flops_per_token for p in matmuls(decoder, 1)) + attention_flops(decoder, causal)


@dataclass(frozen=True)
class Convention:
    """A way to count the FLOPs of training on one token."""

    name: str
    formula: str
    model: float  # what the model needs
    hardware: dict[str, float]  # what the device does, by kind of recompute

    def macs(self) -> float:
        return self.model / 2


DEFAULT = "6N + attention"
_NO_MASK = "the same as without the mask: an encoder has none"


def conventions(decoder: Decoder) -> dict[str, Convention]:
    """FLOPs a token of forward and backward, by convention; DEFAULT is the one that published MFUs mostly mean.

    >>> from tilewright.plan.decoder import load
    >>> conventions(load("7b"))[DEFAULT].model == 6 * load("7b").parameters + 12 * 32 * 4096 * 2048
    True
    """
    n = decoder.active_parameters
    attention = 3 * attention_flops(decoder)
    causal = 3 * attention_flops(decoder, causal=True)
    rest = n - decoder.embedding_parameters
    found = {}
    for name, formula, body, inside in (
        (DEFAULT, "6N + 12·L·a·d·s", 6 * n, attention),
        ("6N + causal attention", "6N + 6·L·a·d·s" if decoder.causal else _NO_MASK, 6 * n, causal),
        ("6N", "6N", 6 * n, 0.0),
        ("6N without embeddings", "6(N - embeddings) + 12·L·a·d·s", 6 * rest, attention),
    ):
        model = body + inside
        hardware = {"none": model, "selective": model + inside / 3, "full": model * 4 / 3}
        found[name] = Convention(name, formula, model, hardware)
    logits = 2 * decoder.head_weights
    for name, formula, is_causal in (
        ("matmuls", "3 x every matmul; GPT: 72·s·L·h²(1 + s/6h + v/12hL) a sequence", False),
        ("matmuls, causal", "the same with half of attention" if decoder.causal else _NO_MASK, True),
    ):
        forward = forward_flops(decoder, is_causal)
        inner = 3 * attention_flops(decoder, is_causal)
        # Selective recompute as its paper counts it: s/6h becomes s/3h, attention twice.
        hardware = {"none": 3 * forward, "selective": 3 * forward + inner, "full": 4 * forward - logits}
        found[name] = Convention(name, formula, 3 * forward, hardware)
    return found


@dataclass(frozen=True)
class Utilisation:
    """A measured speed under one convention, a GPU."""

    convention: Convention
    model_flops: float  # a second
    hardware_flops: float
    mfu: float
    hfu: float
    of_best: float | None  # model FLOPs over the best matmul that anybody measured on this chip


def utilisation(
    decoder: Decoder,
    tokens_per_second: float,
    gpus: int,
    peak_flops: float,
    *,
    recompute: str = "none",
    best_flops: float | None = None,
) -> dict[str, Utilisation]:
    """TFLOPS, MFU and HFU of `tokens_per_second` on all `gpus` together, under every convention."""
    if not (tokens_per_second > 0 and gpus >= 1 and peak_flops > 0):
        raise UserError("Give a speed, a number of GPUs and a peak, all above 0.")
    if recompute not in RECOMPUTE:
        raise UserError(f"recompute is {recompute!r}; choose {', '.join(RECOMPUTE)}.")
    rate = tokens_per_second / gpus
    found = {}
    for name, convention in conventions(decoder).items():
        model, hardware = rate * convention.model, rate * convention.hardware[recompute]
        found[name] = Utilisation(
            convention, model, hardware, model / peak_flops, hardware / peak_flops,
            model / best_flops if best_flops else None,
        )  # fmt: skip
    return found


def check_possible(
    found: dict[str, Utilisation], decoder: Decoder, gpus: int, dtype: str, accelerator: Accelerator | None
) -> None:
    """Refuse a speed that would take more than the whole peak, however FLOPs are counted, and name likely mistakes."""
    share = found["matmuls, causal"].hfu  # the fewest FLOPs that the device can have done
    if share <= 1.0:
        return
    guesses = []
    if (
        accelerator is not None
        and dtype != "fp8"
        and share * accelerator.peak_flops.get(dtype, 0.0) <= (accelerator.peak_flops.get("fp8", 0.0))
    ):
        guesses.append("the run was in fp8 (give --dtype fp8)")
    if share <= 2.0:
        guesses.append("tokens are counted twice")
        guesses.append("the peak is half of what it should be: never a sparse one, but of another dtype")
    if gpus == 1 and share > 1.5:
        guesses.append("the speed is that of several GPUs (give --gpus)")
    guesses.append(f"the sequence is not {decoder.sequence:,} (give sequence=...)")
    guesses.append("the accelerator is another one")
    raise UserError(f"It comes out at {share:.0%} of the peak, which cannot be. Likely: {'; '.join(guesses)}.")
