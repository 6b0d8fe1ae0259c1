"""A user's own model, as it is: `package.module:factory`, where `factory()` returns a module and a batch.

The batch is a tensor, a list of tensors, or tensors by the names of the module's arguments. The module returns its
loss: by itself, as `.loss`, as `["loss"]`, or in a tuple such as `(logits, loss)`. It is trained on that one batch
again and again, under the levers that need to know nothing of a model: precision, compile mode, CUDA graphs, threads,
optimizer and micro batch. The batch's
first dimension is the global batch; micro batches are slices of it that count alike. Floating-point tensors of the
batch have the dtype that the precision gives the weights.

A step is counted in tokens where the batch's first tensor, booleans aside, is a matrix of whole numbers: token ids. It
is counted in samples, which are rows of the batch, everywhere else: images, features, labels.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import math
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from tilewright.errors import UserError
from tilewright.measure.profile import profile_steps
from tilewright.measure.work import Watch
from tilewright.train.engine import Engine, check_levers, device_of, restored_modes
from tilewright.train.metrics import Metrics, memory
from tilewright.train.optimizers import PRECISIONS
from tilewright.train.pending import Pending
from tilewright.train.profile import STEPS, WARM, memory_of_a_step
from tilewright.train.schedule import learning_rate
from tilewright.train.schema import RECORDING, Train
from tilewright.train.sentences import short
from tilewright.train.shown import Shown
from tilewright.train.world import World
from tilewright.tune.model_name import arguments_of, check_name, say_no_factory, say_not_importable
from tilewright.tune.outcome import outcome_of


@dataclass(frozen=True)
class Batch:
    """The tensors that a module takes: by position, or by name where there are names.

    >>> batch = Batch([torch.ones(4, 3), torch.arange(4)])
    >>> batch.rows, batch.unit, batch.count, batch.splits, len(batch.split(2))
    (4, 'samples', 4, True, 2)
    >>> ids = Batch([torch.zeros(4, 9, dtype=torch.int64)])
    >>> ids.unit, ids.count
    ('tokens', 36)
    """

    tensors: list[Tensor]
    names: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        """The first dimension."""
        return next((tensor.shape[0] for tensor in self.tensors if tensor.dim()), 1)

    @property
    def splits(self) -> bool:
        """Whether all tensors have the same rows, so that a micro batch is a slice of each."""
        return all(tensor.dim() and tensor.shape[0] == self.rows for tensor in self.tensors)

    @property
    def unit(self) -> str:
        """What a step's speed is counted in: "tokens" or "samples"."""
        return "tokens" if self._token_ids is not None else "samples"

    @property
    def count(self) -> int:
        """Tokens or samples of the batch."""
        ids = self._token_ids
        return self.rows if ids is None else ids.numel()

    @property
    def _token_ids(self) -> Tensor | None:
        first = next((tensor for tensor in self.tensors if tensor.dtype != torch.bool), None)
        is_ids = first is not None and first.dim() == 2 and not (first.is_floating_point() or first.is_complex())
        return first if is_ids else None

    def through(self, module: Callable[..., Any]) -> Any:
        """Return the module's output for this batch."""
        return module(**dict(zip(self.names, self.tensors, strict=True))) if self.names else module(*self.tensors)

    def split(self, rows: int) -> list[Batch]:
        """Split the batch into slices of `rows` rows."""
        if rows == self.rows:
            return [self]
        if not self.splits:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in self.tensors)
            raise UserError(
                f"The batch's tensors are {shapes} and cannot be cut into micro batches, which takes the same first "
                f"dimension in all of them; set micro_batch={self.rows}."
            )
        pieces = zip(*(tensor.split(rows) for tensor in self.tensors), strict=True)
        return [Batch(list(piece), self.names) for piece in pieces]

    def to(self, device: torch.device, dtype: torch.dtype) -> Batch:
        """Move the batch to a device, and its floating-point tensors to a dtype."""
        return self._each(lambda tensor: tensor.to(device, dtype if tensor.is_floating_point() else None))

    # What an engine asks of a batch that it replays.

    def clone(self) -> Batch:
        return self._each(torch.clone)

    def copy_(self, other: Batch) -> None:
        for own, new in zip(self.tensors, other.tensors, strict=True):
            own.copy_(new)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        return Batch([change(tensor) for tensor in self.tensors], self.names)


@dataclass(frozen=True)
class Own:
    """What a factory has returned, checked."""

    module: nn.Module
    batch: Batch

    def facts(self) -> dict[str, Any]:
        """Return what a search has to know: the global batch, its size, and whether it splits into micro batches."""
        return {
            "global_batch": self.batch.rows, "splits": self.batch.splits, "unit": self.batch.unit,
            "count": self.batch.count,
            "parameters": sum(parameter.numel() for parameter in self.module.parameters()),
            "tensors": len(list(self.module.parameters())),
        }  # fmt: skip


def load(text: str, path: Sequence[str] = (), *, seed: int = 0) -> Own:
    """The module and batch of `package.module:factory`, which is looked for in the folders of `path` first.

    Whatever the factory draws, it draws the same for the same seed: so two trials train the same weights on the same
    batch.
    """
    factory, arguments = _find(text, path), arguments_of(text)
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        made = factory(**arguments)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"The factory {text} raised {_one_line(error)}; put that right in its code.") from error
    if not isinstance(made, (tuple, list)) or len(made) != 2 or not isinstance(made[0], nn.Module):
        _refuse(text, f"returned {_kind(made)}; let it return a torch.nn.Module and a batch, in this order.")
    module, batch = made[0], _batch(text, made[1])
    parameters = list(module.parameters())
    if not parameters:
        _refuse(text, "returned a model without parameters; there is nothing to train.")
    if not any(parameter.requires_grad for parameter in parameters):
        _refuse(text, "returned a model whose parameters are all frozen; set requires_grad on those to train.")
    homes = sorted({str(parameter.device) for parameter in parameters})
    if len(homes) > 1:
        _refuse(text, f"returned a model on {' and '.join(homes)}; put all of it on one device.")
    away = next((str(tensor.device) for tensor in batch.tensors if str(tensor.device) != homes[0]), None)
    if away is not None:
        _refuse(text, f"returned a model on {homes[0]} and a batch on {away}; put both on the same device.")
    if parameters[0].is_meta:
        _refuse(text, "returned a model without memory, on the device meta; make it on the CPU or the GPU.")
    return Own(module, batch)


_importing = False  # whether a user's module is being imported right now


def refuse_while_importing() -> None:
    """Refuse a study that is begun by the very script which a trial imports to find its model."""
    if _importing:
        raise UserError(
            "tilewright.tune was called while a trial imported this script to find the model; put the call under "
            "`if __name__ == '__main__':`."
        )


def _find(text: str, path: Sequence[str]) -> Callable[[], Any]:
    global _importing
    where, name = check_name(text)
    sys.path[:0] = [folder for folder in path if folder not in sys.path]
    _importing = True
    try:
        module = importlib.import_module(where)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise say_not_importable(text, _one_line(error)) from error
    finally:
        _importing = False
    factory = getattr(module, name, None)
    if factory is None:
        raise say_no_factory(text, [each for each, value in vars(module).items() if callable(value)])
    if not callable(factory):
        raise UserError(f"The model is {text!r} and {name} is no function; give one that returns a module and a batch.")
    return factory


def _batch(text: str, given: Any) -> Batch:
    named = isinstance(given, Mapping)
    values = [given] if isinstance(given, Tensor) else given.values() if named else given
    if not isinstance(given, (Tensor, Mapping, tuple, list)) or not all(isinstance(value, Tensor) for value in values):
        _refuse(text, f"returned {_kind(given)} as batch; let it be a tensor, a list or a dictionary of tensors.")
    tensors = list(values)
    if not tensors or any(tensor.numel() == 0 for tensor in tensors):
        _refuse(text, "returned an empty batch; give it at least one row.")
    return Batch(tensors, tuple(given) if named else ())


def _refuse(text: str, why: str) -> NoReturn:
    raise UserError(f"The factory {text} {why}")


def _kind(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"({', '.join(type(each).__name__ for each in value[:5])}{', ...' if len(value) > 5 else ''})"
    if isinstance(value, Mapping):
        return f"a dictionary of {', '.join(sorted({type(each).__name__ for each in value.values()}))}"
    return "None" if value is None else f"an object of type {type(value).__name__}"


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {short(error)}"


def loss_of(output: Any) -> Tensor:
    """The loss in what a module returned, as a scalar.

    Of a tuple it is the one number among its members that has a gradient.

    >>> loss_of({"loss": torch.ones(1, requires_grad=True)}).shape
    torch.Size([])
    >>> loss_of((torch.zeros(2, 3), torch.tensor(1.5, requires_grad=True))).item()
    1.5
    """
    loss = output
    if not isinstance(output, Tensor):
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if loss is None and isinstance(output, (tuple, list)):
            found = [each for each in output if isinstance(each, Tensor) and each.numel() == 1 and each.requires_grad]
            if len(found) > 1:
                raise UserError(f"The model returned {len(found)} numbers with a gradient; let it return one loss.")
            loss = found[0] if found else None
    if not isinstance(loss, Tensor):
        raise UserError(
            f"The model returned {_kind(output)}, which is no loss and has none; let it return the loss, a tuple with "
            "it such as (logits, loss), or something with .loss or ['loss']."
        )
    if loss.numel() != 1:
        raise UserError(f"The model returned a loss of shape {tuple(loss.shape)}; let it return one number, the mean.")
    if not loss.requires_grad:
        raise UserError("The model's loss has no gradient; compute it from the parameters, and not under no_grad.")
    return loss.reshape(())


class OwnEngine(Engine):
    """An engine for a module that comes with its batch."""

    def _loss(self, tokens: Batch) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            return loss_of(tokens.through(self.forward))


def train(own: Own, config: Train, shown: Shown) -> None:
    """Train as `tilewright.train.loop.train` does: the same levers, the same metrics, read a step behind."""
    device = device_of(config)
    with restored_modes(), torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        run = _Run(own, config, shown, device)
        shown.begin(own.facts())
        if config.profile:
            run.profile()
        while run.step < config.steps:
            run.advance()
        run.settle()


def check_step(own: Own, config: Train) -> dict[str, float]:
    """Take one training step, so that a model that no trial can run is refused before the first trial.

    Nothing is compiled or recorded. A step that runs out of memory is no refusal: a smaller micro batch may fit.

    Returns:
        What the step asked for: FLOPs of matmuls and of attention, bytes that all else moves, ops, and bytes at the
        peak; empty where it ran out of memory.
    """
    plain = dataclasses.replace(
        config, steps=1, profile=False, compile="none", cuda_graphs=False, rules="none",
        schedule=dataclasses.replace(config.schedule, name="constant", warmup=0),
    )  # fmt: skip
    steps: list[Metrics] = []
    watch = Watch()
    try:
        with watch:
            train(own, plain, Shown(step=lambda metrics, _: steps.append(metrics)))
    except Exception as error:
        if outcome_of(error)[0] == "out of memory":
            return {}
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"The model raised {_one_line(error)} in its first training step; put that right in its code."
        ) from error
    if steps[0].loss is None or steps[0].gradient_norm is None:
        what = "loss" if steps[0].loss is None else "gradient"
        raise UserError(f"The model's {what} is not finite in its first training step; check the batch and the loss.")
    return {**_counted(watch), "peak": float(steps[0].memory_allocated or 0)}


def draws(own: Own, device: torch.device) -> bool:
    """Whether a forward of the module in training mode draws random numbers: it changes what is drawn next."""
    own.module.to(device).train()
    batch = own.batch.split(1)[0] if own.batch.splits else own.batch
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
        before = _random_state(device)
        batch.to(device, next(own.module.parameters()).dtype).through(own.module)
        return any(not torch.equal(one, other) for one, other in zip(before, _random_state(device), strict=True))


def _random_state(device: torch.device) -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def _counted(watch: Watch) -> dict[str, float]:
    found = {"matmul": 0.0, "attention": 0.0, "bytes": 0.0, "ops": float(len(watch.asked))}
    for each in watch.asked:
        if each.dtype:
            found["attention" if "attention" in each.op else "matmul"] += each.flops
        else:
            found["bytes"] += each.bytes
    return found


def run(text: str, levers: Mapping[str, Any], *, steps: int) -> None:
    """Train the model that a text names under some levers, by their dotted names, and print a line a step."""
    from tilewright.tune.search.space import with_values

    config = dataclasses.replace(with_values(Train(), levers), steps=steps)

    def show(metrics: Metrics, _: int) -> None:
        speed = f"{metrics.tokens_per_second:,.0f} a second" if metrics.tokens_per_second else ""
        print(f"step {metrics.step}: loss {metrics.loss}, {metrics.seconds * 1e3:.1f} ms, {speed}", flush=True)

    own = load(text, [str(Path.cwd())], seed=config.seed)
    train(own, config, Shown(step=show))


class _Run:
    def __init__(self, own: Own, config: Train, shown: Shown, device: torch.device) -> None:
        self.shown, self.device = shown, device
        rows = own.batch.rows
        micro = config.micro_batch or rows
        self.config = dataclasses.replace(config, global_batch=rows, micro_batch=micro, accumulation=0)
        self.accumulation = self.config.batch_sizes(1).accumulation
        check_levers(self.config, device, self.accumulation)
        self.engine = OwnEngine(self.config, device, World(), [], own.module.to(device))
        self.batch = own.batch.to(device, PRECISIONS[self.engine.precision][0])
        self.micro_batches = self.batch.split(micro)
        self.limit = torch.tensor(math.inf, device=device)
        self.records = config.cuda_graphs or config.compile in RECORDING
        self.peak = self.step = 0
        self.pending: Pending | None = None
        self.before: Pending | None = None  # the last step that was read

    def advance(self) -> None:
        """Put a step's work on the device, then read the step before."""
        self.step += 1
        began = time.perf_counter()
        self.engine.seed(self.step)
        losses = [self.engine.accumulate(micro, first=index == 0) for index, micro in enumerate(self.micro_batches)]
        loss = torch.stack(losses).float().mean()
        rate = learning_rate(self.step, self.config.steps, self.config.optimizer.learning_rate, self.config.schedule)
        found = torch.cat((loss[None], self.engine.update(loss, self.limit, rate, self.accumulation)))
        ready = None
        if self.device.type == "cuda":
            found = torch.empty(found.shape, pin_memory=True).copy_(found, non_blocking=True)
            ready = torch.cuda.Event(enable_timing=True)
            ready.record()
        ended, held = time.perf_counter(), memory(self.device)
        # A replay allocates nothing: its recording did. What a compiler tries out in the first step is not the run's.
        recorded = self.records and (self.config.cuda_graphs or self.step > 1)
        if recorded and held["memory_allocated"] is not None:
            held["memory_allocated"] = self.peak = max(self.peak, held["memory_allocated"])
        self.settle()
        self.pending = Pending(self.step, began, rate, found, ready, ended, held)

    def settle(self) -> None:
        """Report the metrics of the pending step."""
        if self.pending is None:
            return
        step, self.pending = self.pending, None
        if step.ready is not None:
            step.ready.synchronize()
        loss, norm, skipped = step.found.tolist()
        seconds, self.before = step.seconds(self.before), step
        metrics = Metrics(
            step=step.step, loss=loss if math.isfinite(loss) else None,
            gradient_norm=norm if math.isfinite(norm) else None, skipped=bool(skipped), learning_rate=step.rate,
            samples=step.step * self.batch.rows, seconds=seconds, tokens_per_second=self.batch.count / seconds,
            tflops=0.0, mfu=None, hfu=None, convention="none", data_wait=0.0, **step.memory,
        )  # fmt: skip
        self.shown.step(metrics, self.config.steps)

    def profile(self) -> None:
        for _ in range(WARM):
            self.advance()
        held = memory_of_a_step(self.engine, self.advance)
        spent = profile_steps(self.advance, steps=STEPS, trace=None)
        self.shown.profile({"time": spent.as_dict(), "memory_measured": held})
