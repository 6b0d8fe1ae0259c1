"""The linear layers of a model: which there are, which of them can be replaced, and how."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.errors import UserError
from tilewright.nn.hooks import has_no_hooks
from tilewright.nn.linear import Linear
from tilewright.nn.quantized_linear import QuantizedLinear

Filter = Callable[[torch.nn.Module, str], bool]


@dataclass
class Site:
    """A linear layer, at its first name; `others` are further names of the same module."""

    name: str
    module: torch.nn.Module
    transposed: bool  # the weight is (in, out)
    others: list[str]
    parent: torch.nn.Module
    is_float32: bool  # by `_keep_in_fp32_modules` of transformers, whose models cast to the weight's dtype there

    @property
    def weight(self) -> Tensor:
        """The weight as it is, a parameter."""
        return self.module.weight  # type: ignore[return-value]

    @property
    def matrix(self) -> Tensor:
        """The weight, outputs first."""
        return self.weight.detach().t() if self.transposed else self.weight.detach()

    @property
    def bias(self) -> torch.nn.Parameter | None:
        return self.module.bias  # type: ignore[return-value]

    def replace(self, model: torch.nn.Module, layer: QuantizedLinear) -> None:
        """Put `layer` in the module's place, under all of its names."""
        layer.train(self.module.training)
        for name in (self.name, *self.others):
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, layer)


def linear_layers(model: torch.nn.Module) -> Iterator[Site]:
    """Every linear layer that is a whole module: ``torch.nn.Linear``, ours, and the ``Conv1D`` of transformers."""
    found: dict[int, Site] = {}
    kept = {each for module in model.modules() for each in getattr(module, "_keep_in_fp32_modules", None) or ()}
    for name, module in model.named_modules(remove_duplicate=False):
        kind = type(module)
        is_conv = kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")
        if kind not in (torch.nn.Linear, Linear) and not is_conv:
            continue
        if not name:
            raise UserError("The model is itself a linear layer; give a module that contains it.")
        if id(module) in found:
            found[id(module)].others.append(name)
        else:
            parent = model.get_submodule(name.rpartition(".")[0])
            found[id(module)] = Site(name, module, is_conv, [], parent, not kept.isdisjoint(name.split(".")))
    yield from found.values()


def why_not(site: Site) -> str:
    """Say why a layer cannot be replaced; nothing where it can."""
    weight = site.weight
    if type(weight) not in (torch.nn.Parameter, Tensor):
        return f"its weight is a {type(weight).__name__}"
    if isinstance(site.parent, (torch.nn.TransformerEncoderLayer, torch.nn.MultiheadAttention)):
        return f"{type(site.parent).__name__} reads its weight instead of calling it"
    if site.is_float32:
        return "its model keeps it in float32, and casts to its weight's dtype"
    if not has_no_hooks(site.module):
        return "it has hooks, which another module would not call"
    return ""


def shared_parameters(model: torch.nn.Module) -> dict[int, list[str]]:
    """The names of every parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {key: found for key, found in names.items() if len(found) > 1}


def total_bytes(model: torch.nn.Module) -> int:
    """Bytes of all parameters and buffers, shared ones once."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
