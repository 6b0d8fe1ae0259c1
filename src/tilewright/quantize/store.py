"""A quantized model on disk.

    FOLDER/model.safetensors    the state_dict; its metadata names the formats and their versions
    FOLDER/quantized.json       which layer has which format, names that share a tensor, size and SHA-256 of the former,
                                and the report, if there is one

Nothing here is a pickle, a tensor is taken only where its name, dtype and shape are those that the model calls for, and
scales, zero points and codes are looked at.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilewright.errors import UserError
from tilewright.models.folder import TABLES
from tilewright.nn.quantized_linear import QuantizedLinear
from tilewright.plan.huggingface.config import shorten
from tilewright.quantize.facts import FACTS, describe, metadata, write_facts
from tilewright.quantize.folder import PARTS, open_quantized
from tilewright.quantize.formats.words import Read
from tilewright.quantize.layers import Site, linear_layers, shared_parameters
from tilewright.quantize.report import Report

WEIGHTS = "model.safetensors"
_LOCK = "tilewright.lock"  # held while a folder is written


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

    layers = {name: describe(module) for name, module in model.named_modules() if type(module) is QuantizedLinear}
    if not layers:
        raise UserError("The model has no quantized layer; call quantize_ first.")
    refuse_taken(Path(folder))
    tensors, aliases = _distinct(model.state_dict())

    def write(made: Path) -> None:
        save_file(tensors, made / WEIGHTS, metadata=metadata(layers))
        write_facts(made, layers, aliases=aliases, report=None if report is None else report.as_dict())

    write_folder(Path(folder), write)


def refuse_taken(folder: Path) -> None:
    """Refuse to write where something is."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is there already and not empty; choose another folder.")


def write_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a folder, and give it its name once everything is in it and on the disk.

    What a killed process has left of an earlier attempt is removed.
    """
    from safetensors import SafetensorError

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder)
        with (
            tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary,
            (Path(temporary) / _LOCK).open("w") as lock,
        ):
            fcntl.flock(lock, fcntl.LOCK_EX)
            made = Path(temporary) / folder.name
            made.mkdir()
            write(made)
            # safetensors makes its files readable by nobody else.
            mode = (made / FACTS).stat().st_mode & 0o777
            for path in made.iterdir():
                path.chmod(mode)
                with path.open("rb") as file:
                    os.fsync(file.fileno())
            os.replace(made, folder)
    except OSError as error:
        raise UserError(f"Cannot write {folder}: {error.strerror}; choose another place.") from error
    except SafetensorError as error:  # of what reads, `open_tensors` has made a sentence
        raise UserError(
            f"Cannot write {folder} ({str(error).splitlines()[0]}); make room or choose another."
        ) from error


def _remove_abandoned(folder: Path) -> None:
    """Remove temporary folders for this one whose lock nobody holds."""
    for lock in folder.parent.glob(f".{glob.escape(folder.name)}-*/{_LOCK}"):
        with contextlib.suppress(OSError), lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent)


def load(model: torch.nn.Module, folder: str | os.PathLike[str]) -> None:
    """Read a quantized folder into a model of the same architecture, in place: the quantized layers and all else.

    The folder is one that `save` or ``tilewright quantize`` wrote, or a Hugging Face folder of GPTQ, AWQ or
    compressed-tensors with weights of 4 bits. The model is as it was built, with linear layers, on the meta device too.
    It changes only once everything in the folder has been checked.
    """
    folder = Path(folder)
    with ExitStack() as opened:
        found = open_quantized(folder, opened)
        names = model.state_dict().keys()
        plain = {
            name: saved for name, saved in found.plain.items()
            if name in names or not (name in found.spare or TABLES.fullmatch(name))
        }  # fmt: skip
        values = {key: saved.load() for key, saved in {id(each): each for each in plain.values()}.items()}
        tensors = {name: values[id(saved)] for name, saved in plain.items()}
        reads = {name: stored.read() for name, stored in found.layers.items()}
    sites = {site.name: site for site in linear_layers(model)}
    replaced = []
    for name, read in reads.items():
        site = sites.get(name)
        if site is None:
            raise UserError(f"{folder} has {shorten(name)} quantized, which is no linear layer of the model.")
        replaced.append((site, _layer(site, read)))
        parts = {**read.packed, "order": read.order}
        tensors |= {f"{name}.{part}": tensor for part, tensor in parts.items() if tensor is not None}
    packed = {f"{name}.weight" for name in reads}
    for shared in shared_parameters(model).values():  # a tied head, which others store once
        here = next((name for name in shared if name in tensors and name not in packed), None)
        if here is not None:
            tensors |= {name: tensors[here] for name in shared if name not in packed}
    for site, _ in replaced:
        for other in site.others:
            mine = {part: tensors.get(f"{site.name}.{part}") for part in (*PARTS, "bias")}
            tensors |= {f"{other}.{part}": tensor for part, tensor in mine.items() if tensor is not None}
    _compare(folder, model, replaced, tensors)
    device = next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))
    moved = {key: tensor.to(device) for key, tensor in {id(each): each for each in tensors.values()}.items()}
    for site, layer in replaced:
        site.replace(model, layer)
    still_shared = shared_parameters(model).values()
    model.load_state_dict({name: moved[id(tensor)] for name, tensor in tensors.items()}, assign=True)
    for first, *others in still_shared:
        for name in others:
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, model.get_parameter(first))


def _layer(site: Site, read: Read) -> QuantizedLinear:
    """The layer that takes a site's place, if it is of its shape."""
    outputs, features = site.matrix.shape
    read.format.check(read.packed, outputs, features, site.name)
    bias = None if site.bias is None else torch.nn.Parameter(site.bias.detach(), site.bias.requires_grad)
    return QuantizedLinear(read.packed["weight"], read.packed["scale"], read.packed.get("zero"), bias, read.order)


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
