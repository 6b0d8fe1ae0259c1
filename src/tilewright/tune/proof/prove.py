"""Is the fastest run still the same model? The proof beside the standard float32 model, on the same batches.

Three runs, from the same weights, without dropout. Biases and the weights of norms begin as noise: as zeros and ones
they would hide what is done to them. The runs:

    float32    every lever as it comes: PyTorch's own ops, eager, in float32, the optimizer's state in float32
    standard   the same, but for the levers that are meant to change numbers, which are as in the best run: precision,
               the dtype of the residual stream, the optimizer's state. So this is what those do by themselves.
    best       the run as the search has found it

First a batch: what each layer returns, and the gradient of each parameter. Then a few steps of training.

How far apart they may be is in `tune/proof/verdict.py`.

All three are runs of one process. What the ranks of a run make of it is for `tune/proof/layout.py`.

Hooks see nothing inside a graph that is compiled or recorded, nor in a block that is recomputed. So what layers return
is taken from the run's own modules, eager and without backward. Gradients and losses are those of the run as it is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tilewright.plan.lever import NUMERICS
from tilewright.train import optimizers
from tilewright.train.data import open_batches
from tilewright.train.engine import Engine, device_of, precision_of, restored_modes
from tilewright.train.fields import fields
from tilewright.train.load_config import from_dict
from tilewright.train.memory_plan import planned, policies
from tilewright.train.schema import Train
from tilewright.train.world import World
from tilewright.tune import own_model
from tilewright.tune.proof.verdict import Key, Seen, distance, judge
from tilewright.tune.search.space import value_of
from tilewright.tune.search.standard import alone, float32, moves, standard
from tilewright.tune.store.proof import Proof

TOKENS = 4096  # of a step: enough for the kernels that large batches have, few enough for float32
_NOISE = 0.02  # of a parameter that begins as a constant, of its size
_NOISE_OF_ZERO = 0.005  # larger biases would drown what a layer of small weights computes, and any error of it
_SEQUENCES = 2  # whose outputs are compared layer by layer

Say = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class _Subject:
    """The model and batches of a proof, the same for all three runs."""

    make: Callable[[Train], Engine]
    steps: list[Any]  # a batch each
    tokens: int  # of a batch
    micro_batches: Callable[[Any, Train], list[Any]]  # of a batch, as a run takes it
    forward: Callable[[Engine, Any], Any]  # of a few sequences of a batch, eager


def prove(job: Mapping[str, Any], say: Say) -> Proof:
    """Judge whether a run still trains the standard model.

    Args:
        job: `best`, the run as a dict; `own_model` and `path`, where it is of a user's; `steps` and `seed`.
        say: is told {"event": "alive", ...} every step.
    """
    best = from_dict(job["configuration"])
    best = dataclasses.replace(alone(best), seed=job["seed"], model=dataclasses.replace(best.model, dropout=0.0))
    own = job.get("own_model")
    device = device_of(best)
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        subject = _own(best, job["steps"], own, job.get("path", ())) if own else _gpt(best, job["steps"])
        weights: dict[str, Tensor] = {}  # of the first run; the others begin with them
        reference = _watch("float32", subject, float32(best), weights, None, say)
        if reference.random:
            why = "the model draws random numbers that could not be switched off, so no two runs of it are the same."
            return Proof("not proven", why, losses={"float32": reference.losses})
        plain = _watch("standard", subject, standard(best), weights, reference, say)
        found = _watch("best", subject, best, weights, reference, say)
    reduced, precision = _reduced(weights, subject.tokens), precision_of(best, device)
    return judge(reference, plain, found, reduced=reduced, precision=precision, design=_by_design(best))


def in_small_parts(run: Train, whole: int) -> Train:
    """Return the run with a batch of `whole` sequences in small micro batches, for which float32 has room, too.

    >>> from tilewright.train.schema import Model
    >>> found = in_small_parts(Train(model=Model(sequence=2048)), 6)
    >>> found.micro_batch, found.global_batch, found.accumulation
    (2, 6, 0)
    """
    most = max(1, TOKENS // run.model.sequence)
    micro = max(part for part in range(1, min(most, whole) + 1) if whole % part == 0)
    return dataclasses.replace(run, micro_batch=micro, global_batch=whole, accumulation=0)


def _shares(run: Train, tokens: int) -> tuple[int, int, int]:
    """Return the micro batch, the number of micro batches, and how many sequences the standard model takes at once.

    As in the run itself, but small; two micro batches stand for any number of them.
    """
    sizes, most = run.batch_sizes(1), max(1, TOKENS // tokens)
    parts = min(2, sizes.accumulation)
    micro = min(sizes.micro, max(1, most // parts))
    return micro, parts, min(most, micro * parts)


def _gpt(best: Train, steps: int) -> _Subject:
    device, sequence = device_of(best), best.model.sequence
    micro, parts, at_once = _shares(best, sequence)
    batches = open_batches(
        dataclasses.replace(best.data, workers=0), sequence=sequence, vocabulary=best.model.vocabulary,
        micro_batch=micro * parts, accumulation=1, device=torch.device("cpu"),
    )  # fmt: skip
    taken = [batches.next() for _ in range(steps)]
    batches.close()

    def make(run: Train) -> Engine:
        plan = planned(run, precision_of(run, device), micro, parts)
        return Engine(run, device, World(), policies(run, plan))

    def micro_batches(batch: Tensor, run: Train) -> list[Tensor]:
        return [part.to(device) for part in batch.split(micro if run is best else at_once)]

    def forward(engine: Engine, batch: Tensor) -> Any:
        tokens = batch[:_SEQUENCES].to(device)
        return engine.model(tokens[:, :-1], tokens[:, 1:])

    return _Subject(make, taken, taken[0].numel(), micro_batches, forward)


def _own(best: Train, steps: int, text: str, path: Sequence[str]) -> _Subject:
    """A user's own module, whose batch is the same in every step."""
    device, batch = device_of(best), own_model.load(text, path, seed=best.seed).batch
    micro, at_once = batch.rows, batch.rows
    if batch.splits:
        micro_batch = best.micro_batch or batch.rows
        sized = dataclasses.replace(best, global_batch=batch.rows, micro_batch=micro_batch, accumulation=0)
        micro, parts, at_once = _shares(sized, max(1, batch.count // batch.rows))
        batch = batch.split(micro * parts)[0]

    def make(run: Train) -> Engine:
        module = own_model.load(text, path, seed=run.seed).module.to(device)
        _without_dropout(module)
        return own_model.OwnEngine(run, device, World(), [], module)

    def micro_batches(batch: own_model.Batch, run: Train) -> list[own_model.Batch]:
        dtype, _ = optimizers.PRECISIONS[precision_of(run, device)]
        return batch.to(device, dtype).split(micro if run is best else at_once)

    def forward(engine: Engine, batch: own_model.Batch) -> Any:
        few = batch.split(_SEQUENCES)[0] if batch.splits else batch
        return few.to(device, optimizers.PRECISIONS[engine.precision][0]).through(engine.model)

    return _Subject(make, [batch] * steps, batch.count, micro_batches, forward)


def _without_dropout(module: nn.Module) -> None:
    for each in module.modules():
        for name, value in list(vars(each).items()):
            drops = "drop" in name or (name == "p" and "Drop" in type(each).__name__)
            if drops and isinstance(value, float):
                setattr(each, name, 0.0)


def _watch(
    name: str, subject: _Subject, run: Train, weights: dict[str, Tensor], reference: Seen | None, say: Say
) -> Seen:
    """Build a run, record its layers' outputs and gradients and a few losses, and free its memory."""
    say({"event": "phase", "name": f"proof: {name}"})
    try:
        return _look(name, subject, run, weights, reference, say)
    finally:
        torch.compiler.reset()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _look(
    name: str, subject: _Subject, run: Train, weights: dict[str, Tensor], reference: Seen | None, say: Say
) -> Seen:
    seen, steps = Seen(), len(subject.steps)

    def keep(key: Key, tensor: Tensor) -> None:
        if reference is None:
            if key in seen.tensors:  # the same batch once more
                seen.random |= not torch.equal(seen.tensors[key], tensor.detach().to("cpu", torch.float32))
            seen.tensors[key] = tensor.detach().to("cpu", torch.float32, copy=True)
        else:
            seen.distances[key] = distance(tensor.detach(), reference.tensors.get(key))

    with restored_modes():
        engine = subject.make(run)
        if reference is None:
            _perturb_constants(engine.model)
            weights.update({key: value.to("cpu", copy=True) for key, value in engine.model.state_dict().items()})
        engine.model.load_state_dict(weights)
        layers = _layers(engine.model)
        autocast = torch.autocast(engine.device.type, torch.bfloat16, enabled=engine.precision == "bf16")
        for seed in (1, 2) if reference is None else (1,):
            engine.seed(seed)
            with torch.no_grad(), autocast, _heard(layers, keep):
                subject.forward(engine, subject.steps[0])
        for step, batch in enumerate(subject.steps, 1):
            say({"event": "alive", "what": f"proving: {name}, step {step} of {steps}"})
            engine.seed(step)
            parts = subject.micro_batches(batch, run)
            each = torch.stack([engine.accumulate(part, first=i == 0) for i, part in enumerate(parts)])
            loss, seen.loss_dtype = each.float().mean(), each.dtype
            if step == 1:
                for key, gradient in _gradients(engine.model, layers):
                    keep(key, gradient / len(parts))
            # Up to the run's own, no faster than the run does: a curve that jumps about would magnify rounding.
            rate = run.optimizer.learning_rate * step / max(steps, run.schedule.warmup)
            engine.update(loss, torch.full_like(loss, math.inf), rate, len(parts))
            seen.losses.append(float(loss))
    return seen


@torch.no_grad()
def _perturb_constants(model: nn.Module) -> None:
    """Add noise, the same in every process, to every parameter whose elements are all equal.

    A bias of 0 that is left out, or a norm's weight of 1 that is applied twice, changes nothing at all.
    """
    for number, parameter in enumerate(model.parameters()):
        if not parameter.is_floating_point() or parameter.numel() < 2:
            continue
        constant = parameter.flatten()[0]
        if bool((parameter == constant).all()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            size = _NOISE * float(constant.abs()) or _NOISE_OF_ZERO
            parameter.add_(size * noise.to(parameter.device, parameter.dtype))


def _layers(model: nn.Module, prefix: str = "") -> dict[str, nn.Module]:
    """The parts of a model that have parameters: the members of a list of modules, and what stands beside it."""
    found: dict[str, nn.Module] = {}
    for name, child in model.named_children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            found |= {f"{prefix}{name}.{member}": each for member, each in child.named_children()}
        elif any(isinstance(each, (nn.ModuleList, nn.ModuleDict)) for each in child.modules()):
            found |= _layers(child, f"{prefix}{name}.")
        else:
            found[prefix + name] = child
    return {name: each for name, each in found.items() if next(each.parameters(), None) is not None}


@contextlib.contextmanager
def _heard(layers: Mapping[str, nn.Module], hear: Callable[[Key, Tensor], None]) -> Iterator[None]:
    """Pass on every tensor that a layer returns."""
    counts = dict.fromkeys(layers, 0)

    def hook_of(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            for tensor in _tensors(output):
                counts[name] += 1
                hear(Key("output", name, str(counts[name])), tensor)

        return hook

    hooks = [layer.register_forward_hook(hook_of(name)) for name, layer in layers.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    members = output.values() if isinstance(output, Mapping) else output if isinstance(output, (list, tuple)) else ()
    return [tensor for member in members for tensor in _tensors(member)]


def _gradients(model: nn.Module, layers: Iterable[str]) -> Iterator[tuple[Key, Tensor]]:
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            layer = next((each for each in layers if name.startswith(each + ".")), "model")
            yield Key("gradient", layer, name), parameter.grad


def _reduced(weights: Mapping[str, Tensor], tokens: int) -> int:
    """The length of all sums that stand behind one another: along one side of a weight forward and along the other
    backward; over the tokens in attention and for a weight's gradient."""
    return sum(sum(weight.shape) for weight in weights.values()) + tokens


def _by_design(best: Train) -> str:
    """The levers that are meant to learn in another way than AdamW in float32 does."""
    levers = [name for name, each in fields().items() if each.lever is not None]
    moved = {name: moves(best, name) for name in levers if moves(best, name) in ("state", "rule")}
    return ", ".join(f"{name}={value_of(best, name)} means {NUMERICS[how]}" for name, how in moved.items())
