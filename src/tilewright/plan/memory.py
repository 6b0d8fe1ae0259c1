"""Where the memory of a training step goes: every part in bytes, with its formula.

Activations are counted by the tensors that autograd really keeps, layer by layer, not by a rule of thumb. A step has
several moments that can be its peak; the parts are those of the highest:

    loss, forward     everything kept for backward, and the logits on their way to the loss
    loss, backward    everything kept for backward, and the gradient of the logits
    first recompute   under full recompute: what is kept, and one layer at work
    backward's end    the gradients of all parameters, and one layer at work
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

from tilewright.plan.decoder import Decoder
from tilewright.plan.training import PIECES_HELD, Training, check_parallel, parameters_here, rank_tokens, stage_layers

CONTEXT_BYTES = 620 * 2**20  # of CUDA and its libraries, as `bench memory` measured on an H200
WORKSPACE_BYTES = 72 * 2**20  # of cuBLAS and the like, in every step measured there
LOOSE = 0.02  # of what is allocated, lost between blocks
# Bytes of logits that `linear_cross_entropy` has at once.
_MOST_LOGITS = 384 * 10**6  # in a chunk
_ALL_LOGITS = 256 * 10**6  # without chunks, however many the tokens
_BOTH_CHUNKS = 512 * 10**6  # without chunks, where there would be two of the least tokens
_LEAST_TOKENS = 1024  # of a chunk: the matmuls of fewer do not fill a GPU
# Bytes a logit of the plain loss at the peak of its forward and of its backward. Measured for bf16, derived else.
_PLAIN_LOSS = {
    "bf16": (8, 10), "fsdp": (4, 6), "fp8": (4, 6), "mixed": (4, 6),
    "bf16_kahan": (4, 6), "bf16_stochastic": (4, 6), "fp32": (8, 12), "tf32": (8, 12),
}  # fmt: skip


@dataclass(frozen=True)
class Part:
    """One line of the anatomy."""

    name: str
    bytes: float
    formula: str


@dataclass(frozen=True)
class Anatomy:
    """The parts at the peak, what moment that is, and the sums."""

    moment: str
    parts: list[Part]
    allocated: float  # what torch.cuda.max_memory_allocated would say
    total: float  # what the driver would: with context and what is lost between blocks

    def __getitem__(self, name: str) -> float:
        return sum(part.bytes for part in self.parts if part.name == name)


def norm_bytes(decoder: Decoder, training: Training) -> int:
    """Of a number of the residual stream as a norm takes it, which it keeps for backward.

    PyTorch's own norms are float32 under a GPU's autocast, which makes each of them a copy of a stream that is not. A
    compiler keeps the stream as it is, and widens it again in backward.
    """
    eager = decoder.gpt_block == "standard" and not training.compiled and training.device == "cuda"
    return 4 if eager and training.is_autocast else training.residual_bytes


def layer_activation_bytes(decoder: Decoder, training: Training) -> float:
    """Bytes a token that one layer keeps for backward, on one tensor-parallel rank, without full recompute."""
    c, r, n, t = training.compute_bytes, training.residual_bytes, norm_bytes(decoder, training), training.tensor
    h, heads, f = decoder.width, decoder.heads, decoder.ffn
    selective = training.recompute == "selective"
    # There, norms, activation and the output matmul are computed again, from the residual stream as the layer got it.
    cheap = selective and training.attention == "flash"
    # Each of two: the sum that is normalised, the norm's output (the next matmul's input), statistics, dropout's mask.
    statistics = 4.0 if decoder.norm == "rms" else 8.0
    masks = h if decoder.dropout > 0 and decoder.gpt_block == "standard" else 0
    kept_sums = 2 if decoder.dropout > 0 and decoder.gpt_block == "optimized" else 1  # one cannot be made twice alike
    before = min(2, decoder.norms)  # one where attention and MLP take the same norm's output
    norms = min(before, kept_sums) * r * h + masks if cheap else before * (n * h + c * h + statistics + masks)
    norms += (decoder.norms - before) * (c * h + statistics)  # norms behind a branch keep their input
    routed = 0.0
    queries, keys = heads * decoder.head_dim, t * decoder.kv_heads_on(t) * decoder.head_dim  # repeated for more ranks
    values = keys * decoder.values // decoder.head_dim
    attention = c * (queries + keys + values) + c * heads * decoder.values
    if decoder.kv_rank:  # latents, and their norms' inputs; on every rank
        attention += t * (n + c) * (decoder.q_rank + decoder.latent)
    if training.attention == "flash":
        attention += 4 * heads  # log-sum-exp of each row
    elif not selective:
        # Softmax's output, in float32 and rounded under autocast; dropout's mask, and its output where that is another.
        autocast = training.is_autocast
        kept = (6 if autocast else c) + ((1 if autocast else 1 + c) if decoder.dropout > 0 else 0)
        attention += kept * heads * decoder.sequence
    if decoder.qk_norm:
        attention += c * (queries + keys) + 4 * (heads + t * decoder.kv_heads_on(t))  # their inputs and statistics
    inner = float(f)
    if decoder.experts > 1:
        # The mean over layers with and without experts.
        sparse = 1 - decoder.dense_layers / decoder.layers
        inner = sparse * (decoder.active_experts * f + decoder.shared_ffn) + (1 - sparse) * (decoder.dense_ffn or f)
        routed = sparse * 2 * c * h * decoder.active_experts  # copies of a token for its experts, and what they return
    # Gated: gate, up, the activated gate and their product; else the activation's input and output.
    again = cheap or training.mlp_recompute
    mlp = (c * inner * (3 if again else 4)) if decoder.gated else (c * inner * (1 if again else 2))
    if training.mlp_tiles:  # which keep their input, the norm's output
        mlp = 0.0
    crossed = decoder.cross_layers / decoder.layers  # what attends to an encoder is a second branch, as the first is
    norms += crossed * ((kept_sums - 1) * r * h + masks if cheap else n * h + c * h + statistics + masks)
    shared_rows = t if training.sequence_parallel else 1
    return norms / shared_rows + ((1 + crossed) * attention + mlp + routed) / t


def kept_activations(
    decoder: Decoder, training: Training, layers: int | None = None, *, first: bool = True, last: bool = True
) -> float:
    """Bytes that one forward pass of a micro batch leaves for backward in `layers` layers and the ends that are here.

    Without the logits and the loss, which `train` counts apart.
    """
    c, r, h = training.compute_bytes, training.residual_bytes, decoder.width
    total = 0.0
    if training.recompute == "full":
        shared = training.tensor if training.sequence_parallel else 1
        # A layer keeps its input branch and the residual stream; the first has only the embedding's sum.
        total = ((decoder.layers if layers is None else layers) * (c + r) - (c if first else 0)) * h / shared
    else:
        total = (decoder.layers if layers is None else layers) * layer_activation_bytes(decoder, training)
    if last:  # the final norm and the head's input
        mask = h if decoder.dropout > 0 and decoder.gpt_block == "standard" else 0
        one = (c + norm_bytes(decoder, training)) * h + (4 if decoder.norm == "rms" else 8) + mask
        total += one * decoder.stacks  # an encoder's output goes to all layers that attend to it
    return rank_tokens(decoder, training) * total


def matmul_weights(decoder: Decoder) -> int:
    """Parameters that matmuls use, with their biases: those of which autocast makes 16-bit copies."""
    lookup = decoder.embedding_parameters - decoder.head_weights  # tables that are only looked up
    return decoder.parameters - decoder.norm_parameters - lookup


def optimizer_bytes(decoder: Decoder, training: Training) -> float:
    """Bytes a parameter of the optimizer's states."""
    beside = 4.0 if training.precision == "mixed" else 2.0 if training.precision == "bf16_kahan" else 0.0
    if training.optimizer == "adafactor":  # a row and a column for each matrix
        h = decoder.width
        matrices = decoder.layers * decoder.experts * 8 * (h + decoder.ffn) + 2 * (decoder.vocabulary + h)
        return beside + 4 * matrices / decoder.parameters
    return beside + {
        "adamw": 8.0, "adamw_bf16": 4.0, "adamw_bf16_kahan": 6.0, "adamw_8bit": 2.0 + 8 / 256, "sgd": 4.0,
        "lion": 2.0 if training.has_16_bit_weights else 4.0,  # in the dtype of the parameters
    }[training.optimizer]  # fmt: skip


def logits_at_once(held: float, tokens: int) -> float:
    """Return how many of the `held` bytes of all logits `linear_cross_entropy` has at once, where no memory is named.

    All of them where that is little, or no more than twice what it would be else: one chunk needs no sum over chunks,
    and one in float16 no second matmul for its logits.

    >>> [round(logits_at_once(tokens * 50304 * 2, tokens) / 1e6) for tokens in (512, 2048, 8192, 65536)]
    [52, 206, 103, 384]
    """
    least = held * min(1.0, _LEAST_TOKENS / max(1, tokens))
    if held <= max(_ALL_LOGITS, min(_BOTH_CHUNKS, 2 * least)):
        return held
    return max(least, min(_MOST_LOGITS, held / 8))


def _loss_parts(decoder: Decoder, training: Training, tokens: int) -> tuple[float, float]:
    """Bytes of the logits and the loss at the peak of its forward and of its backward."""
    logits = tokens * decoder.vocabulary / training.tensor if decoder.head else 0.0
    if training.loss == "plain" and not training.compiled:
        forward, backward = _PLAIN_LOSS[training.precision]
        return forward * logits, backward * logits
    # Fused: the gradient overwrites the logits. So it does where PyTorch's own loss is compiled.
    held = training.compute_bytes * logits
    if training.loss == "linear_fused":  # a part of the logits, and the head's gradient, which forward has computed
        gradient = training.stored_bytes * decoder.head_weights / training.tensor
        return logits_at_once(held, tokens) + gradient, gradient
    # Traced, the fused loss returns a gradient of its own, and forward has both; backward then scales it in place.
    traced = training.loss == "fused" and training.compiled and training.device == "cuda"
    return (2 * held if traced else held), held


def train(decoder: Decoder, training: Training) -> Anatomy:
    """The memory of a training step on the fullest GPU.

    >>> from tilewright.plan.decoder import load
    >>> anatomy = train(load("1b"), Training(micro_batch=16))
    >>> anatomy.moment, round(anatomy.allocated / 2**30)
    ('loss, backward', 87)
    """
    check_parallel(decoder, training)
    p, v = training.pipeline, training.interleave
    if p == 1:
        return _stage(decoder, training, decoder.layers, 1, first=True, last=True)
    most, layers = training.accumulation or math.inf, stage_layers(decoder, training)

    def of(rank: int) -> Anatomy:
        # Micro batches that one-forward-one-backward leaves in flight, in whole stages: interleaved, all hold more.
        held = p - rank if v == 1 else ((v - 1) * p + 2 * (p - 1 - rank) + 1) / v
        return _stage(decoder, training, layers, min(held, most), first=rank == 0, last=rank == p - 1)

    # Both ends have a table. The second rank holds nearly as much as the first, and receives from two sides.
    return max((of(rank) for rank in sorted({0, 1, p - 1})), key=lambda anatomy: anatomy.total)


def message_bytes(decoder: Decoder, training: Training) -> float:
    """Bytes that a pipeline's stage sends of a micro batch: what the last sublayer gave, and the residual stream."""
    tokens = rank_tokens(decoder, training) / (training.tensor if training.sequence_parallel else 1)
    return tokens * decoder.width * (training.compute_bytes + training.residual_bytes)


def receive_buffers(decoder: Decoder, training: Training, *, first: bool, last: bool) -> float:
    """Bytes of a pipeline's rank that PyTorch's schedules receive into: a buffer for every micro batch of a step.

    From the stage before a piece, and its gradients from the one behind. They stay from step to step.
    """
    if training.pipeline == 1 or training.releases:
        return 0.0
    ways = 2 * training.interleave - first - last
    return (training.accumulation or training.pipeline) * ways * message_bytes(decoder, training)


def _stage(decoder: Decoder, training: Training, layers: int, held: float, *, first: bool, last: bool) -> Anatomy:
    tokens = rank_tokens(decoder, training)
    share = decoder.layers / layers
    table = decoder.head_weights
    ends = (decoder.embedding_parameters - (0 if decoder.tied else table) if first else 0) + (
        table if last and not (first and decoder.tied) else 0
    )
    here, shard = parameters_here(decoder, training, layers, ends)
    stored = training.stored_bytes
    ranks = training.shards
    # The copies are whole until ZeRO 3, the weights that they are made of are kept where the states are.
    weights = stored * (shard if training.zero == 3 or (training.zero and training.has_copies) else here)
    gradients = stored * (shard if training.zero >= 2 else here)
    states = optimizer_bytes(decoder, training) * (shard if training.zero >= 1 else here)

    adapters = 0.0
    if training.lora:  # what is not trained is kept in 16 bits, without gradients and states
        adapters = decoder.adapter_parameters(training.lora) * layers / decoder.layers / training.tensor
        weights = training.compute_bytes * (shard if training.zero == 3 else here)
        own = [adapters / (ranks if training.zero >= stage else 1) for stage in (3, 2, 1)]
        weights += stored * own[0]
        gradients, states = stored * own[1], optimizer_bytes(decoder, training) * own[2]

    # 16-bit copies: autocast's, kept for backward; under FSDP gathered weights instead, of two layers or of a stage.
    two_layers, _ = parameters_here(decoder, training, min(2, decoder.layers))
    copies = head_copy = 0.0
    if training.zero == 3 and ranks > 1:
        gathered = two_layers + (table / training.tensor if last else 0)
        if training.pipeline > 1:  # what one micro batch's backward has gathered is there for another's forward
            gathered = here * min(1.0, PIECES_HELD / training.interleave)
        if 0 < training.reshard < ranks:  # beside each rank's own shard
            gathered += here / training.reshard
        copies = head_copy = training.compute_bytes * gathered
    elif (training.is_autocast or training.has_copies) and not training.lora:
        in_layers = (matmul_weights(decoder) - table) / share
        in_layers -= decoder.expert_parameters(layers) * (1 - 1 / training.expert)
        head_copy = 2 * (table if last else 0) / training.tensor
        copies = 2 * in_layers / training.tensor + head_copy

    full = training.recompute == "full"
    activations = held * kept_activations(decoder, training, layers, first=first, last=last)
    received = receive_buffers(decoder, training, first=first, last=last)
    if full and received:  # of which those of micro batches in flight are what a piece's first layer keeps
        received -= held * (training.interleave - first) * message_bytes(decoder, training)
    # One layer at work in backward, with gradients of its own beside what it kept.
    # What runs a second time as a whole keeps all while it does.
    again = training.mlp_recompute and not full
    one = dataclasses.replace(training, recompute="none", mlp_recompute=again, mlp_tiles=False)
    working = 1.5 * tokens * layer_activation_bytes(decoder, one)
    loss_forward, loss_backward = _loss_parts(decoder, training, tokens) if last else (0.0, 0.0)

    early = gradients if (training.accumulation or training.pipeline) > 1 else 0.0
    moments = {
        "loss, forward": (early, copies, activations, loss_forward),
        "loss, backward": (early, head_copy if full else copies, activations, loss_backward),
        "backward's end": (gradients, copies / layers, working + activations * (held - 1) / held, 0.0),
    }
    if full:
        moments["first recompute"] = (early, head_copy, activations + working, 0.0)
    moment, (grads, copied, acts, loss) = max(moments.items(), key=lambda item: sum(item[1]))
    t = training.tensor
    split = "" if t == 1 and ranks == 1 else f", split over {t} tensor and {ranks} data ranks"
    each = training.compute_bytes if training.lora else stored
    beside = f"; {adapters:,.0f} of adapters beside them, which alone are trained" if adapters else ""
    parts = [
        Part("weights", weights, f"{each} B x {here:,.0f} parameters{split}{beside}"),
        Part("16-bit copies", copied, "gathered layers" if training.zero == 3 else "2 B a weight that a matmul uses"),
        Part("gradients", grads, f"{stored} B a parameter, where they are there at the peak"),
        Part("optimizer", states, f"{optimizer_bytes(decoder, training):.3g} B a parameter, {training.optimizer}"),
        Part("activations", acts, f"{acts / tokens:,.0f} B x {tokens:,} tokens; {layers} layers, {held:g} in flight"),
        Part("receive buffers", received, "of the pipeline, for every micro batch of a step"),
        Part("logits and loss", loss, f"{training.loss} loss, {tokens:,} x {decoder.vocabulary:,} logits"),
        Part("temporary buffers", WORKSPACE_BYTES, "workspaces of cuBLAS, measured on an H200"),
    ]
    allocated = sum(part.bytes for part in parts)
    # The float32 block of forward's log-softmax is cut to its size and serves nothing else later.
    upcast = training.loss == "plain" and not training.compiled and training.is_autocast
    stranded = 4 * tokens * decoder.vocabulary / t if upcast and last and decoder.head else 0.0
    lost = stranded + LOOSE * allocated
    parts += [
        Part("fragmentation", lost, "4 B a logit of the plain loss, and 2 % of the rest"),
        Part("CUDA context", CONTEXT_BYTES, "measured on an H200"),
    ]
    return Anatomy(moment, [part for part in parts if part.bytes], allocated, allocated + lost + CONTEXT_BYTES)


def largest_micro_batch(decoder: Decoder, training: Training, capacity: float) -> int:
    """The largest micro batch that fits into `capacity` bytes; 0 where not even one does."""

    def fits(batch: int) -> bool:
        return train(decoder, dataclasses.replace(training, micro_batch=batch)).total <= capacity

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
        if high > 1 << 24:
            break
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def levers(decoder: Decoder, training: Training) -> list[tuple[str, float]]:
    """What each change alone would save, largest first: the total as it is less the total with the change."""
    changes: dict[str, Callable[[], tuple[Decoder, Training]]] = {
        f"{field}: {value}": lambda field=field, value=value: (  # type: ignore[misc]
            decoder,
            dataclasses.replace(training, **{field: value}),
        )
        for field, values in (
            ("recompute", ("selective", "full")),
            ("optimizer", ("adamw_8bit", "adamw_bf16_kahan", "lion", "adafactor")),
            ("attention", ("flash",)),
            ("loss", ("fused", "linear_fused")),
            ("precision", ("bf16_stochastic",)),
            ("zero", () if training.data == 1 else (1, 2, 3) if training.replicate == 1 else (2, 3)),
        )
        for value in values
    }
    changes["gpt_block: optimized"] = lambda: (dataclasses.replace(decoder, gpt_block="optimized"), training)
    before = train(decoder, training).total
    saved = [(name, before - train(*change()).total) for name, change in changes.items()]
    return sorted([(name, value) for name, value in saved if value > 0], key=lambda item: -item[1])
