"""How long a training step takes: the work of each kind over what the machine does a second, and what the host adds.

    device   every op's bytes over the copy bandwidth or its FLOPs over the matmuls' rate, whichever is longer, divided
             by the share of that rate which such kernels reach; and no kernel is shorter than the shortest there is
    idle     what the host needs to launch all ops beyond what the device needs to run them: it runs ahead of a GPU, by
             so many launches at most, so of gradients, and of the update, about the longer of the two counts. A CPU is
             its own host and does the one after the other.

The rates are the machine's own, measured. The shares are constants, and all that is no arithmetic stands in the tables
below. At the full rates, with nothing idle and all that a cache might hold for free, the same sum is the floor, below
which this configuration cannot go.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tilewright.plan import cost
from tilewright.plan.cost import Cost
from tilewright.plan.decoder import Decoder
from tilewright.plan.flops import matmuls
from tilewright.plan.memory import Training, logits_at_once, matmul_weights, norm_bytes, optimizer_bytes

CATEGORIES = ("matmul", "attention", "fused", "pointwise", "optimizer", "copy")  # as `measure.profile` tells them

# Shares of the matmuls' rate or, for what memory bounds, of the copy bandwidth. All from an H200: files are those of
# results/h200, profiles of the standard block compiled, 125m at 32 and 1b at 16 sequences.
SHARES = {
    # train_125m.json, train_1b.json; profiles: 65 and 361 ms.
    "matmul": 0.885,
    # cuDNN's, which is what torch takes there, by the width of a head. Profiles: 27 and 60 ms; side by side, forward
    # and backward have 519 and 386 TFLOPS at 128.
    "attention 128": 0.62, "attention 128 backward": 0.455, "attention 64": 0.44, "attention 64 backward": 0.39,
    "flash": 0.58,  # of cuDNN's share: FlashAttention-2 side by side with it, 286 and 219 TFLOPS at 128
    "efficient": 0.33,  # of cuDNN's share; train_350m.json, as the next
    "triton": 0.6,  # of cuDNN's share: not measured, as FlexAttention, which is Triton, has it
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

# What a layer's forward and backward cost their host, in eager ops of `Rates.launch_seconds` each. Where one such op
# took 13 us, a layer of 350m took 3.0 ms at micro batch 4, and the modules of a standard one 2.8 ms. Those of compiled
# ones are not measured: a launch for each kernel, and several for each op of Tilewright's.
LAUNCHES = {"standard": 215, "optimized": 230, "compiled standard": 40, "compiled optimized": 110}
FORWARD = 0.25  # of these
WATCHED = 680  # more, where torch's selective checkpoint watches every op: 350m, when that was how `selective` worked
ENDS = 60  # embedding, last norm, loss
# For which the device waits, where `linear_fused` asks it something: "cuda graphs" of train_350m.json, when it waited
# longer than it does now.
ASKED = 50
AHEAD = 1024  # launches that CUDA takes before the device has begun with the first of them
UPDATE = 40  # norm of the gradients, guard, torch's fused optimizer
CACHED = 256 * 2**20  # bytes that an op may find in the cache of a GPU or a CPU, whose rates nobody has measured
# A tensor that Tilewright's own optimizer updates, by a kernel or by torch's ops. On a GPU one launch takes all of them
# now, which has not been measured.
TENSOR = {"cuda": 2, "cpu": 20}
ADAFACTOR = 33  # a tensor: its ops counted, the mean of a matrix and a vector


@dataclass(frozen=True)
class Rates:
    """What a machine does: matmuls by dtype ("fp32", "tf32", "bf16"), a copy, an eager op, the shortest kernel."""

    flops: Mapping[str, float]
    bytes_per_second: float
    launch_seconds: float
    kernel_seconds: float


@dataclass(frozen=True)
class How:
    """How a step runs, beyond what `Training` says of it."""

    matmuls: str = "bf16"  # dtype, a key of `Rates.flops`
    recorded: bool = False  # in a CUDA graph
    attention: str = "auto"
    device: str = "cuda"


@dataclass(frozen=True)
class Step:
    """Seconds of a step by part, CATEGORIES and "idle", and its floor."""

    parts: dict[str, float]
    floor: float

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Work:
    """Ops of one kind: what one costs, how often it runs, what share of its rate it reaches, and whose rate that is."""

    category: str
    cost: Cost
    calls: float
    share: float
    is_matmul: bool = False
    may_use: str = ""  # what else it might compute in, for its floor

    def seconds(self, rates: Rates, dtype: str) -> float:
        """As expected."""
        rate = rates.flops[dtype if self.is_matmul else "fp32"]
        one = max(self.cost.bytes / rates.bytes_per_second, self.cost.flops / rate) / self.share
        return self.calls * max(one, rates.kernel_seconds)

    def floor(self, rates: Rates, dtype: str) -> float:
        """At the machine's full rates; what a cache may hold is free."""
        moved = self.cost.bytes if self.cost.bytes > CACHED else 0
        rate = max(rates.flops[dtype if self.is_matmul else "fp32"], rates.flops.get(self.may_use, 0.0))
        return self.calls * max(moved / rates.bytes_per_second, self.cost.flops / rate)


def step(decoder: Decoder, training: Training, how: How, rates: Rates) -> Step:
    """The time of one optimizer step on one device, with all of its micro batches.

    >>> from tilewright.plan.decoder import load
    >>> h200 = Rates({"bf16": 787e12, "tf32": 400e12, "fp32": 50e12}, 4.27e12, 13e-6, 2e-6)
    >>> found = step(load("1b"), Training(micro_batch=16), How(), h200)
    >>> round(found.seconds, 2), found.floor < found.seconds, max(found.parts, key=found.parts.get)
    (0.56, True, 'matmul')
    """
    parts, floor = dict.fromkeys(CATEGORIES, 0.0), 0.0
    for work in _work(decoder, training, how):
        parts[work.category] += work.seconds(rates, how.matmuls)
        floor += work.floor(rates, how.matmuls)
    gradients, update = (rates.launch_seconds * ops for ops in launches(decoder, training, how))
    if how.device == "cpu":
        return Step({**parts, "idle": gradients + update}, floor)
    asks = training.loss == "linear_fused" and not how.recorded
    waits = rates.launch_seconds * ASKED * (training.accumulation or 1) if asks else 0.0
    # How far the host is ahead as a step's gradients begin, and as its update does: in a few steps that settles.
    updating = parts["optimizer"]
    busy, most, before = sum(parts.values()) - updating, AHEAD * rates.launch_seconds, 0.0
    for _ in range(4):
        ahead = min(most, max(0.0, before + busy - gradients))
        before = min(most, max(0.0, ahead + updating - update))
    idle = max(0.0, gradients - busy - before) + max(0.0, update - updating - ahead)
    return Step({**parts, "idle": waits + idle}, floor)


def launches(decoder: Decoder, training: Training, how: How) -> tuple[float, float]:
    """What the gradients of a step and its update cost the host, in eager ops."""
    micro_batches, block = training.accumulation or 1, _block(decoder, how)
    tensors = decoder.layers * (12 if decoder.mlp_bias else 7)
    each = ADAFACTOR if training.optimizer == "adafactor" else TENSOR[how.device]
    update = UPDATE + (each * tensors if _is_own(training) else 0)
    if how.recorded:
        return 2 * micro_batches, update
    layer: float = LAUNCHES[f"compiled {block}" if training.compiled else block]
    if training.recompute != "none":
        layer *= 1 + FORWARD
    if training.recompute == "selective" and block == "standard" and not training.compiled:
        layer += WATCHED
    return micro_batches * (decoder.layers * layer + ENDS), update


def _block(decoder: Decoder, how: How) -> str:
    """Which ops run: on a CPU, Tilewright's are PyTorch's."""
    return decoder.gpt_block if how.device == "cuda" else "standard"


def _work(decoder: Decoder, training: Training, how: How) -> Iterator[Work]:
    """All that the device does in a step."""
    micro_batches, pointwise = training.accumulation or 1, 1.0
    if how.device == "cpu":
        pointwise = CPU_SHARES["float32" if training.compute_bytes == 4 else "bfloat16"]
        pointwise *= CPU_SHARES.get(decoder.gpt_block, 1.0)
    for part in (_matmuls, _attention, _norms, _activations, _loss, _gradients):
        for work in part(decoder, training, how):
            share = work.share * (1.0 if work.is_matmul else pointwise)
            yield dataclasses.replace(work, calls=micro_batches * work.calls, share=share)
    n, stored = decoder.parameters, training.stored_bytes
    if micro_batches > 1:
        yield Work("pointwise", cost.elementwise(n, 3 * stored, 1), micro_batches - 1, SHARES["eager"])
    yield Work("optimizer", Cost(2 * n, stored * n, 0), 1, SHARES["optimizer"])  # the norm of all gradients
    yield _update(decoder, training, how)


def _update(decoder: Decoder, training: Training, how: How) -> Work:
    """The optimizer, without the norm."""
    n, name = decoder.parameters, training.optimizer
    each = 3 * training.stored_bytes + 2 * optimizer_bytes(decoder, training)
    share = SHARES["codes" if name == "adamw_8bit" and how.device == "cuda" else "optimizer"]
    if name == "adafactor":
        each = ADAFACTOR_BYTES
    elif how.device == "cpu" and _is_own(training):
        each = CPU_BYTES.get(name, CPU_BYTES["other"])
    return Work("optimizer", cost.elementwise(n, math.ceil(each), 12), 1, share)


def _is_own(training: Training) -> bool:
    """Whether Tilewright's optimizer runs, and not one of torch's fused ones."""
    return training.has_16_bit_weights or training.optimizer not in ("adamw", "sgd")


def _style(decoder: Decoder, training: Training, how: How) -> tuple[str, str]:
    """Whose kernels lie between the matmuls, and their category."""
    if _block(decoder, how) == "optimized":
        return "fused", "fused"
    return "compiled" if training.compiled else "eager", "pointwise"


def _matmuls(decoder: Decoder, training: Training, how: How) -> Iterator[Work]:
    tokens, stored = training.micro_batch * decoder.sequence, training.stored_bytes
    for matmul in matmuls(decoder, tokens):
        again = matmul.name != "logits" and training.recompute == "full"
        again = again or (matmul.name == "out" and training.recompute == "selective")
        one = cost.matmul(matmul.m, matmul.n, matmul.k, element_bytes=training.compute_bytes)
        yield Work("matmul", one, matmul.count * (4 if again else 3), SHARES["matmul"], True)
    if training.loss == "linear_fused":  # the weight's gradient is added up, a part of the tokens after the other
        logits = training.compute_bytes * tokens * decoder.vocabulary
        added = math.ceil(logits / logits_at_once(logits, tokens)) - 1
        yield Work("matmul", cost.elementwise(decoder.vocabulary * decoder.width, 2 * stored, 0), added, 1.0)


def _attention(decoder: Decoder, training: Training, how: How) -> Iterator[Work]:
    b, s, heads, c = training.micro_batch, decoder.sequence, decoder.heads, training.compute_bytes
    backend = how.attention if how.matmuls == "bf16" or how.attention == "math" else "efficient"  # others take 16 bits
    for backward, calls in ((False, 2 if training.recompute == "full" else 1), (True, 1)):
        one = cost.attention(
            b, s, heads, decoder.kv_heads, decoder.head_dim, context=decoder.context(causal=True), element_bytes=c,
            backward=backward,
        )  # fmt: skip
        share = SHARES[f"attention {128 if decoder.head_dim > 64 else 64}{' backward' if backward else ''}"]
        wide = how.device == "cuda" and how.matmuls != "bf16" and backend == "efficient"
        if wide:
            share = SHARES["attention fp32"]
        elif how.device == "cuda":
            share *= SHARES.get(backend, 1.0)
        yield Work("attention", one, decoder.layers * calls, share, not wide, may_use="tf32" if wide else "")
        if training.attention == "softmax":  # all scores through memory: masked, softmax, rounded
            scores = cost.elementwise(b * heads * s * s, 6 * c, 6)
            yield Work("pointwise", scores, decoder.layers * calls, SHARES["eager"])
    # Gradients of queries, keys and values are put together for the matmul before them; fused, and summed on the way.
    one = cost.elementwise(b * s * _qkv(decoder), 2 * c, 1)
    summed = decoder.qkv_bias and _packs(decoder, training, how)
    style = "fused" if summed else "compiled" if training.compiled else "eager"
    yield Work("fused" if summed else "pointwise", one, decoder.layers, SHARES[style])
    if decoder.positions == "rope":
        style, category = _style(decoder, training, how)
        one = cost.rope(b * s, heads + decoder.kv_heads, decoder.head_dim, element_bytes=c)
        calls = decoder.layers * (3 if training.recompute == "full" else 2)
        yield Work(category, one, calls, SHARES["eager rope" if style == "eager" else style])


def _qkv(decoder: Decoder) -> int:
    """Features of queries, keys and values together."""
    return (decoder.heads + 2 * decoder.kv_heads) * decoder.head_dim


def _packs(decoder: Decoder, training: Training, how: How) -> bool:
    """Whether Tilewright puts the gradients of queries, keys and values together itself."""
    fused = _style(decoder, training, how)[0] == "fused"
    return fused and training.compute_bytes == 2 and not training.compiled


def _norms(decoder: Decoder, training: Training, how: How) -> Iterator[Work]:
    """Dropout, add and norm."""
    rows, h, dropout = training.micro_batch * decoder.sequence, decoder.width, decoder.dropout > 0
    c, r = training.compute_bytes, training.residual_bytes
    n = norm_bytes(decoder, dataclasses.replace(training, device=how.device))
    style, category = _style(decoder, training, how)
    share = SHARES[style] * n * h / (n * h + ROW_ENDS[style])
    of = cost.separate_dropout_add_norm if style == "eager" else cost.dropout_add_norm
    in_layers = decoder.norms * decoder.layers
    for backward in (False, True):
        again = in_layers if training.recompute != "none" and not backward else 0
        calls = in_layers + again + 1
        yield Work(category, of(rows, h, x_bytes=c, residual_bytes=r, backward=backward, dropout=dropout), calls, share)
        if style == "eager":
            # Autocast has norms in float32, rounded or widened by a kernel of its own; in backward the gradients of
            # weight and bias are another pass.
            more = (8 if training.is_autocast else 0) + (2 * n if backward else 0)
            if n > r:  # so is the stream widened; backward rounds the norm's gradient, and not the branch's any more
                more += 6 if backward else 8
            yield Work(category, cost.elementwise(rows * h, more, 1), calls, share)
        if style == "compiled" and dropout and not backward:
            yield Work(category, Cost(PHILOX_FLOPS * rows * h, 0, 0), calls, 1.0)


def _activations(decoder: Decoder, training: Training, how: How) -> Iterator[Work]:
    tokens, layers = training.micro_batch * decoder.sequence, decoder.layers
    style, category = _style(decoder, training, how)
    if training.mlp_recompute and how.device == "cuda":  # of a standard block, too, that MLP is Tilewright's
        style = category = "fused"
    again = training.recompute != "none" or training.mlp_recompute
    for backward, calls in ((False, layers * (2 if again else 1)), (True, layers)):
        one = cost.activation(
            tokens, decoder.ffn, gated=decoder.gated, element_bytes=training.compute_bytes, backward=backward
        )
        yield Work(category, one, calls, SHARES[style])


def _loss(decoder: Decoder, training: Training, how: How) -> Iterator[Work]:
    """Cross-entropy, without the matmul before it."""
    c, n = training.compute_bytes, training.micro_batch * decoder.sequence * decoder.vocabulary
    if training.loss != "plain" and how.device == "cuda":
        yield Work("fused", Cost(6 * n, c * n, c * n), 1, SHARES["fused loss"])
    elif training.compiled:  # the logits are read twice
        yield Work("pointwise", cost.elementwise(n, 3 * c, 6), 1, SHARES["compiled loss"])
    else:  # log-softmax there and back, and a gradient that begins as zeros; under autocast widened and rounded
        each = 36 if training.is_autocast else 6 * c
        yield Work("pointwise", cost.elementwise(n, each, 6), 1, SHARES["eager loss"])


def _gradients(decoder: Decoder, training: Training, how: How) -> Iterator[Work]:
    """What parameters cost beside the matmuls: those of biases and embeddings, and autocast's copies."""
    tokens, h, stored = training.micro_batch * decoder.sequence, decoder.width, training.stored_bytes
    style, category = _style(decoder, training, how)
    # Fused, an activation without a gate sums up the gradient of the bias before it.
    inner = decoder.ffn if style != "fused" else 2 * decoder.ffn if decoder.gated else 0
    outputs = inner + 2 * h if decoder.mlp_bias else 0
    if decoder.qkv_bias and not _packs(decoder, training, how):
        outputs += _qkv(decoder)
    if outputs:  # sums over the gradients
        one = cost.elementwise(tokens * outputs, training.compute_bytes, 1)
        yield Work(category, one, decoder.layers, SHARES[style])
    share = SHARES["compiled" if training.compiled else "eager"]
    yield Work("pointwise", cost.elementwise(tokens * h, 2 * training.residual_bytes, 1), 2, share)
    # The table's gradient begins as zeros and, tied, is added to the head's.
    table = cost.elementwise(decoder.vocabulary * h, (4 if decoder.tied else 1) * stored, 1)
    yield Work("pointwise", table, 1, share)
    if training.is_autocast:  # weights are rounded, and their gradients widened where a matmul has not
        rounded = cost.elementwise(matmul_weights(decoder), 6, 0)
        yield Work("copy" if how.device == "cpu" else "pointwise", rounded, 1 if style == "fused" else 2, share)
