"""Every op of a training step with its intensity, what bounds it, and the time below which no implementation can go."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from tilewright.hardware import COPY_SHARE, Accelerator, Rate
from tilewright.plan import cost
from tilewright.plan.cost import Cost
from tilewright.plan.decoder import Decoder
from tilewright.plan.flops import matmuls
from tilewright.plan.memory import MATMUL_DTYPES, Training, optimizer_bytes

LAUNCH_SECONDS = 2e-6  # below this a kernel's own start and end rule


@dataclass(frozen=True)
class Op:
    """One kind of op: what one call costs, how often a step calls it, and whether on the tensor cores."""

    name: str
    cost: Cost
    calls: int
    tensor_cores: bool = False

    @property
    def intensity(self) -> float:
        """FLOPs a byte."""
        return self.cost.flops / max(1, self.cost.bytes)


@dataclass(frozen=True)
class Floor:
    """An op on an accelerator."""

    op: Op
    seconds: float  # of all its calls
    bound: str  # memory, arithmetic or launch
    share: float  # of the step's floor


def step_ops(decoder: Decoder, training: Training) -> Iterator[Op]:
    """What a step of one micro batch does on one GPU, forward and backward apart."""
    tokens = training.micro_batch * decoder.sequence
    c, r, t = training.compute_bytes, training.residual_bytes, training.tensor
    h, layers, dropout = decoder.width, decoder.layers, decoder.dropout > 0
    again = 2 if training.recompute == "full" else 1  # forwards of a layer
    cheap = 1 if training.recompute == "none" else 2  # and of its norms and activation
    rows = tokens // (t if training.sequence_parallel else 1)
    norms = decoder.norms * layers + int(decoder.final_norm)
    fused = decoder.gpt_block == "optimized"
    norm_cost = cost.dropout_add_norm if fused else cost.separate_dropout_add_norm
    for backward in (False, True):
        count = norms if backward else decoder.norms * layers * cheap + int(decoder.final_norm)
        side = "backward" if backward else "forward"
        one = norm_cost(rows, h, x_bytes=c, residual_bytes=r, backward=backward, dropout=dropout)
        yield Op(f"{'fused' if fused else 'separate'} dropout + add + norm, {side}", one, count)
    for matmul in matmuls(decoder, tokens, t):
        calls = matmul.count * (again if matmul.name != "logits" else 1)
        one = cost.matmul(matmul.m, matmul.n, matmul.k, element_bytes=c)
        yield Op(f"{matmul.name} matmul, forward", one, calls, True)
        yield Op(f"{matmul.name} matmuls, backward", one, 2 * matmul.count, True)
    for backward in (False, True):
        one = cost.attention(
            training.micro_batch, decoder.sequence, decoder.heads // t, decoder.kv_heads_on(t), decoder.head_dim,
            context=decoder.context(causal=True), element_bytes=c, backward=backward,
        )  # fmt: skip
        yield Op(f"attention, {'backward' if backward else 'forward'}", one, layers * (1 if backward else again), True)
    dense = layers if decoder.experts == 1 else decoder.dense_layers
    widths = {"": (decoder.ffn if decoder.experts == 1 else decoder.dense_ffn or decoder.ffn, dense)}
    widths["expert "] = (decoder.active_experts * decoder.ffn + decoder.shared_ffn, layers - dense)
    for (kind, (inner, count)), backward in itertools.product(widths.items(), (False, True)):
        if count:
            one = cost.activation(tokens, inner // t, gated=decoder.gated, element_bytes=c, backward=backward)
            name = f"{kind}{'gated ' if decoder.gated else ''}activation, {'backward' if backward else 'forward'}"
            yield Op(name, one, count * (1 if backward else cheap))
    if decoder.positions == "rope":
        heads = decoder.heads // t + decoder.kv_heads_on(t)
        yield Op("rope", cost.rope(tokens, heads, decoder.head_dim, element_bytes=c), layers * (1 + again))
    if decoder.head:
        yield Op("cross-entropy", cost.cross_entropy(tokens, -(-decoder.vocabulary // t), element_bytes=c), 1)
    yield Op("embedding", cost.elementwise(tokens * h, 2 * r, 1), 2)
    stored = training.stored_bytes
    held = decoder.parameters // t // training.pipeline // (training.data if training.zero else 1)
    states = optimizer_bytes(decoder, training)
    yield Op("optimizer", Cost(12 * held, int((2 * stored + states) * held), int((stored + states) * held)), 1)


def rates(accelerator: Accelerator, training: Training, achievable: bool = False) -> tuple[Rate, float]:
    """Matmul rate and bytes a second: the datasheet's, or what to expect of the best matmul and copy."""
    dtype = accelerator.first_on_record(MATMUL_DTYPES[training.precision])
    if achievable:
        return accelerator.matmul(dtype), COPY_SHARE * accelerator.bytes_per_second
    peak = accelerator.peak_flops[dtype]
    return Rate(
        peak, dtype, False, f"the datasheet, {peak / 1e12:g} TFLOPS, dense {dtype}"
    ), accelerator.bytes_per_second


def roofline(
    decoder: Decoder, training: Training, accelerator: Accelerator, *, achievable: bool = False
) -> list[Floor]:
    """The floor of every op, the largest first."""
    decoder.check_tensor(training.tensor)
    rate, bandwidth = rates(accelerator, training, achievable)
    vector = accelerator.peak_flops.get("fp32", rate.flops)
    floors = []
    for op in step_ops(decoder, training):
        memory = op.cost.bytes / bandwidth
        arithmetic = op.cost.flops / (rate.flops if op.tensor_cores else vector)
        one = max(memory, arithmetic, LAUNCH_SECONDS)
        bound = "launch" if one == LAUNCH_SECONDS else "memory" if memory >= arithmetic else "arithmetic"
        floors.append((op, one * op.calls, bound))
    total = sum(seconds for _, seconds, _ in floors)
    return sorted([Floor(op, s, bound, s / total) for op, s, bound in floors], key=lambda floor: -floor.seconds)
