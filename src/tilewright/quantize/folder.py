"""Folders of quantized models: ours, and those of GPTQ, AWQ and compressed-tensors. Nothing in them is executed.

`open_quantized` says which layers are quantized and which tensors are not of one; values are read layer by layer.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilewright.errors import UserError
from tilewright.models.folder import Saved, open_tensors
from tilewright.plan.huggingface.config import read_json, shorten
from tilewright.quantize.facts import FACTS, METHOD, check_files, read_facts, versions
from tilewright.quantize.formats import FORMATS, format_of
from tilewright.quantize.formats.awq import read_awq
from tilewright.quantize.formats.compressed import read_compressed, shape_of
from tilewright.quantize.formats.gptq import read_gptq
from tilewright.quantize.formats.words import Read

PARTS = ("weight", "scale", "zero", "order")  # of a layer of ours
_GPTQ = ("qweight", "qzeros", "scales", "g_idx")
_COMPRESSED = ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape")


@dataclass(frozen=True)
class Stored:
    """A quantized layer of an open folder: ``(out, in)``, and its tensors once somebody reads them."""

    shape: tuple[int, int]
    read: Callable[[], Read]


@dataclass(frozen=True)
class QuantizedFolder:
    """An open folder: its quantized layers, and the tensors that belong to none."""

    layers: dict[str, Stored]
    plain: dict[str, Saved]
    spare: frozenset[str] = frozenset()  # of the latter, what a model need not have: AutoGPTQ's biases of zeros


def open_quantized(folder: Path, opened: ExitStack) -> QuantizedFolder:
    """Look at a quantized folder, whose files stay open as long as `opened`, and refuse one that cannot be read."""
    if (folder / FACTS).is_file():
        return _open_ours(folder, read_facts(folder), opened)
    settings = _settings(folder)
    if settings.get("quant_method") == METHOD:  # as save_pretrained writes it
        return _of_ours(folder, settings.get("layers"), open_tensors(folder, opened))
    marker, parts, reader, shape = _way(folder, settings)
    saved = open_tensors(folder, opened, any_name=True)
    layers: dict[str, Stored] = {}
    for key in [key for key in saved if key.endswith(f".{marker}")]:
        name = key.removesuffix(f".{marker}")
        mine = {each: saved.pop(f"{name}.{each}") for each in parts if f"{name}.{each}" in saved}
        layers[name] = Stored(shape(mine, shorten(name)), partial(_read, reader, mine, shorten(name)))
    if not layers:
        method = settings.get("quant_method", "gptq")
        raise UserError(f"{folder} has no layer of {method}: no tensor is named {marker}.")
    biases = [f"{name}.bias" for name in layers if f"{name}.bias" in saved]
    return QuantizedFolder(layers, saved, frozenset(name for name in biases if not bool(saved[name].load().any())))


def read_folder(folder: str | os.PathLike[str]) -> Iterator[tuple[str, Read]]:
    """The quantized layers of a folder, one after the other, by the name of the linear layer.

    >>> import tempfile
    >>> from safetensors.torch import save_file
    >>> folder = Path(tempfile.mkdtemp())
    >>> settings = {"quant_method": "awq", "bits": 4, "version": "gemm"}
    >>> _ = (folder / "config.json").write_text(json.dumps({"quantization_config": settings}))
    >>> layer = {"qweight": torch.zeros(64, 2).int(), "qzeros": torch.zeros(1, 2).int(), "scales": torch.ones(1, 16)}
    >>> save_file({f"head.{key}": tensor for key, tensor in layer.items()}, folder / "model.safetensors")
    >>> [(name, read.format.group) for name, read in read_folder(folder)]
    [('head', 64)]
    """
    with ExitStack() as opened:
        for name, stored in sorted(open_quantized(Path(folder), opened).layers.items()):
            yield name, stored.read()


def _read(reader: Callable[..., Read], saved: Mapping[str, Saved], name: str) -> Read:
    return reader({key: each.load() for key, each in saved.items()}, name=name)


def _way(folder: Path, settings: Mapping[str, Any]) -> tuple[str, tuple[str, ...], Callable[..., Read], Any]:
    """(the tensor that every layer has, all that it may have, who reads it, how its shape is seen)."""
    method, bits = settings.get("quant_method", "gptq"), settings.get("bits", settings.get("w_bit"))
    if method == "compressed-tensors":
        _check_compressed(folder, settings)
        return _COMPRESSED[0], _COMPRESSED, read_compressed, _shape_of_compressed
    kind = settings.get("version", "gemm") if method == "awq" else settings.get("checkpoint_format", "gptq")
    if method in ("gptq", "awq") and (bits != 4 or type(bits) is not int):
        raise UserError(f"{folder} has weights of {shorten(bits)} bits; GPTQ and AWQ of 4 bits can be read.")
    if method == "awq" and str(kind).lower() == "gemm":
        return _GPTQ[0], _GPTQ, read_awq, lambda mine, name: _shape(mine, 1, 8)
    if method == "gptq" and kind in ("gptq", "gptq_v2"):
        return _GPTQ[0], _GPTQ, partial(read_gptq, v2=kind == "gptq_v2"), lambda mine, name: _shape(mine, 8, 1)
    raise UserError(
        f"{folder} is quantized by {shorten(method)} as {shorten(kind)}; gptq as gptq or gptq_v2, awq as gemm, "
        "compressed-tensors as pack-quantized, and tilewright can be read."
    )


def _shape(mine: Mapping[str, Saved], inputs: int, outputs: int) -> tuple[int, int]:
    """Return the shape of a weight from its qweight, which packs `inputs` inputs or `outputs` outputs into a word."""
    shape = mine["qweight"].shape
    return (shape[1] * outputs, shape[0] * inputs) if len(shape) == 2 else (0, 0)


def _shape_of_compressed(mine: Mapping[str, Saved], name: str) -> tuple[int, int]:
    return shape_of({key: each.load() for key, each in mine.items() if key == "weight_shape"}, name)


def _check_compressed(folder: Path, settings: Mapping[str, Any]) -> None:
    """Refuse what is no plain 4-bit weight with 16-bit activations."""
    kind, groups = settings.get("format"), settings.get("config_groups")
    if kind != "pack-quantized" or not isinstance(groups, Mapping) or not groups:
        raise UserError(f"{folder} is quantized by compressed-tensors as {shorten(kind)}; pack-quantized can be read.")
    sparse = settings.get("sparsity_config") or {}
    if not isinstance(sparse, Mapping) or sparse.get("format", "dense") != "dense":
        raise UserError(f"{folder} has sparse weights, which cannot be read; take a folder whose weights are dense.")
    for group in groups.values():
        group = group if isinstance(group, Mapping) else {}
        weights = group.get("weights")
        weights = weights if isinstance(weights, Mapping) else {}
        if any(group.get(name) is not None for name in ("input_activations", "output_activations")):
            raise UserError(f"{folder} has quantized activations, which cannot be read; take one of weights alone.")
        bits, strategy = weights.get("num_bits"), weights.get("strategy")
        if bits != 4 or weights.get("type", "int") != "int" or strategy not in ("group", "channel"):
            raise UserError(
                f"{folder} has weights of {shorten(bits)} bits, {shorten(weights.get('type'))}, by "
                f"{shorten(strategy)}; integers of 4 bits by group or channel can be read."
            )


def _settings(folder: Path) -> Mapping[str, Any]:
    """What a folder says of how it is quantized."""
    for name in ("config.json", "quantize_config.json"):
        if (folder / name).is_file():
            found = read_json(folder / name)
            settings = found.get("quantization_config") if name == "config.json" else found
            if isinstance(settings, Mapping):
                return settings
    raise UserError(
        f"{folder} does not say how it is quantized: it has no {FACTS}, and its config.json no quantization_config."
    )


def _open_ours(folder: Path, facts: dict[str, Any], opened: ExitStack) -> QuantizedFolder:
    """A folder that `save` or `tilewright quantize` wrote, if its files are as they were written."""
    check_files(folder, facts)
    saved = open_tensors(folder, opened)
    for some in {id(each.file): each for each in saved.values()}.values():
        said = (some.file.metadata() or {}).get("tilewright", "null")
        if not versions(facts["layers"]).items() <= _parsed(said).items():
            raise UserError(
                f"{some.path} has the formats {shorten(said)}, and {FACTS} others; known are {', '.join(FORMATS)}."
            )
    for name, first in facts["aliases"].items():
        if first not in saved or name in saved:
            raise UserError(f"{folder / FACTS} has {shorten(name)} share a tensor that is not there; copy it again.")
        saved[name] = saved[first]
    return _of_ours(folder, facts["layers"], saved)


def _parsed(text: str) -> dict[str, Any]:
    """An object of JSON; empty where it is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _of_ours(folder: Path, layers: Any, saved: dict[str, Saved]) -> QuantizedFolder:
    """Layers in our formats, as `layers` names these."""
    if not isinstance(layers, Mapping) or not layers:
        raise UserError(f"{folder} does not say which layers are quantized; copy the folder again.")
    found: dict[str, Stored] = {}
    for name, options in layers.items():
        kind = format_of(options, str(name))
        mine = {each: saved.pop(f"{name}.{each}") for each in PARTS if f"{name}.{each}" in saved}
        if "weight" not in mine or len(mine["weight"].shape) != 2:
            raise UserError(f"{folder} lacks the weight of {shorten(name)}, which it says is quantized; copy it again.")
        outputs, width = mine["weight"].shape
        shape = outputs, width * (2 if kind.weight_dtype == torch.uint8 else 1)
        more = mine.keys() - kind.shapes(*shape).keys() - {"order"}
        if more:
            raise UserError(f"{name} has tensors that {kind.name} does not have; write the folder again.")
        found[name] = Stored(shape, partial(_read_ours, kind, mine, shape, name))
    return QuantizedFolder(found, saved)


def _read_ours(kind: Any, saved: Mapping[str, Saved], shape: tuple[int, int], name: str) -> Read:
    tensors: dict[str, Tensor] = {key: each.load() for key, each in saved.items()}
    order = tensors.pop("order", None)
    kind.check(tensors, *shape, name)
    if order is not None:
        whole = order.dtype in (torch.int32, torch.int64) and order.shape == (shape[1],)
        if not whole or not torch.equal(order.sort().values, torch.arange(shape[1], dtype=order.dtype)):
            raise UserError(f"order of {name} does not have each of {shape[1]} inputs once; copy the folder again.")
    return Read(kind, tensors, order)
