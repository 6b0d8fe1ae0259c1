"""A few of the inputs that each layer of a model gets."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

ROWS = 64  # of a layer


def sample_inputs(model: torch.nn.Module, modules: Mapping[str, torch.nn.Module], inputs: Any) -> dict[str, Tensor]:
    """Call the model once and return up to 64 rows of each module's input, evenly spread, in host memory.

    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> {name: rows.shape for name, rows in sample_inputs(model, {"2": model[2]}, torch.randn(100, 4)).items()}
    {'2': torch.Size([64, 8])}
    """
    found: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[torch.nn.Module, tuple[Any, ...]], None]:
        def hook(_: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
            if name not in found and arguments:
                rows = arguments[0].detach().reshape(-1, arguments[0].shape[-1])
                spread = torch.linspace(0, len(rows) - 1, min(ROWS, len(rows)), device=rows.device).round().long()
                found[name] = rows[spread].cpu()

        return hook

    handles = [module.register_forward_pre_hook(keep(name)) for name, module in modules.items()]
    try:
        with torch.no_grad(), evaluation(model):
            if isinstance(inputs, Mapping):
                model(**inputs)
            else:
                model(*inputs) if isinstance(inputs, tuple) else model(inputs)
    finally:
        for handle in handles:
            handle.remove()
    return found


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
