"""Every op that one rank runs in a training step: what it costs, how often it runs, what share of a rate it reaches.

`plan.roofline` reads the floors from here, `plan.step` the expected times and `plan.parallel`, through it, those of
many GPUs, so the three cannot disagree. Work has a phase, because traffic hides behind one phase or the other, and a
place, because pipeline stages share the layers.

The shares are constants from an H200, and all that is no arithmetic stands in the tables below. `plan.calibration` says
how other chips differ.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tilewright.plan import cost, sizing
from tilewright.plan.calibration import FITTED
from tilewright.plan.cost import Cost
from tilewright.plan.decoder import Decoder
from tilewright.plan.flops import Matmul, matmuls
from tilewright.plan.memory import logits_at_once, matmul_weights, norm_bytes, optimizer_bytes
from tilewright.plan.training import Training, rank_tokens

CATEGORIES = ("matmul", "attention", "fused", "pointwise", "optimizer", "copy")  # as `measure.profile` tells them

# Shares of the matmuls' rate or, for what memory bounds, of the copy bandwidth. All from an H200: files are those of
# results/h200, profiles of the standard block compiled, 125m at 32 and 1b at 16 sequences.
SHARES = {
    # train_125m.json, train_1b.json; profiles: 65 and 361 ms. Of a matmul whose tiles fill every wave.
    "matmul": 0.93,
    # cuDNN's, which is what torch takes there, by the width of a head. Profiles: 27 and 60 ms; side by side, forward
    # and backward have 519 and 386 TFLOPS at 128.
    "attention 128": 0.62, "attention 128 backward": 0.455, "attention 64": 0.44, "attention 64 backward": 0.39,
    "flash": 0.58,  # of cuDNN's share: FlashAttention-2 side by side with it, 286 and 219 TFLOPS at 128
    "efficient": 0.33,  # of cuDNN's share; train_350m.json, as the next
    "tiles": 0.6,  # of a matmul's share, by tilesync's mma: not measured, what that instruction is to wgmma
    "triton": 0.7,  # of cuDNN's share; on an H200 0.69 to 0.72 by heads of 64 and 128, in a run that is not recorded
    "attention fp32": 0.68,  # of the rate of float32, whose tensors it takes with or without TF32
    "fused": 0.97, "fused loss": 0.74,  # dropout_add_norm.json, activation.json; cross_entropy.json
    "compiled": 0.8, "compiled loss": 0.54,  # the same: of the bytes that one fused kernel would move
    # Of the bytes that separate kernels move: train_125m.json and train_1b.json, standard and eager less compiled.
    "eager": 0.85, "eager loss": 0.85,
    "eager rope": 0.08,  # of the fused kernel's bytes; rope.json
    "optimizer": 0.85,  # profiles: 1 and 11 ms
    "codes": 0.2,  # states in 8 bits are arithmetic; train_350m.json
}  # fmt: skip
# A norm takes its rows one by one: bytes of the stream that each costs beyond its own. dropout_add_norm.json by width.
ROW_ENDS = {"fused": 400, "compiled": 700, "eager": 800}
PHILOX_FLOPS = 140  # a number of torch.compile's dropout; dropout_add_norm.json: compile with dropout and without
ADAFACTOR_BYTES = 92  # a parameter, its passes added up: plain PyTorch in float32
# Of a CPU, roughly, by small models on one Xeon. Its pointwise ops are bound by arithmetic more than by memory, in
# bfloat16 no less than in float32; Tilewright's ops and optimizers are definitions there, in many passes.
CPU_SHARES = {"float32": 0.35, "bfloat16": 0.25, "optimized": 0.8}
CPU_BYTES = {"adamw_8bit": 1500, "other": 300}  # a parameter
CACHED = 256 * 2**20  # bytes that an op may find in the cache of a GPU or a CPU, whose rates nobody has measured


@dataclass(frozen=True)
class How:
    """How a step runs, beyond what `Training` says of it."""

    matmuls: str = "bf16"  # dtype, a key of `Rates.flops`
    recorded: bool = False  # in a CUDA graph
    attention: str = "auto"
    device: str = "cuda"
    multiprocessors: int = 132


@dataclass(frozen=True)
class Work:
    """Ops of one kind on one rank: what one costs, how often it runs, what share of its rate it reaches."""

    name: str
    category: str
    phase: str  # forward, backward or update
    cost: Cost
    calls: float  # in a micro batch; those of an update, in a step
    share: float
    is_matmul: bool = False  # on the tensor cores
    style: str = ""  # whose kernels, where it is not one of the matmuls or attention: a key of SHARES
    may_use: str = ""  # what else it might compute in, for its floor
    dtype: str = ""  # where it is not `How.matmuls`
    at_ends: bool = False  # not in the layers: embedding, last norm, head and loss


def micro_batch_work(decoder: Decoder, training: Training, how: How) -> Iterator[Work]:
    """Forward and backward of one micro batch through all layers, on one of the tensor-parallel ranks.

    >>> from tilewright.plan.decoder import load
    >>> found = list(micro_batch_work(load("125m"), Training(), How()))
    >>> sorted({work.phase for work in found}), {work.category for work in found} <= {*CATEGORIES}
    (['backward', 'forward'], True)
    """
    pointwise = 1.0
    if how.device == "cpu":
        pointwise = CPU_SHARES["float32" if training.compute_bytes == 4 else "bfloat16"]
        pointwise *= CPU_SHARES.get(decoder.gpt_block, 1.0)
    for part in (_matmuls, _adapters, _attention, _norms, _activations, _experts, _loss, _gradients):
        for work in part(decoder, training, how):
            if work.calls:
                yield work if work.is_matmul else dataclasses.replace(work, share=work.share * pointwise)


def update_work(decoder: Decoder, training: Training, how: How, parameters: float) -> Iterator[Work]:
    """The optimizer over the `parameters` whose states this rank keeps, and what accumulation adds."""
    n, stored, name = int(parameters), training.stored_bytes, training.optimizer
    micro_batches = training.accumulation or 1
    if micro_batches > 1:
        added = cost.elementwise(n, 3 * stored, 1)
        yield Work("accumulation", "pointwise", "update", added, micro_batches - 1, SHARES["eager"], style="eager")
    norm = Cost(2 * n, stored * n, 0)
    yield Work("norm of the gradients", "optimizer", "update", norm, 1, SHARES["optimizer"])
    each = 3 * training.stored_bytes + 2 * optimizer_bytes(decoder, training)
    share = SHARES["codes" if name == "adamw_8bit" and how.device == "cuda" else "optimizer"]
    if name == "adafactor":
        each = ADAFACTOR_BYTES
    elif how.device == "cpu" and has_own_optimizer(training):
        each = CPU_BYTES.get(name, CPU_BYTES["other"])
    yield Work("optimizer", "optimizer", "update", cost.elementwise(n, math.ceil(each), 12), 1, share)


def has_own_optimizer(training: Training) -> bool:
    """Whether Tilewright's optimizer runs, and not one of torch's fused ones."""
    return training.has_16_bit_weights or training.optimizer not in ("adamw", "sgd")


def block_of(decoder: Decoder, how: How) -> str:
    """Which ops run: on a CPU, Tilewright's are PyTorch's."""
    return decoder.gpt_block if how.device == "cuda" else "standard"


def _style(decoder: Decoder, training: Training, how: How) -> tuple[str, str]:
    """Whose kernels lie between the matmuls, and their category."""
    if block_of(decoder, how) == "optimized":
        return "fused", "fused"
    return "compiled" if training.compiled else "eager", "pointwise"


def _matmuls(decoder: Decoder, training: Training, how: How) -> Iterator[Work]:
    tokens, c = rank_tokens(decoder, training), training.compute_bytes
    for matmul in matmuls(decoder, tokens, training.tensor, training.expert):
        m, n, k, end = matmul.m, matmul.n, matmul.k, matmul.name == "logits"
        in_tiles = training.mlp_tiles and matmul.name in ("up", "down")
        again = not end and (training.recompute == "full" or in_tiles)
        again = again or (matmul.name == "out" and training.recompute == "selective")
        one = cost.matmul(m, n, k, element_bytes=c)
        forward, backward = (_matmul_share(matmul, how, side) for side in ("forward", "backward"))
        dtype = "bf16" if how.matmuls == "fp8" and (end or matmul.name == "router") else ""
        name, calls = f"{matmul.name} matmul", matmul.count
        tiles = forward * SHARES["tiles"] if in_tiles and how.device == "cuda" else forward
        yield Work(f"{name}, forward", "matmul", "forward", one, calls, tiles, True, dtype=dtype, at_ends=end)
        if again:
            yield Work(f"{name}, recompute", "matmul", "backward", one, calls, forward, True, dtype=dtype, at_ends=end)
        both = 1 if training.lora else 2  # of weights that are not trained there is no gradient
        calls *= both
        yield Work(f"{name}s, backward", "matmul", "backward", one, calls, backward, True, dtype=dtype, at_ends=end)
    if training.loss == "linear_fused" and decoder.head:  # the weight's gradient is added up, a part of the tokens
        logits = c * tokens * decoder.vocabulary  # after the other
        added = math.ceil(logits / logits_at_once(logits, tokens)) - 1
        sums = cost.elementwise(decoder.head_weights // training.tensor, 2 * training.stored_bytes, 0)
        yield Work("sums of the head's gradient", "matmul", "backward", sums, added, 1.0, True, at_ends=True)

    if how.matmuls == "fp8":
        yield from _casts(decoder, training, how)


def _adapters(decoder: Decoder, training: Training, how: How) -> Iterator[Work]:
    """LoRA's two thin matmuls beside each layer, and the sum with its output; backward has four, and two sums."""
    if not training.lora:
        return
    c, r = training.compute_bytes, training.lora
    share = SHARES["compiled" if training.compiled else "eager"]
    for matmul in matmuls(decoder, rank_tokens(decoder, training), training.tensor, training.expert):
        if matmul.name in ("logits", "router"):
            continue
        down = cost.matmul(matmul.m, r, matmul.k, element_bytes=c)
        up = cost.matmul(matmul.m, matmul.n, r, element_bytes=c)
        for side, ways in (("forward", 1), ("backward", 2)):
            added = matmul.m * (matmul.n if side == "forward" else matmul.k)
            style = "compiled" if training.compiled else "eager"
            for one in (down, up):
                yield Work(f"adapters, {side}", "matmul", side, one, ways * matmul.count, share, True)
            sums = cost.elementwise(added, 3 * c, 1)
            yield Work(f"sums with adapters, {side}", "pointwise", side, sums, matmul.count, share, style=style)


def _casts(decoder: Decoder, training: Training, how: How) -> Iterator[Work]:
    """What 8 bits cost beside the matmuls: inputs, gradients and weights are read in 16 bits, and written in 8, twice.

    The second copy is transposed, for the matmul that makes the weight's gradient.
    """
    tokens = rank_tokens(decoder, training)
    for matmul in matmuls(decoder, tokens, training.tensor, training.expert):
        if matmul.name not in ("logits", "router"):
            for side, elements in (("forward", matmul.m * matmul.k), ("backward", matmul.m * matmul.n)):
                one = cost.elementwise(elements + matmul.n * matmul.k // 2, 4, 1)
                yield Work(f"casts to 8 bits, {side}", "fused", side, one, matmul.count, SHARES["fused"], style="fused")


def _matmul_share(matmul: Matmul, how: How, side: str) -> float:
    """The share of the matmuls' rate that one reaches: less where tiles stick out or the last wave is not full.

    Of the two matmuls of a backward, one has the input's shape and the other the weight's.
    """
    if how.device == "cpu":
        return SHARES["matmul"]
    m, n, k = matmul.m, matmul.n, matmul.k
    if side == "forward":
        return SHARES["matmul"] * sizing.reached(m, n, k, how.multiprocessors)
    shapes = ((m, k, n), (n, k, m))
    return SHARES["matmul"] * 2 / sum(1 / sizing.reached(*shape, how.multiprocessors) for shape in shapes)


def _attention(decoder: Decoder, training: Training, how: How) -> Iterator[Work]:
    b, s, t, c = training.micro_batch, decoder.sequence, training.tensor, training.compute_bytes
    heads, kv_heads = decoder.heads // t, decoder.kv_heads_on(t)
    narrow = how.matmuls not in ("fp32", "tf32")
    backend = how.attention if narrow or how.attention == "math" else "efficient"  # others take 16 bits
    again = ("recompute",) if training.recompute == "full" else ()
    kinds = ("attention", decoder.layers, decoder.context(causal=True)), ("cross attention", decoder.cross_layers, s)
    for (kind, layers, context), side in itertools.product(kinds, ("forward", *again, "backward")):
        backward, phase = side == "backward", "forward" if side == "forward" else "backward"
        one = cost.attention(
            b, s // training.context, heads, kv_heads, round(decoder.attention_dim), keys=s, context=context,
            element_bytes=c, backward=backward,
        )  # fmt: skip
        width = 128 if decoder.head_dim > 64 else 64
        share = SHARES[f"attention {width}{' backward' if backward else ''}"]
        wide = how.device == "cuda" and not narrow and backend == "efficient"
        if wide:
            share = SHARES["attention fp32"]
        elif how.device == "cuda":
            share *= SHARES.get(backend, 1.0) * _rising(s)
        yield Work(
            f"{kind}, {side}", "attention", phase, one, layers, share, not wide,
            style=f"attention {width}", may_use="tf32" if wide else "", dtype="bf16" if how.matmuls == "fp8" else "",
        )  # fmt: skip
        if training.attention == "softmax":  # all scores through memory: masked, softmax, rounded
            scores = cost.elementwise(b * heads * s * s // training.context, 6 * c, 6)
            name = f"softmax of {kind}, {side}"
            yield Work(name, "pointwise", phase, scores, layers, SHARES["eager"], style="eager")
    # Gradients of queries, keys and values are put together for the matmul before them; fused, and summed on the way.
    one = cost.elementwise(rank_tokens(decoder, training) * _qkv(decoder, t), 2 * c, 1)
    summed = decoder.qkv_bias and _packs(decoder, training, how)
    style = "fused" if summed else "compiled" if training.compiled else "eager"
    category = "fused" if summed else "pointwise"
    calls = decoder.attentions
    yield Work("gradients of q, k, v packed", category, "backward", one, calls, SHARES[style], style=style)
    if decoder.positions == "rope":
        style, category = _style(decoder, training, how)
        turned = (heads + 1, decoder.rope_dim) if decoder.kv_rank else (heads + kv_heads, decoder.head_dim)
        one = cost.rope(rank_tokens(decoder, training), *turned, element_bytes=c)
        share = SHARES["eager rope" if style == "eager" else style]
        yield Work("rope, forward", category, "forward", one, decoder.layers, share, style=style)
        calls = decoder.layers * (1 + len(again))
        yield Work("rope, backward", category, "backward", one, calls, share, style=style)


def _rising(sequence: int) -> float:
    """How much more or less attention reaches at this length than at the 2,048 tokens that its shares are of."""
    ends = FITTED["attention ends"]  # in tokens
    return sequence / (sequence + ends) * (2048 + ends) / 2048


def _qkv(decoder: Decoder, ranks: int) -> int:
    """Features of queries, keys and values together, on one of the tensor-parallel ranks."""
    keys = decoder.kv_heads_on(ranks) * (decoder.head_dim + decoder.values)
    return decoder.heads // ranks * decoder.head_dim + keys


def _packs(decoder: Decoder, training: Training, how: How) -> bool:
    """Whether Tilewright puts the gradients of queries, keys and values together itself."""
    fused = _style(decoder, training, how)[0] == "fused"
    return fused and training.compute_bytes == 2 and not training.compiled


def _norms(decoder: Decoder, training: Training, how: How) -> Iterator[Work]:
    """Dropout, add and norm."""
    shared = training.tensor if training.sequence_parallel else 1
    rows, h, dropout = rank_tokens(decoder, training) // shared, decoder.width, decoder.dropout > 0
    c, r = training.compute_bytes, training.residual_bytes
    n = norm_bytes(decoder, dataclasses.replace(training, device=how.device))
    style, category = _style(decoder, training, how)
    share = SHARES[style] * n * h / (n * h + ROW_ENDS[style])
    of = cost.separate_dropout_add_norm if style == "eager" else cost.dropout_add_norm
    kind = f"{'separate' if style == 'eager' else style} dropout + add + norm"
    for side in ("forward", *(("recompute",) if training.recompute != "none" else ()), "backward"):
        backward, phase = side == "backward", "forward" if side == "forward" else "backward"
        one = of(rows, h, x_bytes=c, residual_bytes=r, backward=backward, dropout=dropout)
        in_layers = decoder.norms * decoder.layers + decoder.cross_layers
        last = 0 if side == "recompute" else decoder.stacks
        yield from _both(Work(f"{kind}, {side}", category, phase, one, in_layers, share, style=style), last)
        if style == "eager":
            # Autocast has norms in float32, rounded or widened by a kernel of its own; in backward the gradients of
            # weight and bias are another pass.
            more = (8 if training.is_autocast else 0) + (2 * n if backward else 0)
            if n > r:  # so is the stream widened; backward rounds the norm's gradient, and not the branch's any more
                more += 6 if backward else 8
            if more:
                passes = cost.elementwise(rows * h, more, 1)
                casts = Work(f"casts of norms, {side}", category, phase, passes, in_layers, share, style=style)
                yield from _both(casts, last)
        if style == "compiled" and dropout and not backward:
            drawn = Cost(PHILOX_FLOPS * rows * h, 0, 0)
            numbers = Work(f"random numbers, {side}", category, phase, drawn, in_layers, 1.0, style=style)
            yield from _both(numbers, last)


def _both(work: Work, last: int) -> Iterator[Work]:
    """An op of the layers, and so many more at the end."""
    yield work
    yield dataclasses.replace(work, calls=last, at_ends=True)


def _activations(decoder: Decoder, training: Training, how: How) -> Iterator[Work]:
    tokens, t = rank_tokens(decoder, training), training.tensor
    style, category = _style(decoder, training, how)
    if training.mlp_recompute and how.device == "cuda":  # of a standard block, too, that MLP is Tilewright's
        style = category = "fused"
    if training.mlp_tiles:  # backward is PyTorch's, stage by stage
        style, category = "eager", "pointwise"
    again = ("recompute",) if training.recompute != "none" or training.mlp_recompute or training.mlp_tiles else ()
    dense = decoder.layers if decoder.experts == 1 else decoder.dense_layers
    widths = {"": (decoder.ffn if decoder.experts == 1 else decoder.dense_ffn or decoder.ffn, dense)}
    widths["expert "] = (decoder.active_experts * decoder.ffn + decoder.shared_ffn, decoder.layers - dense)
    for kind, (inner, layers) in widths.items():
        name = f"{kind}{'gated ' if decoder.gated else ''}activation"
        for side in ("forward", *again, "backward"):
            backward, phase = side == "backward", "forward" if side == "forward" else "backward"
            if training.mlp_tiles and side == "forward" and how.device == "cuda":
                continue  # in the epilogue of the matmul before it
            one = cost.activation(
                tokens, inner // t, gated=decoder.gated, element_bytes=training.compute_bytes, backward=backward
            )
            yield Work(f"{name}, {side}", category, phase, one, layers, SHARES[style], style=style)


def _experts(decoder: Decoder, training: Training, how: How) -> Iterator[Work]:
    """Of a mixture: tokens are copied to their experts and summed up behind them, forward and backward."""
    if decoder.experts == 1:
        return
    tokens, c = rank_tokens(decoder, training), training.compute_bytes
    one = cost.elementwise(tokens * decoder.active_experts * decoder.width // training.tensor, 2 * c, 1)
    layers = 2 * (decoder.layers - decoder.dense_layers)
    style = "compiled" if training.compiled else "eager"
    for side in ("forward", *(("recompute",) if training.recompute == "full" else ()), "backward"):
        phase, name = "forward" if side == "forward" else "backward", f"tokens to and from experts, {side}"
        yield Work(name, "pointwise", phase, one, layers, SHARES[style], style=style)


def _loss(decoder: Decoder, training: Training, how: How) -> Iterator[Work]:
    """Cross-entropy, without the matmul before it."""
    if not decoder.head:
        return
    c, rows = training.compute_bytes, rank_tokens(decoder, training)
    n = rows * -(-decoder.vocabulary // training.tensor)  # padded to whole ranks
    if training.loss != "plain" and how.device == "cuda":
        style, one = "fused", Cost(6 * n, c * n, c * n)
    elif training.compiled:  # the logits are read twice
        style, one = "compiled", cost.elementwise(n, 3 * c, 6)
    else:  # log-softmax there and back, and a gradient that begins as zeros; under autocast widened and rounded
        style, one = "eager", cost.elementwise(n, 36 if training.is_autocast else 6 * c, 6)
    category, share = "fused" if style == "fused" else "pointwise", SHARES[f"{style} loss"]
    name = "cross-entropy" if style == "eager" else f"{style} cross-entropy"
    yield Work(name, category, "forward", one, 1, share, style=style, at_ends=True)


def _gradients(decoder: Decoder, training: Training, how: How) -> Iterator[Work]:
    """What parameters cost beside the matmuls: those of biases and embeddings, and autocast's copies."""
    tokens, h, t = rank_tokens(decoder, training), decoder.width, training.tensor
    style, category = _style(decoder, training, how)
    # Fused, an activation without a gate sums up the gradient of the bias before it.
    inner = decoder.ffn // t if style != "fused" else 2 * decoder.ffn // t if decoder.gated else 0
    outputs = inner + 2 * h if decoder.mlp_bias else 0
    if decoder.qkv_bias and not _packs(decoder, training, how):
        outputs += _qkv(decoder, t)
    if outputs and not training.lora:  # sums over the gradients
        one = cost.elementwise(tokens * outputs, training.compute_bytes, 1)
        yield Work("gradients of biases", category, "backward", one, decoder.layers, SHARES[style], style=style)
    around = "compiled" if training.compiled else "eager"
    more: dict[str, Any] = {"share": SHARES[around], "style": around, "at_ends": True}
    stream = cost.elementwise(tokens * h, 2 * training.residual_bytes, 1)
    yield Work("embedding, forward", "pointwise", "forward", stream, 1, **more)
    yield Work("embedding, backward", "pointwise", "backward", stream, 1, **more)
    if training.lora:  # nor is there anything to round
        return
    # The table's gradient begins as zeros and, tied, is added to the head's.
    each = (4 if decoder.tied else 1) * training.stored_bytes
    table = cost.elementwise(decoder.vocabulary * h // t, each, 1)
    yield Work("gradient of the embedding", "pointwise", "backward", table, 1, **more)
    if training.is_autocast:  # weights are rounded, and their gradients widened where a matmul has not
        phases = ("forward",) if style == "fused" else ("forward", "backward")
        category = "copy" if how.device == "cpu" else "pointwise"
        head = decoder.head_weights
        for phase in phases:
            for weights, end in ((matmul_weights(decoder) - head, False), (head, True)):
                rounded = cost.elementwise(weights // t, 6, 0)
                yield Work(f"casts of weights, {phase}", category, phase, rounded, 1, **{**more, "at_ends": end})
