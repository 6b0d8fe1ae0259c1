"""Quantize the linear layers of a model in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tilewright.errors import UserError
from tilewright.nn.quantized_linear import QuantizedLinear
from tilewright.quantize.formats import Format, Int8, Packed
from tilewright.quantize.layers import Filter, Site, linear_layers, shared_parameters, total_bytes, why_not
from tilewright.quantize.report import Layer, Report
from tilewright.quantize.samples import sample_inputs

MOST_ERROR = 0.3


def quantize_(
    model: torch.nn.Module,
    config: Format | None = None,
    filter_fn: Filter | None = None,
    *,
    inputs: Tensor | tuple[Any, ...] | Mapping[str, Any] | None = None,
    most_error: float = MOST_ERROR,
) -> Report:
    """Replace the linear layers of any model by `nn.QuantizedLinear`, and report what that changed.

    Everything that can be refused is refused before the first layer changes. Then one layer after the other is
    quantized and its old weight released, the largest first: at no time is there more than the model as it was and one
    layer, and where memory is too small for that, the model is still as it was.

    Args:
        model: any module. ``torch.nn.Linear`` and the ``Conv1D`` of transformers are replaced; subclasses of them,
            such as those of PEFT, and layers with hooks are not, and the report names the latter.
        config: the format, such as ``Int8()``, ``Fp8()``, ``Int4(group=64)``; ``Int8()`` where it is left out.
        filter_fn: ``filter_fn(module, name)`` says whether a layer is to be quantized; all are where it is left out.
        inputs: what the model is called with once, without gradients, to measure the error of each layer's outputs: a
            tensor, a tuple of arguments, or a mapping of keyword arguments.
        most_error: a layer whose outputs, or without `inputs` whose weight, would differ by a larger relative error
            stays as it was.

    A head that shares its weight with an embedding gets a copy of its own; the embedding stays, and so does the memory
    that it takes. Two linear layers that share a weight share the packed one.

    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
    >>> report = quantize_(model, Int8(), lambda module, name: name != "2")
    >>> model[0], len(report.quantized)
    (QuantizedLinear(in_features=64, out_features=32, int8, bias=True), 1)
    """
    config = Int8() if config is None else config
    if not isinstance(config, Format):
        raise UserError(f"The format is {config!r}; give one such as tilewright.quantize.Int8().")
    if not isinstance(most_error, (int, float)) or not most_error > 0:
        raise UserError(f"most_error is {most_error!r}; give a number above 0.")
    before, layers, sites = total_bytes(model), [], []
    for site in linear_layers(model):
        if filter_fn is not None and not filter_fn(site.module, site.name):
            continue
        why = why_not(site)
        if why:
            layers.append(_layer(site, site.weight.numel() * site.weight.element_size(), left_out=why))
            continue
        config.refuse(site.matrix, f"The weight of {site.name}")
        sites.append(site)
    if not sites and not layers:
        raise UserError("The model has no linear layer to quantize; look at its modules and at filter_fn.")
    order = {site.name: place for place, site in enumerate(sites)}
    notes = _notes(model, sites)
    twins = _twins(sites)
    samples = {} if inputs is None else sample_inputs(model, {site.name: site.module for site in sites}, inputs)
    done: dict[str, Packed] = {}
    sites.sort(key=lambda site: site.weight.numel())
    while sites:
        site = sites.pop()  # the last reference to the old weight, with `site` itself
        twin = twins.get(site.name)
        packed = done[twin] if twin in done else config.quantize(site.matrix)
        if twin is not None:
            done[twin] = packed
        layers.append(_replace(model, site, config, packed, samples.pop(site.name, None), most_error))
        del site
    layers.sort(key=lambda layer: order.get(layer.name, -1))
    return Report(config.name, before, total_bytes(model), layers, notes)


def _replace(
    model: torch.nn.Module, site: Site, config: Format, packed: Packed, sample: Tensor | None, most: float
) -> Layer:
    """Replace a layer, unless that errs by more than `most`."""
    weight_error, output_error = _errors(site.matrix, packed, config, sample)
    error = weight_error if output_error is None else output_error
    size = sum(tensor.numel() * tensor.element_size() for tensor in packed.values())
    if not error <= most:  # nor where it is no number
        why = f"its error of {error:.1%} is above most_error={most:g}"
        return _layer(site, site.weight.numel() * site.weight.element_size(), weight_error, output_error, why)
    layer = _layer(site, size, weight_error, output_error)
    site.replace(model, QuantizedLinear(packed["weight"], packed["scale"], packed.get("zero"), site.bias))
    return layer


def _errors(matrix: Tensor, packed: Packed, config: Format, sample: Tensor | None) -> tuple[float, float | None]:
    """Relative errors of the weight and, for a sample of inputs, of the outputs."""
    single = matrix.float()
    difference = config.dequantize(packed) - single
    weight_error = _ratio(difference, single)
    if sample is None or not len(sample):
        return weight_error, None
    rows = sample.to(single.device).float()
    return weight_error, _ratio(rows @ difference.t(), rows @ single.t())


def _ratio(difference: Tensor, truth: Tensor) -> float:
    size = truth.norm().item()
    return difference.norm().item() / size if size else difference.norm().item()


def _layer(
    site: Site, after: int, weight_error: float | None = None, output_error: float | None = None, left_out: str = ""
) -> Layer:
    outputs, inputs = site.matrix.shape
    before = site.weight.numel() * site.weight.element_size()
    return Layer(site.name, outputs, inputs, before, after, weight_error, output_error, left_out)


def _twins(sites: list[Site]) -> dict[str, str]:
    """For each layer that shares its weight with another one, the name of the first of them."""
    groups: dict[int, list[str]] = {}
    for site in sites:
        groups.setdefault(id(site.weight), []).append(site.name)
    return {name: group[0] for group in groups.values() if len(group) > 1 for name in group}


def _notes(model: torch.nn.Module, sites: list[Site]) -> list[str]:
    """A sentence for each weight that a layer shares with something that stays."""
    shared, notes = shared_parameters(model), []
    replaced = {f"{name}.weight" for site in sites for name in (site.name, *site.others)}
    for site in sites:
        stays = [name for name in shared.get(id(site.weight), []) if name not in replaced]
        if stays:
            notes.append(
                f"{site.name} shared its weight with {stays[0]}, which stays: the layer has a packed copy of its own."
            )
    return notes
