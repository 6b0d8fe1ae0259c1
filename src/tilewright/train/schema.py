"""Every field of a training run: its type, its default, what it may be, and what it does.

A field declared with a `Lever` changes how fast a run is or how much memory it takes, and not what it learns; those are
what `tilewright tune` searches, with what each value does to the numbers. How a configuration is read from YAML and the
command line is in `train/load_config.py`.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field
from typing import Any

from tilewright.errors import UserError
from tilewright.parallel.layout import Layout, derive
from tilewright.plan.batches import Batches, batch_sizes
from tilewright.plan.gpt import CHOICES as MODEL_CHOICES
from tilewright.plan.gpt import LEVERS as MODEL_LEVERS
from tilewright.plan.gpt import GPTConfig
from tilewright.plan.lever import Lever

PRECISIONS = ("auto", "fp32", "tf32", "bf16", "bf16_kahan", "bf16_stochastic")
OPTIMIZERS = ("adamw", "adamw_8bit", "adamw_bf16", "lion", "adafactor", "sgd")
RECORDING = ("reduce-overhead", "max-autotune")  # modes of torch.compile that make CUDA graphs
COMPILE = ("none", "default", *RECORDING, "max-autotune-no-cudagraphs")
SCHEDULES = ("constant", "linear", "cosine", "wsd")


def one_of(default: str | int, choices: tuple[str | int, ...], help: str, *, lever: Lever | None = None) -> Any:
    """Declare a field that takes one of a few words or numbers."""
    return field(default=default, metadata={"choices": choices, "help": help, "lever": lever})


def told(default: Any, help: str, *, minimum: float | None = None, lever: Lever | None = None) -> Any:
    """Declare a field of any value; numbers may have a least value."""
    return field(default=default, metadata={"help": help, "minimum": minimum, "lever": lever})


def check(section: Any, prefix: str = "") -> None:
    """Refuse a value that its field's metadata rules out."""
    for item in dataclasses.fields(section):
        value = getattr(section, item.name)
        choices, minimum = item.metadata.get("choices"), item.metadata.get("minimum")
        if choices and value not in choices:
            listed = ", ".join(map(str, choices[:-1]))
            raise UserError(f"{prefix}{item.name} is {value!r}; choose {listed} or {choices[-1]}.")
        if minimum is not None and value < minimum:
            raise UserError(f"{prefix}{item.name} is {value!r}; it must be at least {minimum:g}.")


@dataclass(frozen=True)
class Model(GPTConfig):
    """The model: a preset, and any field of it changed. As it comes, a byte-level GPT that a laptop trains."""

    width: int = 128
    layers: int = 4
    heads: int = 4
    vocabulary: int = 256
    sequence: int = 128
    preset: str = told(
        "",
        "125m ... 70b: sets width, layers, heads, vocabulary, sequence, optimizer.learning_rate and schedule.warmup "
        "where you do not.",
    )


@dataclass(frozen=True)
class Data:
    """What is trained on."""

    kind: str = one_of("text", ("text", "tokens", "synthetic"), "Text files, token files, or random tokens.")
    paths: list[str] = field(
        default_factory=list,
        metadata={"help": "Files or folders. None, with text: the sources of Python's standard library."},
    )
    tokenizer: str = told("bytes", "For text: `bytes`, or the path of a Hugging Face tokenizer.json.")
    shuffle: bool = told(True, "Take the sequences in a random order, another one each epoch.")
    seed: int = told(0, "Of that order.")
    workers: int = told(1, "Processes that read ahead; 0 reads in the step itself.", minimum=0)

    def __post_init__(self) -> None:
        check(self, "data.")


@dataclass(frozen=True)
class Optimizer:
    """The optimizer and its numbers."""

    name: str = one_of(
        "adamw", OPTIMIZERS, "The rule, and the precision its state is kept in.",
        lever=Lever(numerics={
            "adamw_8bit": "state", "adamw_bf16": "state", "lion": "rule", "adafactor": "rule", "sgd": "rule",
        }),
    )  # fmt: skip
    learning_rate: float = told(3e-4, "The highest of the schedule.", minimum=0)
    beta1: float = told(0.9, "Decay of the mean of gradients; SGD's momentum.", minimum=0)
    beta2: float = told(0.95, "Decay of the mean of squares.", minimum=0)
    epsilon: float = told(1e-8, "Added to the root of the mean of squares.", minimum=0)
    weight_decay: float = told(0.1, "Of matrices and embeddings; vectors have none.", minimum=0)
    clip: float = told(1.0, "Largest norm of all gradients together; 0: no limit.", minimum=0)

    def __post_init__(self) -> None:
        check(self, "optimizer.")
        for name in ("beta1", "beta2"):
            if getattr(self, name) >= 1:
                raise UserError(f"optimizer.{name} is {getattr(self, name)!r}; it must be below 1.")


@dataclass(frozen=True)
class Schedule:
    """The learning rate over the steps."""

    name: str = one_of("cosine", SCHEDULES, "After the warm-up: stays, falls in a line, as a cosine, or at the end.")
    warmup: int = told(10, "Steps in which it rises from 0.", minimum=0)
    final: float = told(0.1, "The last rate over the highest.", minimum=0)
    decay: float = told(0.2, "For wsd: the share of the steps in which it falls.", minimum=0)

    def __post_init__(self) -> None:
        check(self, "schedule.")


@dataclass(frozen=True)
class Checkpoint:
    """What is saved, where, how often."""

    every: int = told(0, "Steps between two checkpoints; 0: none on the way.", minimum=0)
    final: bool = told(True, "One at the end of the run.")
    keep: int = told(2, "Checkpoints kept; older ones are deleted.", minimum=1)
    asynchronous: bool = told(True, "Write while training goes on.")
    resume: str = told(
        "auto",
        "`auto`: from the newest whole checkpoint of the folder, if any; `never`; or the path of one, to begin with "
        "while the folder has none of its own.",
    )

    def __post_init__(self) -> None:
        check(self, "checkpoint.")


@dataclass(frozen=True)
class Eval:
    """The validation loss: of sequences that are never trained on."""

    every: int = told(0, "Steps between two validation losses, and one at the end; 0: none.", minimum=0)
    held_out: float = told(0.01, "Share of the sequences that is held out, those at the end of the data.", minimum=0)
    samples: int = told(64, "Held-out sequences a validation loss is the mean of.", minimum=1)

    def __post_init__(self) -> None:
        check(self, "eval.")
        if self.held_out >= 1:
            raise UserError(f"eval.held_out is {self.held_out!r}; it must be below 1.")
        if self.every and not self.held_out:
            raise UserError(f"eval.held_out is {self.held_out!r}; it must be above 0, or set eval.every=0.")

    @property
    def share(self) -> float:
        """The share of the sequences that this run holds out."""
        return self.held_out if self.every else 0.0


@dataclass(frozen=True)
class Guard:
    """What happens when the loss or a gradient is not finite, or the loss jumps."""

    nan: str = one_of("stop", ("stop", "skip"), "End the run, or leave the weights as they were and go on.")
    spike: float = told(0.0, "A loss this many standard deviations above its recent mean is a spike; 0: none is.")
    on_spike: str = one_of("stop", ("stop", "skip"), "As for nan.")
    patience: int = told(10, "Steps skipped in a row before the run stops anyway.", minimum=1)

    def __post_init__(self) -> None:
        check(self, "guard.")


@dataclass(frozen=True)
class Parallel:
    """How the ranks share the work; what is left out is derived from how many there are."""

    dp: int = told(0, "Ranks that each take their own batches; 0: all that the other sizes leave.", minimum=0)
    zero: int = one_of(
        0,
        (0, 2, 3),
        "What dp ranks share: 0: nothing, each has all (DDP); 2: optimizer, gradients; 3: weights (FSDP2).",
    )
    tp: int = told(1, "Ranks that share every matmul, its heads and the vocabulary.", minimum=1)
    sp: bool = told(False, "Between matmuls, each rank of tp has a part of the sequence.")
    pp: int = told(1, "Stages of a pipeline, each with a part of the layers.", minimum=1)
    cp: int = told(1, "Ranks that share every sequence, attention too.", minimum=1)
    ep: int = told(1, "Of the ranks of dp x cp, those that share a mixture's experts, as those of tp do.", minimum=1)
    dp_replicate: int = told(
        1, "Groups that each have all weights, shared by zero 2 or 3 among the ranks of a group (HSDP).", minimum=1
    )
    pieces: int = told(1, "Of a pipeline stage, interleaved: more of them idle less and send more.", minimum=1)
    parameters: str = one_of(
        "auto", ("auto", "fp32", "bf16"), "What FSDP2 sends of weights; auto: as they are stored."
    )  # fmt: skip
    gradients: str = one_of("auto", ("auto", "fp32", "bf16"), "What FSDP2 adds gradients in; auto: as they are stored.")
    reshard: int = told(
        0, "With zero 3: so many neighbours keep all weights among them from forward to backward; 0: all ranks do.",
        minimum=0,
    )  # fmt: skip
    prefetch: int = told(1, "Blocks whose weights FSDP2 gathers ahead.", minimum=0)
    overlap: bool = told(True, "DDP sends gradients while backward goes on; false: all of them after it.")
    dropout: str = one_of(
        "auto", ("auto", "generator", "position"),
        "What dropout is drawn by: torch's generator, or each token's place, which is alike on any mesh; auto: the "
        "former in one process, the latter in several.",
    )  # fmt: skip
    wrap: bool = told(
        False, "One process trains by DDP or FSDP2, too, by zero, and shares with nobody: shows what they cost."
    )
    timeout: float = told(600.0, "Seconds after which a rank that waits for others gives up.", minimum=0.1)

    def __post_init__(self) -> None:
        check(self, "parallel.")


@dataclass(frozen=True)
class Log:
    """What is shown and written."""

    every: int = told(1, "Steps between two lines.", minimum=1)
    tensorboard: bool = told(False, "Also write TensorBoard's files.")
    peak_tflops: float = told(0.0, "Dense peak that MFU is measured against; 0: the table's.", minimum=0)

    def __post_init__(self) -> None:
        check(self, "log.")


def _micro_batches(run: Train) -> tuple[int, ...]:
    """The whole batch at once, or all that a rank of dp takes of it, and what halving these again and again gives."""
    found = [run.global_batch]
    for size in (run.global_batch, run.global_batch // max(1, run.parallel.dp)):
        found.append(size)
        while found[-1] > 1 and found[-1] % 2 == 0:
            found.append(found[-1] // 2)
    return tuple(dict.fromkeys(found))


def _thread_counts(run: Train) -> tuple[int, ...]:
    """All cores, half of them, and one; but what the run has anyway is not another choice."""
    import torch

    cores = os.cpu_count() or 1
    found: dict[int, int] = {}
    for count in (run.threads, 0, cores, max(1, cores // 2), 1):
        found.setdefault(count or torch.get_num_threads(), count)
    return tuple(found.values())


@dataclass(frozen=True)
class Train:
    """A whole training run."""

    out: str = told("runs/default", "Folder for metrics, checkpoints and profiles.")
    steps: int = told(100, "Optimizer steps.", minimum=1)
    seed: int = told(0, "Of weights and dropout.")
    device: str = told("auto", "`auto`: a GPU if there is one; or `cuda`, `cpu`.")
    precision: str = one_of(
        "auto", PRECISIONS, "auto: bf16 on a GPU, fp32 else. bf16: autocast over float32 weights; "
        "bf16_kahan, bf16_stochastic: bfloat16 weights, and how their updates are rounded.",
        lever=Lever(
            values=PRECISIONS[1:], devices={"tf32": "cuda"},
            numerics={"tf32": "rounding", "bf16": "rounding", "bf16_kahan": "state", "bf16_stochastic": "state"},
        ),
    )  # fmt: skip
    compile: str = one_of(
        "none", COMPILE, "torch.compile's mode.",
        lever=Lever(devices=dict.fromkeys(COMPILE[2:], "cuda")),
    )  # fmt: skip
    rules: str = told(
        "none",
        "all: what tilewright.optimize finds in the model runs by fused kernels; or some rules: add_norm+glu.",
        lever=Lever(values=("none", "all"), is_of_others=True),
    )
    cuda_graphs: bool = told(
        False, "Record forward and backward once, replay them each step.", lever=Lever(devices={True: "cuda"})
    )
    threads: int = told(
        0, "Threads of an op on the CPU; 0: as PyTorch has it.", minimum=0,
        lever=Lever(values=_thread_counts, devices={"": "cpu"}),
    )  # fmt: skip
    micro_batch: int = told(
        0, "Sequences a device takes at once; 0: derived.", minimum=0, lever=Lever(values=_micro_batches)
    )
    global_batch: int = told(0, "Sequences an optimizer step takes; 0: derived.", minimum=0)
    accumulation: int = told(0, "Micro batches a step; 0: derived.", minimum=0)
    deterministic: bool = told(False, "Only algorithms that give the same bits every time.")
    profile: bool = told(False, "Write a trace, where a step's time went, and its memory against the plan.")
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    eval: Eval = field(default_factory=Eval)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    guard: Guard = field(default_factory=Guard)
    parallel: Parallel = field(default_factory=Parallel)
    log: Log = field(default_factory=Log)

    def __post_init__(self) -> None:
        check(self)
        if self.rules not in ("none", "all"):
            from tilewright.optimize.rules import chosen

            chosen(self.rules)

    def layout(self, ranks: int) -> Layout:
        """How so many processes share the work."""
        p = self.parallel
        return derive(
            ranks, dp=p.dp, tp=p.tp, pp=p.pp, cp=p.cp, ep=p.ep, zero=p.zero, sp=p.sp, pieces=p.pieces,
            dp_replicate=p.dp_replicate, wrap=p.wrap,
        )  # fmt: skip

    def batch_sizes(self, ranks: int) -> Batches:
        """Micro batch, global batch and accumulation on so many data ranks, each given or derived."""
        return batch_sizes(
            micro_batch=self.micro_batch, global_batch=self.global_batch, accumulation=self.accumulation, ranks=ranks
        )


def lever_of(section: type, name: str) -> Lever | None:
    """The lever that a field is, if it is one."""
    if issubclass(section, GPTConfig) and name in MODEL_LEVERS:
        return MODEL_LEVERS[name]
    found = next(item for item in dataclasses.fields(section) if item.name == name)
    return found.metadata.get("lever")


def choices_of(section: type, name: str) -> tuple[str, ...] | None:
    """What a field may be, where that is a few words."""
    if issubclass(section, GPTConfig) and name in MODEL_CHOICES:
        return MODEL_CHOICES[name]
    found = next(item for item in dataclasses.fields(section) if item.name == name)
    return found.metadata.get("choices")
