"""How a model is trained: precision, optimizer, levers, and how the run is split over ranks.

`memory`, `work` and `traffic` count what such a run takes. `check_parallel` refuses a split that a model's shape does
not allow.
"""

from __future__ import annotations

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
PIECES_HELD = 3  # of a stage, whose weights PyTorch's interleaved schedule has at once under FSDP


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
    releases: bool = False  # the pipeline's engine gives up what it has received; PyTorch's has a buffer a micro batch
    lora: int = 0  # rank of adapters beside every linear layer, which alone are trained; 0: all parameters are
    context: int = 1  # ranks that share every sequence
    expert: int = 1  # of the data and context ranks, those that share the experts of a mixture, with those of tensor
    replicate: int = 1  # groups of data and context ranks; ZeRO shares among those of a group (HSDP)
    reshard: int = 0  # under ZeRO 3, neighbours that keep all weights among them from forward to backward; 0: all ranks

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
    def sharing(self) -> int:
        """Ranks that share the experts of a mixture, whole ones, and each route their part of the tokens."""
        return self.tensor * self.expert

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


def split_problem(decoder: Decoder, training: Training) -> str:
    """Why the model cannot be split like this; "" where it can. What advises or takes a split asks here."""
    t, p, pieces, steps = training.tensor, training.pipeline, training.interleave, training.accumulation
    problem = decoder.tensor_problem(t)
    if problem:
        return problem
    tokens_cut = t if training.sequence_parallel or decoder.experts > 1 else 1
    if decoder.sequence % tokens_cut:
        return f"A sequence of {decoder.sequence:,} does not divide by tensor parallel {t}."
    cut = 2 * training.context * tokens_cut
    if training.context > 1 and decoder.sequence % cut:
        return f"A sequence of {decoder.sequence:,} does not divide by {cut}, two pieces a rank of context parallel."
    if training.replicate > 1:
        if training.zero < 2:
            return f"{training.replicate} groups that each share the weights need ZeRO 2 or 3; zero is {training.zero}."
        if training.replicas % training.replicate or training.shards == 1:
            return f"{training.replicas} data and context ranks do not make {training.replicate} groups of several."
    if training.expert > 1 and decoder.experts == 1:
        return "The model has no experts; leave expert parallel out."
    if decoder.experts > 1 and decoder.experts % training.sharing:
        ways = [f"tensor parallel {t}"] * (t > 1) + [f"expert parallel {training.expert}"] * (training.expert > 1)
        return f"{decoder.experts} experts do not divide by {' x '.join(ways)}."
    if training.shards % training.expert:
        ranks = f"{training.shards} data and context ranks{' of a group' if training.replicate > 1 else ''}"
        return f"{ranks} do not divide by expert parallel {training.expert}."
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
