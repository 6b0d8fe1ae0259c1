"""Where the memory of a training step, or of inference, goes: every part in bytes, with its formula.

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

from tilewright.errors import UserError
from tilewright.plan.decoder import Decoder
from tilewright.plan.flops import RECOMPUTE

# The dtype of the matmuls, by precision; of several, the first that a GPU has. The words of `train`, and mixed.
MATMUL_DTYPES = {
    "bf16": ("bf16",), "fsdp": ("bf16", "fp16"), "mixed": ("bf16", "fp16"), "bf16_kahan": ("bf16",),
    "bf16_stochastic": ("bf16",), "fp8": ("fp8",), "tf32": ("tf32",), "fp32": ("fp32",),
}  # fmt: skip
PRECISIONS = tuple(MATMUL_DTYPES)
OPTIMIZERS = ("adamw", "adamw_bf16", "adamw_bf16_kahan", "adamw_8bit", "lion", "sgd", "adafactor")
ATTENTION = ("flash", "softmax")
LOSSES = ("plain", "fused", "linear_fused")

CONTEXT_BYTES = 620 * 2**20  # of CUDA and its libraries, as `bench memory` measured on an H200
WORKSPACE_BYTES = 72 * 2**20  # of cuBLAS and the like, in every step measured there
_MOST_LOGITS = 384 * 10**6  # bytes of them that a chunk of `linear_cross_entropy` has
_ALL_LOGITS = 256 * 10**6  # that it computes at once, however many the tokens
_BOTH_CHUNKS = 512 * 10**6  # that it computes at once where they would be two chunks of the least tokens
PIECES_HELD = 3  # of a stage, whose weights PyTorch's interleaved schedule has at once under FSDP
_LEAST_TOKENS = 1024  # that it has logits of: the matmuls of fewer do not fill a GPU
_LOOSE = 0.02  # of what is allocated, lost between blocks
# Bytes a logit of the plain loss at the peak of its forward and of its backward. Measured for bf16, derived else.
_PLAIN_LOSS = {
    "bf16": (8, 10), "fsdp": (4, 6), "fp8": (4, 6), "mixed": (4, 6),
    "bf16_kahan": (4, 6), "bf16_stochastic": (4, 6), "fp32": (8, 12), "tf32": (8, 12),
}  # fmt: skip


@dataclass(frozen=True)
class Training:
    """How a model is trained, as far as memory is concerned.

    Precisions, as `train` has them: `bf16` is autocast over float32 parameters; `bf16_kahan` and `bf16_stochastic` have
    16-bit parameters and gradients, and the first carries what rounding cost each parameter; `fp32` and `tf32` have all
    in float32, and `tf32` rounds what a matmul reads. Beside these `fsdp` is FSDP's mixed precision: float32 parameters
    and states, sharded, and 16-bit copies of a layer at a time, by which all activations are 16-bit. `fp8` is the same
    with linear layers in 8 bits. And `mixed` is DeepSpeed's: 16-bit parameters and gradients, and a float32 copy of the
    parameters in the optimizer.
    """

    micro_batch: int = 1
    precision: str = "bf16"
    optimizer: str = "adamw"
    recompute: str = "none"
    residual: str = "auto"  # dtype of the residual stream; "bf16" under autocast too
    attention: str = "flash"
    loss: str = "plain"
    compiled: bool = False  # by torch.compile
    device: str = "cuda"  # or "cpu", whose autocast leaves norms alone and which has no kernels of Tilewright's
    mlp_recompute: bool = False  # the MLP's activation is computed again in backward
    mlp_tiles: bool = False  # the MLP is one graph of tiles, all of which backward computes again
    accumulation: int | None = None  # micro batches a step; None: 1, or as many as a pipeline needs
    reduce: str = "fp32"  # dtype in which FSDP's mixed precision adds up gradients: "fp32" or "bf16"
    data: int = 1  # data-parallel ranks
    zero: int = 0  # ZeRO stage; 3 is FSDP
    tensor: int = 1
    sequence_parallel: bool = False
    pipeline: int = 1
    interleave: int = 1  # pieces of a pipeline stage; more of them make a smaller bubble and more traffic
    lora: int = 0  # rank of adapters beside every linear layer, which alone are trained; 0: all parameters are
    context: int = 1  # ranks that share every sequence
    expert: int = 1  # of the data and context ranks, those that share the experts of a mixture
    replicate: int = 1  # groups of data and context ranks; ZeRO shares among those of a group (HSDP)

    def __post_init__(self) -> None:
        if self.precision == "amp":
            raise UserError("precision is 'amp'; it is called bf16, as in `tilewright train`.")
        for name, allowed in (
            ("precision", PRECISIONS), ("optimizer", OPTIMIZERS), ("recompute", RECOMPUTE), ("attention", ATTENTION),
            ("loss", LOSSES), ("zero", (0, 1, 2, 3)), ("reduce", ("fp32", "bf16")),
        ):  # fmt: skip
            if getattr(self, name) not in allowed:
                raise UserError(f"{name} is {getattr(self, name)!r}; choose {', '.join(map(str, allowed))}.")
        for name in ("micro_batch", "data", "tensor", "pipeline", "interleave", "context", "expert", "replicate"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if self.lora < 0:
            raise UserError(f"lora is {self.lora}; give the rank of its adapters, or 0 to train all parameters.")
        if self.accumulation is not None and self.accumulation < 1:
            raise UserError(f"accumulation is {self.accumulation}; it must be at least 1.")

    @property
    def replicas(self) -> int:
        """Ranks that have the same parameters, or by ZeRO share them."""
        return self.data * self.context

    @property
    def shards(self) -> int:
        """Of these, the ranks among which ZeRO shares."""
        return self.replicas // self.replicate

    @property
    def ranks(self) -> int:
        return self.replicas * self.tensor * self.pipeline

    @property
    def compute_bytes(self) -> int:
        return 4 if self.precision in ("fp32", "tf32") else 2

    @property
    def residual_bytes(self) -> int:
        """Autocast adds a bf16 branch to a float32 stream, which stays float32 unless it begins as bf16."""
        return 2 if self.residual == "bf16" or self.has_copies else self.stored_bytes

    @property
    def gradient_bytes(self) -> int:
        """Of a gradient as ranks send it: FSDP adds up in float32 unless `reduce` says otherwise."""
        return 2 if self.has_copies and self.reduce == "bf16" else self.stored_bytes

    @property
    def stored_bytes(self) -> int:
        """Of a parameter, and of its gradient."""
        return 2 if self.precision == "mixed" or self.has_16_bit_weights else 4

    @property
    def is_autocast(self) -> bool:
        return self.precision == "bf16"

    @property
    def has_copies(self) -> bool:
        """Whether matmuls take 16-bit copies of float32 parameters, and nothing else is float32."""
        return self.precision in ("fsdp", "fp8")

    @property
    def has_16_bit_weights(self) -> bool:
        """And no copy of them in float32."""
        return self.precision in ("bf16_kahan", "bf16_stochastic")


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


def split_problem(decoder: Decoder, training: Training) -> str:
    """Why the model cannot be split like this; "" where it can. What advises or takes a split asks here."""
    t, p, pieces, steps = training.tensor, training.pipeline, training.interleave, training.accumulation
    problem = decoder.tensor_problem(t)
    if problem:
        return problem
    if training.sequence_parallel and decoder.sequence % t:
        return f"A sequence of {decoder.sequence:,} does not divide by tensor parallel {t}."
    cut = 2 * training.context * (t if training.sequence_parallel else 1)
    if training.context > 1 and decoder.sequence % cut:
        return f"A sequence of {decoder.sequence:,} does not divide by {cut}, two pieces a rank of context parallel."
    if training.expert > 1:
        if decoder.experts == 1:
            return "The model has no experts; leave expert parallel out."
        if decoder.experts % training.expert:
            return f"{decoder.experts} experts do not divide by expert parallel {training.expert}."
        if training.replicas % training.expert:
            return f"{training.replicas} data and context ranks do not divide by expert parallel {training.expert}."
    if training.replicate > 1:
        if training.zero < 2:
            return f"{training.replicate} groups that each share the weights need ZeRO 2 or 3; zero is {training.zero}."
        if training.replicas % training.replicate or training.shards == 1:
            return f"{training.replicas} data and context ranks do not make {training.replicate} groups of several."
    if decoder.cross_layers and (p > 1 or training.context > 1):
        return (
            "An encoder with a decoder is not counted on pipeline stages and context-parallel ranks; leave those out."
        )
    if p == 1 and pieces > 1:
        return f"{pieces} pieces of a stage need a pipeline of at least 2 stages."
    if p * pieces > decoder.layers:
        many = f"{p} pipeline stages" + (f" of {pieces} pieces" if pieces > 1 else "")
        return f"{decoder.layers} layers do not fill {many}; take fewer."
    if pieces > 1 and steps is not None and steps % p:
        return f"Pieces of a stage need a number of micro batches that is a multiple of {p}; accumulation is {steps}."
    return ""


def check_parallel(decoder: Decoder, training: Training) -> None:
    """Refuse a split that the model's shape does not allow."""
    problem = split_problem(decoder, training)
    if problem:
        raise UserError(problem)


def rank_tokens(decoder: Decoder, training: Training) -> int:
    """Tokens of a micro batch on one rank, which context parallel shares."""
    return training.micro_batch * decoder.sequence // training.context


def parameters_here(decoder: Decoder, training: Training, layers: int, ends: float = 0.0) -> tuple[float, float]:
    """Parameters of so many layers and the ends on a rank: before ZeRO shards them, and after."""
    experts = decoder.expert_parameters(layers) / training.tensor
    everything = (decoder.fullest_stage(layers) + ends) / training.tensor
    return everything - experts * (1 - 1 / training.expert), everything / training.shards


def stage_layers(decoder: Decoder, training: Training) -> int:
    """Layers of the fullest pipeline stage; where stages do not divide the layers, some have one more than others."""
    return -(-decoder.layers // training.pipeline)


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
        norms += sparse * 2 * c * h * decoder.active_experts  # copies of a token for its experts, and what they return
    # Gated: gate, up, the activated gate and their product; else the activation's input and output.
    again = cheap or training.mlp_recompute
    mlp = (c * inner * (3 if again else 4)) if decoder.gated else (c * inner * (1 if again else 2))
    if training.mlp_tiles:  # which keep their input, the norm's output
        mlp = 0.0
    crossed = decoder.cross_layers / decoder.layers  # what attends to an encoder is a second branch, as the first is
    norms += crossed * ((kept_sums - 1) * r * h + masks if cheap else n * h + c * h + statistics + masks)
    shared_rows = t if training.sequence_parallel else 1
    return norms / shared_rows + ((1 + crossed) * attention + mlp) / t


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
    # Micro batches that one-forward-one-backward leaves in flight, in whole stages: interleaved, both ends hold more.
    most = training.accumulation or math.inf
    first, last = (p, 1.0) if v == 1 else (p + (p - 1) / v, ((v - 1) * p + 1) / v)
    layers = stage_layers(decoder, training)
    ends = (
        _stage(decoder, training, layers, min(first, most), first=True, last=False),
        _stage(decoder, training, layers, min(last, most), first=False, last=True),
    )
    return max(ends, key=lambda anatomy: anatomy.total)


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
        copies = head_copy = training.compute_bytes * gathered
    elif (training.is_autocast or training.has_copies) and not training.lora:
        in_layers = (matmul_weights(decoder) - table) / share
        in_layers -= decoder.expert_parameters(layers) * (1 - 1 / training.expert)
        head_copy = 2 * (table if last else 0) / training.tensor
        copies = 2 * in_layers / training.tensor + head_copy

    full = training.recompute == "full"
    activations = held * kept_activations(decoder, training, layers, first=first, last=last)
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
        Part("logits and loss", loss, f"{training.loss} loss, {tokens:,} x {decoder.vocabulary:,} logits"),
        Part("temporary buffers", WORKSPACE_BYTES, "workspaces of cuBLAS, measured on an H200"),
    ]
    allocated = sum(part.bytes for part in parts)
    # The float32 block of forward's log-softmax is cut to its size and serves nothing else later.
    upcast = training.loss == "plain" and not training.compiled and training.is_autocast
    stranded = 4 * tokens * decoder.vocabulary / t if upcast and last and decoder.head else 0.0
    lost = stranded + _LOOSE * allocated
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


# Inference

WEIGHT_BYTES = {"mixed": 6.0, "fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}
_WEIGHTS = "{} B a parameter, without scales; every expert of a mixture"


def kv_bytes_per_token(decoder: Decoder, element_bytes: float = 2.0) -> float:
    """2·L·k·d·bytes, or of latents, every layer; a windowed layer stops growing at its window.

    >>> from tilewright.plan.decoder import load
    >>> kv_bytes_per_token(load("7b"))
    524288.0
    """
    return decoder.layers * _cached(decoder) * element_bytes


def _cached(decoder: Decoder) -> int:
    """Numbers a token that a layer keeps: keys and values, or the latents they are made of."""
    return decoder.latent or 2 * decoder.kv_heads * decoder.head_dim


def cache_ranks(decoder: Decoder, tensor: int) -> int:
    """Tensor-parallel ranks that share the cache: by heads; every one keeps all latents."""
    return 1 if decoder.kv_rank else min(tensor, decoder.kv_heads)


def kv_cache_bytes(decoder: Decoder, batch: int, tokens: int, element_bytes: float = 2.0) -> float:
    """The cache of `batch` sequences of `tokens` tokens."""
    one = _cached(decoder) * element_bytes
    windowed = decoder.windowed_layers * min(tokens, decoder.window or tokens)
    return batch * one * (windowed + (decoder.layers - decoder.windowed_layers) * tokens)


def infer(
    decoder: Decoder, batch: int, tokens: int, *, weights: str = "bf16", kv_bytes: float = 2.0, tensor: int = 1
) -> Anatomy:
    """The memory of serving `batch` sequences of up to `tokens` tokens each."""
    if weights not in WEIGHT_BYTES:
        raise UserError(f"weights are {weights!r}; choose {', '.join(WEIGHT_BYTES)}.")
    if batch < 1 or tokens < 1 or tensor < 1 or not 0 < kv_bytes <= 8:
        raise UserError("batch, tokens and tensor must be at least 1, and a cached number 0 to 8 bytes.")
    if not decoder.causal:
        raise UserError("An encoder does not decode and has no cache; take `plan train` or `plan roofline`.")
    if decoder.cross_layers:
        raise UserError("An encoder with a decoder keeps two caches, which are not counted; take `plan train`.")
    decoder.check_length(tokens, "tokens")
    decoder.check_tensor(tensor)
    window = f", {decoder.windowed_layers} layers no further than {decoder.window:,}" if decoder.windowed_layers else ""
    widest = max(3 * decoder.width, (2 if decoder.gated else 1) * decoder.ffn) * 2
    parts = [
        Part("weights", WEIGHT_BYTES[weights] * decoder.parameters / tensor, _WEIGHTS.format(WEIGHT_BYTES[weights])),
        Part(
            "KV cache",
            kv_cache_bytes(decoder, batch, tokens, kv_bytes) / cache_ranks(decoder, tensor),
            f"{kv_bytes_per_token(decoder, kv_bytes):,.0f} B a token x {batch} x {tokens:,}{window}; over "
            f"{cache_ranks(decoder, tensor)} ranks",
        ),
        Part("activations", 2.0 * batch * (widest + 2 * decoder.vocabulary), "one token a sequence, logits in float32"),
    ]
    allocated = sum(part.bytes for part in parts)
    lost = _LOOSE * allocated
    parts += [
        Part("fragmentation", lost, "2 % of the rest"),
        Part("CUDA context", CONTEXT_BYTES, "measured on an H200"),
    ]
    return Anatomy("decoding", parts, allocated, allocated + lost + CONTEXT_BYTES)
