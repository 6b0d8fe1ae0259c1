"""A quantized model on disk.

    FOLDER/model.safetensors    the state_dict; its metadata names the formats and their versions
    FOLDER/quantized.json       which layer has which format, names that share a tensor, the size and SHA-256 of the
                                former, and the report, if there is one

The hash finds what a disk or a copy broke, and not malice. So nothing here is a pickle, a tensor is taken only where
its name, dtype and shape are those that the model calls for, and scales, zero points and codes are looked at.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilewright.errors import UserError
from tilewright.measure.results import write_json
from tilewright.nn.quantized_linear import QuantizedLinear
from tilewright.plan.huggingface import shorten
from tilewright.quantize.formats import FORMATS, Format, format_of
from tilewright.quantize.layers import Site, linear_layers, shared_parameters
from tilewright.quantize.report import Report

SCHEMA = 1
WEIGHTS, FACTS = "model.safetensors", "quantized.json"
_LARGEST_HEADER = 1 << 25  # bytes of a safetensors file's list of tensors
_LARGEST_FACTS = 1 << 26
_PARTS = ("weight", "scale", "zero")


def save(model: torch.nn.Module, folder: str | os.PathLike[str], report: Report | None = None) -> None:
    """Write a quantized model to a new or empty folder, which `load` reads.

    >>> from tilewright.quantize import Int8, quantize_
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 2))
    >>> report = quantize_(model, Int8())
    >>> folder = Path(tempfile.mkdtemp()) / "quantized"
    >>> save(model, folder, report)
    >>> other = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 2))
    >>> load(other, folder)
    >>> x = torch.randn(3, 8)
    >>> torch.equal(other(x), model(x))
    True
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    layers = {name: _describe(module) for name, module in model.named_modules() if type(module) is QuantizedLinear}
    if not layers:
        raise UserError("The model has no quantized layer; call quantize_ first.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is there already and not empty; choose another folder.")
    tensors, aliases = _distinct(model.state_dict())
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
            made = Path(temporary) / folder.name
            made.mkdir()
            save_file(tensors, made / WEIGHTS, metadata={"format": "pt", "tilewright": json.dumps(_versions(layers))})
            facts = {
                "schema": SCHEMA, "bytes": (made / WEIGHTS).stat().st_size, "sha256": _hash(made / WEIGHTS),
                "layers": layers, "aliases": aliases, "report": None if report is None else report.as_dict(),
            }  # fmt: skip
            write_json(made / FACTS, facts)
            # safetensors makes its file readable by nobody else.
            (made / WEIGHTS).chmod((made / FACTS).stat().st_mode & 0o777)
            os.replace(made, folder)
    except OSError as error:
        raise UserError(f"Cannot write {folder}: {error.strerror}; choose another place.") from error


def load(model: torch.nn.Module, folder: str | os.PathLike[str]) -> None:
    """Read what `save` wrote into a model of the same architecture, in place: the quantized layers and all else.

    The model is as it was built, with linear layers, on the meta device too. It changes only once everything in the
    folder has been checked.
    """
    folder = Path(folder)
    facts = _facts(folder)
    tensors = _tensors(folder, facts)
    sites = {site.name: site for site in linear_layers(model)}
    replaced: list[tuple[Site, QuantizedLinear]] = []
    for name, options in facts["layers"].items():
        site = sites.get(name)
        if site is None:
            raise UserError(f"{folder} has {shorten(name)} quantized, which is no linear layer of the model.")
        parts = {part: tensors[f"{name}.{part}"] for part in _PARTS if f"{name}.{part}" in tensors}
        known = format_of(options, name)
        outputs, features = site.matrix.shape
        known.check(parts, outputs, features, name)
        if set(parts) != set(known.shapes(outputs, features)):
            raise UserError(f"{name} has tensors that {known.name} does not have; write the folder again.")
        bias = None if site.bias is None else torch.nn.Parameter(site.bias.detach(), site.bias.requires_grad)
        replaced.append((site, QuantizedLinear(parts["weight"], parts["scale"], parts.get("zero"), bias)))
    _compare(folder, model, replaced, tensors)
    device = next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))
    for site, layer in replaced:
        site.replace(model, layer)
    shared = shared_parameters(model).values()
    moved = {key: tensor.to(device) for key, tensor in {id(each): each for each in tensors.values()}.items()}
    model.load_state_dict({name: moved[id(tensor)] for name, tensor in tensors.items()}, assign=True)
    for first, *others in shared:
        for name in others:
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, model.get_parameter(first))


def _compare(
    folder: Path, model: torch.nn.Module, replaced: list[tuple[Site, QuantizedLinear]], tensors: dict[str, Tensor]
) -> None:
    """Refuse tensors that are not those of the model with these layers replaced."""
    state = model.state_dict()
    wanted = {name: tuple(tensor.shape) for name, tensor in state.items()}
    for site, layer in replaced:
        for name in (site.name, *site.others):
            del wanted[f"{name}.weight"]
            wanted |= {f"{name}.{part}": tuple(tensor.shape) for part, tensor in layer.state_dict().items()}
    for verb, names in (("lacks", wanted.keys() - tensors.keys()), ("has", tensors.keys() - wanted.keys())):
        if names:
            more = "and the model has" if verb == "lacks" else "for which the model has no place"
            raise UserError(f"{folder} {verb} {shorten(min(names))}, {more}; build the model that was quantized.")
    packed = {
        f"{name}.{part}" for site, layer in replaced for name in (site.name, *site.others) for part in layer._buffers
    }
    floats = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    for name in wanted.keys() & state.keys() - packed:
        given, own = tensors[name].dtype, state[name].dtype
        if given not in floats if own.is_floating_point else given != own:
            raise UserError(
                f"{shorten(name)} of {folder} is {given}, and the model's {own}; build the model that was quantized."
            )
    for name, shape in wanted.items():
        if tuple(tensors[name].shape) != shape:
            raise UserError(
                f"{shorten(name)} of {folder} has shape {tuple(tensors[name].shape)}, and the model's {shape}; build "
                "the model that was quantized."
            )


def _facts(folder: Path) -> dict[str, Any]:
    """What quantized.json says, once it says all that is needed."""
    if not (folder / FACTS).is_file():
        raise UserError(f"{folder} has no {FACTS}; give a folder that tilewright.quantize.save wrote.")
    try:
        with (folder / FACTS).open("rb") as file:
            facts = json.loads(file.read(_LARGEST_FACTS))
    except OSError as error:
        raise UserError(f"Cannot read {folder / FACTS}: {error.strerror}; give a folder that you can read.") from error
    except (ValueError, RecursionError):
        facts = None
    if not isinstance(facts, dict):
        raise UserError(f"{folder / FACTS} is no JSON that was written here; copy the folder again.")
    if facts.get("schema") != SCHEMA:
        raise UserError(
            f"{folder / FACTS} has schema {shorten(facts.get('schema'))}, and this Tilewright reads {SCHEMA}; quantize "
            "the model again."
        )
    layers, aliases = facts.get("layers"), facts.get("aliases")
    sound = isinstance(layers, dict) and isinstance(aliases, dict) and isinstance(facts.get("sha256"), str)
    if not sound or not all(isinstance(name, str) for name in aliases.values()):  # type: ignore[union-attr]
        raise UserError(f"{folder / FACTS} does not say which layers are quantized; copy the folder again.")
    return facts


def _tensors(folder: Path, facts: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of the file under all of their names, if it is the file that was written."""
    from safetensors import safe_open

    path = folder / WEIGHTS
    try:
        if not path.is_file():
            raise UserError(f"There is no file {path}; copy the folder again.")
        with path.open("rb") as file:
            start = file.read(8)
        header = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if path.stat().st_size != facts.get("bytes") or header > _LARGEST_HEADER or _hash(path) != facts["sha256"]:
            raise UserError(f"{path} is not the file that was written, by its size or SHA-256; copy the folder again.")
        with safe_open(path, "pt") as file:
            said = json.loads((file.metadata() or {}).get("tilewright", "null"))
            if said != _versions(facts["layers"]):
                raise UserError(
                    f"{path} has the formats {shorten(said)}, and {FACTS} others; known are {', '.join(FORMATS)}."
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dictionary
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror}; give a folder that you can read.") from error
    except Exception as error:  # safetensors' own
        raise UserError(f"{path} is no whole safetensors file; copy the folder again.") from error
    for name, first in facts["aliases"].items():
        if first not in tensors or name in tensors:
            raise UserError(f"{folder / FACTS} has {shorten(name)} share a tensor that is not there; copy it again.")
        tensors[name] = tensors[first]
    return tensors


def _describe(layer: QuantizedLinear) -> dict[str, Any]:
    """The options of a layer's format."""
    kind = next(kind for kind in FORMATS.values() if kind.weight_dtype == layer.weight.dtype)
    if kind.name != "int4":
        return kind().options()
    options: dict[str, Any] = {"group": layer.in_features // len(layer.scale), "zeros": layer.zero is not None}
    described: Format = format_of({"format": kind.name, "version": kind.version, **options})
    return described.options()


def _versions(layers: dict[str, Any]) -> dict[str, Any]:
    """The version of each format that layers have."""
    options = [each for each in layers.values() if isinstance(each, dict)]
    return {
        str(each.get("format")): each.get("version") for each in sorted(options, key=lambda o: str(o.get("format")))
    }


def _distinct(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(the tensors, each once and contiguous; further names, each with the first one)."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in state.items():
        key = (tensor.data_ptr(), tensor.device, tensor.dtype, tuple(tensor.shape), tensor.stride())
        if tensor.numel() and key in first:
            aliases[name] = first[key]
            continue
        first[key] = name
        tensors[name] = tensor.detach().contiguous().clone() if tensor._is_view() else tensor.detach().contiguous()
    return tensors, aliases


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
