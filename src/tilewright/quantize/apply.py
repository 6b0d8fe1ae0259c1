"""Quantize the linear layers of a model in place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tilewright.errors import UserError
from tilewright.nn.quantized_linear import QuantizedLinear
from tilewright.quantize.calibrate import METHODS, quantize_calibrated
from tilewright.quantize.formats import Format, Int8, Packed
from tilewright.quantize.layers import Filter, Site, linear_layers, shared_parameters, total_bytes, why_not
from tilewright.quantize.report import Layer, Report
from tilewright.quantize.samples import Sample, sample_inputs

MOST_ERROR = 0.3


def quantize_(
    model: torch.nn.Module,
    config: Format | None = None,
    filter_fn: Filter | None = None,
    *,
    inputs: Any = None,
    calibrate: str = "",
    act_order: bool = False,
    most_error: float = MOST_ERROR,
) -> Report:
    """Replace the linear layers of any model by `nn.QuantizedLinear`, and report what that changed.

    Everything that can be refused is refused before the first layer changes. Then one layer after the other is
    quantized and its old weight released: at no time is there more than the model as it was and one layer, and to
    calibrate the moments of some layers' inputs, a quarter of the model's bytes or those of one layer.

    Args:
        model: any module. ``torch.nn.Linear`` and the ``Conv1D`` of transformers are replaced; subclasses of them,
            such as those of PEFT, and layers with hooks are not, and the report names the latter.
        config: the format, such as ``Int8()``, ``Fp8()``, ``Int4(group=64)``; ``Int8()`` where it is left out.
        filter_fn: ``filter_fn(module, name)`` says whether a layer is to be quantized; all are where it is left out.
        inputs: what the model is called with, without gradients, to measure the error of each layer's outputs and to
            calibrate: a tensor, a tuple of arguments, a mapping of keyword arguments, or a list of these, one a call.
        calibrate: "scales" searches scales for the inputs that layers get; "gptq" also has the weights that are not
            yet rounded compensate the error of those that are. Both go in the order of the model's calls, so that
            later layers see what earlier ones have become. Left out: round to nearest.
        act_order: of "gptq": round the columns of the largest inputs first.
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
    if not isinstance(model, torch.nn.Module):
        raise UserError(f"The model is {model!r}; give a torch.nn.Module, or use quantize_folder for a folder.")
    _check_options(config, inputs, calibrate, act_order, most_error)
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
    done: dict[str, Packed] = {}
    for some, samples in _rounds(model, sites, inputs, calibrate):
        while some:
            site = some.pop()  # the last reference to the old weight, with `site` itself
            sample = samples.pop(site.name, Sample())
            twin = twins.get(site.name)
            packed, remark = (done[twin], "") if twin in done else _quantize(site, config, sample, calibrate, act_order)
            if calibrate and (remark or not sample.count):
                notes.append(f"{site.name}: {remark or 'it got no inputs: rounded to nearest'}.")
            if twin is not None:
                done[twin] = packed
            layers.append(_replace(model, site, config, packed, sample, most_error))
            del site
    layers.sort(key=lambda layer: order.get(layer.name, -1))
    return Report(config.name, before, total_bytes(model), layers, notes)


def _check_options(config: Any, inputs: Any, calibrate: Any, act_order: Any, most_error: Any) -> None:
    if not isinstance(config, Format):
        raise UserError(f"The format is {config!r}; give one such as tilewright.quantize.Int8().")
    if not isinstance(most_error, (int, float)) or not most_error > 0:
        raise UserError(f"most_error is {most_error!r}; give a number above 0.")
    if calibrate not in ("", *METHODS):
        raise UserError(f"calibrate is {calibrate!r}; choose {' or '.join(METHODS)}, or leave it out.")
    if calibrate and (inputs is None or (isinstance(inputs, list) and not inputs)):
        raise UserError(f"calibrate is {calibrate!r} and there are no inputs; give what the model is called with.")
    if act_order and calibrate != "gptq":
        raise UserError("act_order is an order of gptq; leave it out, or set calibrate to gptq.")


def _rounds(
    model: torch.nn.Module, sites: list[Site], inputs: Any, calibrate: str
) -> Iterator[tuple[list[Site], dict[str, Sample]]]:
    """Take the sites, some at a time, the next one last, with what is known of their inputs.

    To calibrate, in the order of the model's calls, as many as there is room for moments of; else all at once, the
    largest first.
    """
    samples = {} if inputs is None else _samples(model, sites, inputs, has_moments=False)
    if not calibrate:
        sites.sort(key=lambda site: site.weight.numel())
        yield sites, samples
        return
    place = {name: number for number, name in enumerate(samples)}
    sites.sort(key=lambda site: -place.get(site.name, len(place)))
    room = total_bytes(model) // 4
    while sites:
        some, taken = [sites.pop()], 0
        while sites and (taken := taken + 4 * some[-1].matrix.shape[1] ** 2) < room:
            some.append(sites.pop())
        some.reverse()
        yield some, _samples(model, some, inputs, has_moments=True)


def _samples(model: torch.nn.Module, sites: list[Site], inputs: Any, has_moments: bool) -> dict[str, Sample]:
    return sample_inputs(model, {site.name: site.module for site in sites}, inputs, has_moments)


def _quantize(site: Site, config: Format, sample: Sample, method: str, act_order: bool) -> tuple[Packed, str]:
    """The packed weight of a layer, and a remark where its inputs allowed less than was asked."""
    if sample.moments is None:
        return config.quantize(site.matrix), ""
    return quantize_calibrated(site.matrix, config, sample.moments.to(site.matrix.device), method, act_order=act_order)


def _replace(model: torch.nn.Module, site: Site, config: Format, packed: Packed, sample: Sample, most: float) -> Layer:
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


def _errors(matrix: Tensor, packed: Packed, config: Format, sample: Sample) -> tuple[float, float | None]:
    """Relative errors of the weight and, for a sample of inputs, of the outputs."""
    single = matrix.float()
    difference = config.dequantize(packed) - single
    weight_error = _ratio(difference, single)
    if not sample.rows:
        return weight_error, None
    rows = torch.cat(sample.rows).to(single.device).float()
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
    """Map each layer that shares its weight with others to the name of the first of them."""
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
