"""What each layer of a model gets as its input: a few rows, and second moments over all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

ROWS = 64  # of a layer

Inputs = Any  # of one call of a model: a tensor, a tuple of arguments, or a mapping of keyword arguments
Batches = list[Inputs]


@dataclass
class Sample:
    """What is known of a layer's inputs.

    Attributes:
        rows: up to 64 of them, in host memory, evenly spread over each batch.
        moments: the mean of x x^T, ``(in, in)``, float32; None where nobody asked for it.
        count: how many rows the moments are of.
    """

    rows: list[Tensor] = field(default_factory=list)
    moments: Tensor | None = None
    count: int = 0

    def add(self, x: Tensor, keep: int, has_moments: bool) -> None:
        """Take the inputs of a call: keep some rows of them, and add up their moments."""
        x = x.detach().reshape(-1, x.shape[-1])
        if not len(x):
            return
        spread = torch.linspace(0, len(x) - 1, min(keep, len(x)), device=x.device).round().long()
        if sum(map(len, self.rows)) < ROWS:
            self.rows.append(x[spread].cpu())
        if has_moments:
            single = x.float()
            more, count = single.t() @ single, self.count + len(x)
            old = torch.zeros_like(more) if self.moments is None else self.moments.mul_(self.count / count)
            self.moments, self.count = old.add_(more, alpha=1 / count), count


def as_batches(inputs: Any) -> Batches:
    """A list of what a model is called with; anything but a list is one call.

    >>> as_batches((1, 2)), as_batches([1, 2])
    ([(1, 2)], [1, 2])
    """
    return inputs if isinstance(inputs, list) else [inputs]


def sample_inputs(
    model: torch.nn.Module, modules: Mapping[str, torch.nn.Module], inputs: Any, has_moments: bool = False
) -> dict[str, Sample]:
    """Call the model and return what each module got, in the order in which they were called first.

    Args:
        model: the model; it is called in evaluation mode and without gradients.
        modules: the layers, by name.
        inputs: of one call, or a list of those of several.
        has_moments: whether to sum up the second moments of their inputs.

    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> found = sample_inputs(model, {"2": model[2]}, [torch.randn(100, 4), torch.randn(9, 4)], True)
    >>> {name: (sample.moments.shape, sample.count) for name, sample in found.items()}
    {'2': (torch.Size([8, 8]), 109)}
    """
    found: dict[str, Sample] = {}
    batches = as_batches(inputs)
    keep = -(-ROWS // max(1, len(batches)))

    def listen(name: str) -> Callable[[torch.nn.Module, tuple[Any, ...]], None]:
        def hook(_: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
            if arguments:
                found.setdefault(name, Sample()).add(arguments[0], keep, has_moments)

        return hook

    handles = [module.register_forward_pre_hook(listen(name)) for name, module in modules.items()]
    try:
        with torch.no_grad(), evaluation(model):
            for batch in batches:
                call(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return found


def call(model: torch.nn.Module, inputs: Inputs) -> Any:
    """Call a model with the inputs of one call."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


@contextlib.contextmanager
def evaluation(model: torch.nn.Module) -> Iterator[None]:
    """Have a model in evaluation mode, and each module in its own again behind the context."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
